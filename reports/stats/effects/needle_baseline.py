"""Baseline of the needle probe: the score of the best constant answer on the trials of the sweep.

It is the score of a network that retrieves nothing and always answers the same digit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from scipy import special

from ....results import metrics, paper
from ....results.contrasts import Contrast
from ....results.store.records import CellState
from ...number_format import Column, format_length, format_number
from ...sweep_data import WEIGHTED_SUFFIX, SweepData, cached_result, cell_level
from ...table import TableEntry
from ..noise.run_noise import STRATUM_AXES
from ..significance.paired_tests import ALPHA
from ..significance.trial_intervals import CONSTANT_ACCURACY, DIGIT_ACCURACY, constant_answer_scores, independent_trials
from .effect_types import Effect

ROUNDING_TOLERANCE = 1e-9


def constant_answer_score(data: SweepData, length: int) -> float | None:
    """Return the share of the needle's digits that the best constant digit gets right at a context length.

    Keys and digits are drawn once from a seed, so this is a property of the trials and is above 1 in 10. Where cells
    have different trials, the largest of their scores is returned. For the paper's sweeps its known score stands in.

    Args:
        data: The sweep.
        length: Context length in tokens; 0 for the mean over all shown lengths with a score, weighted by length.

    Returns:
        A fraction in [0, 1]; None if it was not recorded.
    """
    if not length:
        by_length = {
            each_length: score
            for each_length in data.lengths(*DIGIT_ACCURACY)
            if each_length and (score := constant_answer_score(data, each_length)) is not None
        }
        return (
            sum(each_length * score for each_length, score in by_length.items()) / sum(by_length) if by_length else None
        )

    def largest_score() -> float | None:
        """Return the largest score of a constant answer at the length; None if the sweep has none."""
        values = (
            data.values.get((cell.cell_id, *key, length))
            for cell in data.cells
            for key in (CONSTANT_ACCURACY, DIGIT_ACCURACY)
        )
        measured = (value for value in values if value is not None)
        return constant_answer_scores(measured, data.sweep in paper.SWEEPS).get(length)

    return cached_result(data, ("constant answer", length), largest_score)


def recall_threshold(data: SweepData, quality: Column) -> float:
    """Return the share that a configuration must exceed to be on a Pareto front: the constant-digit baseline.

    It is minus infinity for other numbers than needle accuracy, and where the baseline was not recorded.
    """
    level = constant_answer_score(data, quality.length) if quality.probe == "needle" else None
    return -math.inf if level is None else level


def lacks_recall(data: SweepData, quality: Column, cells: Iterable[CellState]) -> bool:
    """Return True if the mean needle accuracy of no stratum of these cells exceeds the constant-digit baseline.

    A stratum is the cells that share mixer and memory. False for other numbers than needle accuracy, and without any.

    Args:
        data: The sweep.
        quality: The number.
        cells: The cells.
    """
    threshold = recall_threshold(data, quality)
    strata: dict[tuple[str, ...], list[CellState]] = {}
    for cell in cells if threshold > -math.inf else ():
        strata.setdefault(tuple(cell_level(cell, axis) for axis in STRATUM_AXES), []).append(cell)
    values = [numbers for own in strata.values() if (numbers := data.column_numbers(own, quality))]
    return bool(values) and all(fmean(numbers) <= threshold for numbers in values)


def baseline_text(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """Return a phrase with the scores, in percent, of the best constant digit and of a guess.

    Such as "constant-digit baseline 17.5 to 18.1 %, chance level 10 %". Without a recorded score it is "chance level
    10 %; constant-digit baseline higher, not recorded".

    Args:
        data: The sweep.
        lengths: Context lengths in tokens, over which the range is given; None for all lengths that are shown. 0 is
            ignored.
    """
    guess = metrics.metric(*DIGIT_ACCURACY).chance_text.removesuffix("%")
    selected = [length for length in (data.lengths(*DIGIT_ACCURACY) if lengths is None else lengths) if length]
    scores = sorted(
        {
            format_number(score, 1, percent=True)
            for length in selected
            if (score := constant_answer_score(data, length)) is not None
        },
        key=float,
    )
    if not scores:
        return f"chance level {guess} %; constant-digit baseline higher, not recorded"
    return f"constant-digit baseline {' to '.join(dict.fromkeys((scores[0], scores[-1])))} %, chance level {guess} %"


def needle_note(data: SweepData, heading: str = "Ndl") -> str:
    """Return the note under every table that prints needle accuracies, with the baseline scores in percent.

    Args:
        data: The sweep.
        heading: Heading of its needle columns.
    """
    return f"{heading}: needle accuracy, % of digits ({baseline_text(data)})."


def needle_caption(data: SweepData, lengths: Iterable[int] | None = None) -> str:
    """Return the caption sentence of a figure that shows needle accuracies among other numbers.

    Args:
        data: The sweep.
        lengths: Context lengths of the figure, in tokens; None for all lengths that are shown.
    """
    return f"Needle accuracy, % of digits: {baseline_text(data, lengths)}."


def mentions_needle(entries: Iterable[TableEntry], labels: Iterable[str] = ()) -> bool:
    """Return True if any entry is a needle digit accuracy or its average over lengths, or any label is its heading.

    A label counts up to its first "@" or space, as in `Ndl@64K`.
    """
    heading = metrics.metric(*DIGIT_ACCURACY).heading
    if any(label.partition("@")[0].partition(" ")[0] == heading for label in labels):
        return True
    return any((entry.probe, (entry.metric or "").removesuffix(WEIGHTED_SUFFIX)) == DIGIT_ACCURACY for entry in entries)


def below_baseline_note(data: SweepData) -> str:
    """Return a note on how many cells score at most the best constant answer, by length; empty if no cell does.

    Lengths without a recorded baseline, or without a needle accuracy, are left out. With at least one such cell,
    lengths with 0 of them are listed, too.
    """
    counts: Counter[int] = Counter()
    cells: Counter[int] = Counter()
    for length in filter(None, data.lengths(*DIGIT_ACCURACY)):
        level = constant_answer_score(data, length)
        values = (data.values.get((cell.cell_id, *DIGIT_ACCURACY, length)) for cell in data.cells)
        shares = [value.value for value in values if value is not None and value.value is not None]
        if level is not None and shares:
            cells[length], counts[length] = len(shares), sum(share <= level + ROUNDING_TOLERANCE for share in shares)
    if not any(counts.values()):
        return ""
    counts_text = ", ".join(
        f"{count} of {cells[length]} at {format_length(length)}" for length, count in counts.items()
    )
    return f"Cells at or below the constant-digit baseline: {counts_text}; differences between them say nothing about retrieval."


def flag_chance_level(data: SweepData, effects: Sequence[Effect]) -> list[Effect]:
    """Return copies of the declared contrasts' rows with `is_at_chance` True where both sides are at chance level.

    It is False for contrasts of other measures than the needle's digit accuracy and for rows without pairs.

    Args:
        data: The sweep.
        effects: One row per declared contrast, in the grid's order.

    Raises:
        ValueError: The numbers of rows and contrasts differ.
    """
    return [
        replace(row, is_at_chance=_both_sides_at_chance(data, row, contrast))
        for row, contrast in zip(effects, data.contrasts, strict=True)
    ]


def _both_sides_at_chance(data: SweepData, row: Effect, contrast: Contrast) -> bool:
    """Return True if the contrast compares needle accuracies, has pairs, and both of its sides are at chance level.

    Sides are all cells at the contrast's two levels within its subset, also those without a partner. A contrast without
    a length must be at chance at every averaged length.
    """
    if (contrast.probe, contrast.metric) != DIGIT_ACCURACY or not row.pairs:
        return False
    within = [
        cell for cell in data.cells if all(cell_level(cell, axis) == level for axis, level in contrast.within.items())
    ]
    sides = [
        [cell.cell_id for cell in within if cell_level(cell, row.axis) == level] for level in (row.level, row.reference)
    ]
    return is_at_chance(
        data, sides, data.averaged_lengths(*DIGIT_ACCURACY) if contrast.length is None else [contrast.length]
    )


def is_at_chance(data: SweepData, sides: Iterable[Iterable[str]], lengths: Iterable[int]) -> bool:
    """Return True if no compared cell, and no mean of a side, is significantly above the best constant answer.

    Tests are one-sided binomial tests, at 5% over all cells and at 5% over all means (Bonferroni, over lengths too). A
    mean has as many trials as its cell with the fewest, since all cells answer the same trials. Cells without an
    accuracy are skipped.

    Args:
        data: The sweep.
        sides: Cell ids of each compared group.
        lengths: Context lengths in tokens; all must be at chance.

    Returns:
        False also if no cell has an accuracy, or the baseline of a length was not recorded.
    """
    sides, lengths = [list(side) for side in sides], list(lengths)
    cell_p, mean_p = [], []
    for length in lengths:
        baseline = constant_answer_score(data, length)
        if baseline is None:
            return False
        for side in sides:
            values = (data.values.get((cell, *DIGIT_ACCURACY, length)) for cell in side)
            shares_and_trials = [
                (value.value, independent_trials(value, data.values))
                for value in values
                if value is not None and value.value is not None
            ]
            cell_p += [_chance_p(share, trials, baseline) for share, trials in shares_and_trials]
            if shares_and_trials:
                fewest = min((trials for _, trials in shares_and_trials if trials), default=None)
                mean_p.append(_chance_p(fmean(share for share, _ in shares_and_trials), fewest, baseline))
    return bool(cell_p) and min(cell_p) > ALPHA / len(cell_p) and min(mean_p) > ALPHA / len(mean_p)


def _chance_p(share: float, trials: int | None, level: float) -> float:
    """Return the probability that answers right with chance `level` reach at least this share of right digits.

    It is 1 if the share does not exceed `level`. Above it, it is 0 without a number of trials.

    Args:
        share: Share of right digits, as a fraction.
        trials: Number of independent trials; None or 0 if unknown.
        level: Share that the best constant answer gets right.
    """
    if not trials or share <= level + ROUNDING_TOLERANCE:
        return float(share <= level + ROUNDING_TOLERANCE)
    # the beta function extends the binomial tail to fractional counts, since digits are parts of a trial
    return float(special.betainc(trials * share, trials * (1 - share) + 1, level))
