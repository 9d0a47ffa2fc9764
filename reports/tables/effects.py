"""The tables `effects` and `interactions`: what every level does, alone and beside another, by matched pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...results.store.store import Store
from ..data import Lengths, SweepData, gather
from ..layout import DUST, Line, assemble, p_value, sweep_note
from ..numbers import Column, rounded, signed
from ..stats.effects import Effect, Interaction, detectable, effects, interactions, measures, spread
from ..stats.resampling import EXACT, LEAST
from ..table import Entry, Table

TEST_NOTE = (
    "Differences in nats per token, needle and MFU in points. p sign: exact sign test; p perm: permutation of signs, exact up to "
    f"{EXACT}, below {LEAST} Student's t. Low, High: the values that p perm does not reject at 5%. p Holm: p perm, corrected for the "
    "{} tests of this table."
)


def _own_units(data: SweepData) -> list[str]:
    """The units of numbers that are neither losses nor shares: those of probes that the package does not know."""
    strange = {(probe, about.name) for probe, about in data.strange()}
    own = [one for one in measures(data) if (one.probe, one.metric) in strange and not one.percent]
    return [f"In their own units: {', '.join(f'{one.heading} {one.unit}' for one in own)}."] if own else []


def effects_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """The effect of every level on every number of the complete results, by matched pairs."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    found = effects(data)
    lines = [
        Line(
            words=(
                one.measure.heading,
                one.axis,
                f"{one.level} - {one.reference}",
                one.where.partition("=")[2] or "all",
            ),
            entries=_tested(one, one.pairs),
        )
        for one in found
    ]
    notes = [sweep_note(data), TEST_NOTE.format(len(found)), *_own_units(data)]
    notes += _limits(data, measures(data), max((one.pairs for one in found), default=1))
    if not found:
        notes.append("No two cells with numbers agree on all axes but one: there is no pair to compare yet.")
    title = f"Effects of levels by matched pairs, sweep {data.sweep}, revision {data.revision}"
    numbers = ("Pairs", "Mean", "Median", "Up", "Down", "Low", "High", "p sign", "p perm", "p Holm")
    return assemble(
        data, "effects", title, ("Measure", "Axis", "Levels", "Within"), lines, numbers=numbers, notes=notes
    )


def interactions_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """Two-way interactions by differences of differences over matched fours of cells."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    found = interactions(data)
    lines = [
        Line(
            words=(
                one.measure.heading,
                *(f"{a}: {x} - {r}" for a, x, r in zip(one.axes, one.levels, one.references, strict=True)),
            ),
            entries=_tested(one, one.fours),
        )
        for one in found
    ]
    title = f"Two-way interactions, sweep {data.sweep}, revision {data.revision}"
    numbers = ("Fours", "Mean", "Median", "Up", "Down", "Low", "High", "p sign", "p perm", "p Holm")
    notes = [sweep_note(data), TEST_NOTE.format(len(found)), *_own_units(data)]
    return assemble(data, "interactions", title, ("Measure", "First", "Second"), lines, numbers=numbers, notes=notes)


def _tested(one: Effect | Interaction, n: int) -> tuple[Entry, ...]:
    """The ten numbers of an effect or an interaction; the first says which cells and attempts all of them come from."""
    count = Entry(text=str(n), heading="Pairs" if isinstance(one, Effect) else "Fours", value=float(n))
    amounts = {"Mean": one.mean, "Median": one.median, "Low": one.low, "High": one.high}
    mean, median, low, high = (_difference(one.measure, name, value) for name, value in amounts.items())
    up, down = (
        Entry(text=str(found), heading=name, value=float(found)) for name, found in (("Up", one.up), ("Down", one.down))
    )
    ps = {"p sign": one.p_sign, "p perm": one.p, "p Holm": one.p_holm}
    tests = (p_value(name, p) for name, p in ps.items())
    return (replace(count, origins=one.origins), mean, median, up, down, low, high, *tests)


def _difference(column: Column, name: str, value: float) -> Entry:
    base = Entry(text="-", heading=name, probe=column.probe, metric=column.metric, length=column.length)
    if math.isnan(value):
        return base
    return replace(base, text=signed(round(value, DUST), column.decimals, percent=column.percent), value=value)


def _limits(data: SweepData, columns: Sequence[Column], pairs: int) -> list[str]:
    """Notes on what the design can and cannot see."""
    notes = []
    if max((len(cells) for cells in data.configurations().values()), default=1) < 2:
        notes.append("One run a configuration (n = 1): these numbers say nothing of seeds.")
    known = [(column, found) for column in columns if (found := spread(data, column)) is not None]
    if known:
        kind = known[0][1].kind
        told = [
            f"{column.heading} {_amount(column, detectable(found, 1))} and {_amount(column, detectable(found, max(pairs, 1)))} "
            f"(sd {_amount(column, found.sd)})"
            for column, found in known
        ]
        notes.append(
            f"By the spread between {kind}, the smallest difference that this design shows with 80% power, of one pair and of "
            f"{max(pairs, 1)}: {'; '.join(told)}."
        )
    else:
        notes.append(
            "The sweep has neither seeds nor near-replicates, so how large a difference it can see is not known."
        )
    return notes


def _amount(column: Column, value: float) -> str:
    return rounded(value, column.decimals, percent=column.percent)
