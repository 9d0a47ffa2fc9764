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
    for i, (one, (kind, _, memory, window)) in enumerate(zip(cells, levels, strict=True)):
        gain = (memory == "on") * (3 if kind == "polar" else 1) - (window == "on")
        loss = 3 - 0.1 * gain + 0.01 * (i * 7 % 5)
        found = [Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")]
        for length in (64, 128):
            right = (64 + 16 * gain + i * 5 % 7) / 160
            found.append(
                Measurement(probe="needle", metric="digit_accuracy", length=length, value=right, n=160, unit="fraction")
            )
        run(empty, one.id, "done", found)
    return empty


def filled(axes: Any) -> int:
    return sum(line.get_marker() == "o" and line.get_markerfacecolor() != "white" for line in axes.lines)


class TestSmall:
    @pytest.mark.thorough
    def test_rows_marks_and_columns_agree(self, grid: Store) -> None:
        made = make_figure("effects", grid)
        figure = figure_of(made)
        check_column(figure)
        whole = made.frame[made.frame["where"] == ""]
        assert list(dict.fromkeys(whole["measure"])) == ["Val", "Ndl@128"]
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = whole[whole["measure"] == name]
            points = [line for line in axes.lines if line.get_marker() == "o"]
            assert [float(line.get_xdata()[0]) for line in points] == list(rows["mean"])
            assert filled(axes) == rows["sure"].sum() > 0
            # the better side is right: the axis of a loss runs backwards
            assert (axes.get_xlim()[0] > axes.get_xlim()[1]) == (name == "Val")
        words = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert words == ["NoPE − PoLAR", "distractor loss", "memory", "window"]

    def test_an_average_over_worlds_that_differ_shows_them(self, grid: Store) -> None:
        made = make_figure("effects", grid)
        memory = made.frame[(made.frame["axis"] == "memory") & (made.frame["measure"] == "Val")].set_index("where")
        assert memory.loc["", "mixed"]
        axes = figure_of(made).axes[0]
        small = {float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() in "^vDs" and line.get_marker()}
        assert {memory.loc["attn_type=polar", "mean"], memory.loc["attn_type=nope", "mean"]} <= small

    def test_good_and_bad_have_one_colour_each_whichever_way_is_better(self, grid: Store) -> None:
        made = make_figure("effects", grid)
        figure = figure_of(made)
        seen = set()
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = made.frame[(made.frame["where"] == "") & (made.frame["measure"] == name)]
            points = [line for line in axes.lines if line.get_marker() == "o"]
            for line, (_, row) in zip(points, rows.iterrows(), strict=True):
                gain = row["mean"] * (-1 if name == "Val" else 1)
                expected = drawing.GREY if not row["sure"] else drawing.GOOD if gain > 0 else drawing.BAD
                assert colors.same_color(line.get_color(), expected)
                seen.add(expected)
        assert seen == {drawing.GREY, drawing.GOOD, drawing.BAD}

    @pytest.mark.thorough
    def test_the_interaction_itself_the_largest_first(self, grid: Store) -> None:
        made = make_figure("interactions", grid)
        figure = figure_of(made)
        check_column(figure)
        for axes, name in zip(figure.axes, ("Val", "Ndl@128"), strict=True):
            rows = made.frame[made.frame["measure"] == name]
            assert list(rows["mean"].abs()) == sorted(rows["mean"].abs(), reverse=True)
            assert rows.iloc[0]["words_row"] == "(NoPE − PoLAR) × memory"
            assert [label.get_text() for label in axes.get_yticklabels()] == list(rows["words_row"])
            assert filled(axes) == rows["sure"].sum() > 0


@pytest.mark.parametrize(("low", "high"), [(-0.2, 0.03), (-1, 0), (0, 1e-4), (-45.0, 60.0), (-3.0, 0.1), (0.0, 1.0)])
def test_three_ticks_at_least_and_never_many(low: float, high: float) -> None:
    ticks = three_ticks(low, high)
    assert 3 <= len(ticks) <= 6
    assert 0.0 in ticks
    room = 0.13 * (high - low)
    assert low - room <= ticks[0] < ticks[-1] <= high + room
    assert np.diff(ticks) == pytest.approx([ticks[1] - ticks[0]] * (len(ticks) - 1))


@pytest.mark.thorough
def test_numbers_that_would_meet_are_left_out_but_zero(grid: Store) -> None:
    made = make_figure("effects", grid)
    frame = made.frame[(made.frame["where"] == "") & (made.frame["measure"] == "Val")]
    # from 0.05 to -0.1 in steps of 0.05: four numbers in a third of a column
    frame = frame.assign(mean=-0.02, low=-0.09, high=0.045, mixed=False)
    parts = [frame.assign(measure=name, words=name) for name in ("a", "b", "c")]
    figure = figure_of(replace(made, frame=pd.concat(parts)))
    for axes in figure.axes:
        assert axes.get_xticks().tolist() == [-0.1, -0.05, 0.0, 0.05]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["−0.1", "", "0", ""]
    check_column(figure)
    wide = figure_of(replace(made, frame=parts[0]), FigureOptions())
    assert [label.get_text() for label in wide.axes[0].get_xticklabels()] == ["−0.1", "−0.05", "0", "0.05"]


def test_a_difference_in_words() -> None:
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
        for one in square:
            run(empty, one.id, "done", [Measurement(probe="val", metric="val_loss", value=3.0, unit="nats/token")])
        for name in ("effects", "interactions"):
            made = make_figure(name, empty)
            assert set(made.frame["mean"]) == {0.0}
            assert not made.frame["sure"].any()
            check_column(figure_of(made))


@pytest.fixture(scope="module")
def printed(published: Store) -> dict[str, FigureData]:
    return {name: make_figure(name, published, "printed-v2") for name in ("effects", "interactions")}


@pytest.mark.thorough
class TestPrinted:
    def test_means_are_those_of_pairs_counted_by_hand(self, printed: dict[str, FigureData]) -> None:
        rows = {tuple(row[axis] for axis in AXES): float(row["val_loss"]) for row in paper.rows("complete-v2")}
        frame = printed["effects"].frame
        for _, one in frame[(frame["measure"] == "Val") & (frame["where"] == "")].iterrows():
            place = AXES.index(one["axis"])
            pairs = [
                value - rows[*key[:place], one["reference"], *key[place + 1 :]]
                for key, value in rows.items()
                if key[place] == one["level"]
            ]
            assert (one["pairs"], one["mean"]) == (len(pairs), pytest.approx(mean(pairs), abs=1e-12))
        assert len(frame[frame["where"] == ""]) == 30

    def test_interactions_are_those_of_fours_counted_by_hand(self, printed: dict[str, FigureData]) -> None:
        rows = {tuple(row[axis] for axis in AXES): float(row["val_loss"]) for row in paper.rows("complete-v2")}
        frame = printed["interactions"].frame
        for _, one in frame[frame["measure"] == "Val"].iterrows():
            axes, levels, references = (one[name].split(" x ") for name in ("axes", "levels", "references"))
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
            assert (one["fours"], one["mean"]) == (len(fours), pytest.approx(mean(fours), abs=1e-12))

    def test_what_is_sure_is_what_the_tables_mark(self, published: Store, printed: dict[str, FigureData]) -> None:
        data = load_sweep_data(published, "printed-v2")
        known: dict[tuple[str, ...], Any] = {}
        for one in effects(data):
            known[one.measure.heading, one.axis, one.level, one.reference, one.where] = one
        for _, row in printed["effects"].frame.iterrows():
            one = known[tuple(row[["measure", "axis", "level", "reference", "where"]])]
            scale = 100 if one.measure.percent else 1
            assert (row["sure"], row["p"], row["low"]) == (one.sure, one.p_corrected, scale * one.low)
        both = {(x.measure.heading, x.axes, x.levels, x.references, x.where): x for x in interactions(data)}
        for _, row in printed["interactions"].frame.iterrows():
            words = (tuple(row[name].split(" x ")) for name in ("axes", "levels", "references"))
            assert row["p"] == both[row["measure"], *words, ""].p_corrected

    def test_a_mark_is_filled_by_the_corrected_p_alone(self, printed: dict[str, FigureData]) -> None:
        frame = printed["effects"].frame
        whole = frame[frame["where"] == ""]
        leaving = (whole["low"] > 0) | (whole["high"] < 0)
        assert (len(whole), int(leaving.sum()), int(whole["sure"].sum())) == (30, 14, 12)
        assert leaving[whole["sure"]].all()
        assert sum(filled(axes) for axes in figure_of(printed["effects"]).axes) == 12
        both = printed["interactions"].frame
        assert (len(both), int(both["sure"].sum())) == (144, 9)

    def test_a_column_holds_them(self, printed: dict[str, FigureData]) -> None:
        for made in printed.values():
            check_column(figure_of(made))
            figure = figure_of(made, FigureOptions())
            assert figure.get_figwidth() > 5
