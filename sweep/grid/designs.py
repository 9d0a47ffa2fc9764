"""Fractional designs (`design:` of a grid): reading, choosing and checking against the grid's contrasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ...results.console.text import counted
from ...results.contrasts import Contrast, reference_level
from ...results.designs import aliasing, design_choice, regular_fractions
from ...results.designs.design_option import METHODS, Design, design_as_json
from ...results.designs.design_space import EXACT, DesignSpace, Term, hierarchical_closure, is_estimable, term_text
from ..errors import GridError
from .grid_file import MODELS, DesignKeys
from .sections import canonical_level, contrast_key_path
from .yaml_document import GridDocument, format_key_path

KEY = "design"


@dataclass(frozen=True)
class ChosenDesign:
    """A grid's design, and the indices of its combinations.

    Indices count the combinations of the axes that `exclude` leaves, in grid order.
    """

    design: Design
    members: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Return the design as its revision stores it, with aliases, D-efficiency and relative interval widths.

        Keys of the design: method, runs, of (number of combinations), axes, exclude, terms, words (defining relation).
        Added keys: aliases (list of {first, second, correlation, whole}, the terms as lists of axes), d_efficiency (a
        number) and widths (axis -> inflation of its interval).
        """
        model = self.design.model
        return design_as_json(self.design) | {
            "aliases": [
                {"first": list(a.first), "second": list(a.second), "correlation": a.correlation, "whole": a.is_complete}
                for a in aliasing.aliases(model, self.members)
            ],
            "d_efficiency": aliasing.efficiency(model, self.members),
            "widths": {width.axis: width.total for width in aliasing.interval_inflations(model, self.members)},
        }

    def lines(self) -> list[str]:
        """Return the design's description, aliases and precision: one sentence per line, without a full stop.

        Each line starts with "design: "; there is at least the first one.
        """
        design = self.design
        what = f"design: {design.runs} of {counted(len(design.space.points), 'combination')}, {design.method}"
        if design.defining_relation:
            what += f", I = {' = '.join(map(term_text, design.defining_relation))}"
        what += f"; estimated: {', '.join(map(term_text, design.terms))}; other interactions are assumed to be zero"
        over = design.runs - design.model.rank
        if not over:
            what += "; no residual degrees of freedom, so there are no intervals without more seeds"
        return [
            what,
            *(f"design: {sentence}" for sentence in aliasing.alias_sentences(design.model, self.members)),
            *(f"design: {sentence}" for sentence in aliasing.precision_sentences(design.model, self.members)),
        ]


def read_design(
    document: GridDocument,
    keys: DesignKeys,
    levels: Mapping[str, Sequence[Any]],
    exclude: Sequence[Mapping[str, Sequence[str]]],
    contrasts: Sequence[Contrast],
) -> ChosenDesign:
    """Return the design that a grid declares.

    Estimated are the mean, the main effects (two-way interactions too with `model: two-way`) and the interactions that
    declared contrasts need. Axes of one level are left out.

    Args:
        document: The grid file, for the lines of errors.
        keys: The validated keys of `design`.
        levels: Axis -> its levels as written.
        exclude: Rules of the grid, axis -> level texts.
        contrasts: Declared contrasts; those on axes that the design does not have are ignored.

    Raises:
        GridError: For a design that cannot be constructed, or that cannot estimate a declared contrast.
    """
    space = _space(document, levels, exclude)
    needed = [space.term((contrast.axis, *contrast.within)) for contrast in contrasts if contrast.axis in space.axes]
    terms = [term for n in range(1, MODELS[keys.model] + 1) for term in space.terms(n)]
    chosen = _DesignBuilder(
        document, keys, space, hierarchical_closure([*terms, *(term for term in needed if term)])
    ).build()
    _check_contrasts(document, chosen, contrasts, levels)
    return chosen


def _space(
    document: GridDocument, levels: Mapping[str, Sequence[Any]], exclude: Sequence[Mapping[str, Sequence[str]]]
) -> DesignSpace:
    """Return the combinations to choose from, with axes of one level removed.

    An `exclude` rule keeps its conditions on axes with several levels only.

    Raises:
        GridError: If no axis has two levels, two levels of an axis are the same, or `exclude` drops everything.
    """
    named = {axis: tuple(canonical_level(axis, level) for level in values) for axis, values in levels.items()}
    for axis, names in named.items():
        if len(set(names)) < len(names):
            raise document.error((KEY,), f"two levels of axes.{axis} are the same; keep one of them")
    axes = {axis: names for axis, names in named.items() if len(names) > 1}
    if not axes:
        raise document.error((KEY,), "no axis has two levels, so there is nothing to choose from; leave design out")
    rules = [
        {
            axis: tuple(canonical_level(axis, word) for word in dict.fromkeys(rule_levels))
            for axis, rule_levels in rule.items() if axis in axes
        }
        for rule in exclude
    ]  # fmt: skip
    space = DesignSpace(axes, tuple(rules))
    if not len(space.points):
        raise document.error((KEY,), "exclude drops every combination; there is nothing to choose from")
    return space


