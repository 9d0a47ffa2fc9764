"""A partial design as stored in the options of a revision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..revision_options import read_option
from .design_space import DesignSpace, LinearModel, Term

OPTION_KEY = "design"
"""Key in a revision's options."""
METHODS = ("d-optimal", "regular")
MAX_POINTS = 200_000
"""Maximum number of points of a space read from a database."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A selection of a grid's combinations, and the terms of the linear model that it was chosen to estimate."""

    method: str
    """One of METHODS."""
    runs: int
    """Number of combinations of levels; each has all seeds of the grid."""
    space: DesignSpace
    terms: tuple[Term, ...]
    defining_relation: tuple[Term, ...] = ()
    """For a regular fraction: the products of axes that are constant over its cells."""

    @cached_property
    def model(self) -> LinearModel:
        """Linear model of the mean and the terms."""
        return LinearModel(self.space, self.terms)


def design_as_json(design: Design) -> dict[str, Any]:
    """Return the design as JSON values; axes are a list, since some databases lose the order of a mapping.

    Keys: method, runs, of (number of possible points), axes ([axis, levels] pairs), exclude, terms, words (the defining
    relation).
    """
    space = design.space
    return {
        "method": design.method,
        "runs": design.runs,
        "of": len(space.points),
        "axes": [[axis, list(levels)] for axis, levels in space.axes.items()],
        "exclude": [{axis: list(excluded) for axis, excluded in rule.items()} for rule in space.exclude],
        "terms": [list(term) for term in design.terms],
        "words": [list(word) for word in design.defining_relation],
    }


def design_from_options(options: object) -> Design | None:
    """Return the design in the options of a stored revision; None for no design or an invalid one."""
    return read_option(options, OPTION_KEY, _parse_design)


def _parse_design(fields: Mapping[str, Any]) -> Design | None:
    """Return the design that `design_as_json` wrote; None for an invalid one.

    Invalid are axes with fewer than two distinct levels, a space of more than 200,000 points (MAX_POINTS), unknown axes
    in a rule, no terms or duplicate ones, and methods other than "d-optimal" and "regular". Unknown axes of a term are
    dropped. May raise KeyError, TypeError or ValueError for a wrong structure.
    """
    axes = {str(axis): tuple(map(str, levels)) for axis, levels in fields["axes"]}
    exclude = tuple(
        {str(axis): tuple(map(str, excluded)) for axis, excluded in rule.items()} for rule in fields["exclude"]
    )
    sizes = [len(set(levels)) for levels in axes.values()]
    are_distinct = all(len(set(levels)) == len(levels) > 1 for levels in axes.values())
    if (
        not axes
        or not are_distinct
        or math.prod(sizes) > MAX_POINTS
        or any(rule.keys() - axes.keys() for rule in exclude)
    ):
        return None
    space = DesignSpace(axes, exclude)
    terms = tuple(space.term(map(str, term)) for term in fields["terms"])
    if not terms or not all(terms) or len(set(terms)) < len(terms):
        return None
    runs, method = fields["runs"], str(fields["method"])
    if type(runs) is not int or method not in METHODS:
        return None
    return Design(
        method=method,
        runs=runs,
        space=space,
        terms=terms,
        defining_relation=tuple(space.term(map(str, w)) for w in fields["words"]),
    )
