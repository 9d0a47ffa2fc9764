"""Caveats of a sweep for the first page: what differs, what is missing, and what its numbers cannot show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...results.console.text import counted
from ..figures.canvas.drawing import level_label
from ..number_format import NEEDLE, Column, format_number
from ..stats.effects.needle_baseline import constant_answer_score
from ..stats.noise.run_noise import NEAR_REPLICATE_AXIS, is_loss_summed, is_regularizer_negligible
from ..sweep_data import SweepData, cell_level
from ..tables.paper_rows import printed_discrepancies

ROUNDING_TOLERANCE = 1e-9  # of a share
SURE_PROBABILITY = 0.95  # a probability of being the best that needs no caveat
MAX_LISTED = 3  # cases listed in a caveat, before the rest is counted
NO_REGULARIZER = "baseline"  # the level without a regularizer


def sweep_caveats(data: SweepData, audit: Sequence[str], *, running: bool = False) -> list[str]:
    """Return the caveats that need no statistics, one sentence each.

    They come in this order, each only where it applies: the audit's lines, numbers of a running sweep, single runs,
    cells without numbers by status, regularizers that a summed loss makes negligible, and printed numbers that
    contradict logs.

    Args:
        data: The sweep.
        audit: Lines of the homogeneity audit (differences between the cells other than their axes).
        running: Whether the sweep runs, so that numbers are preliminary.
    """
    lines = [f"{line[:1].upper()}{line[1:]}." for line in audit]
    if running:
        lines.append("The sweep is running: the numbers cover the cells that are done so far.")
    lines += _seed_caveats(data)
    counts = Counter(data.status_word(cell) for cell in data.cells)
    lacking = {word: count for word, count in counts.items() if word != "done"}
    if lacking:
        lacking_counts = ", ".join(f"{count} {word}" for word, count in lacking.items())
        lines.append(f"{sum(lacking.values())} of {counted(len(data.cells), 'cell')} lack numbers ({lacking_counts}): their "
            "pairs are excluded from effects.")  # fmt: skip
    if near := _negligible_regularizers(data):
        where = _summed_loss_suffix(data)
        lines.append(
            f"The loss{where} is summed over tokens but regularizers are averaged, so {', '.join(near)} have a "
            f"weight of about 1e-6. Cells{' there' if where else ''} that differ only in them, or have none, "
            "are effectively replicates."
        )
    if discrepancies := printed_discrepancies(data):
        lines.append(f"{len(discrepancies)} printed numbers contradict their authors\u2019 own logs; effects and "
"intervals use the logs.")  # fmt: skip
    return lines


def _negligible_regularizers(data: SweepData) -> list[str]:
    """Return the labels of the regularizers whose weight is negligible against a loss that is summed over tokens.

    They are distinct, in the grid's order; the level without a regularizer is left out.
    """
    names_by_level = {}
    for cell in data.cells:
        if cell.levels[NEAR_REPLICATE_AXIS] != NO_REGULARIZER and is_regularizer_negligible(data, cell):
            names_by_level[cell.levels[NEAR_REPLICATE_AXIS]] = level_label(
                cell.levels[NEAR_REPLICATE_AXIS], NEAR_REPLICATE_AXIS
            )
    return list(names_by_level.values())


def _summed_loss_suffix(data: SweepData) -> str:
    """Return the phrase that says which cells sum their loss over tokens, to follow "The loss".

    It is empty if all cells do. Otherwise it begins with " of " and names the levels of an extra axis that separates
    them, or counts the cells.
    """
    sums = [cell for cell in data.cells if is_loss_summed(data, cell)]
    if len(sums) == len(data.cells):
        return ""
    for axis in data.extra_axes():
        levels = {cell_level(cell, axis) for cell in sums}
        if not any(cell_level(cell, axis) in levels for cell in data.cells if not is_loss_summed(data, cell)):
            return f" of {' and '.join(level_label(level, axis) for level in sorted(levels))}"
    return f" of {len(sums)} of {counted(len(data.cells), 'cell')}"


def _seed_caveats(data: SweepData) -> Iterator[str]:
    """Yield at most one caveat: on means over printed runs, on single runs, or on unequal numbers of seeds.

    Nothing is yielded if no configuration has a single run.
    """
    if data.printed_runs:
        yield (
            f"Published numbers: means over up to {counted(data.printed_runs, 'run')}; those of single runs were not published."
        )
        return
    sizes = [len(cells) for cells in data.configurations().values()]
    once = sizes.count(1)
    if once and once == len(sizes):
        yield "One run per configuration (n = 1): variation between seeds is unknown."
    elif once:
        yield (
            f"{once} of {counted(len(sizes), 'configuration')} have one run, the others up to "
            f"{counted(max(sizes), 'seed')}; all weigh the same in every effect."
        )


def result_caveats(
    data: SweepData, columns: Sequence[Column], best: Mapping[str, Any], forest: Mapping[str, Any]
) -> list[str]:
    """Return the caveats that follow from the results, one sentence each.

    They are on cells at the constant-digit baseline, uncertain first ranks, averages over strata that differ, diverged
    runs and missing contrasts, in this order, each only where it applies.

    Args:
        data: The sweep.
        columns: The main measures.
        best: JSON of `best_configurations`.
        forest: JSON of `forest_json`.
    """
    needles = [column for column in columns if (column.probe, column.metric) == NEEDLE]
    return [
        *(line for column in needles for line in _chance_level(data, column)),
        *_uncertain_winners(best),
        *_heterogeneous(forest),
        *_missing_diverged(forest),
        *([] if data.contrasts or not forest["rows"] else ["The grid declares no contrasts, so all tests are exploratory."]),
    ]  # fmt: skip


def _chance_level(data: SweepData, column: Column) -> Iterator[str]:
    """Yield the caveat that counts the cells whose needle accuracy is not above the constant-digit baseline.

    The baseline is the score of the best constant answer on the stored trials. Nothing is yielded if it is unknown or
    no cell is at or below it.
    """
    level = constant_answer_score(data, column.length)
    accuracies = data.column_numbers(data.cells, column)
    below = sum(value <= level + ROUNDING_TOLERANCE for value in accuracies) if level is not None else 0
    if level is None or not below:
        return
    description = f"score at or below the constant-digit baseline ({format_number(level, 1, percent=True)} %)"
    if below == len(accuracies):
        yield f"{column.heading}: all {counted(below, 'cell')} {description}: no evidence of retrieval."
    else:
        yield (
            f"{column.heading}: {below} of {counted(len(accuracies), 'cell')} {description}: differences "
            "between them do not reflect retrieval."
        )


def _uncertain_winners(best: Mapping[str, Any]) -> Iterator[str]:
    """Yield one caveat on first-ranked configurations with a probability of being the best below 0.95.

    It names the measures and probabilities, in whole percent. Unknown probabilities are left out; nothing is yielded
    without any other.

    Args:
        best: JSON of `best_configurations`.
    """
    firsts = [(measure["heading"], measure["rows"][0]["chance"]) for measure in best["measures"] if measure["rows"]]
    uncertain_texts = [
        f"{heading} {100 * chance:.0f}%"
        for heading, chance in firsts
        if chance is not None and chance < SURE_PROBABILITY
    ]
    if uncertain_texts:
        yield f"The first of a ranking may not be the best; P(best): {', '.join(uncertain_texts)}."


def _heterogeneous(forest: Mapping[str, Any]) -> Iterator[str]:
    """Yield a caveat per measure on effects over the whole sweep whose strata differ significantly.

    Args:
        forest: JSON of `forest_json`.
    """
    texts_by_heading: dict[str, list[str]] = {}
    for row in forest["rows"]:
        if row["mixed"] and not row["where"]:
            heading = forest["measures"][row["measure"]]["heading"]
            texts_by_heading.setdefault(heading, []).append(
                f"{row['level']} against {row['reference']} (I2 {row['i2']:.0%})"
            )
    for heading, rows in texts_by_heading.items():
        yield (
            f"{heading}: {'; '.join(rows)}: the effect differs between mixers or memories, so the average "
            "stands for none of them; see each."
        )


def _missing_diverged(forest: Mapping[str, Any]) -> Iterator[str]:
    """Yield at most one caveat on effects over the whole sweep that lack diverged runs, with their worst case.

    It lists the first three effects and counts the others.

    Args:
        forest: JSON of `forest_json`.
    """
    worst_case_texts = [
        f"{forest['measures'][row['measure']]['heading']}, {row['level']} against {row['reference']}: {row['mean_text']}, at worst {row['worst']}"
        for row in forest["rows"]
        if row["worst"] is not None and not row["where"]
    ]
    if worst_case_texts:
        more = f"; and {len(worst_case_texts) - MAX_LISTED} more" if len(worst_case_texts) > MAX_LISTED else ""
        yield (
            "Diverged runs are excluded from pairs, so their levels look better than they are. With the worst "
            f"value instead: {'; '.join(worst_case_texts[:MAX_LISTED])}{more}."
        )
