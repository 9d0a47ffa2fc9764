"""Looks at a contrast while seeds are added, against plain arithmetic, SciPy's Student and statsmodels' least squares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from atma_sweep.results.contrasts import Contrast
from atma_sweep.results.designs import design_choice
from atma_sweep.results.designs.design_space import DesignSpace, hierarchical_closure
from atma_sweep.results.stopping import contrast_estimator
from atma_sweep.results.stopping import interim_analysis as look
from atma_sweep.results.stopping.alpha_spending import critical_values
from atma_sweep.results.stopping.interim_analysis import SeedResult, StoppingStatus, evaluate_rule
from atma_sweep.results.stopping.stopping_rule import StoppingRule, rule_as_json, rule_from_options
from scipy import stats
from tiers import long_form

AXES: Mapping[str, tuple[str, ...]] = {"attn_type": ("polar", "nope"), "memory": ("off", "on"), "window": ("off", "on")}
MEMORY = Contrast(probe="val", metric="val_loss", length=0, axis="memory", level="on", reference="off")
RULE = StoppingRule(contrast=MEMORY, width=0.5, seeds=tuple(range(8)))
Number = Callable[[Mapping[str, str], int], float | None]
RANDOM = np.random.default_rng(0)
NOISE = {key: RANDOM.normal() for key in itertools.product(*AXES.values(), range(8))}


def noisy(levels: Mapping[str, str], seed: int) -> float:
    """Memory is worth 1 in polar, 3 in nope."""
    worth = {"polar": 1.0, "nope": 3.0}[levels["attn_type"]] * (levels["memory"] == "on")
    return worth + NOISE[(*(levels[axis] for axis in AXES), seed)]


def runs(seeds: int, number: Number = noisy, *, excluded: Any = (), **fixed: str) -> list[SeedResult]:
    """Every configuration at so many seeds; those of `left`, (levels, seed), are not finished."""
    results = []
    for combination in itertools.product(*AXES.values()):
        levels = dict(zip(AXES, combination, strict=True))
        if all(levels[axis] == word for axis, word in fixed.items()):
            results += [
                SeedResult(seed, levels, (combination, seed) not in excluded, number(levels, seed))
                for seed in range(seeds)
            ]
    return results


def student(d: list[float], alpha: float) -> tuple[float, float]:
    low, high = stats.t.interval(1 - alpha, len(d) - 1, np.mean(d), stats.sem(d))
    return float(low), float(high)


def test_interval_is_students_t_at_the_level_of_its_look() -> None:
    rule = replace(RULE, width=1e-9)
    seen = evaluate_rule(rule, runs(5), None)
    bounds = critical_values([3 / 8, 4 / 8, 5 / 8])
    assert [each_look.seeds for each_look in seen.looks] == [3, 4, 5]
    for each_look, z in zip(seen.looks, bounds, strict=True):
        d = [np.mean([NOISE[a, "on", w, s] - NOISE[a, "off", w, s] for a, w in itertools.product(("polar", "nope"), ("off", "on"))]) + 2 for s in range(each_look.seeds)]  # fmt: skip
        level = 2 * stats.norm.sf(z)
        assert each_look.level == pytest.approx(level, rel=1e-6)
        assert (each_look.low, each_look.high) == pytest.approx(student([float(x) for x in d], level), rel=1e-9)
        assert each_look.configurations == 4
    assert (seen.verdict, seen.seeds_launched, seen.seeds_wanted, seen.unfinished_cells) == ("open", 5, 6, 0)


def test_strata_have_equal_weights() -> None:
    # polar without half of its pairs: still half of the mean
    subset = [run for run in runs(3) if run.levels["attn_type"] == "nope" or run.levels["window"] == "off"]
    look = evaluate_rule(RULE, subset, None).looks[0]
    mean = {a: np.mean([NOISE[a, "on", w, s] - NOISE[a, "off", w, s] for w in windows for s in range(3)]) for a, windows in (("polar", ("off",)), ("nope", ("off", "on")))}  # fmt: skip
    assert look.mean == pytest.approx(2 + (mean["polar"] + mean["nope"]) / 2)
    inside = replace(RULE, contrast=replace(MEMORY, within={"attn_type": "polar"}))
    seen = evaluate_rule(inside, [*runs(1, attn_type="nope"), *runs(3, attn_type="polar")], None)
    assert (seen.seeds_launched, seen.cells, seen.looks[0].configurations) == (3, 12, 2)


def test_no_look_before_all_of_its_cells_are_finished() -> None:
    last = ("polar", "off", "off"), 3
    seen = evaluate_rule(RULE, runs(4, excluded=[last]), None)
    assert ([look.seeds for look in seen.looks], seen.seeds_launched, seen.unfinished_cells, seen.seeds_wanted) == (
        [3],
        4,
        1,
        4,
    )
    assert seen.verdict == "open"
    first = ("polar", "off", "off"), 0
    assert evaluate_rule(RULE, runs(3, excluded=[first]), None).looks == ()
    # a cell that was never launched is none that is finished
    assert evaluate_rule(RULE, runs(3)[1:], None).unfinished_cells == 1


@pytest.mark.parametrize(
    ("rule", "seeds", "number", "verdict"),
    [
        (replace(RULE, width=50.0), 3, noisy, "narrow"),
        (replace(RULE, width=None, sure=True), 8, lambda levels, seed: noisy(levels, seed) + 40 * (levels["memory"] == "on"), "sure"),
        (replace(RULE, width=1e-9), 8, noisy, "most"),
        (RULE, 3, lambda levels, seed: None, "nothing"),
        # accuracies of nothing: no spread to judge by, so it goes on
        (replace(RULE, sure=True), 3, lambda levels, seed: 0.0, "open"),
    ],
)  # fmt: skip
def test_verdicts(rule: StoppingRule, seeds: int, number: Number, verdict: str) -> None:
    seen = evaluate_rule(rule, runs(seeds, number), None)
    assert seen.verdict == verdict
    assert seen.seeds_wanted == (4 if verdict == "open" else seeds)


def test_missing_values_drop_the_smallest_part() -> None:
    def without(*lost: tuple[tuple[str, ...], int]) -> Number:
        return lambda levels, seed: None if (tuple(levels.values()), seed) in lost else noisy(levels, seed)

    # one of four pairs lacks one of six seeds: a quarter of the seed, a sixth of the pair
    status = evaluate_rule(replace(RULE, width=1e-9), runs(6, without((("polar", "on", "off"), 5))), None)
    assert (status.looks[-1].seeds, status.looks[-1].used, status.looks[-1].left_out) == (5, 5, 0)
    assert status.seeds_wanted == 7, "a further seed takes its place"
    # one that never has a number counts nowhere, and costs no seed
    lost = [(("polar", "on", "off"), seed) for seed in range(6)]
    none = evaluate_rule(replace(RULE, width=1e-9), runs(6, without(*lost)), None)
    assert [(look.used, look.configurations, look.left_out) for look in none.looks] == [(n, 3, 1) for n in (3, 4, 5, 6)]
    # a single pair loses the seed
    alone = [run for run in runs(4, without((("polar", "on", "off"), 1))) if run.levels["attn_type"] == "polar" and run.levels["window"] == "off"]  # fmt: skip
    last = evaluate_rule(replace(RULE, width=1e-9), alone, None).looks[-1]
    assert (last.seeds, last.used) == (4, 3)
    assert last.level == pytest.approx(2 * stats.norm.sf(critical_values([2 / 8, 3 / 8])[-1]), rel=1e-6)


def test_of_a_partial_design_each_seed_is_least_squares() -> None:
    space = DesignSpace(AXES)
    design, members = design_choice.d_optimal(space, hierarchical_closure(space.terms(1)), 6)
    every = [dict(zip(AXES, combination, strict=True)) for combination in itertools.product(*AXES.values())]
    subset = [run for run in runs(4) if space.index(run.levels) in set(members.tolist())]
    look = evaluate_rule(RULE, subset, design).looks[-1]
    fitted = []
    for seed in range(4):
        frame = pd.DataFrame([{**run.levels, "y": run.value} for run in subset if run.seed == seed])
        fit = smf.ols("y ~ C(attn_type) + C(memory, Treatment('off')) + C(window)", frame).fit()
        fitted.append(float(fit.params["C(memory, Treatment('off'))[T.on]"]))
    assert look.mean == pytest.approx(np.mean(fitted))
    assert look.error == pytest.approx(stats.sem(fitted))
    # a design that holds every combination is a complete grid: pairs
    complete = replace(design, runs=8)
    assert evaluate_rule(RULE, runs(4), complete).looks == evaluate_rule(RULE, runs(4), None).looks
    # and what it cannot tell needs no cells
    mixer_contrast = replace(MEMORY, axis="attn_type", level="rope", reference="nope")
    assert not contrast_estimator.ContrastEstimator(every[:6], mixer_contrast, design).used_configurations.any()


@pytest.mark.thorough
def test_p_belongs_to_the_interval() -> None:
    for shift in np.linspace(-3, 3, 4):
        seen = evaluate_rule(replace(RULE, width=1e-9), runs(6, lambda levels, seed: noisy(levels, seed) + float(shift) * (levels["memory"] == "on")), None)  # noqa: B023 # fmt: skip
        last = seen.last_look
        assert last is not None
        assert (seen.p() < 0.05) == (last.low > 0 or last.high < 0)
    margin = max(abs(last.low), abs(last.high))
    assert seen.p_equivalence(margin * 1.001) < 0.025 < seen.p_equivalence(margin * 0.999)
    assert math.isnan(evaluate_rule(RULE, runs(2), None).p())


def test_a_rule_as_a_database_keeps_it() -> None:
    rule = replace(RULE, contrast=replace(MEMORY, within={"attn_type": "polar"}, length=None), wave=2, sure=True)
    assert rule_from_options({"stop": rule_as_json(rule)}) == rule
    assert rule.seeds_at_looks == (3, 5, 7, 8)
    for wrong in (
        None, {}, {"stop": 3}, {"stop": {}}, {"stop": rule_as_json(rule) | {"seeds": [0, 0]}}, {"stop": rule_as_json(rule) | {"first": 9}},
        {"stop": rule_as_json(rule) | {"spending": "x"}}, {"stop": rule_as_json(rule) | {"wave": 0}}, {"stop": rule_as_json(rule) | {"contrast": {}}},
        {"stop": rule_as_json(rule) | {"width": "wide"}}, {"stop": rule_as_json(rule) | {"width": 0}},
    ):  # fmt: skip
        assert rule_from_options(wrong) is None


def shares(rule: StoppingRule, draws: int) -> float:
    """Return how often adding seeds makes a zero effect of memory significant."""
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(draws):
        noise = random.normal(size=(4, rule.max_seeds))
        levels = [{"memory": m, "window": w} for m in ("off", "on") for w in ("off", "on")]
        seeds, seen = rule.first, None
        while seen is None or seen.seeds_wanted > seeds:
            seeds = seeds if seen is None else seen.seeds_wanted
            seen = evaluate_rule(
                rule,
                [
                    SeedResult(s, levels_of_run, True, noise[i, s])
                    for i, levels_of_run in enumerate(levels)
                    for s in range(seeds)
                ],
                None,
            )
        wrong += seen.verdict == "sure"
    return wrong / draws


@pytest.mark.thorough
@pytest.mark.parametrize("spending", ["obrien-fleming", *long_form("pocock")])
def test_looking_often_buys_no_significance(spending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = replace(RULE, width=None, sure=True, spending=spending)
    assert shares(rule, 1000) < 0.08  # 5.7%, and three standard errors
    monkeypatch.setattr(look, "alpha_levels", lambda seeds, most, **how: [0.05] * len(seeds))
    assert shares(rule, 1000) > 0.11  # 14.5%, less three


def test_the_verdict_is_that_of_the_numbers_alone() -> None:
    seen = [evaluate_rule(RULE, runs(n), None) for n in (3, 4)]
    assert [type(status) for status in seen] == [StoppingStatus, StoppingStatus]
    assert seen[1].looks[0] == seen[0].looks[0], "a later launch sees the earlier looks as they were"
