"""No inert switch: every setting of the training section changes the weights that come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.config import TrainConfig
from small_training import recipe, trained

Network = Callable[..., Backbone]
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens": (6 * 24, {}), "seq_len": (4, {}), "batch_tokens": (12, {}), "micro_batch": (4, {"regularizer": "weak"}),
    "loss_reduction": ("sum", {"regularizer": "weak"}), "warmup_steps": (2, {}), "schedule": ("wsd", {}),
    "constant": (0.7, {}), "clip": (0.01, {}), "optimizer": ("adamw", {}), "matrix_lr": (0.01, {"optimizer": "adamw"}),
    "muon_lr": (0.01, {}), "muon_momentum": (0.5, {}), "muon_weight_decay": (0.5, {}), "muon_iterations": (2, {}),
    "muon_split": ("head", {}), "muon_for": ("square", {}),
    "embedding_lr": (0.1, {}), "head_lr": (0.01, {}), "scalar_lr": (0.1, {}), "adam_beta1": (0.5, {}),
    "adam_beta2": (0.5, {}), "adam_eps": (1e-2, {}), "adam_weight_decay": (0.5, {}), "regularizer": ("strong", {}),
    "regularizer_weight": (0.5, {"regularizer": "weak"}), "regularizer_sketch": (7, {"regularizer": "weak"}),
    "distractor": (True, {}), "distractor_weight": (0.5, {"distractor": True}),
    "distractor_count": (3, {"distractor": True}),
}  # fmt: skip
"""Setting -> another value, and what must be set beside it."""
SAME_WEIGHTS = {"deterministic", "compile", "graphs", "recompute", "kernels", "regularizer_source"}
"""Four choose between ways to the same numbers, on the CPU to the same bits; one is no setting but a hash."""
ELSEWHERE = {"loss_on", "activations", "precision", "init_from", "init_sha256", "init_missing"}
"""What needs a corpus of its own, test_marks.py, a whole attempt, test_runner.py, a GPU, test_precision.py, or a source, test_initial_weights.py."""
PAIRS = [("schedule", a, b) for a, b in (("cosine", "linear"), ("linear", "wsd"), ("cosine", "wsd"))]


def test_switches_cover_every_setting() -> None:
    assert set(CHANGES) | SAME_WEIGHTS | ELSEWHERE == set(TrainConfig.model_fields)


def off(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.thorough
@pytest.mark.parametrize("setting", CHANGES)
def test_every_setting_acts(network: Network, setting: str) -> None:
    value, required = CHANGES[setting]
    weights = [
        trained(network(awake=True, dtype=torch.float64), recipe(**config))
        for config in (required, required | {setting: value})
    ]
    assert off(*weights) > 1e-7


@pytest.mark.parametrize(("setting", "first", "second"), PAIRS)
def test_values_of_a_setting_differ(network: Network, setting: str, first: str, second: str) -> None:
    weights = [trained(network(awake=True), recipe(**{setting: word})) for word in (first, second)]
    assert off(*weights) > 1e-7
