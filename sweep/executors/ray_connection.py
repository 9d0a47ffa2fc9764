"""Connection to a Ray cluster: address, token, and facts about its nodes.

RAY_ADDRESS and the file in which `ray start` records a cluster are ignored. Faults are reported in one line at once,
where Ray itself would retry for a minute.
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

# Ray reads this when it is imported; without it, a connection to an address sends no token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# Seconds for the server at an address to prove that it is a head node; Ray's default is six times longer.
os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")

import ray
from ray import cloudpickle
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "atma-sweep"
CONNECT_TIMEOUT_S = 3.0
"""Seconds to connect to the head's port."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds for an answer of the head or of a node."""
COMPARED_PACKAGES = ("torch", "triton", "numpy", "ray", "fla-core", "safetensors")
"""Packages whose versions should be the same on every node."""
PACKAGE = Path(__file__).resolve().parents[2]
"""Folder of this package."""
AGENT_MODULE = f"{__package__}.node_agent"
"""Module that a node must be able to import."""

cloudpickle.register_pickle_by_value(node_info)


class ClusterAddressError(SweepError):
    """Error of a cluster address that is not HOST:PORT."""


@dataclass(frozen=True)
class NodeFacts:
    """Live node of the cluster and the facts that it reported."""

    id: str
    """Ray id of the node."""
    address: str
    """Network address of the node, without a port."""
    host: str
    """Name of the host."""
    cpus: int
    """Number of cores that Ray was started with."""
    gpus: int
    """Number of GPUs that Ray was started with."""
    python: str
    """Version of its Python."""
    executable: str
    """Path of its Python."""
    import_path: str | None
    """PYTHONPATH on the node; None if it is not set."""
    versions: dict[str, str]
    """Version by package, of those in COMPARED_PACKAGES that are installed."""
    sees_runs: bool
    """True if the node sees the runs folder."""
    clock_ahead: float
    """Seconds by which its clock is ahead of this machine's, accurate to `clock_slack` seconds."""
    clock_slack: float
    """Half the time of the query in seconds."""


