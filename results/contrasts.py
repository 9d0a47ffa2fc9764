"""Declared contrasts: the differences that a grid was launched to see, as its revision's options keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AVERAGE_LENGTH = "avg"
"""In place of a context length: the mean over all lengths, each weighted by itself."""
STRATUM_AXES = ("attn_type", "memory")
"""Axes whose levels differ so much that a mean over several gives each the same weight: the first that a contrast leaves open."""
OPTION = "contrasts"
"""Under this key in a revision's options."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A level of an axis against another, on one number, within the cells at the levels of `within`.

    `length` is a context length, 0 for a number that has none, None for the length-weighted average. `margin` is the
    difference that would not matter, in the number's own unit (shares as fractions); None where none is declared.
    """

    probe: str
    metric: str
    length: int | None
    axis: str
    level: str
    reference: str | None = None
    """None: the axis's reference level."""
    within: Mapping[str, str] = field(default_factory=dict)
    margin: float | None = None

    @property
    def measure(self) -> str:
        """As a grid writes it: needle.digit_accuracy@65536, val.val_loss, clean.nats@avg."""
        place = AVERAGE_LENGTH if self.length is None else str(self.length)
        return f"{self.probe}.{self.metric}" + (f"@{place}" if self.length != 0 else "")


def reference_level(levels: Sequence[str]) -> str:
    """The level that the others are held against: off, baseline, else the grid's first."""
    return next((word for word in ("off", "baseline") if word in levels), levels[0])


def weighted(values: Mapping[int, float]) -> float:
    """Mean over lengths weighted by length: sum of L x value over sum of L (docs/mechanisms.md, "Losses")."""
    return math.fsum(length * value for length, value in values.items()) / sum(values)


def as_options(contrasts: tuple[Contrast, ...]) -> list[dict[str, Any]]:
    """As JSON."""
    return [dict(vars(one)) | {"within": dict(one.within)} for one in contrasts]


def contrasts_of(options: object) -> tuple[Contrast, ...]:
    """The contrasts that a launch stored with its revision. Whoever wrote the database is not trusted: what is none is left out."""
    found = options.get(OPTION, []) if isinstance(options, Mapping) else []
    return tuple(one for given in found if (one := contrast_of(given)) is not None) if isinstance(found, list) else ()


def contrast_of(given: object) -> Contrast | None:
    """One contrast as `as_options` writes it; None for what is none."""
    if not isinstance(given, Mapping) or not all(
        isinstance(given.get(k), str) for k in ("probe", "metric", "axis", "level")
    ):
        return None
    length, reference, within, margin = (given.get(name) for name in ("length", "reference", "within", "margin"))
    if not (length is None or type(length) is int) or not (reference is None or isinstance(reference, str)):
        return None
    if not isinstance(within, Mapping | None) or not (margin is None or type(margin) in (int, float)):
        return None
    return Contrast(
        probe=given["probe"], metric=given["metric"], length=length, axis=given["axis"], level=given["level"],
        reference=reference, within={str(a): str(b) for a, b in (within or {}).items()}, margin=margin,
    )  # fmt: skip
