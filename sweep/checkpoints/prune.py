"""`atma-sweep prune-checkpoints`: removes what no launch will read again, and nothing that it does not know.

Safe at any moment and as often as one likes. What runs is left alone. Weights are forgotten by the database before their
file goes, so that it never names a file that is gone; a bundle loses its seal first, so that half of one never looks whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...results.console.output_files import size_on_disk
from ...results.console.text import choices_hint, counted
from ...results.store.records import Attempt, CellState, Standing, requests_from_options, standing
from ...results.store.store import Store
from ..errors import SweepError
from ..units import size
from . import storage
from .address import place_of
from .file_names import DIGITS, KEPT, MODEL, OPTIMIZERS, PREFIX, WEIGHTS
from .seal import SEAL, DamagedCheckpoint, read_verified_facts

Keep = Literal["newest", "weights", "nothing"]
KEEP_CHOICES: tuple[Keep, ...] = ("newest", "weights", "nothing")

CHECKPOINT_FILES = frozenset((MODEL, OPTIMIZERS, SEAL))
CHECKPOINT = re.compile(rf"{PREFIX}\d{{{DIGITS},}}")
UNFINISHED = re.compile(rf"\.{PREFIX}\d{{{DIGITS},}}\.part")
UNFINISHED_WEIGHTS = f"{WEIGHTS}.part"


@dataclass(frozen=True)
class PrunedCell:
    """What went, or would go, of one cell."""

    cell_id: str
    slug: str
    standing: Standing
    """Where the cell stood before."""
    checkpoints: int
    """Bundles removed, unfinished ones included."""
    weights: int
    """Files of kept weights removed."""
    bytes: int
    starts_over: bool
    """An unfinished cell lost its last checkpoint: the next launch trains it from the first step."""
    problem: str = ""
    """Why something stayed that should have gone; one line."""


@dataclass(frozen=True)
class PruneReport:
    """What a pruning removed, or would."""

    sweep: str
    keep: Keep
    dry: bool
    cells: Sequence[PrunedCell]
    """Those that had something to remove, or a problem, in the grid's order."""
    running: Sequence[str]
    """Slugs of cells that were left alone because they have an attempt that runs."""

    @property
    def bytes(self) -> int:
        """Freed in all."""
        return sum(cell.bytes for cell in self.cells)

    @property
    def problems(self) -> list[str]:
        """One line for each cell that could not be pruned to the end."""
        return [f"{cell.slug}: {cell.problem}" for cell in self.cells if cell.problem]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"bytes": self.bytes}

    def lines(self) -> list[str]:
        """A line a cell and one for all."""
        lines = []
        for cell in self.cells:
            parts = [counted(cell.checkpoints, "checkpoint")] if cell.checkpoints else []
            parts += ["weights"] if cell.weights else []
            if parts:
                note = "; starts over at the next launch" if cell.starts_over else ""
                lines.append(
                    f"{cell.cell_id} {cell.slug} ({cell.standing}): {' and '.join(parts)}, {size(cell.bytes)}{note}"
                )
            if cell.problem:
                lines.append(f"{cell.cell_id} {cell.slug} ({cell.standing}): {cell.problem}")
        done = "would free" if self.dry else "freed"
        running_note = f"; {len(self.running)} running cells left alone" if self.running else ""
        return [
            *lines,
            f"{self.sweep}: {done} {size(self.bytes)} of {counted(len(self.cells), 'cell')} (keep {self.keep}){running_note}",
        ]


def prune(
    store: Store, runs: Path, sweep: str | None = None, *, keep: Keep = "newest", dry: bool = False,
    orphans: bool = False,
) -> PruneReport:  # fmt: skip
    """Removes checkpoints of a sweep, the one launched last by default, that are not needed any more.

    `keep` says what stays. "newest": kept weights, and of each unfinished cell the two newest sound checkpoints.
    "weights": kept weights alone. "nothing": nothing. Whatever it says, an attempt that was trained to its end or
    diverged needs no checkpoint, and a cell with an attempt that runs now loses nothing. `dry` only looks; `orphans`
    adds the cells that the newest revision dropped. `runs` is the folder of artifacts. A place that cannot be reached
    is a problem of its cell and stops nothing.

    Raises SweepUnknown, StoreBusy, and SweepError for another `keep`.
    """
    if keep not in KEEP_CHOICES:
        raise SweepError(f"--keep {keep}: no such choice; {choices_hint(keep, KEEP_CHOICES)}")
    name = store.default_sweep() if sweep is None else sweep
    states = store.cell_states(name)
    states += store.cell_states(name, orphans=True) if orphans else []
    requested = requests_from_options(store.revision(name).options)
    pruned, running = [], []
    for state in states:
        # asked for each cell: a launch may have taken it up meanwhile
        attempts = store.attempts(state.cell_id)
        if any(attempt.state == "running" for attempt in attempts):
            running.append(state.slug)
            continue
        cell = _CellPruner(store, runs, state, standing(state, requested), attempts).prune(keep, dry)
        if cell is None:
            running.append(state.slug)
        else:
            pruned.append(cell)
    reported = [cell for cell in pruned if cell.checkpoints or cell.weights or cell.problem]
    result = PruneReport(name, keep, dry, reported, running)
    if not dry and any(cell.checkpoints or cell.weights for cell in reported):
        checkpoints, weights = sum(cell.checkpoints for cell in reported), sum(cell.weights for cell in reported)
        store.add_event(
            "pruned",
            f"{counted(checkpoints, 'checkpoint')} and {weights} weights, {size(result.bytes)} (keep {keep})",
            sweep=name,
        )
    return result


