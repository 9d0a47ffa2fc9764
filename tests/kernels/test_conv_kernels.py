"""The Triton kernels of the gated convolution and of Canon: in Triton's interpreter against float64, on a GPU in bf16.

Here torch.empty gives NaN, so an output that a kernel leaves unwritten shows in every comparison.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from atma_sweep.kernels.conv.op import canon, gated_causal_conv
from graded import check, distance, double, interpreted, normal, run
from kernel_operations import NEAR_NORMED, canon_exact, gated_conv_exact
from patience import PATIENCE_S
from torch import Tensor

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


# --- Canon --------------------------------------------------------------------------------------------------------


@interpreted
def test_canon_of_a_zero_token_is_finite() -> None:
    x = normal(1, 5, 2, 8)
    x[:, 2] = 0
    results = run(canon, [x.requires_grad_(), normal(16, 3, seed=1).requires_grad_()], norm=True, backend="triton")
    assert all(torch.isfinite(result).all() for result in results)


def cut(size: int, start: int) -> Callable[[Tensor], Tensor]:
    """Some heads out of a wider projection, as q, k and v are views of one product."""
    return lambda x: x.unflatten(-1, (-1, 8))[:, :, start : start + size]


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("view", [
    cut(2, 0), cut(1, 2),
    lambda x: x.unflatten(-1, (-1, 8))[:, :, ::2],  # gaps between heads
    lambda x: x.unflatten(-1, (-1, 12))[..., :8],  # gaps inside rows
    lambda x: x.unflatten(-1, (-1, 8))[:, 3:],  # the batch's rows do not follow each other: copied
    lambda x: x.unflatten(-1, (8, -1)).transpose(2, 3)[..., :6],  # heads apart in memory: copied
    lambda x: x.unflatten(-1, (-1, 8))[:, ::2],  # every second token
])  # fmt: skip
def test_canon_reads_views_where_they_lie(view: Callable[[Tensor], Tensor]) -> None:
    """The memory between a view's numbers is NaN, and the gradients have the view's shape."""
    x = view(normal(2, 37, 24, seed=1))
    w = normal(x.shape[2] * x.shape[3], 4, seed=2)
    buffer = torch.full((2, 37, 24), torch.nan)
    view(buffer).copy_(x)
    ours = run(canon, [view(buffer).requires_grad_(), w.clone().requires_grad_()], norm=True, backend="triton")
    check(ours, run(canon_exact, double([x, w]), norm=True), 1, near=NEAR_NORMED, gradient=NEAR_NORMED)


@pytest.mark.thorough
@interpreted
def test_canon_of_a_row_expanded_to_a_batch() -> None:
    x, w = normal(1, 21, 2, 8, seed=1).expand(3, -1, -1, -1), normal(16, 4, seed=2)
    ours = run(canon, [x.requires_grad_(), w.clone().requires_grad_()], norm=True, backend="triton")
    check(ours, run(canon_exact, double([x.contiguous(), w]), norm=True), 1, near=NEAR_NORMED, gradient=NEAR_NORMED)


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("t", "c", "h", "d"), [(1, 5, 1, 5), (17, 129, 3, 20), (1000, 257, 8, 128), (2049, 1024, 2, 64)]
)
def test_in_bf16_near_float64_and_the_same_bits_each_time(t: int, c: int, h: int, d: int) -> None:
    for k in (1, 3, 4):
        gated = [normal(2, t, 3 * c, seed=1), normal(c, k, seed=2)]
        heads = [normal(2, t, h, d, seed=3), normal(h * d, k, seed=4)]
        for function, naive, inputs in (
            (gated_causal_conv, gated_conv_exact, gated),
            (lambda x, w, backend: canon(x, w, norm=True, backend=backend), lambda x, w: canon(x, w, norm=True), heads),
        ):
            args = [x.cuda().bfloat16().requires_grad_() for x in inputs]
            ours, again = (run(function, args, backend="triton") for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
            expected = run(naive, double(args))
            # everything is rounded once, by at most 2^-8
            assert max(distance(a, b) for a, b in zip(ours, expected, strict=True)) <= 3.9e-3, (t, c, h, d, k)
