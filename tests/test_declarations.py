"""Single declaration per fact: each fact is one line in one file.

A failure class, a metric, an identity default, a report option and a bound are added to a copy of the package and
followed through grid, database, tables, figure, completion and documents.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import recipes
from patience import PATIENCE_S

pytestmark = pytest.mark.thorough

DECLARATIONS = {
    "results/failure_classes.py": (
        "FAILURES: Mapping[Failure, FailureClass] = {\n",
        '    "overheated": FailureClass(meaning="its GPU was too hot", reaction="two tries", tries=2),\n',
    ),
    "results/metrics.csv": (
        "probe,name,unit,better,heading,noun,decimals,chance,trials,words\n",
        "needle,tens_accuracy,fraction,higher,Tens,,1,0.1,5,Share of tens recalled.\n",
    ),
    "sweep/config.py": (
        '    """Training recipe (docs/reference/mechanisms.md, "Training")."""\n',
        '    rest_steps: Int = knob(0, "Steps between two rests.", identity=0, ge=0, le=MAX_TOKENS)\n',
    ),
    "reports/report_options.py": (
        "    sweep: SweepName = None\n",
        '    quiet: Annotated[bool, typer.Option("--quiet", help="Print no notes.")] = False\n',
    ),
}
"""File -> the line after which the declaration stands, and the declaration."""
BOUND = ("model/bounds.py", "MAX_COUNT = 10**9", "MAX_COUNT = 123_456")

GRID = """
name: hot
extends: tiny
axes: {attn_type: [polar, nope]}
seeds: [0, 1, 2]
"""

SWEEP = """
from pathlib import Path
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning import planner

store = open_store("atma.db", create=True)
cells = [
    planner.to_record(cell) for cell in load_grid(Path("hot.yaml")).expand(lambda data: "f" * 64, lambda name: None)
]
store.record_revision("hot", grid_text="", grid_file="hot.yaml", cells=cells)
owner = Owner(name="ada", host="here", pid=1, started=0.0)
for cell in cells:
    attempt = store.start_attempt(cell.id, owner=owner, fence=1)
    if cell.seed == 2:
        store.finish_attempt(attempt.id, 1, "failed", failure="overheated", cause="95 degrees")
        continue
    share = 0.625 + 0.125 * cell.seed - 0.25 * (cell.levels["attn_type"] == "nope")
    number = Measurement(probe="needle", metric="tens_accuracy", length=64, value=share, unit="fraction", n=80)
    loss = Measurement(probe="val", metric="val_loss", value=3.0 + share, unit="nats/token")
    DatabaseRecorder(store, attempt.id, 1).measurements([number, loss])
    store.finish_attempt(attempt.id, 1, "done")
