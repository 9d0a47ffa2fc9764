"""How long a sweep takes into a bundle and out of it again, and the memory that it takes: each in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .subprocess_usage import MIB, used

SCRIPT = """
import json, sys, time
from pathlib import Path
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands.verify import identify
what, db, sweep, file = sys.argv[1:]
store = open_store(db, create=what == "import")
began = time.perf_counter()
done = export_sweep(store, sweep, Path(file)) if what == "export" else import_bundle(store, Path(file), identify=identify)
seconds = time.perf_counter() - began
print(json.dumps([seconds, done.bytes, done.added["curve_point"]]))
"""


def exchanged(db: str, sweep: str, folder: Path) -> list[tuple[str, float, str]]:
    """(what, number, unit) of an export of that sweep and of its import into an empty database under `folder`."""
    file, found = folder / "exchanged.zip", []
    for what, where in (("export", db), ("import", str(folder / "exchanged.db"))):
        command = [sys.executable, "-c", SCRIPT, what, where, sweep, str(file)]
        took = used(command, folder)
        seconds, size, points = json.loads(took.printed.splitlines()[-1])
        found += [
            (f"{what} it, with {points:,} curve points", seconds, "s"),
            ("its peak memory", took.memory / MIB, "MiB"),
        ]
    return [*found, ("the bundle", size / MIB, "MiB")]
