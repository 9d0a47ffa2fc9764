"""Single kernels beside their rivals: milliseconds, FLOP/s and bytes/s, as the model calls them.

That is compiled, with what surrounds a kernel in its op, and with the host far ahead: calls are replayed as a CUDA graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.contextual import op as contextual
from ...kernels.attention.polar import op as polar
from ...kernels.attention.relative import op as relative
from ...kernels.attention.softmax import op as softmax
from ...kernels.attention.threshold import op as threshold
from ...kernels.conv import op as conv
from ...kernels.cross_entropy import op as cross_entropy
from ...kernels.dispatch import BackendChoice
from ...kernels.fp8 import op as fp8_linear
from ...kernels.gated_delta import op as gated_delta
from ...kernels.norms import rms_norm
from ...kernels.paged.page_tables import PAGE
from ...kernels.row_linear.op import row_linear
from ...results.console.text import choices_hint
from ..errors import SweepError
from . import kernel_variants, single_token
from .ceilings import Ceilings, Timing, as_cuda_graph, ceilings, interleaved
from .report import tell as report_line
from .subprocess_usage import child_arguments, rows_of_child

H, J, D = 8, 2, 128
"""Query heads, KV heads and head size of the 370M network."""
WIDTH, VOCABULARY = 1024, 50304
TOKENS = 16 * 2048
POSITIONS, REACH = 64, 512
"""Of contextual and of relative attention, as their mixers have them."""
OPS = (
    "polar", "softmax", "forgetting", "wall_head", "wall_kv", "threshold", "contextual", "relative", "gated_delta", *kernel_variants.MEMORY_OPS, "gated_conv",
    "canon", "cross_entropy", "polar_distractor", "fp8_linear", "decode", "row_linear",
)  # fmt: skip
NAIVE = "torch"
"""The variant that is torch's own operations one by one."""
EAGER = "eager"
"""Polar attention over the whole T x T matrix, the form that the paper compares its kernel with."""
FOREIGN = ("forgetting", "wall_head", "wall_kv")
"""Ops beside flash-linear-attention's kernels, whose tuner may compile for many minutes: a child process times them."""
CASE_LIMIT_S = 240.0
"""Seconds that a child process may spend on one case."""


@dataclass
class Case:
    """One op at one size. A variant takes the inputs and returns what the loss is taken of."""

    op: str
    size: str
    inputs: Callable[[], list[Tensor]]
    variants: dict[str, Callable[..., Any]]
    flops: float
    """Of the forward pass."""
    moved: float
    """Fewest bytes of the forward pass."""
    backward: float
    """FLOPs, or bytes where they decide, of the backward pass over those of the forward pass."""
    rival: str | None = None
    """The variant that others are divided by."""
    eager: Collection[str] = (NAIVE,)
    """Variants that the compiler does not get."""
    ungated: Collection[str] = ()
    """Variants that take q, k and v alone, whatever else there is."""

    def compiled(self) -> dict[str, Callable[..., Any]]:
        """The variants as the model calls them; torch's own formulas as they are."""
        torch.compiler.reset()  # else the sizes of one op count as recompilations of one function
        return {
            name: call if name in self.eager else torch.compile(call, fullgraph=True, dynamic=False)
            for name, call in self.variants.items()
        }


@dataclass
class KernelRow:
    """One variant of one case; times in milliseconds, shares of what the chip was measured to do in the same run."""

    op: str
    size: str
    variant: str
    forward: float
    both: float | None
    """Forward and backward; None where only the forward fits or is asked for."""
    both_low: float | None
    both_high: float | None
    share_forward: float
    share_both: float | None
    to_rival: float | None
    """Forward and backward over the rival's; forward alone where there is nothing else."""
    peak_memory: int
    """Bytes beside the inputs."""


def check_ops(selected: Sequence[str]) -> None:
    """Raises SweepError for a name that no case has."""
    for name in selected:
        if name not in OPS:
            raise SweepError(f"no kernel {name!r} is timed; {choices_hint(name, OPS)}")


