"""Jump of the wall clock by two hours during a launch: nothing counts as dead, and nothing is trained twice."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from factories import ended
from tiers import only_long

from ..testing.bench import COMMAND, Bench, Curves
from .storm import FEW, finish_and_assert_invariants

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
SOURCE = Path(__file__).parent.parent / "testing" / "clock.c"


@only_long
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc")
def test_launch_survives_clock_jumps(small_bench: Bench, reference: Curves) -> None:
    bench = small_bench
    bench.in_turn()
    library, offset = bench.folder / "clock.so", bench.folder / "offset"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    offset.write_bytes(struct.pack("q", 0))
    launch = subprocess.Popen(
        [*COMMAND, "launch", "micro.yaml", "--executor", "local"], cwd=bench.folder, text=True,
        env=os.environ | {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    for number, hours in ((1, 2), (2, -2)):
        bench.wait(f"SELECT 1 FROM attempt WHERE id = {number} AND step > 3")
        with offset.open("r+b") as file:
            file.write(struct.pack("q", 3600 * hours))
        apart = "24 * (julianday(heartbeat_at) - julianday('now'))"
        bench.wait(f"SELECT 1 FROM attempt WHERE id = {number} AND {apart} {'> 1.9' if hours > 0 else '< -1.9'}")
        error_text = bench.run("launch", "micro.yaml", "--executor", "local", code=3)
        assert f"pid {launch.pid}" in error_text, "a launch whose clock is right leaves the other alone"
    ended(launch)
    counts = bench.sql("SELECT count(*), count(DISTINCT cell_id), min(state), max(state) FROM attempt")
    assert counts == [(FEW, FEW, "done", "done")]
    finish_and_assert_invariants(bench, FEW, reference)
