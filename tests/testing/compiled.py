"""Compiles the Triton kernels that an op launches, for a Hopper GPU that need not be there: python compiled.py CASE [long].

Prints the name of every kernel that is compiled, in order. The launches are the product's own; tensors lie on the CPU and
nothing runs. What the interpreter lets pass, such as a variable that changes its type in a loop, is refused here.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from atma_sweep.kernels.custom_ops import load_kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

B, H, J = 1, 4, 2
F32 = torch.float32
ATTENTION = "atma_sweep.kernels.attention"
SHARED_MEMORY = 232_448
"""Bytes that a program may have on Hopper."""


class Hopper:
    """The part of Triton's driver that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def utils(self) -> SimpleNamespace:
        size = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132}
        return SimpleNamespace(get_device_properties=lambda _device: size)


def only_compile() -> None:
    """From here on a launch compiles its kernel and says so."""
    driver.set_active(Hopper())  # type: ignore[arg-type]
    run = JITFunction.run

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        print(self.__name__, flush=True)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_alone  # type: ignore[method-assign]


def random_tensor(t: int, d: int, dtype: torch.dtype, heads: int = H) -> torch.Tensor:
    return torch.empty(B, t, heads, d, dtype=dtype)


def softmax(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.attention.softmax import triton as kernels

    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    o, lse = kernels.softmax_forward(q, k, v, window=window)
    kernels.softmax_backward(q, lse, q, k, v, o, lse, window=window)


def polar(t: int, d: int, window: int | None, dtype: torch.dtype, path: str = "triton") -> None:
    kernels = load_kernels(f"{ATTENTION}.polar", path)
    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    null, beta, v_null = torch.empty(t, H), torch.empty(H), torch.empty(H, d)
    c, mag, *rows = kernels.polar_forward(q, k, v, null, beta, v_null, window=window, floor=1e-6)
    kernels.polar_backward(q, mag, q, k, v, null, beta, v_null, c, *rows, window=window)


def polar_on_hopper(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    with_processors("polar")
    polar(t, d, window, dtype, "gluon")


def with_processors(op: str) -> Any:
    """Kernels in Gluon as on a GPU of 132 multiprocessors."""
    kernels = load_kernels(f"{ATTENTION}.{op}", "gluon")
    kernels.processors = lambda _device: 132
    return kernels


def forgetting(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.attention.forgetting import triton as kernels

    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    o, lse, *halves = kernels.forward(q, k, v, torch.empty(B, t, H), factor=0.1, window=window)
    kernels.backward(q, q, k, v, o, lse, (halves[0], halves[1]), factor=0.1, window=window)


def forgetting_on_hopper(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    for reach in {window, None}:  # a window has code of its own
        with_processors("forgetting").forward(q, k, v, torch.empty(B, t, H), factor=0.1, window=reach)


def of_four(op: str, fourth: torch.Tensor, t: int, d: int, windows: set[int | None], dtype: torch.dtype) -> None:
    """An attention of q, k, v and a fourth tensor, both ways."""
    kernels = load_kernels(f"{ATTENTION}.{op}")
    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    for reach in windows:
        o, lse = kernels.forward(q, k, v, fourth, factor=0.1, window=reach)
        kernels.backward(q, q, k, v, fourth, o, lse, factor=0.1, window=reach)


def threshold(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    of_four("threshold", torch.empty(B, H, t), t, d, {window}, dtype)


def contextual(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    of_four("contextual", torch.empty(B, H, t, 64), t, d, {window, None}, dtype)


def relative(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    of_four("relative", torch.empty(H, 513), t, d, {window, None}, dtype)


def polysketch(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.attention.polysketch import triton as kernels

    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    for sketch, block in ((32, 256), (20, 8192)):  # blocks with sums over earlier ones, and a single block
        draws = torch.empty(2, J, d, sketch)
        o, inverse = kernels.forward(q, k, v, draws, block=block, scale=0.1)
        kernels.backward(q, q, k, v, draws, o, inverse, block=block, scale=0.1)


def wall(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.attention.wall import triton as kernels

    for heads in (H, J):  # gates of a query head's own, and of a key head
        q, k, v, gates = (
            random_tensor(t, d, dtype),
            random_tensor(t, d, dtype, J),
            random_tensor(t, d, dtype, J),
            random_tensor(t, d, F32, heads),
        )
        o, lse, q_, k_, edges = kernels.forward(q, k, v, gates, factor=0.1, window=window)
        kernels.backward(q, q_, k_, v, gates, o, lse, edges, factor=0.1, window=window)


def wall_on_hopper(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    for heads in (H, J):
        for reach in {window, None}:
            with_processors("wall").forward(q, k, v, random_tensor(t, d, F32, heads), factor=0.1, window=reach)


def gated_delta(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.gated_delta import triton as kernels

    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    gates, state = torch.empty(B, t, H), torch.empty(B, H, d, d)
    for first in (None, state):
        r, last, saved = kernels.forward(q, k, v, gates, gates, first)
        kernels.backward(r, last, q, k, v, gates, gates, first, *saved)


def as_fla_asks() -> None:
    """Fla asks torch for the GPU when it is imported, and for its shared memory at a launch, here of a tensor without one.

    Also refuses a launch that would choose among configurations by the clock, and one with too little shared memory.
    """
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.cuda.device_count = lambda: 1
    import fla.utils.hardware

    fla.utils.hardware.get_all_max_shared_mem = lambda: {0: SHARED_MEMORY, None: SHARED_MEMORY}
    launch, tune = JITFunction.run, Autotuner.run

    def fits(self: Any, *args: Any, **options: Any) -> Any:
        kernel = launch(self, *args, **options)
        assert kernel.metadata.shared <= SHARED_MEMORY, f"{self.__name__} takes {kernel.metadata.shared} bytes"
        return kernel

    def settled(self: Any, *args: Any, **options: Any) -> Any:
        assert len(self.configs) == 1, f"{self.base_fn.__name__} has {len(self.configs)} configurations"
        return tune(self, *args, **options)

    JITFunction.run, Autotuner.run = fits, settled  # type: ignore[method-assign]


def gated_delta_fla(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    as_fla_asks()
    from atma_sweep.kernels.gated_delta import torch_op

    q, k, v, gates = (
        random_tensor(t, d, dtype),
        random_tensor(t, d, dtype),
        random_tensor(t, d, dtype),
        torch.empty(B, t, H),
    )
    for first in (None, torch.empty(B, H, d, d)):
        r, last, *saved = torch_op.fla_forward(q, k, v, gates, gates, first)
        for g_last in (None, last):
            torch_op.fla_backward(r, g_last, v, gates, first, *saved)


def channelwise_fla(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    as_fla_asks()
    from atma_sweep.kernels.channelwise_delta import op as channelwise

    q, k, v, gamma = (
        random_tensor(t, d, dtype),
        random_tensor(t, d, dtype),
        random_tensor(t, d, dtype),
        random_tensor(t, d, F32),
    )
    beta, state = torch.empty(B, t, H), torch.empty(B, H, d, d)
    r, last, *saved = channelwise.fla_forward(q, k, v, gamma, beta, state)
    for g_last in (None, last):
        channelwise.fla_backward(r, g_last, q, k, v, beta, state, *saved)


def path_fla(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    as_fla_asks()
    from atma_sweep.kernels.attention.path import op as path

    q, k, v = (random_tensor(t, d, dtype, heads) for heads in (H, J, J))
    w, beta = random_tensor(t, d, F32, J), torch.empty(B, t, J)
    path.fla_backward(path.fla_forward(q, k, v, w, beta, 0.1), q, k, v, w, beta, 0.1)


def omega(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.omega import torch_op

    square = torch.empty(B * H, d, d)
    # the defaults of omega and of atlas, and a momentum without orthogonal steps
    for orthogonal, slow, c in ((False, False, 16), (True, True, 64), (False, True, 16)):
        n, seen = t // c, c + 15
        q, k, v = random_tensor(n * c, d, F32), random_tensor(n * c + 15, d, F32), random_tensor(n * c + 15, d, dtype)
        states, felt, share, orthogonality = (torch.empty(n, B * H, *more) for more in ((c,), (c, seen), (seen,), ()))
        rates = (states, None if orthogonal else felt, states if slow and not orthogonal else None)
        rest = (share, orthogonality) if slow else (None, None)
        inputs = (v, *rates, *rest, orthogonality if orthogonal else None)
        y, last, momentum, q, k, *saved = torch_op.forward(q, k, *inputs, square, square)
        torch_op.backward(y, last, momentum if slow else None, q, k, *inputs, *saved)


def convolutions(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.conv import triton as kernels

    x, taps = torch.empty(B, t, 3 * d, dtype=dtype), torch.empty(d, 3)
    kernels.gated_backward(kernels.gated_forward(x, taps), x, taps)
    x, taps = random_tensor(t, d, dtype), torch.empty(H * d, 4)
    for norm in (False, True):
        kernels.canon_backward(kernels.canon_forward(x, taps, norm), x, taps, norm)


def cross_entropy(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.cross_entropy import triton as kernels

    logits, targets = torch.empty(t, 50257, dtype=dtype), torch.empty(t, dtype=torch.int64)
    for cap in (15.0, float("inf")):
        kernels.rows(logits, targets, cap, True)


def eight_bits(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.fp8 import rows

    ag = torch.empty(t, 64 * d, dtype=dtype)
    rows.cast_rows(ag[:, : 24 * d])
    rows.gate_rows(ag, ag[:, : 32 * d])


def sketch(t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.sketch import triton as kernels

    xs, directions = [torch.empty(t, 8 * d, dtype=dtype)], torch.empty(2, 1, 64, 8 * d, dtype=dtype)
    z, squares = kernels.forward(xs, directions, True)
    kernels.backward(z, squares, xs, directions, True)


def steps(t: int, d: int, window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.conv_step import triton as conv
    from atma_sweep.kernels.delta_step import triton as delta
    from atma_sweep.kernels.paged import triton as paged
    from atma_sweep.kernels.paged.page_tables import PAGE

    q, k, v = (torch.empty(B, heads, d, dtype=dtype) for heads in (H, J, J))
    pool, tables = torch.empty(3, PAGE, J, d, dtype=dtype), torch.empty(B, t // PAGE + 1, dtype=torch.int32)
    raw = torch.empty(H)
    for null in ([], [raw, raw, raw, raw, torch.empty(H, d)]):
        for splits in (1, 4):
            paged.attend(q, pool, pool, tables, tables[:, 0], null, scale=0.1, window=window or 0, splits=splits)
    paged.put(k, v, pool, pool, tables, tables[:, 0])
    slots = torch.empty(B, dtype=torch.int64)
    for gamma in (torch.empty(B, H), torch.empty(B, H, d)):
        delta.step(q, k, v, gamma, torch.empty(B, H), torch.empty(3, H, d, d), slots)
    for taps in (1, 3, 4):
        tails, filters = torch.empty(3, taps - 1, 1000, dtype=dtype), torch.empty(1000, taps, dtype=dtype)
        conv.step(torch.empty(B, 1000, dtype=dtype), tails, slots, filters, residual=True)
        conv.gated(torch.empty(B, 3000, dtype=dtype), tails, slots, filters)
        tails, filters = (torch.empty(shape, dtype=dtype) for shape in ((3, taps - 1, 8 * d), (8 * d, taps)))
        conv.heads(torch.empty(B, 8 * d, dtype=dtype), tails, slots, filters, H, J, H, norm=True)


def row_products(_t: int, d: int, _window: int | None, dtype: torch.dtype) -> None:
    from atma_sweep.kernels.row_linear import triton as kernels

    kernels._starts_early = lambda _device: True  # as on a Hopper GPU
    norm, bias, x, w, few, under, wide, tails, filters = (
        torch.empty(shape, dtype=dtype)
        for shape in (d, 4 * d, (1, d), (4 * d, d), (70, d), (1, 70), (120, d), (3, 2, 40), (40, 3))
    )
    for gate in (0, 1, 2):
        kernels.product(x, w, bias, norm, 1e-6, gate, None)
    kernels.product(x, few, None, None, 1e-6, 0, under)
    kernels.conv_step(x, wide, None, norm, 1e-6, tails, torch.empty(1, dtype=torch.int64), filters)


if __name__ == "__main__":
    only_compile()
    # longer than what threshold attention takes at once, with a tail; a window that cuts inside tiles adds to the code, and
    # takes nothing from it
    compile_case = globals()[sys.argv[1]]
    compile_case(4500, 128, 150, torch.bfloat16)
    if "long" in sys.argv:
        compile_case(397, 64, None, torch.bfloat16)
    assert triton.knobs.runtime.interpret is False
