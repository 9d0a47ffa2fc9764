"""Weights and logs of a bundle on their way into the runs folder, and back if the import fails."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .bundles import Bundle
from .files import sync

STAGING = ".import-"
"""How folders begin that an import fills before it commits; one that is left over may be deleted."""


class Files:
    """Weights and logs on their way from a bundle into the runs folder, and back if the import fails."""

    def __init__(self, bundle: Bundle, runs: Path) -> None:
        self.bundle, self.runs = bundle, runs
        self._staging: Path | None = None
        self._staged: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        self.placed = 0

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
            sync(target.parent)
            self._staged.add(member)

    def names(self, index: int, role: str | None = None) -> list[str]:
        """The file names that the bundle has for an attempt."""
        return [name for at, name, what in self.bundle.files.values() if at == index and role in (None, what)]

    def place(self, index: int, folder: str) -> None:
        """Moves all files of a new attempt into its folder, which must not exist."""
        if self.names(index):
            target = self.runs / folder
            made = [path for path in reversed(target.parents) if not path.exists()]
            self._undo += [path.rmdir for path in made]
            target.parent.mkdir(parents=True, exist_ok=True)
            source = self._of(index)
            # first noted, so that an interrupt between the two loses nothing; undoing what was not done is harmless
            self._undo.append(lambda: os.rename(target, source))
            os.rename(source, target)
            self.placed += len(self.names(index))
            sync(target.parent)

    def adopt(self, index: int, folder: str, name: str) -> bool:
        """Moves the weights of a known attempt into its folder. False when another file of that name is there."""
        target, source = self.runs / folder / name, self._of(index) / name
        if target.exists():
            return _hash(target) == self.bundle.manifest["members"][f"files/{index}/{name}"]["sha256"]
        target.parent.mkdir(parents=True, exist_ok=True)
        self._undo.append(lambda: os.rename(target, source))
        os.rename(source, target)
        self.placed += 1
        sync(target.parent)
        return True

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


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
