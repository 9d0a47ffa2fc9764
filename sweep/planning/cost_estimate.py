"""What a plan costs: hours of GPUs or cores, when it would be through, electricity, disk and money."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...results.forecast import Forecast
from ...results.store.records import Request
from ..config import CellConfig
from ..grid.cell import Cell
from ..probes import bound, requested
from ..training import flops
from . import makespan
from .planner import Plan, Task
from .power import board_watts
from .speed_model import SOURCES, Source, Speed, Speeds, validated
from .three_point import NOTHING, Span, total

PARTS = ("start", "compile", "training", "validation", "probing")
"""Of an attempt, in its order."""


@dataclass(frozen=True)
class Cost:
    """What one attempt takes: seconds by part, and how they are known."""

    source: Source
    parts: Mapping[str, Span]
    share: float
    """GPUs of it, or where it has none, cores."""

    @cached_property
    def seconds(self) -> Span:
        """From its start to its end."""
        return total(self.parts.values())

    @cached_property
    def hours(self) -> Span:
        """GPU-hours, or core-hours."""
        return self.seconds.times(self.share / 3600)


class Prices:
    """Prices attempts on one place. Cells that are alike and ask for the same are worked out once."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self._probing: dict[tuple[object, ...], Span] = {}
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

    def _probes(self, config: CellConfig, speed: Speed, wanted: Sequence[Request]) -> Span:
        """Seconds of these probes: as measured, else by their tokens."""
        found = NOTHING
        probes = {name: bound(name, config) for name in {name for name, _ in wanted}}
        base = flops.estimated_flops(config.model, config.train.seq_len)
        for name, length in wanted:
            tokens = probes[name].tokens(length)
            known = speed.probes.get((name, length))
            if known is not None:
                found = found.plus(Span(0.9, 1.0, 1.1).times(known * tokens))
                continue
            # a token of a longer row takes more, since it attends to more
            more = flops.estimated_flops(config.model, length) / base if length else 1.0
            found = found.plus(speed.forward_token.times(tokens * more))
        return found


def packed(seconds: Span, config: CellConfig, speed: Speed) -> Span:
    """Seconds of an attempt beside others on the same GPU: not slower at best, and at worst as if they took turns.

    Where such attempts were measured, their neighbours are part of the measurement.
    """
    share = config.resources.gpus
    if speed.shared or not 0 < share < 1:
        return seconds
    return seconds.by(Span(1.0, (1 + 1 / share) / 2, 1 / share))


@dataclass(frozen=True)
class Group:
    """Attempts of one price."""

    slug: str
    """One of them."""
    kind: str
    source: Source
    attempts: int
    tokens_per_s: float
    measured_on: int
    seconds: Span
    """Of one on average."""
    hours: Span
    silent: str | None


@dataclass(frozen=True)
class Bill:
    """The price of a plan."""

    unit: str
    """GPU-hours or core-hours."""
    place: str
    how: str
    gpus: int
    hours: Span
    parts: Mapping[str, Span]
    """Hours by part."""
    finish: Span
    """Seconds from now."""
    watts: float | None
    """Of one GPU."""
    assumed_watts: bool
    rate: float | None
    """Money of an hour."""
    groups: Sequence[Group] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    """Attempts by where their price comes from."""

    @property
    def kwh(self) -> Span | None:
        """Of the GPUs alone; None where nobody knows what one takes."""
        return None if self.watts is None else self.hours.times(self.watts / 1000)

    @property
    def money(self) -> Span | None:
        """None without a rate."""
        return None if self.rate is None else self.hours.times(self.rate)


def forecast(cells: Sequence[Cell], prices: Prices) -> Forecast:
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


def bill(plan: Plan, prices: Prices, *, gpus: int, watts: float | None = None, rate: float | None = None) -> Bill:
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
    hours = _sum([cost.hours.times(count) for cost, count in tally])
    work = [(cost.seconds.likely, task.cell.config.resources) for task, cost in zip(tasks, costs, strict=True)]
    ends = makespan.finish(work, gpus)
    scale = hours if hours.likely else _sum([cost.seconds.times(count) for cost, count in tally])
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
            part: _sum(
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


def _sum(spans: Sequence[Span]) -> Span:
    """As `total`, quick for many."""
    return Span(*(sum(getattr(one, name) for one in spans) for name in ("low", "likely", "high")))


def _group(prices: Prices, some: Sequence[tuple[Task, Cost]]) -> Group:
    task, cost = some[0]
    speed = prices.speeds.of(task.cell.config)[cost.source]
    seconds = _sum([one.seconds for _, one in some])
    return Group(
        slug=task.cell.slug,
        kind=task.kind,
        source=cost.source,
        attempts=len(some),
        tokens_per_s=1 / speed.token.likely,
        measured_on=speed.attempts,
        seconds=seconds.times(1 / len(some)),
        hours=_sum([one.hours for _, one in some]),
        silent=speed.silent if cost.source == "FLOPs" else None,
    )


def as_json(bill: Bill) -> dict[str, Any]:
    """The price by names with their units."""
    money, kwh = bill.money, bill.kwh
    return {
        "unit": bill.unit,
        "place": bill.place,
        "gpus": bill.gpus,
        "hours": bill.hours.as_json(),
        "hours_by_part": {part: span.as_json() for part, span in bill.parts.items()},
        "finish_seconds": bill.finish.as_json(1),
        "kwh": kwh and kwh.as_json(),
        "watts": bill.watts,
        "watts_assumed": bill.assumed_watts,
        "rate": bill.rate,
        "money": money and money.as_json(2),
        "sources": dict(bill.sources),
        "groups": [
            vars(group) | {"seconds": group.seconds.as_json(1), "hours": group.hours.as_json()} for group in bill.groups
        ],
    }
