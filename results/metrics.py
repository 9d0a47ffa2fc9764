"""What every metric is: its unit, which direction is better, its words, and what a trivial answer scores.

Tables, figures and the dashboard ask here and nowhere else. METRICS has those of the probes, read from metrics.csv, that databases
hold without a description; of any other, one of a plugin for example, the description stands in the database beside the number.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

Better = Literal["lower", "higher", "neither"]
DIRECTIONS: Mapping[Better, int] = {"lower": -1, "neither": 0, "higher": 1}
DIRECTION_SENTENCES: Mapping[Better, str] = {"lower": "Less is better.", "neither": "", "higher": "More is better."}
FRACTION = "fraction"
"""The unit of a number between 0 and 1 that is printed in percent."""
UNKNOWN = "Recorded by the probe {probe}, which says no more of it than its name and unit."
SD_SUFFIX = "_sd"
"""End of a metric's name: the sample standard deviation between the `n` runs whose mean is the number of the name without it.
Papers print such pairs; a sweep of one's own has its runs instead."""
PEAK_MEMORY = "peak_memory"
"""A metric that every probe over lengths has."""


@dataclass(frozen=True)
class Metric:
    """One kind of number that a probe gives. Only name and unit must be said."""

    name: str
    unit: str
    """`fraction` for a share, which is printed in percent; 1 for a bare number."""
    better: Better = "neither"
    words: str = ""
    """What it means, in a sentence or two, for a reader who has only the report."""
    heading: str = ""
    """Of its column in the complete results; one that has none stands in no table."""
    decimals: int = 3
    """Of a printed number; of a share in percent."""
    chance: float | None = None
    """What a trivial answer scores, in `unit`; None where there is no such thing, or it depends on the cell."""
    trials: int = 0
    """Of a share of `n` answers that are right: how many of them one trial gives. Trials are independent, so the interval is
    Wilson's over `n / trials`; 1 (or True) where each answer is a trial of its own, 0 for what is no such share."""

    @property
    def direction(self) -> int:
        """-1 where less is better, 1 where more is, 0 where neither."""
        return DIRECTIONS[self.better]

    @property
    def percent(self) -> bool:
        """Whether it is printed in percent."""
        return self.unit == FRACTION

    @property
    def chance_text(self) -> str:
        """The chance level as people write it, 10% or 5.545 nats/token; nothing where there is none."""
        if self.chance is None:
            return ""
        return f"{100 * self.chance:.4g}%" if self.percent else f"{self.chance:.4g} {self.unit}"

    @property
    def definition(self) -> str:
        """All of it in words."""
        trivial = f"A trivial answer scores {self.chance_text}." if self.chance is not None else ""
        return " ".join(filter(None, (self.words, DIRECTION_SENTENCES[self.better], trivial)))


def _declared() -> Iterator[tuple[str, Metric]]:
    """Yield the probe and the metric of each row of metrics.csv: the one declaration of every metric of the package."""
    with Path(__file__).with_name("metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chance = float(row["chance"]) if row["chance"] else None
            numbers = {name: int(row[name]) for name in ("decimals", "trials")}
            texts = {name: row[name] for name in ("name", "unit", "better", "heading", "words")}
            yield row["probe"], Metric(**texts, **numbers, chance=chance)  # type: ignore[arg-type]


TRAINING_SOURCES = ("throughput", "corpus")
"""What stands in place of a probe where a training records a number by itself."""
SAMPLES = "samples"
"""What stands in place of a probe where a training keeps texts that its network wrote."""
METRICS: Mapping[tuple[str, str], Metric] = {(probe, metric.name): metric for probe, metric in _declared()}
"""By probe and name, in the order of the rows of metrics.csv."""
_PEAK = Metric(
    PEAK_MEMORY,
    "bytes",
    "lower",
    "Most memory that the evaluation took: on CUDA what was allocated, weights included; on the CPU the resident memory.",
    decimals=0,
)


def metrics_of_probe(probe: str) -> tuple[Metric, ...]:
    """The metrics of METRICS that the probe gives, the main one first."""
    return tuple(metric for (of, _), metric in METRICS.items() if of == probe)


EXTERNAL_ONLY = ("bits", "bits_per_byte", "steps_per_digit")
"""Numbers that only models from elsewhere have, whose tokens are others."""


def by_subject(probe: str) -> tuple[tuple[Metric, ...], tuple[Metric, ...]]:
    """The metrics that the probe gives of every network, and those that it gives only of models from elsewhere."""
    found = metrics_of_probe(probe)
    own = tuple(metric for metric in found if metric.name not in EXTERNAL_ONLY)
    return own, tuple(metric for metric in found if metric.name in EXTERNAL_ONLY)


def known(probe: str, name: str) -> Metric | None:
    """What is known of a metric without a database; None for one that is not the package's."""
    if name == PEAK_MEMORY:
        return _PEAK
    base = METRICS.get((probe, name.removesuffix(SD_SUFFIX)))
    return sd_metric(base) if base is not None and name.endswith(SD_SUFFIX) else base


def sd_metric(about: Metric) -> Metric:
    """The metric of the standard deviation between runs of a number."""
    words = f"Standard deviation between runs of: {about.words}"
    return Metric(about.name + SD_SUFFIX, about.unit, words=words, decimals=about.decimals)


def metric(probe: str, name: str, description: Mapping[str, Any] | None = None, unit: str = "") -> Metric:
    """What is known of a metric.

    `description` and `unit` are those that stand beside a number in the database; a description says what METRICS does
    not know, or knows only for all cells at once. Whoever wrote the database is not trusted: what makes no sense counts
    as not said.
    """
    found = known(probe, name)
    if description is None and found is not None:
        return found
    found = found or Metric(name, unit, words=UNKNOWN.format(probe=probe))
    return replace(found, **{field: value for field, value in (description or {}).items() if _sensible(field, value)})


def metric_description(metric: Metric) -> dict[str, Any]:
    """The description of a metric as JSON, without what is as in every other and without name and unit, which stand beside it."""
    plain = Metric(metric.name, metric.unit)
    return {name: value for name, value in asdict(metric).items() if value != getattr(plain, name)}


MOST_ANSWERS = 1_000_000
_TYPES = {"words": str, "heading": str, "decimals": int}


def _sensible(name: str, value: Any) -> bool:
    if name == "better":
        return isinstance(value, str) and value in DIRECTIONS
    if name == "chance":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "trials":
        return isinstance(value, int) and 0 <= value <= MOST_ANSWERS
    if name == "decimals" and not (isinstance(value, int) and 0 <= value <= 12):
        return False
    return name in _TYPES and type(value) is _TYPES[name]


FIELDS = tuple(field.name for field in fields(Metric) if field.name not in ("name", "unit"))
"""What a description may say."""
