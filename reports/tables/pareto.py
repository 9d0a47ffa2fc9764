"""Table `pareto`: the configurations that no other configuration beats in quality and speed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...results.store.store import Store
from ..best_values import format_probability
from ..number_format import BARE, Column
from ..result_columns import AXIS_HEADINGS, quality_columns, speed_column
from ..stats.effects.effects import pareto
from ..stats.effects.needle_baseline import needle_note, recall_threshold
from ..stats.noise.best_probability import Configuration, front_probabilities
from ..sweep_data import SweepData
from ..table import Table, TableEntry
from ..table_builder import EMPTY_TEXT, TableRow, build_table, measured_entry, placeholder_notes, seed_notes, sweep_note

MIN_LISTED_PROBABILITY = 0.25  # least P(front) for a note on a configuration that is off the front
MAX_LISTED = 3  # such configurations per note


def pareto_table(store: Store, data: SweepData) -> Table:
    """Return the table `pareto`: the configurations on a Pareto front of speed and a quality, fastest first.

    There are two fronts, one per quality: validation loss, and needle accuracy at the longest length. The label column
    Front names those that a configuration is on. Speed is tokens/s, else the seconds of training, else MFU. P(front) is
    the probability of being on a front, given the spread between runs; "-" where unknown. `store` is not used.
    """
    speed, (loss, needle) = speed_column(data, "Tokens/s"), quality_columns(data)
    groups = list(data.configurations().items())
    grid = [[measured_entry(data, cells, column) for column in (speed, loss, needle)] for _, cells in groups]
    above = [recall_threshold(data, quality) for quality in (loss, needle)]
    chances = [
        front_probabilities(data, speed, quality, least) for quality, least in zip((loss, needle), above, strict=True)
    ]
    direction = speed.direction or 1
    fronts = _fronts(grid, (loss, needle), above, direction)
    ranked = sorted(fronts, key=lambda r: -direction * (grid[r][0].value or 0.0))
    probable = [f"P(front) {quality.heading}" for quality in (loss, needle)]
    lines = []
    for r in ranked:
        key, cells = groups[r]
        on = tuple(
            _probability_entry(name, probabilities.get(key))
            for name, probabilities in zip(probable, chances, strict=True)
        )
        labels = (*key, " and ".join(fronts[r]))
        lines.append(TableRow(labels=labels, entries=(*grid[r], *on), cells=cells))
    title = "Pareto fronts of quality and speed"
    headings = (*AXIS_HEADINGS, *data.extra_axes(), "Front")
    shown, n = [grid[r] for r in ranked], max((len(groups[r][1]) for r in ranked), default=0)
    speed_note = f"Speed: {speed.heading}. Fastest first. {needle_note(data)}"
    notes = [sweep_note(data), speed_note, *seed_notes(shown, n), *placeholder_notes(shown)]
    notes += _front_notes(data, (loss, needle), chances, fronts)
    numbers = [*(column.heading for column in (speed, loss, needle)), *probable]
    off_front_rows = [(*row, *map(_probability_entry, probable)) for r, row in enumerate(grid) if r not in fronts]
    return build_table(
        data, "pareto", title, headings, lines, numbers=numbers, notes=notes, rank="column", unlisted=off_front_rows
    )


def _fronts(
    grid: Sequence[Sequence[TableEntry]], qualities: Sequence[Column], above: Sequence[float], direction: int
) -> dict[int, list[str]]:
    """Return, by index of each row that is on a front, the headings of the qualities whose fronts it is on.

    Rows without the speed or the quality are not on that front. Rows on no front are no keys.

    Args:
        grid: Entries by row; the first is the speed, the qualities follow.
        qualities: The qualities in the order of the entries.
        above: Number that each quality must exceed.
        direction: 1 if more speed is better, -1 if less.
    """
    headings_by_row: dict[int, list[str]] = {}
    for index, (quality, least) in enumerate(zip(qualities, above, strict=True), start=1):
        complete_rows = [
            r
            for r, row in enumerate(grid)
            if row[0].value is not None and (value := row[index].value) is not None and value > least
        ]
        points = [(grid[r][0].value or 0.0, grid[r][index].value or 0.0) for r in complete_rows]
        for r, is_on_front in zip(complete_rows, pareto(points, (direction, quality.direction)), strict=True):
            if is_on_front:
                headings_by_row.setdefault(r, []).append(quality.heading)
    return headings_by_row


def _probability_entry(heading: str, p: float | None = None) -> TableEntry:
    return TableEntry(text=EMPTY_TEXT if p is None else format_probability(p), heading=heading, value=p, unit=BARE)


def _front_notes(
    data: SweepData,
    qualities: Sequence[Column],
    chances: Sequence[Mapping[Configuration, float]],
    fronts: Mapping[int, list[str]],
) -> list[str]:
    """Return the notes on P(front), and on configurations off a front that are likely to be on it.

    The latter names at most three configurations per quality with P(front) of 0.25 or more, the most probable first.

    Args:
        data: The sweep.
        qualities: The qualities.
        chances: For each quality, the probability of being on its front by configuration; empty where unknown.
        fronts: Headings of the qualities by index of each configuration on a front, in the order of
            `data.configurations`.
    """
    unknown = [quality.heading for quality, probabilities in zip(qualities, chances, strict=True) if not probabilities]
    notes = []
    if any(chances):
        notes.append(
            "P(front): probability that no other configuration is as good in both and better in one, given the "
            "spread between runs."
        )
    if unknown:
        notes.append(f"P(front) is not available for {' and '.join(unknown)}: the spread between runs is unknown.")
    groups = list(data.configurations().items())
    for quality, front_chances in zip(qualities, chances, strict=True):
        likely = [
            (p, cells[0].slug.removesuffix(f"-s{cells[0].seed}"))
            for r, (key, cells) in enumerate(groups)
            if (p := front_chances.get(key, 0.0)) >= MIN_LISTED_PROBABILITY and quality.heading not in fronts.get(r, ())
        ]
        if likely:
            ranked = sorted(likely, key=lambda pair: (-pair[0], pair[1]))
            likely_text = ", ".join(f"{name} {format_probability(p)}" for p, name in ranked[:MAX_LISTED])
            more = f", and {len(ranked) - MAX_LISTED} more" if len(ranked) > MAX_LISTED else ""
            notes.append(
                f"Not on the measured front of {quality.heading}, but with P(front) of at least "
                f"{MIN_LISTED_PROBABILITY}: {likely_text}{more}."
            )
    return notes
