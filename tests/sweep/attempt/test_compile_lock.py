"""Compile lock: a single one of several attempts compiles the same network."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atma_sweep.sweep.attempt import compile_lock
from atma_sweep.sweep.attempt.compile_lock import CompileLock, graph_key
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.training.loop import Stopped
from factories import line_of, script
from patience import PATIENCE_S

HOLDER = """
import sys, time
from pathlib import Path
from atma_sweep.sweep.attempt.compile_lock import CompileLock
lock = CompileLock(Path(sys.argv[1]), "kind")
lock.acquire(lambda: None)
print("compiling", flush=True)
sys.stdin.readline()
lock.mark_compiled()
print("over", flush=True)
sys.stdin.readline()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Start another process that holds the lock."""
    process = script(HOLDER, str(folder))
    assert line_of(process) == "compiling"
    return process


def counting(calls: list[float], what: Callable[[], None], after: int) -> Callable[[], None]:
    """Notes each look, and does something at the one after so many."""

    def look() -> None:
        calls.append(time.monotonic())
        if len(calls) == after:
            what()

    return look


def test_second_process_waits_for_the_first_to_compile(tmp_path: Path) -> None:
    with holder(tmp_path / "turns") as process:
        assert process.stdin is not None

        def let_go() -> None:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

        calls: list[float] = []
        mine = CompileLock(tmp_path / "turns", "kind")
        waited = mine.acquire(counting(calls, let_go, 4))
        assert len(calls) >= 4
        assert 4 * compile_lock.LOCK_POLL_S <= waited < PATIENCE_S
        mine.mark_compiled()
        # from now on nobody waits, however many there are
        begun = [CompileLock(tmp_path / "turns", "kind") for _ in range(3)]
        assert all(turn.acquire(pytest.fail) < 1 for turn in begun)
        process.communicate("\n", timeout=PATIENCE_S)
    assert (tmp_path / "turns" / "kind").read_text() == "compiled\n"


def test_a_turn_ends_with_its_process(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        calls: list[float] = []
        mine = CompileLock(tmp_path, "kind")
        mine.acquire(counting(calls, lambda: os.kill(process.pid, signal.SIGKILL), 3))
        assert len(calls) >= 3
        # nothing was compiled, so now it is this one's
        with pytest.raises(Stopped):
            CompileLock(tmp_path, "kind").acquire(stopped)
        mine.mark_compiled()


def stopped() -> None:
    raise Stopped


def full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("meanwhile", "error"), [(stopped, Stopped), (full, OSError)])
def test_error_while_waiting_releases_the_lock(
    tmp_path: Path, meanwhile: Callable[[], None], error: type[Exception]
) -> None:
    """And other kinds of networks do not wait."""
    with holder(tmp_path) as process:
        mine = CompileLock(tmp_path, "kind")
        with pytest.raises(error):
            mine.acquire(meanwhile)
        mine.mark_compiled()
        assert (tmp_path / "kind").read_text() == "", "it never was its turn"
        assert CompileLock(tmp_path, "another").acquire(pytest.fail) < 1
        process.kill()


def test_released_lock_goes_to_the_next_process(tmp_path: Path) -> None:
    first, second, third = (CompileLock(tmp_path, "kind") for _ in range(3))
    assert first.acquire(pytest.fail) < 1
    first.release()
    first.release()
    assert second.acquire(pytest.fail) < 1
    with pytest.raises(Stopped):
        third.acquire(stopped)
    second.mark_compiled()
    assert third.acquire(pytest.fail) < 1


def test_lock_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lock, "LOCK_TIMEOUT_S", 0.3)
    with holder(tmp_path) as process:
        assert 0.3 < CompileLock(tmp_path, "kind").acquire(lambda: None) < PATIENCE_S
        process.kill()


def test_where_nothing_can_be_locked_there_are_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    turn = CompileLock(tmp_path / "file" / "turns", "kind")
    assert turn.acquire(pytest.fail) < 1
    turn.mark_compiled()

    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compile_lock, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=2, LOCK_NB=4))
    turn = CompileLock(tmp_path, "kind")
    assert turn.acquire(pytest.fail) < 1
    turn.mark_compiled()


def cell(write: Callable[..., Path], *settings: str) -> CellConfig:
    grid = write("name: g\nextends: micro\naxes: {attn_type: [polar]}\n")
    (expanded,) = load_grid(grid, sets=settings, rename="other" if settings else None).expand(lambda data: "text")
    return expanded.config


@pytest.mark.parametrize(("settings", "same"), [
    (["train.muon_lr=0.03"], True), (["train.tokens=4096"], True), (["model.init=zero-ends-and-conv-in"], True),
    (["train.loss_reduction=sum"], True), (["memory=on"], False), (["window=on"], False), (["train.distractor=on"], False),
    (["train.regularizer=weak"], False), (["train.micro_batch=1"], False), (["train.compile=blocks"], False),
    (["model.d_model=64"], False),
])  # fmt: skip
def test_graph_key_is_equal_for_the_same_code(settings: list[str], same: bool, write: Callable[..., Path]) -> None:
    changed = cell(write, *settings)
    assert (graph_key(cell(write)) == graph_key(changed)) is same
    assert graph_key(changed) != graph_key(changed, "torch 2.12")
    assert graph_key(changed) == graph_key(changed.model_copy(update={"seed": changed.seed + 1}))
