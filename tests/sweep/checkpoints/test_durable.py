"""Durability over a power cut: nothing is removed before the database that replaces it is synced to the disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attempts import Room
from patience import PATIENCE_S, until

CALLS = "pwrite64,write,pwritev,fsync,fdatasync,unlink,unlinkat,rename,renameat,renameat2"
LOG = re.compile(r"\.db(-wal)?>")
"""A file of the database, as strace -y writes it beside the descriptor."""
CHECKPOINT = re.compile(r"checkpoint-\d{8}")


def calls(trace: Path) -> list[tuple[str, str]]:
    """Return (name, arguments) of every system call in the order of return.

    Calls split by another thread are joined.
    """
    until(lambda: trace.exists() and "+++ exited with" in trace.read_text(), "the end of the trace", pause=0.05)
    calls: list[tuple[str, str]] = []
    open_: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        pid, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            open_[pid] = text.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>", text)
        if resumed:
            text = open_.pop(pid, "") + text[resumed.end() :]
        call = re.match(r"(\w+)\((.*)", text)
        if call:
            calls.append((call[1], call[2]))
    return calls


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: apt-get install strace")
def test_database_is_synced_before_checkpoint_removal(room: Callable[..., Room], tmp_path: Path) -> None:
    """The second attempt of a cell resumes from the first one's checkpoint, and outlives all of them."""
    ours = room()
    ours.run(stop=11)
    trace = tmp_path / "trace"
    strace = ("strace", "-D", "-f", "-y", "-s", "0", "-o", str(trace), "-e", f"trace={CALLS}")
    job = ours.job("train", ours.settings(), None)
    attempt = ours.start(job, *strace)
    out, _ = attempt.communicate(timeout=PATIENCE_S)
    if attempt.returncode and "ptrace" in out:
        pytest.skip(f"needs strace that may trace: {out.splitlines()[0]}")
    assert attempt.returncode == 0, out
    assert ours.store.attempt(job.attempt).state == "done"

    unsynced, gone, commits, syncs = False, [], 0, 0
    for name, arguments in calls(trace):
        if name in ("pwrite64", "write", "pwritev") and LOG.search(arguments):
            unsynced, commits = True, commits + 1
        elif name in ("fsync", "fdatasync") and LOG.search(arguments):
            unsynced, syncs = False, syncs + 1
        elif name.startswith("unlink") and CHECKPOINT.search(arguments) and ".part" not in arguments:
            assert not unsynced, f"{name}({arguments} before the database was synced"
            gone.append(arguments)
    removed = {CHECKPOINT.findall(arguments)[0] for arguments in gone}
    # both of the first attempt's, and all of the second's: in its own folder, one after another, and at its end
    assert removed == {f"checkpoint-{step:08}" for step in (2, 3, 4, 6, 8, 10, 12)}
    assert not list(ours.runs.rglob("checkpoint-*"))
    assert syncs < commits, "only what has to wait does"