def cases(selected: Sequence[str], device: torch.device, *, without_fla: str | None = None) -> Iterator[Case]:
    """Every case whose op is selected; all of them for an empty selection.

    With `without_fla`, a reason, no kernel of flash-linear-attention stands beside attention with gates.
    """
    for case in _all(device, selected, without_fla):
        if not selected or case.op in selected:
            yield case


def run(
    selected: Sequence[str], device: torch.device, *, rounds: int = 10, tell: Callable[[str], None] = print
) -> tuple[Ceilings, list[KernelRow]]:
    """Time every variant of every case, the variants of a case in turns; ops beside foreign kernels in a child process."""
    limits = ceilings(device)
    rows: list[KernelRow] = []
    own = [op for op in selected or OPS if op not in FOREIGN]
    for case in cases(own, device) if own else ():
        rows += timed_case(case, limits, rounds, tell)
    for op in FOREIGN:
        if op in (selected or FOREIGN):
            rows += _foreign_rows(op, device, limits, rounds, tell)
    return limits, rows


def timed_case(case: Case, limits: Ceilings, rounds: int, tell: Callable[[str], None]) -> list[KernelRow]:
    """Time one case, with a line before, since half a minute may pass, and its rows after."""
    tell(f"{case.op}, {case.size}: compiling and timing {', '.join(case.variants)}")
    rows = _rows(case, limits, rounds)
    tell("\n".join(map(_line, rows)))
    torch.cuda.empty_cache()
    return rows


def _foreign_rows(
    op: str, device: torch.device, limits: Ceilings, rounds: int, tell: Callable[[str], None]
) -> list[KernelRow]:
    """Time an op of FOREIGN in a child process; cases that it does not end in time are timed here without fla."""
    torch.cuda.empty_cache()
    found, why = rows_of_child(
        [f"{__package__}.kernels", op, str(device), str(rounds), *map(str, limits)], CASE_LIMIT_S
    )
    rows = [KernelRow(**row) for case in found for row in case]
    if why is not None:
        tell(f"{op}: timed again without fla: {why}")
        for number, case in enumerate(cases([op], device, without_fla=why)):
            if number >= len(found):
                rows += timed_case(case, limits, rounds, tell)
    return rows


def print_rows(op: str, device: str, rounds: str, flops: str, bytes_per_s: str) -> None:
    """Time an op and print the rows of each of its cases as one line of JSON; what the child process of a benchmark does."""
    limits = Ceilings(float(flops), float(bytes_per_s))
    for case in cases([op], torch.device(device)):
        rows = timed_case(case, limits, int(rounds), report_line)
        print(json.dumps([asdict(row) for row in rows]), flush=True)


