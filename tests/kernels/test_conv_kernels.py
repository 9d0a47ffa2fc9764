"""The Triton kernels of the gated convolution and of Canon: in Triton's interpreter against float64, on a GPU in bf16.

Here torch.empty gives NaN, so an output that a kernel leaves unwritten shows in every comparison.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.conv import op as conv
from atma_sweep.kernels.conv.op import canon, causal_conv_reference, gated_causal_conv
from atma_sweep.kernels.norms import rms_norm_reference
from patience import PATIENCE_S
from tiers import every_nth
from tolerances import rounding_bound
from torch import Tensor

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are compiled, see below")


NEAR = rounding_bound(torch.float32, 262)
"""A filter's gradient sums over all tokens."""
NEAR_NORMED = rounding_bound(torch.float32, 262, condition=4)
"""A gradient through a norm is the part of it that is orthogonal to the token, over a length that may be small."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(args: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in args]


def run(function: Callable[..., Tensor], args: list[Tensor], **options: Any) -> list[Tensor]:
    """The result, then the gradients of a fixed random weighting of it."""
    y = function(*args, **options)
    weight = normal(*y.shape, seed=9).bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), args)]


def check(ours: list[Tensor], theirs: list[Tensor], near: float = NEAR) -> None:
    """Relative to the largest entry, at least 1."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape
        off = (a.double() - b).abs().max().item()
        assert off <= near * max(1.0, b.abs().max().item()), (index, off)


def gated_naive(x_BTE: Tensor, w_CK: Tensor) -> Tensor:
    b, c, u = x_BTE.chunk(3, -1)
    return c * causal_conv_reference(b * u, w_CK)


def canon_naive(x_BTHD: Tensor, w_CK: Tensor, *, norm: bool) -> Tensor:
    n = rms_norm_reference(x_BTHD) if norm else x_BTHD
    return causal_conv_reference(n.flatten(2), w_CK, residual=True).view_as(x_BTHD)


# --- gated --------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(("b", "t", "c", "k"), every_nth([
    (1, 1, 1, 1), (2, 1, 5, 3), (2, 2, 7, 4), (3, 15, 129, 2), (1, 16, 128, 4), (2, 17, 257, 3), (1, 64, 300, 4),
    (2, 65, 33, 1), (2, 66, 7, 4), (2, 131, 40, 3), (1, 129, 3, 2),
], 3))  # fmt: skip
def test_gated_is_near_float64(b: int, t: int, c: int, k: int) -> None:
    args = [normal(b, t, 3 * c, seed=1).requires_grad_(), normal(c, k, seed=2).requires_grad_()]
    check(run(gated_causal_conv, args, backend="triton"), run(gated_naive, double(args)))


@interpreted
def test_gated_takes_what_is_not_contiguous() -> None:
    x, w = normal(2, 60, 19, seed=1).transpose(1, 2).requires_grad_(), normal(3, 20, seed=2).t().requires_grad_()
    assert not x.is_contiguous()
    assert not w.is_contiguous()
    check(run(gated_causal_conv, [x, w], backend="triton"), run(gated_naive, double([x, w])))


# --- Canon --------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("b", "t", "h", "d", "k"), every_nth([
    (1, 1, 1, 1, 1), (2, 1, 3, 5, 4), (2, 3, 2, 8, 4), (1, 32, 1, 20, 2), (2, 17, 2, 16, 3), (1, 33, 2, 24, 4),
    (1, 64, 1, 33, 1), (1, 67, 2, 5, 4), (2, 131, 1, 6, 3), (1, 129, 1, 3, 2),
], 3))  # fmt: skip
def test_canon_is_near_float64(b: int, t: int, h: int, d: int, k: int, norm: bool) -> None:
    """Lengths around the 64 rows that a warp of the backward walks down, with taps that reach into the next ones."""
    # the weightless norm's epsilon is float32's in float32
    epsilon = 1.1920928955078125e-07
    args = [normal(b, t, h, d, seed=1).requires_grad_(), normal(h * d, k, seed=2).requires_grad_()]

    def naive(x: Tensor, w: Tensor) -> Tensor:
        n = x / torch.sqrt(x.square().mean(-1, keepdim=True) + epsilon) if norm else x
        return canon_naive(n, w, norm=False)

    check(run(canon, args, norm=norm, backend="triton"), run(naive, double(args)), near=NEAR_NORMED)


