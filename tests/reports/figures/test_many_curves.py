"""Curves of large sweeps: read by plain cursors, thinned, and drawn together, with the numbers of the whole curve."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.dashboard.page import dashboard
from atma_sweep.reports.figures import loss as loss_figure
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.files import drawn
from atma_sweep.reports.figures.loss import thinned_indices
from atma_sweep.reports.sweep_data import ReportError, cached_reads, load_sweep_data
from atma_sweep.results import paper
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner
from atma_sweep.results.store.store import Store
from hypothesis import given
from hypothesis import strategies as st
from reads import sweeps_read

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def loss_at(index: int, step: int) -> float:
    return 3 + index + math.cos(step * (index + 1))


@pytest.fixture
def large_sweep(empty: Store, make: Any) -> Store:
    """Fourteen cells with 90 points each; every tenth step had no finite loss, every thirtieth a validation."""
    cell, _ = make
    cells = [cell(index, seed=index, attn_type=("polar", "nope")[index % 2]) for index in range(14)]
    empty.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for index, record in enumerate(cells):
        attempt = empty.start_attempt(record.id, owner=ME, fence=1)
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
        DatabaseRecorder(empty, attempt.id, 1).curve(points)
        empty.finish_attempt(attempt.id, 1, "done")
    return empty


@given(st.integers(1, 5000), st.integers(2, 300))
def test_thinned_indices_are_even_and_reach_both_ends(points: int, most: int) -> None:
    indices = thinned_indices(points, most)
    assert len(indices) <= most
    assert (indices[0], indices[-1]) == (0, points - 1)
    if points <= most:
        assert list(indices) == list(range(points))
    elif len(indices) > 2:
        gaps = np.diff(indices)
        assert len(set(gaps[1:])) == 1
        assert 0 < gaps[0] <= gaps[-1]


def test_a_curve_is_what_the_store_says(large_sweep: Store) -> None:
    attempts = [large_sweep.attempts(f"{index:012x}")[0].id for index in (0, 3)]
    columns = ("step", "tokens", "train_loss", "val_loss")
    with large_sweep.snapshot() as seen:
        arrays = dict(seen.curve_arrays([*attempts, 999], columns))
        trained = dict(seen.curve_arrays(attempts, columns, having=["train_loss"]))
    assert list(arrays) == attempts
    for attempt, points in arrays.items():
        for row, point in zip(points, large_sweep.curve(attempt), strict=True):
            expected = [point.step, point.tokens, point.train_loss, point.val_loss]
            assert list(map(plain, row)) == [
                None if expected_value is None else float(expected_value) for expected_value in expected
            ]
        assert trained[attempt][:, 0].tolist() == [row[0] for row in points if not math.isnan(row[2])]
        assert len(trained[attempt]) == 81


def plain(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


@pytest.mark.thorough
def test_the_figure_of_a_large_sweep_is_thinned_and_says_so(
    large_sweep: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = make_figure("loss", large_sweep, "s")
    # of 90 steps nine have no training loss, of which none has a validation
    assert len(complete.frame) == 14 * 81
    assert not any("Drawn" in note for note in complete.notes)
    monkeypatch.setattr(loss_figure, "MOST_POINTS", 14 * 20)
    monkeypatch.setattr(loss_figure, "FEWEST_POINTS", 5)
    thin = make_figure("loss", large_sweep, "s")
    assert "Drawn: at most 20 of up to 81 points per curve." in thin.notes
    assert list(thin.frame.columns) == list(complete.frame.columns)
    assert thin.frame.dtypes.astype(str).to_dict() == complete.frame.dtypes.astype(str).to_dict()
    complete_rows = {(row["cell"], row["step"]): row for row in complete.as_json()["rows"]}
    for cell, rows in thin.frame.groupby("cell"):
        assert 5 < len(rows) <= 20
        assert rows["step"].min() == 0
        assert rows["step"].max() == 88
        assert set(rows[rows["val_loss"].notna()]["step"]) == {0, 30, 60}, (
            "no validation is left out for a training loss"
        )
        for row in rows.to_dict("records"):
            expected = complete_rows[cell, row["step"]]
            assert {name: None if value != value else value for name, value in row.items()} == expected, (
                "smoothed over all"
            )
    assert set(thin.trace["cells"]) == set(complete.trace["cells"])


@pytest.mark.thorough
def test_smoothing_is_an_exponential_mean_of_what_came_before(large_sweep: Store) -> None:
    figure_data = make_figure("loss", large_sweep, "s")
    curve = figure_data.frame[figure_data.frame["cell"] == f"{3:012x}"].reset_index()
    assert "training loss, exponential mean of span 2 points" in " ".join(figure_data.notes)
    # by hand: of a span of 2, the weight of each earlier point is a third of that of the next
    sum_, weight, expected = 0.0, 0.0, []
    for step in curve["step"]:
        sum_, weight = sum_ / 3 + loss_at(3, step), weight / 3 + 1
        expected.append(sum_ / weight)
    assert list(curve["smoothed"]) == pytest.approx(expected, abs=1e-12)


def test_group_mean_and_band_are_over_configurations(empty: Store, make: Any) -> None:
    cell, _ = make
    losses = {("weak", 0): 4.0, ("weak", 1): 2.0, ("strong", 0): 1.0}
    cells = [cell(i, seed=seed, reg_mode=mode) for i, (mode, seed) in enumerate(losses)]
    curves(
        empty,
        "seeds",
        cells,
        {record.id: {0: 10.0, 5: value} for record, value in zip(cells, losses.values(), strict=True)},
    )
    means = loss_figure.mean_curves(make_figure("loss", empty, "seeds").frame, "val_loss")
    by_mode = {(row["first"], row["tokens"]): row for row in means.to_dict("records")}
    # one axis varies besides the seed, so that every mode is a line: of weak the spread is that of its seeds
    assert by_mode["weak", 50]["value"] == pytest.approx(3.0)
    assert by_mode["weak", 50]["sd"] == pytest.approx(math.sqrt(2))
    assert by_mode["strong", 50]["value"] == 1.0
    assert math.isnan(by_mode["strong", 50]["sd"])
    frame = make_figure("loss", empty, "seeds").frame.assign(first="", second="")
    (end,) = loss_figure.mean_curves(frame, "val_loss").query("tokens == 50").to_dict("records")
    # the two seeds of weak count once: (3 + 1) / 2, not (4 + 2 + 1) / 3
    assert (end["value"], end["sd"], end["cells"]) == (pytest.approx(2.0), pytest.approx(math.sqrt(2)), 3)


def curves(store: Store, name: str, cells: list[Any], losses: dict[str, dict[int, float]], train: bool = False) -> None:
    store.record_revision(name, grid_text="x", grid_file="x", cells=cells)
    for record in cells:
        attempt = store.start_attempt(record.id, owner=ME, fence=1)
        points = [
            CurvePoint(step=step, tokens=10 * step, wall_s=float(step), train_loss=value if train else None, val_loss=None if train else value)
            for step, value in losses[record.id].items()
        ]  # fmt: skip
        DatabaseRecorder(store, attempt.id, 1).curve(points)
        store.finish_attempt(attempt.id, 1, "done")


def test_mean_curve_interpolates_between_points(empty: Store, make: Any) -> None:
    cell, _ = make
    cells = [cell(0, seed=0), cell(1, seed=1)]
    curves(empty, "s", cells, {cells[0].id: {0: 8.0, 10: 4.0}, cells[1].id: {0: 8.0, 5: 2.0}})
    means = loss_figure.mean_curves(make_figure("loss", empty, "s").frame, "val_loss")
    mean_by_tokens = {row["tokens"]: (row["value"], row["cells"]) for row in means.to_dict("records")}
    # at 50 tokens the first is at 6; the second ends there
    assert mean_by_tokens == {0: (8.0, 2), 50: (pytest.approx(4.0), 2)}


def test_training_loss_is_drawn_without_validation(empty: Store, make: Any) -> None:
    cell, _ = make
    curves(empty, "s", [cell(0)], {cell(0).id: {1: 9.0, 2: 8.0}}, train=True)
    figure_data = make_figure("loss", empty, "s")
    assert figure_data.notes[:2] == (
        "No validation loss is stored.",
        "Lines: training loss (n = 2 points per curve), not smoothed.",
    )
    with drawing.settings():
        assert drawn(figure_data).get_supylabel() == "training loss (nats per token)"


@pytest.mark.thorough
def test_lines_are_coloured_by_the_axis_of_choice(published: Store) -> None:
    figure_data = make_figure("loss", published, "printed-v2", options={"by": "memory"})
    assert figure_data.trace["options"] == {"by": "memory"}
    means = loss_figure.mean_curves(figure_data.frame, "val_loss")
    expected: dict[tuple[str, int], list[float]] = {}
    for row in paper.rows("curves"):
        expected.setdefault((row["memory"], int(row["step"])), []).append(float(row["val_loss"]))
    steps = dict(zip(figure_data.frame["tokens"], figure_data.frame["step"], strict=True))
    mean_by_step = {(row["first"], steps[row["tokens"]]): row for row in means.to_dict("records")}
    assert mean_by_step.keys() == expected.keys()
    for key, values in expected.items():
        assert mean_by_step[key]["value"] == pytest.approx(np.mean(values), abs=1e-6)
        assert mean_by_step[key]["sd"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    with drawing.settings():
        labels = [text.get_text() for text in drawn(figure_data).legends[0].get_texts()]
    assert labels == ["with memory", "no memory"]


@pytest.mark.parametrize(
    ("by", "why"),
    [
        ("windwo", "sweep s has no such axis; .*did you mean window|no such axis"),
        ("window", "all cells of sweep s have the same level of it"),
    ],
)
def test_constant_axis_is_refused_in_single_line(large_sweep: Store, by: str, why: str) -> None:
    with pytest.raises(ReportError, match=why) as error:
        make_figure("loss", large_sweep, "s", options={"by": by})
    assert "\n" not in str(error.value)


@pytest.mark.thorough
def test_logarithmic_axes_on_request(large_sweep: Store) -> None:
    figure_data = make_figure("loss", large_sweep, "s", options={"log": True})
    with drawing.settings():
        axes = drawn(figure_data).axes
    assert {(panel.get_xscale(), panel.get_yscale()) for panel in axes} == {("log", "log")}
    assert any("Logarithmic axes omit" in note for note in figure_data.notes)


@pytest.mark.thorough
def test_panels_share_an_axis_of_the_last_losses(published: Store) -> None:
    """The first losses, above 10 nats, do not flatten the last ones, which lie between 3.1 and 3.4."""
    with drawing.settings():
        panels = drawn(make_figure("loss", published, "printed-v2")).axes[:3]
    (low, high) = {panel.get_ylim() for panel in panels}.pop()
    assert {panel.get_ylim() for panel in panels} == {(low, high)}
    assert low < 3.15
    assert 3.4 < high < 6
    assert all(panel.get_xlim()[0] < 0.2 * 996.1 < 996.1 < panel.get_xlim()[1] for panel in panels), [
        p.get_xlim() for p in panels
    ]


@pytest.mark.thorough
def test_page_reads_sweep_once(large_sweep: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read = sweeps_read(monkeypatch)
    dashboard(large_sweep)
    assert read == ["s"]


@pytest.mark.thorough
def test_cached_reads_are_consistent_and_end(large_sweep: Store) -> None:
    def measure(value: float) -> None:
        attempt = large_sweep.start_attempt(f"{0:012x}", kind="evaluate", owner=ME, fence=1)
        DatabaseRecorder(large_sweep, attempt.id, 1).measurements(
            [Measurement(probe="val", metric="val_loss", value=value)]
        )
        large_sweep.finish_attempt(attempt.id, 1, "done")

    measure(1.0)
    key = (f"{0:012x}", "val", "val_loss", 0)
    with cached_reads():
        first = load_sweep_data(large_sweep)
        measure(2.0)
        assert (
            load_sweep_data(large_sweep, "s")
            is load_sweep_data(large_sweep, "s", revision=1)
            is load_sweep_data(large_sweep, lengths=[])
            is first
        )
        assert load_sweep_data(large_sweep, orphans=True) is not first
        with cached_reads():
            assert load_sweep_data(large_sweep) is first
        assert load_sweep_data(large_sweep) is first
        assert first.values[key].value == 1.0
    assert load_sweep_data(large_sweep).values[key].value == 2.0


def test_mean_over_time_ends_with_first_cell(empty: Store, make: Any) -> None:
    cell, _ = make
    cells = [cell(0, seed=0), cell(1, seed=1)]
    # a step is a second: the second cell ends after 5 of 10
    curves(empty, "s", cells, {cells[0].id: {0: 8.0, 10: 4.0}, cells[1].id: {0: 8.0, 5: 2.0}})
    figure_data = make_figure("loss", empty, "s", options={"against": "time"})
    assert figure_data.trace["options"] == {"against": "time"}
    means = loss_figure.mean_curves(figure_data.frame, "val_loss", "wall_s")
    assert {row["wall_s"]: (row["value"], row["cells"]) for row in means.to_dict("records")} == {
        0: (8.0, 2),
        5: (4.0, 2),
    }
    with drawing.settings():
        figure = drawn(figure_data)
    assert figure.get_supxlabel() == "training time (seconds)"
    (mark,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    # the mean of the cells' last times and losses, as no mean line could rank cells that end at different times
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([7.5], [3.0])
    assert any("without interruptions" in note for note in figure_data.notes)
    plainly = make_figure("loss", empty, "s")
    assert (plainly.frame.to_csv(), "options" in plainly.trace) == (figure_data.frame.to_csv(), False)


@pytest.mark.thorough
def test_compared_sweep_adds_points_with_time(empty: Store, make: Any) -> None:
    cell, _ = make
    curves(empty, "s", [cell(0)], {cell(0).id: {0: 8.0, 7200: 4.0}})
    figure_data = make_figure("loss", empty, "s", options={"against": "time", "compare": "printed-atlas"})
    reference_rows = figure_data.frame[figure_data.frame["first"] == "printed-atlas"]
    # five and a half after two and a half hours, 4.9 after half the time
    assert sorted(zip(reference_rows["wall_s"], reference_rows["val_loss"], strict=True)) == [(4500, 4.9), (9000, 5.5)]
    assert set(figure_data.trace["cells"]) == {cell(0).id}, "what is this sweep's is traced"
    with drawing.settings():
        figure = drawn(figure_data)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["all cells", "printed-atlas, no memory", "printed-atlas, ATLAS"]
    assert figure.get_supxlabel() == "training time (hours)"
    with pytest.raises(ReportError, match="has no stored training curve"):
        make_figure("loss", empty, "s", options={"compare": "printed-atlas"})
    compared_figure = make_figure("loss", empty, "s", options={"compare": "printed-v2"})
    assert (compared_figure.frame["first"] == "printed-v2").sum() == len(paper.rows("curves"))


def test_compared_training_without_time_is_omitted(empty: Store, make: Any) -> None:
    cell, _ = make
    curves(empty, "mine", [cell(0)], {cell(0).id: {0: 8.0, 5: 4.0}})
    empty.record_revision("theirs", grid_text="x", grid_file="x", cells=[cell(1), cell(2), cell(3)])
    for index, seconds in ((1, 60.0), (2, None)):
        attempt = empty.start_attempt(cell(index).id, owner=ME, fence=1)
        measurements = [Measurement(probe="val", metric="val_loss", value=3.0, unit="nats/token")]
        if seconds is not None:
            measurements.append(Measurement(probe="throughput", metric="train_seconds", value=seconds, unit="s"))
        DatabaseRecorder(empty, attempt.id, 1).measurements(measurements)
        empty.finish_attempt(attempt.id, 1, "done")
    figure_data = make_figure("loss", empty, "mine", options={"against": "time", "compare": "theirs"})
    assert figure_data.frame[figure_data.frame["first"] == "theirs"]["wall_s"].tolist() == [60.0]
    assert "No curve or time is stored for 2 cells of sweep theirs." in figure_data.notes


def test_constant_mixer_uses_two_further_axes(empty: Store, make: Any) -> None:
    cell, _ = make
    cells = [
        cell(i, memory=memory, window=window)
        for i, (memory, window) in enumerate((m, w) for m in ("off", "omega") for w in ("off", "on"))
    ]
    curves(empty, "s", cells, {record.id: {0: 8.0, 5: float(i)} for i, record in enumerate(cells)})
    frame = make_figure("loss", empty, "s").frame
    assert set(zip(frame["first"], frame["second"], strict=True)) == {
        (m, w) for m in ("off", "omega") for w in ("off", "on")
    }
