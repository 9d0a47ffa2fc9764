"""Effects and interactions as drawn: the numbers are those of pairs counted by hand, the marks stand where they say."""

from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

import matplotlib.colors as colors
import numpy as np
import pandas as pd
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.comparisons.effects import INDENT
from atma_sweep.reports.figures.comparisons.forest import difference_label, three_ticks
from atma_sweep.reports.stats.effects.effects import effects, interactions
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.results import paper
from atma_sweep.results.store.records import AXES, CellRecord, Measurement
from atma_sweep.results.store.store import Store
from pictures import check_column, figure_of

SWITCHES = ("off", "on")


@pytest.fixture
def grid(empty: Store, make: Any, run: Any) -> Store:
    """A sweep `grid` of 2 x 2 x 2 x 2 cells: memory takes 0.3 nats under polar and 0.1 under nope, a window adds 0.1."""
    cell, _ = make
    levels = list(product(("polar", "nope"), SWITCHES, SWITCHES, SWITCHES))
    cells = [
        cell(i, attn_type=kind, distractor=distractor, memory=memory, window=window)
        for i, (kind, distractor, memory, window) in enumerate(levels, 1)
    ]
    empty.record_revision("grid", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, (record, (kind, _, memory, window)) in enumerate(zip(cells, levels, strict=True)):
        gain = (memory == "on") * (3 if kind == "polar" else 1) - (window == "on")
        loss = 3 - 0.1 * gain + 0.01 * (i * 7 % 5)
        measurements = [Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")]
        for length in (64, 128):
            right = (64 + 16 * gain + i * 5 % 7) / 160
            measurements.append(
                Measurement(probe="needle", metric="digit_accuracy", length=length, value=right, n=160, unit="fraction")
            )
        run(empty, record.id, "done", measurements)
    return empty


MARKERS = {"o", "|", "D"}
"""Marks of effects: significant, not significant, and an average over strata that differ."""


def is_average(line: Any) -> bool:
    """Return whether a line is the mark of an effect over the whole sweep; labels of strata are indented."""
    first = line.figure.axes[0]
    rows = zip(first.get_yticks(), first.get_yticklabels(), strict=True)
    strata = [y for y, label in rows if label.get_text().startswith(INDENT)]
    return line.get_marker() in MARKERS and line.get_ydata()[0] not in strata


def black(axes: Any) -> int:
    return sum(is_average(line) and colors.same_color(line.get_color(), drawing.INK) for line in axes.lines)


class TestSmall:
    @pytest.mark.thorough
    def test_rows_marks_and_columns_agree(self, grid: Store) -> None:
        figure_data = make_figure("effects", grid)
        figure = figure_of(figure_data)
        check_column(figure)
        sweep_rows = figure_data.frame[figure_data.frame["where"] == ""]
        assert list(dict.fromkeys(sweep_rows["measure"])) == ["Val", "Ndl@128"]
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = sweep_rows[sweep_rows["measure"] == name]
            points = sorted(filter(is_average, axes.lines), key=lambda line: line.get_ydata()[0])
            assert [float(line.get_xdata()[0]) for line in points] == list(rows["mean"])
            assert black(axes) == rows["sure"].sum() > 0
            # the better side is right and positive: the axis of a loss shows its decrease
            assert (axes.get_xlim()[0] > axes.get_xlim()[1]) == (name == "Val")
            shown = [float(label.get_text().replace("−", "-") or "nan") for label in axes.get_xticklabels()]
            sign = -1 if name == "Val" else 1
            assert all(
                text == pytest.approx(sign * at)
                for text, at in zip(shown, axes.get_xticks(), strict=True)
                if text == text
            )
            assert axes.get_xlabel().startswith("decrease" if name == "Val" else "increase")
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        strata = [index for index, label in enumerate(labels) if label.startswith(INDENT)]
        assert [label for index, label in enumerate(labels) if index not in strata] == [
            "NoPE vs PoLAR",
            "distractor loss",
            "memory",
            "window",
        ]
        assert labels[labels.index("memory") + 1 :][:2] == [f"{INDENT}PoLAR", f"{INDENT}NoPE"]

    def test_an_average_over_worlds_that_differ_shows_them(self, grid: Store) -> None:
        figure_data = make_figure("effects", grid)
        memory = figure_data.frame[
            (figure_data.frame["axis"] == "memory") & (figure_data.frame["measure"] == "Val")
        ].set_index("where")
        assert memory.loc["", "mixed"]
        axes = figure_of(figure_data).axes[0]
        small = {
            float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() in MARKERS and not is_average(line)
        }
        assert {memory.loc["attn_type=polar", "mean"], memory.loc["attn_type=nope", "mean"]} <= small

    def test_marks_are_black_if_significant_else_grey(self, grid: Store) -> None:
        figure_data = make_figure("effects", grid)
        figure = figure_of(figure_data)
        seen = set()
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = figure_data.frame[(figure_data.frame["where"] == "") & (figure_data.frame["measure"] == name)]
            points = sorted(filter(is_average, axes.lines), key=lambda line: line.get_ydata()[0])
            for line, (_, row) in zip(points, rows.iterrows(), strict=True):
                expected = drawing.INK if row["sure"] else drawing.GREY
                assert colors.same_color(line.get_color(), expected)
                assert line.get_marker() == ("D" if row["mixed"] else "o" if row["sure"] else "|")
                seen.add(line.get_marker())
        assert seen == MARKERS

    @pytest.mark.thorough
    def test_the_interaction_itself_the_largest_first(self, grid: Store) -> None:
        figure_data = make_figure("interactions", grid)
        figure = figure_of(figure_data)
        check_column(figure)
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = figure_data.frame[figure_data.frame["measure"] == name]
            assert list(rows["mean"].abs()) == sorted(rows["mean"].abs(), reverse=True)
            assert rows.iloc[0]["words_row"] == "(NoPE − PoLAR) × memory"
            assert [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()] == [
                text.replace(" − ", " vs ") for text in rows["words_row"]
            ]
            assert black(axes) == (rows["sure"] & (rows["unrecalled"] == 0)).sum()


@pytest.mark.parametrize(("low", "high"), [(-0.2, 0.03), (-1, 0), (0, 1e-4), (-45.0, 60.0), (-3.0, 0.1), (0.0, 1.0)])
def test_three_ticks_gives_three_or_four(low: float, high: float) -> None:
    ticks = three_ticks(low, high)
    assert 3 <= len(ticks) <= 6
    assert 0.0 in ticks
    room = 0.13 * (high - low)
    assert low - room <= ticks[0] < ticks[-1] <= high + room
    assert np.diff(ticks) == pytest.approx([ticks[1] - ticks[0]] * (len(ticks) - 1))


@pytest.mark.thorough
def test_overlapping_tick_labels_are_hidden_except_zero(grid: Store) -> None:
    figure_data = make_figure("effects", grid)
    frame = figure_data.frame[(figure_data.frame["where"] == "") & (figure_data.frame["measure"] == "Val")]
    # decreases from 0.05 to -0.1 in steps of 0.05: four numbers in a third of a column
    frame = frame.assign(mean=0.02, low=-0.045, high=0.09, mixed=False)
    parts = [frame.assign(measure=name, words=name) for name in ("a", "b", "c")]
    figure = figure_of(replace(figure_data, frame=pd.concat(parts)))
    for axes in figure.axes:
        assert axes.get_xticks().tolist() == [-0.05, 0.0, 0.05, 0.1]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["", "0", "", "−0.1"]
    check_column(figure)
    wide = figure_of(replace(figure_data, frame=parts[0]), FigureOptions())
    assert [label.get_text() for label in wide.axes[0].get_xticklabels()] == ["0.05", "0", "−0.05", "−0.1"]


def test_difference_label_texts() -> None:
    assert difference_label("attn_type", "nope", "polar") == "NoPE − PoLAR"
    assert difference_label("memory", "on", "off") == "memory"
    assert difference_label("reg_mode", "weak", "baseline") == "weak regularizer"
    assert difference_label("width", "big", "small") == "width big − small"


@pytest.fixture
def square(empty: Store, make: Any) -> list[CellRecord]:
    """The cells of a sweep `square`: 2 x 2, mixer by memory, without a number."""
    cell, _ = make
    levels = enumerate(product(("polar", "nope"), SWITCHES))
    cells = [cell(i, attn_type=kind, memory=memory) for i, (kind, memory) in levels]
    empty.record_revision("square", grid_text="x", grid_file="x.yaml", cells=cells)
    return cells


class TestBadInput:
    @pytest.mark.filterwarnings("error")
    def test_a_number_that_never_changes_is_drawn_at_zero(
        self, empty: Store, square: list[CellRecord], run: Any
    ) -> None:
        for record in square:
            run(empty, record.id, "done", [Measurement(probe="val", metric="val_loss", value=3.0, unit="nats/token")])
        for name in ("effects", "interactions"):
            figure_data = make_figure(name, empty)
            assert set(figure_data.frame["mean"]) == {0.0}
            assert not figure_data.frame["sure"].any()
            check_column(figure_of(figure_data))


@pytest.fixture(scope="module")
def printed(published: Store) -> dict[str, FigureData]:
    return {name: make_figure(name, published, "printed-v2") for name in ("effects", "interactions")}


@pytest.mark.thorough
class TestPrinted:
    def test_means_are_those_of_pairs_counted_by_hand(self, printed: dict[str, FigureData]) -> None:
        rows = {tuple(row[axis] for axis in AXES): float(row["val_loss"]) for row in paper.rows("complete-v2")}
        frame = printed["effects"].frame
        for _, effect_row in frame[(frame["measure"] == "Val") & (frame["where"] == "")].iterrows():
            axis_index = AXES.index(effect_row["axis"])
            pairs = [
                value - rows[*key[:axis_index], effect_row["reference"], *key[axis_index + 1 :]]
                for key, value in rows.items()
                if key[axis_index] == effect_row["level"]
            ]
            assert (effect_row["pairs"], effect_row["mean"]) == (len(pairs), pytest.approx(mean(pairs), abs=1e-12))
        assert len(frame[frame["where"] == ""]) == 30

    def test_interactions_are_those_of_fours_counted_by_hand(self, printed: dict[str, FigureData]) -> None:
        rows = {tuple(row[axis] for axis in AXES): float(row["val_loss"]) for row in paper.rows("complete-v2")}
        frame = printed["interactions"].frame
        for _, interaction_row in frame[frame["measure"] == "Val"].iterrows():
            axes, levels, references = (interaction_row[name].split(" x ") for name in ("axes", "levels", "references"))
            a, b = map(AXES.index, axes)

            def at(key: tuple[str, ...], first: str, second: str, a: int = a, b: int = b) -> float:
                moved = list(key)
                moved[a], moved[b] = first, second
                return rows[tuple(moved)]

            fours = [
                at(key, *levels)
                - at(key, references[0], levels[1])
                - at(key, levels[0], references[1])
                + at(key, *references)
                for key in rows
                if (key[a], key[b]) == tuple(levels)
            ]
            assert (interaction_row["fours"], interaction_row["mean"]) == (
                len(fours),
                pytest.approx(mean(fours), abs=1e-12),
            )

    def test_what_is_sure_is_what_the_tables_mark(self, published: Store, printed: dict[str, FigureData]) -> None:
        data = load_sweep_data(published, "printed-v2")
        effect_by_key: dict[tuple[str, ...], Any] = {}
        for effect in effects(data):
            effect_by_key[effect.measure.heading, effect.axis, effect.level, effect.reference, effect.where] = effect
        for _, row in printed["effects"].frame.iterrows():
            effect = effect_by_key[tuple(row[["measure", "axis", "level", "reference", "where"]])]
            scale = 100 if effect.measure.percent else 1
            assert (row["sure"], row["p"], row["low"]) == (
                effect.is_significant,
                effect.p_corrected,
                scale * effect.low,
            )
        both = {(x.measure.heading, x.axes, x.levels, x.references, x.where): x for x in interactions(data)}
        for _, row in printed["interactions"].frame.iterrows():
            parts = (tuple(row[name].split(" x ")) for name in ("axes", "levels", "references"))
            assert row["p"] == both[row["measure"], *parts, ""].p_corrected

    def test_a_mark_is_black_by_the_corrected_p_alone(self, printed: dict[str, FigureData]) -> None:
        frame = printed["effects"].frame
        sweep_rows = frame[frame["where"] == ""]
        leaving = (sweep_rows["low"] > 0) | (sweep_rows["high"] < 0)
        assert (len(sweep_rows), int(leaving.sum()), int(sweep_rows["sure"].sum())) == (30, 14, 12)
        assert leaving[sweep_rows["sure"]].all()
        # one of the twelve is of a stratum in which neither level recalls, and has no mark
        assert sum(black(axes) for axes in figure_of(printed["effects"]).axes) == 11
        both = printed["interactions"].frame
        assert (len(both), int(both["sure"].sum())) == (144, 9)

    def test_a_column_holds_them(self, printed: dict[str, FigureData]) -> None:
        for figure_data in printed.values():
            check_column(figure_of(figure_data))
            figure = figure_of(figure_data, FigureOptions())
            assert figure.get_figwidth() > 5
