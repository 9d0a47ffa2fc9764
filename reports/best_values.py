"""Best values of table columns or rows (bold), the probability that they are the best, and notes on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from ..results.store.records import CellState
from .number_format import Column, format_number
from .sweep_data import WEIGHTED_SUFFIX, SweepData
from .table import TableEntry

if TYPE_CHECKING:
    from .stats.noise.best_probability import Candidate, Stratum
    from .stats.noise.run_noise import Spread

Rank = Literal["column", "row", "none"]
Grid = tuple[tuple[TableEntry, ...], ...]
Place = tuple[int, int]
NAMED = 2  # of several numbers that print as the same best one


@dataclass(frozen=True)
class WinnersCurse:
    """Expected overestimate of the best number (winner's curse), by selection from `runs` near-replicates of its stratum.

    It is `sds` standard deviations, or `amount` in the metric's own unit, or the part `weight` of the range of all compared
    numbers. `share` is True for a metric in percent.
    """

    runs: int
    sds: float
    amount: float
    stratum: Stratum
    weight: float
    share: bool


@dataclass(frozen=True, kw_only=True)
class RankedGroup:
    """Numbers that were compared, by their indices in the grid.

    `best` are the best ones as printed, `chances` the probability of being best, empty without a noise estimate. `kinds` are the
    kinds of replicates behind the noise estimates, `luck` is the winner's curse of the best numbers.
    """

    heading: str
    best: tuple[Place, ...]
    chances: Mapping[Place, float]
    kinds: tuple[str, ...] = ()
    seeds: int = 1
    luck: WinnersCurse | None = None


def ranked(
    data: SweepData,
    grid: Sequence[Sequence[TableEntry]],
    rank: Rank,
    unlisted: Sequence[Sequence[TableEntry]] = (),
    *,
    has_chances: bool = True,
) -> tuple[Grid, list[RankedGroup]]:
    """Return the entries with `best` and `p_best` set, and the groups that were compared.

    Groups are columns, or within a row the entries of one probe, metric and length.

    Args:
        data: The sweep.
        grid: Entries, [row, column].
        rank: "column", "row", or "none", which changes nothing.
        unlisted: Entries of rows outside the table that may be better; used with "column" only.
        has_chances: Compute `p_best`.

    Returns:
        (entries [row, column], groups with a best number).
    """
    found = [list(row) for row in grid]
    if rank == "none":
        return tuple(map(tuple, found)), []
    groups: dict[Any, list[Place]] = {}
    for r, row in enumerate(found):
        for c, one in enumerate(row):
            key = c if rank == "column" else (r, one.probe, one.metric, one.length)
            groups.setdefault(key, []).append((r, c))
    known = _Spreads(data)
    contests = []
    for places in groups.values():
        others = [row[places[0][1]] for row in unlisted] if rank == "column" else []
        contest = _contest(
            known if has_chances else None, {place: found[place[0]][place[1]] for place in places}, others
        )
        best = frozenset(contest.best)
        for place in best | contest.chances.keys():
            r, c = place
            # dataclasses.replace takes several times as long, and this is done for every number of a table
            more = {"best": place in best, "p_best": contest.chances.get(place)}
            found[r][c] = TableEntry(**(vars(found[r][c]) | more))
        if contest.best:
            contests.append(contest)
    return tuple(map(tuple, found)), contests


def _contest(known: _Spreads | None, shown: Mapping[Place, TableEntry], others: Sequence[TableEntry]) -> RankedGroup:
    from .stats.noise.best_probability import simulate_p_best

    entries = list(shown.values())
    numbered = [one for one in (*entries, *others) if one.value is not None]
    top = tuple(place for place, wins in zip(shown, _best_of(entries), strict=True) if wins)
    heading = entries[0].heading
    is_held = known is not None and len(numbered) > 1 and entries[0].direction
    spreads = [known.spread_of(one) for one in numbered] if known is not None and is_held else []
    if known is None or not any(spreads):
        return RankedGroup(heading=heading, best=top, chances={})
    rivals = [known.rival(one, spread) for one, spread in zip(numbered, spreads, strict=True)]
    # those that are shown come first
    chances = simulate_p_best(rivals, entries[0].direction).tolist()
    places = [place for place, one in shown.items() if one.value is not None]
    return RankedGroup(
        heading=heading,
        best=top,
        chances=dict(zip(places, chances[: len(places)], strict=True)),
        kinds=tuple(sorted({spread.kind for _, spread in filter(None, spreads)})),
        seeds=max(one.seeds for one in numbered),
        luck=known.luck([shown[place] for place in top], numbered, [one.value for one in rivals]),
    )


class _Spreads:
    """Noise estimates of a sweep by column and stratum; each is computed once and cached."""

    def __init__(self, data: SweepData) -> None:
        self._data = data
        self._cells: Mapping[str, CellState] = {cell.cell_id: cell for cell in data.cells}
        self._known: dict[Column, Mapping[Stratum, Spread]] = {}
        self._columns: dict[tuple[str, str, int | None], tuple[Column, float]] = {}

    def spread_of(self, one: TableEntry) -> tuple[Stratum, Spread] | None:
        """Return (stratum, noise estimate) of an entry, in its unit; None for another sweep's entry, or without an estimate."""
        from .stats.noise.best_probability import spreads_by_stratum, stratum_of
        from .stats.noise.run_noise import printed_noise

        column, scale = self._behind(one)
        if column not in self._known:
            self._known[column] = spreads_by_stratum(self._data, column)
        spreads, cell = self._known[column], self._cells.get(one.origins[0][0]) if one.origins else None
        if not spreads or cell is None:
            return None
        if (own := printed_noise(self._data, cell, column)) is not None:
            return (cell.cell_id,), replace(own, sd=scale * own.sd)
        stratum = stratum_of(cell)
        found = spreads[stratum]
        return stratum, found if scale == 1 else replace(found, sd=scale * found.sd, floor=scale * found.floor)

    def rival(self, one: TableEntry, spread: tuple[Stratum, Spread] | None) -> Candidate:
        """Return a number with its spread; without one where that is None."""
        from .stats.noise.best_probability import Candidate

        if spread is None:
            return Candidate(self._value(one), 0.0)
        stratum, found = spread
        share = self._data.metric(one.probe, one.metric).percent
        return Candidate(self._value(one), found.used, found.df, stratum, max(one.seeds, 1), share)

    def luck(
        self, best: Sequence[TableEntry], entries: Sequence[TableEntry], values: Sequence[float]
    ) -> WinnersCurse | None:
        """Of the near-replicates in the stratum of the best numbers: they are what those are chosen from."""
        from .stats.noise.best_probability import expected_maximum

        spreads = [(told[1].used, told) for one in best if (told := self.spread_of(one)) and told[1].kind != "seeds"]
        if not spreads or max(values) <= min(values):
            return None
        sd, (stratum, found) = max(spreads, key=lambda pair: pair[0])
        runs = round(found.df / found.groups) + 1
        sds = expected_maximum(runs)
        share = self._data.metric(entries[0].probe, entries[0].metric).percent
        return WinnersCurse(runs, sds, sds * sd, stratum, sds * sd / (max(values) - min(values)), share)

    def _value(self, one: TableEntry) -> float:
        """Return the unrounded value of an entry: the mean over its cells, or the entry's own value."""
        column, scale = self._behind(one)
        values = [self._data.value(cell, *column.key) for cell in one.cells]
        known = [value.value for value in values if value is not None and value.value is not None]
        return scale * fmean(known) if known else one.value or 0.0

    def _behind(self, one: TableEntry) -> tuple[Column, float]:
        """Return (column of the stored number behind an entry, factor from it to the entry's unit).

        Bits are scaled nats. An entry without a length, of a metric measured at lengths, is the average over lengths.
        """
        key = one.probe, one.metric, one.length
        if key not in self._columns:
            self._columns[key] = _behind(self._data, one)
        return self._columns[key]


def _behind(data: SweepData, one: TableEntry) -> tuple[Column, float]:
    """The stored number that an entry is of, and what it is times: bits are nats, and what has no length, of
    a metric that is measured at some, is the average over them."""
    metric, scale = ("nats", 1 / math.log(2)) if one.metric == "bits" else (one.metric, 1.0)
    average = not one.length and (one.probe, metric) in data.over_lengths
    return Column("", one.probe, metric + WEIGHTED_SUFFIX if average else metric, 0, length=one.length or 0), scale


def _leading_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.split(" ", 1)[0])
    except InvalidOperation:
        return None


