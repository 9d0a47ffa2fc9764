"""Kernels of contextual positions against torch's operations in float64 (those: test_scored_attention.py)."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.attention.contextual import op as contextual
from atma_sweep.kernels.attention.contextual.op import choose_backend, contextual_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from atma_sweep.kernels.custom_ops import load_kernels
from graded import check, distance, double, interpreted, normal, run, surrounded
from tiers import every_nth
from tolerances import rounding_bound
from torch import Tensor

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def inputs(t: int, h: int, j: int, positions: int, *, b: int = 1, d: int = D, shut: float = 0.0) -> list[Tensor]:
    """q, k, v and vectors; `shut` takes so much off every score, so that gates close and positions lie farther back."""
    made = [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j))]
    if shut:
        made[0][..., 0], made[1][..., 0] = shut, -shut
    made.append(0.3 * normal(positions, d, seed=3))
    return [x.requires_grad_() for x in made]


def near(args: list[Tensor], window: int | None, scale: float | None = None) -> None:
    ours = run(contextual_attention, args, window=window, scale=scale, backend="triton")
    exact = run(contextual_attention, double(args), window=window, scale=scale, backend="torch")
    check(ours, exact, 1, near=1e-5, gradient=1e-4)


CASES = [
    (101, 4, 2, 12, 37, 0.0),  # the window ends before the positions do, for some rows
    (1, 3, 1, 4, None, 0.0),
    (130, 3, 1, 20, None, 0.0),  # the last position comes up within two tiles
    (150, 2, 1, 7, 100, 0.0),
    (65, 2, 2, 64, 1, 0.0),
    (193, 2, 1, 64, None, 2.0),  # gates of about 0.27: the last position is six tiles away
    (97, 1, 1, 128, None, 3.0),  # and here farther than the row is long
    (70, 2, 1, 1, 20, 0.0),
    (96, 4, 4, 2, 96, 0.0),
]


@interpreted
@pytest.mark.parametrize(("t", "h", "j", "positions", "window", "shut"), every_nth(CASES, 3))
def test_the_kernels_are_near_float64(t: int, h: int, j: int, positions: int, window: int | None, shut: float) -> None:
    near(inputs(t, h, j, positions, b=2 if t < 90 else 1, shut=shut), window, scale=0.3)


@interpreted
@pytest.mark.parametrize(("keys", "window"), every_nth([(64, None), (32, 60), (32, None), (64, 33)], 4))
def test_keys_beyond_one_stretch(keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The borders of a stretch of keys at a time: the same numbers to the bit."""
    args = inputs(133, 2, 1, 30, shut=1.5)
    whole = run(contextual_attention, args, window=window, backend="triton")
    monkeypatch.setattr(load_kernels(contextual.__package__), "STRETCH", keys)
    found = run(contextual_attention, args, window=window, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@interpreted
def test_equal_vectors_are_no_positions() -> None:
    """A row's softmax does not feel them, and so gates learn nothing."""
    q, k, v, e = inputs(70, 2, 1, 9)
    e = e.detach()[:1].expand(9, -1).contiguous().requires_grad_()
    ours = run(contextual_attention, [q, k, v, e], backend="triton")
    exact = run(lambda q, k, v: softmax_attention_reference(q, k, v), double([q, k, v]))
    check(ours[:4], exact, 1, near=4e-6, gradient=1e-4)
    # 140 rows of 32 products of size 1 that cancel
    assert ours[4].sum(0).abs().max() <= rounding_bound(torch.float32, 140 * 32)


@interpreted
@pytest.mark.thorough
def test_the_kernels_repeat_to_the_bit_and_use_nothing_beyond_their_inputs() -> None:
    args = inputs(70, 2, 1, 24)
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in args]
    found = [run(contextual_attention, some, window=50, backend="triton")
             for some in (args, args, [surrounded(x) for x in args[:3]] + args[3:], apart)]  # fmt: skip
    assert all(torch.isfinite(x).all() for x in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_ops_keep_the_rules_of_torch(name: str) -> None:
    """Nothing changed in place, shapes and types without data, gradients, and the same in a compiled graph."""
    q, k, v, _ = inputs(5, 4, 2, 3)
    z = normal(1, 4, 5, 3, seed=7).requires_grad_()
    o, lse = (x.detach() for x in contextual._forward(q, k, v, z, 0.3, 3))
    if name == "forward":
        found = torch.library.opcheck(contextual._forward, (q, k, v, z, 0.3, 3))
    else:
        found = torch.library.opcheck(contextual._backward, (o, *(x.detach() for x in (q, k, v, z)), o, lse, 0.3, 3))
    assert set(found.values()) == {"SUCCESS"}, found


def test_more_positions_than_the_kernels_hold_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contextual, "attention_choice", lambda *_: contextual.Choice("triton", "Triton 3"))
    assert choose_backend("cuda", torch.bfloat16, 64, 128) == ("triton", "Triton 3")
    assert choose_backend("cuda", torch.bfloat16, 64, 129) == ("torch", "the kernels hold 128 positions, these are 129")


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("t", "window", "shut"), [(397, None, 0.0), (397, 150, 2.0), (4500, None, 2.0)])
def test_in_bf16_they_are_near_float64_and_repeat(t: int, window: int | None, shut: float, d: int) -> None:
    """4,500 tokens are more than one stretch of keys."""
    assert choose_backend("cuda", torch.bfloat16, d, 64).backend == "triton"
    args = [x.detach().cuda() for x in inputs(t, 4, 2, 64, b=2 if t < 1000 else 1, d=d, shut=shut)]
    args = [x.bfloat16().requires_grad_() for x in args[:3]] + [args[3].requires_grad_()]
    ours, again = (run(contextual_attention, args, window=window, backend="triton") for _ in range(2))
    exact = run(contextual_attention, double(args), window=window, backend="torch")
    for name, a, same, b in zip(("y", "q", "k", "v", "vectors"), ours, again, exact, strict=True):
        assert torch.equal(a, same), name
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 1e-2, name
