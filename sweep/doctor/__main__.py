"""Command line of the worker: python -m atma_sweep.sweep.doctor QUERY, which prints one JSON object.

Queries are torch, kernels, links, disk RUNS and cluster ADDRESS RUNS. For disk, ATMA_DB names the database.
"""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main())
