"""What a grid's `stop:` says: which contrast is to be known how closely, by how many seeds at most (docs/designs.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..contrasts import Contrast, contrast_of
from ..revision_options import read_option

OBRIEN_FLEMING, POCOCK = SPENDINGS = ("obrien-fleming", "pocock")
"""How the level is shared out among the looks; spending.py says by which formula, and needs SciPy."""
OPTION = "stop"
"""Under this key in a revision's options."""
FIRST, MOST = 3, 8
"""Seeds at the first look and at the last, unless a grid says otherwise."""
MOST_SEEDS = 1_000


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Seeds are added to the cells of `contrast` until its interval is no wider than `width`, or with `sure` leaves out zero."""

    contrast: Contrast
    """With its reference named."""
    width: float | None
    """From the low end to the high one, in the number's own unit (shares as fractions); None: any."""
    sure: bool = False
    seeds: tuple[int, ...]
    """All that there can be, in the order in which they are added."""
    first: int = FIRST
    """How many of them there are at the first look."""
    wave: int = 1
    """How many are added between looks."""
    spending: str = OBRIEN_FLEMING
    """One of SPENDINGS."""

    @property
    def most(self) -> int:
        """Seeds at the last look."""
        return len(self.seeds)

    @cached_property
    def looks(self) -> tuple[int, ...]:
        """How many seeds there are at each look."""
        return (*range(self.first, self.most, self.wave), self.most)

    def after(self, seeds: int) -> int:
        """How many seeds there are at the first look with more than these; as many where that was the last."""
        return next((n for n in self.looks if n > seeds), self.most)

    def about(self, one: Contrast, reference: str) -> bool:
        """Whether that contrast, against that reference, is the rule's."""
        mine = self.contrast
        same = (one.measure, one.axis, one.level) == (mine.measure, mine.axis, mine.level)
        return same and reference == mine.reference and dict(one.within) == dict(mine.within)


def as_option(rule: StoppingRule) -> dict[str, Any]:
    """As JSON."""
    return asdict(rule) | {"contrast": asdict(rule.contrast), "seeds": list(rule.seeds)}


def rule_of(options: object) -> StoppingRule | None:
    """The rule that a launch stored with its revision; None where there is none, or what is no rule."""
    return read_option(options, OPTION, _rule)


def _rule(found: Mapping[str, Any]) -> StoppingRule | None:
    contrast, seeds, width = contrast_of(found.get("contrast")), found.get("seeds"), found.get("width")
    if contrast is None or contrast.reference is None or not isinstance(seeds, list) or len(seeds) > MOST_SEEDS:
        return None
    first, wave, spending = (found.get(name) for name in ("first", "wave", "spending"))
    whole = all(type(one) is int for one in (*seeds, first, wave)) and len(set(seeds)) == len(seeds)
    if not whole or not (width is None or (type(width) in (int, float) and width > 0)) or spending not in SPENDINGS:
        return None
    if not 2 <= first <= len(seeds) or wave < 1:  # type: ignore[operator]
        return None
    return StoppingRule(
        contrast=contrast, width=width, sure=found.get("sure") is True, seeds=tuple(seeds), first=first, wave=wave,  # type: ignore[arg-type]
        spending=str(spending),
    )  # fmt: skip
