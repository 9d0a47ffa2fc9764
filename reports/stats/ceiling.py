"""What a network scores on the needle that has retrieved nothing: the best constant answer on the very trials that were asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...results import metrics, paper
from ...results.store.records import Value
from ..data import WEIGHTED, SweepData
from ..numbers import length_name, rounded
from ..table import Entry

__all__ = ["ACCURACY", "about_needle", "below_note", "ceiling", "ceilings", "needle_note", "needle_words", "yardstick"]

ACCURACY = ("needle", "digit_accuracy")
"""The number whose yardstick this is."""
MEASURED = ("needle", "constant_accuracy")
DUST = 1e-9


def ceiling(data: SweepData, length: int) -> float | None:
    """The share of the needle's digits that one and the same digit, answered everywhere, gets right at that context length.

    Keys and digits are drawn once from a seed, so this is a fact of the trials and above 1 in 10. Where cells were asked
    different digits, of the cells whose trials favour it most. Length 0 stands for the length-weighted mean over all lengths.
    None where it was not recorded.
    """
    if not length:
        known = {one: found for one in data.lengths(*ACCURACY) if one and (found := ceiling(data, one)) is not None}
        return sum(one * found for one, found in known.items()) / sum(known) if known else None
    values = (data.values.get((cell.cell_id, *key, length)) for cell in data.cells for key in (MEASURED, ACCURACY))
    return ceilings((value for value in values if value is not None), data.sweep in paper.SWEEPS).get(length)


def ceilings(values: Iterable[Value], published: bool) -> dict[int, float]:
    """By context length, of these numbers of one cell or several; `published`: they are the paper's."""
    measured: dict[int, list[float]] = {}
    described: dict[int, list[float]] = {}
    for value in values:
        told = value.description or {}
        if (value.probe, value.metric) == MEASURED and value.value is not None:
            measured.setdefault(value.length, []).append(value.value)
        elif (value.probe, value.metric) == ACCURACY and value.value is not None:
            # before it was a number of its own, it stood beside the accuracy as what a trivial answer scores
            shares = [metrics.metric(*ACCURACY, told).chance or 0.0] if "chance" in told else []
            described.setdefault(value.length, []).extend(shares)
    fallback = [paper.MOST_FREQUENT / paper.DIGITS] if published else []
    known = {length: measured.get(length) or described.get(length) or fallback for length in measured | described}
    return {length: max(shares) for length, shares in known.items() if shares}


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


def needle_words(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """The sentence for a picture of needle accuracies among other numbers."""
    return f"Needle digits right, in %: {yardstick(data, lengths)}."


def about_needle(entries: Iterable[Entry], words: Iterable[str] = ()) -> bool:
    """Whether any of these is a needle accuracy or worked out from some, or any of the words a heading of it (Ndl@64K)."""
    heading = metrics.metric(*ACCURACY).heading
    if any(word.partition("@")[0].partition(" ")[0] == heading for word in words):
        return True
    return any((one.probe, (one.metric or "").removesuffix(WEIGHTED)) == ACCURACY for one in entries)


def below_note(data: SweepData) -> str:
    """How many cells score no more than the best constant answer, length by length: what tells those apart is luck."""
    counts: Counter[int] = Counter()
    cells: Counter[int] = Counter()
    for length in filter(None, data.lengths(*ACCURACY)):
        level = ceiling(data, length)
        values = (data.values.get((cell.cell_id, *ACCURACY, length)) for cell in data.cells)
        shares = [value.value for value in values if value is not None and value.value is not None]
        if level is not None and shares:
            cells[length], counts[length] = len(shares), sum(share <= level + DUST for share in shares)
    if not any(counts.values()):
        return ""
    told = ", ".join(f"{count} of {cells[length]} at {length_name(length)}" for length, count in counts.items())
    return f"Cells that score no more than that: {told}; a difference between two of those says nothing of retrieval."
