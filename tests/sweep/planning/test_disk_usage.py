"""Disk usage of a plan, against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.orchestrator import display
from atma_sweep.sweep.planning import admission, planner
from atma_sweep.sweep.planning.admission import DiskUsage

GIB = 2**30
GRID = """seeds: 5
axes:
  attn_type: [polar, nope]
  reg_mode: [baseline, weak]
"""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the sizes and return the list of counted mixers.

    A model has 100 bytes, its optimizers 10; on CUDA half of both.
    """
    requests: list[str] = []

    def sizes(config: Any, *, narrow: bool, optimizer: str, muon_for: str) -> tuple[int, int]:
        requests.append(config.attn_type)
        return (50, 5) if narrow else (100, 10)

    monkeypatch.setattr(checkpoint, "state_bytes", sizes)
    return requests


@pytest.mark.parametrize(("keep", "each"), [("nothing", 0), ("weights", 100), ("everything", 100 + 2 * 110)])
def test_sums_over_cells_with_one_count_a_model(
    cells: Callable[..., list[Cell]], counted: list[str], tmp_path: Path, keep: str, each: int
) -> None:
    chosen = cells(f"{GRID}set:\n  checkpoint.keep: {keep}\n")
    usage = admission.disk_needed(chosen, tmp_path)
    assert (usage.cells, usage.per_cell, usage.retained, usage.running) == (20, (each, each), 20 * each, 3 * 110)
    assert (usage.storage_root, usage.keep) == (str(tmp_path), (keep,))
    assert counted == ["polar", "nope"], "ten cells each share a model"
    assert usage.as_json() == {
        "disk_bytes_per_cell": each,
        "disk_bytes_kept": 20 * each,
        "disk_bytes_running": 330,
        "disk_bytes_free": usage.free,
    }


def test_disk_usage_of_a_gpu_cell_in_remote_storage(
    cells: Callable[..., list[Cell]], counted: list[str], tmp_path: Path
) -> None:
    chosen = cells("set:\n  checkpoint.path: s3://bucket/x/\nresources: {gpus: 1}\n")
    usage = admission.disk_needed(chosen, tmp_path)
    assert (usage.per_cell, usage.running, usage.free, usage.storage_root) == ((50, 50), 3 * 55, None, "s3://bucket/x")
    assert usage.describe()[0].endswith("per running cell; in s3://bucket/x")
    assert len(usage.describe()) == 1
    (relative,) = cells("set:\n  checkpoint.path: kept\n")
    assert admission.disk_needed([relative], Path("/elsewhere")).storage_root == str(tmp_path / "kept")


def make_usage(
    per_cell: tuple[int, int] = (int(1.4 * GIB),) * 2,
    retained: int = 168 * GIB,
    free: int = 512 * GIB,
    keep: tuple[str, ...] = ("weights",),
) -> DiskUsage:
    """Return the usage of 120 cells under /runs."""
    return DiskUsage(
        cells=120,
        per_cell=per_cell,
        retained=retained,
        running=int(9.3 * GIB),
        free=free,
        storage_root="/runs",
        keep=keep,
    )


@pytest.mark.parametrize(("changes", "line"), [
    ({}, "disk: 1.4 GiB of weights per cell, 168 GiB for 120 cells (checkpoint.keep: weights); during training up to "
     "9.3 GiB per running cell; 512 GiB free in /runs"),
    ({"per_cell": (GIB, int(1.25 * GIB))}, "disk: 1.0 to 1.2 GiB of weights per cell, 168 GiB for 120 cells "
     "(checkpoint.keep: weights); during training up to 9.3 GiB per running cell; 512 GiB free in /runs"),
    ({"per_cell": (GIB // 2, int(1.25 * GIB))}, "disk: 512 MiB to 1.2 GiB of weights per cell, 168 GiB for 120 cells "
     "(checkpoint.keep: weights); during training up to 9.3 GiB per running cell; 512 GiB free in /runs"),
    ({"per_cell": (0, 0), "retained": 0, "keep": ("nothing",)}, "disk: nothing is kept (checkpoint.keep: nothing); during "
     "training up to 9.3 GiB per running cell; 512 GiB free in /runs"),
    ({"keep": ("everything",)}, "disk: 1.4 GiB of weights and checkpoints per cell, 168 GiB for 120 cells "
     "(checkpoint.keep: everything); during training up to 9.3 GiB per running cell; 512 GiB free in /runs"),
])  # fmt: skip
def test_disk_usage_line(changes: dict[str, Any], line: str) -> None:
    assert make_usage(**changes).describe() == [line]


def test_disk_usage_warns_when_space_is_short() -> None:
    enough = 168 * GIB + int(9.3 * GIB)
    assert len(make_usage(free=enough).describe()) == 1
    _, warning = make_usage(free=enough - 1).describe()
    assert warning == (
        "warning: 168 GiB to keep and 9.3 GiB during training exceed the 177 GiB free in /runs; free disk space, set "
        "checkpoint.keep: nothing, or set checkpoint.path to another location"
    )


def test_disk_usage_without_cells(cells: Callable[..., list[Cell]], counted: list[str], tmp_path: Path) -> None:
    usage = admission.disk_needed([], tmp_path)
    assert usage.describe() == []
    assert [usage.per_cell, usage.retained, usage.running, counted] == [(0, 0), 0, 0, []]
    plan = planner.plan(cells(), {})
    assert plan.disk is None
    assert len(display.describe_plan(plan, "g")) == 2
