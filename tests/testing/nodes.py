"""A Ray cluster on one machine: each node in namespaces of its own, so that it has its name, its network, its processes.

A node that is killed goes with every process at once, and one whose cable is pulled hears of nobody. And one in this process
(`ray_in_process`), for what the supervisor's side does: agents are objects, and their calls are threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from atma_sweep.sweep.executors import node_agent
from bench import COMMAND, Bench
from patience import until

if TYPE_CHECKING:
    import pytest
    from atma_sweep.sweep.executors.ray_connection import NodeFacts

PORT = 6379
HEAD = f"10.77.0.1:{PORT}"
LEASE_S = 3.0
"""How long attempts go on without their supervisor here; a minute elsewhere."""
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
INSIDE = """
set -e
hostname {name}
mount --bind {home} /tmp/ray
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add {ip}/24 dev eth0
ip link set eth0 up
exec "$@"
"""


@functools.cache
def missing() -> str | None:
    """Return the reason why no such cluster can run on this machine, None when it can."""
    reason = "needs root, ip, unshare and nsenter to make network namespaces"
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "mount"))):
        return reason
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-p", "-f", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
    )
    return f"{reason}: {tried.stderr.decode().strip()}" if tried.returncode else None


class Nodes:
    """Nodes on one switch; `head` is the first."""

    def __init__(self) -> None:
        # not pytest's folder: a socket's path may have 107 bytes
        self.home = Path(tempfile.mkdtemp(prefix="atma-ray-", dir="/tmp"))
        self.token = self.home / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATMA_"))},
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "RAY_USAGE_STATS_ENABLED": "0",
            "ATMA_NODE_LEASE_S": str(LEASE_S), "PYTHONPATH": str(self.home / "modules"),
        }  # fmt: skip
        Path("/tmp/ray").mkdir(exist_ok=True)
        self._switch = subprocess.Popen(["unshare", "-n", "--kill-child", "-f", "sleep", "infinity"])
        self._switch_pid = _child(self._switch.pid)
        self._on_switch("ip", "link", "add", "br0", "type", "bridge")
        self._on_switch("ip", "link", "set", "br0", "up")
        self._nodes: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._numbers: dict[str, int] = {}

    def _on_switch(self, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._switch_pid), "-n", *arguments], check=True, capture_output=True)

    def start(self, name: str, *, cpus: int, modules: str = "modules") -> None:
        """Starts a node, the first one as the head, and waits until Ray runs there; `modules` is on its import path."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        ip, home = f"10.77.0.{number}", Path(tempfile.mkdtemp(dir=self.home))
        head = ["--head", f"--node-ip-address={ip}", f"--port={PORT}", "--include-dashboard=false"]
        ray = [*RAY, "start", *(head if number == 1 else [f"--address={HEAD}"]), f"--num-cpus={cpus}", "--block"]
        inside = INSIDE.format(name=name, ip=ip, home=home)
        apart = ["unshare", "-n", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c", inside, "sh"]
        log = self.home / f"{name}.log"
        env = self.env | {"PYTHONPATH": str(self.home / modules)}
        with log.open("wb") as out:
            # a session of its own, so that Ctrl-C at a test does not reach it
            process = subprocess.Popen([*apart, *ray], env=env, stdout=out, stderr=out, start_new_session=True)
        pid = _child(process.pid)
        self._nodes[name] = process, pid
        with contextlib.suppress(subprocess.CalledProcessError):
            self._on_switch("ip", "link", "del", f"v{number}")  # of a node that was killed just now
        link = ["ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
        self._on_switch(*link)
        self._on_switch("ip", "link", "set", f"v{number}", "master", "br0", "up")

        def started() -> bool:
            assert process.poll() is None, log.read_text()
            return b"block forever" in log.read_bytes()

        until(started, log.read_text, pause=0.1)

    def enter(self, name: str) -> list[str]:
        """Return the words that begin a command that runs on that node."""
        return ["nsenter", "-t", str(self._nodes[name][1]), "-n", "-m", "-u", "-p", f"--wd={Path.cwd()}"]

    def kill(self, name: str) -> None:
        """Ends every process of the node at once."""
        process, pid = self._nodes.pop(name)
        os.kill(pid, signal.SIGKILL)
        process.wait()

    def cut(self, name: str) -> None:
        """Pulls the node's cable."""
        self._on_switch("ip", "link", "set", f"v{self._numbers[name]}", "down")

    def mend(self, name: str) -> None:
        """Puts the cable back."""
        self._on_switch("ip", "link", "set", f"v{self._numbers[name]}", "up")

    def stop(self) -> None:
        """Kills all nodes and removes what they wrote."""
        for name in list(self._nodes):
            with contextlib.suppress(ProcessLookupError):
                self.kill(name)
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def _child(pid: int) -> int:
    """The one child of a process, once it has one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (pids := children.read_text().split()):
        time.sleep(0.02)
    return int(pids[0])


class ClusterBench(Bench):
    """A bench whose commands run on a node, and whose launches go to the cluster."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        super().__init__(folder)
        self.nodes, self.node = nodes, "head"
        self.env = nodes.env

    def start(self, *arguments: str, out: object = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.nodes.enter(self.node), "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *COMMAND, *arguments],
            env=self.env, stdout=out, stderr=subprocess.STDOUT, text=True,
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    def launch(self, *arguments: str, code: int = 0, executor: str = "cluster") -> str:
        return self.run("launch", "micro.yaml", "--address", HEAD, *arguments, code=code)


@contextlib.contextmanager
def cluster(**cpus: int) -> Iterator[Nodes]:
    """Nodes by name, each with so many cores, the first one the head; killed and removed afterwards."""
    nodes = Nodes()
    try:
        for name, cores in cpus.items():
            nodes.start(name, cpus=cores)
        yield nodes
    finally:
        nodes.stop()


# --- in this process ------------------------------------------------------------------------------------------------


class _Calls:
    """An actor's handle: `handle.method.remote(...)` begins a call in a thread."""

    def __init__(self, actor: object, pool: futures.Executor) -> None:
        self._actor, self._pool = actor, pool

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: self._pool.submit(method, *args, **kwargs))


class RayInProcess:
    """The part of Ray that a cluster's executor uses, without processes of its own."""

    def __init__(self, exceptions: Any) -> None:
        self.exceptions, self._pool = exceptions, futures.ThreadPoolExecutor(16)

    def remote(self, kind: type) -> Any:
        actor = SimpleNamespace(remote=lambda lease: _Calls(node_agent.NodeAgent(lease=lease, grace=1.0), self._pool))
        return SimpleNamespace(options=lambda **_: actor)

    def get(self, call: futures.Future[Any], timeout: float | None = None) -> Any:
        return call.result(timeout)

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        until_ = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        done, rest = futures.wait(calls, timeout, until_)
        return list(done), list(rest)

    def kill(self, handle: object) -> None:
        """Nothing: what it would end is an object of this process."""


def facts_of_node(name: str = "", *, cpus: int, gpus: int = 0) -> NodeFacts:
    """Facts of a node, one of this host unless it has a name."""
    from atma_sweep.sweep.executors.ray_connection import NodeFacts

    host = name or socket.gethostname()
    return NodeFacts(
        id=host.encode().hex()[:56].ljust(56, "0"), address=host, host=host, cpus=cpus, gpus=gpus, python="3.12.1", executable="python", import_path=None,
        versions={}, sees_runs=True, clock_ahead=0.0, clock_slack=0.0,
    )  # fmt: skip


def ray_in_process(patch: pytest.MonkeyPatch, *surveys: list[NodeFacts] | Exception) -> list[Any]:
    """Has clusters be one of this process; what surveys are still to answer, one after the other. Every node lives meanwhile."""
    from atma_sweep.sweep.executors import ray_cluster, ray_connection

    pending: list[Any] = list(surveys)
    nodes = {node.id for answer in surveys if isinstance(answer, list) for node in answer}

    def survey(*_: object) -> list[NodeFacts]:
        answer = pending.pop(0)
        if isinstance(answer, Exception):
            raise answer
        facts: list[NodeFacts] = answer
        return facts

    patch.setattr(ray_cluster, "ray", RayInProcess(ray_cluster.ray.exceptions))
    patch.setattr(ray_cluster, "NODE_RETRY_S", 0.0)
    patch.setattr(ray_cluster, "NODE_SEARCH_S", 0.05)
    patch.setattr(node_agent, "POLL_S", 0.1)
    patch.setattr(ray_cluster.source_snapshot, "snapshot_folder", lambda runs: runs)
    patch.setattr(ray_connection, "connect_driver", lambda address: None)
    patch.setattr(ray_connection, "live_nodes", lambda: [{"NodeID": node} for node in sorted(nodes)])
    patch.setattr(ray_connection, "query_nodes", survey)
    return pending
