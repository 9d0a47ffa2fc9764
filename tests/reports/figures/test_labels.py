"""Words at the ends of lines: apart, in order, and no further from their lines than that takes."""

import numpy as np
import pytest
from atma_sweep.reports.figures.labels import apart, within
from scipy.optimize import minimize


@pytest.mark.parametrize("seed", range(5))
def test_labels_move_as_little_as_keeps_them_apart(seed: int) -> None:
    chance = np.random.default_rng(seed)
    places = chance.uniform(0, 5, 6)
    found = np.array(apart(list(places), 1.0))
    order = np.argsort(places)
    assert (np.diff(found[order]) >= 1 - 1e-9).all()
    best = minimize(
        lambda moved: float(((moved - np.sort(places)) ** 2).sum()),
        np.arange(6.0),
        constraints=[{"type": "ineq", "fun": lambda moved: np.diff(moved) - 1}],
    )
    assert ((found - places) ** 2).sum() == pytest.approx(best.fun, abs=1e-5)


def test_labels_that_are_apart_stay() -> None:
    assert apart([3.0, 1.0, 2.0], 0.5) == [3.0, 1.0, 2.0]
    assert apart([], 1.0) == []


def test_labels_stay_between_their_bounds() -> None:
    assert within([-2.0, 0.0, 2.0, 9.0], 2.0, 0.0, 10.0) == [0.0, 2.0, 4.0, 9.0]
    assert within([6.0, 12.0, 10.0], 2.0, 0.0, 10.0) == [6.0, 10.0, 8.0]
    assert within([3.0, 5.0], 2.0, 0.0, 10.0) == [3.0, 5.0]
