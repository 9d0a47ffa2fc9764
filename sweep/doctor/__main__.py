"""python -m atma_sweep.sweep.doctor torch | kernels | disk RUNS | cluster ADDRESS RUNS; disk with ATMA_DB."""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main())
