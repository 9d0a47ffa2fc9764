"""Hardware of this machine: cores, memory and GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...results.console.cores import usable_cores as usable_cores
from ..errors import MachineError

_GPU_QUERY = """
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


def control_groups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of this process's control groups below `root`, the groups around them, and `root` itself."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.is_file() else []
    paths = [Path(line.rpartition(":")[2].lstrip("/")) for line in lines]
    return list(dict.fromkeys([root, *(root / folder for path in paths for folder in (path, *path.parents))]))


def memory_gb(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the memory of this machine in GiB, or the least of what its control groups and its Slurm job may use.

    It is the total memory, not the free part. Limits are memory.max of cgroup v2, and --mem or --mem-per-cpu of Slurm.
    """
    limits = [psutil.virtual_memory().total]
    for folder in control_groups(cgroup_root):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))  # the text "max" (no limit) raises ValueError
    for name, count in (
        ("SLURM_MEM_PER_NODE", 1),
        ("SLURM_MEM_PER_CPU", usable_cores()),
    ):  # in MiB; 0 is all of the node
        requested = os.environ.get(name, "")
        limits += [count * int(requested) * 2**20] if requested.isdecimal() and int(requested) else []
    return min(limits) / 2**30


def reset_peak_resident() -> bool:
    """Reset the peak that `peak_resident` returns for this process to its present memory.

    Returns:
        False if the system cannot; only Linux can.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident(pid: int | None = None) -> int | None:
    """Return the peak resident memory of a process in bytes, since its start or `reset_peak_resident`.

    Includes interpreter, libraries and pages of mapped files. None if the process is gone, and always on systems other
    than Linux.

    Args:
        pid: Process; None for this one.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


@dataclass(frozen=True)
class Gpu:
    """CUDA device that torch can use."""

    device: str
    """Name of the device in CUDA_VISIBLE_DEVICES."""
    uuid: str
    """UUID of the device, as torch gives it."""
    name: str
    """Name of the model, such as "NVIDIA H200"."""
    capability: tuple[int, int] | None = None
    """Compute capability as (major, minor); None if not queried."""


PRECISIONS = {"fp16": (0, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""Lowest compute capability with matrix units for each value of `train.precision`; (0, 0) for any GPU that torch
supports."""


def supported_precisions(capability: tuple[int, int]) -> list[str]:
    """Return the values of `train.precision` that a GPU of that compute capability has matrix units for."""
    return [name for name, least in PRECISIONS.items() if capability >= least]


def no_gpu_error(cause: str) -> MachineError:
    """Return the error of an operation that needs CUDA where no GPU can be used."""
    return MachineError(f"no usable CUDA GPU: {cause}; set resources.gpus to 0 to run on the CPU")


def driver_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty if it fails or takes longer than 20 s.

    With CUDA_VISIBLE_DEVICES only the first names are returned, as many as it has entries, whichever GPUs those mean.
    Does not use torch, so a listed GPU need not be usable.
    """
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[: len([device for device in visible.split(",") if device])]


def gpu_names() -> list[str]:
    """Return the names of the GPUs that attempts may use; empty if there is none.

    They are those of `driver_gpus`. Only where nvidia-smi gives none but its devices exist, as in some containers, is
    torch queried, which takes seconds.
    """
    names = driver_gpus()
    if names or not Path("/dev/nvidiactl").exists():
        return names
    try:
        return [gpu.name for gpu in query_gpus()]
    except MachineError:
        return []


GPU_QUERY_S = 300
"""Seconds that torch may take to list the GPUs."""


def query_gpus() -> list[Gpu]:
    """Return the usable CUDA devices in torch's order, queried in a child process. Takes seconds.

    So this process holds no GPU memory. `Gpu.device` is the entry of CUDA_VISIBLE_DEVICES, if that has as many entries
    as there are devices, else the index.

    Raises:
        MachineError: There is none; the message has the cause (no driver, driver too old, build without CUDA, or no
            answer within 300 s).
    """
    command = [sys.executable, "-c", _GPU_QUERY]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GPU_QUERY_S)
    except subprocess.TimeoutExpired:
        raise no_gpu_error(f"torch did not list the GPUs within {GPU_QUERY_S} s; check nvidia-smi") from None
    lines = answer.stdout.strip().splitlines()
    try:
        facts = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        facts = {}
    if "gpus" not in facts:
        cause = facts.get("error") or (answer.stderr.strip().splitlines() or ["torch could not be started"])[-1]
        raise no_gpu_error(cause)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible if len(visible) == len(facts["gpus"]) else [str(index) for index in range(len(facts["gpus"]))]
    return [
        Gpu(device, uuid, name, (major, minor))
        for device, (uuid, name, major, minor) in zip(names, facts["gpus"], strict=True)
    ]
