"""Probes on kept weights: command, database, and the loaded model, which gives the same numbers."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atma_sweep
import numpy as np
import psutil
import pytest
import torch
from atma_sweep.results.errors import SweepReadOnly
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.attempt.trained_cells import LoadedModel, NotTrained, WeightsGone
from atma_sweep.sweep.data.corpora import CorpusError, open_corpus
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.orchestrator import evaluate
from atma_sweep.sweep.probes import PROBES
from bench import COMMAND, EXAMPLE_MIXER, Bench
from factories import AtOnce, supervisor_of
from here import run_in_process
from machine import Quiet
from once import once
from patience import PATIENCE_S
from refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "read-the-numbers.md").read_text()
IN_PYTHON = re.findall(r"^```python\n(import torch\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
"""The code of the page, to the letter."""
POLAR, FADE, ROPE = (f"{name}-baseline-d0-m0-w0-s0" for name in ("polar", "fade", "rope"))
NOPE = "nope-baseline-d0-m0-w1-s0"
PROBED = ("val", "clean", "junk", "needle")


class Desk(Bench):
    """Folder with a database in which the cells polar, fade and nope are trained, and rope is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, copied=folder)
        self.db, self.runs = folder / "atma.db", folder / "atma-runs"

    def start(self, *arguments: str, out: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a command whose errors are separate from its output."""
        command = [*COMMAND, *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, stdout=out, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Return the standard output of a command that exits with `code`.

        Its standard error for codes other than 0 and 1.
        """
        ended, out, err = run_in_process(self.folder, *arguments)
        assert ended == code, out + err
        return out if code < 2 else err

    def evaluate(self, *arguments: str, code: int = 0) -> str:
        return self.run("evaluate", *arguments, "--executor", "local", code=code)

    def cell(self, slug: str) -> str:
        ((cell_id,),) = self.sql(f"SELECT id FROM cell WHERE slug = '{slug}'")
        return str(cell_id)

    def state(self) -> list[Any]:
        """Return everything that an evaluation must not change."""
        trainings = "SELECT * FROM attempt WHERE kind = 'train' ORDER BY id"
        numbers = "SELECT m.* FROM measurement m JOIN attempt a ON a.id = attempt_id WHERE kind = 'train' ORDER BY m.id"
        sweeps = (
            "SELECT name, launched_at, owner, lease_until, count(r.id) FROM sweep s JOIN revision r ON sweep_id = s.id"
        )
        return [self.sql(trainings), self.sql(numbers), self.sql(f"{sweeps} GROUP BY 1, 2, 3, 4 ORDER BY 1")]

    def store(self) -> Store:
        return open_store(self.db)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained folder without its text, grid and plugin, so that an evaluation cannot rely on them."""
    return once(tmp_path_factory, "trained", _train)


def _train(folder: Path) -> None:
    bench = Bench(folder)
    bench.grid(tokens=3840, more="plugins: [my_mixer.py]\ninclude:\n  - {attn_type: nope, window: on}\n")
    bench.edit("[nope, polar]", "[polar, fade, rope]")
    bench.edit("  checkpoint: {every_steps: 7}\n", "")
    (folder / "my_mixer.py").write_text(EXAMPLE_MIXER)
    # in a process of its own, whose plugin nobody else has
    bench.launch("--only", "attn_type=polar,fade,nope")
    shutil.rmtree(folder / "text")
    for name in ("my_mixer.py", "micro.yaml"):
        (folder / name).unlink()


@pytest.fixture
def desk(trained: Path, tmp_path: Path) -> Desk:
    """Copy of the trained folder for one test."""
    shutil.copytree(trained, tmp_path / "desk")
    return Desk(tmp_path / "desk")


VALUES = (
    "SELECT probe, metric, length, value, unit, n, low, high FROM measurement WHERE attempt_id = {} ORDER BY 1, 2, 3"
)
EXAMPLES = (
    "SELECT probe, metric, length, item, position, value FROM example WHERE attempt_id = {} ORDER BY 1, 2, 3, 4, 5"
)


def _sweep(store: Store, name: str, *slugs: str) -> None:
    cells = [store.find_cell(slug, "micro") for slug in slugs]
    store.record_revision(name, grid_text="", grid_file="", cells=cells)


def test_repeated_evaluation_gives_equal_numbers(desk: Desk) -> None:
    """The cells belong to two sweeps; each is evaluated in the newest that has it."""
    _sweep(desk.store(), "second", POLAR)
    before = desk.state()
    out = desk.evaluate(POLAR, desk.cell(NOPE)[:9], desk.cell(POLAR))
    assert desk.state() == before
    new = desk.sql(
        "SELECT e.id, e.parent_id, slug FROM attempt e JOIN cell c ON c.id = e.cell_id "
        "JOIN attempt t ON t.id = e.parent_id AND t.kind = 'train' AND t.cell_id = e.cell_id "
        "WHERE e.kind = 'evaluate' AND e.state = 'done' AND e.number = 2 ORDER BY e.id"
    )
    assert [slug for _, _, slug in new] == [POLAR, NOPE]
    lines = out.splitlines()
    ended = [line.partition(" done in ")[0] for line in lines[:2]]
    assert [line[:5] for line in ended] == ["[1/2]", "[2/2]"]
    assert sorted(line[6:] for line in ended) == sorted([POLAR, NOPE])  # side by side, so either may end first
    assert len(lines) == 4
    for (attempt, parent, slug), line in zip(new, lines[2:], strict=True):
        values = desk.sql(VALUES.format(attempt))
        probed = [row for row in desk.sql(VALUES.format(parent)) if row[0] in PROBED and row[1] != "peak_memory"]
        assert [row for row in values if row[1] != "peak_memory"] == probed
        assert desk.sql(EXAMPLES.format(attempt)) == desk.sql(EXAMPLES.format(parent)) != []
        expected = [" ".join(map(str, [p, m, *([n] if n else []), f"{value:.6g}"])) for p, m, n, value, *_ in values]
        assert line == f"{slug}: {', '.join(expected)}"
    assert desk.sql("SELECT name, fence FROM sweep ORDER BY name") == [("micro", 2), ("second", 1)]
    counts = {sweep["sweep"]: sweep["counts"] for sweep in json.loads(desk.run("status", "--json"))}
    assert counts["micro"] == {"done": 3, "new": 1}


def test_probes_and_lengths_beyond_the_config_as_json(desk: Desk) -> None:
    out = desk.evaluate(FADE, "--probe", "clean", "--probe", "val", "--length", "48", "--length", "80", "--json")
    rows = [row for row in json.loads(out) if row["metric"] != "peak_memory"]
    assert list(rows[0]) == ["cell", "slug", "probe", "metric", "length", "value", "unit", "n", "reason", "samples"]
    assert [(row["probe"], row["metric"], row["length"]) for row in rows] == [
        ("clean", "nats", 48),
        ("clean", "nats", 80),
        ("val", "val_loss", 0),
        ("val", "val_loss_full", 0),
    ]
    assert {(row["cell"], row["slug"]) for row in rows} == {(desk.cell(FADE), FADE)}
    clean = f"slug = '{FADE}' AND probe = 'clean' AND metric = 'nats'"
    view = desk.sql(f"SELECT value, unit, n FROM results WHERE {clean} ORDER BY length")
    assert [(row["value"], row["unit"], row["n"]) for row in rows[:2]] == [view[1], view[3]]
    assert (rows[0]["n"], rows[1]["n"]) == (2 * 48, 2 * 80)
    # what was asked stands with the attempt, what the cell is stays
    (used,) = desk.sql("SELECT config FROM provenance JOIN attempt a ON a.id = attempt_id WHERE kind = 'evaluate'")
    stored = json.loads(desk.sql(f"SELECT config FROM cell WHERE slug = '{FADE}'")[0][0])
    config = json.loads(used[0])
    assert (config["eval"]["lengths"], config["eval"]["probes"]) == ([48, 80], ["clean", "val"])
    assert stored["eval"]["lengths"] == [32, 64]
    assert config["seed"] == stored["seed"]
    for name in ("model", "train"):  # a job file leaves out what every older cell had without saying so
        expected = {key: value for key, value in config[name].items() if not isinstance(value, dict)}
        assert expected.items() <= stored[name].items()


@pytest.mark.parametrize(
    ("cells", "options", "kind", "expected"),
    [
        ([POLAR, ROPE], {}, NotTrained, f"({ROPE}) is not trained yet; launch its grid"),
        (
            [POLAR],
            {"probes": ["cleen"]},
            GridError,
            f"allowed: {', '.join(PROBES)}; did you mean 'clean'?",
        ),
        ([POLAR], {"probes": ["val"], "lengths": [64]}, GridError, "val has no context length; leave --length out"),
        ([POLAR], {"lengths": [64, 1]}, GridError, "--length: 1: must be at least 2 tokens"),
        ([POLAR], {"lengths": [-5]}, GridError, "--length: -5: must be at least 2 tokens"),
        ([POLAR, NOPE], {"lengths": [999_999_999]}, GridError, "longest length by probe, in tokens: clean "),
        ([POLAR], {"probes": ["junk"], "lengths": [999_999_999]}, GridError, "by probe, in tokens: junk "),
        # its end follows from the lengths of the grid, not from those asked for now
        ([POLAR], {"probes": ["same_tail"], "lengths": [999_999_999]}, GridError, "in tokens: same_tail 64"),
        (
            [POLAR],
            {"probes": ["state_norm"], "lengths": [64]},
            GridError,
            "has no memory whose state could be measured",
        ),
    ],
)
def test_plan_checks_everything_before_the_first_attempt(
    desk: Desk, cells: list[str], options: dict[str, Any], kind: type[Exception], expected: str
) -> None:
    assert expected in refused(lambda: evaluate.plan(desk.store(), cells, runs=desk.runs, **options), kind)


def test_probe_of_a_plugin_measures_a_cell_without_a_launch(desk: Desk, tmp_path: Path) -> None:
    plugin = tmp_path / "layers.py"
    plugin.write_text(LAYERS)
    before = desk.cell(POLAR)
    missing = desk.evaluate(POLAR, "--probe", "layers", code=2)
    assert "no such probe; name the file of a plugin with --plugin" in missing
    (row,) = json.loads(desk.evaluate(POLAR, "--probe", "layers", "--plugin", str(plugin), "--json"))
    digest = hashlib.sha256(plugin.read_bytes()).hexdigest()
    ((layers,),) = desk.sql(f"SELECT json_extract(config, '$.model.n_layers') FROM cell WHERE id = '{before}'")
    assert (row["metric"], row["value"]) == ("count", layers)
    assert desk.sql("SELECT source FROM measurement WHERE probe = 'layers'") == [(digest,)]
    assert desk.cell(POLAR) == before
    assert (desk.runs / "plugins" / f"{digest[:12]}_layers.py").is_file()
    assert "--plugin: " in desk.evaluate(POLAR, "--probe", "layers", "--plugin", "gone.py", code=2)


def test_evaluate_error_is_a_line_without_an_attempt(desk: Desk) -> None:
    before = desk.state()
    (desk.runs / desk.cell(NOPE) / "1" / "weights.safetensors").unlink()
    err = desk.evaluate(POLAR, NOPE, code=2)
    assert re.fullmatch(rf"atma-sweep: the weights of cell \w+ \({NOPE}\) are gone from .*--retrain\n", err)
    assert desk.state() == before
    assert desk.sql("SELECT count(*) FROM attempt WHERE kind = 'evaluate'") == [(0,)]


def test_impossible_length_is_refused_before_any_write(desk: Desk) -> None:
    before = desk.db.read_bytes()
    err = desk.evaluate(POLAR, "--length", "999999999", code=2)
    match = re.fullmatch(
        rf"atma-sweep: --length: 999999999: too long for the text of cell \w+ \({POLAR}\); "
        r"longest length by probe, in tokens: clean ([\d,]+), junk ([\d,]+), needle ([\d,]+)\n",
        err,
    )
    assert match is not None, err
    assert desk.sql("SELECT count(*) FROM attempt WHERE kind = 'evaluate'") == [(0,)]
    assert desk.db.read_bytes() == before
    # what it names is the truth: the longest is measured, one more is not
    clean = int(match[1].replace(",", ""))
    (row,) = json.loads(desk.evaluate(POLAR, "--probe", "clean", "--length", str(clean), "--json"))[:1]
    assert (row["length"], row["reason"]) == (clean, None)
    desk.evaluate(POLAR, "--probe", "clean", "--length", str(clean + 1), code=2)


def test_missing_weights_and_missing_corpus_are_reported(desk: Desk) -> None:
    store = desk.store()
    ((attempt,),) = desk.sql(f"SELECT id FROM attempt WHERE cell_id = '{desk.cell(NOPE)}'")
    store.clear_weights(attempt)
    with pytest.raises(WeightsGone, match=r"were not kept; .*--retrain"):
        evaluate.plan(store, [NOPE], runs=desk.runs)
    shutil.rmtree(desk.runs / "corpora")
    with pytest.raises(CorpusError):
        evaluate.plan(store, [POLAR], runs=desk.runs)


LAYERS = """
from atma_sweep.sweep.probes import Metric, Probe, register_probe


@register_probe("layers")
class Layers(Probe):
    metrics = (Metric("count", "1", words="Layers of the network."),)

    def tokens(self, length):
        return 1

    def run(self, subject, lengths):
        for _ in lengths:
            yield [self.value("count", float(len(subject.model.blocks)))], []
"""


def _parent() -> Owner:
    """Return a live process of this machine other than this one."""
    parent = psutil.Process().parent()
    assert parent is not None
    return Owner(name="launch", host=processes.this_process("x").host, pid=parent.pid, started=parent.create_time())


def test_running_sweep_is_not_evaluated(desk: Desk) -> None:
    owner = _parent()
    fence = desk.store().acquire_sweep("micro", owner, 60.0)
    err = desk.evaluate(POLAR, code=3)
    assert re.fullmatch(rf"atma-sweep: sweep 'micro' is run by launch on \S+ \(pid {owner.pid}\) since .*\n", err)
    assert desk.sql("SELECT owner_pid, fence FROM sweep") == [(owner.pid, fence)]
    assert desk.sql("SELECT count(*) FROM attempt WHERE kind = 'evaluate'") == [(0,)]


def test_newest_sweep_with_the_cell_is_claimed(desk: Desk) -> None:
    store = desk.store()
    _sweep(store, "second", POLAR)
    _sweep(store, "imported", POLAR, NOPE)
    store.set_read_only("imported")

    def holders(*cell_names: str, **options: Any) -> dict[str, list[str]]:
        planned = evaluate.plan(store, cell_names, runs=desk.runs, probes=["val"], **options)
        return {sweep: [task.cell.slug for task in share] for sweep, share in planned.items()}

    assert holders(NOPE, POLAR) == {"micro": [NOPE], "second": [POLAR]}
    assert holders(NOPE, POLAR, sweep="micro") == {"micro": [NOPE, POLAR]}
    with pytest.raises(SweepReadOnly):
        evaluate.run(store, evaluate.plan(store, [POLAR], runs=desk.runs, sweep="imported"), Quiet(), runs=desk.runs)
    # one of the two is busy: neither is evaluated
    store.acquire_sweep("second", _parent(), 60.0)
    err = desk.evaluate(NOPE, POLAR, code=3)
    assert "sweep 'second' is run by" in err
    assert desk.sql("SELECT owner FROM sweep WHERE name = 'micro'") == [(None,)]
    assert desk.sql("SELECT count(*) FROM attempt WHERE kind = 'evaluate'") == [(0,)]
    _sweep(store, "micro", NOPE)
    _sweep(store, "second", NOPE)
    with pytest.raises(evaluate.CellNotListed, match="no sweep lists cell"):
        evaluate.plan(store, [POLAR], runs=desk.runs)


CHILD = "SELECT pid FROM attempt JOIN sweep s WHERE attempt.state = 'running' AND pid != s.owner_pid"


def test_killed_evaluation_is_retried(desk: Desk) -> None:
    started = desk.start("evaluate", POLAR, "--executor", "local", "--json")
    desk.wait(CHILD)
    psutil.Process(int(str(desk.sql(CHILD)[0][0]))).send_signal(signal.SIGKILL)
    out, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, err
    assert f"[0/1] {POLAR} interrupted in " in err
    assert desk.sql("SELECT state, exit_code FROM attempt WHERE kind = 'evaluate'") == [
        ("interrupted", -9),
        ("done", 0),
    ]
    assert {(row["probe"], row["length"]) for row in json.loads(out)} == {
        ("val", 0), *((probe, length) for probe in PROBED[1:] for length in (32, 64))
    }  # fmt: skip


def test_interrupted_evaluation_leaves_training_unchanged(desk: Desk) -> None:
    before = desk.state()
    started = desk.start("evaluate", POLAR, "--executor", "local")
    desk.wait(CHILD)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130, err
    assert err == "atma-sweep: stopped; run evaluate again for the cells that are not finished\n"
    assert desk.sql("SELECT state FROM attempt WHERE kind = 'evaluate'") == [("interrupted",)]
    assert desk.state() == before
    assert json.loads(desk.run("status", "--json"))[0]["counts"] == {"done": 3, "new": 1}


def test_failed_evaluation_exits_with_1_without_older_numbers(desk: Desk) -> None:
    store = desk.store()
    older = store.start_attempt(desk.cell(POLAR), kind="evaluate", owner=processes.this_process("test"), fence=0)
    DatabaseRecorder(store, older.id, 0).measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
    store.finish_attempt(older.id, 0, "done")
    weights = desk.runs / desk.cell(POLAR) / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    output = desk.evaluate(POLAR, NOPE, "--probe", "val", code=2)
    assert f"{weights}: the kept weights have changed since they were written" in output
    # of an earlier version, which recorded no hash to refuse them by
    with sqlite3.connect(desk.db) as connection:
        connection.execute("UPDATE provenance SET extra = json_remove(extra, '$.weights_sha256')")
    out = desk.evaluate(POLAR, NOPE, "--probe", "val", code=1)
    *ended, line = (line for line in out.splitlines() if not line.startswith("cells: "))  # progress of a slow machine
    # side by side, so either may end first
    (failed,) = (line for line in ended if f" {POLAR} failed in " in line)
    (done,) = (line for line in ended if f" {NOPE} done in " in line)
    assert "the weights cannot be read" in failed
    assert sorted(line[:5] for line in (failed, done)) == ["[1/2]", "[2/2]"]
    assert len(ended) == 2
    assert re.fullmatch(rf"{NOPE}: val val_loss \S+, val val_loss_full \S+", line)


def test_retrained_weights_are_measured(desk: Desk) -> None:
    store = desk.store()
    ((task,),) = evaluate.plan(store, [POLAR], runs=desk.runs, lengths=[7, 5]).values()
    me = processes.this_process("test")

    def carried_out() -> list[Job]:
        fence = store.acquire_sweep("micro", me, 60.0)
        executor = AtOnce(store)
        supervisor_of(store, fence, executor, desk.runs, name="micro").run([task])
        return executor.jobs

    wanted = [("val", 0), *((probe, length) for probe in PROBED[1:] for length in (5, 7))]
    (job,) = carried_out()
    assert (job.kind, job.weights, job.missing) == ("evaluate", f"{task.cell.id}/1/weights.safetensors", wanted)
    newer = store.start_attempt(task.cell.id, owner=me, fence=0)
    store.finish_attempt(newer.id, 0, "done", weights="elsewhere/weights.safetensors")
    (job,) = carried_out()
    assert (job.weights, job.missing) == ("elsewhere/weights.safetensors", wanted)
    assert store.attempt(job.attempt).parent_id == newer.id
    store.clear_weights(newer.id)
    assert carried_out() == []


def _nats(model: LoadedModel, tokens_T: np.ndarray, *, full: bool = True) -> np.ndarray:
    """Return the nats of every token after the first, from the logits in float64."""
    tokens_BT = torch.from_numpy(tokens_T.astype(np.int64))[None]
    net = model.model
    with torch.no_grad():
        if full:
            logits_TV = net.logits(net.features(tokens_BT[:, :-1], full_context=True).hidden_BTD)[0]
        else:
            logits_TV = net(tokens_BT[:, :-1])[0]
    z = logits_TV.double().numpy()
    picked = z[np.arange(len(z)), tokens_BT[0, 1:].numpy()]
    return np.logaddexp.reduce(z, axis=1) - picked


@pytest.mark.parametrize(("slug", "windowed"), [(POLAR, False), (NOPE, True)])
def test_loaded_model_reproduces_the_stored_numbers(desk: Desk, slug: str, windowed: bool) -> None:
    model = atma_sweep.load(slug, db=desk.db)
    corpus = open_corpus(desk.runs / "corpora", model.config.data.fingerprint or "")
    stored = desk.sql(
        "SELECT length, item, e.value FROM example e JOIN attempt a ON a.id = attempt_id JOIN cell c ON c.id = cell_id "
        f"WHERE slug = '{slug}' AND probe = 'clean' AND metric = 'nats'"
    )
    assert sorted((length, item) for length, item, _ in stored) == [(32, 0), (32, 1), (64, 0), (64, 1)]
    for length, item, value in stored:
        document = corpus.heldout[item][: length + 1]
        assert _nats(model, document).mean() == pytest.approx(value, abs=1e-6)
        # without a window the plain call is what the probe measured; with one it is not
        plain = _nats(model, document, full=False).mean()
        assert (abs(plain - value) < 1e-6) == (not windowed)
    rows = [np.asarray(corpus.validation[start : start + 33]) for start in range(0, 256, 32)]
    for metric, full in (("val_loss", False), ("val_loss_full", True)):
        ((value,),) = desk.sql(f"SELECT value FROM results WHERE slug = '{slug}' AND metric = '{metric}'")
        assert np.mean([_nats(model, row, full=full) for row in rows]) == pytest.approx(value, abs=1e-6)


def test_readme_snippet_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.folder)
    monkeypatch.delenv("ATMA_DB", raising=False)
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(IN_PYTHON, "read-the-numbers.md", "exec"), names)
    arguments = SimpleNamespace(**names)
    assert arguments.logits.shape == (1, len("import os"), 264)
    assert arguments.trained.config.model.attn_type == "polar"
    guess = int(arguments.logits[0, -1].argmax())
    assert out.getvalue() == f"{bytes([guess])!r}\n"
