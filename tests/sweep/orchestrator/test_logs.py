"""Logs of attempts: lookup by name, their end, and following while they grow, are truncated or replaced."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from atma_sweep.results.errors import CellAmbiguous, CellUnknown
from atma_sweep.results.store.records import Attempt, CellRecord, Owner
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.orchestrator import logs
from atma_sweep.sweep.orchestrator.logs import JsonLines, LogMissing
from factories import cell_record
from patience import PATIENCE_S, until

THIS_HOST = socket.gethostname()


def cell(key: str, slug: str, seed: int) -> CellRecord:
    return cell_record(key, f"{slug}-s{seed}", seed=seed)


def owner(host: str = THIS_HOST, pid: int | None = None) -> Owner:
    me = psutil.Process(pid)
    return Owner(name="ada", host=host, pid=me.pid, started=me.create_time())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "atma.db", create=True)
    opened.record_revision("old", grid_text="x", grid_file="x", cells=[cell("d1", "wall-d0", 0)])
    cells = [cell("a1", "polar-d0", 0), cell("b1", "nope-d0", 0), cell("b2", "nope-d0", 1), cell("c1", "rope-d0", 3)]
    opened.record_revision("new", grid_text="x", grid_file="x", cells=cells)
    yield opened
    opened.close()


@pytest.fixture
def attempt(store: Store, tmp_path: Path) -> Callable[..., Attempt]:
    """attempt("a1", "text", state="done") creates a log with that text, or none for None."""

    def make(key: str, text: str | None = None, *, state: str = "done", host: str = THIS_HOST) -> Attempt:
        started = store.start_attempt(key.ljust(12, "0"), owner=owner(host), fence=1)
        if text is not None:
            folder = tmp_path / "runs" / started.run_dir
            folder.mkdir(parents=True)
            (folder / "log.txt").write_text(text)
        if state != "running":
            store.finish_attempt(started.id, 1, state)  # type: ignore[arg-type]
        return store.attempt(started.id)

    return make


def test_attempt_by_id_slug_and_slug_without_seed(store: Store) -> None:
    cells_by_name = {
        "a1": "a1",
        "polar-d0-s0": "a1",
        "polar-d0": "a1",
        "rope-d0": "c1",
        "wall-d0": "d1",
        "nope-d0-s1": "b2",
    }
    assert {word: store.find_cell(word).id.rstrip("0") for word in cells_by_name} == cells_by_name
    with pytest.raises(
        CellAmbiguous, match=r"'nope-d0' fits 2 cells: b10{10} \(nope-d0-s0\), b20{10} \(nope-d0-s1\); add the seed"
    ):
        store.find_cell("nope-d0")
    with pytest.raises(CellUnknown, match="did you mean polar-d0-s0"):
        store.find_cell("polar-d1")
    with pytest.raises(CellUnknown):
        store.find_cell("wall-d0", "new")


def test_log_path_of_newest_or_numbered_attempt(store: Store, tmp_path: Path, attempt: Any) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(LogMissing, match=r"\(polar-d0-s0\) has no attempt yet; launch its grid"):
        logs.log_path(store, runs, "polar-d0")
    attempt("a1", "one", state="failed")
    attempt("a1", "two")
    assert logs.log_path(store, runs, "a1").read_text() == "two"
    assert logs.log_path(store, runs, "a1", 1) == runs / "a10000000000" / "1" / "log.txt"
    with pytest.raises(LogMissing, match=r"has no attempt 3; its attempts: 1, 2"):
        logs.log_path(store, runs, "a1", 3)


def test_missing_logs_are_reported_with_their_host(store: Store, tmp_path: Path, attempt: Any) -> None:
    runs = tmp_path / "runs"
    attempt("a1")
    with pytest.raises(LogMissing, match=r"attempt 1 left no log in .*/log.txt; name its runs folder with --runs"):
        logs.log_path(store, runs, "a1")
    attempt("b1", host="node7", state="running")
    with pytest.raises(
        LogMissing, match=r"attempt 1 ran on node7, and its log is not in .*log.txt; run this command there"
    ):
        logs.log_path(store, runs, "b1")
    attempt("b2", "shared", host="node7", state="running")
    assert logs.log_path(store, runs, "b2").read_text() == "shared"
    running = attempt("c1", state="running")
    assert logs.log_path(store, runs, "c1") == runs / running.run_dir / "log.txt", "it is about to be made"
    with pytest.raises(
        LogMissing, match=r"on the disk of the machine that ran the attempt \(node7\), not in s3:/bucket"
    ):
        logs.log_path(store, Path("s3://bucket/x"), "b2")
    with pytest.raises(LogMissing, match="on the disk of the machine"):
        logs.log_path(store, Path("s3://bucket/x").absolute(), "b2")
    assert {error.exit_code for error in (LogMissing("x"), CellAmbiguous("x"))} == {2}


@pytest.mark.parametrize(
    "text", ["", "one", "one\n", "one\ntwo", "one\n\nthree\n", "\n\n", "é" * 9 + "\nz\n", "x" * 50]
)
@pytest.mark.parametrize("block", [1, 3, 2**16])
def test_tail_is_the_end_of_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int) -> None:
    monkeypatch.setattr(logs, "READ_BLOCK_BYTES", block)
    path = tmp_path / "log.txt"
    path.write_text(text)
    lines = text.splitlines(keepends=True)
    for count in range(5):
        assert logs.tail(path, count) == "".join(lines[-count:] if count else [])
    assert logs.tail(path) == text
    assert logs.tail(tmp_path / "none", 3) == ""


def test_tail_of_a_large_log_reads_little(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("wb") as file:
        file.truncate(2**36)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    assert logs.tail(path, 2) == "last but one\nlast\n"


class Following:
    """Log that is followed in a thread."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.out, self.running = path, io.StringIO(), True
        follow_options = {"poll_s": 0.01} | options
        self.thread = threading.Thread(
            target=logs.follow, args=(path, lambda: self.running, self.out), kwargs=follow_options
        )
        self.thread.start()

    def until(self, text: str) -> None:
        until(lambda: self.out.getvalue() == text, lambda: (self.out.getvalue(), text), pause=0.005)

    def end(self) -> str:
        self.running = False
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.out.getvalue()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(logs, "DRAIN_S", (0.5, PATIENCE_S))
    return tmp_path / "log.txt"


