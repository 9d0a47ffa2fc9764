"""Row types of effects, interactions and declared contrasts, for both estimators (matched pairs, least squares)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...number_format import Column
from ..significance.paired_tests import ALPHA, PairedTest

DECLARED_FAMILY = "declared contrasts"
"""Name of the family of the contrasts that the grid declares."""
EQUIVALENT_VERDICT = "equivalent"
"""Verdict of a contrast that is significantly inside its equivalence margin."""
AT_CHANCE_VERDICT = "not tested: all at chance level"
"""Verdict of a needle contrast whose two sides are both at chance level, so that no test is made."""
NO_TEST = "none"
"""Value of `PairedTest.method` for a row without a single pair, or without a variance to test against."""


@dataclass(kw_only=True)
class EffectRow:
    """An effect or interaction before the multiple-testing correction of its family.

    `column_index` is the position of the measure among the columns of the estimator. `levels` is (level, reference) by
    axis. `fields` holds every field that Effect and Interaction share, by name, except `p_corrected`.
    """

    column_index: int
    levels: Mapping[str, tuple[str, str]]
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EffectEstimate(PairedTest):
    """Estimate of an effect or interaction with its tests, in the measure's own unit.

    Shares are fractions in [0, 1]. `p_corrected` is p after the correction for its `family`, the tests that are
    corrected together; NaN without a test. `confirmatory` is True for declared contrasts. `expected` is the number of
    differences that the grid lists. `missing` counts, by the placeholder text of tables, the runs without a difference.
    `worst` is the mean with every diverged run at the worst possible value (for a loss: the worst measured), NaN
    without a diverged run. `i2` is the share of the variation between strata beyond chance and `p_heterogeneity` its
    test; both are NaN where a row averages no strata. `where` is a subset (`attn_type=polar, memory=on`), empty for the
    full sweep. `origins` are the (cell id, attempt id) pairs behind the estimate.
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
    def is_significant(self) -> bool:
        """True if the difference from zero is significant (alpha 0.05) after the correction for its family."""
        return self.p_corrected < ALPHA

    @property
    def is_heterogeneous(self) -> bool:
        """True if the averaged strata differ significantly, so that their average describes none of them."""
        return self.p_heterogeneity < ALPHA


@dataclass(frozen=True, kw_only=True)
class Effect(EffectEstimate):
    """Difference that a level makes against a reference level of the same axis: level minus reference.

    It is over matched pairs of configurations. `pairs` is the number of them, or of combinations in a least-squares
    fit; 0 without an estimate.
    """

    axis: str
    level: str
    reference: str
    pairs: int
    margin: float | None = None
    """Equivalence margin of a declared contrast: the largest difference that does not matter; None without one."""
    p_equivalence: float = math.nan
    """p of the two one-sided tests (TOST) of equivalence within `margin`, corrected with Holm; NaN without a margin."""
    is_at_chance: bool = False
    """True for a declared needle contrast if both sides are at chance level (needle_baseline.py)."""

    @property
    def verdict(self) -> str:
        """Verdict on a declared contrast, for tables.

        "no pairs" without an estimate, AT_CHANCE_VERDICT if `is_at_chance`, "differs" or "differs, within the
        margin" if significant after correction, else "equivalent" if significantly within the margin, else "not significant".
        """
        if not self.pairs:
            return "no pairs"
        if self.is_at_chance:
            return AT_CHANCE_VERDICT
        same = self.p_equivalence < ALPHA
        if self.is_significant:
            return "differs, within the margin" if same else "differs"
        return EQUIVALENT_VERDICT if same else "not significant"


@dataclass(frozen=True, kw_only=True)
class Interaction(EffectEstimate):
    """Interaction of two or three axes: a difference of differences (of differences) over matched groups.

    For two axes it is the effect of a level at a level of the second axis minus the effect at that axis's reference.
    `fours` is the number of matched groups, of four configurations for two axes and of eight for three.
    """

    axes: tuple[str, ...]
    levels: tuple[str, ...]
    references: tuple[str, ...]
    fours: int


def subset_text(levels: Mapping[str, str]) -> str:
    """Return the text of a subset as `EffectEstimate.where` holds it, such as `attn_type=polar, memory=on`.

    Args:
        levels: Level by axis, in the order of the text; empty for the full sweep, whose text is empty.
    """
    return ", ".join(f"{axis}={level}" for axis, level in levels.items())
