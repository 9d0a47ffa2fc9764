"""Cost of a plan: GPU-hours or core-hours, duration, energy and money, and the tasks that a budget covers."""

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
from ...results.store.records import ProbeRequest, TrainingTiming
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
    PRICE_BASES,
    ZERO,
    PriceBasis,
    Speed,
    SpeedTable,
    TargetMachine,
    ThreePointEstimate,
    read_calibrations,
    sum_estimates,
    validation_tokens,
)

ATTEMPT_PHASES = ("start", "compile", "training", "validation", "probing")
"""Phases of an attempt, in the order of time."""


@dataclass(frozen=True)
class Cost:
    """Cost of one attempt: seconds by phase, and the basis of the estimate."""

    source: PriceBasis
    parts: Mapping[str, ThreePointEstimate]
    """Phase -> seconds."""
    share: float
    """GPUs that the attempt uses, or cores if it uses no GPU."""

    @cached_property
    def seconds(self) -> ThreePointEstimate:
        """Seconds from the start to the end of the attempt."""
        return sum_estimates(self.parts.values())

    @cached_property
    def hours(self) -> ThreePointEstimate:
        """GPU-hours, or core-hours without a GPU: seconds x `share` / 3600."""
        return self.seconds.scaled(self.share / 3600)


class Pricer:
    """Prices of attempts on one machine, cached for cells of equal speed, steps and measurements."""

    def __init__(self, speeds: SpeedTable) -> None:
        """Take the speeds on the machine to price on."""
        self.speeds = speeds
        self._probing: dict[tuple[object, ...], ThreePointEstimate] = {}
        self._full_costs: dict[tuple[object, ...], dict[PriceBasis, Cost]] = {}
        self._alive_configs: list[CellConfig] = []
        """Configs of the cached costs, kept alive because the keys hold ids of their sections."""

    def price_key(self, config: CellConfig) -> tuple[object, ...]:
        """Return a key that is equal for cells of equal full cost: (speed key, steps, id of the eval section, cores).

        The section's id is unique only while its config is alive, and equal sections that are different objects differ.
        """
        return self.speeds.speed_classes.key(config), config.train.steps, id(config.eval), config.resources.cpus

    def full_costs(self, config: CellConfig) -> dict[PriceBasis, Cost]:
        """Return basis -> cost of training and measuring the cell from the start, the best basis first; cached.

        The bases are "measured", "calibrated" and "FLOPs"; FLOPs are always included. The config is kept alive.
        """
        key = self.price_key(config)
        if key not in self._full_costs:
            self._alive_configs.append(config)
            wanted = requested(config.eval)
            speeds = self.speeds.lookup(config)
            self._full_costs[key] = {source: self._cost(config, speed, wanted) for source, speed in speeds.items()}
        return self._full_costs[key]

    def remaining_cost(self, task: Task) -> Cost:
        """Return the cost of a task's remaining work, by the best available basis.

        A resumed training costs its remaining share of training and validation, and start, compilation and probing in
        full. An evaluation has only the phases start and probing, for its missing measurements.
        """
        config = task.cell.config
        source, full_cost = next(iter(self.full_costs(config).items()))
        if task.kind == "train" and task.remaining_share == 1:
            return full_cost
        if task.kind == "train":
            parts = dict(full_cost.parts)
            for name in ("training", "validation"):
                parts[name] = parts[name].scaled(task.remaining_share)
            return replace(full_cost, parts=parts)
        speed = self.speeds.lookup(config)[source]
        probing = shared_gpu_time(self._probes(config, speed, task.missing), config, speed)
        return replace(full_cost, parts={"start": full_cost.parts["start"], "probing": probing})

    def _cost(self, config: CellConfig, speed: Speed, wanted: Sequence[ProbeRequest]) -> Cost:
        """Return the full cost of a cell at a speed; `wanted` are the (probe, length) pairs to measure.

        Its phases are start, compile, training, validation and probing. There are ceil(steps / eval.validate_every)
        validations. All phases but start are slowed down by neighbours on a shared GPU unless the speed includes them.
        """
        train, resources = config.train, config.resources
        validations = -(-train.steps // config.eval.validate_every)
        parts = {
            "compile": speed.compile,
            "training": speed.token.scaled(train.steps * train.batch_tokens),
            "validation": speed.validation_token.scaled(validations * validation_tokens(config)),
            "probing": self._probes(config, speed, wanted),
        }
        parts = {name: shared_gpu_time(span, config, speed) for name, span in parts.items()}
        return Cost(speed.source, {"start": speed.start, **parts}, resources.gpus or float(resources.cpus))

    def _probes(self, config: CellConfig, speed: Speed, wanted: Sequence[ProbeRequest]) -> ThreePointEstimate:
        """Return the total seconds of (probe, length) pairs.

        A pair that was measured takes its measured seconds per token (+-10 %). Any other one is estimated from tokens:
        seconds per token grow with the FLOPs per token at that length, and length 0 counts as the training length.
        """
        estimates = []
        probes = {name: bound(name, config) for name in {name for name, _ in wanted}}
        base = flops.estimated_flops(config.model, config.train.seq_len)
        for name, length in wanted:
            tokens = probes[name].tokens(length)
            measured_seconds = speed.probes.get((name, length))
            if measured_seconds is not None:
                estimates.append(ThreePointEstimate(0.9, 1.0, 1.1).scaled(measured_seconds * tokens))
                continue
            # a token of a longer row takes more time, since it attends to more tokens
            more = flops.estimated_flops(config.model, length) / base if length else 1.0
            estimates.append(speed.forward_token.scaled(tokens * more))
        return sum_estimates(estimates)


def shared_gpu_time(seconds: ThreePointEstimate, config: CellConfig, speed: Speed) -> ThreePointEstimate:
    """Return the seconds of an attempt that shares its GPU with others of the same size.

    With a share of 1/n, low is unchanged, high is n times as long, and likely is (1 + n) / 2 times as long. Speeds that
    were measured with neighbours, and attempts that do not share a GPU, are returned unchanged.
    """
    share = config.resources.gpus
    if speed.has_neighbours or not is_shared(share):
        return seconds
    return seconds.multiplied(ThreePointEstimate(1.0, (1 + 1 / share) / 2, 1 / share))


@dataclass(frozen=True)
class PriceGroup:
    """Attempts of equal price."""

    slug: str
    """Slug of one of the cells."""
    kind: str
    """"train" or "evaluate"."""
    source: PriceBasis
    attempts: int
    tokens_per_s: float
    """Likely training speed of one attempt, without neighbours on its GPU unless measured with them."""
    measured_on: int
    """Number of finished attempts that gave the speed; 0 for other bases."""
    seconds: ThreePointEstimate
    """Mean seconds per attempt."""
    hours: ThreePointEstimate
    """GPU-hours or core-hours of all attempts together."""
    silent: str | None
    """Reason why a price from FLOPs is too low; None otherwise."""
    ranks: int = 1
    """GPUs, or ranks on the CPU, of one attempt."""
    assumed_ranks: int = 0
    """Equal to `ranks` if the speed is assumed from that of one GPU; 0 if not."""


@dataclass(frozen=True)
class GpuChoice:
    """Price of the same plan with another number of GPUs per cell."""

    gpus: int
    """GPUs per cell; cells with fewer micro-batches per step use as many as they have."""
    finish_s: float
    """Likely seconds from now until the last attempt ends."""
    hours: float
    """Likely GPU-hours of all attempts."""
    is_planned: bool
    """True for the numbers of GPUs that the grid asks for."""


@dataclass(frozen=True)
class Bill:
    """Price of a plan."""

    unit: str
    """"GPU-hours" or "core-hours"."""
    machine: str
    """Name of the device; "A and B" if GPU and CPU cells are mixed."""
    machine_reason: str
    """Reason for the choice of the GPU; "" if the user made it or without a GPU."""
    gpus: int
    """Number of GPUs that run attempts at the same time; 0 without GPU cells."""
    hours: ThreePointEstimate
    """GPU-hours or core-hours of all attempts."""
    parts: Mapping[str, ThreePointEstimate]
    """Phase -> hours."""
    finish: ThreePointEstimate
    """Seconds from now until the last attempt ends."""
    watts: float | None
    """Power of one GPU in watts; None if unknown."""
    assumed_watts: bool
    """True if the user stated no power."""
    hourly_rate: float | None
    """Money per hour; None if not stated."""
    choices: Sequence[GpuChoice] = ()
    """Durations by GPUs per cell, for cells that could use several of the GPUs at hand; empty for one GPU."""
    groups: Sequence[PriceGroup] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    """Basis -> number of attempts priced by it."""

    @property
    def kwh(self) -> ThreePointEstimate | None:
        """Energy in kWh, `hours` x `watts` / 1000; None if the power is unknown."""
        return None if self.watts is None else self.hours.scaled(self.watts / 1000)

    @property
    def money(self) -> ThreePointEstimate | None:
        """Money for `hours` at the hourly rate; None without a rate."""
        return None if self.hourly_rate is None else self.hours.scaled(self.hourly_rate)


def forecast(cells: Sequence[Cell], prices: Pricer) -> Forecast:
    """Return the full cost of all these cells by every basis, for a launch to store and compare later.

    Full costs ignore checkpoints and finished work. The forecast holds three things: the machine's name ("A and B" if
    cells run on GPU and CPU), the index of each cell's group in cell order, and the groups. A group maps a basis to the
    (low, likely, high) GPU-hours or core-hours of one of its cells.

    Args:
        cells: The cells, finished ones too.
        prices: Prices on the target machine.
    """
    numbers: dict[tuple[object, ...], int] = {}
    groups: list[dict[str, tuple[float, float, float]]] = []
    group_numbers = []
    for cell in cells:
        key = prices.price_key(cell.config)
        if key not in numbers:
            numbers[key] = len(groups)
            hours = {str(source): cost.hours for source, cost in prices.full_costs(cell.config).items()}
            groups.append({source: (span.low, span.likely, span.high) for source, span in hours.items()})
        group_numbers.append(numbers[key])
    names = sorted({prices.speeds.machine.name(cell.config) for cell in cells})
    return Forecast(" and ".join(names), tuple(group_numbers), tuple(groups))


def unit_of(tasks: Sequence[Task]) -> str:
    """Return "GPU-hours" if any task uses a GPU, else "core-hours" (also without tasks)."""
    return "GPU-hours" if any(task.cell.config.resources.gpus for task in tasks) else "core-hours"


def bill(plan: Plan, prices: Pricer, *, gpus: int, watts: float | None = None, rate: float | None = None) -> Bill:
    """Return the price of the plan's tasks except running ones (which another launch is already paying for).

    Hours are GPU-hours if any task uses a GPU; CPU tasks then take time but no hours. The duration's likely value comes
    from a simulated queue, and its low and high ends keep the ratios of the total hours. Groups are sorted by likely
    hours, the largest first. Without tasks, hours and duration are 0 and there are no groups.

    Args:
        plan: The plan; its budget and trials still to be proposed are not looked at.
        prices: Prices on the target machine.
        gpus: Number of GPUs that run attempts at the same time; ignored for CPU cells.
        watts: Power of one GPU in watts; None for its board power, if known. Ignored for CPU cells, whose energy is
            unknown.
        rate: Money per hour; None without.
    """
    tasks = [task for task in plan.tasks if task.standing != "running"]
    on_gpus = unit_of(tasks) == "GPU-hours"
    groups: dict[tuple[object, ...], list[tuple[Task, Cost]]] = {}
    costs = []
    for task in tasks:
        cost = prices.remaining_cost(task)
        if on_gpus and not task.cell.config.resources.gpus:
            cost = replace(cost, share=0.0)
        costs.append(cost)
        groups.setdefault((task.kind, *prices.price_key(task.cell.config)), []).append((task, cost))
    price_groups = [_group(prices, attempts) for attempts in groups.values()]
    # most cells of a grid share their cost
    tally = list(_count_by_identity(costs).values())
    hours = sum_estimates([cost.hours.scaled(count) for cost, count in tally])
    work = [(cost.seconds.likely, task.cell.config.resources) for task, cost in zip(tasks, costs, strict=True)]
    ends = makespan(work, gpus)
    gpus = max(gpus, *(int(resources.gpus) for _, resources in work), 0) if on_gpus else gpus
    scale = hours if hours.likely else sum_estimates([cost.seconds.scaled(count) for cost, count in tally])
    finish = scale.scaled(ends / scale.likely) if scale.likely else ZERO
    board = board_watts(prices.speeds.machine.gpu)
    names = {
        bool(task.cell.config.resources.gpus): prices.speeds.machine.name(task.cell.config) for task in tasks
    }.values()
    sources = Counter(cost.source for cost in costs)
    return Bill(
        unit=unit_of(tasks),
        machine=" and ".join(sorted(names)),
        machine_reason=prices.speeds.machine.reason if on_gpus else "",
        gpus=gpus if on_gpus else 0,
        hours=hours,
        parts={
            part: sum_estimates(
                [cost.parts[part].scaled(cost.share / 3600 * count) for cost, count in tally if part in cost.parts]
            )
            for part in ATTEMPT_PHASES
        },
        finish=finish,
        watts=None if not on_gpus else watts if watts is not None else board,
        assumed_watts=watts is None,
        hourly_rate=rate,
        choices=gpu_choices(tasks, prices, gpus) if on_gpus else (),
        groups=sorted(price_groups, key=lambda group: -group.hours.likely),
        sources={word: count for word in PRICE_BASES if (count := sources[word])},
    )


def gpu_choices(tasks: Sequence[Task], prices: Pricer, gpus: int) -> list[GpuChoice]:
    """Return the likely duration and GPU-hours of the tasks for 1, 2, 4, ... GPUs per cell, up to all GPUs.

    The first entry is the plan itself if its cells use different numbers of GPUs. Empty for one GPU, and if a task uses
    no GPU or a share of one, since such cells are small.

    Args:
        tasks: The tasks.
        prices: Prices on the target machine.
        gpus: GPUs that run attempts at the same time.
    """
    planned = {task.cell.config.resources.gpus for task in tasks}
    if gpus < 2 or not planned or min(planned) < 1:
        return []
    numbers: set[float] = (
        {1 << power for power in range(gpus.bit_length())} | {gpus} | (planned if len(planned) == 1 else set())
    )
    choices = [_choice(tasks, prices, gpus, None)] if len(planned) > 1 else []
    return choices + [_choice(tasks, prices, gpus, int(number)) for number in sorted(numbers)]


def _choice(tasks: Sequence[Task], prices: Pricer, gpus: int, per_cell: int | None) -> GpuChoice:
    """Return the price of the tasks with `per_cell` GPUs for each cell, or with those of the grid for None."""
    work: list[tuple[float, Resources]] = []
    hours, same = 0.0, True
    sections: dict[tuple[int, int], CellConfig] = {}
    for task in tasks:
        config = task.cell.config
        n_gpus = int(config.resources.gpus) if per_cell is None else min(per_cell, config.train.accumulation)
        same = same and n_gpus == config.resources.gpus
        # cells share their resources section, so that equal prices are computed once
        key = id(config.resources), n_gpus
        if key not in sections:
            resources = config.resources.model_copy(update={"gpus": n_gpus})
            sections[key] = config.model_copy(update={"resources": resources})
        config = config.model_copy(update={"resources": sections[key].resources})
        cost = prices.remaining_cost(replace(task, cell=replace(task.cell, config=config)))
        work.append((cost.seconds.likely, config.resources))
        hours += cost.hours.likely
    largest = max(int(resources.gpus) for _, resources in work)
    return GpuChoice(0 if per_cell is None else largest, makespan(work, gpus), hours, same)


def _count_by_identity(costs: Sequence[Cost]) -> dict[int, tuple[Cost, int]]:
    """Return id of a cost -> (cost, number of its occurrences); costs are compared by identity."""
    counts = Counter(map(id, costs))
    return {id(cost): (cost, counts[id(cost)]) for cost in costs}


def _group(prices: Pricer, attempts: Sequence[tuple[Task, Cost]]) -> PriceGroup:
    """Return the price group of one or more attempts with equal price.

    Slug, kind, basis and tokens per second are those of the first attempt.

    `seconds` are the mean per attempt, `hours` the sum over the attempts.
    """
    task, cost = attempts[0]
    speed = prices.speeds.lookup(task.cell.config)[cost.source]
    seconds = sum_estimates([cost.seconds for _, cost in attempts])
    return PriceGroup(
        slug=task.cell.slug,
        kind=task.kind,
        source=cost.source,
        attempts=len(attempts),
        tokens_per_s=1 / speed.token.likely,
        measured_on=speed.attempts,
        seconds=seconds.scaled(1 / len(attempts)),
        hours=sum_estimates([cost.hours for _, cost in attempts]),
        silent=speed.unknown_flops if cost.source == "FLOPs" else None,
        ranks=task.cell.config.resources.n_ranks,
        assumed_ranks=speed.assumed_ranks,
    )


def as_json(bill: Bill) -> dict[str, Any]:
    """Return the price as JSON values, with units in the keys.

    Keys: unit, place (machine), gpus, hours, hours_by_part (phase -> hours), finish_seconds, kwh, watts, watts_assumed,
    rate, money, sources (basis -> attempts), and groups. A group is a mapping of slug, kind, source, attempts,
    tokens_per_s, measured_on, seconds (mean of an attempt), hours (of all), silent, ranks, assumed_ranks.
    `gpus_per_cell` is a list of gpus, finish_s, hours and is_planned, empty for one GPU. A basis is "measured", "calibrated"
    or "FLOPs". Phases are start, compile, training, validation, probing. Estimates are {low, likely, high}, rounded to
    4 decimals (seconds to 1, money to 2); kwh, watts, rate and money are None if unknown.
    """
    money, kwh = bill.money, bill.kwh
    return {
        "unit": bill.unit,
        "place": bill.machine,
        "gpus": bill.gpus,
        "hours": bill.hours.as_json(),
        "hours_by_part": {part: span.as_json() for part, span in bill.parts.items()},
        "finish_seconds": bill.finish.as_json(1),
        "kwh": kwh and kwh.as_json(),
        "watts": bill.watts,
        "watts_assumed": bill.assumed_watts,
        "rate": bill.hourly_rate,
        "money": money and money.as_json(2),
        "sources": dict(bill.sources),
        "gpus_per_cell": [vars(choice) for choice in bill.choices],
        "groups": [
            vars(group) | {"seconds": group.seconds.as_json(1), "hours": group.hours.as_json()} for group in bill.groups
        ],
    }


BOARD_WATTS: dict[str, float] = {
    "A100-SXM4-40GB": 400, "A100-SXM4-80GB": 400, "A100-PCIE-40GB": 250, "A100 80GB PCIe": 300,
    "L4": 72, "L40S": 350, "H100 80GB HBM3": 700, "H100 PCIe": 350, "H100 NVL": 400,
    "H200": 700, "H200 NVL": 600, "B200": 1000, "GB200": 1200, "GeForce RTX 4090": 450,
}  # fmt: skip
"""GPU name as reported by the CUDA driver, without "NVIDIA " -> board power in watts.

Source: the datasheets that flops.PEAK_BF16 names.
"""


def board_watts(gpu_name: str | None) -> float | None:
    """Return a GPU's board power in watts by its driver name; None for None or a name that is not in the table.

    The name must match exactly, apart from a leading "NVIDIA ".
    """
    return BOARD_WATTS.get((gpu_name or "").removeprefix("NVIDIA "))


UNLIMITED = 10**6
"""Cores, and GiB of memory, of machines on which only GPUs limit the number of attempts."""


def makespan(work: Sequence[tuple[float, Resources]], gpus: int) -> float:
    """Return the seconds until the last attempt ends, from a simulation of the queue; 0 without attempts.

    The first waiting attempt that fits starts first; later ones may pass those that do not fit. CPU attempts share this
    machine's cores and memory, or as much as the largest one needs. If any attempt uses a GPU, only GPUs are limited,
    and GPU types are ignored.

    Args:
        work: (Seconds, resources) of each attempt, in the order of starting.
        gpus: Number of GPUs, or as many as the largest attempt needs if these are more.
    """
    if not work:
        return 0.0
    sizes = {id(resources): resources for _, resources in work}
    kinds = {key: resources.model_copy(update={"gpu_type": None}) for key, resources in sizes.items()}
    if any(resources.gpus for resources in kinds.values()):
        cores, memory = UNLIMITED, float(UNLIMITED)
    else:  # a cell that is too large for this machine will run on another one
        cores = max(hardware.usable_cores(), *(request.cpus for request in kinds.values()), 1)
        memory = max(hardware.memory_gb(), *(request.memory_gb or 0.0 for request in kinds.values()), 0.0)
    n_gpus = max(gpus, 1, *(int(request.gpus) for request in kinds.values()))
    allocator = MachineAllocator(Machine(cores, memory, tuple(Gpu(str(n), str(n), "a GPU") for n in range(n_gpus))))
    waiting: dict[Resources, deque[tuple[int, float]]] = {}
    for index, (seconds, resources) in enumerate(work):
        waiting.setdefault(kinds[id(resources)], deque()).append((index, seconds))
    running: list[tuple[float, int, Allocation]] = []
    now = 0.0
    while True:
        crowded: set[Resources] = set()
        while heads := [(queue[0], kind) for kind, queue in waiting.items() if queue and kind not in crowded]:
            (index, seconds), kind = min(heads, key=lambda head: head[0])
            allocation = allocator.find_allocation(kind)
            if allocation is None:
                crowded.add(kind)
                continue
            waiting[kind].popleft()
            allocator.allocate(allocation)
            heapq.heappush(running, (now + seconds, index, allocation))
        if not running:
            return now
        now, _, allocation = heapq.heappop(running)
        allocator.release(allocation)


ASSUMED_GPU = "NVIDIA H200"


def machine_prices(cells: Sequence[Cell], runs: Path, store: Store | None, *, gpu: str | None = None) -> Pricer:
    """Return prices of these cells on a target machine, from the database and the calibrations.

    Without any GPU cell, the machine is this host's CPU. Otherwise the GPU is the first known one of: `gpu`, the
    gpu_type of the first cell that has one, this machine's first GPU, the GPU of the latest measured training, and
    ASSUMED_GPU (an H200).

    Args:
        cells: The cells.
        runs: Folder of the runs, which holds the calibrations.
        store: Database; None counts as an empty one.
        gpu: Name of a GPU or a word of it, such as "H100"; None chooses one. An unknown name is accepted.
    """
    timed = store.training_timings() if store is not None else []
    return Pricer(SpeedTable(_target_machine(cells, timed, gpu), timed, read_calibrations(runs)))


def local_gpu_count() -> int:
    """Return the number of GPUs of this machine, at least 1, since a machine without any plans for another one."""
    return max(1, len(hardware.driver_gpus()))


def _target_machine(cells: Sequence[Cell], timed: Sequence[TrainingTiming], gpu: str | None) -> TargetMachine:
    """Return the machine to price on: the CPU if no cell uses a GPU, else a GPU.

    `gpu` decides, else the first gpu_type of the cells, this machine's first GPU, the GPU of the newest timing,
    ASSUMED_GPU. For the last two, the machine's `reason` says so.
    """
    resources = {id(cell.config.resources): cell.config.resources for cell in cells}.values()
    if not any(request.gpus for request in resources):
        return TargetMachine(None)
    if gpu is not None:
        return TargetMachine(_full_gpu_name(gpu, timed))
    local_gpus = hardware.driver_gpus()
    gpu_type = next((request.gpu_type for request in resources if request.gpu_type is not None), None)
    if gpu_type is not None:
        return TargetMachine(
            next((name for name in local_gpus if is_type(name, gpu_type)), None) or _full_gpu_name(gpu_type, timed)
        )
    if local_gpus:
        return TargetMachine(local_gpus[0])
    measured = next((timing.gpu_name for timing in reversed(timed) if timing.gpu_name is not None), None)
    if measured is not None:
        return TargetMachine(measured, "GPU of the attempts in the database; resources.gpu_type selects another")
    return TargetMachine(ASSUMED_GPU, "assumed; resources.gpu_type selects another")


def _full_gpu_name(word: str, timed: Sequence[TrainingTiming]) -> str:
    """Return a GPU's driver name without "NVIDIA ", by the name or a word of it, ignoring case.

    A full match is preferred to a word of the name. Measured GPUs are searched first, newest first, then those of known
    peak FLOP/s. Without a match the word itself is returned.
    """
    names = [timing.gpu_name.removeprefix("NVIDIA ") for timing in reversed(timed) if timing.gpu_name is not None]
    names += [name for peak in PEAK_BF16 for name in peak.names]
    short = word.removeprefix("NVIDIA ")
    exact = next((name for name in names if name.lower() == short.lower()), None)
    return exact or next((name for name in names if is_type(name, short)), None) or short


def parse_rate(text: str | None) -> float | None:
    """Return the money per hour that text such as "2.50/h", "$2.50" or "2.50/hour" states; None for None.

    Raises SweepError for any other text and for amounts that are not above 0 and finite.
    """
    if text is None:
        return None
    number, _, hour = text.strip().lstrip("$€£").partition("/")
    with contextlib.suppress(ValueError):
        if hour.strip() in ("", "h", "hour") and 0 < float(number) < float("inf"):
            return float(number)
    raise SweepError(f"--rate {text!r} must be money per hour above 0, such as 2.50/h")


def parse_budget(text: str, rate: float | None) -> float:
    """Return the hours of a budget such as "40h" or "40", or of money such as "100$" divided by the hourly rate.

    Args:
        text: Hours, or an amount with $, € or £ before or after it.
        rate: Money per hour; used for amounts of money alone.

    Raises:
        SweepError: For other text, amounts that are not above 0 and finite, and money without a rate.
    """
    word = text.strip()
    money = word.strip("$€£") != word
    number = word.strip("$€£ ").removesuffix("h").strip()
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf") or (money and "h" in word):
        raise SweepError(f"--budget {text!r} must be hours above 0, such as 40h, or money with --rate, such as 100$")
    if money and rate is None:
        raise SweepError(
            f"--budget {text} is money; add the price of a GPU-hour (on the CPU: of a core-hour), such as --rate 2.50/h"
        )
    return amount / rate if money and rate is not None else amount


def hours_spent(store: Store | None, cells: Sequence[Cell]) -> float:
    """Return the GPU-hours, or core-hours of cells without a GPU, of all attempts of these cells so far.

    Attempts of other sweeps are included, and those that run, failed or evaluated, until their end or last heartbeat.
    Imported attempts count nothing. 0.0 without a database. Each attempt takes the resources that its cell requests
    now; for a cell on full GPUs it is the number of GPUs that the attempt recorded.
    """
    if store is None:
        return 0.0
    shares = {cell.id: cell.config.resources.gpus or float(cell.config.resources.cpus) for cell in cells}
    attempts = [attempt for attempt in store.attempts_of(shares) if not attempt.imported]
    on_full_gpus = {cell.id for cell in cells if cell.config.resources.gpus >= 1}
    recorded = store.provenances([attempt.id for attempt in attempts if attempt.cell_id in on_full_gpus])
    total = 0.0
    for attempt in attempts:
        end = attempt.finished_at or attempt.heartbeat_at
        provenance = recorded.get(attempt.id)
        share = (provenance.gpu_count if provenance is not None else 0) or shares[attempt.cell_id]
        total += (end - attempt.started_at).total_seconds() / 3600 * share
    return total


def select_within(
    plan: Plan, allowed: float, used: float, prices: Pricer, contrasts: Iterable[Contrast], finished: Collection[str]
) -> tuple[list[Task], Budget]:
    """Return the tasks that fit into a budget, the most informative blocks first, and the budget's state.

    Blocks (pairs of a declared contrast, or single tasks) are tried in the order of `ordering.blocks`. A block that
    does not fit is deferred as a unit; a smaller one after it may still fit. Likely hours count; running tasks count as
    well.

    Args:
        plan: The plan.
        allowed: Hours of the budget.
        used: Hours spent so far, which are subtracted from it.
        prices: Prices on the target machine.
        contrasts: Declared contrasts, in the order of priority.
        finished: Ids of cells with all their numbers.
    """
    costs = {id(task): prices.remaining_cost(task).hours.likely for task in plan.tasks}
    remaining_hours = max(0.0, allowed - used)
    selected: list[Task] = []
    deferred: list[Task] = []
    for block in blocks(plan.tasks, plan.cells, contrasts, finished):
        cost = sum(costs[id(task)] for task in block)
        if cost <= remaining_hours:
            remaining_hours -= cost
            selected += block
        else:
            deferred += block
    hours, deferred_hours = (sum(costs[id(task)] for task in subset) for subset in (selected, deferred))
    return selected, Budget(allowed, unit_of(plan.tasks), used, len(selected), hours, deferred, deferred_hours)
