"""Every screen from 60 to 200 columns: no line is wider, and no word is broken."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atma_sweep import cli
from atma_sweep.results.console.command_line import print_result
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, MeasuredValue, Measurement, Owner
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep import doctor
from atma_sweep.sweep.checkpoints import storage
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.doctor.context import Check
from atma_sweep.sweep.orchestrator.display import ProgressDisplay, SafeConsole

WIDTHS = (60, 80, 120, 200)
WIDE = 2000
ME = Owner(name="launch", host="node-1", pid=17, started=0.0)
LENGTHS = (2048, 8192, 65536)


class Terminal(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder with a short path, since paths are never broken."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as name:
        yield Path(name)


@pytest.fixture
def screen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs a command, or calls a function, on a terminal of a width, and returns what it shows."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ATMA_DB", raising=False)
    # no escape codes, whose characters would count
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    # other programs change it between two renderings
    monkeypatch.setattr(storage, "free_bytes", lambda *folder: 62 * 2**30)

    def draw(width: int, *arguments: str, call: Callable[[], Any] = cli.main) -> str:
        shown = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.argv", ["atma-sweep", *arguments])
        monkeypatch.setattr("sys.stdout", shown)
        monkeypatch.setattr("sys.stderr", shown)
        with contextlib.suppress(SystemExit):
            call()
        return shown.getvalue()

    return draw


@pytest.fixture
def sweep(folder: Path) -> None:
    """Fill the default database with a sweep of three cells: one is done, one trains, one has failed."""
    store = open_store(folder / "atma.db", create=True)
    cells = []
    for index, kind in enumerate(("polar", "nope", "rope")):
        levels = dict(zip(AXES, (kind, "baseline", "off", "on", "off"), strict=True))
        config = {
            "model": {"attn_type": kind, "d_model": 1024, "n_layers": 24},
            "data": {"corpus": "fineweb-edu", "fingerprint": "c3bdd49cb6827eff" * 4},
            "train": {"tokens": 10**9, "seq_len": 2048, "muon_lr": 0.02, "embedding_lr": 0.3, "batch_tokens": 524_288},
        }
        slug = f"{kind}-baseline-d0-m1-w0-recipeintended-s0"
        cells.append(CellRecord(id=f"{index:012x}", slug=slug, seed=0, levels=levels, config=config, tokens=10**9))
    options = {"requested": [["val", 0]]}
    store.record_revision("pilot", grid_text="x", grid_file="x", options=options, cells=cells)
    for record, state in zip(cells, ("done", "running", "failed"), strict=True):
        attempt = store.start_attempt(record.id, owner=ME, fence=1, steps_total=1900)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        points = [
            CurvePoint(step=step, tokens=step * 524_288, wall_s=step, train_loss=9 - step / 400, tokens_per_s=195_899.0)
            for step in range(100, 1901, 100)
        ]
        recorder.curve(points)
        recorder.progress(1900 if state == "done" else 700, 1900, 3.125, 195_899.0, "training")
        if state == "done":
            needle = {"probe": "needle", "metric": "digit_accuracy", "unit": "fraction", "n": 80}
            recorder.measurements(
                [
                    Measurement(probe="val", metric="val_loss", value=3.125, unit="nats/token", n=16_384),
                    Measurement(probe="throughput", metric="mfu", value=None, reason="n/a: peak FLOP/s of the GPU is unknown"),
                    *(Measurement(value=0.1 * i, length=length, **needle) for i, length in enumerate(LENGTHS, 1)),
                    *(
                        Measurement(probe="clean", metric="peak_memory", value=2e9 * i, length=length, unit="bytes")
                        for i, length in enumerate(LENGTHS, 1)
                    ),
                ]
            )  # fmt: skip
        if state != "running":
            cause = "CUDA error: an illegal memory access was encountered" if state == "failed" else None
            store.finish_attempt(attempt.id, 1, state, cause=cause)  # type: ignore[arg-type]
    store.close()


def parts(text: str) -> set[str]:
    """Return the parts of a screen without those of lines, bars and sparklines, and without commas after them.

    A heading such as Clean@2K is two parts, between which tables break it.
    """
    return {word.strip(",.;:") for word in text.replace("@", " @").split() if not re.search("[─━▁-█]", word)} - {""}


def assert_fits(draw: Callable[[int], str], width: int, *, may_hide: bool = False) -> None:
    """Assert that a screen fits a width with every word of the widest rendering, or with none of its own."""
    wide, narrow = draw(WIDE), draw(width)
    assert parts(wide)
    longest = max(narrow.splitlines(), key=len)
    assert len(longest) <= width, longest
    if may_hide:
        note = "hidden column columns The same in every row --format csv or a wider terminal shows all"
        assert parts(narrow) - parts(wide) - parts(note) <= {str(n) for n in range(99)}
    else:
        # headings above running cells, for which sentences have no word
        assert parts(wide) - parts(narrow) <= {"cell", "time"}


COMMANDS = {
    "status": ("status",),
    "show": ("show", "polar-baseline-d0-m1-w0-recipeintended-s0"),
    "show of a printed cell": ("show", "polar-baseline-d0-m1-w0-s0", "--sweep", "printed-v2"),
    "plan": ("plan", "full"),
    "plan of a small grid": ("plan", "quick", "--gpus", "8", "--gpu", "H200", "--rate", "2.50/h"),
    "dry run": ("launch", "quick", "--dry-run"),
    "refused launch": ("launch", "full"),
    "report --list": ("report", "--list"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_screen_of_a_command_fits(sweep: None, screen: Callable[..., str], name: str, width: int) -> None:
    assert_fits(lambda columns: screen(columns, *COMMANDS[name]), width)


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("table", ["6", "3", "runs", "failures"])
def test_screen_of_a_report_fits(sweep: None, screen: Callable[..., str], table: str, width: int) -> None:
    of = "printed-v2" if table in ("6", "3") else "pilot"
    assert_fits(lambda columns: screen(columns, "report", "--table", table, "--sweep", of), width, may_hide=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_screen_of_the_doctor_fits(screen: Callable[..., str], width: int) -> None:
    checks = [
        Check("python", "ok", "3.11.7 of /usr/bin/python3 with atma-sweep 0.1.0 and every package that it requires"),
        Check("file system of database", "bad", "nfs4 loses locks of SQLite, so that two launches may claim a cell",
              "name a database on a local disk with --db, or one of PostgreSQL"),
        Check("compiled kernels", "absent", "none yet in /root/.cache/atma-sweep/compiled; the first attempt creates it"),
        Check("disk space", "warn", "62 GiB free in /scratch/runs; pilot has 120 cells to train: 156 GiB to keep"),
    ]  # fmt: skip
    assert_fits(
        lambda columns: screen(columns, call=lambda: print_result(None, doctor.describe(checks), as_json=False)),
        width,
    )


def running_launch(width: int, height: int = 40) -> ProgressDisplay:
    """Return the display of a launch with two running cells, of which one trains, and one that is done."""

    def task(slug: str) -> Any:
        train = SimpleNamespace(steps=100, batch_tokens=20_000)
        cell = SimpleNamespace(id=slug, slug=slug, config=SimpleNamespace(train=train, resources=Resources()))
        return SimpleNamespace(cell=cell, kind="train")

    def attempt(key: int, **changes: Any) -> Any:
        start = datetime(2026, 1, 1, tzinfo=UTC)
        fields: dict[str, Any] = {"state": "running", "phase": "", "step": 0, "loss": None, "tokens_per_s": None}
        fields |= {"failure": None, "cause": None, "started_at": start, "finished_at": start + timedelta(seconds=1000)}
        return SimpleNamespace(id=key, number=1, **(fields | changes))

    def results(cell_id: str) -> list[MeasuredValue]:
        value = {"probe": "val", "metric": "val_loss", "value": 3.125, "unit": "nats/token"}
        needle = {"probe": "needle", "metric": "digit_accuracy", "value": 0.925, "length": 65536, "unit": "fraction"}
        return [MeasuredValue(cell_id=cell_id, attempt_id=1, **fields) for fields in (value, needle)]  # type: ignore[arg-type]

    console = SafeConsole(soft_wrap=True, width=width, height=height, force_terminal=True, color_system=None)
    display = ProgressDisplay(console, 6, name="pilot", results=results)
    display.set_total(6, 12_000_000)
    slugs = [f"{kind}-baseline-d0-m1-w0-recipeintended-s0" for kind in ("polar", "nope", "rope")]
    for key, slug in enumerate(slugs):
        display.started(task(slug), attempt(key))
    for step in range(1, 51):
        display.running([attempt(1, phase="training", step=step, loss=8 - step / 10, tokens_per_s=2000.0)])
    display.running([attempt(2, phase="probing", step=100, loss=3.5)])
    display.ended(task(slugs[0]), attempt(0, state="done", step=100))
    return display


@pytest.mark.parametrize("width", WIDTHS)
def test_screen_of_a_launch_fits(screen: Callable[..., str], width: int) -> None:
    def draw(columns: int) -> str:
        return screen(columns, call=lambda: (d := running_launch(columns)).console.print(d.screen_view()))

    assert_fits(draw, width)
    shown = draw(width)
    assert "best so far: polar-baseline-d0-m1-w0-recipeintended-s0, validation loss 3.125" in " ".join(shown.split())
    # 50 losses that fall by a tenth each: every level occurs, the highest first
    (line,) = re.findall("[▁-█]{2,}", shown)
    assert (len(line), list(line), set(line)) == (16, sorted(line, reverse=True), set("▁▂▃▄▅▆▇█"))
    assert (
        "[1/6] polar-baseline-d0-m1-w0-recipeintended-s0 done in 17 min: validation loss 3.125, needle accuracy at 65,536 92.5 %"
        in " ".join(shown.split())
    )


def test_remaining_time_is_the_closed_form(screen: Callable[..., str]) -> None:
    """5M (2M + 1M + 2M) of 12M tokens are trained; one cell has 1M left, and 6M wait for two workers."""
    progress = running_launch(80).progress()
    assert (progress.tokens_done, progress.tokens) == (5_000_000, 12_000_000)
    # the finished cell took 1000 s for 2M tokens, so a waiting cell trains 2000 tokens/s; the running one has 2000, too
    assert progress.remaining_s == (1_000_000 / 2000 + 6_000_000 / 2000) / 2
    assert progress.tokens_per_s == 2000


def test_small_terminal_counts_hidden_cells(screen: Callable[..., str]) -> None:
    def shown(height: int) -> list[str]:
        return screen(120, call=lambda: (d := running_launch(120, height)).console.print(d.screen_view())).splitlines()

    for height in range(3, 12):
        lines = [line for line in shown(height) if not line.startswith("[1/6]")]
        assert len(lines) <= height
        assert any("more running" in line for line in lines) == (height in (4, 5))


def test_piped_screens_stay_plain_lines(
    sweep: None, folder: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("status", "show"):
        code, out, _ = command_line(*COMMANDS[name], "--db", str(folder / "atma.db"))
        assert code == 0
        assert "\x1b" not in out
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", out)
