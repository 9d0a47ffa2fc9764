"""Checks of disk space, inodes, write speed and file system types."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil

from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.store.database import NETWORK_FILESYSTEMS
from ..checkpoints import storage
from .context import Check, Context, LookFailed, absent, bad, ok, warn

MIN_FREE_INODES = 10_000
"""Number of free inodes below which the check warns."""
SLOW_S = 5.0
"""Seconds for writing one MiB above which the check warns: checkpoints would stop the training for minutes."""


def nearest_folder(path: Path) -> Path:
    """Return the path, or its nearest parent that exists; a file counts as existing."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_space(context: Context) -> Check:
    """Check that the disk has room for the checkpoints and weights of the default sweep's untrained cells.

    As many cells run at once as the driver lists GPUs, and at least one. Bad if the checkpoints of these do not fit. A
    warning if the weights to keep do not fit as well, or if the need is unknown. Ok without a sweep, if nothing is left
    to train, or if the free space is unknown.
    """
    free_text = f"{format_bytes(storage.free_bytes(str(context.runs)) or 0)} free in {context.runs}"
    try:
        needs = context.disk_needs()
    except LookFailed as error:
        return warn(f"{free_text}; what the sweep needs is unknown: {error}")
    if needs is None:
        return ok(f"{free_text}; no sweep to estimate needs from")
    if not needs["cells"]:
        return ok(f"{free_text}; {needs['sweep']} needs no further space")
    n_concurrent = max(1, len(context.listed_gpus()))
    running, retained, free = (
        needs["disk_bytes_running"] * n_concurrent,
        needs["disk_bytes_kept"],
        needs["disk_bytes_free"],
    )
    need_text = (
        f"{needs['sweep']} has {counted(needs['cells'], 'cell')} to train: {format_bytes(retained)} to keep, "
        f"{format_bytes(running)} for {n_concurrent} running at once"
    )
    if free is None:
        return ok(f"{need_text}, in {needs['place']}")
    finding = f"{format_bytes(free)} free in {needs['place']}; {need_text}"
    if free >= running + retained:
        return ok(finding)
    remedy = (
        "free disk space (atma-sweep prune-checkpoints), set checkpoint.keep: nothing, or name another checkpoint.path"
    )
    return bad(finding, remedy) if free < running else warn(finding, remedy)


def check_inodes(context: Context) -> Check:
    """Check that the file system of the runs folder has free inodes.

    A warning below 10,000 (MIN_FREE_INODES), bad without any. Ok if the file system does not count them.
    """
    statistics = os.statvfs(nearest_folder(context.runs))
    if not statistics.f_files:
        return ok("this file system does not report inodes")
    finding = f"{statistics.f_favail:,} of {statistics.f_files:,} free"
    if statistics.f_favail >= MIN_FREE_INODES:
        return ok(finding)
    remedy = f"remove small files from the disk of {context.runs}"
    return warn(finding, remedy) if statistics.f_favail else bad(finding, remedy)


def check_writing(context: Context) -> Check:
    """Check that one MiB can be written and synced in the runs folder, and measure the time. The file is removed.

    If the folder does not exist, its nearest existing parent is used. Bad if writing fails, a warning if it takes
    longer than 5 s (SLOW_S).
    """
    folder, began = nearest_folder(context.runs), time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".atma-doctor-") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        return bad(f"{folder}: {reason}", "make it writable, or name another folder with --runs")
    seconds = time.monotonic() - began
    finding = f"1 MiB written and synced in {1000 * seconds:.0f} ms in {folder}"
    return (
        ok(finding)
        if seconds <= SLOW_S
        else warn(finding, "this disk is too slow or too busy; name another with --runs")
    )


def filesystem(path: Path) -> str:
    """Return the type of the file system that a path lies on, such as "ext4"; "" if unknown.

    The path need not exist yet; symbolic links are followed.
    """
    path, best, fstype = path.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        # the last mount of a path hides earlier ones
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, fstype = len(point.parts), mount.fstype
    return fstype


def check_filesystem_of_database(context: Context) -> Check:
    """Check that a SQLite database lies neither on a network file system (bad) nor in memory (a warning).

    Absent for a database server. The file need not exist yet.
    """
    if context.database_file is None:
        return absent("the database is on a server")
    kind = filesystem(context.database_file)
    if kind in NETWORK_FILESYSTEMS:
        return bad(
            f"{context.database_file} is on {kind}, where SQLite databases become corrupt",
            "use a local disk or PostgreSQL (--db)",
        )
    return _check_persistence(context.database_file, kind)


def check_filesystem_of_runs(context: Context) -> Check:
    """Check that the runs folder does not lie in memory (a warning); a network file system is ok.

    The folder need not exist yet.
    """
    kind = filesystem(context.runs)
    if kind in NETWORK_FILESYSTEMS:
        return ok(
            f"{context.runs} is on {kind}, a network file system: suitable for checkpoints, not for a SQLite database"
        )
    return _check_persistence(context.runs, kind)


def _check_persistence(path: Path, kind: str) -> Check:
    """Return a warning if the path lies on a file system in memory, else a passing check with the type."""
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{path} is on {kind}, in memory", "a reboot deletes it; choose a folder on a disk")
    return ok(f"{path} is on {kind or 'a file system of unknown type'}")
