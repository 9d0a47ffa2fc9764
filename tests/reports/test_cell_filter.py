"""Reports of some cells alone, against the same rows of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.reports import cell_filter
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.stats.effects.effects import effects
from atma_sweep.reports.sweep_data import ReportError, cached_reads, load_sweep_data
from atma_sweep.reports.tables import TABLES, make_table
from atma_sweep.results.store.store import Store

Command = Callable[..., tuple[int, str, str]]


def test_filtered_table_has_only_these_cells(published: Store) -> None:
    full_table = make_table("6", published, "printed-v2")
    filtered_table = make_table("6", published, "printed-v2", only=["attn_type=polar,nope", "memory=on"])
    index_by_heading = {name: index for index, name in enumerate(full_table.columns)}
    wanted = [
        row
        for row in full_table.rows
        if row[index_by_heading["Type"]] in ("polar", "nope") and row[index_by_heading["Mem"]] == "on"
    ]
    assert len(wanted) == 40
    assert [tuple(row) for row in filtered_table.rows] == [tuple(row) for row in wanted]
    assert filtered_table.title.endswith("sweep printed-v2, revision 1, only attn_type polar, nope and memory on")
    assert any(
        "only attn_type polar, nope and memory on: 40 of 40 cells done." in note for note in filtered_table.notes
    )


@pytest.mark.thorough
def test_filtered_effects_equal_the_stratum(published: Store) -> None:
    full_effects = effects(load_sweep_data(published, "printed-v2"))
    with cell_filter.filtered_cells("printed-v2", ("attn_type=polar",)):
        filtered_effects = effects(load_sweep_data(published, "printed-v2"))
    in_polar = {
        (effect.measure.key, effect.axis, effect.level, effect.reference): effect
        for effect in full_effects
        if effect.where == "attn_type=polar"
    }
    alone = {
        (effect.measure.key, effect.axis, effect.level, effect.reference): effect
        for effect in filtered_effects
        if not effect.where
    }
    shared = in_polar.keys() & alone.keys()
    assert len(shared) > 20
    needle = [alone[key] for key in shared if key[:2] == (("needle", "digit_accuracy", 65536), "memory")]
    assert [(effect.pairs, round(effect.mean, 2)) for effect in needle] == [(20, 0.48)]
    # pairs and means alike where the row averages nothing else; p and the families are others
    for key in shared:
        if key[1] == "memory":
            assert (alone[key].pairs, alone[key].mean) == (
                in_polar[key].pairs,
                pytest.approx(in_polar[key].mean, abs=1e-12),
            )
    assert not any(effect.confirmatory for effect in filtered_effects)


def test_cached_reads_distinguish_filters(published: Store) -> None:
    with cached_reads():
        assert len(load_sweep_data(published, "printed-v2").cells) == 120
        with cell_filter.filtered_cells("printed-v2", ("attn_type=rope", "window=on")):
            assert len(load_sweep_data(published, "printed-v2").cells) == 20
            # of that sweep alone
            assert len(load_sweep_data(published, "printed-v1").cells) > 20
        assert len(load_sweep_data(published, "printed-v2").cells) == 120


@pytest.mark.thorough
def test_filtered_files_can_be_checked(tmp_path: Path, command_line: Command) -> None:
    options = "--sweep", "printed-v2", "--only", "reg_mode=baseline", "--only", "seed=0"
    for name in ("six.md", "six.csv", "six.tex"):
        assert command_line("report", "--table", "6", *options, "--out", str(tmp_path / name))[0] == 0
    assert command_line("report", "--figure", "needle", *options, "--out", str(tmp_path / "needle.svg"))[0] == 0
    code, out, err = command_line("report", "--check", str(tmp_path))
    assert code == 0, out + err
    assert out.count("matches the database") == 4
    assert len((tmp_path / "six.csv").read_text().splitlines()) == 1 + 24
    figure = make_figure("needle", _published(), "printed-v2", only=["reg_mode=baseline"])
    assert figure.trace["only"] == ["reg_mode=baseline"]
    all_cells = load_sweep_data(_published(), "printed-v2").cells
    assert set(figure.frame["cell"]) == {cell.cell_id for cell in all_cells if cell.levels["reg_mode"] == "baseline"}
    assert "only reg_mode baseline" in figure.notes[-1]
    text = (tmp_path / "six.md").read_text()
    (tmp_path / "six.md").write_text(text.replace('"only":["reg_mode=baseline","seed=0"]', '"only":["reg_mode=weak"]'))
    assert command_line("report", "--check", str(tmp_path / "six.md"))[0] == 1
    assert json.loads(command_line("report", "--table", "6", *options, "--json")[1])


def _published() -> Store:
    from atma_sweep.results.builtin_sweeps import open_store_with_builtins

    return open_store_with_builtins(None, "printed-v2")


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["attn_type"], "must read axis=level,level"),
        (["attn=polar"], "the sweep has no axis 'attn'; choose one of: attn_type"),
        (["attn_type=polr"], "no cell has attn_type 'polr'.*did you mean polar"),
        (["seed=7"], "no cell has seed '7'; choose one of: 0"),
        ([5], "cell filters are texts such as recipe=intended, not"),
        (5, "cell filters are texts such as recipe=intended, not 5"),
    ],
)
def test_invalid_filters_are_refused(published: Store, filters: list[str], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        make_table("6", published, "printed-v2", only=filters)


def test_reports_on_all_cells_refuse_filters(published: Store, command_line: Command) -> None:
    for name in (name for name, line in TABLES.items() if line.needs_all_cells):
        with pytest.raises(ReportError, match="needs all cells of a sweep"):
            make_table(name, published, "printed-v2", only=["memory=on"])
    for also in (
        ["--all", "--out", "x"],
        ["--check", "x"],
        ["--dashboard", "x.html"],
    ):
        code, _, err = command_line("report", *also, "--sweep", "printed-v2", "--only", "memory=on")
        assert (code, "--only applies to a single table or figure" in err) == (2, True)
    code, _, err = command_line("report", "--compare", "printed-v1", "--sweep", "printed-v2", "--only", "memory=on")
    assert (code, "the comparison of two sweeps needs all cells; remove --only" in err) == (2, True)


def test_compared_figure_shows_filtered_cells(published: Store, command_line: Command) -> None:
    options = ["report", "--sweep", "printed-v2", "--only", "memory=on", "--compare", "printed-v1"]
    code, _, err = command_line(*options, "--figure", "needle")
    assert (code, "figure needle does not take --compare; figures that do: loss" in err) == (2, True)
    code, out, _ = command_line(*options, "--figure", "loss", "--json")
    wanted = {c.cell_id for c in load_sweep_data(published, "printed-v2").cells if c.levels["memory"] == "on"}
    rows = json.loads(out)["rows"]
    assert (code, {row["cell"] for row in rows if row["first"] != "printed-v1"}) == (0, wanted)
    assert any(row["first"] == "printed-v1" for row in rows)


@pytest.mark.thorough
def test_filters_parse_as_launch_does(published: Store) -> None:
    def ids(*filters: str) -> set[str]:
        with cell_filter.filtered_cells("printed-v2", filters):
            return {cell.cell_id for cell in load_sweep_data(published, "printed-v2").cells}

    assert ids("memory=true") == ids("memory=yes") == ids("memory=on") != ids("memory=off")
    assert ids("seed=0.0") == ids("seed=0") == ids()
    # a level with a comma in its name
    data = load_sweep_data(published, "printed-v2-open-weight")
    (name,) = [cell.levels["attn_type"] for cell in data.cells if "," in cell.levels["attn_type"]][:1]
    with cell_filter.filtered_cells("printed-v2-open-weight", (f"attn_type={name}",)):
        assert {cell.levels["attn_type"] for cell in load_sweep_data(published, "printed-v2-open-weight").cells} == {
            name
        }


def test_figure_options_are_validated_on_filtered_cells(tmp_path: Path, command_line: Command) -> None:
    needle = "report", "--figure", "needle", "--sweep", "printed-v2", "--only", "attn_type=polar"
    code, _, err = command_line(*needle, "--highlight", "rope", "--out", str(tmp_path / "x.svg"))
    assert (code, "rope" in err) == (2, True)
    code, _, err = command_line(*needle[:-1], "attn=polar", "--out", str(tmp_path / "x.svg"))
    assert (code, "the sweep has no axis 'attn'" in err, "did you mean attn_type" in err) == (2, True, True)
    for figure in ("history", "importance"):
        code, _, err = command_line("report", "--figure", figure, "--sweep", "printed-v2", "--only", "memory=on")
        assert (code, "needs all trials of a study" in err) == (2, True)


def test_audit_counts_hidden_concurrent_attempts(command_line: Command) -> None:
    pilot = "report", "--table", "6", "--sweep", "replication-pilot", "--format", "md"
    texts = [
        command_line(*pilot, *only)[1] for only in ((), ("--only", "attn_type=polar"), ("--only", "attn_type=rope"))
    ]
    assert all("up to 8 attempts at once" in text for text in texts)
