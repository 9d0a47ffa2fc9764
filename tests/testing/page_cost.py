"""Prints what the dashboard of a large synthetic sweep costs: seconds, CPU seconds, peak MiB, MB of the page.

`python -m tests.testing.page_cost 960 5000 --seeds 1 2` makes a database per size in a temporary folder, runs
`report --dashboard` in a process of its own, and starts `dashboard` until it says its address. CPU seconds are less
sensitive to other programs than seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.bench.subprocess_usage import MIB, OURS, run_measured

from .synthetic import synthetic_sweep

HEADINGS = ("cells", "seeds", "points", "wall s", "CPU s", "peak MiB", "page MB", "address s")


def measured(cells: int, seeds: int, points: int, folder: Path) -> tuple[float, ...]:
    """Return the numbers of HEADINGS for a sweep of this size, whose database is written to `folder`."""
    store = open_store(folder / "atma.db", create=True)
    synthetic_sweep(store, cells, points, seeds=seeds)
    store.close()
    page = folder / "page.html"
    usage = run_measured([*OURS, "report", "--dashboard", str(page), "--db", str(folder / "atma.db")], folder)
    began = time.perf_counter()
    command = [*OURS, "dashboard", "--no-open", "--db", str(folder / "atma.db")]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        address = time.perf_counter() - began
        process.terminate()
    size = page.stat().st_size / 1e6
    return cells, seeds, points, usage.wall, usage.processor, usage.memory / MIB, size, address


def main() -> None:
    """Print a row per number of cells and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=int, nargs="*", default=[960, 5000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--points", type=int, default=200, help="points per training curve")
    options = parser.parse_args()
    print("  ".join(f"{heading:>9}" for heading in HEADINGS))
    for cells in options.cells:
        for seeds in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(cells, seeds, options.points, Path(folder))
            print("  ".join(f"{value:9,}" if isinstance(value, int) else f"{value:9.2f}" for value in row))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
