"""Studies in words, and what was tuned before a factorial."""

from __future__ import annotations

import json
from typing import Any

import pytest
from atma_sweep.results.studies import study_text, tuning
from atma_sweep.results.studies.optuna_study import Trial, best_trial_numbers
from atma_sweep.results.studies.search import Interval, Search
from atma_sweep.results.studies.tuning import TunedLevel, TuningResult, tuning_from_options

RANGES = {"train.muon_lr": Interval(0.01, 0.1, log=True)}
LOSS = Search(RANGES, {"val.val_loss": "minimize"}, "tpe", 6, "asha")
TRIALS = [
    Trial(0, {"train.muon_lr": 0.01}, "done", (2.5,)), Trial(1, {"train.muon_lr": 0.02}, "pruned"),
    Trial(2, {"train.muon_lr": 0.03}, "done", (2.25,)), Trial(3, {"train.muon_lr": 0.04}),
]  # fmt: skip


def test_a_study_in_a_line() -> None:
    assert study_text.describe_study(LOSS, TRIALS) == (
        "study of 6 trials (tpe, pruner asha) for val.val_loss (less is better): 2 done, 1 not finished, 1 pruned, 2 to propose; "
        "best 2.25, trial 2"
    )
    assert study_text.describe_study(LOSS, []).endswith("6 to propose")
    assert study_text.study_as_json(LOSS, TRIALS)["counts"] == {"done": 2, "pruned": 1, "asked": 1}


def test_best_trial_equals_that_of_optuna() -> None:
    more = Search(RANGES, {"throughput.tokens_per_s": "maximize"})
    for search, number in ((LOSS, 2), (more, 0)):
        best_trial = study_text.best_single_objective(search, TRIALS)
        assert best_trial is not None
        assert [best_trial.number] == best_trial_numbers(search, TRIALS) == [number]
    assert study_text.best_single_objective(LOSS, TRIALS[1:2]) is None
    assert study_text.best_single_objective(Search(RANGES, {"a": "minimize", "b": "maximize"}), TRIALS) is None


def test_interval_values_respect_integers_and_steps() -> None:
    shares = [0.0, 0.3, 0.5, 0.99, 1.0]
    assert [Interval(2, 5).at(share) for share in shares] == [2, 3, 4, 5, 5]
    assert [Interval(0.0, 1.0, step=0.4).at(share) for share in shares] == pytest.approx([0, 0.4, 0.4, 0.8, 0.8])
    # the highest step is allowed although (0.3 - 0) / 0.1 and (0.7 - 0.1) / 0.1 are below 3 and 6
    tops = [Interval(0.0, 0.3, step=0.1), Interval(0.1, 0.7, step=0.1), Interval(0.0, 0.6, step=0.2)]
    assert [top.at(1.0) for top in tops] == pytest.approx([0.3, 0.7, 0.6])
    assert [Interval(1.0, 100.0, log=True).at(share) for share in shares[::2]] == pytest.approx([1, 10, 100])


TUNED = TuningResult(
    per="attn_type", trials=12, sampler="tpe", objective="val.val_loss", unit="GPU-hours",
    levels=(
        TunedLevel(level="polar", sweep="fair-tune-polar", trial=3, cell="c0", value=2.5, settings={"train.muon_lr": 0.03}, hours=1.5),
        TunedLevel(level="nope", sweep="fair-tune-nope", trial=0, cell="c1", value=2.625, settings={"train.muon_lr": 0.01}, hours=0.5),
    ),
)  # fmt: skip


def test_tuning_result_is_restored_and_described() -> None:
    options = json.loads(json.dumps({tuning.OPTION_KEY: tuning.tuning_as_json(TUNED)}))
    assert tuning_from_options(options) == TUNED
    assert TUNED.note.startswith(
        "Tuned beforehand: 12 trials per level of attn_type (tpe, for val.val_loss), 2 GPU-hours in total"
    )
    assert "polar train.muon_lr 0.03 (trial 3 of fair-tune-polar, 2.5, 1.5 GPU-hours)" in TUNED.note


@pytest.mark.parametrize(
    ("key", "value"), [("levels", None), ("levels", [{"level": "a"}]), ("trials", "x"), ("per", None)]
)
def test_what_is_no_tuning_is_none(key: str, value: Any) -> None:
    option = tuning.tuning_as_json(TUNED)
    if key == "per":
        del option["per"]
    else:
        option[key] = value
    assert tuning_from_options({tuning.OPTION_KEY: option}) is None
    assert tuning_from_options({}) is None