@interpreted
def test_canon_of_a_zero_token_is_finite() -> None:
    x = normal(1, 5, 2, 8)
    x[:, 2] = 0
    found = run(canon, [x.requires_grad_(), normal(16, 3, seed=1).requires_grad_()], norm=True, backend="triton")
    assert all(torch.isfinite(one).all() for one in found)


def cut(size: int, start: int) -> Callable[[Tensor], Tensor]:
    """Some heads out of a wider projection, as q, k and v are views of one product."""
    return lambda x: x.unflatten(-1, (-1, 8))[:, :, start : start + size]


@interpreted
@pytest.mark.parametrize("view", every_nth([
    cut(2, 0), cut(1, 2),
    lambda x: x.unflatten(-1, (-1, 8))[:, :, ::2],  # gaps between heads
    lambda x: x.unflatten(-1, (-1, 12))[..., :8],  # gaps inside rows
    lambda x: x.unflatten(-1, (-1, 8))[:, 3:],  # the batch's rows do not follow each other: copied
    lambda x: x.unflatten(-1, (8, -1)).transpose(2, 3)[..., :6],  # heads apart in memory: copied
    lambda x: x.unflatten(-1, (-1, 8))[:, ::2],  # every second token
], 5))  # fmt: skip
def test_canon_reads_views_where_they_lie(view: Callable[[Tensor], Tensor]) -> None:
    """What lies between the view's numbers is NaN, and the gradients have the view's shape."""
    x = view(normal(2, 37, 24, seed=1))
    w = normal(x.shape[2] * x.shape[3], 4, seed=2)
    buffer = torch.full((2, 37, 24), torch.nan)
    view(buffer).copy_(x)
    ours = run(canon, [view(buffer).requires_grad_(), w.clone().requires_grad_()], norm=True, backend="triton")
    check(ours, run(canon_naive, double([x, w]), norm=True), near=NEAR_NORMED)


@interpreted
def test_canon_of_one_row_for_a_whole_batch() -> None:
    x, w = normal(1, 21, 2, 8, seed=1).expand(3, -1, -1, -1), normal(16, 4, seed=2)
    ours = run(canon, [x.requires_grad_(), w.clone().requires_grad_()], norm=True, backend="triton")
    check(ours, run(canon_naive, double([x.contiguous(), w]), norm=True), near=NEAR_NORMED)


# --- both ---------------------------------------------------------------------------------------------------------


def surrounded(x: Tensor) -> Tensor:
    """The same contiguous numbers with NaN before and behind."""
    buffer = torch.full((x.shape[0] + 2, *x.shape[1:]), torch.nan)
    buffer[1:-1] = x
    return buffer[1:-1].requires_grad_()