def _best_of(rivals: Sequence[TableEntry]) -> list[bool]:
    """Return a mask of the best entries as printed, ties included; all False if all are equal or there is only one."""
    numbers = [_leading_number(rival.text) if rival.value is not None else None for rival in rivals]
    known = [number for number in numbers if number is not None]
    direction = rivals[0].direction if rivals else 0
    if not direction or len(set(known)) < 2:
        return [False] * len(rivals)
    best = max(known) if direction > 0 else min(known)
    return [number == best for number in numbers]


def ranking_notes(
    contests: Sequence[RankedGroup], rank: Rank, names: Mapping[Place, str], rows: Sequence[str]
) -> list[str]:
    """Return notes on the best numbers: the owner of each, the probability of being best, and the winner's curse.

    Args:
        contests: Compared groups.
        rank: Direction of the comparison.
        names: Name of each entry, by index in the grid.
        rows: Labels of each row.
    """
    known = [contest for contest in contests if contest.kinds]
    silent = dict.fromkeys(contest.heading for contest in contests if not contest.kinds)
    found = []
    if known:
        kinds = " and ".join(sorted({kind for one in known for kind in one.kinds}))
        n = max(one.seeds for one in known)
        how = f" of being the best ({'n = 1' if n < 2 else f'up to n = {n}'}, spread of {kinds})"
        parts: dict[str, list[str]] = {}
        for one in known:
            about = f"of {one.heading}" if rank == "column" else f"at {rows[one.best[0][0]]}"
            words = f"probability {_chance(one)}{how}" if one is known[0] else _chance(one)
            parts.setdefault(about, []).append(f"{_whose(one, names)}, {words}")
        told = (f"{about}: {', '.join(some)}" for about, some in parts.items())
        found.append(f"Best {'; '.join(told)}.")
        lucky = sorted((one for one in known if one.luck), key=_weight, reverse=True)[:NAMED]
        if rank == "column" and lucky:
            found.append(_luck_note(lucky))
    if silent and known:
        found.append(f"How probable that is of {', '.join(silent)} is not known: no spread between runs.")
    elif silent:
        found.append("How probable a bold number is the best is not known: nothing tells how far runs lie apart.")
    return found


