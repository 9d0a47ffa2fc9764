"""Attempts on the nodes of a Ray cluster: one agent a node, which starts them, and one writer, here, for their numbers."""

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
from .executor import AttemptExit, ExecutorContext, ProcessSpec, Tell, device_for
from .journaling import Journals
from .node_agent import CLOSE_S, LEASE_S, Agent, presumed_dead_after
from .ray_connection import NodeFacts, ray

START_S = 120.0
"""What a node gets to start its agent, an import of this package included."""
SLOW_S = 20.0
"""After this it is asked whether it can import the package at all."""
LOOK_S = 5.0
AGAIN_S = 30.0
"""A node that cannot be used, as one that is cut off or lacks the runs folder, is asked again after this long."""


@dataclass
class _Link:
    """An agent as seen from here."""

    node: NodeFacts
    handle: Any
    machine: allocation.Machine
    sent: float
    """When the poll under way, or the last one that was answered, was sent; monotonic."""
    poll: Any = None
    seen: list[int] = field(default_factory=list)


@dataclass
class _Running:
    launch: ProcessSpec
    node: str
    given: Allocation


class ClusterExecutor:
    """Every live node that sees the runs folder, and those that join later. Used from one thread, but for its own."""

    name = "cluster"
    writes_directly = False

    def __init__(self, store: Store, runs: Path, tell: Tell, *, lease: float = LEASE_S) -> None:
        """Starts an agent on each node; the process must be connected.

        Raises MachineError when a node does not see the runs folder, or none has an agent.
        """
        self._store, self._runs, self._tell = store, runs, tell
        self._source = source_snapshot.snapshot_folder(runs)
        self._lease = lease
        self._began = time.monotonic()
        self._host = socket.gethostname()
        self._rooms = ClusterAllocator()
        self._running: dict[int, _Running] = {}
        self._kinds: set[str | None] = set()
        self._lock = threading.RLock()
        self._links: dict[str, _Link] = {}
        """By node; the pulse looks after them."""
        self._joining: set[str] = set()
        self._refused: dict[str, float] = {}
        """Nodes that are not asked again before then, on the monotonic clock."""
        self._ended: dict[int, int] = {}
        """Codes of attempts that have ended and whose journal is not yet applied to the end."""
        self._doubtful: dict[int, tuple[NodeFacts, float]] = {}
        """Attempts whose agent is gone: its node, and when they are surely dead, on the monotonic clock."""
        self._journals = Journals(store)
        self._news = threading.Event()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        nodes = ray_connection.survey(runs)
        blind = [node.host for node in nodes if not node.sees_runs]
        if blind:
            raise MachineError(f"{', '.join(blind)} cannot see {runs}; pass --runs with a folder that every node sees")
        for name, have in ray_connection.differing(nodes).items():
            versions = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in have.items())
            tell(f"nodes differ: {name} {versions}; numbers may, too")
        joins = [threading.Thread(target=self._join, args=(node,), daemon=True) for node in nodes]
        for join in joins:
            join.start()
        for join in joins:
            join.join()
        if not self._links:
            raise MachineError(
                "no node could start an agent; what is missing there has to be installed as here (docs/cluster.md)"
            )
        self._pulse = threading.Thread(target=self._beat, daemon=True)
        self._pulse.start()

    @classmethod
    def opened(cls, opening: ExecutorContext) -> ClusterExecutor:
        """Connects and starts the agents. Raises AddressWrong and MachineError."""
        assert opening.address is not None, "it is chosen for an address"
        ray_connection.connect(opening.address)
        return cls(opening.store, opening.runs, opening.tell)

    # --- nodes come and go; these run in threads of their own ---------------------------------------------------------

    def _join(self, node: NodeFacts) -> None:
        """Starts an agent, ends what former ones left there, and opens the node for attempts."""
        # the agent runs a frozen copy of this package, wherever that is installed there
        env = ray_connection.worker_env(self._source, node.import_path)
        # several calls at once: a poll waits for attempts to end
        handle: Any = ray.remote(Agent).options(
            num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, max_concurrency=8,
            scheduling_strategy=ray_connection.on(node.id), runtime_env={"env_vars": env},
        ).remote(self._lease)  # fmt: skip
        try:
            machine = self._ready(handle, node)
        except (ray.exceptions.RayError, MachineError) as error:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle)
            self._refuse(node, f"its agent did not start: {ray_connection.line(error)}")
            return
        with self._lock:
            self._joining.discard(node.id)
            self._links[node.id] = _Link(node, handle, machine, sent=time.monotonic())
            self._rooms.add(node.id, machine)

    def _ready(self, handle: Any, node: NodeFacts) -> allocation.Machine:
        """Waits for the agent, has it end attempts whose former agent there is gone, and hears what the node has."""
        held = handle.hold.remote(self._kinds if node.gpus else ())
        try:
            machine, why = ray.get(held, timeout=SLOW_S)
        except ray.exceptions.RayError as error:
            # Ray starts a process that cannot import what it needs again and again, and says nothing
            missing = ray_connection.why_no_import(node, self._source)
            if missing is not None:
                raise MachineError(missing) from error
            machine, why = ray.get(held, timeout=START_S)
        if why:
            self._tell(f"node {node.host}: {why}")
        with self._lock:
            doubtful = {attempt: was.id for attempt, (was, _) in self._doubtful.items() if was.host == node.host}
            folders = [self._runs / self._running[attempt].launch.folder for attempt in doubtful]
        if doubtful:
            ray.get(handle.end.remote(folders), timeout=START_S)
            with self._lock:
                for attempt, before in doubtful.items():
                    if self._doubtful.pop(attempt, None):
                        # only the agent was killed, perhaps for want of memory, if the node is the same
                        self._ended[attempt] = -signal.SIGKILL if before == node.id else NODE_LOST
            self._news.set()
        return allocation.Machine(min(machine.cpus, node.cpus), machine.memory_gb, machine.gpus)

    def _beat(self) -> None:
        """Looks after the nodes until it is closed, or until Ray itself fails here; `wait` then says so."""
        looked = time.monotonic()
        try:
            while not self._closed.is_set():
                self._poll()
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    threading.Thread(target=self._look_for_nodes, daemon=True).start()
        except (ray.exceptions.RayError, RuntimeError, OSError) as error:
            self._failure = error
            self._news.set()

    def _poll(self) -> None:
        """Polls every agent, notes what ended, and gives up those that are silent."""
        with self._lock:
            for link in self._links.values():
                if link.poll is None:
                    link.sent = time.monotonic()
                    link.poll = link.handle.poll.remote(link.seen)
            polls = {link.poll: link for link in self._links.values()}
        if polls:
            for poll in ray.wait(list(polls), num_returns=1, timeout=0.5)[0]:
                self._heard(polls[poll])
        else:
            self._closed.wait(0.5)
        now = time.monotonic()
        for link in polls.values():
            if now - link.sent > presumed_dead_after(self._lease):
                self._gone(link, certain=True)
        with self._lock:
            late = [attempt for attempt, (_, until) in self._doubtful.items() if now > until]
            for attempt in late:
                del self._doubtful[attempt]
                self._ended[attempt] = NODE_LOST
        if late:
            self._news.set()

    def _heard(self, link: _Link) -> None:
        try:
            ended = ray.get(link.poll)
        except ray.exceptions.RayError:
            self._gone(link, certain=False)
            return
        if ended is None:
            self._gone(link, certain=True)
            return
        with self._lock:
            link.poll, link.seen = None, [attempt for attempt, _ in ended]
            for attempt, code in ended:
                if attempt in self._running:
                    self._ended.setdefault(attempt, code)
        if ended:
            self._news.set()

    def _gone(self, link: _Link, *, certain: bool) -> None:
        """An agent that is no more. Its attempts are certainly dead, or will be when their lease has ended."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(link.handle)
        with self._lock:
            if self._links.pop(link.node.id, None) is None:
                return
            self._rooms.drop(link.node.id)
            theirs = [attempt for attempt, run in self._running.items() if run.node == link.node.id]
            until = link.sent + presumed_dead_after(self._lease)
            for attempt in theirs:
                if attempt in self._ended:
                    continue
                if certain:
                    self._ended[attempt] = NODE_LOST
                else:
                    self._doubtful[attempt] = link.node, until
        self._tell(f"node {link.node.host} was lost, {counted(len(theirs), 'attempt')} with it")
        self._news.set()

    def _look_for_nodes(self) -> None:
        """Asks nodes that have come, and those that did not answer or could not be used before, AGAIN_S later."""
        new: list[dict[str, Any]] = []
        try:
            with self._lock:
                now = time.monotonic()
                refused = {node for node, until in self._refused.items() if until > now}
                known = self._links.keys() | self._joining | refused
                new = [node for node in ray_connection.live_nodes() if node["NodeID"] not in known]
                self._joining |= {node["NodeID"] for node in new}
            for node in ray_connection.survey(self._runs, new) if new else []:
                if not node.sees_runs:
                    self._refuse(node, f"it cannot see {self._runs}")
                    continue
                if node.id not in self._refused:
                    self._tell(f"node {node.host} has come")
                self._join(node)
        except (ray.exceptions.RayError, OSError):
            pass  # the pulse says so if Ray itself is gone; else it is looked again in a moment
        finally:
            with self._lock:
                self._joining -= {node["NodeID"] for node in new}

    def _refuse(self, node: NodeFacts, why: str) -> None:
        """Leaves a node out until it is asked again, and says why the first time."""
        with self._lock:
            self._joining.discard(node.id)
            told = node.id in self._refused
            self._refused[node.id] = time.monotonic() + AGAIN_S
        if not told:
            self._tell(f"node {node.host} is left out for now, {why}")

    # --- what the supervisor asks -----------------------------------------------------------------------------------

    def admit(self, cells: Sequence[Cell]) -> None:
        """Locks the GPUs that these cells need, on every node. Raises MachineError for a cell that no node has room for."""
        self._kinds = {cell.config.resources.gpu_type for cell in cells if cell.config.resources.gpus}
        with self._lock:
            links = list(self._links.values())
        if self._kinds:
            asked = [(link, link.handle.hold.remote(self._kinds)) for link in links if link.node.gpus]
            for link, answer in asked:
                with contextlib.suppress(ray.exceptions.RayError):
                    machine, why = ray.get(answer, timeout=START_S)
                    link.machine = allocation.Machine(link.machine.cpus, machine.memory_gb, machine.gpus)
                    self._rooms.add(link.node.id, link.machine)
                    if why:
                        self._tell(f"node {link.node.host}: {why}")
        admission.check_placement(cells, *(link.machine for link in links))

    def fits(self, resources: Resources) -> bool:
        """Whether a node has that much left."""
        with self._lock:
            return self._rooms.place(resources) is not None

    def start(self, launch: ProcessSpec) -> None:
        """Sends the attempt to the agent of the node that has most room."""
        fence = self._journals.open(launch)
        with self._lock:
            found = self._rooms.place(launch.resources)
            if found is None:
                # the node went away since fits() was asked
                self._ended[launch.attempt] = NODE_LOST
                found = "", Allocation(0, 0.0, None, 0)
            node, given = found
            link = self._links.get(node)
            host = link.node.host if link is not None else ""
            self._running[launch.attempt] = _Running(launch, node, given)
            if link is None:
                return
            self._rooms.take(node, given)
        if host != self._host:
            # from now on it counts as a process of that host, whoever reads the database
            self._store.set_process(launch.attempt, fence, 0, 0.0, host=host)
        link.handle.start.remote(launch, device_for(given))

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Applies what the attempts have written; those that have ended, their journals applied whole."""
        self._news.wait(seconds)
        self._news.clear()
        if self._failure is not None:
            raise MachineError(
                f"the cluster is out of reach ({ray_connection.line(self._failure)}); launch again when it is back"
            ) from self._failure
        with self._lock:
            ended = dict(self._ended)
        finished, lost = self._journals.apply(ended)
        for attempt in lost:
            self._ask(self._running[attempt], "kill", attempt)
        if len(finished) < len(ended):
            self._news.set()
        with self._lock:
            for attempt, _ in finished:
                run = self._running.pop(attempt)
                del self._ended[attempt]
                self._rooms.give(run.node, run.given)
        return finished

    def _ask(self, run: _Running, what: str, *given: Any, **named: Any) -> bool:
        """Has the attempt's agent do something; False when it has none any more."""
        with self._lock:
            link = self._links.get(run.node)
        if link is None:
            return False
        getattr(link.handle, what).remote(*given, **named)
        return True

    def stop(self, attempt: Attempt) -> bool:
        """Asks the attempt's process to save itself and leave."""
        run = self._running.get(attempt.id)
        return run is not None and self._ask(run, "stop", attempt.id)

    def kill(self, attempt: Attempt, *, dump: bool = False) -> bool:
        """Ends the attempt's process at once."""
        run = self._running.get(attempt.id)
        return run is not None and self._ask(run, "kill", attempt.id, dump=dump)

    def broken(self) -> str | None:
        """Never: nodes come and go, and without the head Ray ends this process."""
        return None

    def away(self, attempt: Attempt) -> bool:
        """Whether its node is lost and its lease not yet ended."""
        run = self._running.get(attempt.id)
        with self._lock:
            return run is not None and attempt.id not in self._ended and run.node not in self._links

    def end(self, attempts: Sequence[Attempt], runs: Path) -> set[int]:
        """Has the agents on the attempts' hosts end them. On a node that is gone its own lease does, in time."""
        with self._lock:
            links = {link.node.host: link for link in self._links.values()}
        gone = [one for one in attempts if one.host not in links and (runs / one.run_dir / JOURNAL).exists()]
        # whoever polled that node was dead before we began
        waited = time.monotonic() - self._began > presumed_dead_after(self._lease)
        asked = []
        for host in {attempt.host for attempt in attempts} & links.keys():
            theirs = [attempt for attempt in attempts if attempt.host == host]
            folders = [runs / attempt.run_dir for attempt in theirs]
            answer = links[host].handle.end.remote(folders, [(one.pid, one.pid_started) for one in theirs])
            asked.append((answer, theirs))
        ended = {attempt.id for attempt in gone} if waited else set()
        for answer, theirs in asked:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(answer, timeout=CLOSE_S)
                ended |= {attempt.id for attempt in theirs}
        return ended

    def close(self) -> None:
        """Ends whatever still runs, and the agents."""
        self._closed.set()
        with contextlib.suppress(AttributeError):
            self._pulse.join(timeout=5.0)
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        asked = [link.handle.close.remote() for link in links]
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(asked, num_returns=len(asked), timeout=CLOSE_S) if asked else None
        for link in links:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(link.handle)
