"""python -m atma_sweep.sweep.doctor torch | kernels | disk RUNS, the last with its database in ATMA_DB."""

from __future__ import annotations

import sys

from .answers import main

if __name__ == "__main__":
    sys.exit(main())
