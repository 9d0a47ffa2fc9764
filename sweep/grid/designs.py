"""A grid's `design:`, the part of its cells that is launched: read, chosen, and checked against what the grid wants to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ...results.console.text import counted
from ...results.contrasts import Contrast, reference_level
from ...results.designs import aliasing, design_choice, regular_fractions
from ...results.designs.design_option import METHODS, Design, as_options
from ...results.designs.design_space import EXACT, DesignSpace, Term, hierarchical_closure, is_estimable, words
from ..errors import GridError
from .grid_file import MODELS, DesignKeys
from .sections import canonical_level, contrast_key_path
from .yaml_document import GridDocument, format_key_path

KEY = "design"


@dataclass(frozen=True)
class ChosenDesign:
    """The design of a grid and the combinations that it takes, by their places among those that `exclude` leaves."""

    design: Design
    members: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """The design as its revision keeps it, with what it mixes and how wide its intervals are."""
        model = self.design.model
        return as_options(self.design) | {
            "aliases": [
                {"first": list(a.first), "second": list(a.second), "correlation": a.correlation, "whole": a.whole}
                for a in aliasing.aliases(model, self.members)
            ],
            "d_efficiency": aliasing.efficiency(model, self.members),
            "widths": {width.axis: width.whole for width in aliasing.widths(model, self.members)},
        }

    def lines(self) -> list[str]:
        """What it is, what cannot be told from what, and how much wider intervals are: a sentence a line, without an end."""
        design = self.design
        what = f"design: {design.runs} of {counted(len(design.space.points), 'combination')}, {design.method}"
        if design.words:
            what += f", I = {' = '.join(map(words, design.words))}"
        what += f"; estimated: {', '.join(map(words, design.terms))}; other interactions are taken for nothing"
        over = design.runs - design.model.rank
        if not over:
            what += "; no cell is left over to judge noise by, so that without further seeds there are no intervals"
        return [
            what,
            *(f"design: {sentence}" for sentence in aliasing.alias_sentences(design.model, self.members)),
            *(f"design: {sentence}" for sentence in aliasing.precision(design.model, self.members)),
        ]


def read_design(
    document: GridDocument,
    keys: DesignKeys,
    levels: Mapping[str, Sequence[Any]],
    exclude: Sequence[Mapping[str, Sequence[str]]],
    contrasts: Sequence[Contrast],
) -> ChosenDesign:
    """Return the design that a grid with these axes asks for; `exclude` by the words of levels.

    Raises GridError for what is no design, cannot be made, or cannot estimate a contrast that the grid declares.
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
    """Return the combinations to choose from. An axis of one level is none here; an exclude rule on it holds for all or nothing."""
    named = {axis: tuple(canonical_level(axis, level) for level in values) for axis, values in levels.items()}
    for axis, names in named.items():
        if len(set(names)) < len(names):
            raise document.error((KEY,), f"two levels of axes.{axis} are the same; keep one of them")
    axes = {axis: names for axis, names in named.items() if len(names) > 1}
    if not axes:
        raise document.error((KEY,), "no axis has two levels, so there is nothing to choose from; leave design out")
    rules = [
        {axis: tuple(canonical_level(axis, word) for word in dict.fromkeys(rule_levels)) for axis, rule_levels in rule.items() if axis in axes}
        for rule in exclude
    ]  # fmt: skip
    space = DesignSpace(axes, tuple(rules))
    if not len(space.points):
        raise document.error((KEY,), "exclude drops every combination; there is nothing to choose from")
    return space


class _DesignBuilder:
    """Makes the design; says in one line why it cannot be made."""

    def __init__(self, document: GridDocument, keys: DesignKeys, space: DesignSpace, terms: Sequence[Term]) -> None:
        self.document, self.keys, self.space, self.terms = document, keys, space, terms

    def error(self, problem: str, key: str) -> GridError:
        """About a key of the section."""
        return self.document.error((KEY, key), problem)

    def build(self) -> ChosenDesign:
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
        if self.keys.method not in (None, "regular"):
            raise self.error("a resolution is that of a regular fraction; leave method out, or give runs", "method")
        if self.space.exclude:
            problem = "a regular fraction needs every combination, and the grid excludes some; give runs"
            raise self.error(problem, "resolution")
        fraction = regular_fractions.smallest_fraction(self.space, resolution, self.terms)
        if fraction is None:
            name = regular_fractions.ROMAN[resolution] if resolution < len(regular_fractions.ROMAN) else str(resolution)
            raise self.error(
                f"no fraction of resolution {name} of {len(regular_fractions.two_level_axes(self.space))} two-level axes tells "
                f"{_listed(self.terms)} apart; give runs, or leave design out",
                "resolution",
            )
        return ChosenDesign(*design_choice.regular_fraction(self.space, self.terms, fraction))

    def _by_fraction(self, share: Fraction, key: str = "fraction") -> ChosenDesign:
        method = self.keys.method
        halvings = share.denominator.bit_length() - 1
        is_power_of_half = share.numerator == 1 and share.denominator == 2**halvings
        if method != "d-optimal" and is_power_of_half and not self.space.exclude:
            # beside axes with more levels a d-optimal design keeps main effects clearer than a fraction of resolution III
            two = all(len(levels) == 2 for levels in self.space.axes.values())
            fraction = regular_fractions.best(self.space, halvings, self.terms, 3 if two or method == "regular" else 4)
            if fraction is not None:
                return ChosenDesign(*design_choice.regular_fraction(self.space, self.terms, fraction))
        if method == "regular":
            raise self.error(
                f"there is no regular fraction of {share} that tells {_listed(self.terms)} apart: it needs a power of 1/2, enough "
                "axes with two levels, and nothing excluded; leave method out for a d-optimal one",
                key,
            )
        return self._d_optimal(max(1, round(share * len(self.space.points))), key)

    def _d_optimal(self, runs: int, key: str) -> ChosenDesign:
        combinations = counted(len(self.space.points), "combination")
        if runs > len(self.space.points):
            raise self.error(f"{runs} are more than the grid's {combinations}; leave design out to run all", key)
        model = Design(method=METHODS[0], runs=runs, space=self.space, terms=tuple(self.terms)).model
        if runs < model.rank:
            parts = ", ".join(["the mean", *(f"{words(term)} {self.space.df(term)}" for term in self.terms)])
            raise self.error(
                f"{counted(runs, 'combination')} cannot estimate {counted(model.rank, 'number')} ({parts}); "
                f"give runs: {model.rank} or more",
                key,
            )
        return ChosenDesign(*design_choice.d_optimal(self.space, self.terms, runs))


def _check_contrasts(
    document: GridDocument, chosen: ChosenDesign, contrasts: Sequence[Contrast], levels: Mapping[str, Sequence[Any]]
) -> None:
    """Raise GridError for a declared contrast between cells of the design that cannot be estimated from it."""
    design, design_rows = chosen.design, chosen.design.model.every[chosen.members]
    for index, contrast in enumerate(contrasts):
        axis = design.space.axes.get(contrast.axis, ())
        # levels of include alone are no part of the design
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
                (KEY,), f"{problem}: exclude leaves no pair of them within {where}; change exclude or the contrast"
            )
        if not is_estimable(design_rows, weights):
            raise document.error((KEY,), f"{problem} from {counted(design.runs, 'combination')}; give more runs")


def _listed(terms: Sequence[Term]) -> str:
    names = [words(term) for term in terms]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
