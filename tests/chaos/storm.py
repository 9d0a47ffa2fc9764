"""Kills at random moments of a sweep that is relaunched repeatedly, and the invariants that must hold afterwards."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ..testing.bench import Bench, Curves
from ..testing.patience import PATIENCE_S, until

EVERY = 7
"""Steps between checkpoints in the bench's grid."""
NEWEST = "SELECT a.id, c.slug, a.step, a.pid FROM attempt a JOIN cell c ON c.id = cell_id WHERE a.state = 'running'"


TOKENS = 128 * 160
CELLS = 4
FEW = 2
"""Cells where what happens, happens to the first one or two."""
A_STORM = 20
"""Kills at most before a sweep is left to end, so that a long storm is many sweeps that have to be right."""
AT_WORK = 0.6
"""Share of the kills that wait for a training under way; the others mostly hit something that starts."""
AT_SAVE = 0.3
"""Share of the kills of ranks that wait for a checkpoint under way."""
SAVE_WAIT_S = 4.0
"""Seconds that such a kill waits for one at most."""
TARGETS = {
    "local": ("trainer", "driver"),
    "ray": ("trainer", "driver", "raylet", "gcs_server", "ray::"),
}
"""Whom a storm kills, by executor; "ray::" is a worker of Ray, which has a trainer as its child."""


