"""Best values of table columns or rows (bold), the probability that they are the best, and notes on both.

A stratum is a set of cells that share mixer and memory; near-replicates are runs that differ in a negligible
regularizer only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..results.store.records import CellState
from .number_format import Column, format_number
from .sweep_data import WEIGHTED_SUFFIX, SweepData
from .table import TableEntry

if TYPE_CHECKING:
    from .stats.noise.best_probability import Candidate, Stratum
    from .stats.noise.run_noise import NoiseEstimate

Rank = Literal["column", "row", "none"]
Grid = tuple[tuple[TableEntry, ...], ...]
GridIndex = tuple[int, int]
MAX_NAMED = 2  # largest number of tied best values that are named


@dataclass(frozen=True)
class WinnersCurse:
    """Expected overestimate of the best number (winner's curse): selection from `runs` near-replicates.

    It is `sds` standard deviations, or `amount` in the metric's own unit, or the part `weight` of the range of all
    compared numbers. `stratum` is (mixer, memory). `share` is True for a metric in percent, whose `amount` is a
    fraction.
    """

    runs: int
    sds: float
    amount: float
    stratum: Stratum
    weight: float
    share: bool


@dataclass(frozen=True, kw_only=True)
class RankedGroup:
    """Numbers that were compared, by their (row, column) in the grid of entries.

    `best` are the best ones as printed, ties included. `chances` is the probability of being best of each shown number,
    empty without a noise estimate. `kinds` are the kinds of replicates behind the noise estimates, `luck` is the
    winner's curse of the best numbers.
    """

    heading: str
    """Heading of the column that all numbers share, or of the first of them."""
    best: tuple[GridIndex, ...]
    chances: Mapping[GridIndex, float]
    kinds: tuple[str, ...] = ()
    seeds: int = 1
    """Largest number of seeds behind one of the numbers."""
    luck: WinnersCurse | None = None
    """Winner's curse; None if the noise comes from seeds, or is unknown."""


def ranked(
    data: SweepData,
    grid: Sequence[Sequence[TableEntry]],
    rank: Rank,
    unlisted: Sequence[Sequence[TableEntry]] = (),
    *,
    has_chances: bool = True,
) -> tuple[Grid, list[RankedGroup]]:
    """Return the entries with `best` and `p_best` set, and the groups that were compared.

    Groups are columns, or within a row the entries of one probe, metric and length. The direction of a group (-1: less
    is better, 1: more is) is that of its first entry; with 0 nothing is best. Best is decided by the numbers as
    printed, ties included; `p_best` is simulated from unrounded numbers and the noise between runs, and None without an
    estimate of that noise.

    Args:
        data: The sweep.
        grid: Entries, [row, column]; not changed.
        rank: "column", "row", or "none", which changes nothing.
        unlisted: Entries of rows outside the table, in the same columns, which take part in the probability but not in
            `best`; used with "column" only.
        has_chances: Compute `p_best`.

    Returns:
        (entries [row, column], groups with a best number, in the order of their first entry). A group whose printed
        numbers are all equal, or that has fewer than two, has no best number and is left out.
    """
    entries = [list(row) for row in grid]
    if rank == "none":
        return tuple(map(tuple, entries)), []
    groups: dict[Any, list[GridIndex]] = {}
    for r, row in enumerate(entries):
        for c, entry in enumerate(row):
            key = c if rank == "column" else (r, entry.probe, entry.metric, entry.length)
            groups.setdefault(key, []).append((r, c))
    spreads = _NoiseByEntry(data)
    contests = []
    for positions in groups.values():
        unlisted_entries = [row[positions[0][1]] for row in unlisted] if rank == "column" else []
        contest = _ranked_group(
            spreads if has_chances else None,
            {position: entries[position[0]][position[1]] for position in positions},
            unlisted_entries,
        )
        best = frozenset(contest.best)
        for position in best | contest.chances.keys():
            r, c = position
            # dataclasses.replace is several times slower, and this runs for every entry
            rank_fields = {"best": position in best, "p_best": contest.chances.get(position)}
            entries[r][c] = TableEntry(**(vars(entries[r][c]) | rank_fields))
        if contest.best:
            contests.append(contest)
    return tuple(map(tuple, entries)), contests


def _ranked_group(
    noise: _NoiseByEntry | None, shown_entries: Mapping[GridIndex, TableEntry], unlisted_entries: Sequence[TableEntry]
) -> RankedGroup:
    """Return the compared group of the shown entries.

    `best` is over the shown entries alone. `chances` are also over those outside the table; empty for fewer than two
    numbers, without a direction, or without any noise estimate.

    Args:
        noise: Noise estimates of the sweep; None to skip probabilities.
        shown_entries: Entries of the group by index in the grid, at least one.
        unlisted_entries: Entries outside the table that take part in the probability.
    """
    from .stats.noise.best_probability import simulate_p_best

    entries = list(shown_entries.values())
    numbered = [entry for entry in (*entries, *unlisted_entries) if entry.value is not None]
    top = tuple(position for position, wins in zip(shown_entries, _best_of(entries), strict=True) if wins)
    heading = entries[0].heading
    is_held = noise is not None and len(numbered) > 1 and entries[0].direction
    spreads = [noise.noise_of(entry) for entry in numbered] if noise is not None and is_held else []
    if noise is None or not any(spreads):
        return RankedGroup(heading=heading, best=top, chances={})
    candidates = [noise.candidate(entry, spread) for entry, spread in zip(numbered, spreads, strict=True)]
    # shown entries come first
    chances = simulate_p_best(candidates, entries[0].direction).tolist()
    positions = [position for position, entry in shown_entries.items() if entry.value is not None]
    return RankedGroup(
        heading=heading,
        best=top,
        chances=dict(zip(positions, chances[: len(positions)], strict=True)),
        kinds=tuple(sorted({spread.kind for _, spread in filter(None, spreads)})),
        seeds=max(entry.seeds for entry in numbered),
        luck=noise.winners_curse(
            [shown_entries[position] for position in top], numbered, [candidate.value for candidate in candidates]
        ),
    )


class _StoredNumber(NamedTuple):
    """Stored number behind entries of one probe, metric and length, and its noise by stratum.

    `column` has no heading and format. `scale` is the factor from its unit to that of the entries, `share` says that
    the metric is in percent. `noise` is in the unit of the entries; empty without an estimate.
    """

    column: Column
    scale: float
    share: bool
    noise: Mapping[Stratum, NoiseEstimate]


class _NoiseByEntry:
    """Noise estimates of a sweep by stored number and stratum; each is computed once and cached."""

    def __init__(self, data: SweepData) -> None:
        self._data = data
        self._cells: Mapping[str, CellState] = {cell.cell_id: cell for cell in data.cells}
        self._numbers: dict[tuple[str, str, int | None], _StoredNumber] = {}

    def noise_of(self, entry: TableEntry) -> tuple[Stratum, NoiseEstimate] | None:
        """Return (stratum, noise estimate) of an entry, in its unit.

        The stratum is that of the entry's first cell; a printed mean has a stratum of its own, (cell id,). None for an
        entry of another sweep, without cells, or without a noise estimate.
        """
        from .stats.noise.best_probability import stratum_of
        from .stats.noise.run_noise import printed_noise

        stored, cell = self._behind(entry), self._cells.get(entry.origins[0][0]) if entry.origins else None
        if not stored.noise or cell is None:
            return None
        if (printed := printed_noise(self._data, cell, stored.column)) is not None:
            return (cell.cell_id,), replace(printed, sd=stored.scale * printed.sd)
        stratum = stratum_of(cell)
        return stratum, stored.noise[stratum]

    def candidate(self, entry: TableEntry, spread: tuple[Stratum, NoiseEstimate] | None) -> Candidate:
        """Return the entry as a candidate for the simulation, with its unrounded value in the entry's unit.

        At least one seed is assumed; a metric in percent is clipped to [0, 1] in the simulation.

        Args:
            entry: The entry, with a number.
            spread: (stratum, noise estimate) of it; None gives a standard deviation of 0.
        """
        from .stats.noise.best_probability import Candidate

        stored = self._behind(entry)
        if spread is None:
            return Candidate(self._value(entry, stored), 0.0)
        stratum, noise = spread
        value = self._value(entry, stored)
        return Candidate(value, noise.effective_sd, noise.df, stratum, max(entry.seeds, 1), stored.share)

    def winners_curse(
        self, best: Sequence[TableEntry], entries: Sequence[TableEntry], values: Sequence[float]
    ) -> WinnersCurse | None:
        """Return the expected overestimate of the best numbers by selection among near-replicates of their stratum.

        The largest noise estimate of the best entries decides; the number of runs is that of an average group of
        near-replicates.

        Args:
            best: The best entries; ties are possible.
            entries: All compared entries.
            values: Unrounded value of each.

        Returns:
            None if the noise comes from seeds or is unknown, or if all values are equal.
        """
        from .stats.noise.best_probability import expected_maximum

        spreads = [
            (spread[1].effective_sd, spread)
            for entry in best
            if (spread := self.noise_of(entry)) and spread[1].kind != "seeds"
        ]
        if not spreads or max(values) <= min(values):
            return None
        sd, (stratum, noise) = max(spreads, key=lambda pair: pair[0])
        runs = round(noise.df / noise.groups) + 1
        sds = expected_maximum(runs)
        share = self._behind(entries[0]).share
        return WinnersCurse(runs, sds, sds * sd, stratum, sds * sd / (max(values) - min(values)), share)

    def _value(self, entry: TableEntry, stored: _StoredNumber) -> float:
        """Return the unrounded value of an entry: the mean of the stored numbers of its cells, in the entry's unit.

        Without a stored number it is the entry's own value, or 0.
        """
        values = [self._data.value(cell, *stored.column.key) for cell in entry.cells]
        measured_numbers = [value.value for value in values if value is not None and value.value is not None]
        return stored.scale * fmean(measured_numbers) if measured_numbers else entry.value or 0.0

    def _behind(self, entry: TableEntry) -> _StoredNumber:
        """Return the stored number behind an entry; cached by probe, metric and length."""
        key = entry.probe, entry.metric, entry.length
        if key not in self._numbers:
            self._numbers[key] = _stored_number(self._data, entry)
        return self._numbers[key]


def _stored_number(data: SweepData, entry: TableEntry) -> _StoredNumber:
    """Return the stored number behind an entry.

    Bits are nats times 1 / ln 2; every other factor is 1. An entry without a length, of a metric measured at lengths,
    is the length-weighted average.
    """
    from .stats.noise.best_probability import noise_with_pooled_fallback

    metric, scale = ("nats", 1 / math.log(2)) if entry.metric == "bits" else (entry.metric, 1.0)
    average = not entry.length and (entry.probe, metric) in data.over_lengths
    stored_metric = metric + WEIGHTED_SUFFIX if average else metric
    column = Column("", entry.probe, stored_metric, 0, length=entry.length or 0)
    noise = {
        stratum: spread if scale == 1 else replace(spread, sd=scale * spread.sd, floor=scale * spread.floor)
        for stratum, spread in noise_with_pooled_fallback(data, column).items()
    }
    return _StoredNumber(column, scale, data.metric(entry.probe, entry.metric).percent, noise)


def _leading_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.split(" ", 1)[0])
    except InvalidOperation:
        return None


