"""What the published sweeps are made with: the shipped CSVs as text, and a sweep that is to be stored."""

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
    """A sweep to be stored: its cells in order and, by cell, the numbers, the curve and the release of torch."""

    name: str
    cells: Sequence[CellRecord]
    values: Mapping[str, Sequence[Measurement]]
    version: str
    curves: Mapping[str, Sequence[CurvePoint]] = field(default_factory=dict)
    torch: Mapping[str, str] = field(default_factory=dict)
    ran: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By cell, what is known of machine and text: fields of a Provenance."""
    seed: str = "none was set"


def rows(name: str) -> list[dict[str, str]]:
    """A shipped CSV (`complete-v2`, `lengths`, `small-v1`, `open-weight`, ...) as text, one mapping a row."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fraction(text: str) -> float:
    """A printed percentage as the fraction whose shortest decimal has the same digits."""
    return float(Decimal(text) / 100)


def number(probe: str, about: Metric, length: int, text: str) -> Measurement:
    """Return a printed number; of another probe than the package's with what it means."""
    return Measurement(
        probe=probe,
        metric=about.name,
        length=length,
        value=fraction(text) if about.percent else float(text),
        unit=about.unit,
        description=None if metrics.known(probe, about.name) else metrics.metric_description(about),
    )


def published_cell_id(sweep: str, slug: str) -> str:
    """The id of a published cell, of whose config nobody knows all."""
    # the text that is hashed is no canonical JSON, so no cell of a grid can have the id
    return hashlib.sha256(f"{sweep}/{slug}".encode()).hexdigest()[:12]
