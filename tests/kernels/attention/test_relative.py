"""Attention with a learned number for each head and distance: the formula against a loop over pairs, and the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.attention.relative import op as relative
from atma_sweep.kernels.attention.relative.op import choose_backend, relative_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from graded import check, distance, double, interpreted, normal, run, surrounded
from tiers import every_nth
from torch import Tensor

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def inputs(t: int, h: int, j: int, reach: int, *, b: int = 1, d: int = D) -> list[Tensor]:
    """q, k, v and a number for each head and distance."""
    made = [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j))]
    made.append(normal(h, reach + 1, seed=3))
    return [x.requires_grad_() for x in made]


def naive(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Pair by pair."""
    t, h, d = q.shape[1:]
    k, v = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    rows = []
    for i in range(t):
        keys = range(max(0, i + 1 - (window or t)), i + 1)
        logits = [
            (q[:, i] * k[:, j]).sum(-1) * (d**-0.5 if scale is None else scale) + bias[:, min(i - j, bias.shape[1] - 1)]
            for j in keys
        ]
        rows.append(torch.einsum("bsh,bshx->bhx", torch.stack(logits, 1).softmax(1), v[:, keys.start : i + 1]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("window", "scale", "block", "reach"), [(None, None, 1024, 4), (5, 0.4, 5, 30), (1, None, 3, 1)]
)
def test_it_is_the_loop_over_pairs(window: int | None, scale: float | None, block: int, reach: int) -> None:
    args = double(inputs(13, 4, 2, reach, b=2, d=5))
    ours = run(relative_attention, args, scale=scale, window=window, query_block=block)
    check(ours, run(naive, args, scale=scale, window=window), 1, near=1e-13, gradient=1e-12)


def test_numbers_alike_at_all_distances_are_softmax() -> None:
    q, k, v, bias = double(inputs(23, 4, 2, 7))
    ours = relative_attention(q, k, v, bias[:, :1].expand(-1, 8), window=9)
    assert (ours - softmax_attention_reference(q, k, v, window=9)).abs().max() <= 1e-13


def test_errors_name_both_shapes() -> None:
    q, k, v, bias = inputs(5, 4, 2, 3)
    for wrong in (bias[:3], bias[0]):
        with pytest.raises(ValueError, match=r"\(1, 5, 4, 16\), but bias \("):
            relative_attention(q, k, v, wrong)


# --- kernels ------------------------------------------------------------------------------------------------------

CASES = [
    (101, 4, 2, 40, 37),  # the window ends before the reach
    (1, 3, 1, 4, None),
    (130, 3, 1, 33, None),  # the reach ends in the second tile behind a tile's own
    (150, 2, 1, 64, 100),
    (65, 2, 2, 1, 1),
    (193, 2, 1, 1, None),
    (97, 1, 1, 500, None),  # longer than any row
    (133, 4, 4, 31, 96),
    (96, 2, 1, 32, None),
]


@interpreted
@pytest.mark.parametrize(("t", "h", "j", "reach", "window"), every_nth(CASES, 3))
def test_the_kernels_are_near_float64(t: int, h: int, j: int, reach: int, window: int | None) -> None:
    args = inputs(t, h, j, reach, b=2 if t < 120 else 1)
    ours = run(relative_attention, args, window=window, scale=0.4, backend="triton")
    exact = run(relative_attention, double(args), window=window, scale=0.4, backend="torch")
    check(ours, exact, 1, near=4e-6, gradient=5e-5)


@interpreted
@pytest.mark.thorough
def test_the_kernels_repeat_to_the_bit_and_use_nothing_beyond_their_inputs() -> None:
    args = inputs(70, 2, 1, 24)
    found = [run(relative_attention, some, window=50, backend="triton")
             for some in (args, args, [surrounded(x) for x in args])]  # fmt: skip
    assert all(torch.isfinite(x).all() for x in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_ops_keep_the_rules_of_torch(name: str) -> None:
    """Nothing changed in place, shapes and types without data, gradients, and the same in a compiled graph."""
    args: list[object] = list(inputs(5, 4, 2, 3))
    if name == "backward":
        o, lse = (x.detach() for x in relative._forward(*args, 0.3, 3))
        args = [o, *(x.detach() for x in args), o, lse]  # type: ignore[attr-defined]
    found = torch.library.opcheck(getattr(relative, f"_{name}"), (*args, 0.3, 3))
    assert set(found.values()) == {"SUCCESS"}, found


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("t", "window", "reach"), [(397, None, 100), (397, 150, 512), (1300, None, 512)])
def test_in_bf16_they_are_near_float64_and_repeat(t: int, window: int | None, reach: int, d: int) -> None:
    assert choose_backend("cuda", torch.bfloat16, d).backend == "triton"
    args = [x.detach().cuda() for x in inputs(t, 4, 2, reach, b=2, d=d)]
    args = [x.bfloat16().requires_grad_() for x in args[:3]] + [args[3].requires_grad_()]
    ours, again = (run(relative_attention, args, window=window, backend="triton") for _ in range(2))
    exact = run(relative_attention, double(args), window=window, backend="torch")
    for name, a, same, b in zip(("y", "q", "k", "v", "bias"), ours, again, exact, strict=True):
        assert torch.equal(a, same), name
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 1e-2, name
