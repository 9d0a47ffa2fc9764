"""The cost of a plan: hours of GPUs or cores on a machine, its end, electricity and money, and what a budget of hours allows."""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...results.contrasts import Contrast
from ...results.forecast import Forecast
from ...results.store.records import Request, TrainingTiming
from ...results.store.store import Store
from ..config import CellConfig, Resources
from ..errors import SweepError
from ..grid.cell import Cell
from ..host import hardware
from ..host.allocation import Allocation, Machine, MachineAllocator, is_shared, is_type
from ..host.hardware import Gpu
from ..probes import bound, requested
from ..training import flops
from ..training.flops import PEAK_BF16
from .ordering import blocks
from .planner import Budget, Plan, Task
from .speed_model import (
    NOTHING,
    SOURCES,
    Source,
    Speed,
    SpeedTable,
    TargetMachine,
    ThreePointEstimate,
    read_calibrations,
    total,
    validated,
)

PARTS = ("start", "compile", "training", "validation", "probing")
"""Of an attempt, in its order."""


@dataclass(frozen=True)
class Cost:
    """What one attempt takes: seconds by part, and how they are known."""

    source: Source
    parts: Mapping[str, ThreePointEstimate]
    share: float
    """GPUs of it, or where it has none, cores."""

    @cached_property
    def seconds(self) -> ThreePointEstimate:
        """From its start to its end."""
        return total(self.parts.values())

    @cached_property
    def hours(self) -> ThreePointEstimate:
        """GPU-hours, or core-hours."""
        return self.seconds.times(self.share / 3600)


