"""Curves of large sweeps: read by plain cursors, thinned, and drawn together, with the numbers of the whole curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.dashboard.page import dashboard
from atma_sweep.reports.data import gather, one_reading
from atma_sweep.reports.figures import loss as loss_figure
from atma_sweep.reports.figures import make_figure, style
from atma_sweep.reports.figures.files import drawn
from atma_sweep.reports.figures.loss import kept
from atma_sweep.results.store import attempt_queries
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner
from atma_sweep.results.store.store import Store
from hypothesis import given
from hypothesis import strategies as st

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def loss_at(index: int, step: int) -> float:
    return 3 + index + math.cos(step * (index + 1))


@pytest.fixture
def many(empty: Store, make: Any) -> Store:
    """Fourteen cells with 90 points each; every tenth step had no finite loss, every thirtieth a validation."""
    cell, _ = make
    cells = [cell(index, seed=index, attn_type=("polar", "nope")[index % 2]) for index in range(14)]
    empty.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for index, one in enumerate(cells):
        attempt = empty.start_attempt(one.id, owner=ME, fence=1)
        points = [
            CurvePoint(
                step=step,
                tokens=step * 2**33,
                wall_s=step / 8,
                train_loss=None if step % 10 == 9 else loss_at(index, step),
                val_loss=5.0 if step % 30 == 0 else None,
            )
            for step in range(90)
        ]
        Recorder(empty, attempt.id, 1).curve(points)
        empty.finish_attempt(attempt.id, 1, "done")
    return empty


@given(st.integers(1, 5000), st.integers(2, 300))
def test_kept_points_are_few_even_and_reach_both_ends(points: int, most: int) -> None:
    found = kept(points, most)
    assert len(found) <= most
    assert (found[0], found[-1]) == (0, points - 1)
    if points <= most:
        assert list(found) == list(range(points))
    elif len(found) > 2:
        gaps = np.diff(found)
        assert len(set(gaps[1:])) == 1
        assert 0 < gaps[0] <= gaps[-1]


def test_a_curve_is_what_the_store_says(many: Store) -> None:
    attempts = [many.attempts(f"{index:012x}")[0].id for index in (0, 3)]
    columns = ("step", "tokens", "train_loss", "val_loss")
    with many.snapshot() as seen:
        found = dict(seen.curve_arrays([*attempts, 999], columns))
        trained = dict(seen.curve_arrays(attempts, columns, having=["train_loss"]))
    assert list(found) == attempts
    for attempt, points in found.items():
        for row, point in zip(points, many.curve(attempt), strict=True):
            expected = [point.step, point.tokens, point.train_loss, point.val_loss]
            assert list(map(plain, row)) == [None if one is None else float(one) for one in expected]
        assert trained[attempt][:, 0].tolist() == [row[0] for row in points if not math.isnan(row[2])]
        assert len(trained[attempt]) == 81


def plain(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def test_the_figure_of_a_large_sweep_is_thinned_and_says_so(many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_figure("loss", many, "s")
    assert len(whole.frame) == 14 * 81
    assert not any("Drawn" in note for note in whole.notes)
    monkeypatch.setattr(loss_figure, "MOST_POINTS", 14 * 20)
    monkeypatch.setattr(loss_figure, "FEWEST_POINTS", 5)
    thin = make_figure("loss", many, "s")
    assert thin.notes[1] == "Drawn: at most 20 of up to 81 points a line."
    assert list(thin.frame.columns) == list(whole.frame.columns)
    assert thin.frame.dtypes.astype(str).to_dict() == whole.frame.dtypes.astype(str).to_dict()
    whole_rows = {(row["cell"], row["step"]): row for row in whole.as_json()["rows"]}
    for cell, rows in thin.frame.groupby("cell"):
        assert 10 < len(rows) <= 20
        assert rows["step"].min() == 0
        assert rows["step"].max() == 88
        for row in rows.to_dict("records"):
            assert row == whole_rows[cell, row["step"]], "smoothed over all points, not over those that are left"
    assert set(thin.trace["cells"]) == set(whole.trace["cells"])


def test_smoothing_is_a_running_mean(many: Store) -> None:
    frame = make_figure("loss", many, "s").frame
    one = frame[frame["cell"] == f"{3:012x}"].reset_index()
    width = max(1, len(one) // loss_figure.SMOOTHED)
    assert width == 2
    values = [loss_at(3, step) for step in one["step"]]
    expected = [sum(values[max(0, i - 1) : i + 1]) / len(values[max(0, i - 1) : i + 1]) for i in range(len(values))]
    assert list(one["smoothed"]) == pytest.approx(expected, abs=1e-12)


def test_many_curves_are_drawn_together_each_with_all_its_points(many: Store) -> None:
    from matplotlib.collections import LineCollection

    made = make_figure("loss", many, "s")
    with style.settings():
        figure = drawn(made)
    for axes, column, scale in zip(figure.axes[:2], ("tokens", "wall_s"), (1e6, 1.0), strict=True):
        collections = [one for one in axes.collections if isinstance(one, LineCollection)]
        assert len(collections) == 2, "one a mixer"
        found = sorted(tuple(map(tuple, segment)) for one in collections for segment in one.get_segments())
        expected = sorted(
            tuple(zip(rows[column] / scale, rows["smoothed"], strict=True)) for _, rows in made.frame.groupby("cell")
        )
        assert len(found) == 14
        assert np.allclose(np.array(found), np.array(expected))
        low, high = axes.get_ylim()
        assert low < made.frame["smoothed"].min() < made.frame["smoothed"].max() < high


def test_a_few_curves_are_lines_of_their_own(many: Store, make: Callable[..., Any]) -> None:
    cells = [many.cell(f"{index:012x}") for index in range(3)]
    many.record_revision("few", grid_text="x", grid_file="x", cells=cells)
    with style.settings():
        figure = drawn(make_figure("loss", many, "few"))
    assert [len(axes.lines) for axes in figure.axes[:2]] == [3, 3]


def test_a_page_is_made_of_one_reading(many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str | None] = []
    values = attempt_queries.sweep_values

    def counted(session: Any, sweep: str | None, *rest: Any, **more: Any) -> Any:
        read.append(sweep)
        return values(session, sweep, *rest, **more)

    monkeypatch.setattr(attempt_queries, "sweep_values", counted)
    dashboard(many)
    assert read == ["s"]


def test_one_reading_is_of_one_moment_and_ends(many: Store) -> None:
    def measure(value: float) -> None:
        attempt = many.start_attempt(f"{0:012x}", kind="evaluate", owner=ME, fence=1)
        Recorder(many, attempt.id, 1).measurements([Measurement(probe="val", metric="val_loss", value=value)])
        many.finish_attempt(attempt.id, 1, "done")

    measure(1.0)
    key = (f"{0:012x}", "val", "val_loss", 0)
    with one_reading():
        first = gather(many)
        measure(2.0)
        assert gather(many, "s") is gather(many, "s", revision=1) is gather(many, lengths=[]) is first
        assert gather(many, orphans=True) is not first
        assert first.values[key].value == 1.0
    assert gather(many).values[key].value == 2.0
