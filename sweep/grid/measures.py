"""How a grid names a number that a cell is measured by: probe.metric, probe.metric@LENGTH, or shorter where that is clear."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...results import metrics
from ...results.metrics import OF_TRAINING, Metric
from ..probes import PROBES


class NoMeasure(Exception):
    """A text that names no number: what is wrong, what is allowed, and the word that may be a misspelling."""

    def __init__(self, problem: str, allowed: Sequence[str] = (), word: str | None = None) -> None:
        self.problem, self.allowed, self.word = problem, allowed, word
        super().__init__(problem)


@dataclass(frozen=True)
class Measure:
    """One number of a cell; `length` is 0 for one that is not about a context length."""

    probe: str
    metric: Metric
    length: int

    @property
    def text(self) -> str:
        """In full: needle.digit_accuracy@65536, val.val_loss."""
        return f"{self.probe}.{self.metric.name}" + (f"@{self.length}" if self.length else "")

    def check(self, asked: Collection[tuple[str, int]]) -> None:
        """That cells are measured by it which are asked for these probes and lengths. Raises NoMeasure."""
        if self.probe in OF_TRAINING or (self.probe, self.length) in asked:
            return
        lengths = sorted(length for probe, length in asked if probe == self.probe)
        if not lengths:
            probes = sorted({probe for probe, _ in asked} | {*OF_TRAINING})
            raise NoMeasure(f"no cell runs the probe {self.probe} (eval.probes)", probes, self.probe)
        told = [f"{self.probe}.{self.metric.name}@{length}" for length in lengths]
        raise NoMeasure(f"no cell is evaluated at {self.text} (eval.lengths)", told)


def measure(text: object) -> Measure:
    """The number that a grid means; `needle@65536` is the probe's first, `val_loss` the only one of that name. Raises NoMeasure."""
    if not isinstance(text, str):
        raise NoMeasure(f"must be the name of a number such as val_loss or needle@65536, got {text!r}")
    name, at, place = text.partition("@")
    probe, metric = named(name)
    if (probe in PROBES and PROBES.load(probe).by_length) != bool(at):
        full = f"{probe}.{metric.name}"
        raise NoMeasure(f"has no context length: {full}" if at else f"needs a context length: {full}@65536")
    if at and (not place.isdecimal() or not 0 < int(place) < 2**63):
        raise NoMeasure(f"the context length must be a whole number, got {place!r}")
    return Measure(probe, metric, int(place) if at else 0)


def named(name: str) -> tuple[str, Metric]:
    """The probe and the metric of a name without a length. Raises NoMeasure."""
    known = [*PROBES, *OF_TRAINING]
    probe, dot, metric = name.rpartition(".")
    if not dot and name in known:
        return name, own_metrics(name)[0]
    if not dot:
        probes = [of for of, one in metrics.METRICS if one == name]
        if len(probes) > 1:
            raise NoMeasure(f"several probes have a number {name!r}", [f"{of}.{name}" for of in probes])
        if not probes:
            raise NoMeasure(f"no probe and no number is called {name!r}", [*known, "val_loss", "tokens_per_s"], name)
        probe, metric = probes[0], name
    if probe not in known:
        raise NoMeasure(f"no probe {probe!r}", known, probe)
    own = {one.name: one for one in own_metrics(probe)}
    if metric not in own:
        raise NoMeasure(f"the probe {probe} has no number {metric!r}", list(own), metric)
    return probe, own[metric]


def own_metrics(probe: str) -> Sequence[Metric]:
    """What a probe, or a training in place of one, measures: the main number first."""
    return metrics.of_probe(probe) or tuple(PROBES.load(probe).metrics)
