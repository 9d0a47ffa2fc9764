"""The commit of this checkout, and copies of its source beside the artifacts: workers run these, so an edit changes nothing under way."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ...results.weights import WEIGHTS_SHA256
from ..errors import SweepError

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("__init__.py", "cli.py", "grids", "kernels", "model", "reports", "results", "sweep")
LENGTH = 12
_COMPILED = re.compile(r"\.pyc(\.\d+)?$")
"""A compiled module's name, which ends with digits while an interpreter writes it."""


def _files(package: Path) -> Iterator[Path]:
    """The package's files in a fixed order; what an interpreter or an editor leaves beside them is none of it."""
    for part in PARTS:
        found = package / part
        inside = sorted(_inside(found)) if found.is_dir() else [found]
        yield from (path for path in inside if path.is_file() and path.suffix not in (".pyc", ".swp", ".orig"))


def _inside(folder: Path) -> Iterator[Path]:
    """Every file below a folder, but for what interpreters compile, which comes and goes while one looks."""
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(top, name) for name in names)


def fingerprint(package: Path = PACKAGE) -> str:
    """First 12 hex digits of SHA-256 over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in _files(package):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()[:LENGTH]


def take_snapshot(runs: Path, package: Path = PACKAGE) -> str:
    """Copies the package to `runs`/source/<fingerprint>/atma_sweep unless it lies there already; the fingerprint."""
    known = fingerprint(package)
    home = runs / "source" / known
    if os.path.lexists(home):
        _verify(home)
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
        _verify(home)
    return known


def is_fingerprint(text: str) -> bool:
    """Whether it can be what `fingerprint` gives."""
    return re.fullmatch(f"[0-9a-f]{{{LENGTH}}}", text) is not None


def is_intact(home: Path) -> bool:
    """Whether a copy is the code that its name says, and nothing else lies in it that an import would find."""
    package = home / "atma_sweep"
    if home.is_symlink() or package.is_symlink() or not package.is_dir():
        return False
    ours = set(_files(package))
    for top, folders, names in os.walk(home):
        compiled = Path(top).name == "__pycache__"
        if any(Path(top, name).is_symlink() for name in (*folders, *names)):
            return False
        for name in names:
            left = name.endswith((".swp", ".orig")) or (compiled and _COMPILED.search(name))
            if not left and Path(top, name) not in ours:
                return False
    return fingerprint(package) == home.name


def _verify(home: Path) -> None:
    """Makes sure that what is there is the code of that name. Raises SweepError.

    What an interpreter has compiled of it goes: nobody can tell whether it was made of these files.
    """
    if not is_intact(home):
        raise SweepError(f"{home} does not hold the code that its name stands for; remove it, then launch again")
    for top, folders, _ in os.walk(home):
        if "__pycache__" in folders:
            shutil.rmtree(Path(top, "__pycache__"), ignore_errors=True)


def folder(runs: Path, known: str) -> Path | None:
    """What a worker puts on its import path to run that copy; None when it is gone. Raises SweepError when it differs."""
    if not is_fingerprint(known):
        raise SweepError(f"{known[:40]!r} is no fingerprint of code; launch without --code")
    home = runs / "source" / known
    if not os.path.lexists(home):
        return None
    _verify(home)
    return home


def snapshot_folder(runs: Path) -> Path:
    """The folder of a copy of this package as it is now, made unless it is there."""
    return runs / "source" / take_snapshot(runs)


def schema_of(source: Path) -> str | None:
    """The newest revision of the database that the copy in that folder knows; None when it does not say."""
    for place in ("results/store/schema.py", "results/schema.py"):
        file = source / "atma_sweep" / place
        if file.is_file():
            known = re.search(r"^REVISIONS = \(([^)]*)\)", file.read_text(), re.MULTILINE)
            return re.findall(r"\d+", known[1])[-1] if known else None
    return None


def takes_weights_hash(source: Path) -> bool:
    """Return whether the copy in that folder reads a job file that holds the hash of weights; older ones refuse the key."""
    file = source / "atma_sweep" / "sweep" / "attempt" / "job.py"
    return file.is_file() and WEIGHTS_SHA256 in file.read_text()


def import_path(source: Path, before: str | None) -> str:
    """PYTHONPATH of a process that runs the copy in that folder; what stood there `before` may hold everything else."""
    rest = [part for part in (before or "").split(os.pathsep) if part and part != str(source)]
    return os.pathsep.join([str(source), *rest])


def git_state(root: Path = PACKAGE) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the checkout that the code runs from; (None, None) outside one."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root:
            return None, None
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()
