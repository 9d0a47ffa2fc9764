"""What a row of effects, interactions or contrasts says, however it was worked out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...number_format import Column
from ..significance.paired_tests import ALPHA, PairedTest

CONFIRMATORY = "declared contrasts"
EQUIVALENT = "equivalent"
FLOOR = "not asked: all at chance"
NO_TEST = "none"
"""Method of a row without a single pair."""


@dataclass(kw_only=True)
class EffectRow:
    """A row before the correction for its family: the number of its measure among those worked out together, its
    (level, reference) by axis, and all fields that an Effect and an Interaction have in common but `p_corrected`."""

    place: int
    levels: Mapping[str, tuple[str, str]]
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tested(PairedTest):
    """Differences in a measure, summed up and tested; in the measure's own unit, shares as fractions.

    `p_corrected` is p after the correction for its `family`, the tests made together. `expected` is how many differences the grid
    lists, `missing` why runs of them are not there (the words of tables), and `worst` the mean with every diverged run at the
    worst value possible (of a loss: the worst measured); NaN where none diverged. `i2` is the share of the variation between
    strata that is more than chance and `p_heterogeneity` tests it; both NaN where a row averages no strata. `where` names a
    subset (`attn_type=polar, memory=on`) or is empty for the whole sweep; `origins` are the cells and attempts.
    """

    measure: Column
    where: str
    p_corrected: float
    family: str
    confirmatory: bool = False
    expected: int
    missing: Mapping[str, int]
    worst: float
    i2: float
    p_heterogeneity: float
    origins: tuple[tuple[str, int | None], ...]

    @property
    def sure(self) -> bool:
        """Whether it differs from zero, after the correction for its family."""
        return self.p_corrected < ALPHA

    @property
    def mixed(self) -> bool:
        """Whether it averages strata that differ, so that it speaks of none of them."""
        return self.p_heterogeneity < ALPHA


@dataclass(frozen=True, kw_only=True)
class Effect(Tested):
    """The difference that a level makes against another of its axis, over matched pairs of configurations."""

    axis: str
    level: str
    reference: str
    pairs: int
    margin: float | None = None
    """Of a declared contrast: the difference that would not matter."""
    p_equivalence: float = math.nan
    """Of the difference lying within the margin (two one-sided tests), corrected for all that have one."""
    floor: bool = False
    """Of a declared contrast: whether neither of its sides retrieves anything (needle_baseline.py)."""

    @property
    def verdict(self) -> str:
        """What a declared contrast came to."""
        if not self.pairs:
            return "no pairs"
        if self.floor:
            return FLOOR
        same = self.p_equivalence < ALPHA
        if self.sure:
            return "differs, within the margin" if same else "differs"
        return EQUIVALENT if same else "not shown"


@dataclass(frozen=True, kw_only=True)
class Interaction(Tested):
    """How much more a level does at a level of a second axis than at that axis's reference, for three axes how much more of
    that at a level of the third: differences of differences over matched fours, or eights."""

    axes: tuple[str, ...]
    levels: tuple[str, ...]
    references: tuple[str, ...]
    fours: int


def where_text(levels: Mapping[str, str]) -> str:
    """Return the subset of a row as `Tested.where` names it."""
    return ", ".join(f"{axis}={level}" for axis, level in levels.items())
