"""python -m atma_sweep.sweep.job: what starts an attempt. The name stays, since frozen copies of older code are started by it."""

from __future__ import annotations

import sys

from .attempt.main import main

if __name__ == "__main__":
    sys.exit(main())
