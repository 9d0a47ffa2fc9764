"""Building blocks of the published sweeps: reading of the CSV files, and the class of a sweep to store."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from .. import metrics
from ..metrics import Metric
from ..store.records import CellRecord, CurvePoint, Measurement

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sheet:
    """A sweep to store: its cells in order, with measurements, curves, release of torch and provenance by cell id.

    `version` is the version of the source (v1, v2 or empty), `torch` the release of torch by cell id, and `seed` a text
    about the seeds of the runs.
    """

    name: str
    cells: Sequence[CellRecord]
    values: Mapping[str, Sequence[Measurement]]
    version: str
    curves: Mapping[str, Sequence[CurvePoint]] = field(default_factory=dict)
    torch: Mapping[str, str] = field(default_factory=dict)
    ran: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of a Provenance by cell id: what is known about machine and data."""
    seed: str = "none was set"


def rows(name: str) -> list[dict[str, str]]:
    """Return a CSV file (`complete-v2`, `lengths`, `small-v1`, `open-weight`, ...) as one mapping of texts per row."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def percent_as_fraction(text: str) -> float:
    """Return a printed percentage as a fraction with the same digits."""
    return float(Decimal(text) / 100)


def printed_measurement(probe: str, metric: Metric, length: int, text: str) -> Measurement:
    """Return a printed number as a measurement, with a description if the package does not define the metric.

    Args:
        probe: name of the probe.
        metric: declaration of the metric.
        length: context length in tokens, 0 for none.
        text: printed number; a percentage for shares, which are stored as fractions with the same digits.

    Raises:
        ValueError: the text is no number; decimal.InvalidOperation, an ArithmeticError, for a percentage.
    """
    return Measurement(
        probe=probe,
        metric=metric.name,
        length=length,
        value=percent_as_fraction(text) if metric.percent else float(text),
        unit=metric.unit,
        description=None if metrics.builtin_metric(probe, metric.name) else metrics.metric_description(metric),
    )


def published_cell_id(sweep: str, slug: str) -> str:
    """Return the id of a published cell, whose complete config is unknown: a hash of sweep and slug."""
    # the hashed text is not canonical JSON, so that no cell of a grid can have the id
    return hashlib.sha256(f"{sweep}/{slug}".encode()).hexdigest()[:12]
