"""A partial design as the options of a revision keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..revision_options import read_option
from .design_space import DesignSpace, LinearModel, Term

OPTION = "design"
"""Under this key in a revision's options."""
METHODS = ("d-optimal", "regular")
MOST_POINTS = 200_000
"""Of a space that a database may name."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which of a grid's combinations were launched, and which numbers of a linear model they were chosen to estimate."""

    method: str
    """One of METHODS."""
    runs: int
    """Combinations of levels; each has all seeds of the grid."""
    space: DesignSpace
    terms: tuple[Term, ...]
    words: tuple[Term, ...] = ()
    """Of a regular fraction: the products of axes that are the same in all its cells."""

    @cached_property
    def model(self) -> LinearModel:
        """The mean and the terms."""
        return LinearModel(self.space, self.terms)


def as_options(design: Design) -> dict[str, Any]:
    """As JSON; the axes in a list, since the order of a mapping is lost in some databases."""
    space = design.space
    return {
        "method": design.method,
        "runs": design.runs,
        "of": len(space.points),
        "axes": [[axis, list(levels)] for axis, levels in space.axes.items()],
        "exclude": [{axis: list(words) for axis, words in rule.items()} for rule in space.exclude],
        "terms": [list(term) for term in design.terms],
        "words": [list(word) for word in design.words],
    }


def design_of(options: object) -> Design | None:
    """The design that a launch stored with its revision; None where there is none, or what is no design."""
    return read_option(options, OPTION, _design)


def _design(found: Mapping[str, Any]) -> Design | None:
    axes = {str(axis): tuple(map(str, levels)) for axis, levels in found["axes"]}
    exclude = tuple({str(axis): tuple(map(str, words)) for axis, words in rule.items()} for rule in found["exclude"])
    sizes = [len(set(levels)) for levels in axes.values()]
    whole = all(len(set(levels)) == len(levels) > 1 for levels in axes.values())
    if not axes or not whole or math.prod(sizes) > MOST_POINTS or any(rule.keys() - axes.keys() for rule in exclude):
        return None
    space = DesignSpace(axes, exclude)
    terms = tuple(space.term(map(str, term)) for term in found["terms"])
    if not terms or not all(terms) or len(set(terms)) < len(terms):
        return None
    runs, method = found["runs"], str(found["method"])
    if type(runs) is not int or method not in METHODS:
        return None
    return Design(
        method=method, runs=runs, space=space, terms=terms, words=tuple(space.term(map(str, w)) for w in found["words"])
    )
