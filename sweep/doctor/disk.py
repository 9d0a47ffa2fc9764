"""Looks at the room, the inodes and the file systems."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil

from ...results.console.text import counted
from ...results.store.database import NETWORK_FILESYSTEMS
from ..checkpoints import storage
from ..units import size
from .context import Check, Context, LookFailed, absent, bad, ok, warn

SPARE_INODES = 10_000
SLOW_S = 5.0
"""A megabyte that takes longer to write means that checkpoints stop the training for minutes."""


def nearest_folder(path: Path) -> Path:
    """The path, or the folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def look_at_space(context: Context) -> Check:
    here = f"{size(storage.free_bytes(str(context.runs)) or 0)} free in {context.runs}"
    try:
        needed = context.disk()
    except LookFailed as error:
        return warn(f"{here}; what the sweep needs is unknown: {error}")
    if needed is None:
        return ok(f"{here}; no sweep to count for")
    if not needed["cells"]:
        return ok(f"{here}; {needed['sweep']} needs no more")
    at_once = max(1, len(context.gpus()))
    running, kept, free = needed["disk_bytes_running"] * at_once, needed["disk_bytes_kept"], needed["disk_bytes_free"]
    want = (
        f"{needed['sweep']} has {counted(needed['cells'], 'cell')} to train: {size(kept)} to keep, "
        f"{size(running)} while {at_once} train{'s' if at_once == 1 else ''}"
    )
    if free is None:
        return ok(f"{want}, in {needed['place']}")
    found = f"{size(free)} free in {needed['place']}; {want}"
    if free >= running + kept:
        return ok(found)
    remedy = "make room (atma-sweep prune-checkpoints), set checkpoint.keep to nothing, or name another checkpoint.path"
    return bad(found, remedy) if free < running else warn(found, remedy)


def look_at_inodes(context: Context) -> Check:
    there = os.statvfs(nearest_folder(context.runs))
    if not there.f_files:
        return ok("this file system does not count them")
    found = f"{there.f_favail:,} of {there.f_files:,} free"
    if there.f_favail >= SPARE_INODES:
        return ok(found)
    remedy = f"remove small files from the disk of {context.runs}"
    return warn(found, remedy) if there.f_favail else bad(found, remedy)


def look_at_writing(context: Context) -> Check:
    folder, began = nearest_folder(context.runs), time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".atma-doctor-") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        said = error.strerror or str(error)
        return bad(f"{folder}: {said}", "make it writable, or name another folder with --runs")
    seconds = time.monotonic() - began
    found = f"1 MiB written and synced in {1000 * seconds:.0f} ms in {folder}"
    return (
        ok(found) if seconds <= SLOW_S else warn(found, "this disk is too slow or too busy; name another with --runs")
    )


def filesystem(path: Path) -> str:
    """Type of the file system that a path, which need not exist yet, lies on; "" when the system does not say."""
    path, best, found = path.resolve(), -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        # of equal mounts the last covers the others
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), mount.fstype
    return found


def look_at_filesystem_of_database(context: Context) -> Check:
    if context.file is None:
        return absent("the database is on a server")
    kind = filesystem(context.file)
    if kind in NETWORK_FILESYSTEMS:
        return bad(f"{context.file} lies on {kind}, where SQLite corrupts", "use a local disk or PostgreSQL (--db)")
    return _lasting(context.file, kind)


def look_at_filesystem_of_runs(context: Context) -> Check:
    kind = filesystem(context.runs)
    if kind in NETWORK_FILESYSTEMS:
        return ok(f"{context.runs} lies on {kind}, over the network: checkpoints may, a SQLite database may not")
    return _lasting(context.runs, kind)


def _lasting(path: Path, kind: str) -> Check:
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{path} lies on {kind}, in memory", "it is gone after a reboot; name a disk")
    return ok(f"{path} lies on {kind or 'a file system of unknown type'}")
