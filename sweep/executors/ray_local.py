"""Executor with a Ray instance of its own on this machine, which lives as long as the launch."""

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

from ..attempt.failures import record_start_failure
from ..errors import MachineError
from ..host import processes
from ..host.allocation import Allocation, Machine
from ..host.locks import open_private_folder
from ..host.signals import signals_blocked
from .executor import AttemptExit, HostExecutor, ProcessSpec, attempt_command, attempt_environment, visible_device
from .ray_worker import run_attempt

DAEMONS = ("raylet", "gcs_server")
OLDEST_TESTED_RAY = "2.60"
"""Oldest Ray whose defaults (addresses, token, process groups, signals) were tested; pyproject.toml requires it."""
LOOPBACK = "127.0.0.1"
REMEDY = "set RAY_TMPDIR to another folder, or launch with --executor local, which needs no Ray"
CLUSTERS_VARIABLE = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
CHECK_INTERVAL_S = 0.02
"""Seconds between two checks of daemons that are to end."""
KILL_TIMEOUT_S = 2.0
"""Seconds that killed processes get to disappear."""


@contextlib.contextmanager
def _private_ray_env() -> Iterator[None]:
    """Set Ray's environment so that processes started in the `with` block serve this user on this machine only.

    They listen on the loopback address and require a new token. The previous environment is restored afterwards.
    """
    before, clusters = dict(os.environ), ray_constants.ENABLE_RAY_CLUSTER
    # as on macOS, where Ray supports no clusters; the attribute is set as well, since Ray is imported already
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[CLUSTERS_VARIABLE] = False, "0"
    # with this token set, Ray writes none into the home folder; without a mode set, it requires tokens
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.pop("RAY_AUTH_MODE", None)
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name in (CLUSTERS_VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def daemons_killed_promptly(daemons: Sequence[psutil.Process]) -> Iterator[None]:
    """Kill each daemon as soon as Ray sends it SIGTERM within the `with` block, and all descendants at its end.

    The daemons were started with SIGTERM blocked, so Ray would wait a second for each before it kills it. A thread
    watches for the signal. The descendants are those that exist when the block begins; they get 2 s (KILL_TIMEOUT_S) to
    disappear.

    Args:
        daemons: Processes that Ray has started from this one.
    """
    descendants = [child for daemon in daemons for child in _children(daemon)]
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(CHECK_INTERVAL_S):
            for daemon in daemons:
                if processes.has_pending(daemon.pid, signal.SIGTERM):
                    _kill(daemon)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()
        for process in descendants:
            _kill(process)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline and any(map(_is_alive, descendants)):
            time.sleep(CHECK_INTERVAL_S)


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the process's descendants; empty if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return processes.find_process(process.pid, process.create_time()) is not None
    return False


def _private_folder() -> Path:
    """Return a folder for Ray's sockets and logs that no other user can enter.

    It is ray-UID/r below RAY_TMPDIR or the temporary folder; ray-UID is created if absent, r is not.

    Raises:
        MachineError: ray-UID belongs to another user or is open to others.
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"ray-{os.getuid()}"
    os.close(open_private_folder(folder, "RAY_TMPDIR"))
    return folder / "r"  # Ray makes this folder accessible to all, so its parent is the private one


class RayExecutor(HostExecutor):
    """Executor with an embedded Ray on this machine: as many attempts at once as cores, memory and GPUs allow."""

    name = "ray"

    def __init__(self) -> None:
        """Create the executor without starting Ray."""
        super().__init__()
        self._environment = contextlib.ExitStack()
        self._running: dict[ray.ObjectRef, tuple[ProcessSpec, Allocation]] = {}
        self._foreign_children = frozenset(psutil.Process().children())
        """Children of this process that Ray did not start."""

    def start_on(self, machine: Machine) -> None:
        """Start Ray on the machine and block until it runs; attempts will use its cores, memory and GPUs.

        After an error everything is closed again.

        Args:
            machine: This machine, or the part of it to use.

        Raises:
            MachineError: Ray cannot start, or it would listen on the network.
        """
        super().start_on(machine)
        self._foreign_children = frozenset(psutil.Process().children())
        try:
            self._environment.enter_context(_private_ray_env())
            # A stop signal would break a starting Ray. Ray's processes must also ignore one that a batch system sends to
            # every process: they have to outlive the attempts, which save checkpoints. Attempts unblock SIGTERM.
            with signals_blocked():
                ray.init(
                    _temp_dir=str(_private_folder()),
                    address="local",  # never a cluster named by a stale file or RAY_ADDRESS
                    num_cpus=machine.cpus,
                    num_gpus=0,  # GPUs are allocated by MachineAllocator
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=True,
                )
            bound_address = ray.util.get_node_ip_address()
            if bound_address != LOOPBACK:
                raise MachineError(
                    f"Ray listens on {bound_address}, which other machines can reach; unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            self.close()
            error_text = " ".join(str(error).split())[:300]
            raise MachineError(f"Ray cannot start: {error_text}; {REMEDY}") from error
        except BaseException:
            self.close()
            raise
        self._daemons = {process.name(): process for process in self._ray_processes() if process.name() in DAEMONS}
        # max_retries=0: the supervisor decides about retries.
        self._task = ray.remote(max_retries=0)(run_attempt)

    def _ray_processes(self) -> list[psutil.Process]:
        """Return the processes that Ray has started from this one."""
        return [process for process in psutil.Process().children() if process not in self._foreign_children]

    def failure(self) -> str | None:
        """Return a sentence that names a daemon of Ray (raylet or gcs_server) that died, or None.

        Ray itself notices after a minute, and then ends this process at once.
        """
        gone = (
            name
            for name, daemon in self._daemons.items()
            if processes.find_process(daemon.pid, daemon.create_time()) is None
        )
        return next((f"Ray's {name} died" for name in gone), None)

    def start(self, spec: ProcessSpec) -> None:
        """Submit the attempt as a Ray task and allocate its resources. Does not wait for its process.

        A failure to start the process is reported by `wait`.
        """
        allocation = self._allocator.find_allocation(spec.resources)
        assert allocation is not None, "the supervisor asks fits() first"
        options = self._task.options(num_cpus=allocation.cpus, name=f"attempt-{spec.attempt}")
        env = attempt_environment(spec, visible_device(allocation))
        reference = options.remote(attempt_command(spec), env, spec.runs / spec.folder)
        self._allocator.allocate(allocation)
        self._running[reference] = spec, allocation

    def wait(self, seconds: float) -> list[AttemptExit]:
        """Return the attempts whose process or Ray worker has ended, after at most `seconds`.

        Returns as soon as one has ended; [] at once when nothing runs. Exit codes are those of `_exit_code`.
        """
        if not self._running:
            return []
        references = list(self._running)
        ray.wait(references, num_returns=1, timeout=seconds)
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        finished = []
        for reference in ready:
            spec, allocation = self._running.pop(reference)
            self._allocator.release(allocation)
            finished.append((spec.attempt, self._exit_code(reference, spec)))
        return finished

    def _exit_code(self, reference: ray.ObjectRef, spec: ProcessSpec) -> int:
        """Return the exit code of a finished Ray task: that of the attempt's process, negative for a signal.

        It is -SIGKILL if the Ray worker was killed. An attempt that could not be started gets the code of
        `record_start_failure`, 3 (EXIT_MACHINE) or 1, which also writes the cause into its log.

        Args:
            reference: Ray reference of the task, which is ready.
            spec: Its attempt.
        """
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            return record_start_failure(spec.runs / spec.folder / "log.txt", error.cause)
        except ray.exceptions.RayError:
            # The worker was killed, by hand or by Ray's memory monitor; the child died with it.
            return -int(signal.SIGKILL)

    def close(self) -> None:
        """Stop Ray, and with it all attempts (SIGKILL), restore the environment, and release the GPU locks."""
        with signals_blocked():
            with daemons_killed_promptly(self._ray_processes()):
                ray.shutdown()
            self._environment.close()
        super().close()
