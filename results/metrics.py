"""Declaration of every metric: unit, better direction, wording, and the score of a trivial answer.

Tables, figures and the dashboard use no other source. METRICS holds the metrics of the package's probes, read from
metrics.csv, which databases store without a description. The description of any other metric, such as one of a plugin,
is in the database next to the value.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Better = Literal["lower", "higher", "neither"]
DIRECTIONS: Mapping[Better, int] = {"lower": -1, "neither": 0, "higher": 1}
DIRECTION_SENTENCES: Mapping[Better, str] = {"lower": "Less is better.", "neither": "", "higher": "More is better."}
FRACTION = "fraction"
"""Unit of a number between 0 and 1 that is printed in percent."""
UNKNOWN_METRIC_TEXT = "Recorded by the probe {probe}, which describes it by name and unit only."
TEXT_SEPARATOR = ":"
"""Between the name of a probe and that of a further text on which it is measured, as in `clean:code`."""
SD_SUFFIX = "_sd"
"""Suffix of a metric's name: the standard deviation between runs.

It is the sample standard deviation between the `n` runs whose mean is the metric without the suffix. Published numbers
have such pairs.
"""
STDERR_SUFFIX = "_stderr"
"""Suffix of a metric's name: the standard error of a downstream task's score over its questions."""
SAMPLES = "samples"
"""Key of a description, and folder of an attempt: the questions and answers of downstream tasks, a file per task."""
PEAK_MEMORY = "peak_memory"
"""Metric that every probe over context lengths has."""


@dataclass(frozen=True)
class Metric:
    """A metric of a probe. Only name and unit are required."""

    name: str
    unit: str
    """`fraction` for a share, which is printed in percent; 1 for a pure number."""
    better: Better = "neither"
    words: str = ""
    """Meaning in one or two sentences, for a reader of the report alone."""
    heading: str = ""
    """Heading of its column in the complete results; a metric without one appears in no table."""
    decimals: int = 3
    """Decimals of a printed number; of a share in percent."""
    chance: float | None = None
    """Score of a trivial answer, in `unit`; None if there is no such answer or it depends on the cell."""
    trials: int = 0
    """For a share of `n` correct answers: number of answers per trial.

    Trials are independent, so the interval is Wilson's over `n / trials`. 1 (or True) if each answer is a trial of its
    own, 0 for any other metric.
    """
    noun: str = ""
    """Plain name in sentences and figures, such as "needle accuracy"; empty: the heading, or else the name."""

    @property
    def direction(self) -> int:
        """-1 if less is better, 1 if more is better, 0 for neither."""
        return DIRECTIONS[self.better]

    @property
    def plain_name(self) -> str:
        """Name in sentences and figures, such as "needle accuracy": the noun, else the heading, else the name."""
        return self.noun or self.heading or self.name

    @property
    def percent(self) -> bool:
        """True for a metric that is printed in percent."""
        return self.unit == FRACTION

    @property
    def chance_text(self) -> str:
        """The chance level as printed, such as 10% or 5.545 nats/token; empty without one."""
        if self.chance is None:
            return ""
        return f"{100 * self.chance:.4g}%" if self.percent else f"{self.chance:.4g} {self.unit}"

    @property
    def definition(self) -> str:
        """Meaning, better direction and chance level as one text."""
        trivial = f"Score of a trivial answer: {self.chance_text}." if self.chance is not None else ""
        return " ".join(filter(None, (self.words, DIRECTION_SENTENCES[self.better], trivial)))


def _read_metrics() -> Iterator[tuple[str, Metric]]:
    """Yield (probe, metric) of each row of metrics.csv, in its order; the file declares every metric of the package."""
    with Path(__file__).with_name("metrics.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chance = float(row["chance"]) if row["chance"] else None
            numbers = {name: int(row[name]) for name in ("decimals", "trials")}
            texts = {name: row[name] for name in ("name", "unit", "better", "heading", "noun", "words")}
            yield row["probe"], Metric(**texts, **numbers, chance=chance)  # type: ignore[arg-type]


TRAINING_SOURCES = ("throughput", "corpus")
"""Names that stand in place of a probe for numbers that a training itself records."""
SAMPLES = "samples"
"""Name that stands in place of a probe for texts that the network generated during training."""
METRICS: Mapping[tuple[str, str], Metric] = {(probe, metric.name): metric for probe, metric in _read_metrics()}
"""Metrics by (probe, name), in the order of metrics.csv."""
_PEAK = Metric(
    PEAK_MEMORY,
    "bytes",
    "lower",
    "Peak memory of the evaluation: on CUDA the allocated memory, weights included; on the CPU the resident memory.",
    decimals=0,
)


def metrics_of_probe(probe: str) -> tuple[Metric, ...]:
    """Return the metrics of METRICS that the probe measures, the main one first; empty for an unknown probe.

    On a further text (`clean:code`) it measures the same.
    """
    base = probe.partition(TEXT_SEPARATOR)[0]
    return tuple(metric for (of, _), metric in METRICS.items() if of == base)


EXTERNAL_ONLY = ("bits", "bits_per_byte", "steps_per_digit")
"""Metrics that only external models have, since their tokens differ."""


def by_subject(probe: str) -> tuple[tuple[Metric, ...], tuple[Metric, ...]]:
    """Return two tuples: the metrics that the probe measures for every network, and those for external models only."""
    metrics = metrics_of_probe(probe)
    own = tuple(metric for metric in metrics if metric.name not in EXTERNAL_ONLY)
    return own, tuple(metric for metric in metrics if metric.name in EXTERNAL_ONLY)


def builtin_metric(probe: str, name: str) -> Metric | None:
    """Return the package's declaration of a metric; None for a metric that the package does not define.

    Every probe has PEAK_MEMORY. A name with the suffix "_sd" gives the standard deviation of the metric without it.
    """
    if name == PEAK_MEMORY:
        return _PEAK
    base = METRICS.get((probe.partition(TEXT_SEPARATOR)[0], name.removesuffix(SD_SUFFIX)))
    return sd_metric(base) if base is not None and name.endswith(SD_SUFFIX) else base


def sd_metric(base: Metric) -> Metric:
    """Return the metric of the standard deviation between runs of a metric.

    It has the same unit and decimals, the suffix "_sd", and no direction, heading or chance level.
    """
    text = f"Standard deviation between runs of: {base.words}"
    return Metric(base.name + SD_SUFFIX, base.unit, words=text, decimals=base.decimals)


def metric(probe: str, name: str, description: Mapping[str, Any] | None = None, unit: str = "") -> Metric:
    """Return the declaration of a metric; never None.

    The database is not trusted: invalid fields of the description are ignored. A metric that neither METRICS nor the
    description explains gets a sentence that names the probe (UNKNOWN_METRIC_TEXT).

    Args:
        probe: probe.
        name: metric.
        description: description stored next to the value; it defines metrics that METRICS lacks, and overrides fields
            of others.
        unit: unit stored next to the value; ignored for a metric of the package.
    """
    result = builtin_metric(probe, name)
    if description is None and result is not None:
        return result
    result = result or Metric(name, unit, words=UNKNOWN_METRIC_TEXT.format(probe=probe))
    return replace(
        result, **{field: value for field, value in (description or {}).items() if _is_valid_field(field, value)}
    )


def metric_description(metric: Metric) -> dict[str, Any]:
    """Return the description of a metric as JSON: the fields that differ from the defaults, without name and unit."""
    plain = Metric(metric.name, metric.unit)
    return {name: value for name, value in asdict(metric).items() if value != getattr(plain, name)}


MAX_TRIALS = 1_000_000
_TYPES = {"words": str, "heading": str, "decimals": int}


def _is_valid_field(name: str, value: Any) -> bool:
    """Return True if a field of a stored description has a valid name and value.

    `better` must be "lower", "neither" or "higher", `chance` a number, `trials` 0 to 1,000,000 (MAX_TRIALS), `decimals`
    0 to 12, `words` and `heading` text. Unknown names, and name and unit, are invalid.
    """
    if name == "better":
        return isinstance(value, str) and value in DIRECTIONS
    if name == "chance":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "trials":
        return isinstance(value, int) and 0 <= value <= MAX_TRIALS
    if name == "decimals" and not (isinstance(value, int) and 0 <= value <= 12):
        return False
    return name in _TYPES and type(value) is _TYPES[name]