store.close()
"""

CLI = "atma_sweep.cli"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs Python in a folder with a database, over a copy of the package that has the declarations."""
    folder = tmp_path_factory.mktemp("declared")
    root = recipes.copy(folder)
    for name, (before, line) in DECLARATIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has {text.count(before)} of {before!r}"
        (root / name).write_text(text.replace(before, before + line), encoding="utf-8")
    name, before, after = BOUND
    text = (root / name).read_text(encoding="utf-8")
    assert text.count(before) == 1
    (root / name).write_text(text.replace(before, after), encoding="utf-8")
    work = folder / "work"
    work.mkdir()
    (work / "hot.yaml").write_text(GRID)
    base = {key: value for key, value in os.environ.items() if key != "ATMA_DB"} | {"PYTHONPATH": str(folder)}

    def python(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=work,
            env=base | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    python("-c", SWEEP)
    return python


def work_of(run: Run) -> Path:
    """Return the folder in which `run` runs."""
    return Path(run("-c", "import os; print(os.getcwd())").stdout.strip())


def grid(run: Run, *lines: str) -> str:
    """Write the grid with these lines more; its name."""
    (work_of(run) / "more.yaml").write_text(GRID + "\n".join(lines))
    return "more.yaml"


def cells(run: Run, *lines: str) -> list[str]:
    """Return the ids of the cells of the grid with these lines more."""
    done = run("-m", CLI, "launch", grid(run, *lines), "--dry-run", "--json")
    return [cell["cell"] for cell in json.loads(done.stdout)["cells"]]


def figure(run: Run, name: str) -> str:
    """Return the SVG of a figure of the sweep."""
    run("-m", CLI, "report", "--figure", name, "--out", f"{name}.svg")
    return (work_of(run) / f"{name}.svg").read_text(encoding="utf-8")


def test_new_metric_reaches_table_figure_and_completion(run: Run) -> None:
    table = run("-m", CLI, "report", "--table", "6", "--format", "csv", "--no-trace").stdout
    rows = {row["Type"]: row for row in csv.DictReader(table.splitlines())}
    # means of 0.625 and 0.75, and of 0.375 and 0.5, in percent with the one decimal that the metric asks for
    assert rows["polar"]["Tens@64"] == "68.8 ± 8.8 (n=2)"
    assert rows["nope"]["Tens@64"] == "43.8 ± 8.8 (n=2)"
    table = run("-m", CLI, "report", "--table", "6", "--format", "md").stdout
    assert "Tens, in %: Share of tens recalled. More is better. Score of a trivial answer: 10%." in table
    assert "Tens@64" in run("-m", CLI, "report", "--table", "effects", "--format", "md").stdout
    line = {"_ATMA_SWEEP_COMPLETE": "complete_bash", "COMP_WORDS": "atma-sweep delete --metric ten", "COMP_CWORD": "3"}
    assert run("-m", CLI, **line).stdout.split() == ["tens_accuracy"]


def test_new_failure_class_reaches_bundle_table_and_figure(run: Run) -> None:
    run("-m", CLI, "export", "--out", "hot.zip")
    run("-m", CLI, "import", "hot.zip", "--db", "copy.db")
    for database in ("atma.db", "copy.db"):
        rows = json.loads(run("-m", CLI, "report", "--table", "failures", "--format", "json", "--db", database).stdout)
        assert [row["failure"] for row in rows] == ["overheated"] * 2
    assert "overheated" in figure(run, "timeline")
    policy = "from atma_sweep.sweep.orchestrator.retries import FAILURES; print(FAILURES['overheated'].tries)"
    assert run("-c", policy).stdout == "2\n"


def test_new_setting_at_its_identity_default_keeps_ids(run: Run) -> None:
    old_ids = cells(run)
    assert cells(run, "set: {train: {rest_steps: 0}}") == old_ids
    assert cells(run, "set: {train: {rest_steps: 5}}") != old_ids
    refused = run("-m", CLI, "launch", grid(run, "set: {train: {rest_step: 5}}"), "--dry-run", code=2).stderr
    assert "rest_steps" in refused
    section = json.loads(run("-m", CLI, "schema").stdout)["$defs"]["TrainConfig"]["properties"]
    assert section["rest_steps"]["description"].startswith("Steps between two rests.")


def test_new_report_option_reaches_help_completion_and_reference(run: Run) -> None:
    assert "Print no notes." in run("-m", CLI, "report", "--help", COLUMNS="200").stdout
    assert "`--quiet`" in run("-m", CLI, "reference").stdout
    line = {"_ATMA_SWEEP_COMPLETE": "complete_bash", "COMP_WORDS": "atma-sweep report --qui", "COMP_CWORD": "2"}
    assert run("-m", CLI, **line).stdout.split() == ["--quiet"]
    run("-m", CLI, "report", "--table", "6", "--quiet")


def test_new_bound_is_refused_and_in_the_schema(run: Run) -> None:
    refused = run("-m", CLI, "launch", grid(run, "set: {train: {micro_batch: 123457}}"), "--dry-run", code=2).stderr
    assert "123456" in refused
    section = json.loads(run("-m", CLI, "schema").stdout)["$defs"]["TrainConfig"]["properties"]
    assert "123456" in json.dumps(section["micro_batch"])
