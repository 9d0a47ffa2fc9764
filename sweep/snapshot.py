"""The project's own source, frozen beside the artifacts: workers run the copy, so that an edit changes nothing under way."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
PARTS = ("__init__.py", "cli.py", "grids", "kernels", "model", "reports", "results", "sweep")
LENGTH = 12


def _files(package: Path) -> Iterator[Path]:
    """The package's files in a fixed order; what an interpreter or an editor leaves beside them is none of it."""
    for part in PARTS:
        found = package / part
        inside = sorted(found.rglob("*")) if found.is_dir() else [found]
        yield from (path for path in inside if path.is_file() and path.suffix not in (".pyc", ".swp", ".orig"))


def fingerprint(package: Path = PACKAGE) -> str:
    """First 12 hex digits of SHA-256 over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in _files(package):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()[:LENGTH]


def freeze(runs: Path, package: Path = PACKAGE) -> str:
    """Copies the package to `runs`/source/<fingerprint>/atma_sweep unless it lies there already; the fingerprint."""
    known = fingerprint(package)
    home = runs / "source" / known
    if home.is_dir():
        return known
    aside = home.with_name(f"{known}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    for path in _files(package):
        copy = aside / "atma_sweep" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    try:
        aside.rename(home)
    except OSError:
        # another launch was quicker with the same copy
        if not home.is_dir():
            raise
        shutil.rmtree(aside)
    return known


def folder(runs: Path, known: str) -> Path | None:
    """What a worker puts on its import path to run that copy; None when it is gone."""
    home = runs / "source" / known
    return home if home.is_dir() else None


def frozen(runs: Path) -> Path:
    """The folder of a copy of this package as it is now, made unless it is there."""
    return runs / "source" / freeze(runs)


def import_path(source: Path, before: str | None) -> str:
    """PYTHONPATH of a process that runs the copy in that folder; what stood there `before` may hold everything else."""
    rest = [part for part in (before or "").split(os.pathsep) if part and part != str(source)]
    return os.pathsep.join([str(source), *rest])
