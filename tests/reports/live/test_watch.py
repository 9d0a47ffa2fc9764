"""The live view: its numbers against sums done by hand, its height on small terminals, its ends."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.live import watch as view
from atma_sweep.results.errors import SweepUnknown
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from patience import PATIENCE_S
from rich.console import Console
from sqlalchemy import text
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError
from tiers import every_nth

ME = Owner(name="launch", host="node1", pid=17, started=0.0)


def cells(count: int) -> list[CellRecord]:
    levels = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
    return [
        CellRecord(id=f"{index:012x}", slug=f"slug-{index}", seed=0, levels=levels, config={}, tokens=1000)
        for index in range(count)
    ]


class Sweep:
    """A sweep of cells of 1000 tokens in 100 steps, with a requested validation loss."""

    def __init__(self, folder: Path, count: int = 8) -> None:
        self.store: Store = open_store(folder / "atma.db", create=True)
        options = {"requested": [["val", 0]]}
        self.store.record_revision("s", grid_text="x", grid_file="x", options=options, cells=cells(count))

    def sql(self, statement: str, **values: Any) -> None:
        self.store.write(lambda session: session.execute(text(statement), values))

    def attempt(
        self,
        index: int,
        state: str = "running",
        *,
        step: int = 0,
        rate: float | None = None,
        phase: Any = "training",
        cause: str | None = None,
        seconds: float | None = None,
        gpu: str | None = None,
        silent: float = 0,
        ranks: int = 1,
    ) -> int:
        """Store an attempt that took `seconds`, or whose last heartbeat is `silent` seconds old."""
        attempt = self.store.start_attempt(f"{index:012x}", owner=ME, fence=1, steps_total=100)
        recorder = DatabaseRecorder(self.store, attempt.id, 1)
        if gpu is not None:
            recorder.provenance(Provenance(config={}, seed=0, device="cuda", gpu_name=gpu, extra={"ranks": ranks}))
        recorder.progress(step, 100, 2.5 if step else None, rate, phase)
        if state == "done":
            recorder.measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
        if state != "running":
            self.store.finish_attempt(attempt.id, 1, state, cause=cause)  # type: ignore[arg-type]
        if seconds is not None:
            when = f"strftime('%Y-%m-%dT%H:%M:%fZ', finished_at, '-{seconds} seconds')"
            self.sql(f"UPDATE attempt SET started_at = {when} WHERE id = :id", id=attempt.id)
        if silent:
            when = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{silent} seconds')"
            self.sql(f"UPDATE attempt SET heartbeat_at = {when} WHERE id = :id", id=attempt.id)
        return attempt.id


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    new_sweep = Sweep(tmp_path)
    yield new_sweep
    new_sweep.store.close()


def test_live_state_of_a_sweep_never_run(sweep: Sweep) -> None:
    state = view.live_state(sweep.store)
    assert (state["sweep"], state["revision"], state["cells"], state["done"]) == ("s", 1, 8, 0)
    assert (state["counts"], state["tokens_total"], state["tokens_left"]) == ({"new": 8}, 8000, 8000)
    assert (state["running"], state["failures"], state["events"]) == ([], [], [])
    assert (state["owned"], state["ended"], state["seconds_left"], state["tokens_per_s"]) == (False, True, None, None)
    with pytest.raises(SweepUnknown):
        view.live_state(sweep.store, "t")


def test_counts_tokens_and_time_left(sweep: Sweep) -> None:
    sweep.attempt(0, "done", step=100, rate=50.0, seconds=100)  # 10 tokens/s from start to end
    sweep.attempt(1, "done", step=100, rate=50.0, seconds=50)  # 20
    sweep.attempt(2, "done", step=100, rate=50.0, seconds=25)  # 40
    sweep.attempt(3, step=40, rate=30.0)  # 600 tokens left: 20 s
    sweep.attempt(4, phase="starting")  # 1000 tokens at 20: 50 s
    sweep.attempt(5, "failed", step=70, cause="host out of\n  memory")
    sweep.sql("UPDATE attempt SET failure = 'host_oom' WHERE state = 'failed'")
    interrupted = sweep.attempt(6, "interrupted", step=25, cause="killed")
    state = view.live_state(sweep.store)
    assert state["counts"] == {"done": 3, "running": 2, "new": 1, "interrupted": 1, "failed": 1}
    assert list(state["counts"]) == ["done", "running", "new", "interrupted", "failed"]
    # no checkpoint: the interrupted one begins anew; the failed one waits for a person
    assert state["tokens_left"] == 600 + 1000 + 1000 + 1000
    assert state["tokens_per_s"] == 30.0
    assert state["seconds_left"] == pytest.approx((20 + 50 + 2000 / 20) / 2)
    sweep.sql("UPDATE attempt SET checkpoint = 'x/checkpoint-00000025' WHERE id = :id", id=interrupted)
    state = view.live_state(sweep.store)
    assert state["tokens_left"] == 3600 - 250
    assert state["seconds_left"] == pytest.approx((20 + 50 + 1750 / 20) / 2)
    assert [(row["slug"], row["standing"], row["failure"], row["cause"]) for row in state["failures"]] == [
        ("slug-6", "interrupted", None, "killed"), ("slug-5", "failed", "host_oom", "host out of memory"),
    ]  # fmt: skip


def test_remaining_time_is_at_least_the_slowest_cell(sweep: Sweep) -> None:
    for index in range(6):
        sweep.attempt(index, "done", step=100, seconds=10)  # 100 tokens/s
    sweep.attempt(6, step=50, rate=1.0)
    sweep.attempt(7, step=50, rate=100.0)
    assert view.live_state(sweep.store)["seconds_left"] == pytest.approx(500.0)


def test_remaining_time_without_finished_cells(sweep: Sweep) -> None:
    sweep.attempt(0, step=50, rate=10.0)
    sweep.attempt(1, step=50, rate=30.0)
    state = view.live_state(sweep.store)
    assert state["tokens_per_s"] == 40.0
    assert state["seconds_left"] == pytest.approx((50 + 500 / 30 + 6000 / 20) / 2, abs=0.001)
    for attempt in sweep.store.live_attempts("s"):
        sweep.store.finish_attempt(attempt.id, 1, "interrupted")
    assert view.live_state(sweep.store)["seconds_left"] is None


def test_remaining_tokens_of_trained_and_retrained_cells(sweep: Sweep) -> None:
    sweep.attempt(0, "done", step=100, seconds=100)
    sweep.attempt(1, "diverged", step=10)
    assert view.live_state(sweep.store)["tokens_left"] == 6000
    evaluation = sweep.store.start_attempt(f"{0:012x}", kind="evaluate", owner=ME, fence=1)
    assert view.live_state(sweep.store)["tokens_left"] == 6000
    sweep.store.finish_attempt(evaluation.id, 1, "done")
    sweep.attempt(0, step=90, rate=5.0)
    assert view.live_state(sweep.store)["tokens_left"] == 6100


def test_live_state_rows_of_running_attempts(sweep: Sweep) -> None:
    sweep.attempt(2, step=40, rate=30.0, gpu="NVIDIA H200", silent=3, ranks=4)
    sweep.attempt(1, step=10, silent=90)
    sweep.attempt(0, phase="probing", silent=400)
    first, second, third = view.live_state(sweep.store)["running"]
    assert first | {"attempt_id": 0, "seconds_since_heartbeat": 0} == {
        "cell_id": f"{2:012x}", "slug": "slug-2", "attempt_id": 0, "number": 1, "kind": "train", "host": "node1",
        "gpu": "NVIDIA H200", "ranks": 4, "phase": "training", "step": 40, "steps_total": 100, "loss": 2.5,
        "tokens_per_s": 30.0, "tokens_per_s_per_rank": 7.5,
        "seconds_left": 20.0, "seconds_since_heartbeat": 0, "losses": [], "stale": False,
    }  # fmt: skip
    silences = [row["seconds_since_heartbeat"] for row in (first, second, third)]
    assert all(least <= silence < least + 30 for least, silence in zip((3, 90, 400), silences, strict=True))
    assert [row["stale"] for row in (first, second, third)] == [False, False, True]
    lines = view.plain_view(view.live_state(sweep.store)).splitlines()
    assert lines[3].split() == ["cell", "step", "loss", "tokens/s", "time", "left", "machine", "heartbeat"]
    assert lines[4].split() == [
        "slug-2",
        "40/100",
        "2.500",
        "30",
        "(4",
        "x",
        "8)",
        "20",
        "s",
        *"node1/4 x NVIDIA H200".split(),
    ]
    assert re.search(r"slug-1 +10/100 +2.500 +node1 +\d+ s ago$", lines[5])
    assert re.search(r"slug-0 +probing +node1 +\d+ min ago \(dead\?\)$", lines[6])


def test_heading_names_owner_and_end(sweep: Sweep) -> None:
    fence = sweep.store.acquire_sweep("s", ME, 60.0)
    sweep.attempt(0, step=1)
    state = view.live_state(sweep.store)
    assert (state["owner"], state["owner_host"], state["owner_pid"]) == ("launch", "node1", 17)
    assert (state["owned"], state["ended"]) == (True, False)
    assert view.title_line(state).endswith("run by launch on node1, pid 17")
    sweep.store.request_actions("s", pause=True)
    state = view.live_state(sweep.store)
    assert state["request"] == {"pause": True}
    assert view.title_line(state).endswith("pid 17, paused")
    sweep.sql("UPDATE sweep SET lease_until = '2020-01-01T00:00:00.000Z'")
    state = view.live_state(sweep.store)
    assert (state["owned"], state["ended"]) == (False, False), "its attempt was heard of just now"
    assert "does not respond; launch again to continue" in view.title_line(state)
    sweep.sql("UPDATE attempt SET heartbeat_at = '2020-01-01T00:00:00.000Z'")
    assert view.live_state(sweep.store)["ended"]
    sweep.store.release_sweep("s", fence)
    assert view.title_line(view.live_state(sweep.store)).endswith("not running")


def test_events_newest_first(sweep: Sweep) -> None:
    sweep.attempt(0, "failed", cause="no\nroom")
    for index in range(20):
        sweep.store.add_event("note", f"number {index}", sweep="s")
    sweep.attempt(1)
    events = view.live_state(sweep.store)["events"]
    assert len(events) == view.MAX_EVENTS
    assert (events[0]["kind"], events[0]["slug"], events[0]["message"]) == (
        "started",
        "slug-1",
        "attempt 1 (train) on node1",
    )
    assert [event["message"] for event in events[1:3]] == ["number 19", "number 18"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d note: number 19", view._event_line(events[1]))


# --- on a terminal --------------------------------------------------------------------------------------------------


def busy_state(tmp_path: Path, running: int, failed: int) -> dict[str, Any]:
    sweep = Sweep(tmp_path, running + failed + 1)
    for index in range(running):
        sweep.attempt(index, step=40, rate=30.0, gpu="NVIDIA H200", silent=400 if index == 0 else 0)
    for index in range(running, running + failed):
        sweep.attempt(index, "failed", cause="a cause that goes on and on " * 9)
    state = view.live_state(sweep.store)
    sweep.store.close()
    return state


def drawn_view(state: dict[str, Any], width: int, height: int, note: str = "", colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=colour, color_system="truecolor" if colour else None, legacy_windows=False)  # fmt: skip
    console.print(view.screen_view(state, width, height, note))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("running", "failed"), every_nth([(0, 0), (1, 0), (0, 30), (3, 2), (40, 0), (40, 30)], 2))
def test_screen_view_fits_the_terminal(tmp_path: Path, running: int, failed: int) -> None:
    state = busy_state(tmp_path, running, failed)
    for note in ("", "the database does not answer"):
        for height in (*range(1, 18), 24, 60):
            lines = drawn_view(state, 70, height, note).splitlines()
            assert len(lines) <= height, (height, lines)
            assert max(map(len, lines)) <= 70
        assert any("slug-" in line for line in lines) or not running + failed


@pytest.mark.thorough
def test_large_screen_shows_everything(tmp_path: Path) -> None:
    state = busy_state(tmp_path, 3, 2)
    lines = [line.rstrip() for line in drawn_view(state, 150, 40).splitlines()]
    assert lines[0].startswith("s (revision 1), ")
    # three cells of 1000 tokens have 400 each; of the waiting one nothing is trained, and failed ones do not count
    assert lines[1].startswith(f"s {'━' * 12}{'─' * 28}  30 %  0 of 6 cells, 1.20K of 4.00K tokens, 90 tokens/s, about")
    assert lines[2] == "3 running, 1 new, 2 failed"
    assert lines[3].split() == ["cell", "step", "loss", "tokens/s", "time", "left", "machine", "heartbeat"]
    assert lines[4].split()[:4] == ["slug-0", "40/100", "2.500", "30"]
    assert len(lines) == 4 + 3 + 2 + min(view.MAX_EVENTS, 7)
    assert lines[7].startswith("slug-4 failed: a cause")
    assert lines[7].endswith("…")


@pytest.mark.thorough
def test_small_screen_counts_hidden_entries(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in drawn_view(busy_state(tmp_path, 40, 30), 100, 12).splitlines()]
    assert len(lines) == 12
    assert lines[9] == "and 35 more running"
    assert lines[10] == "and 30 more"
    assert re.match(r"\d\d:\d\d:\d\d failed slug-69", lines[11])


def test_late_heartbeat_is_highlighted(tmp_path: Path) -> None:
    lines = drawn_view(busy_state(tmp_path, 2, 0), 150, 20, colour=True).splitlines()
    (silent,) = [line for line in lines if "slug-0" in line and "step" not in line and "started" not in line]
    (late_line,) = [line for line in lines if "slug-1" in line and "started" not in line]
    assert "\x1b[1;31m" in silent
    assert "\x1b" not in late_line


# --- the loop -------------------------------------------------------------------------------------------------------


def watch_output(store: Store, *, terminal: bool = False, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=100, height=20, force_terminal=terminal)
    view.watch(store, None, console, **({"interval": 0.01} | options))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_watch_prints_plain_text_each_round(sweep: Sweep) -> None:
    sweep.attempt(0, step=40, rate=30.0)
    blocks = watch_output(sweep.store, rounds=3).split("\n\n")
    assert len(blocks) == 3
    assert all(block.splitlines()[2] == "1 running, 7 new" for block in blocks)
    assert "\x1b" not in "".join(blocks)


def test_watch_prints_an_object_per_refresh(sweep: Sweep) -> None:
    lines = watch_output(sweep.store, rounds=2, as_json=True, terminal=True).splitlines()
    assert [json.loads(line)["counts"] for line in lines] == [{"new": 8}] * 2
    assert list(json.loads(lines[0])) == list(view.live_state(sweep.store))


def test_watch_until_end_returns_at_the_end(sweep: Sweep) -> None:
    attempt = sweep.attempt(0, step=40)
    real, turns = time.sleep, []

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            sweep.store.finish_attempt(attempt, 1, "done")
        real(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view.time, "sleep", sleep)
        output = watch_output(sweep.store, until_end=True, interval=7.0)
    assert turns == [7.0] * 3
    assert output.count("s (revision 1)") == 4


def test_watch_redraws_a_terminal(sweep: Sweep) -> None:
    output = watch_output(sweep.store, rounds=2, terminal=True)
    assert "\x1b[" in output
    assert output.count("8 new") >= 2


def test_watch_waits_for_an_unavailable_database(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = view.live_state, iter([0, 1, 0])

    def sometimes(store: Store, name: str | None) -> dict[str, Any]:
        if next(calls):
            raise OperationalError("SELECT", {}, Exception("server closed\nthe connection"))
        return real(store, name)

    monkeypatch.setattr(view, "live_state", sometimes)
    blocks = watch_output(sweep.store, rounds=3).split("\n\n")
    assert [block.endswith("the database does not answer: server closed the connection") for block in map(str.strip, blocks)] == [
        False, True, False,
    ]  # fmt: skip


WATCH = """
import sys; from rich.console import Console
from atma_sweep.reports.live.watch import watch; from atma_sweep.results.store.store import open_store
watch(open_store(sys.argv[1]), None, Console(), interval=30)
print("left quietly", sorted({"torch", "ray", "pandas", "numpy"} & set(sys.modules)))
"""


def test_watch_ends_quietly_on_ctrl_c(sweep: Sweep, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WATCH, str(tmp_path / "atma.db")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline().startswith("s (revision 1)")
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, error) == (0, "")
    assert out.endswith("left quietly []\n")


def test_live_state_statement_count_is_constant(tmp_path: Path) -> None:
    counted = []
    for count in (2, 2000):
        (tmp_path / str(count)).mkdir()
        sweep = Sweep(tmp_path / str(count), count)
        statements: list[str] = []
        listen(sweep.store.engine, "before_cursor_execute", lambda *a, statement=statements: statement.append(a[2]))
        state = view.live_state(sweep.store)
        assert (state["cells"], state["tokens_left"]) == (count, 1000 * count)
        counted.append(len(statements))
    assert counted[0] == counted[1] < 20
