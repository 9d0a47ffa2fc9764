"""An amount that is known within bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Span:
    """A likely amount between a low and a high one."""

    low: float
    likely: float
    high: float

    @classmethod
    def exactly(cls, amount: float) -> Span:
        """One that is known."""
        return cls(amount, amount, amount)

    @classmethod
    def seen(cls, amounts: Iterable[float], margin: float) -> Span:
        """Around those that were seen, at least one: their median, from the smallest to the largest, `margin` wider."""
        found = sorted(amounts)
        return cls(found[0] * (1 - margin), median(found), found[-1] * (1 + margin))

    def plus(self, other: Span) -> Span:
        """The sum, both low or both high at once."""
        return Span(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> Span:
        """So many of it."""
        return Span(self.low * factor, self.likely * factor, self.high * factor)

    def by(self, other: Span) -> Span:
        """The product of two."""
        return Span(self.low * other.low, self.likely * other.likely, self.high * other.high)

    def as_json(self, digits: int = 4) -> dict[str, float]:
        """The three numbers by name."""
        return {name: round(getattr(self, name), digits) for name in ("low", "likely", "high")}


NOTHING = Span(0.0, 0.0, 0.0)


def total(spans: Iterable[Span]) -> Span:
    """The sum of all of them."""
    found = NOTHING
    for one in spans:
        found = found.plus(one)
    return found