@interpreted
@pytest.mark.thorough
def test_nothing_beyond_the_inputs_is_used() -> None:
    for function, x, w in (
        (gated_causal_conv, normal(2, 21, 39), normal(13, 4, seed=1)),
        (lambda x, w, backend: canon(x, w, norm=True, backend=backend), normal(2, 21, 3, 5), normal(15, 4, seed=1)),
    ):
        clean = run(function, [x.clone().requires_grad_(), w.clone().requires_grad_()], backend="triton")
        dirty = run(function, [surrounded(x), surrounded(w)], backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
        assert all(torch.isfinite(one).all() for one in dirty)


@interpreted
def test_a_token_never_changes_earlier_outputs() -> None:
    x = normal(2, 35, 3, 8)
    changed = x.clone()
    changed[:, 18] += 1
    one, two = (canon(some, normal(24, 4, seed=1), norm=True, backend="triton") for some in (x, changed))
    assert torch.equal(one[:, :18], two[:, :18])
    assert torch.equal(one[:, 22:], two[:, 22:])
    assert ((one - two)[:, 18:22].abs().amax((0, 2, 3)) > 1e-3).all()


@interpreted
@pytest.mark.parametrize(
    "name", every_nth(["gated_conv_forward", "gated_conv_backward", "canon_forward", "canon_backward"], 2)
)
def test_ops_keep_the_rules_of_torch(name: str) -> None:
    """Nothing changed in place, shapes and types without data, gradients, and the same in a compiled graph."""
    x, w, heads = normal(2, 5, 12), normal(4, 3, seed=1), normal(2, 5, 2, 2, seed=2)
    op, args = {
        "gated_conv_forward": (conv.gated_conv_forward, (x.requires_grad_(), w.requires_grad_())),
        "gated_conv_backward": (conv.gated_conv_backward, (normal(2, 5, 4), x.detach(), w.detach())),
        "canon_forward": (conv.canon_forward, (heads.requires_grad_(), w.requires_grad_(), True)),
        "canon_backward": (conv.canon_backward, (heads.detach(), heads.detach(), w.detach(), True)),
    }[name]
    found = torch.library.opcheck(op, args)
    assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_errors_name_both_numbers(backend: str) -> None:
    with pytest.raises(ValueError, match=r"\(2, 5, 13\).*\(4, 3\)"):
        gated_causal_conv(torch.zeros(2, 5, 13), torch.zeros(4, 3), backend=backend)
    with pytest.raises(ValueError, match=r"\(2, 5, 3, 4\).*\(13, 3\)"):
        canon(torch.zeros(2, 5, 3, 4), torch.zeros(13, 3), norm=True, backend=backend)
    with pytest.raises(ValueError, match=r"float32.*float64"):
        gated_causal_conv(torch.zeros(2, 5, 12), torch.zeros(4, 3, dtype=torch.float64), backend=backend)
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        canon(torch.zeros(2, 5, 3, 4).bfloat16(), torch.zeros(12, 3), norm=False, backend=backend)


def test_more_taps_than_the_kernels_take() -> None:
    args = [normal(2, 9, 12).requires_grad_(), normal(4, 5, seed=1).requires_grad_()]
    with pytest.raises(ValueError, match="at most 4 taps, got 5; use backend torch"):
        gated_causal_conv(*args, backend="triton")
    with pytest.raises(ValueError, match="at most 4 taps, got 5; use backend torch"):
        canon(torch.zeros(2, 9, 2, 2), torch.zeros(4, 5), norm=True, backend="triton")
    check(run(gated_causal_conv, args, backend="torch"), run(gated_naive, double(args)))


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atma_sweep.kernels.conv import triton as conv_triton
pointers = {"x_ptr": "*bf16", "w_ptr": "*bf16", "g_ptr": "*bf16", "dx_ptr": "*bf16", "dw_ptr": "*fp32", "T": "i32"}
for kernel, sizes, strides in (
    (conv_triton._gated_backward, {"C": 64, "W": 4, "R": 16, "BC": 64}, {}),
    (conv_triton._canon_backward, {"H": 2, "X": 32, "P": 32, "W": 4, "R": 16, "NORM": True},
     {"stride_t": "i32", "stride_h": "i32"}),
):
    signature = pointers | strides | dict.fromkeys(sizes, "constexpr")
    made = triton.compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    (yielded,) = re.findall(r"scf.yield (.*?) :", made.asm["ttir"])
    print(yielded.count("%"))
"""


@pytest.mark.thorough
def test_compiled_loops_carry_every_row_that_they_keep() -> None:
    """The interpreter rotates names that start as one value, the compiler takes them for constants."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    # three rows and four sums of two kinds; Canon also keeps three lengths
    assert done.stdout.split() == [str(3 + 3 + 4), str(3 + 3 + 4 + 3)]


# --- on a GPU -----------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("t", "c", "h", "d"), [(1, 5, 1, 5), (17, 129, 3, 20), (1000, 257, 8, 128), (2049, 1024, 2, 64)]
)
def test_in_bf16_near_float64_and_the_same_bits_each_time(t: int, c: int, h: int, d: int) -> None:
    for k in (1, 3, 4):
        gated = [normal(2, t, 3 * c, seed=1), normal(c, k, seed=2)]
        heads = [normal(2, t, h, d, seed=3), normal(h * d, k, seed=4)]
        for function, naive, made in (
            (gated_causal_conv, gated_naive, gated),
            (lambda x, w, backend: canon(x, w, norm=True, backend=backend), lambda x, w: canon(x, w, norm=True), heads),
        ):
            args = [x.cuda().bfloat16().requires_grad_() for x in made]
            ours, again = (run(function, args, backend="triton") for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
            found = run(naive, double(args))
            # everything is rounded once, by at most 2^-8
            assert max(distance(a, b) for a, b in zip(ours, found, strict=True)) <= 3.9e-3, (t, c, h, d, k)
