"""`atma-sweep doctor`: checks for problems that would stop a sweep.

Imports neither torch nor ray, and starts no cluster. Facts that need torch come from a process of their own:
python -m atma_sweep.sweep.doctor torch | kernels | links | disk RUNS | cluster ADDRESS RUNS, which print one JSON object.
Imported by: commands. Start at CHECKS below, then context.py, which the checks share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from ...results.errors import StoreError
from . import cluster, database, disk, gpus, links, system
from .context import Check, CheckFunction, Context, LookFailed, State, answer, bad
from .disk import filesystem
from .gpus import gpu_holder
from .system import compile_cache_folders

__all__ = [
    "CHECKS",
    "Check",
    "LookFailed",
    "State",
    "answer",
    "as_json",
    "compile_cache_folders",
    "describe",
    "examine",
    "exit_code",
    "filesystem",
    "gpu_holder",
]

CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("python", system.check_python),
    ("platform", system.check_platform),
    ("memory", system.check_memory),
    ("shared memory", system.check_shared_memory),
    ("open files", system.check_open_files),
    ("database", database.check_database),
    ("database integrity", database.check_integrity),
    ("database lock", database.check_lock),
    ("clock", database.check_clock),
    ("clock and database", database.check_future_rows),
    ("file system of database", disk.check_filesystem_of_database),
    ("file system of runs", disk.check_filesystem_of_runs),
    ("inodes", disk.check_inodes),
    ("writing", disk.check_writing),
    ("Ray", system.check_ray),
    ("Ray cluster file", system.check_ray_cluster_file),
    ("RAY_ADDRESS", system.check_ray_address),
    ("Ray token", system.check_ray_token),
    ("cluster", cluster.check_cluster),
    ("NVIDIA driver", gpus.check_driver),
    ("torch", gpus.check_torch),
    ("GPUs", gpus.check_gpus),
    ("GPU links", links.check_links),
    ("Triton and fla", gpus.check_triton),
    ("C compiler", system.check_compiler),
    ("compiled kernels", system.check_compile_caches),
    ("kernels", gpus.check_kernels),
    ("disk space", disk.check_space),
)
"""Name and function of each check, in the order of the report; a check that raises is reported under its name."""


SLOW_CHECKS = frozenset((
    "database integrity", "cluster", "NVIDIA driver", "torch", "GPUs", "GPU links", "Triton and fla", "C compiler",
    "compiled kernels", "kernels", "disk space",
))  # fmt: skip
"""Names of checks that wait for other processes or read much data. They run in parallel with the others."""


def exit_code(checks: Sequence[Check]) -> int:
    """Return 3 if any check is bad, else 0."""
    return 3 if any(check.state == "bad" for check in checks) else 0


def describe(checks: Sequence[Check]) -> list[str]:
    """Return the report as lines: per check its state, name and finding, then its remedy if it has one.

    The last line has the number of checks by state.
    """
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<6}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<6}  {'':<{width}}  -> {check.remedy}")
    counts = Counter(check.state for check in checks)
    return [*lines, ", ".join(f"{counts[word]} {word}" for word in ("ok", "warn", "bad", "absent") if counts[word])]


def as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    """Return the checks as dicts with the keys name, state, found, remedy."""
    return [asdict(check) for check in checks]


def examine(db: str | None = None, runs: Path | None = None, address: str | None = None) -> list[Check]:
    """Run all checks and return their results in the order of CHECKS; some yield several results.

    Changes nothing except for a temporary file in the runs folder, and creates that folder if an address is given. A
    check that raises becomes a bad check; nothing is raised. Takes as long as an import of torch, and on a GPU also the
    longest self-test of the kernels.

    Args:
        db: Database, as for --db.
        runs: Runs folder; None for the database's own.
        address: HOST:PORT of a cluster to check as well; None for none.
    """
    # enough threads for all checks and their queries, since checks wait for queries
    with ThreadPoolExecutor(64) as pool:
        context = Context(db, runs, pool, address)
        slow_results = {
            name: pool.submit(_run_check, name, check_function, context)
            for name, check_function in CHECKS
            if name in SLOW_CHECKS
        }
        quick_results = {name: _run_check(name, look, context) for name, look in CHECKS if name not in SLOW_CHECKS}
        return [
            check
            for name, _ in CHECKS
            for check in (slow_results[name].result() if name in slow_results else quick_results[name])
        ]


def _run_check(name: str, check_function: CheckFunction, context: Context) -> list[Check]:
    """Return the results of one check function as a list, named `name` where they have no name of their own.

    An exception becomes a single bad result.
    """
    try:
        result = check_function(context)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine must not end the look at it
        result = bad(_error_line(error))
    return [replace(check, name=check.name or name) for check in (result if isinstance(result, list) else [result])]


def _error_line(error: BaseException) -> str:
    """Return an error as one line, "CLASS: text"; without the class for a LookFailed or StoreError with a message."""
    text = " ".join(str(error).split())
    return (
        text if text and isinstance(error, LookFailed | StoreError) else f"{type(error).__name__}: {text}".rstrip(": ")
    )
