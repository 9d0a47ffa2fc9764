"""Weights and logs of a bundle: unpacking into the runs folder, and the undo if the import fails."""

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
"""Prefix of folders that an import fills before it commits; a leftover one may be deleted."""


class BundleFiles:
    """Moves the weights and logs of a bundle into the runs folder, and back if the import fails.

    `n_moved` counts the files that were moved. Attempts are named by their number in the bundle.
    """

    def __init__(self, bundle: Bundle, runs: Path) -> None:
        """Index the files of the bundle by attempt; nothing is unpacked and no folder is made.

        Args:
            bundle: open bundle.
            runs: runs folder to move the files to; it need not exist.
        """
        self.bundle, self.runs = bundle, runs
        self._staging: Path | None = None
        self._staged: set[str] = set()
        self._undo: list[Callable[[], object]] = []
        self.n_moved = 0
        self._files_by_attempt: dict[int, list[tuple[str, str]]] = {}
        for index, name, role in bundle.files.values():
            self._files_by_attempt.setdefault(index, []).append((name, role))

    def stage(self, indices: Iterable[int]) -> None:
        """Unpack the files of these attempts into a temporary folder inside the runs folder, and sync them.

        Skips those already unpacked and attempts without files. Creates the runs folder and the temporary folder only
        if there is a file.

        Args:
            indices: numbers of attempts in the bundle.

        Raises:
            BundleError: a file does not have the size or the hash that the manifest gives.
            OSError: a file cannot be written.
        """
        requested = set(indices)
        for member, (index, name, _) in sorted(self.bundle.files.items()):
            if index not in requested or member in self._staged:
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
        """Return the names of an attempt's files in the bundle; `role` selects `weights` or `log`."""
        return [name for name, role_of_file in self._files_by_attempt.get(index, ()) if role in (None, role_of_file)]

    def move_to_folder(self, index: int, folder: str) -> None:
        """Move all unpacked files of an attempt to `folder`, relative to the runs folder.

        Does nothing for an attempt without files. Creates missing parents, and records how to undo the move. The files
        must have been unpacked by `stage`.

        Args:
            index: number of the attempt in the bundle.
            folder: new folder, which must not exist.

        Raises:
            StoreError: the folder exists, or its parent is a symbolic link.
        """
        if self.names(index):
            target = self.runs / folder
            if os.path.lexists(target) or target.parent.is_symlink():
                raise StoreError(
                    f"{target} already exists, where the import would write; nothing was changed. Move it elsewhere"
                )
            new_folders = [path for path in reversed(target.parents) if not path.exists()]
            self._undo += [path.rmdir for path in new_folders]
            target.parent.mkdir(parents=True, exist_ok=True)
            source = self._staged_folder(index)
            # recorded first, so that an interrupt between the two loses nothing; a superfluous undo is harmless
            self._undo.append(lambda: os.rename(target, source))
            os.rename(source, target)
            self.n_moved += len(self.names(index))
            fsync_path(target.parent)

    def _staged_folder(self, index: int) -> Path:
        assert self._staging is not None
        return self._staging / str(index)

    def undo(self) -> None:
        """Move everything back into the temporary folder and remove the folders that were created.

        Errors of the file system are ignored. The files stay unpacked and can be moved again.
        """
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()
        self.n_moved = 0

    def clear(self) -> None:
        """Delete the files that were unpacked and not moved."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
