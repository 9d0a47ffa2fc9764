"""A machine on which `doctor` finds nothing but what a test puts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.sweep.doctor import Check
from examined import examining, isolate, nvidia_smi


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `isolate` says."""
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As `nvidia_smi` says."""
    return nvidia_smi(tmp_path, monkeypatch)


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """As `examining` says."""
    return examining(monkeypatch)
