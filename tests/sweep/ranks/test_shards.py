"""Owners of parameters, by hand, and the share of a step that a rank gets."""

from __future__ import annotations

import torch
from atma_sweep.sweep.data.batches import Batches, StepPrefetcher
from atma_sweep.sweep.ranks.shards import assign_owners
from atma_sweep.sweep.training.optimizer_steps import should_capture
from atma_sweep.sweep.training.sharded import newton_schulz_flops
from small_training import CPU, MARKS, STREAM, recipe


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


def test_prefetcher_moves_the_micro_batches_of_its_share() -> None:
    """Five micro-batches of two rows; rank 1 of 3 gets the second and the last, with the marks of the complete step."""
    batches = Batches([STREAM], 6, 10, 0, True, marks=[MARKS])
    step = StepPrefetcher(batches, CPU, 2).get(3)
    share = StepPrefetcher(batches, CPU, 2, share=slice(1, None, 3)).get(3)
    rows = [2, 3, 8, 9]
    assert torch.equal(share.inputs, step.inputs[rows])
    assert torch.equal(share.targets, step.targets[rows])
    assert step.marked is not None
    assert share.marked is not None
    assert len(share.marked) == 2
    for ours, complete in zip(share.marked, (step.marked[1], step.marked[4]), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, complete, strict=True))


def test_steps_of_several_ranks_are_not_captured() -> None:
    captured, why = should_capture(recipe(graphs="on"), 1000, torch.device("cuda"), 4)
    assert not captured
    assert "4 ranks" in why
    assert should_capture(recipe(graphs="on"), 1000, torch.device("cuda"))[0]
