"""Attention with gates on Hopper: the forward in Gluon at sizes, windows and gates of every kind, and beside plain Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.forgetting.op import forgetting_attention, forgetting_forward
from atma_sweep.kernels.attention.wall.op import wall_attention, wall_forward
from atma_sweep.kernels.dispatch import why_not_gluon
from graded import distance, double, in_type, run
from kernel_operations import OPERATIONS, forgetting_inputs, wall_inputs

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.gpu


def skip_without_gluon(name: str, dtype: torch.dtype, d: int, window: int | None) -> None:
    chosen = OPERATIONS[name].choose(dtype, d, {"window": window})  # type: ignore[misc]
    assert chosen.backend != "torch", chosen
    if chosen.backend != "gluon":
        assert why_not_gluon(torch.device("cuda"), dtype, d, window) is not None, chosen
        pytest.skip(f"needs an NVIDIA GPU that takes gluon: {chosen}")


@pytest.mark.parametrize(("name", "d", "sizes", "dtype"), [
    ("forgetting", 64, (4, 1), BF16), ("forgetting", 128, (4, 1), BF16), ("forgetting", 128, (2, 2), FP16),
    ("wall", 64, (4, 1, 4), BF16), ("wall", 128, (4, 1, 1), BF16), ("wall", 128, (2, 2, 2), BF16),
])  # fmt: skip
def test_sizes_windows_and_gates_of_every_kind_are_near_float64(
    name: str, d: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Gates that are nearly open, plain, and closed: what closes lies 1e5 behind (forgetting), or falls as steeply as it may (wall)."""
    attention, inputs, strengths = {
        "forgetting": (forgetting_attention, forgetting_inputs, (1e-4, 1.0, 1e3)),
        "wall": (wall_attention, wall_inputs, (1e-3, 1.0, None)),
    }[name]  # fmt: skip
    for t, window in (
        (1, None),
        (64, None),
        (127, None),
        (129, 128),
        (300, 200),
        (1000, None),
        (1000, 128),
        (1000, 200),
    ):
        skip_without_gluon(name, dtype, d, window)
        for strength in strengths:
            drawn: Any = inputs(t, *sizes, b=2, d=d)  # type: ignore[operator]
            drawn[3] = torch.full_like(drawn[3], -1.19) if strength is None else drawn[3] * strength
            args = in_type(drawn, dtype, 3, "cuda")
            ours, again = (run(attention, args, window=window, backend="gluon") for _ in range(2))
            exact = run(attention, double(args), window=window, backend="torch")
            for part, a, same, b in zip(("y", "q", "k", "v", "gates"), ours, again, exact, strict=True):
                where = (part, t, window, strength, distance(a, b))
                assert torch.isfinite(a).all(), where
                assert torch.equal(a, same), where
                print(*where)
                # gates that close leave gradients that are rounding alone, and so does a wall's only token
                if part == "y" or (strength in strengths[:2] and (name == "forgetting" or t > 1)):
                    # gradients of gates are sums of what cancels
                    assert distance(a, b) <= (5e-2 if part == "gates" else 2e-2), where


@pytest.mark.parametrize(("name", "near", "near_output"), [("forgetting", 1e-3, 5e-3), ("wall", 3e-2, 8e-3)])
def test_log_sums_are_those_of_plain_triton(name: str, near: float, near_output: float) -> None:
    """The backward reads them; sums of gates at -45,000 and far more tiles than multiprocessors. Wall has rates of 8 bits' mantissa."""
    skip_without_gluon(name, BF16, 128, None)
    for t, window in ((1300, 0), (1300, 200), (8200, 0)):
        drawn = forgetting_inputs(t, 8, 2, d=128) if name == "forgetting" else wall_inputs(t, 8, 2, 8, d=128)
        args = [x.detach() for x in in_type(drawn, BF16, 3, "cuda")]
        if name == "forgetting":
            args[3][:, 0] = -45_000.0
        forward = forgetting_forward if name == "forgetting" else wall_forward
        (o, lse, *rest), (their_o, their_lse, *theirs) = (
            forward(*args, 0.1275, window, path) for path in ("gluon", "triton")
        )
        assert all(torch.equal(a, b) for a, b in zip(rest, theirs, strict=True))
        assert (lse - their_lse).abs().max() <= near
        assert distance(o, their_o) <= near_output
