"""Processes that wait, ready, for the next attempt on a GPU (`attempt/spare.py`): one for each GPU in use while cells are left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..host import processes

Start = Callable[[], subprocess.Popen[bytes]]


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    env: Mapping[str, str]
    runs: Path


@dataclass
class WarmPool:
    """Those of one executor, by the GPU that they may see."""

    _ready: dict[str, _Spare] = field(default_factory=dict)

    def prepare(self, device: str, runs: Path, env: Mapping[str, str], start: Start) -> None:
        """Has one ready for that device, with that environment."""
        if device not in self._ready:
            self._ready[device] = _Spare(start(), dict(env), runs)

    def become(self, device: str, runs: Path, env: Mapping[str, str], folder: str) -> subprocess.Popen[bytes] | None:
        """The spare of that device, which from now on is the attempt in that folder.

        None when there is none that is alive and was started with that very environment.
        """
        spare = self._ready.pop(device, None)
        if spare is None:
            return None
        if (
            (spare.env, spare.runs) == (dict(env), runs)
            and spare.process.poll() is None
            and _told(spare.process, folder)
        ):
            return spare.process
        _end(spare.process)
        return None

    def close(self) -> None:
        """Ends those that no attempt took."""
        for spare in self._ready.values():
            _end(spare.process)
        self._ready.clear()


def _told(process: subprocess.Popen[bytes], folder: str) -> bool:
    assert process.stdin is not None
    try:
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.close()
    except OSError:  # it has just died
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    processes.end_group(process.pid)
    if process.stdin is not None:
        process.stdin.close()
