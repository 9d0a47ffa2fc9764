"""What this machine has: cores, GPUs, and the host-wide lock that keeps a GPU with one sweep."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from .errors import MachineError

_ASK = """
import json, torch
try:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
except (RuntimeError, AssertionError) as error:
    print(json.dumps({"error": str(error).splitlines()[0]}))
else:
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    print(json.dumps({"gpus": [[str(p.uuid), p.name] for p in names]}))
"""


def cores() -> int:
    """CPU cores that this process may use; under a Slurm that binds nobody to cores, those that the job asked for."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(found, int(asked)) if asked.isdecimal() and int(asked) else found


def memory_gb() -> float:
    """Memory of this machine in GiB, or what its control group allows where that is less."""
    found = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" is no number and no limit
    return found / 2**30


def reset_peak_resident() -> bool:
    """Lets `peak_resident` start anew for this process. False where the system cannot: only Linux can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident() -> int | None:
    """Most memory, bytes, that this process held at once since its start or `reset_peak_resident`.

    All of it: interpreter, libraries and mapped files that were read too. None where the system does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that torch can use."""

    device: str
    """What CUDA_VISIBLE_DEVICES calls it."""
    uuid: str
    name: str


def no_gpu(cause: str) -> MachineError:
    """The error that ends what was asked to run on CUDA and cannot."""
    return MachineError(f"no usable CUDA GPU: {cause}; set resources.gpus to 0 to run on the CPU")


def gpus() -> list[Gpu]:
    """The usable CUDA devices, asked for in a process of its own, so that the caller holds no GPU memory.

    Raises MachineError with the cause (no driver, driver too old, build without CUDA) when there is none.
    """
    answer = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=300)
    lines = answer.stdout.strip().splitlines()
    try:
        facts = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        facts = {}
    if "gpus" not in facts:
        cause = facts.get("error") or (answer.stderr.strip().splitlines() or ["torch could not be started"])[-1]
        raise no_gpu(cause)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible if len(visible) == len(facts["gpus"]) else [str(index) for index in range(len(facts["gpus"]))]
    return [Gpu(device, uuid, name) for device, (uuid, name) in zip(names, facts["gpus"], strict=True)]


class GpuLocks:
    """Holds GPUs for one sweep, across databases and users of this host, as long as the process lives."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / "atma-sweep-gpus"
        self._held: list[IO[str]] = []

    def take(self, wanted: list[Gpu]) -> list[Gpu]:
        """Locks those that are free.

        Raises MachineError naming who holds them when none is, or when this user may not lock here.
        """
        try:
            _make_for_all(self._folder)
            files = [_open_for_all(self._folder / f"{gpu.uuid}.lock") for gpu in wanted]
        except OSError as error:
            raise MachineError(
                f"GPUs cannot be locked in {self._folder}: {error.strerror}; have its owner remove it"
            ) from error
        taken, holders = [], []
        for gpu, file in zip(wanted, files, strict=True):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.append(file.read().strip() or "an unknown process")
                file.close()
                continue
            file.truncate(0)
            file.write(f"pid {os.getpid()}")
            file.flush()
            self._held.append(file)
            taken.append(gpu)
        if not taken:
            raise MachineError(
                f"every GPU is held by another sweep ({', '.join(sorted(set(holders)))}); wait for it or stop it"
            )
        return taken

    def release(self) -> None:
        """Gives every GPU back."""
        for file in self._held:
            file.close()
        self._held.clear()


def _make_for_all(folder: Path) -> None:
    """A folder in which every user of the host may make files, as in /tmp."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # only its owner can, and has
        folder.chmod(0o1777)


def _open_for_all(path: Path) -> IO[str]:
    """Opens a file for reading and writing that every user of the host may open so; makes it if there is none."""
    before = os.umask(0)
    try:
        # not together with opening: in such a folder Linux may refuse O_CREAT on other people's files
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    finally:
        os.umask(before)
    return path.open("r+")
