"""A grid's `design:`, the part of its cells that is launched: read, chosen, and checked against what the grid wants to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ...results.console.text import counted
from ...results.contrasts import Contrast
from ...results.designs import aliasing, design_choice, regular_fractions
from ...results.designs.design_option import METHODS, Design, as_options
from ...results.designs.design_space import EXACT, Space, Term, closed, estimable, words
from ...results.lazy_import import Late
from ..errors import GridError
from .contrasts import canonical, place, shown
from .yaml_document import Document

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")

KEY = "design"
SIZES = ("fraction", "runs", "resolution")
KEYS = (*SIZES, "method", "model")
MODELS = {"main": 1, "two-way": 2}
"""Interactions of how many axes are estimated, besides those that declared contrasts need."""
RESOLUTIONS = {name: number for number, name in enumerate(regular_fractions.ROMAN) if number > 2}


@dataclass(frozen=True)
class Chosen:
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
            "widths": {one.axis: one.whole for one in aliasing.widths(model, self.members)},
        }

    def told(self) -> list[str]:
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
            *(f"design: {one}" for one in aliasing.told(design.model, self.members)),
            *(f"design: {one}" for one in aliasing.precision(design.model, self.members)),
        ]


def read(
    document: Document,
    given: Mapping[str, Any],
    levels: Mapping[str, Sequence[Any]],
    exclude: Sequence[Mapping[str, Sequence[str]]],
    texts: Mapping[str, Sequence[str]],
    contrasts: Sequence[Contrast],
) -> Chosen:
    """The design that a grid with these axes asks for; `texts` are the levels as the rules of `exclude` write them.

    Raises GridError for what is no design, cannot be made, or cannot estimate a contrast that the grid declares.
    """
    asked = _Asked(document, given)
    asked.check_keys()
    space = _space(asked, levels, exclude, texts)
    terms = _terms(asked, space, contrasts)
    chosen = _Chooser(asked, space, terms).chosen()
    _check_contrasts(asked, chosen, contrasts, levels)
    return chosen


class _Asked:
    """The section as it stands in the file."""

    def __init__(self, document: Document, given: Mapping[str, Any]) -> None:
        self.document, self.given = document, given

    def error(self, problem: str, *where: str, allowed: Sequence[str] = (), word: str | None = None) -> GridError:
        """About a key of the section, or about all of it."""
        return GridError(
            self.document.path, self.document.line(KEY, *where), ".".join((KEY, *where)), problem, allowed, word
        )

    def check_keys(self) -> None:
        """That it has one size, and nothing unknown. Raises GridError."""
        for key in self.given:
            if key not in KEYS:
                raise self.error("no such key", str(key), allowed=KEYS, word=str(key))
        if sum(key in self.given for key in SIZES) != 1:
            raise self.error(f"must give one of {', '.join(SIZES)}")
        for key, known in (("method", METHODS), ("model", tuple(MODELS))):
            if key in self.given and self.given[key] not in known:
                raise self.error(f"no {key} {self.given[key]!r}", key, allowed=known, word=str(self.given[key]))

    @property
    def size(self) -> str:
        """Which of SIZES is given."""
        return next(key for key in SIZES if key in self.given)

    @property
    def method(self) -> str | None:
        """The one that is asked for by name."""
        return self.given.get("method")

    def fraction(self) -> Fraction:
        """Above 0 and below 1. Raises GridError."""
        value = self.given["fraction"]
        try:
            found = Fraction(0) if isinstance(value, bool) else Fraction(str(value).replace(" ", ""))
        except (ValueError, ZeroDivisionError):
            found = Fraction(0)
        if not 0 < found < 1:
            raise self.error(f"must be a share between 0 and 1 such as 1/4, got {value!r}", "fraction")
        return found.limit_denominator(1_000_000)

    def runs(self) -> int:
        """At least 1. Raises GridError."""
        value = self.given["runs"]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"must be a whole number of combinations, at least 1, got {value!r}", "runs")
        return value

    def resolution(self) -> int:
        """3 or more. Raises GridError."""
        value = self.given["resolution"]
        number = RESOLUTIONS.get(str(value).upper(), value)
        if isinstance(number, bool) or not isinstance(number, int) or number < 3:
            raise self.error(
                f"must be III (main effects apart), IV, V or higher, got {value!r}",
                "resolution",
                allowed=tuple(RESOLUTIONS),
            )
        return number


def _space(
    asked: _Asked,
    levels: Mapping[str, Sequence[Any]],
    exclude: Sequence[Mapping[str, Sequence[str]]],
    texts: Mapping[str, Sequence[str]],
) -> Space:
    """The combinations to choose from. An axis of one level is none here; what `exclude` says of it holds for all or nothing."""
    named = {axis: tuple(canonical(axis, level) for level in some) for axis, some in levels.items()}
    for axis, some in named.items():
        if len(set(some)) < len(some):
            raise asked.error(f"two levels of axes.{axis} are the same; keep one of them")
    axes = {axis: some for axis, some in named.items() if len(some) > 1}
    if not axes:
        raise asked.error("no axis has two levels, so there is nothing to choose from; leave design out")
    rules = []
    for rule in exclude:
        places = {axis: tuple(named[axis][texts[axis].index(w)] for w in dict.fromkeys(some)) for axis, some in rule.items()}  # fmt: skip
        rules.append({axis: some for axis, some in places.items() if axis in axes})
    space = Space(axes, tuple(rules))
    if not len(space.points):
        raise asked.error("exclude drops every combination; there is nothing to choose from")
    return space


def _terms(asked: _Asked, space: Space, contrasts: Sequence[Contrast]) -> list[Term]:
    """Main effects, the interactions that the model asks for, and those that declared contrasts are about."""
    order = MODELS[asked.given.get("model", "main")]
    needed = [space.term((one.axis, *one.within)) for one in contrasts if one.axis in space.axes]
    made = [term for n in range(1, order + 1) for term in space.terms(n)]
    return closed([*made, *(term for term in needed if term)])


class _Chooser:
    """Makes the design; says in one line why it cannot be made."""

    def __init__(self, asked: _Asked, space: Space, terms: Sequence[Term]) -> None:
        self.asked, self.space, self.terms = asked, space, terms

    def chosen(self) -> Chosen:
        size = self.asked.size
        if size == "resolution":
            return self._of_resolution(self.asked.resolution())
        if size == "fraction":
            return self._of_share(self.asked.fraction())
        if self.asked.method == "regular":
            return self._of_share(Fraction(self.asked.runs(), len(self.space.points)), "runs")
        return self._d_optimal(self.asked.runs(), "runs")

    def _of_resolution(self, resolution: int) -> Chosen:
        asked, axes = self.asked, regular_fractions.two_level(self.space)
        if asked.method not in (None, "regular"):
            raise asked.error("a resolution is that of a regular fraction; leave method out, or give runs", "method")
        if self.space.exclude:
            raise asked.error(
                "a regular fraction needs every combination, and the grid excludes some; give runs", "resolution"
            )
        found = regular_fractions.smallest(self.space, resolution, self.terms)
        if found is None:
            name = regular_fractions.ROMAN[resolution] if resolution < len(regular_fractions.ROMAN) else str(resolution)
            raise asked.error(
                f"no fraction of resolution {name} of {len(axes)} two-level axes tells {_listed(self.terms)} apart; "
                "give runs, or leave design out",
                "resolution",
            )
        return Chosen(*design_choice.regular_fraction(self.space, self.terms, found))

    def _of_share(self, share: Fraction, key: str = "fraction") -> Chosen:
        asked = self.asked
        halvings = share.denominator.bit_length() - 1
        whole = share.numerator == 1 and share.denominator == 2**halvings
        if asked.method != "d-optimal" and whole and not self.space.exclude:
            # beside axes with more levels a d-optimal design keeps main effects clearer than a fraction of resolution III
            two = all(len(levels) == 2 for levels in self.space.axes.values())
            found = regular_fractions.best(
                self.space, halvings, self.terms, 3 if two or asked.method == "regular" else 4
            )
            if found is not None:
                return Chosen(*design_choice.regular_fraction(self.space, self.terms, found))
        if asked.method == "regular":
            raise asked.error(
                f"there is no regular fraction of {share} that tells {_listed(self.terms)} apart: it needs a power of 1/2, enough "
                "axes with two levels, and nothing excluded; leave method out for a d-optimal one",
                key,
            )
        return self._d_optimal(max(1, round(share * len(self.space.points))), key)

    def _d_optimal(self, runs: int, key: str) -> Chosen:
        asked, every = self.asked, len(self.space.points)
        if runs > every:
            raise asked.error(
                f"{runs} are more than the grid's {counted(every, 'combination')}; leave design out to run all", key
            )
        model = Design(method=METHODS[0], runs=runs, space=self.space, terms=tuple(self.terms)).model
        if runs < model.rank:
            parts = ", ".join(["the mean", *(f"{words(term)} {self.space.df(term)}" for term in self.terms)])
            raise asked.error(
                f"{counted(runs, 'combination')} cannot estimate {counted(model.rank, 'number')} ({parts}); "
                f"give runs: {model.rank} or more",
                key,
            )
        return Chosen(*design_choice.d_optimal(self.space, self.terms, runs))


def _check_contrasts(
    asked: _Asked, chosen: Chosen, contrasts: Sequence[Contrast], levels: Mapping[str, Sequence[Any]]
) -> None:
    """That every declared contrast between cells of the design can be estimated from it. Raises GridError."""
    design, here = chosen.design, chosen.design.model.every[chosen.members]
    for index, one in enumerate(contrasts):
        axis = design.space.axes.get(one.axis, ())
        # levels of include alone are no part of the design
        reference = one.reference or reference_of([canonical(one.axis, level) for level in levels.get(one.axis, ())])
        known = one.level in axis and reference in axis and reference != one.level
        inside = {a: word for a, word in one.within.items() if a in design.space.axes}
        if not known or any(word not in design.space.axes[a] for a, word in inside.items()):
            continue
        weights = design.model.contrast(one.axis, one.level, reference, inside)
        if np.abs(weights).max(initial=0.0) <= EXACT:
            where = ", ".join(f"{a}={word}" for a, word in inside.items()) or "the grid"
            raise asked.error(
                f"cannot estimate {shown(place(asked.document, index))} ({one.axis}: {one.level} - {reference}): exclude leaves no pair of them within "
                f"{where}; change exclude or the contrast"
            )
        if not estimable(here, weights):
            raise asked.error(
                f"cannot estimate {shown(place(asked.document, index))} ({one.axis}: {one.level} - {reference}) from {counted(design.runs, 'combination')}; "
                "give more runs"
            )


def reference_of(levels: Sequence[str]) -> str:
    """The level that a report holds the others against: off, baseline, else the first."""
    return next((word for word in ("off", "baseline") if word in levels), levels[0] if levels else "")


def _listed(terms: Sequence[Term]) -> str:
    names = [words(term) for term in terms]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
