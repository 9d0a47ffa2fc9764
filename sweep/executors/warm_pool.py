"""Warm pool: processes that have imported everything and wait for the next attempt (see attempt/spare.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..host import processes

StartProcess = Callable[[], subprocess.Popen[bytes]]
"""Function that starts a warm process."""


@dataclass
class _WarmProcess:
    """Warm process with the environment and runs folder that it was started with."""

    process: subprocess.Popen[bytes]
    env: Mapping[str, str]
    runs: Path


@dataclass
class WarmPool:
    """Warm processes of one executor, at most one per visible GPU."""

    _ready: dict[str, _WarmProcess] = field(default_factory=dict)
    """Warm process by the value of CUDA_VISIBLE_DEVICES."""

    def refill(self, device: str, runs: Path, env: Mapping[str, str], start: StartProcess) -> None:
        """Start a warm process for the device unless there is one, whatever its environment.

        Args:
            device: Value of CUDA_VISIBLE_DEVICES; "" without a GPU.
            runs: Runs folder that the process was told.
            env: Environment of the process, to compare later attempts with.
            start: Starts the process; its errors pass through.
        """
        if device not in self._ready:
            self._ready[device] = _WarmProcess(start(), dict(env), runs)

    def claim(self, device: str, runs: Path, env: Mapping[str, str], folder: str) -> subprocess.Popen[bytes] | None:
        """Turn the device's warm process into the attempt in `folder` and return it; None without a suitable one.

        Suitable is one that is alive and was started with exactly this environment and runs folder. An unsuitable one
        is killed. The process is no longer in the pool afterwards.

        Args:
            device: Value of CUDA_VISIBLE_DEVICES; "" without a GPU.
            runs: Runs folder.
            env: Environment that the attempt needs.
            folder: Folder of the attempt, relative to `runs`.
        """
        warm = self._ready.pop(device, None)
        if warm is None:
            return None
        if (
            (warm.env, warm.runs) == (dict(env), runs)
            and warm.process.poll() is None
            and _send_folder(warm.process, folder)
        ):
            return warm.process
        _end(warm.process)
        return None

    def close(self) -> None:
        """Kill the warm processes that no attempt claimed."""
        for warm in self._ready.values():
            _end(warm.process)
        self._ready.clear()


def _send_folder(process: subprocess.Popen[bytes], folder: str) -> bool:
    """Send the attempt's folder to a warm process and close its standard input; return False if it has died."""
    assert process.stdin is not None
    try:
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.close()
    except OSError:  # it has just died
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a warm process, wait for its end, kill what is left of its process group, and close its pipe."""
    process.kill()
    process.wait()
    processes.kill_group(process.pid)
    if process.stdin is not None:
        process.stdin.close()
