"""Folders that are this user's alone below the temporary one, and the host-wide lock that keeps a GPU with one sweep."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

from ..errors import MachineError
from .hardware import Gpu

WAITING = 1024
"""Processes that may ask who holds a GPU while it is held."""
WIDTH = 24
"""Bytes of the line that says who holds a lock, so that a shorter one covers a longer one."""


def open_private_folder(path: Path, variable: str = "TMPDIR") -> int:
    """Opens a folder that nobody but this user can enter, made if there is none; a file descriptor.

    `variable`: which one of the environment says where it is. Raises MachineError for a link, for somebody else's and for one that others may enter.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be used: {error.strerror}; have its owner remove it, or set {variable} to another folder"
        ) from error
    seen = os.fstat(opened)
    if seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        os.close(opened)
        raise MachineError(
            f"{path} is not this user's alone (owner {seen.st_uid}, mode {stat.S_IMODE(seen.st_mode):04o}); "
            f"have it removed, or set {variable} to another folder"
        )
    return opened


class GpuLocks:
    """Holds GPUs for one sweep, across databases and users of this host, as long as the process lives.

    For each a lock on a file in this user's own folder, and on Linux a socket of a name without a file, which users share
    and none can plant.
    """

    def __init__(self, base: Path | None = None) -> None:
        """`base`: where the user's folder is made, and what holders who are to know of each other have in common."""
        self._base = base or Path(tempfile.gettempdir())
        self._held: list[int | socket.socket] = []

    @property
    def folder(self) -> Path:
        """This user's own."""
        return self._base / f"atma-sweep-gpus-{os.getuid()}"

    def take(self, wanted: list[Gpu]) -> list[Gpu]:
        """Locks those that are free.

        Raises MachineError naming who holds them when none is, or when this user may not lock here.
        """
        folder = open_private_folder(self.folder)
        taken, holders = [], []
        try:
            for gpu in wanted:
                holder = self._take(folder, gpu)
                if holder is None:
                    taken.append(gpu)
                else:
                    holders.append(holder)
        except OSError as error:
            self.release()
            raise MachineError(f"GPUs cannot be locked in {self.folder}: {error.strerror}; remove it") from error
        finally:
            os.close(folder)
        if not taken:
            raise MachineError(
                f"every GPU is held by another sweep ({', '.join(sorted(set(holders)))}); wait for it or stop it"
            )
        return taken

    def _take(self, folder: int, gpu: Gpu) -> str | None:
        """Locks one; who holds it, if somebody does."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{gpu.uuid}.lock", flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(file, WIDTH, 0).decode(errors="replace").strip()
            os.close(file)
            return said or "an unknown process"
        claim = self._claim(gpu.uuid)
        if claim is None:
            os.close(file)
            pid = self.holder(gpu.uuid)
            return f"pid {pid}" if pid else "a process of another user"
        os.pwrite(file, f"pid {os.getpid()}".ljust(WIDTH).encode(), 0)
        self._held += [file, claim]
        return None

    def _claim(self, uuid: str) -> socket.socket | None:
        """The GPU's name among all users; None when somebody has it. Where names without files do not exist, any socket."""
        claim = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":
            try:
                claim.bind(self._name(uuid))
                claim.listen(WAITING)
            except OSError:
                claim.close()
                return None
        return claim

    def holder(self, uuid: str) -> int | None:
        """The process that holds that GPU, as the kernel says, whoever's it is; None when nobody does. Takes no lock."""
        if sys.platform != "linux":
            return None
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(0)
            try:
                asking.connect(self._name(uuid))
                said = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                return None
        return int(struct.unpack("3i", said)[0])

    def _name(self, uuid: str) -> str:
        key = f"{self._base}:{uuid.removeprefix('GPU-').lower()}"
        return f"\0atma-sweep-gpu-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def release(self) -> None:
        """Gives every GPU back."""
        for held in self._held:
            held.close() if isinstance(held, socket.socket) else os.close(held)
        self._held.clear()
