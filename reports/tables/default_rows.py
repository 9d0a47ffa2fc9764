"""Which rows of the tables of effects and interactions a reader sees first: the answers, and every row that is sure."""

from __future__ import annotations

from collections.abc import Sequence

from ..number_format import Column
from ..stats.effects.effects import Effect, Interaction, Tested, contrast_column, first_measures, reference_level
from ..sweep_data import SweepData

__all__ = ["NEAR", "first_columns", "first_effects", "first_interactions"]

NEAR = 0.5
"""p corr below which the nearest interaction of a family without a sure one is shown."""


def first_columns(data: SweepData) -> list[Column]:
    """Every number at its longest context length, and those that declared contrasts are about."""
    declared = [contrast_column(data, one) for one in data.contrasts]
    return list({one.key: one for one in [*declared, *first_measures(data)]}.values())


def first_effects(data: SweepData, found: Sequence[Effect]) -> list[Effect]:
    """The declared contrasts; of the others all that are sure, and besides every level against the reference over the whole
    sweep, with its strata where they differ."""
    first = {one.key for one in first_measures(data)}
    apart = {(one.measure.heading, *_levels(one)) for one in found if not one.where and one.mixed}

    def kept(one: Effect) -> bool:
        if one.confirmatory or (one.sure and one.measure.key in first):
            return True
        if one.measure.key not in first or one.reference != reference_level(data.levels(one.axis)):
            return False
        return not one.where or (one.where.count("=") == 1 and (one.measure.heading, *_levels(one)) in apart)

    return [one for one in found if kept(one)]


def first_interactions(found: Sequence[Interaction]) -> list[Interaction]:
    """Of every number the families that hold something sure first; of a family all rows that are sure, with those over the whole
    sweep that they are part of, and the strata of these; of the others the row that came nearest, if near it came."""
    families: dict[str, list[Interaction]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    order: dict[str, list[tuple[float, list[Interaction]]]] = {}
    for rows in families.values():
        nearest = min(rows, key=_p)
        told = {_levels(one) for one in rows if one.sure}
        kept = [one for one in rows if _levels(one) in told] or [nearest] * (_p(nearest) < NEAR)
        order.setdefault(nearest.measure.heading, []).append((_p(nearest), kept))
    return [one for blocks in order.values() for _, kept in sorted(blocks, key=lambda block: block[0]) for one in kept]


def _levels(one: Tested) -> tuple[object, ...]:
    if isinstance(one, Effect):
        return one.axis, one.level, one.reference
    assert isinstance(one, Interaction)
    return one.axes, one.levels, one.references


def _p(one: Tested) -> float:
    return one.p_corrected if one.p_corrected == one.p_corrected else 2.0
