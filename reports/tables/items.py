"""The table `items`: what the levels do document by document, row by row and trial by trial."""

from __future__ import annotations

from ...results.store.store import Store
from ..stats.effects.needle_baseline import needle_note
from ..stats.items import ItemEffect, item_effects
from ..sweep_data import SweepData
from ..table import Table
from ..table_builder import TableRow, build_table, count_entry, sweep_note, tested_entry

ABOUT = (
    "Mean: difference of the levels over items, averaged over the pairs of configurations that differ in the axis alone; losses in "
    "nats, shares in points. Items: documents (Clean, Tail), rows (Junk), trials (Ndl) or sequences (FF), the same ones for every network."
)
METHODS = {
    "sign-flip": "permutation of signs over items, exact up to 30, and its inversion",
    "t": "Student's t over fewer than 6 items",
    "crossed": "items crossed with seeds, Satterthwaite's and a generalized p",
    "seeds": "Student's t over the seeds of the only item",
    "none": "no test: one item, or no variance to judge by",
}
TESTS = (
    "Low, High and p belong together ({}): what other items like these would come to with these very networks{}; table effects is "
    "about other configurations. p corr: p after the correction for the tests of one number and one axis. Every row is exploratory."
)
MCNEMAR = (
    "Gained and Lost: trials with every digit right at the first level alone and at the second alone, summed over pairs and seeds; "
    "p McN: McNemar's test, exact, trials as clusters where there are several pairs; not corrected."
)
NOTHING_STORED = (
    "No item of a probe is stored for two cells of this sweep that agree on all axes but one: evaluations of one's own store them, "
    "printed numbers have none, and a bundle may come without them (export --no-examples)."
)
NUMBERS = ("Items", "Pairs", "Mean", "Low", "High", "p", "p corr", "Gained", "Lost", "p McN")


def items_table(store: Store, data: SweepData) -> Table:
    """The effect of every level on every number that has items, at every context length, tested over the items."""
    found = item_effects(store, data)
    lines = [
        TableRow(
            words=(
                one.measure.heading,
                one.axis,
                f"{one.level} - {one.reference}",
                one.where.partition("=")[2] or "all",
            ),
            entries=(
                count_entry("Items", one.n, one.origins),
                *(tested_entry(one, heading) for heading in NUMBERS[1:]),
            ),
            about={"family": one.family, "method": one.method, "seeds": one.seeds, "where": one.where},
        )
        for one in found
    ]
    title = "Effects of levels item by item"
    headings = ("Measure", "Axis", "Levels", "Within")
    return build_table(data, "items", title, headings, lines, numbers=NUMBERS, notes=_notes(data, found))


def _notes(data: SweepData, found: list[ItemEffect]) -> list[str]:
    if not found:
        return [sweep_note(data), NOTHING_STORED]
    methods = "; ".join(words for name, words in METHODS.items() if any(one.method == name for one in found))
    crossed = any(one.method == "crossed" for one in found)
    notes = [sweep_note(data), ABOUT, TESTS.format(methods, " and other seeds" if crossed else "")]
    if any(one.gained is not None for one in found):
        notes += [MCNEMAR, needle_note(data)]
    return notes