def _weight(one: RankedGroup) -> float:
    return one.luck.weight if one.luck else 0.0


def _luck_note(lucky: Sequence[RankedGroup]) -> str:
    """Where chance makes most of what lies between the worst and the best number."""
    from .stats.noise.run_noise import STRATUM_AXES

    told: dict[str, list[str]] = {}
    for one in lucky:
        luck = one.luck
        assert luck is not None
        amount = f"{100 * luck.amount:.1f} points" if luck.share else f"{luck.amount:.3f}"
        where = ", ".join(f"{axis} {level}" for axis, level in zip(STRATUM_AXES, luck.stratum, strict=True))
        how = f"the best of {luck.runs} near-replicates lies {luck.sds:.2f} sd above their mean"
        told.setdefault(how, []).append(f"{amount} in {one.heading} ({where})")
    parts = [f"{how}: {', '.join(some)}" for how, some in told.items()]
    return f"By chance alone {'; '.join(parts)}."


def _whose(one: RankedGroup, names: Mapping[Place, str]) -> str:
    more = f" and {len(one.best) - NAMED} more" if len(one.best) > NAMED else ""
    return ", ".join(names[place] for place in one.best[:NAMED]) + more


def _chance(one: RankedGroup) -> str:
    """Of the best number; of several that print alike, of the most probable one."""
    most = format_probability(max(one.chances.get(place, 0.0) for place in one.best))
    return f"at most {most} each" if len(one.best) > 1 else most


def format_probability(p: float) -> str:
    """Return a probability with two decimals, as "<0.01" or ">0.99" at the ends, since it is simulated."""
    return "<0.01" if p < 0.005 else ">0.99" if p >= 0.995 else format_number(p, 2)
