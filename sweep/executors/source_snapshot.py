"""Snapshots of this package's source in the runs folder, which attempts run; also the checkout's git commit.

An edit of the package therefore changes no attempt under way.
"""

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
SNAPSHOT_PARTS = (
    "__init__.py",
    "api.py",
    "cli.py",
    "hf.py",
    "renamed.py",
    "grids",
    "kernels",
    "model",
    "reports",
    "results",
    "sweep",
)
"""Files and folders of the package that a snapshot contains."""
FINGERPRINT_LENGTH = 12
"""Number of hex digits of a fingerprint."""
_COMPILED = re.compile(r"\.pyc(\.\d+)?$")
"""A compiled module's name, which ends with digits while an interpreter writes it."""


def _package_files(package: Path) -> Iterator[Path]:
    """Yield the absolute paths of the package's source files, in a fixed order.

    The parts follow SNAPSHOT_PARTS; files of a folder are sorted. Missing parts, bytecode and editors' leftovers (.pyc, .swp, .orig) are left out.
    """
    for part in SNAPSHOT_PARTS:
        path_of_part = package / part
        files = sorted(_files_below(path_of_part)) if path_of_part.is_dir() else [path_of_part]
        yield from (path for path in files if path.is_file() and path.suffix not in (".pyc", ".swp", ".orig"))


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, without __pycache__ folders, which may change meanwhile."""
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(top, name) for name in names)


def fingerprint(package: Path = PACKAGE) -> str:
    """Return the first 12 hex digits of the SHA-256 over names and contents of the package's files.

    Only files that a snapshot contains count: SNAPSHOT_PARTS without bytecode and editors' leftovers.
    """
    digest = hashlib.sha256()
    for path in _package_files(package):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()[:FINGERPRINT_LENGTH]


def take_snapshot(runs: Path, package: Path = PACKAGE) -> str:
    """Copy the package to `runs`/source/FINGERPRINT/atma_sweep unless it exists; return the fingerprint.

    An existing snapshot is verified, and its bytecode deleted. Safe to call from several processes at once.

    Raises:
        SweepError: The existing snapshot was changed.
        OSError: The runs folder cannot be written.
    """
    digest = fingerprint(package)
    snapshot = runs / "source" / digest
    if os.path.lexists(snapshot):
        _verify(snapshot)
        return digest
    temporary = snapshot.with_name(f"{digest}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    for path in _package_files(package):
        copy = temporary / "atma_sweep" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    try:
        temporary.rename(snapshot)
    except OSError:
        # another launch has made the same snapshot meanwhile
        if not snapshot.is_dir():
            raise
        shutil.rmtree(temporary)
        _verify(snapshot)
    return digest


def is_fingerprint(text: str) -> bool:
    """Return True if the text has the form of a fingerprint: 12 hex digits."""
    return re.fullmatch(f"[0-9a-f]{{{FINGERPRINT_LENGTH}}}", text) is not None


def is_intact(snapshot: Path) -> bool:
    """Return True if a snapshot matches the fingerprint that is its folder's name.

    False also with symbolic links or further files in it; bytecode in __pycache__ and editors' leftovers are tolerated.
    False if it does not exist.

    Args:
        snapshot: Folder `runs`/source/FINGERPRINT.
    """
    package = snapshot / "atma_sweep"
    if snapshot.is_symlink() or package.is_symlink() or not package.is_dir():
        return False
    expected = set(_package_files(package))
    for top, folders, names in os.walk(snapshot):
        is_cache = Path(top).name == "__pycache__"
        if any(Path(top, name).is_symlink() for name in (*folders, *names)):
            return False
        for name in names:
            is_leftover = name.endswith((".swp", ".orig")) or (is_cache and _COMPILED.search(name))
            if not is_leftover and Path(top, name) not in expected:
                return False
    return fingerprint(package) == snapshot.name


def _verify(snapshot: Path) -> None:
    """Check that a snapshot matches its fingerprint, and delete its bytecode, which might come from other files.

    Bytecode that cannot be deleted is ignored.

    Args:
        snapshot: Folder `runs`/source/FINGERPRINT.

    Raises:
        SweepError: The snapshot was changed.
    """
    if not is_intact(snapshot):
        raise SweepError(
            f"the code in {snapshot} does not match the fingerprint in its name; remove it, then launch again"
        )
    for top, folders, _ in os.walk(snapshot):
        if "__pycache__" in folders:
            shutil.rmtree(Path(top, "__pycache__"), ignore_errors=True)


def find_snapshot(runs: Path, digest: str) -> Path | None:
    """Return the folder of a snapshot, which a worker puts on its import path; None if it is gone.

    The snapshot is verified, and its bytecode deleted.

    Args:
        runs: Runs folder.
        digest: Fingerprint of the snapshot.

    Raises:
        SweepError: The fingerprint is malformed, or the snapshot was changed.
    """
    if not is_fingerprint(digest):
        raise SweepError(f"{digest[:40]!r} is not a code fingerprint; launch without --code")
    snapshot = runs / "source" / digest
    if not os.path.lexists(snapshot):
        return None
    _verify(snapshot)
    return snapshot


def snapshot_folder(runs: Path) -> Path:
    """Return the folder of a snapshot of the current code, made if absent."""
    return runs / "source" / take_snapshot(runs)


def schema_revision(source: Path) -> str | None:
    """Return the newest database revision that the snapshot knows, as digits such as "0009".

    It is read from the text of the snapshot's results/store/schema.py, or results/schema.py of older code; nothing is
    imported. None if neither exists, or the first of them holds no REVISIONS.

    Args:
        source: folder of the snapshot, which holds `atma_sweep`.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not text.
    """
    for relative_path in ("results/store/schema.py", "results/schema.py"):
        file = source / "atma_sweep" / relative_path
        if file.is_file():
            revisions = re.search(r"^REVISIONS = \(([^)]*)\)", file.read_text(), re.MULTILINE)
            return re.findall(r"\d+", revisions[1])[-1] if revisions else None
    return None


def takes_weights_hash(source: Path) -> bool:
    """Return True if the snapshot accepts a job.json with the hash of weights; older code rejects the key."""
    file = source / "atma_sweep" / "sweep" / "attempt" / "job.py"
    return file.is_file() and WEIGHTS_SHA256 in file.read_text()


def import_path(source: Path, existing: str | None) -> str:
    """Return a PYTHONPATH that begins with the snapshot in `source`, followed by the other parts of `existing`.

    Empty parts are dropped, and so is a repetition of `source`.
    """
    remaining_parts = [part for part in (existing or "").split(os.pathsep) if part and part != str(source)]
    return os.pathsep.join([str(source), *remaining_parts])


def git_state(root: Path = PACKAGE) -> tuple[str | None, bool | None]:
    """Return (git commit of the code, True if tracked files differ from it); untracked files do not count.

    (None, None) if `root` is not the root of a git checkout, if git is missing, fails, or takes longer than 20 seconds.

    Args:
        root: Folder that must be the root of the checkout.
    """
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
