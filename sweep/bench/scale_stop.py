"""How soon a launch trains, and how soon it has saved its cell and left when it is asked to: a cell of no sweep, on the CPU."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ...results.errors import StoreError, StoreMissing
from ...results.store.store import open_store
from ..errors import MachineError
from .subprocess_usage import OURS

GRID = "name: stop\nextends: tiny\nset: {train.tokens: 15_360_000}\n"
LOOK_S = 0.05


def stopped(folder: Path) -> Iterator[tuple[str, float, str]]:
    """(what, value, unit); the text lies prepared in `folder`/runs. Raises MachineError when the launch does not train."""
    file, db = folder / "stop.yaml", folder / "stop.db"
    file.write_text(GRID)
    command = [*OURS, "launch", str(file), "--executor", "local", "--db", str(db), "--runs", str(folder / "runs")]
    began = time.perf_counter()
    with (folder / "stop.txt").open("w") as said:
        launch = subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    try:
        while not _trains(db):
            if launch.poll() is not None:
                raise MachineError(f"the cell to be stopped does not train: {(folder / 'stop.txt').read_text()[-500:]}")
            time.sleep(LOOK_S)
        yield "launch a cell until its first step", time.perf_counter() - began, "s"
        asked = time.perf_counter()
        launch.send_signal(signal.SIGINT)
        launch.wait()
        yield "Ctrl-C until it has saved and left", time.perf_counter() - asked, "s"
    finally:
        launch.terminate()
        launch.wait()


def _trains(db: Path) -> bool:
    try:
        store = open_store(db)
    except (StoreError, StoreMissing):
        return False  # it is only just being made
    with closing(store):
        return any(state.step for state in store.cell_states("stop")) if store.sweeps() else False
