"""What this machine has: cores, memory and GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import MachineError

_ASK = """
import json, torch
try:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
except (RuntimeError, AssertionError) as error:
    print(json.dumps({"error": str(error).splitlines()[0]}))
else:
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    print(json.dumps({"gpus": [[str(p.uuid), p.name, p.major, p.minor] for p in found]}))
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


def peak_resident(pid: int | None = None) -> int | None:
    """Most memory, bytes, that this or another process held at once since its start or `reset_peak_resident`.

    All of it: interpreter, libraries and mapped files that were read too. None where the system does not say.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
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
    capability: tuple[int, int] | None = None
    """Compute capability; None when nobody asked."""


PRECISIONS = {"fp16": (0, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""`train.precision` -> the lowest compute capability with matrix units for it, as far as torch runs at all."""


def precisions(capability: tuple[int, int]) -> list[str]:
    """Those of `train.precision` that a GPU of that compute capability has matrix units for."""
    return [name for name, least in PRECISIONS.items() if capability >= least]


def no_gpu(cause: str) -> MachineError:
    """The error that ends what was asked to run on CUDA and cannot."""
    return MachineError(f"no usable CUDA GPU: {cause}; set resources.gpus to 0 to run on the CPU")


def driver_gpus() -> list[str]:
    """The names of the GPUs that the driver lists and the environment leaves to us, asked without torch; none if it fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([one for one in visible.split(",") if one])]


def gpu_names() -> list[str]:
    """Return the names of the GPUs that attempts may be given; torch is asked, for seconds, only where the driver's program
    is missing beside its devices, as in some containers.
    """
    names = driver_gpus()
    if names or not Path("/dev/nvidiactl").exists():
        return names
    try:
        return [gpu.name for gpu in gpus()]
    except MachineError:
        return []


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
    return [
        Gpu(device, uuid, name, (major, minor))
        for device, (uuid, name, major, minor) in zip(names, facts["gpus"], strict=True)
    ]
