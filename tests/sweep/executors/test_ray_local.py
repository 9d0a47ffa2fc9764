"""Embedded Ray of a plain launch, which no other user can reach."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from bench import Bench
from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=600)
except AuthenticationError:
    print("refused")
"""


def test_lowest_allowed_ray_is_the_oldest_tested() -> None:
    from atma_sweep.sweep.executors.ray_local import OLDEST_TESTED_RAY

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ray>={OLDEST_TESTED_RAY},<3" in project["optional-dependencies"]["train"]
    pinned = re.search(r"^ray==([0-9.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert tuple(map(int, pinned[1].split("."))) >= tuple(map(int, OLDEST_TESTED_RAY.split(".")))


def deaf(code: str) -> subprocess.Popen[str]:
    """Python process with SIGTERM blocked, like Ray's daemons, once it has printed a line."""
    from atma_sweep.sweep.host.signals import signals_blocked

    with signals_blocked():
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads /proc")
def test_daemons_end_as_soon_as_ray_asks_them() -> None:
    """SIGTERM never reaches them, so nothing else ends them.

    Processes that were not asked live on, except their children.
    """
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[train]'")
    from atma_sweep.sweep.executors.ray_local import daemons_killed_promptly

    sleep = "import time; print(flush=True); time.sleep(3600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(p.pid, flush=True); p.wait()"
    target, bystander = deaf(sleep), deaf(parent)
    try:
        assert target.stdout is not None
        assert bystander.stdout is not None
        target.stdout.readline()
        grandchild = psutil.Process(int(bystander.stdout.readline()))
        with daemons_killed_promptly([psutil.Process(target.pid), psutil.Process(bystander.pid)]):
            target.terminate()
            assert target.wait(timeout=PATIENCE_S) == -signal.SIGKILL
            assert bystander.poll() is None
        assert bystander.wait(timeout=PATIENCE_S) == 0  # its child is gone, for which it had waited
        assert not grandchild.is_running()
    finally:
        for process in (target, bystander):
            process.kill()
            process.communicate()


def test_ray_worker_imports_few_modules() -> None:
    code = "import sys, atma_sweep.sweep.executors.ray_worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"sqlalchemy", "pydantic", "rich", "ray", "torch", "numpy"} & set(loaded) == set()


def listening(processes: list[psutil.Process]) -> dict[tuple[str, str], int]:
    """Return the ports of network listeners by (program, address)."""
    addresses_by_process = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for open_ in process.net_connections("inet"):
                if open_.status == psutil.CONN_LISTEN or (open_.type == 2 and not open_.raddr):
                    addresses_by_process[process.name(), open_.laddr.ip] = open_.laddr.port
    return addresses_by_process


@pytest.mark.thorough
@pytest.mark.slow
def test_embedded_ray_listens_locally_and_requires_the_token(tmp_path: Path, scratch: Path) -> None:
    """The home folder is read-only."""
    bench = Bench(tmp_path)
    bench.grid(tokens=128 * 1000)
    bench.env |= {"HOME": "/proc/nowhere", "RAY_TMPDIR": str(scratch), "RAY_AUTH_MODE": "disabled"}
    launch = bench.start("launch", "micro.yaml", "--executor", "ray", "--only", "attn_type=nope")
    try:
        bench.wait("SELECT 1 FROM attempt WHERE step > 10")
        tree = psutil.Process(launch.pid).children(recursive=True)
        heard = listening([psutil.Process(launch.pid), *tree])
        assert {program for program, _ in heard} >= {"gcs_server", "raylet"}
        addresses = {address: ip_address(address) for _, address in heard}
        assert all(
            (address.ipv4_mapped or address if address.version == 6 else address).is_loopback
            for address in addresses.values()
        ), heard

        environments = {
            process.name(): process.environ() for process in tree if process.name() in ("raylet", "gcs_server")
        }
        token = environments["raylet"]["RAY_AUTH_TOKEN"]
        assert re.fullmatch("[0-9a-f]{64}", token)
        assert [env["RAY_AUTH_MODE"] for env in environments.values()] == ["token", "token"]
        (attempt,) = bench.processes()
        assert token not in attempt.environ().values()
        # os.walk passes over what the attempt removes meanwhile
        names = [
            name for top in (scratch, tmp_path) for _, *names_below in os.walk(top) for name in chain(*names_below)
        ]
        assert names
        assert not [name for name in names if "auth_token" in name]
        (folder,) = scratch.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700

        port = next(port for (program, _), port in heard.items() if program == "gcs_server")
        answer = subprocess.run(
            [sys.executable, "-c", ASK, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=PATIENCE_S,
            env=bench.env | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        )  # fmt: skip
        assert answer.stdout.split() == ["refused"], answer.stderr
    finally:
        launch.send_signal(signal.SIGTERM)
        out, _ = launch.communicate(timeout=PATIENCE_S)
        bench.close()
    assert launch.returncode == 143, out
    assert bench.sql("SELECT state, cause FROM attempt") == [("interrupted", "stopped on request")]


@pytest.mark.thorough
@pytest.mark.slow
def test_stale_cluster_address_is_not_followed(tmp_path: Path, scratch: Path) -> None:
    """Neither RAY_ADDRESS nor Ray's record of a running cluster is followed; nothing answers there."""
    bench, stale = Bench(tmp_path), "127.0.0.1:9"
    noted = scratch / "ray" / "ray_current_cluster"
    noted.parent.mkdir()
    noted.write_text(stale)
    bench.env |= {"RAY_TMPDIR": str(scratch), "RAY_ADDRESS": stale}
    bench.launch("--only", "attn_type=nope", executor="ray")
    bench.once(1)
    assert not list(noted.parent.glob("session_*"))
    assert list(scratch.glob("ray-*/r/session_*")), "Ray was started here, and of its own"


def test_wait_returns_at_the_first_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is asked for one end, then without waiting for all that have ended meanwhile."""
    ray = pytest.importorskip("ray")
    from atma_sweep.sweep.executors.ray_local import RayExecutor

    calls, released = [], []

    def wait(references: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        calls.append((num_returns, timeout))
        return (["b", "c"], ["a"]) if timeout == 0 else (["b"], ["a", "c"])

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(RayExecutor, "_exit_code", lambda self, reference, spec: 0)
    executor = RayExecutor.__new__(RayExecutor)
    executor._allocator = SimpleNamespace(release=released.append)  # type: ignore[assignment]
    executor._running = {name: (SimpleNamespace(attempt=name), name) for name in "abc"}  # type: ignore[dict-item,misc]
    assert executor.wait(30.0) == [("b", 0), ("c", 0)]
    assert calls == [(1, 30.0), (3, 0)]
    assert (released, list(executor._running)) == (["b", "c"], ["a"])
