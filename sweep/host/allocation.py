"""Allocation of a machine's CPU cores, memory and (fractions of) GPUs to attempts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...results.console.text import counted
from ..config import Resources
from . import hardware
from .hardware import Gpu

GPU_PARTS = 10_000
"""Number of parts into which a GPU is divided, so that four quarters, or ten tenths, add up to exactly one."""


@dataclass(frozen=True)
class Machine:
    """Cores, memory and GPUs that can be allocated to attempts."""

    cpus: int
    memory_gb: float
    """Memory in GiB."""
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def local(cls, gpus: Iterable[Gpu] = ()) -> Machine:
        """Return this machine with the given GPUs, which the caller has locked.

        Cores and memory are all that this process may use.
        """
        return cls(hardware.usable_cores(), hardware.memory_gb(), tuple(gpus))

    def __str__(self) -> str:
        names = [gpu.name for gpu in self.gpus]
        gpu_text = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no GPU"
        return f"{counted(self.cpus, 'CPU core')}, {self.memory_gb:.4g} GiB of memory, {gpu_text}"


@dataclass(frozen=True)
class Allocation:
    """Resources allocated to one attempt, or proposed for one."""

    cpus: int
    memory_gb: float
    """Memory in GiB; 0 if none was requested."""
    gpus: tuple[Gpu, ...]
    """GPUs that the attempt uses, in the order of its ranks; empty without any."""
    gpu_parts: int
    """Share of each GPU, in units of 1/GPU_PARTS."""


def is_type(gpu_name: str, label: str | None) -> bool:
    """Return True if a GPU's name contains the label as a word of its own, ignoring case.

    "NVIDIA H200" contains H200, "NVIDIA L40S" does not contain L4. None matches every GPU.

    Args:
        gpu_name: Name of the GPU, as its driver gives it.
        label: Value of resources.gpu_type.
    """
    if label is None:
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(label)}(?![A-Za-z0-9])", gpu_name, re.IGNORECASE) is not None


def is_shared(gpus: float) -> bool:
    """Return True if that number of GPUs is a fraction of one, which attempts share."""
    return 0 < gpus < 1


class MachineAllocator:
    """Free resources of one machine. Used from one thread.

    Full GPUs are allocated only when they are unused, and several at once only if they are of one model, since the
    slowest would delay the others. A fraction goes to the GPU with the least sufficient free share, so that other GPUs
    stay unused.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._free_cpus, self._free_memory_gb = machine.cpus, machine.memory_gb
        self._free_parts = dict.fromkeys(machine.gpus, GPU_PARTS)

    def find_allocation(self, resources: Resources) -> Allocation | None:
        """Return the allocation that an attempt would get now, without allocating it; None if it does not fit.

        All of it must fit into the free cores, the free memory and the GPUs of the requested type: one with a sufficient
        free share, or as many unused ones of the same model as requested. Those with the least free share come first,
        and of equals the first of the machine. An attempt without a memory limit takes no memory.
        """
        memory = resources.memory_gb or 0.0
        if resources.cpus > self._free_cpus or memory > self._free_memory_gb:
            return None
        parts = min(round(resources.gpus * GPU_PARTS), GPU_PARTS)
        if not parts:
            return Allocation(resources.cpus, memory, (), 0)
        count = max(1, int(resources.gpus))
        fitting = sorted(
            (gpu for gpu, free in self._free_parts.items() if free >= parts and is_type(gpu.name, resources.gpu_type)),
            key=lambda gpu: self._free_parts[gpu],
        )
        for model in dict.fromkeys(gpu.name for gpu in fitting):
            same_model = tuple(gpu for gpu in fitting if gpu.name == model)[:count]
            if len(same_model) == count:
                return Allocation(resources.cpus, memory, same_model, parts)
        return None

    def free_capacity(self, allocation: Allocation) -> tuple[int, int]:
        """Return (free parts of the allocation's GPUs, in units of 1/10,000 GPU and 0 without a GPU; free cores)."""
        return sum(self._free_parts[gpu] for gpu in allocation.gpus), self._free_cpus

    def allocate(self, allocation: Allocation) -> None:
        """Subtract an allocation from the free resources, without checking that it fits."""
        self._change(allocation, -1)

    def release(self, allocation: Allocation) -> None:
        """Add an allocation back to the free resources."""
        self._change(allocation, +1)

    def _change(self, allocation: Allocation, sign: int) -> None:
        self._free_cpus += sign * allocation.cpus
        self._free_memory_gb += sign * allocation.memory_gb
        for gpu in allocation.gpus:
            self._free_parts[gpu] += sign * allocation.gpu_parts


