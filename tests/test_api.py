"""Sweep: the Python interface does what the command line does, with the same numbers."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from atma_sweep import Sweep, api
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results.errors import StoreMissing, SweepUnknown
from atma_sweep.sweep.commands.launch import RequirementsMissing
from atma_sweep.sweep.errors import GridError
from bench import Bench

SIGNATURES = """
Sweep(sweep: str | Path | None = None, *, name: str | None = None, settings: Mapping[str, Any] | None = None, \
db: str | Path | None = None, runs: str | Path | None = None) -> None
Sweep.cell(name: str) -> SweepCell
Sweep.cells() -> pd.DataFrame
Sweep.curves() -> pd.DataFrame
Sweep.effects(measure: str = 'val_loss', *, only: Sequence[str] = ()) -> pd.DataFrame
Sweep.figure(name: str | int, *, only: Sequence[str] = (), lengths: Sequence[int] = (), **options: Any) -> SweepFigure
Sweep.frames
Sweep.launch(*, only: Sequence[str] = (), executor: str | None = None, address: str | None = None, \
budget: float | None = None, prepare: bool = False, retrain: bool = False, quiet: bool = False) -> LaunchOutcome
Sweep.measurements() -> pd.DataFrame
Sweep.name
Sweep.plan(*, only: Sequence[str] = ()) -> Plan
Sweep.report(folder: str | Path) -> Path
Sweep.status() -> SweepStatus
Sweep.table(name: str | int, *, only: Sequence[str] = (), **options: Any) -> SweepTable
SweepCell(sweep: Sweep, id: str, slug: str, config: Mapping[str, Any]) -> None
SweepCell.curve() -> pd.DataFrame
SweepCell.load_model(device: str = 'cpu') -> LoadedModel
SweepCell.measurements() -> pd.DataFrame
SweepTable(data: Table) -> None
SweepTable.frame
SweepTable.render(format: str = 'md') -> str
SweepFigure(data: FigureData) -> None
SweepFigure.caption
SweepFigure.frame
SweepFigure.save(path: str | Path, *, style: str | None = None, width: str | None = None, title: bool | None = None) -> Path
"""


def signatures(cls: type) -> list[str]:
    """The constructor and the public methods and properties of a class, as Python writes them, sorted by name."""

    def line(name: str, function: object) -> str:
        if not callable(function):
            return name
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if each.name != "self"]
        return name + str(signature.replace(parameters=parameters)).replace("'", "").replace(
            "= val_loss", "= 'val_loss'"
        ).replace("= cpu", "= 'cpu'").replace("= md", "= 'md'").replace("= md", "= 'md'")

    members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    return [
        line(cls.__name__, cls.__init__),
        *(line(f"{cls.__name__}.{name}", members[name]) for name in sorted(members)),
    ]


def test_the_interface_stays_as_documented() -> None:
    assert [
        line for cls in (Sweep, api.SweepCell, api.SweepTable, api.SweepFigure) for line in signatures(cls)
    ] == SIGNATURES.strip().splitlines()


@pytest.mark.thorough
def test_tables_and_figures_are_those_of_the_command(tmp_path: Path, command_line) -> None:
    sweep = Sweep("printed-v2")
    code, out, _ = command_line(
        "report", "--table", "6", "--sweep", "printed-v2", "--format", "json", "--only", "memory=on"
    )
    assert code == 0
    rows = json.loads(out)
    table = sweep.table(6, only=["memory=on"])
    assert [[value["value"] for value in row["values"]] for row in rows] == table.frame.iloc[:, 5:].values.tolist()
    assert list(table.frame.iloc[0, :5]) == list(rows[0]["row"].values())
    page = table._repr_html_()
    assert page.count("<tr>") == 61
    assert "<html" not in page
    code, _, _ = command_line(
        "report", "--figure", "needle", "--sweep", "printed-v2", "--out", str(tmp_path / "command.svg")
    )
    drawn = sweep.figure("needle").save(tmp_path / "own.svg")
    assert (code, drawn.read_bytes()) == (0, (tmp_path / "command.svg").read_bytes())
    assert sweep.figure(1)._repr_svg_().lstrip().startswith("<?xml")


def test_effects_are_those_of_the_table() -> None:
    sweep = Sweep("printed-v2")
    frame = sweep.effects("val_loss")
    row = frame[(frame["axis"] == "memory") & (frame["stratum"] == "")].iloc[0]
    losses = sweep.measurements().query("metric == 'val_loss'")
    means = losses.groupby("memory")["value"].mean()  # every cell has its pair, so that means differ as pairs do
    assert row["pairs"] == 60
    assert row["mean"] == pytest.approx(means["on"] - means["off"], abs=1e-12)
    assert row["low"] < row["mean"] < row["high"] < 0
    with pytest.raises(ReportError, match=r"no measure 'vall_loss'.*did you mean val_loss"):
        sweep.effects("vall_loss")


def test_wrong_names_and_types_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreMissing, match="there is no database"):
        Sweep().status()
    assert "there is no database" in Sweep()._repr_html_()
    with pytest.raises(StoreMissing):
        Sweep("nothing").table(6)
    with pytest.raises(GridError, match=r"no-grid\.yaml"):
        Sweep("no-grid.yaml").plan()
    with pytest.raises(ValueError, match="name a grid"):
        Sweep().launch()
    with pytest.raises(TypeError, match="Sweep: sweep must be a str or a path or None, got int 6"):
        Sweep(6)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="launch: budget must be a number"):
        Sweep("quick").launch(budget="4h")  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*.db"))


def test_a_plan_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Sweep("quick", name="try", settings={"train.tokens": 40_000}).plan(only=["memory=on", "attn_type=nope,rope"])
    assert (len(plan.training), plan.tokens) == (4, 4 * 40_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_launch_status_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    bench = Bench(tmp_path)
    monkeypatch.chdir(tmp_path)
    sweep = Sweep("micro.yaml")
    with pytest.raises(RequirementsMissing, match="GPU"):
        Sweep("micro.yaml", name="on-gpu", settings={"resources.gpus": 1}).launch(executor="local", quiet=True)
    first = sweep.launch(only=["attn_type=nope"], executor="local", quiet=True)
    assert (first.finished, dict(first.standings)) == (True, {"done": 1})
    assert capsys.readouterr().out == ""
    second = sweep.launch(executor="local")
    assert (second.finished, second.standings["done"]) == (True, 2)
    assert "micro" in capsys.readouterr().out
    assert sweep.status().counts == {"done": 2}
    assert len(bench.sql("SELECT id FROM attempt")) == 2, "nothing was trained twice"
    assert sweep.cells()["state"].tolist() == ["done", "done"]
    cell = sweep.cell("nope-baseline-d0-m0-w0-s0")
    assert cell.config["model"]["attn_type"] == "nope"
    assert cell.measurements()["slug"].unique().tolist() == [cell.slug]
    assert cell.curve()["step"].is_monotonic_increasing
    assert len(cell.curve())
    trained = cell.load_model()
    logits = trained.model(torch.zeros(1, 8, dtype=torch.long))
    assert logits.shape[:2] == (1, 8)
    assert trained.cell == cell.id
    assert re.search(r"cell \w{12}  nope-baseline", cell._repr_html_())
    with pytest.raises(SweepUnknown):
        Sweep("mikro").status()
