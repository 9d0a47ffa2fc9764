"""The simulation of looking again: it says what theory does, and that the correction is needed."""

from __future__ import annotations

import pytest
from scipy import stats
from simulations import looks

EACH = (3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
def test_error_rate_holds_only_if_looks_are_counted(spending: str) -> None:
    assert looks.error((8,), None, draws=40_000) == pytest.approx(0.05, abs=0.004), "one look is an ordinary test"
    assert looks.error(EACH, None, draws=40_000) > 0.13
    assert looks.error(EACH, spending, draws=40_000) < 0.065


def test_wide_goal_stops_at_the_first_look() -> None:
    seeds, held = looks.stopped(EACH, None, 1e9, draws=40_000)
    assert (seeds, held) == (3.0, pytest.approx(0.95, abs=0.004))
    seeds, held = looks.stopped(EACH, "obrien-fleming", 0.0, draws=40_000)
    z = looks.alpha_levels(EACH, 8)[-1]
    assert seeds == 8.0
    assert held == pytest.approx(1 - z, abs=0.004)
    assert stats.norm.isf(z / 2) == pytest.approx(2.07, abs=0.03)


def test_docs_tables_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert looks.main(["--draws", "2000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines if line] == [5] * 11