class ClusterAllocator:
    """Free resources of several machines, by name. Used from one thread.

    A fraction of a GPU goes to the GPU with the least sufficient free share; everything else to the machine with most
    free cores.
    """

    def __init__(self) -> None:
        self._allocators: dict[str, MachineAllocator] = {}

    def add(self, name: str, machine: Machine) -> None:
        """Add a machine, or replace the one of that name; all of it is free."""
        self._allocators[name] = MachineAllocator(machine)

    def drop(self, name: str) -> None:
        """Remove a machine with everything allocated on it; an unknown name is ignored."""
        self._allocators.pop(name, None)

    def find_allocation(self, resources: Resources) -> tuple[str, Allocation] | None:
        """Return the (machine name, allocation) that an attempt would get now, without allocating it.

        None if no machine has room. A fraction of a GPU goes to the machine whose GPU has the least sufficient free
        share, anything else to the one with most free cores; of equals to the first that was added.
        """
        candidates = [
            (name, allocation)
            for name, allocator in self._allocators.items()
            if (allocation := allocator.find_allocation(resources)) is not None
        ]
        if not candidates:
            return None
        if is_shared(resources.gpus):
            return min(candidates, key=lambda pair: self._allocators[pair[0]].free_capacity(pair[1])[0])
        return max(candidates, key=lambda pair: self._allocators[pair[0]].free_capacity(pair[1])[1])

    def allocate(self, name: str, allocation: Allocation) -> None:
        """Subtract an allocation from the machine's free resources, without checking that it fits.

        Raises:
            KeyError: There is no machine of that name.
        """
        self._allocators[name].allocate(allocation)

    def release(self, name: str, allocation: Allocation) -> None:
        """Add an allocation back to the machine's free resources; a removed machine is ignored."""
        if name in self._allocators:
            self._allocators[name].release(allocation)


def format_resources(resources: Resources) -> str:
    """Return resources as text for people, such as "4 CPU cores, 16 GiB of memory, 0.5 of a GPU of type H200".

    Memory and GPU are left out where none is requested.
    """
    parts = [counted(resources.cpus, "CPU core")]
    if resources.memory_gb is not None:
        parts.append(f"{resources.memory_gb:g} GiB of memory")
    if resources.gpus:
        share = gpus_text(resources.gpus)
        parts.append(share + (f" of type {resources.gpu_type}" if resources.gpu_type else ""))
    return ", ".join(parts)


def gpus_text(gpus: float) -> str:
    """Return a number of GPUs above 0 as text: "0.5 of a GPU", "a GPU" or "4 GPUs"."""
    if is_shared(gpus):
        return f"{gpus:g} of a GPU"
    return "a GPU" if gpus == 1 else f"{gpus:g} GPUs"


def should_yield_gpu(resources: Resources, waiting: Iterable[Resources]) -> bool:
    """Return True if an attempt that needs a GPU must wait for the sake of a blocked attempt that needs more of it.

    That is so if a blocked attempt needs one or more full GPUs, this one needs less, and both could use the same one:
    their types are equal, or one of them accepts any. Otherwise small attempts could keep a large one waiting for ever.

    Args:
        resources: Resources of the attempt; without a GPU the result is False.
        waiting: Resources of attempts that are blocked now.
    """
    if not resources.gpus:
        return False
    larger_types = [blocked.gpu_type for blocked in waiting if blocked.gpus >= 1 and blocked.gpus > resources.gpus]
    return any(resources.gpu_type is None or rival in (None, resources.gpu_type) for rival in larger_types)
