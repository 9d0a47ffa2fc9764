"""The published sweeps by name: no launch or import takes one, and what reads knows them whatever the database holds."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results import open_store, paper
from bench import Bench

Run = Callable[..., tuple[int, str, str]]
CELL = "polar-baseline-d0-m1-w0-s0"
COUNTS = {
    "printed-v1": 100, "printed-v2": 120, "printed-v2-open-weight": 17, "printed-tra": 18, "printed-wall": 4,
    "printed-atlas": 2,
}  # fmt: skip


@pytest.fixture(params=["no database", "a database"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("ATMA_DB", raising=False)
    if request.param == "a database":
        open_store(tmp_path / "atma.db", create=True).close()
    return Bench(tmp_path)


@pytest.mark.thorough
def test_status_knows_them(bench: Bench) -> None:
    for sweep, count in COUNTS.items():
        assert f"{count} cells: {count} done" in bench.ask("status", "--sweep", sweep)
        assert json.loads(bench.ask("status", "--sweep", sweep, "--json"))[0]["counts"] == {"done": count}


def test_show_knows_them(bench: Bench) -> None:
    output = bench.ask("show", CELL, "--sweep", "printed-v2")
    assert "curve (17 points)" in output
    assert "  throughput\n" in output
    # 61,712.2 seconds
    assert re.search(r"^    train_seconds +17.1 h$", output, re.MULTILINE)
    cell = json.loads(bench.ask("show", CELL, "--sweep", "printed-v2", "--json"))
    assert [point["step"] for point in cell["curve"]] == [*range(0, 1876, 125), 1900]


def test_export_knows_them(bench: Bench) -> None:
    output = bench.ask("export", "--sweep", "printed-v2", "--to", "csv", "--what", "curves")
    assert output == "printed-v2-curves.csv: 2,040 rows of curves of sweep printed-v2\n"
    with (bench.folder / "printed-v2-curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shipped = paper.rows("curves")
    assert sorted(float(row["val_loss"]) for row in rows) == sorted(float(row["val_loss"]) for row in shipped)
    assert {row["train_loss"] for row in rows} == {""}


@pytest.mark.parametrize("name", ["printed-v1", "printed-v2-open-weight", "printed-tra", "Printed-wall"])
def test_no_sweep_of_ones_own_gets_such_a_name(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "own.yaml").write_text(f"name: {name}\nextends: tiny\naxes: {{attn_type: [nope]}}\n")
    for arguments in (["launch", "quick", "--name", name, "--dry-run"], ["launch", "own.yaml", "--dry-run"]):
        code, out, err = run(*arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "is not available as a sweep name: printed-... is reserved for the paper's numbers" in err
    assert not (tmp_path / "atma.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [["pause"], ["cancel"], ["prune-checkpoints"], ["logs", CELL], ["evaluate", CELL], ["status", "--watch"]],
    ids=lambda arguments: arguments[0],
)
def test_what_works_on_runs_says_that_there_are_none(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    open_store(tmp_path / "atma.db", create=True).close()
    code, _, err = run(*arguments, "--sweep", "printed-v2")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "printed-v2 holds " in err
    assert "paper" in err
