"""Operating-system processes: identity, liveness, start and termination."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from ...results.store.records import Owner, current_pid_space, find_process, is_local_pid

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
ECHO_S = 2.0
"""Seconds within which a repeated stop signal counts as the first one. A batch system signals every process of a job at
once, and each of them passes the signal on.
"""


def this_process(name: str) -> Owner:
    """Return the running process as an owner of sweeps and attempts, with `name` as its role."""
    me = psutil.Process()
    return Owner(name=name, host=socket.gethostname(), pid=me.pid, started=me.create_time(), space=current_pid_space())


def is_alive(owner: Owner) -> bool | None:
    """Return True if an owner still runs, False if it is gone, a zombie, or another process with its pid.

    None if it is on another host or in another PID namespace, where that is unknown.
    """
    if not is_local_pid(owner.host, owner.space):
        return None
    return find_process(owner.pid, owner.started) is not None


def is_holder_active(owner: Owner, lease_until: datetime | None) -> bool:
    """Return True if an owner still holds its claim.

    That is so while its process lives, even after the end of its lease. Where that is unknown, because it is on another
    host, it is so until its lease ends.

    Args:
        owner: Process that made the claim.
        lease_until: End of its lease, with a time zone; None if it has none.
    """
    alive = is_alive(owner)
    leased = lease_until is not None and lease_until > datetime.now(UTC)
    return leased if alive is None else alive


def own_and_ancestor_pids() -> set[int]:
    """Return the pids of this process and of its ancestors.

    If the ancestors cannot be listed, only the parent is among them.
    """
    me = psutil.Process()
    with contextlib.suppress(psutil.Error):
        return {me.pid, *(parent.pid for parent in me.parents())}
    return {me.pid, os.getppid()}


def terminate_all(processes: Sequence[psutil.Process], grace_s: float = GRACE_S) -> None:
    """Terminate processes, their children, and the groups that they lead: SIGTERM, then SIGKILL.

    SIGTERM goes to the given processes alone; their children and groups get SIGKILL once those are gone or the grace
    period is over. Returns when all are gone, or after twice that period at the latest. This process and its ancestors
    are spared, even if they are among the processes to terminate.

    Args:
        processes: Processes to terminate; those that are gone are ignored.
        grace_s: Seconds between SIGTERM and SIGKILL, by default 10.
    """
    protected = own_and_ancestor_pids()
    targets = [process for process in processes if process.pid not in protected]
    family, groups = list(targets), set()
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            family += process.children(recursive=True)
            groups |= {os.getpgid(process.pid)} & {process.pid} - {os.getpid()}
            process.terminate()
    psutil.wait_procs(targets, timeout=grace_s)
    for group in groups:
        kill_group(group)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=grace_s)


def start_child(
    command: Sequence[str], env: Mapping[str, str], folder: Path, *, own_group: bool = False
) -> subprocess.Popen[bytes]:
    """Start a child process in `folder` and return it; its output and errors are appended to `folder`/log.txt.

    Its standard input is empty.

    Args:
        command: Command line.
        env: Entire environment of the child.
        folder: Working folder; must exist.
        own_group: True for a process group of its own, so that a terminal's Ctrl-C reaches neither it nor its
            compilers.
    """
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            list(command), env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            process_group=0 if own_group else None,
        )  # fmt: skip


def start_piped_child(command: Sequence[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a child process with a pipe as standard input, in a group of its own, and return it.

    Its output and errors are discarded. The caller writes to, and closes, its `stdin`.

    Args:
        command: Command line.
        env: Entire environment of the child.
        folder: Working folder; must exist.
    """
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        list(command), env=dict(env), cwd=folder, stdin=pipe, stdout=nowhere, stderr=nowhere, process_group=0
    )


def kill_group(group: int) -> None:
    """Send SIGKILL to every process of a process group except this one; errors are ignored, and nothing is awaited.

    Args:
        group: Id of the process group.
    """
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)


def has_pending(pid: int, signal_number: int) -> bool:
    """Return True if a signal was sent to a process that has not received it yet.

    False if it has, if the process is gone, and always without /proc. Signals pending for its first thread and for the
    whole process count.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal_number - 1) & 1 for mask in masks)


def exit_with_parent(parent: int) -> None:
    """Arrange for SIGTERM to this process when its parent dies; send it now if the parent is already dead.

    On Linux the kernel sends it to this process when the parent's thread that started it ends; elsewhere a thread polls
    every half second. Children of this process do not inherit the arrangement.

    Args:
        parent: Pid of the expected parent; any other parent counts as its death.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
    elif sys.platform != "linux":
        threading.Thread(target=_terminate_after_parent, args=(parent,), daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Arrange for SIGKILL to this process when its parent dies; exit now if the parent is already dead.

    Works as `exit_with_parent`, for a process that has nothing to save and may be blocked in native code.

    Args:
        parent: Pid of the expected parent; any other parent counts as its death.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_kill_after_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_family(pid: int) -> None:
    """Kill a process and its descendants with SIGKILL, without waiting for them; a process that is gone is ignored."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _terminate_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
