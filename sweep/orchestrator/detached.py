"""Detached launches: a supervisor that runs as a Ray actor on the cluster after the command has returned.

A named actor runs the same launch that `launch --address` runs in its own process. When the actor's process dies, Ray
restarts it and it launches again: new agents end the attempts of the dead supervisor, which resume from checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...results.errors import StoreBusy, StoreUnreachable, SweepBusy, UserError
from ...results.store.store import Store, open_store
from ..errors import SweepError
from ..executors import ray_connection, source_snapshot
from ..executors.ray_connection import ray
from ..executors.source_snapshot import git_state
from ..host.signals import Interrupted
from . import display, launch
from .launch import LaunchRequest
from .retries import SweepBroken

STORE_TIMEOUT_S = 7 * 86_400.0
"""Seconds to wait for a database that is locked or unreachable. Long, since no user is there to launch again."""
PLAN_TIMEOUT_S = 600.0
"""Seconds that the command waits for the plan, and the supervisor for the command to fetch it."""
STORE_RETRY_S = 5.0
"""Seconds between two attempts to open the database."""
SHUTDOWN_DELAY_S = 2.0
"""Seconds between the delivery of a refusal and the end of the actor, so that the reply still leaves its process."""


class LaunchRefused(SweepError):
    """Error of a detached launch that ended before its first attempt; carries the exit code of the original error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class DetachedLaunch:
    """Everything that the actor needs to carry out one launch; pickled and sent to the cluster."""

    name: str
    """Ray name of the actor."""
    request: LaunchRequest
    url: str
    """Database URL, including its password."""
    folder: str
    """Working folder of the command, to which relative paths of the grid refer."""

    @property
    def sweep(self) -> str:
        """Name of the sweep."""
        return self.request.grid.name

    @property
    def log(self) -> Path:
        """Path of the file that collects the launch's output."""
        return self.request.runs / f"launch-{self.sweep}.log"


class DetachedSupervisor:
    """Ray actor that carries out a `DetachedLaunch` in a background thread, which its constructor starts.

    Ray calls the constructor again when it restarts the actor; the launch then goes on with `is_restart` set.
    """

    def __init__(self, detached_launch: DetachedLaunch) -> None:
        """Start the launch in a background thread and return at once.

        Args:
            detached_launch: Launch to carry out.
        """
        self._detached_launch = detached_launch
        self._plan_future: Future[list[str] | LaunchRefused] = Future()
        self._plan_delivered = threading.Event()
        self._was_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        threading.Thread(target=self._run, daemon=True).start()

    def wait_for_plan(self) -> list[str] | LaunchRefused:
        """Block until the launch has a plan or has ended; return the lines of the plan, or the refusal.

        There is no timeout. The lines include everything printed before the plan. They are empty if the launch was
        stopped by a signal before it had one.
        """
        try:
            return self._plan_future.result()
        finally:
            self._plan_delivered.set()

    def _run(self) -> None:
        """Run the launch in the command's working folder, log its output to a file, and kill the actor afterwards.

        The log is appended to. An error of ours is logged as its message, any other with its traceback. Before the plan
        is ready, the error also goes to the caller of `wait_for_plan`, as LaunchRefused with its exit code (1 for a
        foreign error). A working folder that is missing on this node is ignored.

        Raises:
            Exception: Any error of the launch, again, after it was logged. The actor is dead by then.
        """
        detached_launch = self._detached_launch
        with contextlib.suppress(OSError):
            os.chdir(detached_launch.folder)
        detached_launch.request.runs.mkdir(parents=True, exist_ok=True)
        with detached_launch.log.open("a") as file:
            console = display.SafeConsole(file=file, soft_wrap=True, width=200)

            def log_line(line: str) -> None:
                console.print(line, highlight=False, markup=False)
                file.flush()

            try:
                self._launch(self._open_store(), console, log_line)
            except (Exception, SystemExit) as error:
                # no user sees this process: the error goes to the log and to `wait_for_plan`
                code = error.exit_code if isinstance(error, UserError) else None
                log_line("".join(traceback.format_exception(error)) if code is None else str(error))
                self._kill_actor(LaunchRefused(str(error), code or 1))
                raise
            self._kill_actor(None)

    def _open_store(self) -> Store:
        """Open the database; after a restart of the actor, retry an unreachable or locked server for a week.

        On the first start, where a user can react, the error is raised at once.

        Raises:
            StoreUnreachable: The server does not answer.
            StoreBusy: The database stays locked.
        """
        deadline = time.monotonic() + STORE_TIMEOUT_S
        while True:
            try:
                return open_store(self._detached_launch.url, patience=STORE_TIMEOUT_S)
            except (StoreUnreachable, StoreBusy):
                if not self._was_restarted or time.monotonic() > deadline:
                    raise
            time.sleep(STORE_RETRY_S)

    def _launch(self, store: Store, console: Console, log_line: Callable[[str], None]) -> None:
        """Run `launch.run` with a progress display on `console`, and deliver the plan's lines to `wait_for_plan`.

        Blocks until the launch has ended, then logs the number of cells by standing. A clean stop by a signal or by
        `cancel` is logged and not raised. An error after the plan is recorded as a "stopped" event of the sweep (500
        characters at most), unless it is SweepBroken, which has recorded itself. Every error is raised.

        Args:
            store: Open database.
            console: Console that writes into the log file.
            log_line: Writes one line into the log file and flushes it.
        """
        detached_launch = self._detached_launch
        lines: list[str] = []

        def on_plan(plan: Any) -> None:
            """Log the plan, set the display's total, and release `wait_for_plan`."""
            for line in display.describe_plan(plan, detached_launch.sweep):
                lines.append(line)
                log_line(line)
            screen.set_total(plan.num_expected_attempts, display.training_tokens(plan))
            self._plan_future.set_result(lines)

        def report_line(line: str) -> None:
            lines.append(line)
            log_line(line)

        with display.ProgressDisplay(console, detached_launch.request.max_cells) as screen:
            try:
                request = replace(detached_launch.request, is_restart=self._was_restarted)
                outcome = launch.run(request, store, screen, on_plan=on_plan, tell=report_line)
            except Interrupted as stop:
                log_line(str(stop))
            except Exception as error:
                # SweepBroken has recorded its own event
                if self._plan_future.done() and not isinstance(error, SweepBroken):
                    store.add_event("stopped", " ".join(str(error).split())[:500], sweep=detached_launch.sweep)
                raise
            else:
                log_line(", ".join(f"{count} {word}" for word, count in sorted(outcome.standings.items()) if count))

    def _kill_actor(self, refusal: LaunchRefused | None) -> None:
        """Kill this actor without a restart; before a plan exists, first deliver the refusal (None: an empty plan).

        Then waits up to 600 s (PLAN_TIMEOUT_S) for the delivery and 2 s (SHUTDOWN_DELAY_S) for the reply to leave. An
        actor that is gone already, or an error of Ray, is ignored.
        """
        if not self._plan_future.done():
            self._plan_future.set_result(refusal or [])
            self._plan_delivered.wait(PLAN_TIMEOUT_S)
            time.sleep(SHUTDOWN_DELAY_S)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(self._detached_launch.name, namespace=ray_connection.NAMESPACE), no_restart=True)