def table(limits: Ceilings, rows: Sequence[KernelRow]) -> str:
    """Markdown."""
    head = [
        limits.line,
        "",
        "| op | size | variant | forward ms | both ms | range | share forward | share both | to rival | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [_line(row) for row in rows])


def _line(row: KernelRow) -> str:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    span = "" if row.both_low is None else f"{row.both_low:.3f} to {row.both_high:.3f}"
    return (
        f"| {row.op} | {row.size} | {row.variant} | {row.forward:.3f} | {number(row.both, '.3f')} | {span} | "
        f"{row.share_forward:.0%} | {number(row.share_both, '.0%')} | {number(row.to_rival, '.2f')} | "
        f"{row.peak_memory / 2**20:.0f} |"
    )


def _rows(case: Case, limits: Ceilings, rounds: int) -> list[KernelRow]:
    inputs, variants = case.inputs(), case.compiled()
    wanted = [x for x in inputs if x.requires_grad]
    with torch.no_grad():
        shaped = [x for x in _tuple(next(iter(variants.values()))(*inputs)) if x.is_floating_point()]
    grads = [torch.randn_like(x) for x in shaped]
    del shaped

    def both(name: str, variant: Callable[..., Any]) -> Callable[[], object]:
        learned = wanted[:3] if name in case.ungated else wanted
        return lambda: torch.autograd.grad(_tuple(variant(*inputs)), learned, grads)

    def forward(variant: Callable[..., Any]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return variant(*inputs)

        return call

    peaks = {name: _peak(both(name, variant) if wanted else forward(variant)) for name, variant in variants.items()}
    ahead = _timed({name: forward(variant) for name, variant in variants.items()}, rounds)
    round_trip = _timed({name: both(name, variant) for name, variant in variants.items()}, rounds) if wanted else {}
    whole = round_trip or ahead
    floor = 1e3 * max(case.flops / limits.flops, case.moved / limits.bytes_per_s)
    rows = []
    for name in case.variants:
        trip = round_trip.get(name)
        rows.append(
            KernelRow(
                op=case.op,
                size=case.size,
                variant=name,
                forward=ahead[name].median,
                both=trip and trip.median,
                both_low=trip and trip.low,
                both_high=trip and trip.high,
                share_forward=floor / ahead[name].median,
                share_both=trip and floor * (1 + case.backward) / trip.median,
                to_rival=whole[name].median / whole[case.rival].median if case.rival else None,
                peak_memory=peaks[name],
            )
        )
    return rows


def _timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    # a graph would hold the memory of large eager variants twice, and their operations are long enough to hide the host
    ready = {name: call if name in (NAIVE, EAGER) else as_cuda_graph(call) for name, call in calls.items()}
    return interleaved(ready, rounds=rounds, repeat=3)


def _peak(call: Callable[[], object]) -> int:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _all(device: torch.device, selected: Sequence[str], without_fla: str | None) -> Iterator[Case]:
    made = _Inputs(device)
    for b, t, window, grad in (
        (16, 2048, None, True), (16, 2048, 1024, True), (1, 16384, None, True), (1, 16384, 1024, True),
        (1, 65536, None, False), (1, 65536, 1024, True),
    ):  # fmt: skip
        yield from _attention(made, b, t, window, grad)
    for b, t in ((16, 2048), (1, 16384)):
        yield from _gated_attention(made, b, t, selected, without_fla)
    yield _gated_delta(made)
    for op in kernel_variants.MEMORY_OPS:
        if not selected or op in selected:
            yield _memory(made, op)
    yield from _convolutions(made)
    yield _cross_entropy(made)
    yield _polar_distractor(made)
    for inputs, outputs in ((WIDTH, 8 * WIDTH), (4 * WIDTH, WIDTH)):
        yield _fp8_linear(made, inputs, outputs)
    for b, tokens in single_token.SIZES:
        yield _one_token(made, b, tokens)
    yield _row_linear(made, WIDTH, 8 * WIDTH, "relu2")
    yield _row_linear(made, 4 * WIDTH, WIDTH, "none")


class _Inputs:
    """Random inputs on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_(grad)

    def qkv(self, b: int, t: int, grad: bool = True) -> list[Tensor]:
        return [self.normal(b, t, heads, D, grad=grad) for heads in (H, J, J)]

    def per_head(self, grad: bool = True) -> list[Tensor]:
        made = [torch.full((H,), value, device=self.device) for value in (2.0, 0.5, -1.0, -1.5)]
        return [x.requires_grad_(grad) for x in (*made, torch.zeros(H, D, device=self.device))]


def _on(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return lambda *inputs: function(*inputs, backend=backend, **options)


def _attention(made: _Inputs, b: int, t: int, window: int | None, grad: bool) -> Iterator[Case]:
    size = f"B{b} T{t}" + (f" W{window}" if window else "")
    reach = min(window or t, t)
    flops = 4 * D * b * H * (reach * (reach + 1) / 2 + (t - reach) * reach)
    moved = 2 * b * t * D * (2 * H + 2 * J)

    def rival(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return softmax.softmax_attention(q, k, v, window=window, backend="triton" if window else "cudnn")

    def polar_inputs() -> list[Tensor]:
        return [*made.qkv(b, t, grad), *made.per_head(grad)]

    # torch's own operations would work for seconds on the longest texts
    backends = [name for name in polar.available(made.device, torch.bfloat16, D) if name != NAIVE or t <= 2**14]
    found = {name: _on(polar.polar_attention, str(name), window=window) for name in backends}
    why = _why_no_eager(made.device, b, t)
    if why is None:
        found[EAGER] = lambda *inputs: kernel_variants.polar_attention_eager(*inputs, window=window)
    polar_size = size if why is None else f"{size}, without {EAGER}: {why}"
    yield Case("polar", polar_size, polar_inputs, found, flops, moved, 2.5, eager=(NAIVE, EAGER))
    name = "softmax, our kernels" if window else "softmax, cuDNN"
    yield Case("softmax", size, lambda: made.qkv(b, t, grad), {name: rival}, flops, moved, 2.5)


def _why_no_eager(device: torch.device, b: int, t: int) -> str | None:
    """Return why the whole T x T matrix is not made at that size; None where it fits."""
    if device.type != "cuda":
        return None
    needed, free = kernel_variants.peak_bytes(b, H, t), torch.cuda.get_device_properties(device).total_memory
    return None if needed < free else f"it may take {needed / 2**30:.0f} GiB"


def _gated_attention(made: _Inputs, b: int, t: int, selected: Sequence[str], without_fla: str | None) -> Iterator[Case]:
    """Forgetting and wall attention beside fla's, where they are right, those that nobody else has beside torch's operations."""
    ours_alone: dict[kernel_variants.Gated, Callable[[], BackendChoice]] = {
        kernel_variants.threshold: lambda: threshold.choose_backend(made.device, torch.bfloat16, D),
        kernel_variants.contextual: lambda: contextual.choose_backend(made.device, torch.bfloat16, D, POSITIONS),
        kernel_variants.relative: lambda: relative.choose_backend(made.device, torch.bfloat16, D),
    }
    for op, name, shape in (
        (kernel_variants.forgetting, "forgetting", (b, t, H)), (kernel_variants.wall, "wall_head", (b, t, H, D)),
        (kernel_variants.wall, "wall_kv", (b, t, J, D)), (kernel_variants.threshold, "threshold", (b, t, H)),
        (kernel_variants.contextual, "contextual", (POSITIONS, D)), (kernel_variants.relative, "relative", (H, REACH + 1)),
    ):  # fmt: skip
        if selected and name not in selected:
            continue  # whether fla is right takes minutes to find out
        if op in ours_alone:
            chosen = ours_alone[op]()
            why = {"triton": None if chosen.backend == "triton" else chosen.reason, NAIVE: None}
        else:
            tied = shape == (b, t, J, D)
            why = kernel_variants.gated_available(op, made.device, D, gates_tied=tied, without_fla=without_fla)
        yield _beside_softmax(made, b, t, name, op, shape, why)


def _beside_softmax(
    made: _Inputs,
    b: int,
    t: int,
    name: str,
    op: kernel_variants.Gated,
    fourth: tuple[int, ...],
    why: dict[str, str | None],
) -> Case:
    """The backends of an attention that `why` has nothing against, measured by cuDNN's softmax; `fourth`: shape of its fourth input."""
    yardstick = "softmax, cuDNN"

    def softmax_alone(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return softmax.softmax_attention(q, k, v, backend="cudnn")

    def inputs() -> list[Tensor]:
        return [*made.qkv(b, t), made.normal(*fourth)]

    found = {yardstick: softmax_alone} | {one: _on(op, one) for one, said in why.items() if said is None}
    size = ", ".join([f"B{b} T{t}", *(f"without {one}: {said}" for one, said in why.items() if said)])
    flops = 4.0 * D * b * H * t * (t + 1) / 2
    # q, k, v, the result, and the fourth, 2 bytes each
    moved = 2.0 * (b * t * D * (2 * H + 2 * J) + math.prod(fourth))
    return Case(
        name, size, inputs, found, flops, moved, 2.5, yardstick, eager=(kernel_variants.FLA, NAIVE), ungated=(yardstick,)
    )  # fmt: skip


def _gated_delta(made: _Inputs) -> Case:
    def inputs() -> list[Tensor]:
        gates = [torch.randn(16, 2048, H, device=made.device) for _ in range(2)]
        return [*made.qkv(16, 2048), *(x.requires_grad_() for x in gates)]

    def by(backend: str) -> Callable[..., Any]:
        def call(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, beta: Tensor) -> Any:
            log_gamma = torch.nn.functional.logsigmoid(gamma + 3.9)
            return gated_delta.gated_delta(q, k, v, log_gamma, beta.sigmoid(), backend=backend)

        return call

    names = gated_delta.available(made.device, torch.bfloat16, D)
    return Case(
        "gated_delta", "B16 T2048", inputs, {name: by(name) for name in names if name != "torch"},
        TOKENS * H * D * (4 * D + 6 * 64), 2 * TOKENS * D * (2 * H + 2 * J), 2.5,
        rival="fla" if "fla" in names else None,
    )  # fmt: skip


def _memory(made: _Inputs, op: str) -> Case:
    """A memory by fla where there is one, and by torch's operations, compiled or one by one."""

    def inputs() -> list[Tensor]:
        logits = [torch.randn(16, 2048, *shape, device=made.device) for shape in kernel_variants.memory_rates(op, H, D)]
        return [*made.qkv(16, 2048), *(x.requires_grad_() for x in logits)]

    found = kernel_variants.memory_variants(op, made.device, D)
    rival = next((name for name in (kernel_variants.FLA, NAIVE) if name in found), None)
    moved = 2.0 * TOKENS * D * (2 * H + 2 * J)
    return Case(op, "B16 T2048", inputs, found, TOKENS * H * kernel_variants.memory_flops(op, D), moved, 2.5, rival)


def _convolutions(made: _Inputs) -> Iterator[Case]:
    for op, function, shape, filters, moved, backward in (
        ("gated_conv", conv.gated_causal_conv, (16, 2048, 3 * WIDTH), (WIDTH, 3), 8 * TOKENS * WIDTH, 1.75),
        ("canon", lambda x, w, backend: conv.canon(x, w, norm=True, backend=backend), (16, 2048, H, D), (H * D, 4),
         4 * TOKENS * WIDTH, 1.5),
    ):  # fmt: skip

        def inputs(shape: tuple[int, ...] = shape, filters: tuple[int, int] = filters) -> list[Tensor]:
            return [made.normal(*shape), made.normal(*filters)]

        found = {"triton": _on(function, "triton"), "torch, compiled": _on(function, "torch")}
        yield Case(op, "B16 T2048", inputs, found, 0, moved, backward, "torch, compiled")


def _cross_entropy(made: _Inputs) -> Case:
    def inputs() -> list[Tensor]:
        w = torch.randn(VOCABULARY, WIDTH, device=made.device) / 32
        b = torch.zeros(VOCABULARY, device=made.device)
        targets = torch.randint(VOCABULARY, (TOKENS,), device=made.device)
        return [made.normal(TOKENS, WIDTH), w.requires_grad_(), b.requires_grad_(), targets]

    def by(backend: str) -> Callable[..., Any]:
        return lambda h, w, b, y: cross_entropy.linear_cross_entropy_sum(h, w, b, y, cap=15.0, backend=backend)

    return Case(
        "cross_entropy", "32768 tokens", inputs, {name: by(name) for name in ("triton", "torch")},
        2.0 * TOKENS * WIDTH * VOCABULARY, 0, 2.0, "torch",
    )  # fmt: skip


def _polar_distractor(made: _Inputs) -> Case:
    def inputs() -> list[Tensor]:
        return [made.normal(16, 2048, H, D), made.normal(16, 2048, J, D, grad=False), *made.per_head()[:3]]

    def loss(q: Tensor, k: Tensor, base: Tensor, slope: Tensor, gain: Tensor, backend: str) -> Tensor:
        return polar.polar_distractor_loss(q, k, gain, base, slope, backend=backend)

    found = {name: _on(loss, name) for name in ("triton", "torch")}
    flops = 4.0 * D * 16 * 2048 * H * 2048
    return Case("polar_distractor", "B16 T2048 R2048", inputs, found, flops, 0, 0.0, "torch")


def _fp8_linear(made: _Inputs, inputs: int, outputs: int) -> Case:
    """A norm and the projection behind it, as a block has them: the casts to 8 bits belong into the norm's kernel."""

    def by(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: product(rms_norm(x), w)

    def parts() -> list[Tensor]:
        return [made.normal(16, 2048, inputs), (torch.randn(outputs, inputs, device=made.device) / 32).requires_grad_()]

    found = {"bf16": by(lambda x, w: torch.nn.functional.linear(x, w.to(x.dtype)))}
    chosen, size = fp8_linear.choose_backend(made.device), f"32768 tokens, norm, {inputs} to {outputs}"
    if chosen.backend == "torch":
        size += f", without fp8: {chosen.reason}"
    else:
        found["fp8"] = by(_on(fp8_linear.fp8_linear, chosen.backend))
    return Case("fp8_linear", size, parts, found, 2.0 * TOKENS * inputs * outputs, 0, 2.0, "bf16", eager=())


def _one_token(made: _Inputs, b: int, tokens: int) -> Case:
    """A step of decoding, whose bytes are the keys and values: forward alone."""

    def inputs() -> list[Tensor]:
        pools = [made.normal(-(-tokens // PAGE) * b, PAGE, J, D, grad=False) for _ in range(2)]
        return [made.normal(b, H, D, grad=False), *pools]

    found: dict[str, Callable[..., Any]] = {
        "polar, pages": single_token.paged(b, tokens, made.device, made.per_head(grad=False)),
        "softmax, pages": single_token.paged(b, tokens, made.device),
    }
    size = f"B{b} T{tokens}"
    for name, backend in single_token.DENSE.items():
        why = single_token.unsupported_reason(backend, made.device, H, J, D)
        if why is None:
            found[name] = single_token.dense(b, tokens, backend)
        else:
            size += f", without {name}: {why}"
    rival = single_token.YARDSTICK if single_token.YARDSTICK in found else None
    moved = 2.0 * 2 * b * tokens * J * D
    return Case("decode", size, inputs, found, 4.0 * D * b * H * tokens, moved, 0.0, rival, eager=tuple(found))


def _row_linear(made: _Inputs, inputs: int, outputs: int, gate: str) -> Case:
    """A step's product with its norm and its gate, or with the stream behind it; of eight matrices in turn, as no cache holds them."""
    matrices, norm, under = 8, gate != "none", gate == "none"

    def parts() -> list[Tensor]:
        weights = made.normal(matrices, outputs, inputs, grad=False) * inputs**-0.5
        return [made.normal(1, inputs, grad=False), made.normal(1, outputs, grad=False), weights]

    def by(backend: str) -> Callable[..., object]:
        def call(x: Tensor, stream: Tensor, weights: Tensor) -> object:
            named: dict[str, Any] = {"norm_D": torch.ones_like(x[0], dtype=torch.float32), "eps": 1e-6} if norm else {}
            return tuple(
                row_linear(x, w, gate=gate, under_BE=stream if under else None, backend=backend, **named)
                for w in weights.unbind()
            )

        return call

    found = {"triton": by("triton"), "cuBLAS, compiled": by("torch")}
    weights = matrices * inputs * outputs
    size = f"1 row, {inputs} to {outputs}, {matrices} times"
    return Case("row_linear", size, parts, found, 2.0 * weights, 2.0 * weights, 0.0, "cuBLAS, compiled", eager=())


if __name__ == "__main__":
    print_rows(*child_arguments())
