"""Attempts on Ray. Our database owns the state; Ray supplies processes. The only file that imports ray."""

from __future__ import annotations

import logging
import os
import signal

from .cell import Resources
from .executors import Finished, Launch, environment, run_command
from .machine import cores
from .process import start

# Read by Ray while it is imported: no usage reports, no interpreter of uv's choosing for the workers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray's own tasks see every GPU anyway; each child gets its list from us.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


def _run(launch: Launch) -> int:
    """Runs in a Ray worker: one child process, its exit code. Its death takes the child along."""
    return start(run_command(launch, os.getpid()), environment(launch), launch.runs / launch.folder).wait()


class RayExecutor:
    """An embedded Ray on this machine: as many attempts at once as its cores, and the given GPUs, allow."""

    name = "ray"

    def __init__(self, gpus: list[str]) -> None:
        """Starts Ray; `gpus` are device names for CUDA_VISIBLE_DEVICES that this sweep holds."""
        self._free = Resources.model_construct(cpus=cores(), gpus=len(gpus))
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # A batch system may send SIGTERM to every process. Ray's own then have to outlive the attempts, which save
        # themselves, so they inherit a mask without it, as they do for SIGINT from Ray. Attempts lift it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            ray.init(
                address="local",  # never a cluster that a stale file or RAY_ADDRESS points to
                num_cpus=self._free.cpus,
                num_gpus=len(gpus),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # max_retries=0: retries are ours, decided from the database.
        self._task = ray.remote(max_retries=0)(_run)
        self._running: dict[ray.ObjectRef, Launch] = {}

    def fits(self, resources: Resources) -> bool:
        """Whether cores and GPUs are left. An attempt larger than the machine's cores gets the machine to itself."""
        enough = resources.cpus <= self._free.cpus or not self._running
        return enough and resources.gpus <= self._free.gpus

    def start(self, launch: Launch) -> None:
        """Hands the attempt to a Ray worker."""
        wanted = launch.resources
        reference = self._task.options(
            num_cpus=min(wanted.cpus, cores()), num_gpus=wanted.gpus, name=f"attempt-{launch.attempt}"
        ).remote(launch)
        self._take(launch, -1)
        self._running[reference] = launch

    def wait(self, seconds: float) -> list[Finished]:
        """Attempts whose process, or whose Ray worker, has ended."""
        if not self._running:
            return []
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=seconds)
        if not ready and seconds > 0:
            return []
        finished = []
        for reference in ready:
            launch = self._running.pop(reference)
            self._take(launch, +1)
            finished.append((launch.attempt, self._exit_code(reference, launch)))
        return finished

    def _exit_code(self, reference: ray.ObjectRef, launch: Launch) -> int:
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            # The child could not be started; its log is where the cause is looked for.
            with (launch.runs / launch.folder / "log.txt").open("a") as log:
                log.write(f"could not be started: {error.cause}\n")
            return 1
        except ray.exceptions.RayError:
            # The worker was killed, by hand or by Ray's memory monitor; the child died with it.
            return -int(signal.SIGKILL)

    def _take(self, launch: Launch, sign: int) -> None:
        self._free = Resources.model_construct(
            cpus=self._free.cpus + sign * launch.resources.cpus, gpus=self._free.gpus + sign * launch.resources.gpus
        )

    def close(self) -> None:
        """Stops Ray, and with it whatever still runs."""
        ray.shutdown()
