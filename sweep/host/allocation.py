"""What a machine has and what is left of it: which attempt gets which GPU, or which part of one, and which cell never will."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...results.console.text import counted
from ..config import Resources
from . import hardware
from .hardware import Gpu

PARTS = 10_000
"""Into which a GPU is counted, so that four quarters, and ten tenths, are exactly one."""


@dataclass(frozen=True)
class Machine:
    """Cores, memory and GPUs that attempts may be given."""

    cpus: int
    memory_gb: float
    """GiB."""
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def here(cls, gpus: Iterable[Gpu] = ()) -> Machine:
        """This machine, with those of its GPUs that the caller holds."""
        return cls(hardware.cores(), hardware.memory_gb(), tuple(gpus))

    def __str__(self) -> str:
        names = [gpu.name for gpu in self.gpus]
        told = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no GPU"
        return f"{counted(self.cpus, 'CPU core')}, {self.memory_gb:.4g} GiB of memory, {told}"


@dataclass(frozen=True)
class Allocation:
    """What one attempt has been given."""

    cpus: int
    memory_gb: float
    gpu: Gpu | None
    parts: int
    """Of the GPU, out of PARTS."""


def is_type(gpu_name: str, label: str | None) -> bool:
    """Whether a GPU's name has the label as a word of its own: H200 is in "NVIDIA H200", and L4 not in "NVIDIA L40S"."""
    if label is None:
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(label)}(?![A-Za-z0-9])", gpu_name, re.IGNORECASE) is not None


def is_shared(gpus: float) -> bool:
    """Return whether attempts that ask for so many GPUs get a part of one, beside others."""
    return 0 < gpus < 1


class MachineAllocator:
    """A machine, and what attempts have been given of it. Used from one thread.

    A whole GPU is given when nobody has a part of it; a part goes where the least is left that is enough, so that other
    GPUs stay whole.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._cpus, self._memory = machine.cpus, machine.memory_gb
        self._parts = dict.fromkeys(machine.gpus, PARTS)

    def place(self, wanted: Resources) -> Allocation | None:
        """What an attempt of that size could be given now, None when it has to wait."""
        memory = wanted.memory_gb or 0.0
        if wanted.cpus > self._cpus or memory > self._memory:
            return None
        parts = round(wanted.gpus * PARTS)
        if not parts:
            return Allocation(wanted.cpus, memory, None, 0)
        fitting = [gpu for gpu, left in self._parts.items() if left >= parts and is_type(gpu.name, wanted.gpu_type)]
        if not fitting:
            return None
        return Allocation(wanted.cpus, memory, min(fitting, key=lambda gpu: self._parts[gpu]), parts)

    def left(self, given: Allocation) -> tuple[int, int]:
        """What is left now of that GPU, out of PARTS, and of the cores."""
        return (self._parts[given.gpu] if given.gpu is not None else 0), self._cpus

    def take(self, given: Allocation) -> None:
        """Gives that much away."""
        self._change(given, -1)

    def give(self, given: Allocation) -> None:
        """Takes it back."""
        self._change(given, +1)

    def _change(self, given: Allocation, sign: int) -> None:
        self._cpus += sign * given.cpus
        self._memory += sign * given.memory_gb
        if given.gpu is not None:
            self._parts[given.gpu] += sign * given.parts


class ClusterAllocator:
    """Machines by name, and what attempts have been given of them. Used from one thread.

    A part of a GPU goes where the least of one is left that is enough; everything else where most cores are free.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, MachineAllocator] = {}

    def add(self, name: str, machine: Machine) -> None:
        """A machine that has come, all of it free."""
        self._rooms[name] = MachineAllocator(machine)

    def drop(self, name: str) -> None:
        """A machine that is gone, with all that was given of it."""
        self._rooms.pop(name, None)

    def place(self, wanted: Resources) -> tuple[str, Allocation] | None:
        """Where an attempt of that size could start now, and what it would be given; None when it has to wait."""
        found = [(name, given) for name, room in self._rooms.items() if (given := room.place(wanted)) is not None]
        if not found:
            return None
        if is_shared(wanted.gpus):
            return min(found, key=lambda pair: self._rooms[pair[0]].left(pair[1])[0])
        return max(found, key=lambda pair: self._rooms[pair[0]].left(pair[1])[1])

    def take(self, name: str, given: Allocation) -> None:
        """Gives that much away."""
        self._rooms[name].take(given)

    def give(self, name: str, given: Allocation) -> None:
        """Takes it back; of a machine that is gone, nothing."""
        if name in self._rooms:
            self._rooms[name].give(given)


def need(wanted: Resources) -> str:
    """Resources for people."""
    told = [counted(wanted.cpus, "CPU core")]
    if wanted.memory_gb is not None:
        told.append(f"{wanted.memory_gb:g} GiB of memory")
    if wanted.gpus:
        share = "a GPU" if wanted.gpus == 1 else f"{wanted.gpus:g} of a GPU"
        told.append(share + (f" of type {wanted.gpu_type}" if wanted.gpu_type else ""))
    return ", ".join(told)


def should_yield_gpu(wanted: Resources, waiting: Iterable[Resources]) -> bool:
    """Whether an attempt leaves a GPU to one that waits for a whole one, which parts would otherwise keep out for ever."""
    if not is_shared(wanted.gpus):
        return False
    rivals = [other.gpu_type for other in waiting if other.gpus == 1]
    return any(wanted.gpu_type is None or rival in (None, wanted.gpu_type) for rival in rivals)
