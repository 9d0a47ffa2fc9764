"""When a queue of attempts would be through: the same packing as a launch, with predicted times."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from ..config import Resources
from ..host import hardware
from ..host.allocation import Allocation, Machine, Room
from ..host.hardware import Gpu

PLENTY = 10**6
"""Cores, and GiB of memory, of machines whose GPUs are what attempts wait for."""


def finish(work: Sequence[tuple[float, Resources]], gpus: int) -> float:
    """Seconds until the last of these attempts has ended; each is given with its own seconds, in the order of starting.

    On the CPU they share this machine's cores and memory; those on GPUs share `gpus` of these, and nothing else.
    """
    if not work:
        return 0.0
    sizes = {id(resources): resources for _, resources in work}
    kinds = {key: resources.model_copy(update={"gpu_type": None}) for key, resources in sizes.items()}
    if any(resources.gpus for resources in kinds.values()):
        cores, memory = PLENTY, float(PLENTY)
    else:  # a cell that is too large for this machine is meant for another
        cores = max(hardware.cores(), *(one.cpus for one in kinds.values()), 1)
        memory = max(hardware.memory_gb(), *(one.memory_gb or 0.0 for one in kinds.values()), 0.0)
    room = Room(Machine(cores, memory, tuple(Gpu(str(n), str(n), "a GPU") for n in range(max(gpus, 1)))))
    waiting: dict[Resources, deque[tuple[int, float]]] = {}
    for place, (seconds, resources) in enumerate(work):
        waiting.setdefault(kinds[id(resources)], deque()).append((place, seconds))
    running: list[tuple[float, int, Allocation]] = []
    now = 0.0
    while True:
        crowded: set[Resources] = set()
        while heads := [(queue[0], kind) for kind, queue in waiting.items() if queue and kind not in crowded]:
            (place, seconds), kind = min(heads, key=lambda head: head[0])
            given = room.place(kind)
            if given is None:
                crowded.add(kind)
                continue
            waiting[kind].popleft()
            room.take(given)
            heapq.heappush(running, (now + seconds, place, given))
        if not running:
            return now
        now, _, given = heapq.heappop(running)
        room.give(given)
