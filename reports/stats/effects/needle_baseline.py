"""What a network scores on the needle that has retrieved nothing: the best constant answer on the very trials that were asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from scipy import special

from ....results import metrics, paper
from ....results.contrasts import Contrast
from ...number_format import format_length, format_number
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cell_level
from ...table import TableEntry
from ..significance.paired_tests import ALPHA
from ..significance.trial_intervals import CONSTANT, DIGITS, ceilings, independent_trials
from .effect_types import Effect

DUST = 1e-9


def ceiling(data: SweepData, length: int) -> float | None:
    """The share of the needle's digits that one and the same digit, answered everywhere, gets right at that context length.

    Keys and digits are drawn once from a seed, so this is a fact of the trials and above 1 in 10. Where cells were asked
    different digits, of the cells whose trials favour it most. Length 0 stands for the length-weighted mean over all lengths.
    None where it was not recorded.
    """
    if not length:
        known = {one: found for one in data.lengths(*DIGITS) if one and (found := ceiling(data, one)) is not None}
        return sum(one * found for one, found in known.items()) / sum(known) if known else None
    values = (data.values.get((cell.cell_id, *key, length)) for cell in data.cells for key in (CONSTANT, DIGITS))
    return ceilings((value for value in values if value is not None), data.sweep in paper.SWEEPS).get(length)


def yardstick(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """In a few words, in percent: what a guess scores, and always the same digit at these lengths (None: all that are shown)."""
    guess = metrics.metric(*DIGITS).chance_text.removesuffix("%")
    wanted = [length for length in (data.lengths(*DIGITS) if lengths is None else lengths) if length]
    found = sorted(
        {format_number(one, 1, percent=True) for length in wanted if (one := ceiling(data, length)) is not None},
        key=float,
    )
    if not found:
        return f"a guess: {guess}; the same digit everywhere: more, not recorded"
    return f"the same digit everywhere: {' to '.join(dict.fromkeys((found[0], found[-1])))}; a guess: {guess}"


def needle_note(data: SweepData, heading: str = "Ndl") -> str:
    """The note under every table that prints needle accuracies."""
    return f"{heading}: needle digits right, in % ({yardstick(data)})."


def needle_caption(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """The sentence for a picture of needle accuracies among other numbers."""
    return f"Needle digits right, in %: {yardstick(data, lengths)}."


def mentions_needle(entries: Iterable[TableEntry], words: Iterable[str] = ()) -> bool:
    """Whether any of these is a needle accuracy or worked out from some, or any of the words a heading of it (Ndl@64K)."""
    heading = metrics.metric(*DIGITS).heading
    if any(word.partition("@")[0].partition(" ")[0] == heading for word in words):
        return True
    return any((one.probe, (one.metric or "").removesuffix(WEIGHTED_SUFFIX)) == DIGITS for one in entries)


def below_baseline_note(data: SweepData) -> str:
    """How many cells score no more than the best constant answer, length by length: what tells those apart is luck."""
    counts: Counter[int] = Counter()
    cells: Counter[int] = Counter()
    for length in filter(None, data.lengths(*DIGITS)):
        level = ceiling(data, length)
        values = (data.values.get((cell.cell_id, *DIGITS, length)) for cell in data.cells)
        shares = [value.value for value in values if value is not None and value.value is not None]
        if level is not None and shares:
            cells[length], counts[length] = len(shares), sum(share <= level + DUST for share in shares)
    if not any(counts.values()):
        return ""
    told = ", ".join(f"{count} of {cells[length]} at {format_length(length)}" for length, count in counts.items())
    return f"Cells that score no more than that: {told}; a difference between two of those says nothing of retrieval."


def flag_chance_level(data: SweepData, found: Sequence[Effect]) -> list[Effect]:
    """The rows of the declared contrasts, of which each says whether both of its sides are at chance (`is_at_chance`)."""
    return [replace(row, floor=_knows_nothing(data, row, one)) for row, one in zip(found, data.contrasts, strict=True)]


def _knows_nothing(data: SweepData, row: Effect, one: Contrast) -> bool:
    if (one.probe, one.metric) != DIGITS or not row.pairs:
        return False
    within = [cell for cell in data.cells if all(cell_level(cell, axis) == level for axis, level in one.within.items())]
    sides = [
        [cell.cell_id for cell in within if cell_level(cell, row.axis) == level] for level in (row.level, row.reference)
    ]
    return is_at_chance(data, sides, data.averaged(*DIGITS) if one.length is None else [one.length])


def is_at_chance(data: SweepData, sides: Iterable[Iterable[str]], lengths: Iterable[int]) -> bool:
    """Whether nobody retrieves anything at these lengths, of cells that are compared side against side.

    So it is where neither a cell nor the mean of a side answers more of the needle's digits than the best constant answer by more than
    the trials can make it: binomial, cells at 5% over all of them, means at 5% over all of those. A mean counts as one cell, since all
    answer the same trials. False where nothing is known of them, or of the constant answer.
    """
    sides, lengths = [list(side) for side in sides], list(lengths)
    of_cells, of_means = [], []
    for length in lengths:
        level = ceiling(data, length)
        if level is None:
            return False
        for side in sides:
            values = (data.values.get((cell, *DIGITS, length)) for cell in side)
            known = [
                (value.value, independent_trials(value, data.values))
                for value in values
                if value is not None and value.value is not None
            ]
            of_cells += [_by_luck(share, trials, level) for share, trials in known]
            if known:
                fewest = min((trials for _, trials in known if trials), default=None)
                of_means.append(_by_luck(fmean(share for share, _ in known), fewest, level))
    return bool(of_cells) and min(of_cells) > ALPHA / len(of_cells) and min(of_means) > ALPHA / len(of_means)


def _by_luck(share: float, trials: int | None, level: float) -> float:
    """Chance of such a share, or a larger one, of an answer that is right with probability `level`; without trials 1 or 0."""
    if not trials or share <= level + DUST:
        return float(share <= level + DUST)
    # the binomial tail, which also knows what lies between two counts: digits are parts of a trial
    return float(special.betainc(trials * share, trials * (1 - share) + 1, level))
