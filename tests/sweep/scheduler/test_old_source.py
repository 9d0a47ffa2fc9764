"""A sweep that older code began goes on with that code (`--code kept`), started by the code of today.

The older code is real: it comes from this repository's history, from before its modules moved into rooms.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.scheduler.cluster import Agent
from atma_sweep.sweep.scheduler.source_snapshot import PACKAGE, PARTS, fingerprint

from ...helpers.bench import Bench

OLD = "dd87905"
AGENT = """
import json
from atma_sweep.sweep.scheduler.cluster import Agent
print(json.dumps([Agent.__module__, Agent.__qualname__, [name for name in dir(Agent) if not name.startswith("_")]]))
"""
"""Where workers of a cluster look for the agent of their node, and what of it is called from elsewhere."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was then."""
    archive = subprocess.run(["git", "archive", OLD, *PARTS], cwd=PACKAGE, capture_output=True, timeout=120)
    if archive.returncode:
        pytest.skip(f"this checkout does not hold commit {OLD}: it has no history that far back")
    package = tmp_path_factory.mktemp("old") / "atma_sweep"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(package, filter="data")
    assert (package / "sweep" / "supervisor.py").is_file(), "as it was before the rooms"
    return package


def with_code(package: Path, folder: Path, *arguments: str) -> str:
    """What this interpreter says when the package is that one."""
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ids_of(plan: Any) -> list[str]:
    return [cell["cell"] for cell in plan["cells"]]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_goes_on_with_the_code_that_began_it(old: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = ("-m", "atma_sweep.cli", "launch", "micro.yaml")
    with_code(old, tmp_path, *command, "--executor", "local", "--only", "attn_type=nope")
    before = json.loads(with_code(old, tmp_path, *command, "--dry-run", "--json"))
    assert before["counts"]["done"] == 1
    known, now = fingerprint(old), fingerprint(PACKAGE)
    # that code knows schema 0005 and would refuse a newer one, so its attempts write journals
    bench.ask("db", "upgrade")
    assert f"code: as launched before ({known}), not as it is now ({now})" in bench.launch("--code", "kept")
    after = bench.plan()
    assert ids_of(after) == ids_of(before)
    assert after["counts"] == {"done": 2}
    bench.once(cells=2)
    # what was compiled goes at each launch, so attempts of this one have imported it
    assert list((tmp_path / "atma-runs" / "source" / known).rglob("work.*.pyc"))
    assert bench.sql("SELECT message FROM event WHERE kind = 'code'") == [(known,)]


@pytest.mark.thorough
def test_the_agent_of_a_node_is_where_it_was(old: Path, tmp_path: Path) -> None:
    module, name, then = json.loads(with_code(old, tmp_path, "-c", AGENT))
    assert [module, name] == ["atma_sweep.sweep.scheduler.cluster", "Agent"]
    assert (Agent.__module__, Agent.__qualname__) == (module, name)
    assert {"hold", "poll", "start", "end", "close"} <= set(then) <= set(dir(Agent))
