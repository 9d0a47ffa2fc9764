"""Grids written on the spot, and what they expand to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from atma_sweep.sweep.cell import Cell, DataConfig
from atma_sweep.sweep.grid import load_grid

torch.set_num_threads(1)

FINGERPRINT = "f" * 64


def fake(data: DataConfig) -> str:
    """A corpus hash that needs no corpus."""
    return FINGERPRINT


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file into the test's folder: write(text, name="g.yaml")."""

    def put(text: str, name: str = "g.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return put


@pytest.fixture
def cells(write: Callable[..., Path]) -> Callable[..., list[Cell]]:
    """Cells of a grid with the given lines after `name` and `extends: tiny`."""

    def expand(text: str = "", *, base: str = "tiny", sets: tuple[str, ...] = ()) -> list[Cell]:
        path = write(f"name: g\nextends: {base}\n{text}")
        return load_grid(path, sets=sets, rename="h" if sets else None).expand(fake)

    return expand


@pytest.fixture
def fake_fingerprint() -> Callable[[DataConfig], str]:
    return fake