def test_follow_a_file_that_appears_grows_and_ends(path: Path) -> None:
    following = Following(path)
    time.sleep(0.05)
    with path.open("ab", buffering=0) as log:
        log.write("grün"[:3].encode()[:3])  # half of a letter
        following.until("gr")
        log.write("ün\n".encode()[1:])
        following.until("grün\n")
        log.write(b"more")
        following.until("grün\nmore")
        following.running = False
        log.write(b", last words\n")
        assert following.end() == "grün\nmore, last words\n"


def test_follow_begins_with_the_last_lines(path: Path) -> None:
    path.write_text("one\ntwo\nthree\n")
    following = Following(path, lines=2)
    following.until("two\nthree\n")
    with path.open("a") as log:
        log.write("four\n")
    following.until("two\nthree\nfour\n")
    assert following.end() == "two\nthree\nfour\n"


def test_follow_a_file_that_is_cut_short_or_replaced(path: Path) -> None:
    path.write_text("a long first line\n")
    following = Following(path)
    following.until("a long first line\n")
    path.write_text("cut\n")
    following.until("a long first line\ncut\n")
    with path.open("a") as old:
        os.rename(path, path.with_name("log.txt.1"))
        time.sleep(0.05)
        old.write("to the old one\n")
        old.flush()
        aside = path.with_name("aside")
        aside.write_text("the new one\n")
        os.rename(aside, path)
    following.until("a long first line\ncut\nto the old one\nthe new one\n")
    path.unlink()
    time.sleep(0.05)
    path.write_text("again\n")
    following.until("a long first line\ncut\nto the old one\nthe new one\nagain\n")
    assert following.end() == "a long first line\ncut\nto the old one\nthe new one\nagain\n"


def test_follow_ends_despite_continuous_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "DRAIN_S", (PATIENCE_S, 0.5))  # it is never quiet for long enough
    log = path.open("w", buffering=1)
    with log:
        following = Following(path)
        following.running = False

        def over() -> bool:
            log.write("x\n")
            return not following.thread.is_alive()

        until(over, "the end", pause=0.01)
        log.write("the last\n")
    followed = following.end()
    assert set(followed.splitlines()) <= {"x"}
    assert path.read_text().startswith(followed)


COMMAND = """
import sys; from pathlib import Path; from atma_sweep.cli import main; from atma_sweep.sweep.orchestrator import logs

def follow():
    logs.follow(Path(sys.argv[1]), lambda: True, sys.stdout, poll_s=0.02)
    print("left quietly", file=sys.stderr)

main(follow)
"""


@pytest.mark.thorough
def test_ctrl_c_and_a_reader_that_leaves_are_quiet(path: Path) -> None:
    path.write_text("one\n")
    for how, message, code in (("interrupt", "left quietly\n", 0), ("close", "", 141)):
        child = subprocess.Popen([sys.executable, "-c", COMMAND, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "one\n"
        if how == "interrupt":
            child.send_signal(signal.SIGINT)
        else:
            child.stdout.close()
            with path.open("a") as log:
                log.write("two\n")
        assert child.stderr.read() == message
        assert child.wait(PATIENCE_S) == code
        child.stderr.close()
        child.stdout.close()


def test_attempt_is_alive_while_database_and_process_agree(
    store: Store, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LIVENESS_POLL_S", 0.0)
    running = attempt("a1", state="running")
    alive = logs.liveness_check(store, running)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    store.set_process(running.id, 1, child.pid, psutil.Process(child.pid).create_time())
    assert alive()
    child.kill()
    child.wait()
    assert not alive(), "its process is gone, though nobody has marked it yet"
    far = attempt("b1", state="running", host="node7")
    assert logs.liveness_check(store, far)()
    store.finish_attempt(far.id, 1, "done")
    assert not logs.liveness_check(store, far)()


def test_liveness_queries_the_database_once_a_second(
    store: Store, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, queries = logs.liveness_check(store, attempt("a1", state="running")), []
    real = Store.attempt
    monkeypatch.setattr(Store, "attempt", lambda self, key: queries.append(key) or real(self, key))
    assert all(alive() for _ in range(50))
    assert len(queries) == 1


def test_lines_as_json() -> None:
    out = io.StringIO()
    lines = JsonLines(out)
    for part in ('say "a', '"\nb', "\n\nlast"):
        lines.write(part)
    assert out.getvalue().count("\n") == 3
    lines.close()
    assert [json.loads(line)["line"] for line in out.getvalue().splitlines()] == ['say "a"', "b", "", "last"]