def parse_address(address: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT; brackets around an IPv6 host are removed.

    Raises:
        ClusterAddressError: There is no host, the port is no number, or the address is a URL.
    """
    host, _, port = address.rpartition(":")
    if not host or "//" in host or not port.isdigit():
        raise ClusterAddressError(
            f"--address {address} is not HOST:PORT; name the head as `ray start --head` prints it"
        )
    return host.strip("[]"), int(port)


def check_token() -> None:
    """Raise MachineError if the cluster's token file is missing or open to other users (group or others).

    Does nothing if RAY_AUTH_TOKEN holds a token or RAY_AUTH_MODE is not "token". The content of the file is not
    checked.
    """
    if os.environ["RAY_AUTH_MODE"].lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = token_file()
    try:
        bits = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        raise MachineError(
            f"no token in {path}; copy the head's file there and chmod 600 it (docs/how-to/run-on-a-ray-cluster.md)"
        ) from None
    if bits & 0o077:
        raise MachineError(f"other users can read the token in {path} (mode {bits:04o}); chmod 600 {path}")


def connect_driver(address: str) -> None:
    """Make this process a driver of the cluster; if Ray is connected already, as within an actor, do nothing.

    An existing connection is not compared with the address.

    Args:
        address: HOST:PORT of the head.

    Raises:
        ClusterAddressError: The address is not HOST:PORT.
        MachineError: The token file is missing or open to others, nothing answers, the token is rejected, or this
            machine is no node of the cluster.
    """
    if ray.is_initialized():
        return
    host, port = parse_address(address)
    check_token()
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise MachineError(
            f"no cluster answers at {address} ({reason}); is `ray start --head` running there?"
        ) from error
    local_addresses = {address_entry.address for entries in psutil.net_if_addrs().values() for address_entry in entries}
    if not local_addresses & set(_node_addresses(address)):
        raise MachineError(
            f"this machine is not a node of the cluster at {address}; to join: ray start --address={address}"
        )
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=True,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise MachineError(f"the cluster at {address} refused the connection: {single_line(error)}") from error


def _node_addresses(address: str) -> list[str]:
    """Return the network addresses (without port) of the cluster's live nodes.

    Standard error is silenced during the query, which takes 60 s (ANSWER_TIMEOUT_S) at most.

    Raises:
        MachineError: The token is rejected, or the address is no head of a Ray cluster.
    """
    alive = 0
    try:
        with _stderr_silenced():
            # ray.init sends the same query, but retries for a minute
            nodes = GcsClient(address=address).get_all_node_info(timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.AuthenticationError as error:
        raise MachineError(
            f"the cluster at {address} refused this machine's token; copy the head's ~/.ray/auth_token here and chmod 600 it, "
            "or export the RAY_AUTH_MODE that it was started with"
        ) from error
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise MachineError(f"the server at {address} is not the head of a Ray cluster: {single_line(error)}") from error
    return [node.node_manager_address for node in nodes.values() if node.state == alive]


@contextlib.contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Discard what this process writes to file descriptor 2 within a `with` block.

    Ray's threads write there about failures that this module reports in one line. It affects all threads.
    """
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def single_line(error: BaseException) -> str:
    """Return the error's text in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the nodes that it considers alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def node_affinity(node: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy for that node, by Ray id; `soft` allows others if it is gone."""
    return NodeAffinitySchedulingStrategy(node, soft=soft)


def worker_env(source: Path, import_path: str | None) -> dict[str, str]:
    """Return the environment variables to set for an actor that runs a code snapshot on a node.

    PYTHONPATH starts with the snapshot; Ray leaves CUDA_VISIBLE_DEVICES alone; ATMA_NODE_LEASE_S is passed on if it is
    set here.

    Args:
        source: Folder of the snapshot.
        import_path: PYTHONPATH on the node; None without one.
    """
    lease = {name: os.environ[name] for name in ("ATMA_NODE_LEASE_S",) if name in os.environ}
    return {
        "PYTHONPATH": source_snapshot.import_path(source, import_path),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    } | lease


def import_failure(node: NodeFacts, source: Path) -> str | None:
    """Return the reason, in one line, why a process on the node cannot import the code snapshot; None if it can.

    Also None if the node does not answer. Blocks for up to 120 s (ANSWER_TIMEOUT_S + IMPORT_S).

    Args:
        node: Node to try on.
        source: Folder of the snapshot.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(node_info.try_import)
    answer = task.options(scheduling_strategy=node_affinity(node.id)).remote(
        AGENT_MODULE, source_snapshot.import_path(source, node.import_path)
    )
    try:
        error_text: str | None = ray.get(answer, timeout=ANSWER_TIMEOUT_S + node_info.IMPORT_S)
    except ray.exceptions.RayError:
        return None
    return error_text


def query_nodes(runs: Path, nodes: Sequence[dict[str, Any]] | None = None) -> list[NodeFacts]:
    """Return facts about each node, sorted by host; nodes that do not answer are left out.

    Writes a marker file into the runs folder for the duration of the query. Each node is asked twice, so that the start
    of a worker process does not distort the clock difference. Waits up to 60 s (ANSWER_TIMEOUT_S) for all, then as long
    for each second answer.

    Args:
        runs: Runs folder, created if absent.
        nodes: Ray's records of the nodes to query; None for all live ones.
    """
    queried = live_nodes() if nodes is None else list(nodes)
    marker = runs / f".seen-{uuid.uuid4().hex}"
    runs.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(node_info.describe_node)
        first_answers = {
            task.options(scheduling_strategy=node_affinity(node["NodeID"])).remote(
                str(runs), marker.name, COMPARED_PACKAGES
            ): node
            for node in queried
        }
        # a node that has to start a process answers late, so that its clock would seem ahead; the second query counts
        ray.wait(list(first_answers), num_returns=len(first_answers), timeout=ANSWER_TIMEOUT_S)
        facts = []
        for first, node in first_answers.items():
            try:
                ray.get(first, timeout=0.1)
                sent = time.time()
                second = task.options(scheduling_strategy=node_affinity(node["NodeID"])).remote(
                    str(runs), marker.name, COMPARED_PACKAGES
                )
                answer = ray.get(second, timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.RayError:
                continue
            slack = (time.time() - sent) / 2
            resources = node["Resources"]
            facts.append(
                NodeFacts(
                    id=node["NodeID"], address=node["NodeManagerAddress"], host=answer["host"],
                    cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)),
                    python=answer["python"], executable=answer["executable"], import_path=answer["path"],
                    versions=answer["versions"],
                    sees_runs=answer["sees"], clock_ahead=answer["time"] - sent - slack, clock_slack=slack,
                )
            )  # fmt: skip
        return sorted(facts, key=lambda node: node.host)
    finally:
        marker.unlink(missing_ok=True)


def version_differences(nodes: Sequence[NodeFacts]) -> dict[str, dict[str, list[str]]]:
    """Return the packages whose versions differ between the nodes, as package -> version -> hosts.

    "python" counts as a package and comes first, then torch, triton, numpy, ray, fla-core and safetensors. The version
    is "none" where a package is not installed. Packages with the same version everywhere are left out; empty for fewer
    than two nodes.
    """
    differences: dict[str, dict[str, list[str]]] = {}
    for name in ("python", *COMPARED_PACKAGES):
        hosts_by_version: dict[str, list[str]] = {}
        for node in nodes:
            version = node.python if name == "python" else node.versions.get(name, "none")
            hosts_by_version.setdefault(version, []).append(node.host)
        if len(hosts_by_version) > 1:
            differences[name] = hosts_by_version
    return differences
