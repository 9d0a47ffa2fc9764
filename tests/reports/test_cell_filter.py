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


def test_a_table_has_the_rows_of_these_cells_and_no_other(published: Store) -> None:
    whole = make_table("6", published, "printed-v2")
    some = make_table("6", published, "printed-v2", only=["attn_type=polar,nope", "memory=on"])
    place = {name: index for index, name in enumerate(whole.columns)}
    wanted = [row for row in whole.rows if row[place["Type"]] in ("polar", "nope") and row[place["Mem"]] == "on"]
    assert len(wanted) == 40
    assert [tuple(row) for row in some.rows] == [tuple(row) for row in wanted]
    assert some.title.endswith("sweep printed-v2, revision 1, attn_type polar, nope and memory on alone")
    assert any("memory on alone: 40 of 40 cells done." in note for note in some.notes)


def test_effects_are_those_of_the_stratum(published: Store) -> None:
    whole = effects(load_sweep_data(published, "printed-v2"))
    with cell_filter.only("printed-v2", ("attn_type=polar",)):
        some = effects(load_sweep_data(published, "printed-v2"))
    in_polar = {
        (one.measure.key, one.axis, one.level, one.reference): one for one in whole if one.where == "attn_type=polar"
    }
    alone = {(one.measure.key, one.axis, one.level, one.reference): one for one in some if not one.where}
    shared = in_polar.keys() & alone.keys()
    assert len(shared) > 20
    needle = [alone[key] for key in shared if key[:2] == (("needle", "digit_accuracy", 65536), "memory")]
    assert [(one.pairs, round(one.mean, 2)) for one in needle] == [(20, 0.48)]
    # pairs and means alike where the row averages nothing else; p and the families are others
    for key in shared:
        if key[1] == "memory":
            assert (alone[key].pairs, alone[key].mean) == (
                in_polar[key].pairs,
                pytest.approx(in_polar[key].mean, abs=1e-12),
            )
    assert not any(one.confirmatory for one in some)


def test_one_reading_tells_subsets_apart(published: Store) -> None:
    with cached_reads():
        assert len(load_sweep_data(published, "printed-v2").cells) == 120
        with cell_filter.only("printed-v2", ("attn_type=rope", "window=on")):
            assert len(load_sweep_data(published, "printed-v2").cells) == 20
            # of that sweep alone
            assert len(load_sweep_data(published, "printed-v1").cells) > 20
        assert len(load_sweep_data(published, "printed-v2").cells) == 120


def test_what_is_written_can_be_checked(tmp_path: Path, command_line: Command) -> None:
    some = "--sweep", "printed-v2", "--only", "reg_mode=baseline", "--only", "seed=0"
    for name in ("six.md", "six.csv", "six.tex"):
        assert command_line("report", "--table", "6", *some, "--out", str(tmp_path / name))[0] == 0
    assert command_line("report", "--figure", "needle", *some, "--out", str(tmp_path / "needle.svg"))[0] == 0
    code, out, err = command_line("report", "--check", str(tmp_path))
    assert code == 0, out + err
    assert out.count("as the database says") == 4
    assert len((tmp_path / "six.csv").read_text().splitlines()) == 1 + 24
    made = make_figure("needle", _published(), "printed-v2", only=["reg_mode=baseline"])
    assert made.trace["only"] == ["reg_mode=baseline"]
    whole = load_sweep_data(_published(), "printed-v2").cells
    assert set(made.frame["cell"]) == {cell.cell_id for cell in whole if cell.levels["reg_mode"] == "baseline"}
    assert "reg_mode baseline alone" in made.title
    text = (tmp_path / "six.md").read_text()
    (tmp_path / "six.md").write_text(text.replace('"only":["reg_mode=baseline","seed=0"]', '"only":["reg_mode=weak"]'))
    assert command_line("report", "--check", str(tmp_path / "six.md"))[0] == 1
    assert json.loads(command_line("report", "--table", "6", *some, "--json")[1])


def _published() -> Store:
    from atma_sweep.results.builtin_sweeps import open_store_with_builtins

    return open_store_with_builtins(None, "printed-v2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["attn_type"], "must read axis=level,level"),
        (["attn=polar"], "the sweep has no axis 'attn'; choose one of: attn_type"),
        (["attn_type=polr"], "no cell has attn_type 'polr'.*did you mean polar"),
        (["seed=7"], "no cell has seed '7'; choose one of: 0"),
        ([5], "chosen by words such as recipe=intended, not by"),
        (5, "chosen by words such as recipe=intended, not by 5"),
    ],
)
def test_what_means_no_cell_is_refused(published: Store, words: list[str], told: str) -> None:
    with pytest.raises(ReportError, match=told):
        make_table("6", published, "printed-v2", only=words)


def test_what_is_about_all_cells_takes_no_part_of_them(published: Store, command_line: Command) -> None:
    for name in (name for name, line in TABLES.items() if line.whole):
        with pytest.raises(ReportError, match="is about all cells of a sweep together"):
            make_table(name, published, "printed-v2", only=["memory=on"])
    for also in (
        ["--all", "--out", "x"],
        ["--table", "6", "--compare", "printed-v1"],
        ["--check", "x"],
        ["--dashboard", "x.html"],
    ):
        code, _, err = command_line("report", *also, "--sweep", "printed-v2", "--only", "memory=on")
        assert (code, "--only is about one table or figure" in err) == (2, True)


def test_words_mean_what_they_mean_at_a_launch(published: Store) -> None:
    def ids(*words: str) -> set[str]:
        with cell_filter.only("printed-v2", words):
            return {cell.cell_id for cell in load_sweep_data(published, "printed-v2").cells}

    assert ids("memory=true") == ids("memory=yes") == ids("memory=on") != ids("memory=off")
    assert ids("seed=0.0") == ids("seed=0") == ids()
    # a level with a comma in its name
    data = load_sweep_data(published, "printed-v2-open-weight")
    (name,) = [cell.levels["attn_type"] for cell in data.cells if "," in cell.levels["attn_type"]][:1]
    with cell_filter.only("printed-v2-open-weight", (f"attn_type={name}",)):
        assert {cell.levels["attn_type"] for cell in load_sweep_data(published, "printed-v2-open-weight").cells} == {
            name
        }


def test_options_of_a_figure_are_held_against_these_cells(tmp_path: Path, command_line: Command) -> None:
    needle = "report", "--figure", "needle", "--sweep", "printed-v2", "--only", "attn_type=polar"
    code, _, err = command_line(*needle, "--highlight", "rope", "--out", str(tmp_path / "x.svg"))
    assert (code, "rope" in err) == (2, True)
    code, _, err = command_line(*needle[:-1], "attn=polar", "--out", str(tmp_path / "x.svg"))
    assert (code, "the sweep has no axis 'attn'" in err, "did you mean attn_type" in err) == (2, True, True)
    for figure in ("history", "importance"):
        code, _, err = command_line("report", "--figure", figure, "--sweep", "printed-v2", "--only", "memory=on")
        assert (code, "is about all trials of a study together" in err) == (2, True)


def test_what_ran_beside_these_cells_is_told_although_it_is_not_shown(command_line: Command) -> None:
    pilot = "report", "--table", "6", "--sweep", "replication-pilot", "--format", "md"
    told = [
        command_line(*pilot, *only)[1] for only in ((), ("--only", "attn_type=polar"), ("--only", "attn_type=rope"))
    ]
    assert all("up to 8 attempts at once" in text for text in told)