def _best_of(entries: Sequence[TableEntry]) -> list[bool]:
    """Return a mask of the best entries by their printed numbers, ties included.

    All False without a direction, or if fewer than two different numbers are printed. The first entry gives the
    direction.
    """
    numbers = [_leading_number(entry.text) if entry.value is not None else None for entry in entries]
    printed_numbers = [number for number in numbers if number is not None]
    direction = entries[0].direction if entries else 0
    if not direction or len(set(printed_numbers)) < 2:
        return [False] * len(entries)
    best = max(printed_numbers) if direction > 0 else min(printed_numbers)
    return [number == best for number in numbers]


def ranking_notes(
    contests: Sequence[RankedGroup], rank: Rank, names: Mapping[GridIndex, str], rows: Sequence[str]
) -> list[str]:
    """Return notes on the best numbers: the owner of each, the probability of being best, and the winner's curse.

    At most three: best numbers with their probabilities, the winner's curse (columns only, the two heaviest), and the
    columns without a noise estimate. Empty without groups.

    Args:
        contests: Compared groups, each with a best number.
        rank: Direction of the comparison, "column" or "row".
        names: Name of each entry, by index in the grid.
        rows: Label of each row.
    """
    with_chances = [contest for contest in contests if contest.kinds]
    without_chances = dict.fromkeys(contest.heading for contest in contests if not contest.kinds)
    notes = []
    if with_chances:
        kinds = " and ".join(sorted({kind for contest in with_chances for kind in contest.kinds}))
        n = max(contest.seeds for contest in with_chances)
        chance_suffix = f" ({'n = 1' if n < 2 else f'up to n = {n}'}, noise estimated from {kinds})"
        parts: dict[str, list[str]] = {}
        for contest in with_chances:
            subject = f"of {contest.heading}" if rank == "column" else f"at {rows[contest.best[0][0]]}"
            chance_text = (
                f"P(best) {_chance_text(contest)}{chance_suffix}"
                if contest is with_chances[0]
                else _chance_text(contest)
            )
            parts.setdefault(subject, []).append(f"{_owner_text(contest, names)}, {chance_text}")
        sentences = (f"{subject}: {', '.join(phrases)}" for subject, phrases in parts.items())
        notes.append(f"Best {'; '.join(sentences)}.")
        with_bias = sorted((contest for contest in with_chances if contest.luck), key=_bias_weight, reverse=True)[
            :MAX_NAMED
        ]
        if rank == "column" and with_bias:
            notes.append(_winners_curse_note(with_bias))
    if without_chances and with_chances:
        notes.append(f"P(best) not available for {', '.join(without_chances)}: no estimate of run-to-run variation.")
    elif without_chances:
        notes.append(
            "Bold: best value. P(best) not available: without an estimate of run-to-run variation, differences may be noise."
        )
    return notes


