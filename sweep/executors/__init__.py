"""Executors, which run attempts on this machine or on a Ray cluster.

Ray only supplies processes; all state is in our database. May import planning, attempt, host and all below; the only
package that imports Ray, and only for a launch that needs it, since that import takes a second. Start reading at
executor.py (the protocol and the local executor), then registry.py, ray_local.py and ray_cluster.py.
"""

from __future__ import annotations

import os
from pathlib import Path

# Ray reads these when it is imported: no usage reports, and workers run the same interpreter, not one chosen by uv.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray must not hide GPUs from its workers; each child gets its CUDA_VISIBLE_DEVICES from us.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def token_file() -> Path:
    """Return the path where Ray looks for a cluster's token when RAY_AUTH_TOKEN does not hold it. It need not exist."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
