"""Declared contrasts: differences that a grid was launched to measure, as stored in the options of its revision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AVERAGE_LENGTH = "avg"
"""Stands for a context length: the mean over all lengths, weighted by length."""
STRATUM_AXES = ("attn_type", "memory")
"""Axes whose levels differ so much that a mean over several levels weights them equally.

The first of them that a contrast does not fix is its stratum.
"""
OPTION_KEY = "contrasts"
"""Key in a revision's options."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A difference of one metric between two levels of an axis, over the cells at the levels of `within`.

    `length` is a context length in tokens, 0 for a metric without one, None for the length-weighted average. `margin`
    is the largest irrelevant difference, in the metric's own unit (shares as fractions); None if none is declared.
    """

    probe: str
    metric: str
    length: int | None
    axis: str
    level: str
    reference: str | None = None
    """Reference level; None for the axis's default reference."""
    within: Mapping[str, str] = field(default_factory=dict)
    margin: float | None = None

    @property
    def measure(self) -> str:
        """The measure as a grid writes it: needle.digit_accuracy@65536, val.val_loss, clean.nats@avg."""
        length_text = AVERAGE_LENGTH if self.length is None else str(self.length)
        return f"{self.probe}.{self.metric}" + (f"@{length_text}" if self.length != 0 else "")


def reference_level(levels: Sequence[str]) -> str:
    """Return the reference level of an axis: off, else baseline, else the first of `levels`.

    Raises IndexError without levels.
    """
    return next((level for level in ("off", "baseline") if level in levels), levels[0])


def length_weighted_mean(values: Mapping[int, float]) -> float:
    """Return the mean over lengths weighted by length: sum of L x value over sum of L.

    `values` maps a length in tokens (above 0) to its value. Raises ZeroDivisionError for an empty mapping.

    Source: docs/reference/mechanisms.md, "Losses".
    """
    return math.fsum(length * value for length, value in values.items()) / sum(values)


def contrasts_as_json(contrasts: tuple[Contrast, ...]) -> list[dict[str, Any]]:
    """Return the contrasts as JSON values."""
    return [dict(vars(contrast)) | {"within": dict(contrast.within)} for contrast in contrasts]


def contrasts_from_options(options: object) -> tuple[Contrast, ...]:
    """Return the contrasts in the options of a stored revision, in their order; empty without any.

    The database is not trusted: invalid entries are left out.
    """
    entries = options.get(OPTION_KEY, []) if isinstance(options, Mapping) else []
    return (
        tuple(contrast for entry in entries if (contrast := contrast_from_json(entry)) is not None)
        if isinstance(entries, list)
        else ()
    )


def contrast_from_json(entry: object) -> Contrast | None:
    """Return the contrast that an entry of `contrasts_as_json` holds; None for an invalid value.

    Required are the texts probe, metric, axis and level; a missing `length` means the length-weighted average.
    """
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(k), str) for k in ("probe", "metric", "axis", "level")
    ):
        return None
    length, reference, within, margin = (entry.get(name) for name in ("length", "reference", "within", "margin"))
    if not (length is None or type(length) is int) or not (reference is None or isinstance(reference, str)):
        return None
    if not isinstance(within, Mapping | None) or not (margin is None or type(margin) in (int, float)):
        return None
    return Contrast(
        probe=entry["probe"], metric=entry["metric"], length=length, axis=entry["axis"], level=entry["level"],
        reference=reference, within={str(a): str(b) for a, b in (within or {}).items()}, margin=margin,
    )  # fmt: skip
