"""GPU locks: a GPU belongs to one sweep of any user, and no file of another user is touched."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.host.hardware import Gpu
from atma_sweep.sweep.host.locks import GpuLocks
from factories import line_of, script
from patience import PATIENCE_S

GPUS = [Gpu("0", "GPU-aaaa", "first"), Gpu("1", "GPU-bbbb", "second")]


HOLDER = """
import sys, time
from pathlib import Path
from atma_sweep.sweep.host.locks import GpuLocks
from atma_sweep.sweep.host.hardware import Gpu
locks = GpuLocks(Path(sys.argv[1]))
print(len(locks.acquire([Gpu("0", "GPU-aaaa", "first")])), flush=True)
time.sleep(600)
"""


def test_gpu_lock_is_exclusive_until_its_process_dies(tmp_path: Path) -> None:
    holder = script(HOLDER, str(tmp_path))
    assert line_of(holder) == "1"
    locks = GpuLocks(tmp_path)
    with pytest.raises(MachineError, match=f"in use by another sweep .pid {holder.pid}."):
        locks.acquire(GPUS[:1])
    assert locks.acquire(GPUS) == GPUS[1:]
    holder.kill()
    holder.wait()
    assert GpuLocks(tmp_path).acquire(GPUS[:1]) == GPUS[:1]
    locks.release()
    assert GpuLocks(tmp_path).acquire(GPUS[1:]) == GPUS[1:]


SECOND_USER = """
import os, sys
from pathlib import Path
from atma_sweep.sweep.host.locks import GpuLocks
from atma_sweep.sweep.host.hardware import Gpu
os.setgroups([]); os.setgid(65534); os.setuid(65534)
locks = GpuLocks(Path(sys.argv[1]))
try:
    locks.acquire([Gpu("0", "GPU-aaaa", "first")])
except Exception as error:
    print(error, flush=True)
print(len(locks.acquire([Gpu("0", "GPU-aaaa", "first"), Gpu("1", "GPU-bbbb", "second")])), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: sockets with names but no files")
def test_users_of_a_host_share_locks_but_no_file() -> None:
    """In /tmp, since another user cannot enter pytest's folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        base = Path(outer)
        base.chmod(0o1777)
        locks = GpuLocks(base)
        assert locks.acquire(GPUS[:1]) == GPUS[:1]
        assert locks.holder_pid("aaaa") == os.getpid()
        second_user = script(SECOND_USER, outer)
        assert f"in use by another sweep (pid {os.getpid()})" in line_of(second_user)
        assert line_of(second_user) == "1"
        assert locks.holder_pid("GPU-bbbb") == second_user.pid, "whoever's process it is"
        second_user.stdin.close()  # type: ignore[union-attr]
        assert second_user.wait(PATIENCE_S) == 0
        assert locks.holder_pid("GPU-bbbb") is None
        locks.release()
        assert locks.acquire(GPUS) == GPUS
        locks.release()
        owners = {path.stat().st_uid: path.stat().st_mode & 0o777 for path in base.iterdir()}
        assert owners == {0: 0o700, 65534: 0o700}


def own(base: Path) -> Path:
    return base / f"atma-sweep-gpus-{os.getuid()}"


def test_planted_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    own(tmp_path).symlink_to(precious)
    with pytest.raises(MachineError, match=r"cannot be used: .*; have its owner remove it"):
        GpuLocks(tmp_path).acquire(GPUS)
    assert list(precious.iterdir()) == []
    own(tmp_path).unlink()
    own(tmp_path).mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("mine")
    (own(tmp_path) / "GPU-aaaa.lock").symlink_to(target)
    with pytest.raises(MachineError, match="GPUs cannot be locked in"):
        GpuLocks(tmp_path).acquire(GPUS)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(("owner", "mode"), [
    (os.getuid(), 0o777), (os.getuid(), 0o750),
    pytest.param(65534, 0o700, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")),
])  # fmt: skip
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, owner: int, mode: int) -> None:
    own(tmp_path).mkdir()
    own(tmp_path).chmod(mode)
    os.chown(own(tmp_path), owner, -1)
    with pytest.raises(MachineError, match=rf"is not private to this user .owner {owner}, mode {mode:04o}."):
        GpuLocks(tmp_path).acquire(GPUS)


def test_lock_file_names_only_the_current_holder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        locks = GpuLocks(tmp_path)
        locks.acquire(GPUS[:1])
    finally:
        os.umask(before)
    file = own(tmp_path) / "GPU-aaaa.lock"
    assert (own(tmp_path).stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    locks.release()
    file.write_text("pid 99999999999999")
    locks.acquire(GPUS[:1])
    assert file.read_text().split() == ["pid", str(os.getpid())]
    locks.release()
