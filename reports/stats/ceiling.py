"""What a network scores on the needle that has retrieved nothing: the best constant answer on the very trials that were asked."""

from __future__ import annotations

from collections.abc import Iterable

from ...results import metrics, paper
from ...results.store.records import Value
from ..data import SweepData
from ..numbers import rounded

__all__ = ["ceiling", "needle_note", "yardstick"]

ACCURACY = ("needle", "digit_accuracy")
MEASURED = ("needle", "constant_accuracy")


def ceiling(data: SweepData, length: int) -> float | None:
    """The share of the needle's digits that one and the same digit, answered everywhere, gets right at that context length.

    Keys and digits are drawn once from a seed, so this is a fact of the trials and above 1 in 10. Where cells were asked
    different digits, of the cells whose trials favour it most. Length 0 stands for the length-weighted mean over all lengths.
    None where it was not recorded.
    """
    if not length:
        known = {one: found for one in data.lengths(*ACCURACY) if one and (found := ceiling(data, one)) is not None}
        return sum(one * found for one, found in known.items()) / sum(known) if known else None
    told = [found for value in _at(data, MEASURED, length) if (found := value.value) is not None]
    if not told:
        # before it was a number of its own, it stood beside the accuracy as what a trivial answer scores
        described = (value.description or {} for value in _at(data, ACCURACY, length))
        told = [metrics.metric(*ACCURACY, one).chance or 0.0 for one in described if "chance" in one]
    if not told and data.sweep in paper.SWEEPS:
        return paper.MOST_FREQUENT / paper.DIGITS
    return max(told, default=None)


def _at(data: SweepData, key: tuple[str, str], length: int) -> Iterable[Value]:
    values = (data.values.get((cell.cell_id, *key, length)) for cell in data.cells)
    return (value for value in values if value is not None)


def yardstick(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """In a few words, in percent: what a guess scores, and always the same digit at these lengths (None: all that are shown)."""
    guess = metrics.metric(*ACCURACY).chance_text.removesuffix("%")
    wanted = [length for length in (data.lengths(*ACCURACY) if lengths is None else lengths) if length]
    found = sorted(
        {rounded(one, 1, percent=True) for length in wanted if (one := ceiling(data, length)) is not None}, key=float
    )
    if not found:
        return f"a guess: {guess}; the same digit everywhere: more, not recorded"
    return f"the same digit everywhere: {' to '.join(dict.fromkeys((found[0], found[-1])))}; a guess: {guess}"


def needle_note(data: SweepData, heading: str = "Ndl") -> str:
    """The note under every table that prints needle accuracies."""
    return f"{heading}: needle digits right, in % ({yardstick(data)})."
