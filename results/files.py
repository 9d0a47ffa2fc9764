"""Files that take their place whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import StoreError


@contextlib.contextmanager
def replacing(to: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole. Raises StoreError when it cannot be written."""
    if to.is_dir():
        raise StoreError(f"{to} is a folder; name a file with --out")
    if not to.parent.is_dir():
        raise StoreError(f"there is no folder {to.parent}; make it, or name another place with --out")
    aside = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, to)
        sync(to.parent)
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error.strerror or error}; make room or name another place") from error
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def filling(to: Path) -> Iterator[Path]:
    """A new folder that gets its name when it is whole. Raises StoreError where something is already, or on no space."""
    if os.path.lexists(to):
        raise StoreError(f"{to} exists already; name a new folder with --out")
    aside = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        yield aside
        os.rename(aside, to)
        sync(to.parent)
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error.strerror or error}; make room or name another place") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