class _DesignBuilder:
    """Builder of a design from the section's keys; raises GridError with the reason if there is none."""

    def __init__(self, document: GridDocument, keys: DesignKeys, space: DesignSpace, terms: Sequence[Term]) -> None:
        self.document, self.keys, self.space, self.terms = document, keys, space, terms

    def error(self, problem: str, key: str) -> GridError:
        """Return a GridError about a key of the section."""
        return self.document.error((KEY, key), problem)

    def build(self) -> ChosenDesign:
        """Return the design by resolution, fraction or runs, whichever the section gives.

        With `method: regular`, a number of runs counts as the fraction runs / combinations. Raises GridError.
        """
        keys = self.keys
        if keys.resolution is not None:
            return self._by_resolution(keys.resolution)
        if keys.fraction is not None:
            return self._by_fraction(keys.fraction)
        assert keys.runs is not None
        if keys.method == "regular":
            return self._by_fraction(Fraction(keys.runs, len(self.space.points)), "runs")
        return self._d_optimal(keys.runs, "runs")

    def _by_resolution(self, resolution: int) -> ChosenDesign:
        """Return the smallest regular fraction of at least that resolution which estimates all terms.

        Raises GridError if there is none, the grid excludes combinations, or the method is not regular.
        """
        if self.keys.method not in (None, "regular"):
            raise self.error(
                "resolution needs method regular; leave method out, or give runs instead of resolution", "method"
            )
        if self.space.exclude:
            problem = "a regular fraction needs every combination, but the grid excludes some; give runs instead of resolution"
            raise self.error(problem, "resolution")
        fraction = regular_fractions.smallest_fraction(self.space, resolution, self.terms)
        if fraction is None:
            name = regular_fractions.ROMAN[resolution] if resolution < len(regular_fractions.ROMAN) else str(resolution)
            raise self.error(
                f"no fraction of resolution {name} of {len(regular_fractions.two_level_axes(self.space))} two-level axes separates "
                f"{_listed(self.terms)}; give runs, or leave design out",
                "resolution",
            )
        return ChosenDesign(*design_choice.regular_fraction(self.space, self.terms, fraction))

    def _by_fraction(self, share: Fraction, key: str = "fraction") -> ChosenDesign:
        """Return a design of that share of the combinations: a regular fraction if possible, else a D-optimal one.

        A regular fraction needs a power of 1/2 and no excluded combinations, and resolution IV if an axis has more than
        two levels (III with `method: regular`).

        Args:
            share: Share of the combinations.
            key: Key of the section to report in errors.

        Raises:
            GridError: If `method: regular` has no such fraction, or the share is too small.
        """
        method = self.keys.method
        halvings = share.denominator.bit_length() - 1
        is_power_of_half = share.numerator == 1 and share.denominator == 2**halvings
        if method != "d-optimal" and is_power_of_half and not self.space.exclude:
            # with axes of more levels, a D-optimal design separates main effects better than resolution III
            two = all(len(levels) == 2 for levels in self.space.axes.values())
            fraction = regular_fractions.best_fraction(
                self.space, halvings, self.terms, 3 if two or method == "regular" else 4
            )
            if fraction is not None:
                return ChosenDesign(*design_choice.regular_fraction(self.space, self.terms, fraction))
        if method == "regular":
            raise self.error(
                f"no regular fraction of {share} separates {_listed(self.terms)}: it needs a power of 1/2, enough axes with two "
                "levels and no exclude; leave method out for a d-optimal design",
                key,
            )
        return self._d_optimal(max(1, round(share * len(self.space.points))), key)

    def _d_optimal(self, runs: int, key: str) -> ChosenDesign:
        """Return the D-optimal design of that many combinations.

        Raises GridError, about `key`, for more combinations than the grid has or fewer than parameters to estimate.
        """
        combinations = counted(len(self.space.points), "combination")
        if runs > len(self.space.points):
            raise self.error(f"{runs} is more than the grid's {combinations}; leave design out to run all", key)
        model = Design(method=METHODS[0], runs=runs, space=self.space, terms=tuple(self.terms)).model
        if runs < model.rank:
            parts = ", ".join(["the mean", *(f"{term_text(term)} {self.space.df(term)}" for term in self.terms)])
            raise self.error(
                f"{counted(runs, 'combination')} cannot estimate {counted(model.rank, 'parameter')} ({parts}); "
                f"give runs: {model.rank} or more",
                key,
            )
        return ChosenDesign(*design_choice.d_optimal(self.space, self.terms, runs))


def _check_contrasts(
    document: GridDocument, chosen: ChosenDesign, contrasts: Sequence[Contrast], levels: Mapping[str, Sequence[Any]]
) -> None:
    """Raise GridError for a declared contrast between levels of the design that the design cannot estimate.

    Contrasts on levels of `include` alone are skipped, and so are those whose level is the reference or whose `within`
    names a level outside the design.
    """
    design, design_rows = chosen.design, chosen.design.model.full_matrix[chosen.members]
    for index, contrast in enumerate(contrasts):
        axis = design.space.axes.get(contrast.axis, ())
        # levels that occur only in `include` are not part of the design
        level_names = [canonical_level(contrast.axis, level) for level in levels.get(contrast.axis, ())]
        reference = contrast.reference or (reference_level(level_names) if level_names else "")
        is_in_design = contrast.level in axis and reference in axis and reference != contrast.level
        inside = {a: word for a, word in contrast.within.items() if a in design.space.axes}
        if not is_in_design or any(word not in design.space.axes[a] for a, word in inside.items()):
            continue
        weights = design.model.contrast(contrast.axis, contrast.level, reference, inside)
        problem = f"cannot estimate {format_key_path(contrast_key_path(document, index))} ({contrast.axis}: {contrast.level} - {reference})"
        if np.abs(weights).max(initial=0.0) <= EXACT:
            where = ", ".join(f"{a}={word}" for a, word in inside.items()) or "the grid"
            raise document.error(
                (KEY,),
                f"{problem}: exclude leaves no pair of these levels within {where}; change exclude or the contrast",
            )
        if not is_estimable(design_rows, weights):
            raise document.error((KEY,), f"{problem} from {counted(design.runs, 'combination')}; give more runs")


def _listed(terms: Sequence[Term]) -> str:
    """Return the terms as text, separated by commas; at most six, then the number of the others."""
    names = [term_text(term) for term in terms]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
