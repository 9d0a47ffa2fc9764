"""Fixtures of the executors' tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.executors.executor import LocalExecutor
from atma_sweep.sweep.host import processes


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids of the warm processes that launches of this process start, here also without a GPU."""
    start, pids = processes.start_piped_child, list[int]()

    def start_and_note(*arguments: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(LocalExecutor, "has_cpu_warm_pool", True)
    monkeypatch.setattr(processes, "start_piped_child", start_and_note)
    return pids


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Short path for Ray's sockets, whose paths may have at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="atma-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
