"""Attempts on a Ray of this machine's own, which lives and dies with the launch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from ..attempt.failures import not_started
from ..errors import MachineError
from ..host import processes
from ..host.allocation import Allocation, Machine
from ..host.locks import open_private_folder
from ..host.signals import held
from .executor import AttemptExit, HostExecutor, ProcessSpec, device_for, environment, run_command
from .ray_worker import run_attempt

DAEMONS = ("raylet", "gcs_server")
TRIED = "2.60"
"""The oldest Ray whose defaults (addresses, token, process groups, signals) were tried; pyproject.toml asks for it."""
LOOPBACK = "127.0.0.1"
REMEDY = "set RAY_TMPDIR to another folder, or launch with --executor local, which needs no Ray"
CLUSTERS = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
LOOK_S = 0.02
"""Between two looks at daemons that are to end."""
VANISH_S = 2.0
"""Seconds that killed processes get to vanish."""


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Ray's processes that are started meanwhile hear this machine alone, and only who has the token of their environment."""
    before, clusters = dict(os.environ), ray_constants.ENABLE_RAY_CLUSTER
    # as on macOS, where Ray knows no clusters; Ray reads the variable when it is imported, which here it has been
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[CLUSTERS] = False, "0"
    # with a token here Ray writes none into the home folder; asked for none itself, it turns tokens on
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_AUTH_MODE", None)
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name in (CLUSTERS, "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def prompt_end(daemons: Sequence[psutil.Process]) -> Iterator[None]:
    """Kill each of these daemons as soon as Ray asks it to end, and on leaving what they had started.

    They were started with SIGTERM blocked, so that Ray would wait a second for each of them before it kills it.
    """
    family = [child for daemon in daemons for child in _children(daemon)]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            for daemon in daemons:
                if processes.has_pending(daemon.pid, signal.SIGTERM):
                    _kill(daemon)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for process in family:
            _kill(process)
        deadline = time.monotonic() + VANISH_S
        while time.monotonic() < deadline and any(map(_lives, family)):
            time.sleep(LOOK_S)


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the process's descendants, none when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return processes.find(process.pid, process.create_time()) is not None
    return False


def _own_folder() -> Path:
    """Where Ray keeps its sockets and logs: below RAY_TMPDIR or the temporary folder, and nobody else's."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"ray-{os.getuid()}"
    os.close(open_private_folder(folder, "RAY_TMPDIR"))
    return folder / "r"  # which Ray opens to all, so it is not the one that keeps them out


class RayExecutor(HostExecutor):
    """An embedded Ray on this machine: as many attempts at once as its cores, memory and GPUs, or parts of them, allow."""

    name = "ray"

    def __init__(self) -> None:
        super().__init__()
        self._environment = contextlib.ExitStack()
        self._running: dict[ray.ObjectRef, tuple[ProcessSpec, Allocation]] = {}
        self._strangers = frozenset(psutil.Process().children())
        """Children of this process that are none of Ray's."""

    def begin(self, machine: Machine) -> None:
        """Starts Ray on the machine, with those of its GPUs that this sweep holds."""
        super().begin(machine)
        self._strangers = frozenset(psutil.Process().children())
        try:
            self._environment.enter_context(_private())
            # Half started, Ray survives no request to stop. Nor may its processes hear one that a batch system sends to
            # all: they have to outlive the attempts, which save themselves. Attempts hear SIGTERM again.
            with held():
                ray.init(
                    _temp_dir=str(_own_folder()),
                    address="local",  # never a cluster that a stale file or RAY_ADDRESS points to
                    num_cpus=machine.cpus,
                    num_gpus=0,  # which attempt gets which GPU, or part of one, is ours to say
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=True,
                )
            heard = ray.util.get_node_ip_address()
            if heard != LOOPBACK:
                raise MachineError(
                    f"Ray listens on {heard}, where others reach it; unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            self.close()
            said = " ".join(str(error).split())[:300]
            raise MachineError(f"Ray cannot start: {said}; {REMEDY}") from error
        except BaseException:
            self.close()
            raise
        self._daemons = {process.name(): process for process in self._ours() if process.name() in DAEMONS}
        # max_retries=0: retries are ours, decided from the database.
        self._task = ray.remote(max_retries=0)(run_attempt)

    def _ours(self) -> list[psutil.Process]:
        """Return the processes that Ray has started from this one."""
        return [process for process in psutil.Process().children() if process not in self._strangers]

    def broken(self) -> str | None:
        """A daemon of Ray that is gone. Ray itself notices after a minute, and then ends this process on the spot."""
        gone = (name for name, one in self._daemons.items() if processes.find(one.pid, one.create_time()) is None)
        return next((f"Ray's {name} died" for name in gone), None)

    def start(self, launch: ProcessSpec) -> None:
        """Hands the attempt to a Ray worker."""
        given = self._room.place(launch.resources)
        assert given is not None, "the supervisor asks fits() first"
        options = self._task.options(num_cpus=given.cpus, name=f"attempt-{launch.attempt}")
        env = environment(launch, device_for(given))
        reference = options.remote(run_command(launch), env, launch.runs / launch.folder)
        self._room.take(given)
        self._running[reference] = launch, given

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Attempts whose process, or whose Ray worker, has ended."""
        if not self._running:
            return []
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=seconds)
        if not ready and seconds > 0:
            return []
        finished = []
        for reference in ready:
            launch, given = self._running.pop(reference)
            self._room.give(given)
            finished.append((launch.attempt, self._exit_code(reference, launch)))
        return finished

    def _exit_code(self, reference: ray.ObjectRef, launch: ProcessSpec) -> int:
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            return not_started(launch.runs / launch.folder / "log.txt", error.cause)
        except ray.exceptions.RayError:
            # The worker was killed, by hand or by Ray's memory monitor; the child died with it.
            return -int(signal.SIGKILL)

    def close(self) -> None:
        """Stops Ray, and with it whatever still runs."""
        with held():
            with prompt_end(self._ours()):
                ray.shutdown()
            self._environment.close()
        super().close()
