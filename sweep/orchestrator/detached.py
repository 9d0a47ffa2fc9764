"""A supervisor that stays on the cluster when the command that ordered it is gone.

A named actor runs the same launch that `launch --address` runs in its own process. When its process dies, Ray starts it
again and it launches again: what ran meanwhile is ended by new agents and goes on from its checkpoints.
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

PATIENCE_S = 7 * 86_400.0
"""How long it waits for a database that is locked or away, since nobody is there to launch again."""
BEGIN_S = 600.0
AGAIN_S = 5.0
FAREWELL_S = 2.0


class LaunchRefused(SweepError):
    """The supervisor ended before its first attempt."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class DetachedLaunch:
    """One launch, and what a process elsewhere needs to carry it out."""

    name: str
    """Of the actor."""
    request: LaunchRequest
    url: str
    """Of the database, with its password."""
    folder: str
    """Where it was ordered: paths of the grid may be relative."""

    @property
    def sweep(self) -> str:
        """Name of the sweep."""
        return self.request.grid.name

    @property
    def log(self) -> Path:
        """What a launch prints."""
        return self.request.runs / f"launch-{self.sweep}.log"


class DetachedSupervisor:
    """Carries out an order in a thread of its own, from the moment that it is made or made again."""

    def __init__(self, order: DetachedLaunch) -> None:
        self._order = order
        self._begun: Future[list[str] | LaunchRefused] = Future()
        self._heard = threading.Event()
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        threading.Thread(target=self._work, daemon=True).start()

    def begun(self) -> list[str] | LaunchRefused:
        """Waits for the plan; its lines, or why there is none."""
        try:
            return self._begun.result()
        finally:
            self._heard.set()

    def _work(self) -> None:
        order = self._order
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        order.request.runs.mkdir(parents=True, exist_ok=True)
        with order.log.open("a") as file:
            console = display.SafeConsole(file=file, soft_wrap=True, width=200)

            def tell(line: str) -> None:
                console.print(line, highlight=False, markup=False)
                file.flush()

            try:
                self._launch(self._open(), console, tell)
            except (Exception, SystemExit) as error:
                # nobody is here to see it: it goes to the log and to who waits
                code = error.exit_code if isinstance(error, UserError) else None
                tell("".join(traceback.format_exception(error)) if code is None else str(error))
                self._end(LaunchRefused(str(error), code or 1))
                raise
            self._end(None)

    def _open(self) -> Store:
        """The database; once the order was accepted, a server that is away is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return open_store(self._order.url, patience=PATIENCE_S)
            except (StoreUnreachable, StoreBusy):
                if not self._again or time.monotonic() > deadline:
                    raise
            time.sleep(AGAIN_S)

    def _launch(self, store: Store, console: Console, tell: Callable[[str], None]) -> None:
        order = self._order
        lines: list[str] = []

        def planned(plan: Any) -> None:
            for line in display.describe_plan(plan, order.sweep):
                lines.append(line)
                tell(line)
            screen.expect(plan.expected)
            self._begun.set_result(lines)

        def told(line: str) -> None:
            lines.append(line)
            tell(line)

        with display.ProgressDisplay(console, order.request.most) as screen:
            try:
                request = replace(order.request, again=self._again)
                outcome = launch.run(request, store, screen, planned=planned, tell=told)
            except Interrupted as stop:
                tell(str(stop))
            except Exception as error:
                # a broken sweep has said so itself
                if self._begun.done() and not isinstance(error, SweepBroken):
                    store.add_event("stopped", " ".join(str(error).split())[:500], sweep=order.sweep)
                raise
            else:
                tell(", ".join(f"{count} {word}" for word, count in sorted(outcome.standings.items()) if count))

    def _end(self, why: LaunchRefused | None) -> None:
        """Ends the actor for good, after whoever ordered it has heard."""
        if not self._begun.done():
            self._begun.set_result(why or [])
            self._heard.wait(BEGIN_S)
            time.sleep(FAREWELL_S)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(self._order.name, namespace=ray_connection.NAMESPACE), no_restart=True)


def actor_name(store: Store, sweep: str) -> str:
    """Under which the supervisor of a sweep of that database is found: one for each."""
    where = f"{socket.gethostname()}:{store.path.absolute()}" if store.path is not None else str(store)
    return f"atma-sweep:{hashlib.sha256(where.encode()).hexdigest()[:12]}:{sweep}"


def order(request: LaunchRequest, store: Store) -> list[str]:
    """Has a supervisor on the cluster at the request's address carry it out; returns what it says of its plan, when it has one.

    It stays on this machine if the database is a file here. Raises AddressWrong, MachineError, SweepBusy when the sweep
    has one already, and Refused with whatever `launch.run` raised there.
    """
    assert request.address is not None, "there is nowhere to leave it"
    ray_connection.connect(request.address)
    sweep = request.grid.name
    name = actor_name(store, sweep)
    busy = f"sweep {sweep!r} has a supervisor on the cluster already ({name}); atma-sweep status --watch follows it"
    with contextlib.suppress(ValueError):
        ray.get_actor(name, namespace=ray_connection.NAMESPACE)
        raise SweepBusy(busy)
    source = source_snapshot.snapshot_folder(request.runs)
    url = store.url.set(database=str(store.path.absolute())) if store.path is not None else store.url
    made = DetachedLaunch(
        name, replace(request, commit=git_state()), url.render_as_string(hide_password=False), folder=os.getcwd()
    )
    here = ray_connection.on(ray.get_runtime_context().get_node_id(), soft=store.path is None)
    options: dict[str, Any] = {
        "name": name,
        "namespace": ray_connection.NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 4,
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": here,
        "runtime_env": {"env_vars": ray_connection.worker_env(source, os.environ.get("PYTHONPATH"))},
    }
    try:
        handle: Any = ray.remote(DetachedSupervisor).options(**options).remote(made)
        begun: list[str] | LaunchRefused = ray.get(handle.begun.remote(), timeout=BEGIN_S)
    except ValueError as error:
        raise SweepBusy(busy) from error
    except ray.exceptions.RayError as error:
        raise ray_connection.MachineError(
            f"the supervisor did not start: {ray_connection.line(error)}; see {made.log}"
        ) from error
    if isinstance(begun, LaunchRefused):
        raise begun
    return begun
