"""The section `stop:` of a grid: contrast, wanted precision, and maximum number of seeds (docs/how-to/add-seeds.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..contrasts import Contrast, contrast_from_json
from ..revision_options import read_option

OBRIEN_FLEMING, POCOCK = SPENDINGS = ("obrien-fleming", "pocock")
"""Names of the spending functions; alpha_spending.py, which needs SciPy, holds their formulas."""
OPTION_KEY = "stop"
"""Key in a revision's options."""
DEFAULT_FIRST_SEEDS, DEFAULT_MAX_SEEDS = 3, 8
"""Default number of seeds at the first look and at the last."""
MAX_SEEDS = 1_000


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Adds seeds to the cells of `contrast` until its interval is narrow enough or, with `sure`, excludes zero."""

    contrast: Contrast
    """Contrast, with its reference named."""
    width: float | None
    """Maximum width of the interval, in the metric's own unit (shares as fractions); None for no limit."""
    sure: bool = False
    seeds: tuple[int, ...]
    """All possible seeds, in the order in which they are added."""
    first: int = DEFAULT_FIRST_SEEDS
    """Number of seeds at the first look."""
    wave: int = 1
    """Number of seeds added between looks."""
    spending: str = OBRIEN_FLEMING
    """One of SPENDINGS."""

    @property
    def max_seeds(self) -> int:
        """Number of seeds at the last look."""
        return len(self.seeds)

    @cached_property
    def seeds_at_looks(self) -> tuple[int, ...]:
        """Number of seeds at each look, increasing."""
        return (*range(self.first, self.max_seeds, self.wave), self.max_seeds)

    def next_look(self, seeds: int) -> int:
        """Return the number of seeds at the next look with more than `seeds`; the maximum if there is none."""
        return next((n for n in self.seeds_at_looks if n > seeds), self.max_seeds)

    def applies_to(self, contrast: Contrast, reference: str) -> bool:
        """Return True if the rule is about that contrast with that reference level; the margin is not compared.

        `reference` is compared with the rule's own; the reference in `contrast` is ignored.
        """
        own = self.contrast
        same = (contrast.measure, contrast.axis, contrast.level) == (own.measure, own.axis, own.level)
        return same and reference == own.reference and dict(contrast.within) == dict(own.within)


def rule_as_json(rule: StoppingRule) -> dict[str, Any]:
    """Return the rule as JSON values: its fields by name, the contrast as a dict of its own fields."""
    return asdict(rule) | {"contrast": asdict(rule.contrast), "seeds": list(rule.seeds)}


def rule_from_options(options: object) -> StoppingRule | None:
    """Return the rule in the options of a stored revision; None for no rule or an invalid one."""
    return read_option(options, OPTION_KEY, _parse_rule)


def _parse_rule(fields: Mapping[str, Any]) -> StoppingRule | None:
    """Return the rule that `rule_as_json` wrote; None for an invalid one.

    Invalid are a contrast without a reference, more than 1,000 seeds (MAX_SEEDS) or duplicate ones, a width that is not
    above 0, a first look outside 2 to the number of seeds, a wave below 1, and a spending function other than
    "obrien-fleming" and "pocock". Unknown keys are ignored.
    """
    contrast, seeds, width = contrast_from_json(fields.get("contrast")), fields.get("seeds"), fields.get("width")
    if contrast is None or contrast.reference is None or not isinstance(seeds, list) or len(seeds) > MAX_SEEDS:
        return None
    first, wave, spending = (fields.get(name) for name in ("first", "wave", "spending"))
    are_valid_integers = all(type(number) is int for number in (*seeds, first, wave)) and len(set(seeds)) == len(seeds)
    if (
        not are_valid_integers
        or not (width is None or (type(width) in (int, float) and width > 0))
        or spending not in SPENDINGS
    ):
        return None
    if not 2 <= first <= len(seeds) or wave < 1:  # type: ignore[operator]
        return None
    return StoppingRule(
        contrast=contrast, width=width, sure=fields.get("sure") is True, seeds=tuple(seeds), first=first, wave=wave,  # type: ignore[arg-type]
        spending=str(spending),
    )  # fmt: skip
