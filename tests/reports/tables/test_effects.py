"""The tables of effects and interactions: what a reader sees first, and what is left for --all-rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.check import check_file
from atma_sweep.reports.render import rendered_files
from atma_sweep.reports.stats.effects.effects import Effect, Interaction, effects, interactions, measures
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import rows
from atma_sweep.results.store.store import Store
from typer.testing import CliRunner

FIRST = ("Val", "Clean@64K", "Junk@64K", "Ndl@64K", "MFU")
MIXERS = ("polar", "nope", "rope")


def within(difference: Effect | Interaction) -> str:
    parts = [part.split("=") for part in difference.where.split(", ") if part]
    text = ", ".join(level if axis == "attn_type" else f"{axis} {level}" for axis, level in parts) or "all"
    return text + " ~" * (difference.p_heterogeneity < 0.05)


def printed(table: Table) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the printed numbers of every row by its labels; labels must be unique."""
    row_by_labels = {row[: table.text_columns]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert len(row_by_labels) == len(table.rows)
    return row_by_labels


@pytest.fixture(scope="module")
def interacting(published: Store) -> Table:
    return make_table("interactions", published, "printed-v2")


class TestFirst:
    @pytest.mark.thorough
    def test_default_rows_include_all_significant_effects(self, published: Store, published_effects: Table) -> None:
        shown = printed(published_effects)
        assert list(dict.fromkeys(row[0] for row in published_effects.rows)) == list(FIRST)
        assert len(shown) < 150, "of the 1,484 that there are: what is read in one go"
        data = load_sweep_data(published, "printed-v2")
        columns = {column.heading: column for column in measures(data)}
        sure = 0
        for effect in effects(data, [columns[name] for name in FIRST]):
            key = (effect.measure.heading, effect.axis, f"{effect.level} - {effect.reference}", within(effect))
            over_all = not effect.where and effect.reference in ("off", "baseline", "polar")
            assert key in shown or not (effect.p_corrected < 0.05 or over_all)
            sure += effect.p_corrected < 0.05
            if key in shown:
                assert (shown[key]["p corr"] == "<0.0001") == (effect.p_corrected < 1e-4), "of the whole family"
        assert sum(float(row["p corr"].strip("<")) < 0.05 for row in shown.values()) == sure > 50

    def test_mixers_stand_below_what_they_differ_in(self, published_effects: Table) -> None:
        shown = printed(published_effects)
        strata = [row[3] for row in published_effects.rows if row[:3] == ("Ndl@64K", "memory", "on - off")]
        assert strata == ["all ~", "polar", "nope", "rope"]
        assert [shown["Ndl@64K", "memory", "on - off", mixer]["Mean"] for mixer in MIXERS] == ["+47.8", "+4.6", "0.0"]
        strata = [row[3] for row in published_effects.rows if row[:3] == ("Ndl@64K", "distractor", "on - off")]
        assert strata == ["all"]

    @pytest.mark.thorough
    def test_interactions_that_are_sure_come_first(self, published: Store, interacting: Table) -> None:
        assert len(interacting.rows) < 110
        data = load_sweep_data(published, "printed-v2")
        shown = printed(interacting)
        columns = {column.heading: column for column in measures(data)}
        for interaction in interactions(data, [columns[name] for name in ("Ndl@64K",)]):
            sides = [
                f"{a}: {x} - {r}"
                for a, x, r in zip(interaction.axes, interaction.levels, interaction.references, strict=True)
            ]
            key = (interaction.measure.heading, *sides, *["-"] * (3 - len(sides)), within(interaction))
            assert key in shown or not interaction.p_corrected < 0.05
        for heading in FIRST:
            blocks: dict[str, list[float]] = {}
            for row, raw in zip(interacting.rows, interacting.raw, strict=True):
                if row[0] == heading:
                    p = dict(zip(interacting.columns, row, strict=True))["p corr"]
                    blocks.setdefault(raw["family"], []).append(float(p.strip("<")))
            best = [min(ps) for ps in blocks.values()]
            assert best == sorted(best)

    def test_all_rows_can_be_requested_and_checked(self, every: Store, tmp_path: Path) -> None:
        first, complete = make_table("effects", every), make_table("effects", every, all_rows=True)
        assert {"Median", "p sign"} == {*complete.columns} - {*first.columns}
        assert {row[0] for row in first.rows} < {row[0] for row in complete.rows}
        assert not any("--all-rows" in note for note in complete.notes)
        assert any("--all-rows" in note for note in first.notes)
        for path, text in rendered_files(complete, tmp_path / "x.csv", "csv").items():
            path.write_text(text)
        assert check_file(tmp_path / "x.csv", every) == []
        trace = json.loads(next(tmp_path.glob("*.json")).read_text())
        assert trace["options"] == {"all_rows": True}

    def test_only_tables_of_effects_have_more(self) -> None:
        result = CliRunner().invoke(app, ["report", "--table", "6", "--all-rows"])
        assert isinstance(result.exception, ReportError)
        assert "add --table effects" in str(result.exception)


def test_memory_and_window_between_mixers(published: Store) -> None:
    """The paper's Table 3: how much more the window hurts with memory, on polar than on the others; from the printed numbers."""
    axes = ("attn_type", "reg_mode", "distractor", "memory", "window")
    values = {
        tuple(row[axis] for axis in axes): float(row["needle"])
        for row in rows("lengths")
        if row["length"] == "65536"
    }  # fmt: skip
    inside = {
        mixer: [
            sum(
                (1 if memory == window else -1) * values[mixer, reg, distractor, memory, window]
                for memory in ("off", "on")
                for window in ("off", "on")
            )
            for reg in ("baseline", "weak", "strong", "discrete", "zipfian")
            for distractor in ("off", "on")
        ]
        for mixer in MIXERS
    }
    data = load_sweep_data(published, "printed-v2")
    needle = next(column for column in measures(data) if column.heading == "Ndl@64K")
    interaction_by_key = {
        (
            interaction.levels[0] if len(interaction.axes) == 3 else "",
            interaction.references[0] if len(interaction.axes) == 3 else "",
            interaction.where,
        ): interaction
        for interaction in interactions(data, [needle])
        if interaction.axes in (("memory", "window"), ("attn_type", "memory", "window"))
    }
    assert len(interaction_by_key) == 4 + 3, "over all and in three mixers; and between every two of them"
    for mixer in MIXERS:
        tested = interaction_by_key["", "", f"attn_type={mixer}"]
        assert (tested.fours, 100 * tested.mean) == (10, pytest.approx(sum(inside[mixer]) / 10, abs=0.03))
    for level, reference in (("nope", "polar"), ("rope", "polar"), ("rope", "nope")):
        tested = interaction_by_key[level, reference, ""]
        between = [a - b for a, b in zip(inside[level], inside[reference], strict=True)]
        assert (tested.fours, 100 * tested.mean) == (10, pytest.approx(sum(between) / 10, abs=0.05))
        assert 100 * tested.low <= sum(between) / 10 <= 100 * tested.high
        assert tested.family == "Ndl@64K: attn_type x memory x window"
