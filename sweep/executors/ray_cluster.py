"""Executor for a Ray cluster: one agent per node starts attempts there; this process alone writes their results."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...results.console.text import counted
from ...results.store.journal import JOURNAL
from ...results.store.records import Attempt
from ...results.store.store import Store
from ..attempt.failures import NODE_LOST
from ..config import Resources
from ..errors import MachineError
from ..grid.cell import Cell
from ..host import allocation
from ..host.allocation import Allocation, ClusterAllocator
from ..planning import admission
from . import ray_connection, source_snapshot
from .executor import AttemptExit, ExecutorContext, ProcessSpec, Tell, least_gpus, visible_device
from .journaling import Journals
from .node_agent import CLOSE_S, LEASE_S, Agent, presumed_dead_after
from .ray_connection import NodeFacts, ray

START_S = 120.0
"""Seconds that a node gets to start its agent, including an import of this package."""
IMPORT_CHECK_S = 20.0
"""Seconds without an agent after which the node is asked if it can import the package at all."""
NODE_SEARCH_S = 5.0
"""Seconds between two searches for new nodes."""
NODE_RETRY_S = 30.0
"""Seconds before an unusable node (unreachable, or without the runs folder) is tried again."""


@dataclass
class _AgentLink:
    """Connection to the agent of one node."""

    node: NodeFacts
    handle: Any
    """Ray handle of the agent's actor."""
    machine: allocation.Machine
    sent_at: float
    """Time on the monotonic clock when the pending poll, or else the last answered one, was sent."""
    poll: Any = None
    """Ray reference of the pending poll; None between polls."""
    acknowledged: list[int] = field(default_factory=list)
    """Ids of ended attempts from the last answer, which the next poll acknowledges."""


@dataclass
class _RemoteAttempt:
    """Attempt started on a node, with the resources allocated to it."""

    spec: ProcessSpec
    node: str
    """Ray id of the node; "" if none was free any more."""
    allocation: Allocation


