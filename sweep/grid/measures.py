"""How a grid names a number that a cell is measured by: probe.metric, probe.metric@LENGTH, or shorter where that is clear."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...results import metrics
from ...results.contrasts import AVERAGE
from ...results.metrics import OF_TRAINING, Metric
from ..probes import PROBES
from .yaml_document import wrong


@dataclass(frozen=True)
class Measure:
    """One number of a cell. `length`: a context length, 0 for a number that has none, None for the average over all."""

    probe: str
    metric: Metric
    length: int | None

    @property
    def text(self) -> str:
        """In full: needle.digit_accuracy@65536, val.val_loss."""
        place = AVERAGE if self.length is None else str(self.length)
        return f"{self.probe}.{self.metric.name}" + (f"@{place}" if self.length != 0 else "")


def check_measured(probe: str, metric: str, length: int | None, asked: Collection[tuple[str, int]]) -> None:
    """Raise PydanticCustomError for a number that no cell has which is asked for these probes and lengths."""
    lengths = sorted(at for name, at in asked if name == probe)
    if not lengths and probe in PROBES:
        probes = [*sorted({name for name, _ in asked}), *OF_TRAINING]
        raise wrong(f"no cell runs the probe {probe} (eval.probes)", allowed=probes, word=probe)
    if lengths and length is not None and length not in lengths:
        told = [f"{probe}.{metric}" + (f"@{at}" if at else "") for at in lengths]
        raise wrong(f"no cell is evaluated at {probe}.{metric}@{length} (eval.lengths)", allowed=told)


def measure(text: object, *, short: bool = True, average: bool = False, where: Sequence[str] = ()) -> Measure:
    """Return the number that a grid means; `needle@65536` is the probe's first, `val_loss` the only one of that name.

    Args:
        text: As the file writes it.
        short: Whether a probe or a metric alone is enough.
        average: Whether `@avg` may stand for a context length.
        where: Keys below the one that is being read, for the error.

    Raises:
        PydanticCustomError: With what is allowed.
    """
    if not isinstance(text, str) or not (short or "." in text.partition("@")[0]):
        must = "must be the name of a number such as val_loss or needle@65536"
        raise wrong(f"{must if short else 'must read probe.metric or probe.metric@length'}, got {text!r}", *where)
    name, at, place = text.partition("@")
    probe, metric = _named(name, where)
    full = f"{probe}.{metric.name}"
    if (probe in PROBES and PROBES.load(probe).by_length) != bool(at):
        more = f", or {full}@{AVERAGE}" if average else ""
        needs = f"has no context length: {full}" if at else f"needs a context length: {full}@65536{more}"
        raise wrong(needs, *where)
    if at and average and place == AVERAGE:
        return Measure(probe, metric, None)
    if at and (not place.isdecimal() or not 0 < int(place) < 2**63):
        more = f" or {AVERAGE}" if average else ""
        raise wrong(f"the context length must be a whole number{more}, got {place!r}", *where)
    return Measure(probe, metric, int(place) if at else 0)


def _named(name: str, where: Sequence[str]) -> tuple[str, Metric]:
    """Return the probe and the metric of a name without a length."""
    known = [*PROBES, *OF_TRAINING]
    probe, dot, metric = name.partition(".")
    if not dot and name in known:
        return name, own_metrics(name)[0]
    if not dot:
        probes = [of for of, one in metrics.METRICS if one == name]
        if len(probes) > 1:
            among = [f"{of}.{name}" for of in probes]
            raise wrong(f"several probes have a number {name!r}", *where, allowed=among)
        if not probes:
            among = [*known, "val_loss", "tokens_per_s"]
            raise wrong(f"no probe and no number is called {name!r}", *where, allowed=among, word=name)
        probe, metric = probes[0], name
    if probe not in known:
        raise wrong(f"no probe {probe!r}", *where, allowed=known, word=probe)
    own = {one.name: one for one in own_metrics(probe)}
    if metric not in own:
        raise wrong(f"the probe {probe} has no metric {metric!r}", *where, allowed=own, word=metric)
    return probe, own[metric]


def own_metrics(probe: str) -> Sequence[Metric]:
    """Return the metrics of a probe, or of a training in place of one: the main number first."""
    return metrics.of_probe(probe) or tuple(PROBES.load(probe).metrics)
