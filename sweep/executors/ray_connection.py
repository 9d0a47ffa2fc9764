"""The way to a cluster: an address that was named, a token, and what its nodes say of themselves.

RAY_ADDRESS and the file in which `ray start` notes a cluster are not looked at. What is wrong is said in one line at
once, where Ray itself would try for a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import MachineError, SweepError
from . import node_info, source_snapshot, token_file

# Read by Ray while it is imported; without it a named address is asked without the token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# How long what answers at an address may take to say that it is a head; Ray tries six times as long.
os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")

import ray
from ray import cloudpickle
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "atma-sweep"
PROBE_S = 3.0
ANSWER_S = 60.0
PACKAGES = ("torch", "triton", "numpy", "ray", "fla-core", "safetensors")
"""Whose versions ought to be the same everywhere."""
PACKAGE = Path(__file__).resolve().parents[2]
AGENT = f"{__package__}.node_agent"
"""What a node has to be able to import."""

cloudpickle.register_pickle_by_value(node_info)


class ClusterAddressError(SweepError):
    """No address of a cluster."""


@dataclass(frozen=True)
class NodeFacts:
    """A live node and what it said."""

    id: str
    address: str
    host: str
    cpus: int
    """Cores that it was started with for Ray."""
    gpus: int
    python: str
    executable: str
    import_path: str | None
    """PYTHONPATH there."""
    versions: dict[str, str]
    sees_runs: bool
    clock_ahead: float
    """Seconds, against this machine, known to within `clock_slack`."""
    clock_slack: float


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises AddressWrong."""
    host, _, port = address.rpartition(":")
    if not host or "//" in host or not port.isdigit():
        raise ClusterAddressError(
            f"--address {address} is not HOST:PORT; name the head as `ray start --head` prints it"
        )
    return host.strip("[]"), int(port)


def check_token() -> None:
    """Makes sure that there is a token and that nobody else can read it. Raises MachineError."""
    if os.environ["RAY_AUTH_MODE"].lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = token_file()
    try:
        bits = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        raise MachineError(
            f"no token in {path}; copy the head's file there and chmod 600 it (docs/cluster.md)"
        ) from None
    if bits & 0o077:
        raise MachineError(f"others can read the token in {path} (mode {bits:04o}); chmod 600 {path}")


def connect(address: str) -> None:
    """Makes this process a driver of the cluster. Within an actor, which is connected already, nothing happens.

    Raises AddressWrong, and MachineError when nothing answers, the token is refused or this machine is no node of it.
    """
    if ray.is_initialized():
        return
    host, port = split(address)
    check_token()
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise MachineError(f"no cluster answers at {address} ({why}); is `ray start --head` running there?") from error
    ours = {found.address for every in psutil.net_if_addrs().values() for found in every}
    if not ours & set(_addresses(address)):
        raise MachineError(
            f"this machine is no node of the cluster at {address}; make it one: ray start --address={address}"
        )
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=True,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise MachineError(f"the cluster at {address} refuses us: {line(error)}") from error


def _addresses(address: str) -> list[str]:
    """Where the live nodes are."""
    alive = 0
    try:
        with _quiet():
            # ray.init asks it, too, but again and again
            nodes = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
    except ray.exceptions.AuthenticationError as error:
        raise MachineError(
            f"the cluster at {address} refuses our token; copy the head's ~/.ray/auth_token here and chmod 600 it, "
            "or export the RAY_AUTH_MODE that it was started with"
        ) from error
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise MachineError(f"what answers at {address} is no head of a Ray cluster: {line(error)}") from error
    return [node.node_manager_address for node in nodes.values() if node.state == alive]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on standard error, where Ray's own threads write what is then said here in one line."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def line(error: BaseException) -> str:
    """An error of Ray's in one line."""
    return " ".join(str(error).split())[:200]


def live_nodes() -> list[dict[str, Any]]:
    """The nodes that Ray holds for alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def on(node: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """On that node, and on no other unless `soft`."""
    return NodeAffinitySchedulingStrategy(node, soft=soft)


def worker_env(source: Path, import_path: str | None) -> dict[str, str]:
    """Settings of an actor's process that runs the frozen copy in `source`, on a node where PYTHONPATH is `import_path`."""
    lease = {name: os.environ[name] for name in ("ATMA_NODE_LEASE_S",) if name in os.environ}
    return {
        "PYTHONPATH": source_snapshot.import_path(source, import_path),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    } | lease


def why_no_import(node: NodeFacts, source: Path) -> str | None:
    """Why a process on that node cannot import the copy in `source`, in one line; None when it can or does not answer."""
    task = ray.remote(num_cpus=0, max_retries=0)(node_info.try_import)
    asked = task.options(scheduling_strategy=on(node.id)).remote(
        AGENT, source_snapshot.import_path(source, node.import_path)
    )
    try:
        why: str | None = ray.get(asked, timeout=ANSWER_S + node_info.IMPORT_S)
    except ray.exceptions.RayError:
        return None
    return why


def survey(runs: Path, nodes: Sequence[dict[str, Any]] | None = None) -> list[NodeFacts]:
    """What each node (None: every live one) says of itself, by host; those that do not answer are left out."""
    asked = live_nodes() if nodes is None else list(nodes)
    mark = runs / f".seen-{uuid.uuid4().hex}"
    runs.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(node_info.look)
        wanted = {
            task.options(scheduling_strategy=on(node["NodeID"])).remote(str(runs), mark.name, PACKAGES): node
            for node in asked
        }
        # one that starts a process for it answers late, and its clock would seem to be ahead; so ask again
        ray.wait(list(wanted), num_returns=len(wanted), timeout=ANSWER_S)
        found = []
        for first, node in wanted.items():
            try:
                ray.get(first, timeout=0.1)
                sent = time.time()
                again = task.options(scheduling_strategy=on(node["NodeID"])).remote(str(runs), mark.name, PACKAGES)
                said = ray.get(again, timeout=ANSWER_S)
            except ray.exceptions.RayError:
                continue
            slack = (time.time() - sent) / 2
            have = node["Resources"]
            found.append(
                NodeFacts(
                    id=node["NodeID"], address=node["NodeManagerAddress"], host=said["host"],
                    cpus=int(have.get("CPU", 0)), gpus=int(have.get("GPU", 0)),
                    python=said["python"], executable=said["executable"], import_path=said["path"], versions=said["versions"],
                    sees_runs=said["sees"], clock_ahead=said["time"] - sent - slack, clock_slack=slack,
                )
            )  # fmt: skip
        return sorted(found, key=lambda node: node.host)
    finally:
        mark.unlink(missing_ok=True)


def differing(nodes: Sequence[NodeFacts]) -> dict[str, dict[str, list[str]]]:
    """What is not the same on all nodes: package or `python` -> version -> hosts."""
    told: dict[str, dict[str, list[str]]] = {}
    for name in ("python", *PACKAGES):
        have: dict[str, list[str]] = {}
        for node in nodes:
            version = node.python if name == "python" else node.versions.get(name, "none")
            have.setdefault(version, []).append(node.host)
        if len(have) > 1:
            told[name] = have
    return told
