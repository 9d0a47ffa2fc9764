"""The disk that a plan needs: what stays of each cell, and what a running one takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...results.console.text import counted
from ..checkpoints import file_names, storage
from ..grid.cell import Cell
from ..units import size

KEPT_PARTS = {"nothing": "nothing", "weights": "weights", "everything": "weights and checkpoints"}


@dataclass(frozen=True)
class Disk:
    """Bytes. Cells whose settings differ need different amounts, so those of one cell are the smallest and largest."""

    cells: int
    """How many would be trained."""
    per_cell: tuple[int, int]
    """What stays of a finished one."""
    kept: int
    """What stays of all of them."""
    running: int
    """What a running one takes at most: two checkpoints, and a third while it is written."""
    free: int | None
    """None when the place is on no disk of this machine."""
    place: str
    keep: tuple[str, ...]
    """Values of checkpoint.keep among the cells."""

    @property
    def is_short(self) -> bool:
        """Tell whether all that stays, and one running cell, are more than is free."""
        return self.cells > 0 and self.free is not None and self.kept + self.running > self.free

    def describe(self) -> list[str]:
        """One line, and a warning when it will not do; nothing without cells."""
        if not self.cells:
            return []
        least, most = (size(value) for value in self.per_cell)
        parts = " or ".join(KEPT_PARTS[word] for word in self.keep)
        number, unit = least.split()
        each = most if least == most else f"{number} to {most}" if most.endswith(f" {unit}") else f"{least} to {most}"
        stays = (
            f"{each} of {parts} a cell, {size(self.kept)} for {counted(self.cells, 'cell')}"
            if self.kept
            else "nothing stays"
        )
        free = f"{size(self.free)} free in {self.place}" if self.free is not None else f"in {self.place}"
        lines = [
            f"disk: {stays} (checkpoint.keep: {', '.join(self.keep)}); "
            f"while training up to {size(self.running)} a running cell; {free}"
        ]
        if self.is_short and self.free is not None:
            lines.append(
                f"warning: {size(self.kept)} to keep and {size(self.running)} while training are more than the "
                f"{size(self.free)} free in {self.place}; make room, set checkpoint.keep to nothing, or name another "
                "place with checkpoint.path"
            )
        return lines

    def as_json(self) -> dict[str, int | None]:
        """The numbers, by the names that `launch --dry-run --json` gives them."""
        return {
            "disk_bytes_per_cell": self.per_cell[1],
            "disk_bytes_kept": self.kept,
            "disk_bytes_running": self.running,
            "disk_bytes_free": self.free,
        }


def needed(cells: Sequence[Cell], runs: Path) -> Disk:
    """What training these cells needs; those that share a model section are counted once.

    Names and headers, some 400 bytes a tensor, are left out. Raises AddressError and StorageError for a checkpoint.path
    that cannot be used.
    """
    # imports torch, which commands that plan nothing do not wait for
    from ..checkpoints.checkpoint import sizes

    counted: dict[tuple[int, bool, str], tuple[int, int]] = {}
    each, running = [], 0
    for cell in cells:
        config = cell.config
        narrow = config.train.activations_on(cuda=config.resources.gpus > 0) == "bfloat16"
        key = id(config.model), narrow, config.train.optimizer  # which the cells keep alive
        if key not in counted:
            counted[key] = sizes(config.model, narrow=narrow, optimizer=key[2])
        weights, optimizers = counted[key]
        whole = weights + optimizers
        stays = {"nothing": 0, "weights": weights, "everything": weights + file_names.KEPT * whole}
        each.append(stays[config.checkpoint.keep])
        running = max(running, (file_names.KEPT + 1) * whole)
    place = storage.resolve(runs, storage.home(cells[0].config.checkpoint.path, "") if cells else "").rstrip("/")
    return Disk(
        cells=len(cells),
        per_cell=(min(each, default=0), max(each, default=0)),
        kept=sum(each),
        running=running,
        free=storage.free_bytes(place),
        place=place,
        keep=tuple(sorted({cell.config.checkpoint.keep for cell in cells})),
    )
