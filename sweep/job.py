"""Entry point of an attempt: python -m atma_sweep.sweep.job. Stored snapshots of older code rely on its name."""

from __future__ import annotations

import sys

from .attempt.main import main

if __name__ == "__main__":
    sys.exit(main())
