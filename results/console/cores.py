"""CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of CPU cores this process may use, at most the SLURM_CPUS_PER_TASK of a Slurm job."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    requested = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(usable, int(requested)) if requested.isdecimal() and int(requested) else usable
