"""Host-wide locks that reserve a GPU for one sweep, and folders that only this user can enter."""

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

SOCKET_BACKLOG = 1024
"""Number of processes that may query the holder of a GPU while it is locked."""
HOLDER_BYTES = 24
"""Fixed width of the text that names a lock's holder, so that a shorter text overwrites a longer one."""


def open_private_folder(path: Path, variable: str = "TMPDIR") -> int:
    """Open a folder that only this user can enter, created if absent with its parents.

    Return its file descriptor, which the caller closes.

    Args:
        path: Folder.
        variable: Environment variable that determines `path`, for messages.

    Raises:
        MachineError: The path cannot be created, is a symbolic link or no folder, belongs to another user, or is
            accessible to others.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be used: {error.strerror}; have its owner remove it, or set {variable} to another folder"
        ) from error
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise MachineError(
            f"{path} is not private to this user (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}); "
            f"have it removed, or set {variable} to another folder"
        )
    return descriptor


class GpuLocks:
    """GPU locks of one sweep, across all databases and users of this host, for as long as the process lives.

    Each GPU has a locked file in this user's private folder. On Linux it also has an abstract socket, whose name all
    users share and no user can occupy in advance by a file.
    """

    def __init__(self, base: Path | None = None) -> None:
        """Prepare to lock GPUs; nothing is locked yet.

        Args:
            base: Folder that contains the user's private folder, and that identifies the group of mutually visible
                holders; None for the temporary folder.
        """
        self._base = base or Path(tempfile.gettempdir())
        self._handles: list[int | socket.socket] = []
        """Open files and sockets that hold the locks."""

    @property
    def folder(self) -> Path:
        """Private folder of this user with the lock files."""
        return self._base / f"atma-sweep-gpus-{os.getuid()}"

    def acquire(self, gpus: list[Gpu], at_least: int = 1) -> list[Gpu]:
        """Lock the free ones of these GPUs and return them, in order; does not wait for the others.

        Processes of one user do this one after the other, so that two launches never hold half of the GPUs each while
        both need all of them. Nobody waits for a GPU that is in use, so there is no deadlock.

        Args:
            gpus: GPUs to lock.
            at_least: Number of GPUs below which nothing is locked.

        Raises:
            MachineError: Fewer than `at_least` of them are free (the message names the holders), the list is empty, or
                lock files cannot be created here. None of these GPUs is locked then.
        """
        folder = open_private_folder(self.folder)
        locked, holders, n_held = [], [], len(self._handles)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # released when the folder is closed below
            for gpu in gpus:
                holder = self._try_lock(folder, gpu)
                if holder is None:
                    locked.append(gpu)
                else:
                    holders.append(holder)
        except OSError as error:
            self._release_after(n_held)
            raise MachineError(
                f"GPUs cannot be locked in {self.folder}: {error.strerror}; remove this folder"
            ) from error
        finally:
            os.close(folder)
        if len(locked) < max(at_least, 1):
            self._release_after(n_held)
            in_use = f"in use by another sweep ({', '.join(sorted(set(holders)))}); wait for it or stop it"
            if at_least > 1 and len(gpus) >= at_least:
                raise MachineError(
                    f"a cell needs {at_least} GPUs at once, and {len(holders)} of {len(gpus)} are {in_use}"
                )
            raise MachineError(f"every GPU is {in_use}")
        return locked

    def _try_lock(self, folder: int, gpu: Gpu) -> str | None:
        """Lock one GPU without waiting; return None on success, else a description of the holder.

        On success the open file and socket are added to `_handles`, and the file names this process.

        Args:
            folder: Descriptor of the private folder.
            gpu: GPU to lock.

        Raises:
            OSError: The lock file cannot be created or written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{gpu.uuid}.lock", flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder_text = os.pread(file, HOLDER_BYTES, 0).decode(errors="replace").strip()
            os.close(file)
            return holder_text or "an unknown process"
        name_socket = self._bind_name(gpu.uuid)
        if name_socket is None:
            os.close(file)
            pid = self.holder_pid(gpu.uuid)
            return f"pid {pid}" if pid else "a process of another user"
        os.pwrite(file, f"pid {os.getpid()}".ljust(HOLDER_BYTES).encode(), 0)
        self._handles += [file, name_socket]
        return None

    def _bind_name(self, uuid: str) -> socket.socket | None:
        """Return a listening socket bound to the GPU's abstract name; None if another process has it.

        Where abstract names do not exist (not Linux), an unbound socket is returned.
        """
        name_socket = socket.socket(socket.AF_UNIX)
        if sys.platform == "linux":
            try:
                name_socket.bind(self._socket_name(uuid))
                name_socket.listen(SOCKET_BACKLOG)
            except OSError:
                name_socket.close()
                return None
        return name_socket

    def holder_pid(self, uuid: str) -> int | None:
        """Return the pid of the process of any user that holds the GPU, according to the kernel; None if it is free.

        Acquires no lock. Always None on systems other than Linux. Only holders with the same base folder are seen.

        Args:
            uuid: UUID of the GPU, with or without the prefix "GPU-".
        """
        if sys.platform != "linux":
            return None
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(0)
            try:
                client.connect(self._socket_name(uuid))
                credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                return None
        return int(struct.unpack("3i", credentials)[0])

    def _socket_name(self, uuid: str) -> str:
        key = f"{self._base}:{uuid.removeprefix('GPU-').lower()}"
        return f"\0atma-sweep-gpu-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def release(self) -> None:
        """Release all locks; without any it does nothing. Lock files stay."""
        self._release_after(0)

    def _release_after(self, n_held: int) -> None:
        """Release all locks but the first `n_held` handles."""
        for handle in self._handles[n_held:]:
            handle.close() if isinstance(handle, socket.socket) else os.close(handle)
        del self._handles[n_held:]
