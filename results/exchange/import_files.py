"""Weights and logs of a bundle on their way into the runs folder, and back if the import fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ..console.output_files import fsync_path
from ..errors import StoreError
from .bundles import Bundle

STAGING = ".import-"
"""How folders begin that an import fills before it commits; one that is left over may be deleted."""


class BundleFiles:
    """Weights and logs on their way from a bundle into the runs folder, and back if the import fails."""

    def __init__(self, bundle: Bundle, runs: Path) -> None:
        self.bundle, self.runs = bundle, runs
        self._staging: Path | None = None
        self._staged: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        self.placed = 0
        self._known: dict[int, list[tuple[str, str]]] = {}
        for index, name, role in bundle.files.values():
            self._known.setdefault(index, []).append((name, role))

    def stage(self, indices: Iterable[int]) -> None:
        """Unpacks the files of those attempts beside the others, synced, not yet in their place."""
        wanted = set(indices)
        for member, (index, name, _) in sorted(self.bundle.files.items()):
            if index not in wanted or member in self._staged:
                continue
            if self._staging is None:
                self.runs.mkdir(parents=True, exist_ok=True)
                self._staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.runs))
            target = self._staging / str(index) / name
            target.parent.mkdir(exist_ok=True)
            with target.open("xb") as stream:
                for data in self.bundle.chunks(member):
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            fsync_path(target.parent)
            self._staged.add(member)

    def names(self, index: int, role: str | None = None) -> list[str]:
        """The file names that the bundle has for an attempt."""
        return [name for name, what in self._known.get(index, ()) if role in (None, what)]

    def place(self, index: int, folder: str) -> None:
        """Moves all files of an attempt into a folder that nobody has made. Raises StoreError when somebody has."""
        if self.names(index):
            target = self.runs / folder
            if os.path.lexists(target) or target.parent.is_symlink():
                raise StoreError(f"{target} is in the way of the import; nothing was changed. Move it away")
            made = [path for path in reversed(target.parents) if not path.exists()]
            self._undo += [path.rmdir for path in made]
            target.parent.mkdir(parents=True, exist_ok=True)
            source = self._of(index)
            # first noted, so that an interrupt between the two loses nothing; undoing what was not done is harmless
            self._undo.append(lambda: os.rename(target, source))
            os.rename(source, target)
            self.placed += len(self.names(index))
            fsync_path(target.parent)

    def _of(self, index: int) -> Path:
        assert self._staging is not None
        return self._staging / str(index)

    def undo(self) -> None:
        """Takes back everything that was moved."""
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()
        self.placed = 0

    def clear(self) -> None:
        """Removes what was unpacked and not moved."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
