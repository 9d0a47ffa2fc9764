"""Owners of parameters, by hand."""

from __future__ import annotations

import torch
from atma_sweep.sweep.ranks.shards import assign_owners
from atma_sweep.sweep.training.sharded import newton_schulz_flops


def test_owners_balance_costs_and_do_not_depend_on_luck() -> None:
    # 7 -> 0, 5 -> 1, 4 -> 2, 4 -> 2's 4 is least: 2 has 4, so the second 4 goes to rank 2 (4 < 5 < 7), then 3 to 1
    assert assign_owners([4, 7, 3, 5, 4], 3) == [2, 0, 1, 1, 2]
    assert assign_owners([1] * 8, 4) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert assign_owners([5], 4) == [0]


def test_equal_matrices_are_spread_evenly() -> None:
    flops = newton_schulz_flops(torch.Size((1024, 4096)), 12)
    # by hand: X X^T 2 R R C, A A 2 R^3, A X 2 R R C
    assert flops == 12 * (2 * 1024**2 * 4096 + 2 * 1024**3 + 2 * 1024**2 * 4096)
    assert newton_schulz_flops(torch.Size((4096, 1024)), 12) == flops
    assert newton_schulz_flops(torch.Size((8, 1, 4)), 1) == 8 * (4 * 4 + 2)
    owners = assign_owners([flops] * 32, 4)
    assert [owners.count(rank) for rank in range(4)] == [8] * 4
