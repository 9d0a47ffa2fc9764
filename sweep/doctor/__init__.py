"""`atma-sweep doctor`: what this machine has, and what would stop a sweep on it.

Imports neither torch nor ray, and starts no cluster. What only torch can tell is asked in a process of its own:
python -m atma_sweep.sweep.doctor torch | kernels | disk RUNS | cluster ADDRESS RUNS, which print one JSON object.
Imported by: commands. Start at LOOKS below, then context.py, which several looks share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from ...results.errors import StoreError
from . import cluster, database, disk, gpus, system
from .context import Check, CheckFunction, Context, LookFailed, State, answer, bad
from .disk import filesystem
from .gpus import held_by
from .system import compiled_folders

__all__ = [
    "LOOKS",
    "Check",
    "LookFailed",
    "State",
    "answer",
    "as_json",
    "compiled_folders",
    "describe",
    "examine",
    "exit_code",
    "filesystem",
    "held_by",
]

LOOKS: tuple[tuple[str, CheckFunction], ...] = (
    ("python", system.look_at_python),
    ("platform", system.look_at_platform),
    ("memory", system.look_at_memory),
    ("shared memory", system.look_at_shared_memory),
    ("open files", system.look_at_open_files),
    ("database", database.look_at_database),
    ("database integrity", database.look_at_integrity),
    ("database lock", database.look_at_lock),
    ("clock", database.look_at_clock),
    ("clock and database", database.look_at_clock_and_rows),
    ("file system of database", disk.look_at_filesystem_of_database),
    ("file system of runs", disk.look_at_filesystem_of_runs),
    ("inodes", disk.look_at_inodes),
    ("writing", disk.look_at_writing),
    ("Ray", system.look_at_ray),
    ("Ray cluster file", system.look_at_ray_cluster),
    ("RAY_ADDRESS", system.look_at_ray_address),
    ("Ray token", system.look_at_ray_token),
    ("cluster", cluster.look_at_cluster),
    ("NVIDIA driver", gpus.look_at_driver),
    ("torch", gpus.look_at_torch),
    ("GPUs", gpus.look_at_gpus),
    ("Triton and fla", gpus.look_at_triton),
    ("C compiler", system.look_at_compiler),
    ("compiled kernels", system.look_at_compiled),
    ("kernels", gpus.look_at_kernels),
    ("disk space", disk.look_at_space),
)
"""Name and look, in the order of the report; a look that fails is reported under the name."""


SLOW = frozenset((
    "database integrity", "cluster", "NVIDIA driver", "torch", "GPUs", "Triton and fla", "C compiler",
    "compiled kernels", "kernels", "disk space",
))  # fmt: skip
"""Looks that wait for other processes or read much. They go on side by side while the others are taken in turn."""


def exit_code(checks: Sequence[Check]) -> int:
    """3 when anything is bad, else 0."""
    return 3 if any(check.state == "bad" for check in checks) else 0


def describe(checks: Sequence[Check]) -> list[str]:
    """One line a check, a second one where there is a remedy, and the count at the end."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<6}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<6}  {'':<{width}}  -> {check.remedy}")
    counts = Counter(check.state for check in checks)
    return [*lines, ", ".join(f"{counts[word]} {word}" for word in ("ok", "warn", "bad", "absent") if counts[word])]


def as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The checks as plain values."""
    return [asdict(check) for check in checks]


def examine(db: str | None = None, runs: Path | None = None, address: str | None = None) -> list[Check]:
    """Looks at everything and changes nothing, but for a file that it writes beside the runs and removes.

    `db` as for --db, `runs` the folder of artifacts, else the database's own; `address` of a cluster that is looked at
    besides. Raises nothing: a look that fails is a check that is bad. Takes as long as an import of torch, and on a GPU
    the longest of the kernels' self-tests besides.
    """
    # more threads than looks and what they ask for, since those wait for these
    with ThreadPoolExecutor(64) as pool:
        context = Context(db, runs, pool, address)
        slow = {name: pool.submit(_looked, name, look, context) for name, look in LOOKS if name in SLOW}
        quick = {name: _looked(name, look, context) for name, look in LOOKS if name not in SLOW}
        return [check for name, _ in LOOKS for check in (slow[name].result() if name in slow else quick[name])]


def _looked(name: str, look: CheckFunction, context: Context) -> list[Check]:
    try:
        found = look(context)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine must not end the look at it
        found = bad(_line(error))
    return [replace(check, name=check.name or name) for check in (found if isinstance(found, list) else [found])]


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return (
        said if said and isinstance(error, LookFailed | StoreError) else f"{type(error).__name__}: {said}".rstrip(": ")
    )