def _bias_weight(contest: RankedGroup) -> float:
    return contest.luck.weight if contest.luck else 0.0


def _winners_curse_note(with_bias: Sequence[RankedGroup]) -> str:
    """Return a sentence on the overestimate by selection in the given columns, in points for shares.

    Args:
        with_bias: Groups with a winner's curse, in the order of the sentence.
    """
    from .render.style import level_label
    from .stats.noise.run_noise import STRATUM_AXES

    by_reason: dict[str, list[str]] = {}
    for contest in with_bias:
        luck = contest.luck
        assert luck is not None
        amount = f"{100 * luck.amount:.1f} points" if luck.share else f"{luck.amount:.3f}"
        levels = zip(luck.stratum, STRATUM_AXES, strict=True)
        stratum_text = ", ".join(level_label(level, axis) for level, axis in levels)
        reason = f"the best of {luck.runs} near-replicates lies {luck.sds:.2f} sd above their mean"
        by_reason.setdefault(reason, []).append(f"{amount} in {contest.heading} ({stratum_text})")
    parts = [f"{reason}: {', '.join(amounts)}" for reason, amounts in by_reason.items()]
    return f"By chance alone {'; '.join(parts)}."


def _owner_text(contest: RankedGroup, names: Mapping[GridIndex, str]) -> str:
    rest_text = f" and {len(contest.best) - MAX_NAMED} more" if len(contest.best) > MAX_NAMED else ""
    return ", ".join(names[position] for position in contest.best[:MAX_NAMED]) + rest_text


def _chance_text(contest: RankedGroup) -> str:
    """Return the probability of the best number as text; for tied ones "at most P each", P of the most probable one."""
    highest = format_probability(max(contest.chances.get(position, 0.0) for position in contest.best))
    return f"at most {highest} each" if len(contest.best) > 1 else highest


def format_probability(p: float) -> str:
    """Return a probability with two decimals, as "<0.01" or ">0.99" at the ends, since it is simulated."""
    return "<0.01" if p < 0.005 else ">0.99" if p >= 0.995 else format_number(p, 2)
