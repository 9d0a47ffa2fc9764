"""A cluster that somebody left behind on this machine has no part in a plain launch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bench import COMMAND, Bench
from patience import PATIENCE_S

pytestmark = pytest.mark.slow
NOBODY = "127.0.0.1:9"
"""Where no cluster answers."""


@pytest.mark.thorough
def test_a_stale_cluster_address_is_not_followed(tmp_path: Path, scratch: Path) -> None:
    """Neither RAY_ADDRESS nor the file in which `ray start` notes its cluster."""
    bench = Bench(tmp_path)
    noted = scratch / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(NOBODY)
    env = {**os.environ, "RAY_TMPDIR": str(scratch), "RAY_ADDRESS": NOBODY}
    one = [*COMMAND, "launch", "micro.yaml", "--executor", "ray", "--only", "attn_type=nope"]
    done = subprocess.run(one, cwd=bench.folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    bench.once(1)
    assert not list(noted.parent.glob("session_*"))
    assert list(scratch.glob("ray-*/r/session_*")), "Ray was started here, and of its own"
