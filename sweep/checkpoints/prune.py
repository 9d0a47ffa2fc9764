"""`atma-sweep prune-checkpoints`: removes checkpoints and weights that no launch will read again.

Files that are not part of a checkpoint stay. It is safe at any time and repeatable. Running attempts are skipped. The
database forgets weights before their file is removed, so that it never names a missing file. A checkpoint loses its
seal (the file with the hashes of the others) first, so that a partly removed one never counts as complete.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...results.console.output_files import size_on_disk
from ...results.console.quantities import format_bytes
from ...results.console.text import choices_hint, counted
from ...results.store.records import Attempt, CellStanding, CellState, requests_from_options, standing
from ...results.store.store import Store
from ..errors import SweepError
from . import storage
from .address import checkpoint_address
from .file_names import DIGITS, KEEP_NEWEST, MODEL, OPTIMIZERS, PREFIX, WEIGHTS
from .seal import SEAL, DamagedCheckpoint, read_verified_facts

Keep = Literal["newest", "weights", "nothing"]
KEEP_CHOICES: tuple[Keep, ...] = ("newest", "weights", "nothing")

CHECKPOINT_FILES = frozenset((MODEL, OPTIMIZERS, SEAL))
"""Files that a checkpoint may contain."""
CHECKPOINT = re.compile(rf"{PREFIX}\d{{{DIGITS},}}")
UNFINISHED = re.compile(rf"\.{PREFIX}\d{{{DIGITS},}}\.part")
UNFINISHED_WEIGHTS = f"{WEIGHTS}.part"


@dataclass(frozen=True)
class PrunedCell:
    """Files that pruning removed, or would remove, from one cell."""

    cell_id: str
    slug: str
    standing: CellStanding
    """Standing of the cell before, such as "done", "interrupted" or "needs-eval"."""
    checkpoints: int
    """Number of checkpoints removed, unfinished ones included."""
    weights: int
    """Number of files of final weights removed."""
    bytes: int
    """Bytes freed."""
    starts_over: bool
    """True if an unfinished cell lost its last checkpoint, so that the next launch trains it from the first step."""
    problem: str = ""
    """Reason in one line why a file could not be removed; empty otherwise."""


@dataclass(frozen=True)
class PruneReport:
    """Result of a pruning, or of a dry run."""

    sweep: str
    keep: Keep
    """Files that were to be retained, as for `prune`."""
    dry: bool
    """True if nothing was removed."""
    cells: Sequence[PrunedCell]
    """Cells with removable files or a problem, in the grid's order."""
    running: Sequence[str]
    """Slugs of cells that were skipped because they have a running attempt."""

    @property
    def bytes(self) -> int:
        """Bytes freed over all cells."""
        return sum(cell.bytes for cell in self.cells)

    @property
    def problems(self) -> list[str]:
        """Problems, one line per cell that could not be pruned completely."""
        return [f"{cell.slug}: {cell.problem}" for cell in self.cells if cell.problem]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON.

        Its keys are sweep, keep, dry, cells, running (slugs of skipped cells), and bytes (in total).

        `cells` has a dict per cell with removable files or a problem. Its keys are cell_id, slug, standing, checkpoints
        and weights (numbers of files), bytes, starts_over, problem.
        """
        return asdict(self) | {"bytes": self.bytes}

    def lines(self) -> list[str]:
        """Return the report as text: the lines of each cell, then the total.

        A cell has a line with what it lost, if it lost anything, and one with its problem, if it has one.
        """
        lines = []
        for cell in self.cells:
            parts = [counted(cell.checkpoints, "checkpoint")] if cell.checkpoints else []
            parts += ["weights"] if cell.weights else []
            if parts:
                note = "; starts over at the next launch" if cell.starts_over else ""
                lines.append(
                    f"{cell.cell_id} {cell.slug} ({cell.standing}): {' and '.join(parts)}, {format_bytes(cell.bytes)}{note}"
                )
            if cell.problem:
                lines.append(f"{cell.cell_id} {cell.slug} ({cell.standing}): {cell.problem}")
        done = "would free" if self.dry else "freed"
        running_note = f"; {len(self.running)} running cells skipped" if self.running else ""
        return [
            *lines,
            f"{self.sweep}: {done} {format_bytes(self.bytes)} of {counted(len(self.cells), 'cell')} (keep {self.keep}){running_note}",
        ]


def prune(
    store: Store, runs: Path, sweep: str | None = None, *, keep: Keep = "newest", dry: bool = False,
    orphans: bool = False,
) -> PruneReport:  # fmt: skip
    """Remove the checkpoints of a sweep that are not needed any more, and return what was removed.

    An attempt that was trained to its end or diverged needs no checkpoint, whatever `keep` says, and neither do older
    attempts of its cell. A cell with a running attempt loses nothing. A storage location that cannot be reached becomes
    a problem of its cell, and the other cells are pruned all the same. If anything was removed, the database gets an
    event "pruned".

    Args:
        store: The database.
        runs: The runs folder.
        sweep: Name of the sweep; None: the one launched last.
        keep: "newest" retains final weights and, of each unfinished cell, the two (KEEP_NEWEST) newest intact
            checkpoints. "weights" retains final weights alone. "nothing" removes both.
        dry: Report only; the counts are those of what would be removed.
        orphans: Include cells that the newest revision of the sweep dropped.

    Raises:
        SweepUnknown: No such sweep.
        StoreBusy: The database is locked.
        SweepError: `keep` has another value.
    """
    if keep not in KEEP_CHOICES:
        raise SweepError(f"--keep {keep}: no such choice; {choices_hint(keep, KEEP_CHOICES)}")
    name = store.default_sweep() if sweep is None else sweep
    states = store.cell_states(name)
    states += store.cell_states(name, orphans=True) if orphans else []
    requested = requests_from_options(store.revision(name).options)
    pruned, running = [], []
    for state in states:
        # read for each cell, because a launch may have taken it up meanwhile
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
            f"{counted(checkpoints, 'checkpoint')} and {weights} weights, {format_bytes(result.bytes)} (keep {keep})",
            sweep=name,
        )
    return result


class _CellPruner:
    """Pruning of one cell, none of whose attempts was running at the start."""

    def __init__(
        self, store: Store, runs: Path, state: CellState, standing: CellStanding, attempts: Sequence[Attempt]
    ) -> None:
        """Prepare the pruning of a cell.

        Args:
            store: The database.
            runs: The runs folder.
            state: The cell in the database.
            standing: Standing of the cell, for the report.
            attempts: All attempts of the cell, oldest first.
        """
        self.store, self.runs, self.state, self.standing, self.attempts = store, runs, state, standing, attempts
        self.checkpoints = self.weights = self.bytes = 0
        self.n_sound = 0
        """Number of intact checkpoints of unfinished trainings; those older than the retained ones are not examined."""
        self.n_remaining = 0
        """Number of these checkpoints that stay."""
        self.problems: list[str] = []

    def prune(self, keep: Keep, dry: bool) -> PrunedCell | None:
        """Remove files, or only count them if `dry`.

        The database forgets final weights before their file is removed. Weights are removed first, then checkpoints
        from the oldest on. A failure becomes a problem, and the other files are removed all the same.

        Args:
            keep: Files to retain, as for `prune` of a sweep.
            dry: Count only.

        Returns:
            The result; None when a launch has taken up the cell meanwhile, before anything was removed.
        """
        weights, checkpoints = self._plan(keep)
        if not dry and self.store.attempts(self.state.cell_id) != self.attempts:
            return None
        for attempt, location, name in weights:
            with self._collect_problems():
                # missing weights may lie on another machine that shares the database
                if attempt.weights is not None and name == WEIGHTS and not dry:
                    self.store.clear_weights(attempt.id)
                self._remove(location, name, dry)
                self.weights += name == WEIGHTS
        for location, name in reversed(checkpoints):  # newest last, in case of an interruption
            with self._collect_problems():
                self._remove(location, name, dry)
                self.checkpoints += 1
        state, starts_over = self.state, self.n_sound > self.n_remaining == 0
        problem = "; ".join(dict.fromkeys(self.problems))
        return PrunedCell(
            state.cell_id, state.slug, self.standing, self.checkpoints, self.weights, self.bytes, starts_over, problem
        )

    def _plan(self, keep: Keep) -> tuple[list[tuple[Attempt, storage.Storage, str]], list[tuple[storage.Storage, str]]]:
        """Return the final weights and the checkpoints to remove, those of the newest attempt first.

        Checkpoints stay only in trainings after the last one that ended with a result, and there the newest intact
        ones. Damaged ones among those are removed only if an intact one stays or none is to be retained. Unfinished
        checkpoints are always removed; final weights (and unfinished ones) only if `keep` is "nothing". Also sets
        `n_sound` and `n_remaining`, and records problems.

        Returns:
            Tuples of (attempt, storage location, name) for weights, and of (storage location, name) for checkpoints.
        """
        weights: list[tuple[Attempt, storage.Storage, str]] = []
        removable: list[tuple[storage.Storage, str]] = []
        damaged: list[tuple[storage.Storage, str]] = []
        unfinished, n_retained = True, KEEP_NEWEST if keep == "newest" else 0
        for attempt in reversed(self.attempts):
            if attempt.kind != "train":
                continue
            # as in the supervisor, a launch resumes from trainings after the last one that ended with a result
            unfinished = unfinished and attempt.state not in ("done", "diverged")
            with self._collect_problems():
                location = storage.open_storage(storage.resolve(self.runs, checkpoint_address(self.store, attempt)))
                names = location.names()
                # a file without an entry in the database remains from an interrupted pruning
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
                    if not unfinished or (self.n_remaining >= n_retained and self.n_sound):
                        removable.append((location, name))
                    elif not is_sound(location, name):
                        damaged.append((location, name))
                    else:
                        self.n_sound += 1
                        stays = self.n_remaining < n_retained
                        self.n_remaining += stays
                        removable += [] if stays else [(location, name)]
        # apparent damage may be a temporary read failure, so it is removed only if an intact checkpoint remains
        return weights, removable + (damaged if self.n_remaining or not n_retained else [])

    @contextlib.contextmanager
    def _collect_problems(self) -> Iterator[None]:
        """Context manager that turns a SweepError or OSError of its block into a problem of this cell, a line of text.

        The rest of the block is skipped; other exceptions pass.
        """
        try:
            yield
        except SweepError as error:
            self.problems.append(" ".join(str(error).split()))
        except OSError as error:
            self.problems.append(f"{error.filename}: {error.strerror}; make it readable and writable, then prune again")

    def _is_pure_checkpoint(self, location: storage.Storage, name: str) -> bool:
        """Return True if a folder contains no files but those of a checkpoint; otherwise record a problem.

        A link, or any other file in it, means that it belongs to the user. An incomplete checkpoint passes.
        """
        unexpected = set(storage.open_storage(storage.join(location.address, name)).names()) - CHECKPOINT_FILES
        if isinstance(location, storage.LocalStorage):
            path = location.path / name
            unexpected |= {"a link"} if path.is_symlink() else set() if path.is_dir() else {"no folder"}
        if unexpected:
            problem = (
                f"{storage.join(location.address, name)} is not a plain checkpoint ({', '.join(sorted(unexpected))})"
            )
            self.problems.append(f"{problem} and was kept; move your own files elsewhere, then prune again")
        return not unexpected

    def _remove(self, location: storage.Storage, name: str, dry: bool) -> None:
        """Remove a checkpoint or file unless `dry`, and add its size to the freed bytes, once it is gone.

        A checkpoint loses its seal first, so that a partly removed one never counts as complete.
        """
        freed = bytes_of(location, name)
        if not dry:
            if isinstance(location, storage.LocalStorage) and (location.path / name).is_dir():
                storage.LocalStorage(location.path / name).remove(SEAL)
            location.remove(name)
        self.bytes += freed


def is_sound(location: storage.Storage, name: str) -> bool:
    """Return True if a launch could resume from a checkpoint, False if it is damaged or missing.

    On a local disk all files are hashed. Elsewhere, where hashing would download them, only the seal (the file that is
    written last) must exist.

    Args:
        location: Storage location that contains the checkpoint.
        name: Name of the checkpoint.

    Raises:
        StorageError: The remote location cannot be reached.
    """
    if isinstance(location, storage.LocalStorage):
        try:
            read_verified_facts(location.path / name, name)
        except DamagedCheckpoint:
            return False
        return True
    return storage.open_storage(storage.join(location.address, name)).has(SEAL)


def bytes_of(location: storage.Storage, name: str) -> int:
    """Return the bytes of a checkpoint or file in a storage location; 0 for a missing local one.

    Raises:
        StorageError: The remote location cannot be reached.
    """
    if isinstance(location, storage.LocalStorage):
        return size_on_disk(location.path / name)
    assert isinstance(location, storage.RemoteStorage)
    return location.bytes_of(name)
