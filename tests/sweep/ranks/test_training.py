"""Trainings on 1, 2 and 3 gloo ranks in float64: the same curve, gradient norms and weights, and the same checkpoints.

Adding micro-batches in another order changes the last bits of a gradient. At the usual learning rates a network of this
size doubles such a difference at every step, also in one process whose weights are perturbed by 1e-15 (4.6e-9 after 20
steps of the case "everything"). So the trainings here have small rates and a large epsilon of AdamW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.ranks.group import SINGLE
from ranked import run_ranks
from ranked_training import overflow, train
from tiers import long_form

STEPS = 20
CALM = {
    "adam_eps": 1e-4,
    "muon_lr": 0.002,
    "scalar_lr": 0.001,
    "embedding_lr": 0.05,
    "batch_tokens": 30,
    "micro_batch": 1,
    "tokens": 30 * STEPS,
}
"""Five micro-batches of a row per step, so that ranks get 3 and 2, or 2, 2 and 1."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "polar": ({}, {}),
    "everything": (
        {"memory": "gated_delta", "window": True},
        {"distractor": True, "regularizer": "zipfian", "muon_split": "head"},
    ),
    "sketch": ({"attn_type": "rope"}, {"regularizer": "strong", "loss_reduction": "sum", "clip": 0.5}),
    "dropout": ({"dropout": 0.25, "attn_type": "nope"}, {"regularizer": "weak", "micro_batch": 1}),
    "fp16": ({"attn_type": "nope"}, {"precision": "fp16"}),
    "adamw": ({"attn_type": "nope"}, {"optimizer": "adamw", "adam_weight_decay": 0.1}),
    "marked": ({}, {"loss_on": "marked", "batch_tokens": 60, "micro_batch": 2, "tokens": 60 * STEPS}),
    "tied": ({"tie_head": True, "logit_cap": "none", "attn_type": "nope"}, {"clip": 0.05}),
}


def assert_equal(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    assert len(ours["points"]) == len(reference["points"])
    for our_point, point in zip(ours["points"], reference["points"], strict=True):
        assert our_point == pytest.approx(point, rel=1e-12, abs=1e-12)
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1e-12, msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3, *long_form(2)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_like_a_single_process(case: str, size: int) -> None:
    model, training = CASES[case]
    reference = train(SINGLE, model, CALM | training)
    assert len(reference["points"]) == STEPS
    ranks = run_ranks(size, train, model, CALM | training)
    for ours in ranks:
        assert_equal(ours, reference)
    # every parameter's state lies on one rank alone, and none has all
    assert sum(ours["owned"] for ours in ranks) == reference["parameters"] == reference["owned"]
    assert max(ours["owned"] for ours in ranks) < reference["owned"]


@pytest.mark.thorough
def test_two_ranks_train_like_a_process() -> None:
    reference = train(SINGLE, {}, CALM)
    for ours in run_ranks(2, train, {}, CALM):
        assert_equal(ours, reference)


@pytest.mark.thorough
def test_saved_optimizers_do_not_depend_on_ranks() -> None:
    reference = train(SINGLE, {}, CALM)["saved"]
    ours = run_ranks(3, train, {}, CALM)[0]["saved"]
    assert ours.keys() == reference.keys()
    for name, part in reference.items():
        assert ours[name]["param_groups"] == part["param_groups"]
        assert list(ours[name]["state"]) == sorted(part["state"])
        for index, entry in part["state"].items():
            assert ours[name]["state"][index].keys() == entry.keys()
            for key, value in entry.items():
                torch.testing.assert_close(ours[name]["state"][index][key], value, rtol=0, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(3, 2), (1, 3), *long_form((3, 1), (2, 3))])
def test_checkpoint_continues_on_another_number(tmp_path: Path, sizes: tuple[int, int]) -> None:
    model, training = CASES["everything"]
    reference = train(SINGLE, model, CALM | training)
    begun = run_ranks(sizes[0], train, model, CALM | training, str(tmp_path), (4,), 9)
    assert {ours["step"] for ours in begun} == {9}
    assert checkpoint.list_checkpoints(tmp_path) == ["checkpoint-00000009", "checkpoint-00000004"]
    for ours in run_ranks(sizes[1], train, model, CALM | training, str(tmp_path)):
        assert ours["begun"] == 9
        assert_equal(ours | {"points": [*begun[0]["points"], *ours["points"]]}, reference)


@pytest.mark.thorough
def test_overflow_on_a_rank_skips_the_step() -> None:
    """Rank 2 alone has an infinite gradient, of a parameter that one of the three owns."""
    for applied, scale, moved in run_ranks(3, overflow):
        assert not applied
        assert scale == 2.0**15
        assert set(moved) == {0.0}