def bench_in(folder: Path, cells: int = CELLS) -> Bench:
    """Return a bench with the grid of all storms, or with half of its seeds."""
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    bench.grid(tokens=TOKENS, seeds=cells // 2)
    return bench


def first(cells: int, reference: Curves) -> Curves:
    """Return the curves of the first cells, as many as a grid with that many cells has."""
    return {slug: curve for slug, curve in reference.items() if int(slug.rpartition("-s")[2]) < cells // 2}


@dataclass
class Storm:
    """Kills among the processes of one bench until enough are dead; relaunches whenever the launch has ended."""

    bench: Bench
    executor: str
    seed: int
    kills: int
    targets: tuple[str, ...] = ()
    """Whom it kills, if not TARGETS; "rank 0" and "other rank" are processes of an attempt of several."""
    pause: tuple[float, float] = (0.2, 2.5)
    """Seconds before a kill, from the shortest to the longest, drawn evenly on a logarithmic scale."""
    counts: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """Exit codes of launches; negative for a signal."""
    moments: Counter[str] = field(default_factory=Counter)
    """Kills of ranks by the phase of their attempt."""
    slowest_end_s: float = 0.0
    """Longest time from the kill of a rank until every rank of its attempt was gone."""

    def __str__(self) -> str:
        attempts = self.bench.sql("SELECT count(*) FROM attempt")[0][0]
        return (
            f"{self.executor}: kills {dict(self.counts)}, {self.launches} launches {dict(self.ends)}, {attempts} attempts, "
            f"at most {lost(self.bench)} of {EVERY} steps made again"
        )

    def run(self) -> None:
        """Kill until the required number is reached; the last launch ends by itself."""
        draw = random.Random(self.seed)
        process = self._launch()
        while sum(self.counts.values()) < self.kills:
            if draw.random() < AT_WORK:
                self._until_a_trainer_works(process)
            time.sleep(math.exp(draw.uniform(*map(math.log, self.pause))))
            if process.poll() is not None:
                self.ends[process.returncode] += 1
                if process.returncode == 0:
                    return  # the sweep is finished: nothing is left to kill
                process = self._launch()
                continue
            target = draw.choice(self.targets or TARGETS[self.executor])
            killed = self._kill_rank(target, draw) if "rank" in target else self._kill(target, process)
            if killed:
                self.counts[target] += 1
        process.wait(timeout=PATIENCE_S)
        self.ends[process.returncode] += 1

    def _until_a_trainer_works(self, launch: subprocess.Popen[str]) -> None:
        """Wait until an attempt of a live process has made a step, or the launch has ended."""

        def works() -> bool:
            with contextlib.suppress(sqlite3.OperationalError):  # the database is only just being made
                pids = {pid for *_, step, pid in self.bench.sql(NEWEST) if step}
                return bool(pids & {process.pid for process in self.bench.processes()})
            return False

        until(lambda: launch.poll() is not None or works(), "a step", pause=0.1)

    def _launch(self) -> subprocess.Popen[str]:
        self.launches += 1
        log = (self.bench.folder / "launches.txt").open("a")
        command = ["launch", "micro.yaml", "--executor", self.executor]
        return self.bench.start(*command, out=log)

    def _kill(self, target: str, launch: subprocess.Popen[str]) -> bool:
        if target == "driver":
            launch.kill()
            launch.wait()
            return True
        if target == "trainer":
            processes = self.bench.processes()
            victims = processes[:1]
        else:
            victims = [process for process in family(launch.pid) if target in process.name()]
        for victim in victims:
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return True
        return False

    def _kill_rank(self, target: str, draw: random.Random) -> bool:
        """Kill a rank of a random attempt, and wait until its attempt has no process any more."""
        by_folder: dict[str, list[psutil.Process]] = {}
        for process in self.bench.processes():
            with contextlib.suppress(psutil.Error, ValueError):
                line = process.cmdline()
                by_folder.setdefault(line[line.index("--folder") + 1], []).append(process)
        candidates = []
        for folder, members in by_folder.items():
            for member in members:
                with contextlib.suppress(psutil.Error):
                    is_first = "--rank" not in member.cmdline()
                    candidates += [(folder, member)] if is_first == (target == "rank 0") else []
        if not candidates:
            return False
        folder, victim = draw.choice(candidates)
        if draw.random() < AT_SAVE:
            deadline = time.monotonic() + SAVE_WAIT_S
            while not self._saves(folder) and time.monotonic() < deadline:
                time.sleep(0.0005)
        phase = "saving" if self._saves(folder) else ""
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        began = time.monotonic()
        until(
            lambda: not any(member.is_running() and member.status() != "zombie" for member in by_folder[folder]),
            "its end",
        )
        self.slowest_end_s = max(self.slowest_end_s, time.monotonic() - began)
        rows = self.bench.sql(f"SELECT phase, step, steps_total FROM attempt WHERE run_dir = '{folder}'")
        for name, step, total in rows:
            phase = phase or ("finishing" if name == "training" and step == total else str(name))
        self.moments[phase or "unknown"] += 1
        return True

    def _saves(self, folder: str) -> bool:
        """Return True if a checkpoint of the attempt in that folder is being written."""
        return any((self.bench.folder / "atma-runs" / folder).glob(".checkpoint-*.part"))


def family(pid: int) -> list[psutil.Process]:
    """Return the live descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def finish_and_assert_invariants(bench: Bench, cells: int, reference: Curves) -> None:
    """Let the sweep finish, and assert the invariants that every storm must preserve."""
    bench.launch()
    bench.once(cells)
    assert bench.curves() == first(cells, reference)
    bench.gone()  # no orphan process
    doubles = bench.sql("SELECT count(*) FROM curve_point GROUP BY attempt_id, step HAVING count(*) > 1")
    assert doubles == []
    assert bench.sql("SELECT owner_pid FROM sweep") == [(None,)], "nobody holds the sweep"
    bench.assert_intact()
    assert lost(bench) <= EVERY, "an attempt went back further than one checkpoint interval"


def lost(bench: Bench) -> int:
    """Return the maximum number of steps that a resumed attempt had to repeat."""
    rows = bench.sql(
        "SELECT cell_id, number, step, (SELECT message FROM event e WHERE e.attempt_id = a.id AND kind = 'resumed') "
        "FROM attempt a WHERE kind = 'train' ORDER BY cell_id, number"
    )
    worst, before = 0, {}
    for cell, _, step, message in rows:
        assert isinstance(step, int)
        start = int(str(message).split("from step ")[1].split()[0]) if message else None
        reached = before.get(cell, 0)
        if start is not None:
            worst = max(worst, reached - start)
        before[cell] = max(step, start or 0)
    return worst