def actor_name(store: Store, sweep: str) -> str:
    """Return the Ray name of a sweep's supervisor, "atma-sweep:HASH:SWEEP", unique per database and sweep.

    HASH is 12 hex digits. A SQLite database is told apart by this host's name and its absolute path, a server by its
    URL.
    """
    database = f"{socket.gethostname()}:{store.path.absolute()}" if store.path is not None else str(store)
    return f"atma-sweep:{hashlib.sha256(database.encode()).hexdigest()[:12]}:{sweep}"


def launch_detached(request: LaunchRequest, store: Store) -> list[str]:
    """Start a supervisor actor on the cluster at the request's address and return the lines of its plan.

    Connects this process to the cluster and leaves it connected. Makes a snapshot of the source in the runs folder, and
    waits up to 600 s (PLAN_TIMEOUT_S) for the plan. The actor goes on after this process has ended, and Ray restarts it
    without limit. It is pinned to this machine if the database is a SQLite file; otherwise it starts here and may move.

    Args:
        request: Launch to carry out; its `address` must be set. The commit of this checkout is recorded.
        store: Database of the launch; its URL with the password travels to the actor.

    Raises:
        ClusterAddressError: The address is not HOST:PORT.
        MachineError: The cluster cannot be reached, or the actor did not start in time.
        SweepBusy: The sweep already has a supervisor on the cluster.
        LaunchRefused: The launch failed on the cluster before it had a plan; it has the exit code of that error.
        SweepError: A code snapshot in the runs folder was changed.
    """
    assert request.address is not None, "there is nowhere to leave it"
    ray_connection.connect_driver(request.address)
    sweep = request.grid.name
    name = actor_name(store, sweep)
    busy = f"sweep {sweep!r} has a supervisor on the cluster already ({name}); atma-sweep status --watch follows it"
    with contextlib.suppress(ValueError):
        ray.get_actor(name, namespace=ray_connection.NAMESPACE)
        raise SweepBusy(busy)
    source = source_snapshot.snapshot_folder(request.runs)
    url = store.url.set(database=str(store.path.absolute())) if store.path is not None else store.url
    detached_launch = DetachedLaunch(
        name, replace(request, commit=git_state()), url.render_as_string(hide_password=False), folder=os.getcwd()
    )
    placement = ray_connection.node_affinity(ray.get_runtime_context().get_node_id(), soft=store.path is None)
    options: dict[str, Any] = {
        "name": name,
        "namespace": ray_connection.NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 4,
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": placement,
        "runtime_env": {"env_vars": ray_connection.worker_env(source, os.environ.get("PYTHONPATH"))},
    }
    try:
        handle: Any = ray.remote(DetachedSupervisor).options(**options).remote(detached_launch)
        plan_lines: list[str] | LaunchRefused = ray.get(handle.wait_for_plan.remote(), timeout=PLAN_TIMEOUT_S)
    except ValueError as error:
        raise SweepBusy(busy) from error
    except ray.exceptions.RayError as error:
        raise ray_connection.MachineError(
            f"the supervisor did not start: {ray_connection.single_line(error)}; see {detached_launch.log}"
        ) from error
    if isinstance(plan_lines, LaunchRefused):
        raise plan_lines
    return plan_lines
