"""How `launch --dry-run` grows with a grid: seconds and peak memory of the whole command, its start included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRID = """\
name: plan
extends: tiny
axes:
  attn_type: [polar, nope]
  memory: [off, on]
  window: [off, on]
  distractor: [off, on]
  train.clip: [1, 2, 3, 4, 5]
  train.muon_lr: [{levels}]
seeds: {seeds}
"""
COMBINATIONS = 80
"""Without the learning rates."""
MOST_LEVELS = 250
"""Of the learning rate; beyond that the grid grows by seeds."""
KIB = 2**10
MIB = 2**20


def dry_runs(cells: int, folder: Path) -> Iterator[tuple[str, float, str]]:
    """(what, value, unit) for about that many cells, and for ten times as many. No database, nothing prepared."""
    for wanted in (cells, 10 * cells):
        rates = min(MOST_LEVELS, max(1, round(wanted / COMBINATIONS)))
        seeds = max(1, round(wanted / COMBINATIONS / rates))
        made = COMBINATIONS * rates * seeds
        file = folder / f"plan-{made}.yaml"
        levels = ", ".join(f"{0.001 * number:.4f}" for number in range(1, rates + 1))
        file.write_text(GRID.format(levels=levels, seeds=seeds))
        seconds, memory = _command("launch", str(file), "--dry-run", "--cells", str(made), folder=folder)
        yield f"dry run of {made:,} cells, with its start", seconds, "s"
        yield "memory that it takes at most", memory / MIB, "MiB"


def _command(*arguments: str, folder: Path) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a command of ours. Raises RuntimeError when it fails."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "atma_sweep.cli", *arguments]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}")
    # kilobytes on Linux, bytes on macOS
    return time.perf_counter() - began, used.ru_maxrss * (KIB if sys.platform == "linux" else 1)