class Pricer:
    """Prices attempts on one place. Cells that are alike and ask for the same are worked out once."""

    def __init__(self, speeds: SpeedTable) -> None:
        self.speeds = speeds
        self._probing: dict[tuple[object, ...], ThreePointEstimate] = {}
        self._whole: dict[tuple[object, ...], dict[Source, Cost]] = {}
        self._kept: list[CellConfig] = []
        """Whose sections are told apart by where they lie."""

    def key(self, config: CellConfig) -> tuple[object, ...]:
        """The same for cells whose whole price is the same."""
        return self.speeds.likeness.of(config), config.train.steps, id(config.eval), config.resources.cpus

    def whole(self, config: CellConfig) -> dict[Source, Cost]:
        """What training and measuring the cell costs from the start, by each source that knows it, the best first."""
        key = self.key(config)
        if key not in self._whole:
            self._kept.append(config)
            wanted = requested(config.eval)
            speeds = self.speeds.of(config)
            self._whole[key] = {source: self._cost(config, one, wanted) for source, one in speeds.items()}
        return self._whole[key]

    def of(self, task: Task) -> Cost:
        """What is left to do of a cell, by the best source."""
        config = task.cell.config
        source, whole = next(iter(self.whole(config).items()))
        if task.kind == "train" and task.rest == 1:
            return whole
        if task.kind == "train":
            parts = dict(whole.parts)
            for name in ("training", "validation"):
                parts[name] = parts[name].times(task.rest)
            return replace(whole, parts=parts)
        speed = self.speeds.of(config)[source]
        probing = packed(self._probes(config, speed, task.missing), config, speed)
        return replace(whole, parts={"start": whole.parts["start"], "probing": probing})

    def _cost(self, config: CellConfig, speed: Speed, wanted: Sequence[Request]) -> Cost:
        train, resources = config.train, config.resources
        validations = -(-train.steps // config.eval.validate_every)
        parts = {
            "compile": speed.compile,
            "training": speed.token.times(train.steps * train.batch_tokens),
            "validation": speed.validation_token.times(validations * validated(config)),
            "probing": self._probes(config, speed, wanted),
        }
        parts = {name: packed(span, config, speed) for name, span in parts.items()}
        return Cost(speed.source, {"start": speed.start, **parts}, resources.gpus or float(resources.cpus))

    def _probes(self, config: CellConfig, speed: Speed, wanted: Sequence[Request]) -> ThreePointEstimate:
        """Seconds of these probes: as measured, else by their tokens."""
        found = []
        probes = {name: bound(name, config) for name in {name for name, _ in wanted}}
        base = flops.estimated_flops(config.model, config.train.seq_len)
        for name, length in wanted:
            tokens = probes[name].tokens(length)
            known = speed.probes.get((name, length))
            if known is not None:
                found.append(ThreePointEstimate(0.9, 1.0, 1.1).times(known * tokens))
                continue
            # a token of a longer row takes more, since it attends to more
            more = flops.estimated_flops(config.model, length) / base if length else 1.0
            found.append(speed.forward_token.times(tokens * more))
        return total(found)


def packed(seconds: ThreePointEstimate, config: CellConfig, speed: Speed) -> ThreePointEstimate:
    """Seconds of an attempt beside others on the same GPU: not slower at best, and at worst as if they took turns.

    Where such attempts were measured, their neighbours are part of the measurement.
    """
    share = config.resources.gpus
    if speed.shared or not is_shared(share):
        return seconds
    return seconds.by(ThreePointEstimate(1.0, (1 + 1 / share) / 2, 1 / share))


@dataclass(frozen=True)
class PriceGroup:
    """Attempts of one price."""

    slug: str
    """One of them."""
    kind: str
    source: Source
    attempts: int
    tokens_per_s: float
    measured_on: int
    seconds: ThreePointEstimate
    """Of one on average."""
    hours: ThreePointEstimate
    silent: str | None


@dataclass(frozen=True)
class Bill:
    """The price of a plan."""

    unit: str
    """GPU-hours or core-hours."""
    place: str
    how: str
    gpus: int
    hours: ThreePointEstimate
    parts: Mapping[str, ThreePointEstimate]
    """Hours by part."""
    finish: ThreePointEstimate
    """Seconds from now."""
    watts: float | None
    """Of one GPU."""
    assumed_watts: bool
    rate: float | None
    """Money of an hour."""
    groups: Sequence[PriceGroup] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    """Attempts by where their price comes from."""

    @property
    def kwh(self) -> ThreePointEstimate | None:
        """Of the GPUs alone; None where nobody knows what one takes."""
        return None if self.watts is None else self.hours.times(self.watts / 1000)

    @property
    def money(self) -> ThreePointEstimate | None:
        """None without a rate."""
        return None if self.rate is None else self.hours.times(self.rate)


def forecast(cells: Sequence[Cell], prices: Pricer) -> Forecast:
    """What all of these cells would take from the start, by every source, as a launch keeps it to be compared later."""
    numbers: dict[tuple[object, ...], int] = {}
    groups: list[dict[str, tuple[float, float, float]]] = []
    of = []
    for cell in cells:
        key = prices.key(cell.config)
        if key not in numbers:
            numbers[key] = len(groups)
            hours = {str(source): cost.hours for source, cost in prices.whole(cell.config).items()}
            groups.append({source: (span.low, span.likely, span.high) for source, span in hours.items()})
        of.append(numbers[key])
    names = sorted({prices.speeds.place.name(cell.config) for cell in cells})
    return Forecast(" and ".join(names), tuple(of), tuple(groups))


def unit_of(tasks: Sequence[Task]) -> str:
    """In what these are counted: GPU-hours as soon as one of them has a GPU."""
    return "GPU-hours" if any(task.cell.config.resources.gpus for task in tasks) else "core-hours"


def bill(plan: Plan, prices: Pricer, *, gpus: int, watts: float | None = None, rate: float | None = None) -> Bill:
    """The price of what the plan would start now, on so many GPUs. `watts`: of a GPU; without it what its board takes."""
    tasks = [task for task in plan.tasks if task.why != "running"]
    on_gpus = unit_of(tasks) == "GPU-hours"
    groups: dict[tuple[object, ...], list[tuple[Task, Cost]]] = {}
    costs = []
    for task in tasks:
        cost = prices.of(task)
        if on_gpus and not task.cell.config.resources.gpus:
            cost = replace(cost, share=0.0)
        costs.append(cost)
        groups.setdefault((task.kind, *prices.key(task.cell.config)), []).append((task, cost))
    told = [_group(prices, some) for some in groups.values()]
    # most cells of a grid share their cost
    tally = list(_tally(costs).values())
    hours = total([cost.hours.times(count) for cost, count in tally])
    work = [(cost.seconds.likely, task.cell.config.resources) for task, cost in zip(tasks, costs, strict=True)]
    ends = makespan(work, gpus)
    scale = hours if hours.likely else total([cost.seconds.times(count) for cost, count in tally])
    finish = scale.times(ends / scale.likely) if scale.likely else NOTHING
    board = board_watts(prices.speeds.place.gpu) if on_gpus else None
    names = {
        bool(task.cell.config.resources.gpus): prices.speeds.place.name(task.cell.config) for task in tasks
    }.values()
    sources = Counter(cost.source for cost in costs)
    return Bill(
        unit=unit_of(tasks),
        place=" and ".join(sorted(names)),
        how=prices.speeds.place.how if on_gpus else "",
        gpus=gpus if on_gpus else 0,
        hours=hours,
        parts={
            part: total(
                [cost.parts[part].times(cost.share / 3600 * count) for cost, count in tally if part in cost.parts]
            )
            for part in PARTS
        },
        finish=finish,
        watts=watts if watts is not None else board,
        assumed_watts=watts is None,
        rate=rate,
        groups=sorted(told, key=lambda group: -group.hours.likely),
        sources={word: count for word in SOURCES if (count := sources[word])},
    )


def _tally(costs: Sequence[Cost]) -> dict[int, tuple[Cost, int]]:
    """How often each of them is there, by identity."""
    counts = Counter(map(id, costs))
    return {id(cost): (cost, counts[id(cost)]) for cost in costs}


def _group(prices: Pricer, some: Sequence[tuple[Task, Cost]]) -> PriceGroup:
    task, cost = some[0]
    speed = prices.speeds.of(task.cell.config)[cost.source]
    seconds = total([one.seconds for _, one in some])
    return PriceGroup(
        slug=task.cell.slug,
        kind=task.kind,
        source=cost.source,
        attempts=len(some),
        tokens_per_s=1 / speed.token.likely,
        measured_on=speed.attempts,
        seconds=seconds.times(1 / len(some)),
        hours=total([one.hours for _, one in some]),
        silent=speed.silent if cost.source == "FLOPs" else None,
    )


def as_json(price_plan: Bill) -> dict[str, Any]:
    """The price by names with their units."""
    money, kwh = price_plan.money, price_plan.kwh
    return {
        "unit": price_plan.unit,
        "place": price_plan.place,
        "gpus": price_plan.gpus,
        "hours": price_plan.hours.as_json(),
        "hours_by_part": {part: span.as_json() for part, span in price_plan.parts.items()},
        "finish_seconds": price_plan.finish.as_json(1),
        "kwh": kwh and kwh.as_json(),
        "watts": price_plan.watts,
        "watts_assumed": price_plan.assumed_watts,
        "rate": price_plan.rate,
        "money": money and money.as_json(2),
        "sources": dict(price_plan.sources),
        "groups": [
            vars(group) | {"seconds": group.seconds.as_json(1), "hours": group.hours.as_json()}
            for group in price_plan.groups
        ],
    }


BOARD_WATTS: dict[str, float] = {
    "A100-SXM4-40GB": 400, "A100-SXM4-80GB": 400, "A100-PCIE-40GB": 250, "A100 80GB PCIe": 300,
    "L4": 72, "L40S": 350, "H100 80GB HBM3": 700, "H100 PCIe": 350, "H100 NVL": 400,
    "H200": 700, "H200 NVL": 600, "B200": 1000, "GB200": 1200, "GeForce RTX 4090": 450,
}  # fmt: skip
"""By name as the CUDA driver reports it, "NVIDIA " left out; the datasheets that flops.PEAK_BF16 names."""


def board_watts(gpu_name: str | None) -> float | None:
    """Of a GPU by its driver's name, None for one that is not in the table."""
    return BOARD_WATTS.get((gpu_name or "").removeprefix("NVIDIA "))


PLENTY = 10**6
"""Cores, and GiB of memory, of machines whose GPUs are what attempts wait for."""


def makespan(work: Sequence[tuple[float, Resources]], gpus: int) -> float:
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
    room = MachineAllocator(Machine(cores, memory, tuple(Gpu(str(n), str(n), "a GPU") for n in range(max(gpus, 1)))))
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


ASSUMED_GPU = "NVIDIA H200"


def machine_prices(cells: Sequence[Cell], runs: Path, store: Store | None, *, gpu: str | None = None) -> Pricer:
    """Prices of these cells on `gpu`, a GPU's name or a word of it; without it on what the cells or this machine say."""
    timed = store.timed() if store is not None else []
    return Pricer(SpeedTable(_place(cells, timed, gpu), timed, read_calibrations(runs)))


def gpus_here() -> int:
    """GPUs of this machine, at least 1: whoever has none plans for another machine."""
    return max(1, len(hardware.driver_gpus()))


def _place(cells: Sequence[Cell], timed: Sequence[TrainingTiming], gpu: str | None) -> TargetMachine:
    resources = {id(cell.config.resources): cell.config.resources for cell in cells}.values()
    if not any(one.gpus for one in resources):
        return TargetMachine(None)
    if gpu is not None:
        return TargetMachine(_whole_name(gpu, timed))
    here = hardware.driver_gpus()
    word = next((one.gpu_type for one in resources if one.gpu_type is not None), None)
    if word is not None:
        return TargetMachine(next((name for name in here if is_type(name, word)), None) or _whole_name(word, timed))
    if here:
        return TargetMachine(here[0])
    measured = next((one.gpu_name for one in reversed(timed) if one.gpu_name is not None), None)
    if measured is not None:
        return TargetMachine(measured, "as the attempts in the database; --gpu names another")
    return TargetMachine(ASSUMED_GPU, "assumed; --gpu names another")


def _whole_name(word: str, timed: Sequence[TrainingTiming]) -> str:
    """The name of a GPU as its driver has it: of one that was measured, else of one whose peak is known, else the word."""
    known = [one.gpu_name.removeprefix("NVIDIA ") for one in reversed(timed) if one.gpu_name is not None]
    known += [name for peak in PEAK_BF16 for name in peak.names]
    short = word.removeprefix("NVIDIA ")
    exact = next((name for name in known if name.lower() == short.lower()), None)
    return exact or next((name for name in known if is_type(name, short)), None) or short


def rate_of(text: str | None) -> float | None:
    """Money of an hour. Raises SweepError for what is none."""
    if text is None:
        return None
    number, _, hour = text.strip().lstrip("$€£").partition("/")
    with contextlib.suppress(ValueError):
        if hour.strip() in ("", "h", "hour") and 0 < float(number) < float("inf"):
            return float(number)
    raise SweepError(f"--rate {text!r} must be an amount above 0 of money an hour, such as 2.50/h")


def hours_of(text: str, rate: float | None) -> float:
    """The hours that `--budget 40h` means, or with a rate `100$`. Raises SweepError."""
    word = text.strip()
    money = word.strip("$€£") != word
    number = word.strip("$€£ ").removesuffix("h").strip()
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf") or (money and "h" in word):
        raise SweepError(f"--budget {text!r} must be hours above 0, such as 40h, or with --rate money, such as 100$")
    if money and rate is None:
        raise SweepError(f"--budget {text} is money; say what an hour costs with --rate, such as --rate 2.50/h")
    return amount / rate if money and rate is not None else amount


def hours_spent(store: Store | None, cells: Sequence[Cell]) -> float:
    """Hours that attempts of these cells took so far; those that came with a bundle cost nothing here."""
    if store is None:
        return 0.0
    shares = {cell.id: cell.config.resources.gpus or float(cell.config.resources.cpus) for cell in cells}
    total = 0.0
    for attempt in store.attempts_of(shares):
        if not attempt.imported:
            end = attempt.finished_at or attempt.heartbeat_at
            total += (end - attempt.started_at).total_seconds() / 3600 * shares[attempt.cell_id]
    return total


def within_budget(
    plan: Plan, allowed: float, used: float, prices: Pricer, contrasts: Iterable[Contrast], finished: Collection[str]
) -> tuple[list[Task], Budget]:
    """The tasks that fit, in the order of what they tell, and what is left.

    A block that does not fit is left, and a smaller one after it may still be taken.
    """
    costs = {id(task): prices.of(task).hours.likely for task in plan.tasks}
    room = max(0.0, allowed - used)
    taken: list[Task] = []
    left: list[Task] = []
    for block in blocks(plan.tasks, plan.cells, contrasts, finished):
        cost = sum(costs[id(task)] for task in block)
        if cost <= room:
            room -= cost
            taken += block
        else:
            left += block
    hours, rest = (sum(costs[id(task)] for task in some) for some in (taken, left))
    return taken, Budget(allowed, unit_of(plan.tasks), used, len(taken), hours, left, rest)