class ClusterExecutor:
    """Executor on every live node that sees the runs folder, including nodes that join later.

    Public methods are called from one thread; threads of its own poll the agents and add nodes. Attempts write
    journals, which this process applies to the database.
    """

    name = "cluster"
    writes_directly = False

    def __init__(self, store: Store, runs: Path, tell: Tell, *, lease: float = LEASE_S) -> None:
        """Start an agent on each node; the process must already be connected to the cluster.

        Makes a snapshot of the source in the runs folder, and prints a line where nodes have different versions of a
        package. Blocks until every node has an agent or was excluded; excluded ones are tried again later. Starts the
        poll thread.

        Args:
            store: Database.
            runs: Runs folder, which every node must see.
            tell: Prints one line; also called from other threads.
            lease: Duration of the agents' leases in seconds.

        Raises:
            MachineError: A node does not see the runs folder, or no agent could be started.
        """
        self._store, self._runs, self._tell = store, runs, tell
        self._source = source_snapshot.snapshot_folder(runs)
        self._lease = lease
        self._started_at = time.monotonic()
        self._host = socket.gethostname()
        self._allocator = ClusterAllocator()
        self._running: dict[int, _RemoteAttempt] = {}
        self._gpu_types: set[str | None] = set()
        self._least_gpus = 1
        """GPUs that a node must have free to be of use to any cell."""
        self._lock = threading.RLock()
        self._links: dict[str, _AgentLink] = {}
        """Agent by node id; maintained by the poll thread."""
        self._joining: set[str] = set()
        self._retry_at: dict[str, float] = {}
        """Earliest time to try an excluded node again, by node id, on the monotonic clock."""
        self._ended: dict[int, int] = {}
        """Exit codes of ended attempts whose journal is not fully applied, by attempt id."""
        self._presumed_lost: dict[int, tuple[NodeFacts, float]] = {}
        """Attempts whose agent is gone: node and time when they are certainly dead (monotonic clock), by attempt id."""
        self._journals = Journals(store)
        self._wakeup = threading.Event()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        nodes = ray_connection.query_nodes(runs)
        blind_hosts = [node.host for node in nodes if not node.sees_runs]
        if blind_hosts:
            raise MachineError(
                f"{', '.join(blind_hosts)} cannot see {runs}; pass --runs with a folder that every node sees"
            )
        for name, hosts_by_version in ray_connection.version_differences(nodes).items():
            versions = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in hosts_by_version.items())
            tell(f"nodes differ in {name}: {versions}; numbers may differ, too")
        join_threads = [threading.Thread(target=self._join_node, args=(node,), daemon=True) for node in nodes]
        for join in join_threads:
            join.start()
        for join in join_threads:
            join.join()
        if not self._links:
            raise MachineError(
                "no node could start an agent; install the same packages there as here (docs/how-to/run-on-a-ray-cluster.md)"
            )
        self._poll_thread = threading.Thread(target=self._poll_loop, daemon=True)
        self._poll_thread.start()

    @classmethod
    def open(cls, context: ExecutorContext) -> ClusterExecutor:
        """Connect to the cluster and start the agents. Raises ClusterAddressError and MachineError."""
        assert context.address is not None, "it is chosen for an address"
        ray_connection.connect_driver(context.address)
        return cls(context.store, context.runs, context.tell)

    # --- nodes; these methods run in threads of the executor ----------------------------------------------------------

    def _join_node(self, node: NodeFacts) -> None:
        """Start an agent on a node, end orphans of a former agent there, and add the node to the allocator.

        Blocks for up to about three minutes. A node whose agent does not start is excluded for 30 s (NODE_RETRY_S),
        with a line of output; nothing is raised.
        """
        # the agent imports the code snapshot, not the package installed on its node
        env = ray_connection.worker_env(self._source, node.import_path)
        # concurrent calls, since a poll blocks until an attempt ends
        handle: Any = ray.remote(Agent).options(
            num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, max_concurrency=8,
            scheduling_strategy=ray_connection.node_affinity(node.id), runtime_env={"env_vars": env},
        ).remote(self._lease)  # fmt: skip
        try:
            machine = self._prepare_agent(handle, node)
        except (ray.exceptions.RayError, MachineError) as error:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle)
            self._exclude_node(node, f"its agent did not start: {ray_connection.single_line(error)}")
            return
        with self._lock:
            self._joining.discard(node.id)
            self._links[node.id] = _AgentLink(node, handle, machine, sent_at=time.monotonic())
            self._allocator.add(node.id, machine)

    def _prepare_agent(self, handle: Any, node: NodeFacts) -> allocation.Machine:
        """Wait for an agent, lock its GPUs, and have it end attempts of its host whose former agent is gone.

        Those attempts then count as ended: killed by SIGKILL on the same Ray node, NODE_LOST on another one. A reason
        why no GPU could be locked is printed.

        Args:
            handle: Ray handle of the agent's actor.
            node: Node on which it starts.

        Returns:
            The node's resources: memory and locked GPUs as the agent reports them, cores at most as many as Ray was
            started with.

        Raises:
            MachineError: The node cannot import the package; the message is the import error.
            RayError: The agent does not answer within 120 s (START_S).
        """
        locking = handle.lock_gpus.remote(self._gpu_types if node.gpus else (), self._least_gpus)
        try:
            machine, reason = ray.get(locking, timeout=IMPORT_CHECK_S)
        except ray.exceptions.RayError as error:
            # Ray restarts a process that fails to import for ever, without an error
            import_error = ray_connection.import_failure(node, self._source)
            if import_error is not None:
                raise MachineError(import_error) from error
            machine, reason = ray.get(locking, timeout=START_S)
        if reason:
            self._tell(f"node {node.host}: {reason}")
        with self._lock:
            former_nodes = {
                attempt: was.id for attempt, (was, _) in self._presumed_lost.items() if was.host == node.host
            }
            folders = [self._runs / self._running[attempt].spec.folder for attempt in former_nodes]
        if former_nodes:
            ray.get(handle.end_orphans.remote(folders), timeout=START_S)
            with self._lock:
                for attempt, former_node in former_nodes.items():
                    if self._presumed_lost.pop(attempt, None):
                        # on the same node only the agent was killed, perhaps for lack of memory
                        self._ended[attempt] = -signal.SIGKILL if former_node == node.id else NODE_LOST
            self._wakeup.set()
        return allocation.Machine(min(machine.cpus, node.cpus), machine.memory_gb, machine.gpus)

    def _poll_loop(self) -> None:
        """Poll agents, and search for nodes every 5 s (NODE_SEARCH_S), until the executor is closed.

        Runs in its own thread. An error of Ray ends the loop; it is kept, and `wait` raises it as MachineError.
        """
        last_search = time.monotonic()
        try:
            while not self._closed.is_set():
                self._poll_agents()
                if time.monotonic() - last_search > NODE_SEARCH_S:
                    last_search = time.monotonic()
                    threading.Thread(target=self._search_nodes, daemon=True).start()
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            self._failure = error
            self._wakeup.set()

    def _poll_agents(self) -> None:
        """Send due polls, handle the first answer, and drop agents that have been silent for too long.

        Waits up to half a second. Attempts whose agent is gone end as NODE_LOST once their lease must have ended.
        """
        with self._lock:
            for link in self._links.values():
                if link.poll is None:
                    link.sent_at = time.monotonic()
                    link.poll = link.handle.poll.remote(link.acknowledged)
            polls = {link.poll: link for link in self._links.values()}
        if polls:
            for poll in ray.wait(list(polls), num_returns=1, timeout=0.5)[0]:
                self._handle_answer(polls[poll])
        else:
            self._closed.wait(0.5)
        now = time.monotonic()
        for link in polls.values():
            if now - link.sent_at > presumed_dead_after(self._lease):
                self._drop_link(link, attempts_are_dead=True)
        with self._lock:
            expired = [attempt for attempt, (_, until) in self._presumed_lost.items() if now > until]
            for attempt in expired:
                del self._presumed_lost[attempt]
                self._ended[attempt] = NODE_LOST
        if expired:
            self._wakeup.set()

    def _handle_answer(self, link: _AgentLink) -> None:
        """Record the ended attempts of an answered poll, or drop the agent if it failed or has closed.

        A closed agent has ended its attempts; those of a failed one may live until their lease ends.
        """
        try:
            ended = ray.get(link.poll)
        except ray.exceptions.RayError:
            self._drop_link(link, attempts_are_dead=False)
            return
        if ended is None:
            self._drop_link(link, attempts_are_dead=True)
            return
        with self._lock:
            link.poll, link.acknowledged = None, [attempt for attempt, _ in ended]
            for attempt, code in ended:
                if attempt in self._running:
                    self._ended.setdefault(attempt, code)
        if ended:
            self._wakeup.set()

    def _drop_link(self, link: _AgentLink, *, attempts_are_dead: bool) -> None:
        """Kill an agent that is gone, remove it with its node's resources, and print a line.

        Does nothing for an agent that was removed before.

        Args:
            link: Agent to remove.
            attempts_are_dead: True if its attempts have certainly ended, so that they count as NODE_LOST now. Else they
                do when their lease must have ended.
        """
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(link.handle)
        with self._lock:
            if self._links.pop(link.node.id, None) is None:
                return
            self._allocator.drop(link.node.id)
            lost_attempts = [attempt for attempt, run in self._running.items() if run.node == link.node.id]
            dead_at = link.sent_at + presumed_dead_after(self._lease)
            for attempt in lost_attempts:
                if attempt in self._ended:
                    continue
                if attempts_are_dead:
                    self._ended[attempt] = NODE_LOST
                else:
                    self._presumed_lost[attempt] = link.node, dead_at
        self._tell(f"node {link.node.host} was lost with {counted(len(lost_attempts), 'attempt')}")
        self._wakeup.set()

    def _search_nodes(self) -> None:
        """Add new nodes, and retry excluded ones after 30 s (NODE_RETRY_S).

        RayError and OSError are swallowed: the poll loop meets them itself. Prints a line per new node. A node that does not see the runs folder is excluded. Blocks until the agents have
        started; runs in a thread of its own.
        """
        new_nodes: list[dict[str, Any]] = []
        try:
            with self._lock:
                now = time.monotonic()
                excluded = {node for node, until in self._retry_at.items() if until > now}
                skipped_ids = self._links.keys() | self._joining | excluded
                new_nodes = [node for node in ray_connection.live_nodes() if node["NodeID"] not in skipped_ids]
                self._joining |= {node["NodeID"] for node in new_nodes}
            for node in ray_connection.query_nodes(self._runs, new_nodes) if new_nodes else []:
                if not node.sees_runs:
                    self._exclude_node(node, f"it cannot see {self._runs}")
                    continue
                if node.id not in self._retry_at:
                    self._tell(f"node {node.host} joined")
                self._join_node(node)
        except (ray.exceptions.RayError, OSError):
            pass  # the poll loop reports a failure of Ray; otherwise the next search tries again
        finally:
            with self._lock:
                self._joining -= {node["NodeID"] for node in new_nodes}

    def _exclude_node(self, node: NodeFacts, reason: str) -> None:
        """Exclude a node for 30 s (NODE_RETRY_S); print the reason the first time.

        Args:
            node: Node to exclude.
            reason: End of the message, after "node HOST is left out for now, ".
        """
        with self._lock:
            self._joining.discard(node.id)
            was_reported = node.id in self._retry_at
            self._retry_at[node.id] = time.monotonic() + NODE_RETRY_S
        if not was_reported:
            self._tell(f"node {node.host} is excluded for now: {reason}")

    # --- called by the supervisor -----------------------------------------------------------------------------------

    def admit(self, cells: Sequence[Cell]) -> None:
        """Lock the GPUs that these cells need on every node that answers. Nodes that join later lock them, too.

        Prints the reason of each node that could lock none. Cells without GPUs lock nothing.

        Raises:
            MachineError: No node is large enough for a cell.
        """
        self._gpu_types = {cell.config.resources.gpu_type for cell in cells if cell.config.resources.gpus}
        self._least_gpus = least_gpus(cells)
        with self._lock:
            links = list(self._links.values())
        if self._gpu_types:
            answers = [
                (link, link.handle.lock_gpus.remote(self._gpu_types, self._least_gpus))
                for link in links
                if link.node.gpus
            ]
            for link, answer in answers:
                with contextlib.suppress(ray.exceptions.RayError):
                    machine, reason = ray.get(answer, timeout=START_S)
                    link.machine = allocation.Machine(link.machine.cpus, machine.memory_gb, machine.gpus)
                    self._allocator.add(link.node.id, link.machine)
                    if reason:
                        self._tell(f"node {link.node.host}: {reason}")
        admission.check_placement(cells, *(link.machine for link in links))

    def fits(self, resources: Resources) -> bool:
        """Return True if a single node has enough free cores, memory and GPU capacity."""
        with self._lock:
            return self._allocator.find_allocation(resources) is not None

    def start(self, spec: ProcessSpec) -> None:
        """Send the attempt to the agent of the best fitting node and record its host in the database.

        Does not wait for the process. The host is recorded only if it is not this machine. An attempt ends as NODE_LOST
        if its node has vanished since `fits` was called.

        Args:
            spec: Attempt whose job.json is written.
        """
        fence = self._journals.open(spec)
        with self._lock:
            match = self._allocator.find_allocation(spec.resources)
            if match is None:
                # the node has vanished since fits() was called
                self._ended[spec.attempt] = NODE_LOST
                match = "", Allocation(0, 0.0, (), 0)
            node, allocated = match
            link = self._links.get(node)
            host = link.node.host if link is not None else ""
            self._running[spec.attempt] = _RemoteAttempt(spec, node, allocated)
            if link is None:
                return
            self._allocator.allocate(node, allocated)
        if host != self._host:
            # readers of the database must judge its liveness by that host
            self._store.set_process(spec.attempt, fence, 0, 0.0, host=host)
        link.handle.start.remote(spec, visible_device(allocated))

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Apply journals and return the ended attempts whose journal is fully applied; waits `seconds` at most before.

        Applying takes extra time. Attempts that lost their lease are killed. The resources of returned attempts are
        free again.

        Returns:
            (attempt id, exit code, or NODE_LOST (-1001) or OOM_KILLED (-1002)) of each.

        Raises:
            MachineError: Ray itself cannot be reached any more.
        """
        self._wakeup.wait(seconds)
        self._wakeup.clear()
        if self._failure is not None:
            raise MachineError(
                f"the cluster is unreachable ({ray_connection.single_line(self._failure)}); launch again when it is back"
            ) from self._failure
        with self._lock:
            ended = dict(self._ended)
        finished, lost = self._journals.apply(ended)
        for attempt in lost:
            self._call_agent(self._running[attempt], "kill", attempt)
        if len(finished) < len(ended):
            self._wakeup.set()
        with self._lock:
            for attempt, _ in finished:
                run = self._running.pop(attempt)
                del self._ended[attempt]
                self._allocator.release(run.node, run.allocation)
        return finished

    def _call_agent(self, run: _RemoteAttempt, method: str, *arguments: Any, **options: Any) -> bool:
        """Call a method of the attempt's agent without waiting for it; return False if the agent is gone.

        Args:
            run: Running attempt, which names the node.
            method: Name of a method of NodeAgent.
            arguments: Positional arguments.
            options: Keyword arguments.
        """
        with self._lock:
            link = self._links.get(run.node)
        if link is None:
            return False
        getattr(link.handle, method).remote(*arguments, **options)
        return True

    def stop(self, attempt: Attempt) -> bool:
        """Ask the attempt's process to save a checkpoint and exit; return False if its agent is gone.

        Also False for an attempt that this executor does not run. Does not wait for the process.
        """
        run = self._running.get(attempt.id)
        return run is not None and self._call_agent(run, "stop", attempt.id)

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Kill the attempt's process without waiting for its end; return False if its agent is gone.

        Also False for an attempt that this executor does not run.

        Args:
            attempt: Attempt to kill.
            dump: True to have it write its threads' stack traces into its log first.
        """
        run = self._running.get(attempt.id)
        return run is not None and self._call_agent(run, "kill", attempt.id, dump=dump)

    def failure(self) -> str | None:
        """Return None: nodes may come and go, and without the head node Ray ends this process."""
        return None

    def is_unreachable(self, attempt: Attempt) -> bool:
        """Return True if the attempt's node is lost and its lease may not have ended."""
        run = self._running.get(attempt.id)
        with self._lock:
            return run is not None and attempt.id not in self._ended and run.node not in self._links

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Have the agents on the attempts' hosts terminate them; return the ids of those that are certainly gone.

        Waits 15 s (CLOSE_S) at most per host; attempts of a host that does not answer in time are not returned. On a
        host without an agent, attempts that write a journal count as gone once a former agent's lease must have ended,
        which is judged by the age of this executor.

        Args:
            attempts: Orphaned attempts.
            runs: Runs folder.
        """
        with self._lock:
            links = {link.node.host: link for link in self._links.values()}
        without_node = [
            attempt for attempt in attempts if attempt.host not in links and (runs / attempt.run_dir / JOURNAL).exists()
        ]
        # the supervisor that polled that node died before this one started
        leases_have_ended = time.monotonic() - self._started_at > presumed_dead_after(self._lease)
        answers = []
        for host in {attempt.host for attempt in attempts} & links.keys():
            on_host = [attempt for attempt in attempts if attempt.host == host]
            folders = [runs / attempt.run_dir for attempt in on_host]
            answer = links[host].handle.end_orphans.remote(
                folders, [(attempt.pid, attempt.pid_started) for attempt in on_host]
            )
            answers.append((answer, on_host))
        ended = {attempt.id for attempt in without_node} if leases_have_ended else set()
        for answer, on_host in answers:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(answer, timeout=CLOSE_S)
                ended |= {attempt.id for attempt in on_host}
        return ended

    def close(self) -> None:
        """Stop polling, have the agents terminate what still runs, and kill the agents.

        Waits about 15 s (CLOSE_S) at most. Errors of Ray are ignored; the connection to the cluster stays open.
        """
        self._closed.set()
        with contextlib.suppress(AttributeError):
            self._poll_thread.join(timeout=5.0)
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        answers = [link.handle.close.remote() for link in links]
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(answers, num_returns=len(answers), timeout=CLOSE_S) if answers else None
        for link in links:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(link.handle)
