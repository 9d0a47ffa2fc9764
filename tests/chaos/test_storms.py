"""Processes, disks and databases that fail at any time: every cell is measured once, with undisturbed numbers."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import pytest
from factories import ended

from ..testing.bench import Bench, Curves
from ..testing.patience import PATIENCE_S
from ..testing.tiers import long_form, only_long
from .storm import A_STORM, CELLS, EVERY, FEW, Storm, bench_in, family, finish_and_assert_invariants, first

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("executor", ["ray", *long_form("local")])
def test_kills(tmp_path: Path, reference: Curves, kills: int, executor: str) -> None:
    """Sweeps follow each other until all kills are done; a sweep may end before its storm does."""
    done = sweeps = 0
    while done < kills and sweeps < kills:
        with contextlib.closing(bench_in(tmp_path / f"stormy{sweeps}")) as bench:
            storm = Storm(bench, executor, seed=11 + sweeps, kills=min(kills - done, A_STORM))
            storm.run()
            finish_and_assert_invariants(bench, CELLS, reference)
        done, sweeps = done + storm.counts.total(), sweeps + 1
        print(storm, flush=True)
        if kills <= A_STORM:
            break
    assert done >= min(kills, 3)


@only_long
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_launch_stops_when_a_ray_daemon_dies(small_bench: Bench, reference: Curves, daemon: str) -> None:
    """The launch stops at once, not after Ray's minute, and saves every attempt."""
    bench = small_bench
    launch = bench.start("launch", "micro.yaml", "--executor", "ray")
    bench.wait("SELECT 1 FROM attempt WHERE step > 8")
    (victim,) = [process for process in family(launch.pid) if process.name() == daemon]
    victim.kill()
    out = ended(launch, 3)
    assert out.splitlines()[-1] == f"atma-sweep: Ray's {daemon} died; launch again to continue"
    assert {state for (state,) in bench.sql("SELECT state FROM attempt")} <= {"interrupted", "done"}
    finish_and_assert_invariants(bench, FEW, reference)


def test_frozen_attempt_does_not_outlive_its_launch(small_bench: Bench, reference: Curves) -> None:
    """No other launch starts meanwhile."""
    bench = small_bench
    launch = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait(f"SELECT 1 FROM attempt WHERE step > {EVERY}")
    attempts = bench.processes()
    assert attempts
    for attempt in attempts:
        attempt.suspend()
    launch.kill()
    launch.communicate()
    bench.gone()
    finish_and_assert_invariants(bench, FEW, reference)


@only_long
def test_eight_launchers_at_once(bench: Bench, reference: Curves) -> None:
    launches = [bench.start("launch", "micro.yaml", "--executor", "local") for _ in range(8)]
    outs = [launch.communicate(timeout=PATIENCE_S)[0] for launch in launches]
    codes = sorted(launch.returncode for launch in launches)
    assert codes[0] == 0, outs
    assert set(codes) <= {0, 3}, outs
    assert all("Traceback" not in out for out in outs)
    assert bench.sql("SELECT count(*) FROM attempt") == [(CELLS,)]
    finish_and_assert_invariants(bench, CELLS, reference)


def test_launch_survives_a_long_database_lock(small_bench: Bench, reference: Curves) -> None:
    """The write lock is held for more than a minute in the long form, ten seconds in the short one."""
    bench = small_bench
    held = 65.0 if os.environ.get("ATMA_LONG") else 10.0
    launch = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt WHERE step > 3")
    with contextlib.closing(
        sqlite3.connect(bench.folder / "atma.db", timeout=PATIENCE_S, isolation_level=None)
    ) as holder:
        holder.execute("BEGIN IMMEDIATE")
        time.sleep(held)
        holder.execute("ROLLBACK")
    ended(launch)
    finish_and_assert_invariants(bench, FEW, reference)


@only_long
def test_launch_survives_a_damaged_checkpoint(small_bench: Bench, reference: Curves) -> None:
    """Bytes are changed in every file of the newest checkpoint, in several ways, between kills."""
    bench = small_bench
    draw = random.Random(3)
    for _ in range(3):
        launch = bench.start("launch", "micro.yaml", "--executor", "local")
        bench.wait("SELECT 1 FROM attempt WHERE state = 'running' AND checkpoint IS NOT NULL", launch)
        launch.kill()
        launch.wait()
        newest = max((bench.folder / "atma-runs").glob("*/*/checkpoint-*/*"), key=os.path.getmtime, default=None)
        if newest is None:
            continue
        content = bytearray(newest.read_bytes())
        if draw.random() < 0.5:
            content[draw.randrange(len(content))] ^= 0xFF
        else:
            del content[len(content) // 2 :]
        newest.write_bytes(bytes(content))
    bench.launch()
    bench.once(FEW)
    assert bench.curves() == first(FEW, reference)


@only_long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_launch_survives_a_full_disk(tmp_path: Path, reference: Curves) -> None:
    """The file system fills up, and is freed while the launch still retries."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount, in a container --privileged")
    try:
        bench = bench_in(small / "stormy", FEW)
        ballast = small / "ballast"

        def fill() -> None:
            bench.wait("SELECT 1 FROM attempt WHERE step > 3")
            free = os.statvfs(small)
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                file.write(b"\0" * (free.f_bavail * free.f_frsize))
            time.sleep(4)
            ballast.unlink(missing_ok=True)

        filler = threading.Thread(target=fill)
        filler.start()
        launch = bench.start("launch", "micro.yaml", "--executor", "local")
        out, _ = launch.communicate(timeout=PATIENCE_S)
        filler.join()
        assert "Traceback" not in out
        bench.launch()
        bench.once(FEW)
        assert bench.curves() == first(FEW, reference)
        assert bench.sql("PRAGMA integrity_check") == [("ok",)]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