class _CellPruner:
    """The pruning of one cell, none of whose attempts ran when it was begun."""

    def __init__(
        self, store: Store, runs: Path, state: CellState, standing: Standing, attempts: Sequence[Attempt]
    ) -> None:
        self.store, self.runs, self.state, self.word, self.attempts = store, runs, state, standing, attempts
        self.checkpoints = self.weights = self.bytes = 0
        self.n_sound = 0
        """Checkpoints that a launch could go on from; those past the ones that stay are not looked into."""
        self.n_remaining = 0
        """Those of them that stay."""
        self.problems: list[str] = []

    def prune(self, keep: Keep, dry: bool) -> PrunedCell | None:
        """None when a launch has taken the cell up meanwhile."""
        weights, checkpoints = self._plan(keep)
        if not dry and self.store.attempts(self.state.cell_id) != self.attempts:
            return None
        for attempt, location, name in weights:
            with self._collect_problems():
                # weights that are not here may lie on another machine that shares the database
                if attempt.weights is not None and name == WEIGHTS and not dry:
                    self.store.forget_weights(attempt.id)
                self._remove(location, name, dry)
                self.weights += name == WEIGHTS
        for location, name in reversed(checkpoints):  # the newest last, should this be cut short
            with self._collect_problems():
                self._remove(location, name, dry)
                self.checkpoints += 1
        state, starts_over = self.state, self.n_sound > self.n_remaining == 0
        problem = "; ".join(dict.fromkeys(self.problems))
        return PrunedCell(
            state.cell_id, state.slug, self.word, self.checkpoints, self.weights, self.bytes, starts_over, problem
        )

    def _plan(self, keep: Keep) -> tuple[list[tuple[Attempt, storage.Storage, str]], list[tuple[storage.Storage, str]]]:
        """Kept weights and checkpoints to remove, those of the newest attempt first."""
        weights: list[tuple[Attempt, storage.Storage, str]] = []
        removable: list[tuple[storage.Storage, str]] = []
        damaged: list[tuple[storage.Storage, str]] = []
        unfinished, n_kept = True, KEPT if keep == "newest" else 0
        for attempt in reversed(self.attempts):
            if attempt.kind != "train":
                continue
            # a launch goes on from trainings back to the last one that ended as a result, as the supervisor does
            unfinished = unfinished and attempt.state not in ("done", "diverged")
            with self._collect_problems():
                location = storage.place(storage.resolve(self.runs, place_of(self.store, attempt)))
                names = location.names()
                # a file that the database has forgotten already is left of a pruning that was killed
                if keep == "nothing":
                    weights += [
                        (attempt, location, name) for name in (WEIGHTS, UNFINISHED_WEIGHTS) if location.has(name)
                    ]
                removable += [
                    (location, name)
                    for name in names
                    if UNFINISHED.fullmatch(name) and self._is_pure_checkpoint(location, name)
                ]
                for name in reversed(names):
                    if not CHECKPOINT.fullmatch(name) or not self._is_pure_checkpoint(location, name):
                        continue
                    if not unfinished or (self.n_remaining >= n_kept and self.n_sound):
                        removable.append((location, name))
                    elif not is_sound(location, name):
                        damaged.append((location, name))
                    else:
                        self.n_sound += 1
                        stays = self.n_remaining < n_kept
                        self.n_remaining += stays
                        removable += [] if stays else [(location, name)]
        # what looks damaged may be a disk that cannot be read today: it goes only where something better stays
        return weights, removable + (damaged if self.n_remaining or not n_kept else [])

    @contextlib.contextmanager
    def _collect_problems(self) -> Iterator[None]:
        """A place that fails is a problem of the cell, and the rest goes on."""
        try:
            yield
        except SweepError as error:
            self.problems.append(" ".join(str(error).split()))
        except OSError as error:
            self.problems.append(f"{error.filename}: {error.strerror}; make it readable and writable, then prune again")

    def _is_pure_checkpoint(self, location: storage.Storage, name: str) -> bool:
        """Whether a bundle holds only what a checkpoint holds. A link, or anything else in it, makes it somebody's."""
        unexpected = set(storage.place(storage.join(location.address, name)).names()) - CHECKPOINT_FILES
        if isinstance(location, storage.LocalStorage):
            path = location.path / name
            unexpected |= {"a link"} if path.is_symlink() else set() if path.is_dir() else {"no folder"}
        if unexpected:
            problem = (
                f"{storage.join(location.address, name)} is not as a checkpoint is ({', '.join(sorted(unexpected))})"
            )
            self.problems.append(f"{problem} and stays; take out what is yours, then prune again")
        return not unexpected

    def _remove(self, location: storage.Storage, name: str, dry: bool) -> None:
        freed = bytes_of(location, name)
        if not dry:
            if isinstance(location, storage.LocalStorage) and (location.path / name).is_dir():
                storage.LocalStorage(location.path / name).remove(SEAL)
            location.remove(name)
        self.bytes += freed


def is_sound(location: storage.Storage, name: str) -> bool:
    """Whether a launch could go on from it: hashed on a local disk; elsewhere, where that would fetch it, sealed."""
    if isinstance(location, storage.LocalStorage):
        try:
            read_verified_facts(location.path / name, name)
        except DamagedCheckpoint:
            return False
        return True
    return storage.place(storage.join(location.address, name)).has(SEAL)


def bytes_of(location: storage.Storage, name: str) -> int:
    """What a bundle or a file of a place takes, bytes. Raises StorageError."""
    if isinstance(location, storage.LocalStorage):
        return size_on_disk(location.path / name)
    assert isinstance(location, storage.RemoteStorage)
    return location.bytes_of(name)
