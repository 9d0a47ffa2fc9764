"""How `launch --dry-run` and `plan` grow with a grid: seconds and peak memory of the whole command, its start included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .subprocess_usage import MIB, OURS, used

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


def dry_runs(cells: int, folder: Path) -> Iterator[tuple[str, float, str]]:
    """(what, value, unit) for about that many cells, and of a dry run for ten times as many. No database, nothing prepared."""
    for wanted in (cells, 10 * cells):
        rates = min(MOST_LEVELS, max(1, round(wanted / COMBINATIONS)))
        seeds = max(1, round(wanted / COMBINATIONS / rates))
        made = COMBINATIONS * rates * seeds
        file = folder / f"plan-{made}.yaml"
        levels = ", ".join(f"{0.001 * number:.4f}" for number in range(1, rates + 1))
        file.write_text(GRID.format(levels=levels, seeds=seeds))
        command = [*OURS, "launch", str(file), "--dry-run", "--cells", str(made)]
        took = used(command, folder)
        yield f"dry run of {made:,} cells, with its start", took.wall, "s"
        yield "memory that it takes at most", took.memory / MIB, "MiB"
        if wanted == cells:
            took = used([*OURS, "plan", str(file), "--cells", str(made)], folder)
            yield f"plan of {made:,} cells with its price, with its start", took.wall, "s"
