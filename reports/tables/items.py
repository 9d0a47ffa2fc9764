"""Table `items`: effects of the levels tested over documents, rows and trials."""

from __future__ import annotations

from ...results.store.store import Store
from ..stats.effects.needle_baseline import needle_note
from ..stats.items import ItemEffect, item_effects
from ..sweep_data import SweepData
from ..table import Table
from ..table_builder import TableRow, build_table, count_entry, sweep_note, tested_entry

MEAN_NOTE = (
    "Mean: difference of the levels over items, averaged over the pairs of configurations that differ "
    "only in the axis; losses in nats, shares in percentage points. Items: documents (Clean, Tail), "
    "rows (Junk), trials (Ndl) or sequences (FF), the same for all networks."
)
METHODS = {
    "sign-flip": "sign-flip permutation test over items (exact up to 30 items), inverted for the interval",
    "t": "Student's t over items where there are fewer than 6",
    "crossed": "items crossed with seeds, with Satterthwaite's degrees of freedom and a generalized p",
    "seeds": "Student's t over the seeds of a single item",
    "none": "no test: a single item, or no variance",
}
TESTS = (
    "Low, High and p come from the same test ({}), for other items like these and the same networks{}; "
    "table effects is about other configurations. p corr: p corrected within the tests of one number "
    "and one axis. All rows are exploratory."
)
MCNEMAR = (
    "Gained and Lost: trials with every digit correct at the first level only and at the second only, "
    "summed over pairs and seeds; p McN: McNemar's exact test, with trials as clusters for several "
    "pairs; not corrected."
)
NOTHING_STORED = (
    "No items are stored for two cells of this sweep that differ in exactly one axis. Own evaluations "
    "store items; printed numbers have none, and a bundle may lack them (export --no-examples)."
)
NUMBERS = ("Items", "Pairs", "Mean", "Low", "High", "p", "p corr", "Gained", "Lost", "p McN")


def items_table(store: Store, data: SweepData) -> Table:
    """Return the table `items`: the effect of every level on every number with stored items, at every length.

    An item is a document, row, trial or sequence that all networks answer. One row per effect of `item_effects`, with
    Measure, Axis, Levels and Within as labels. Number columns: Items, Pairs, Mean, Low, High, p, p corr, Gained, Lost
    and p McN. JSON fields: family, method, seeds, where. Without stored items it has no rows and a note that says so.
    """
    item_effect_list = item_effects(store, data)
    lines = [
        TableRow(
            labels=(
                effect.measure.heading,
                effect.axis,
                f"{effect.level} - {effect.reference}",
                effect.where.partition("=")[2] or "all",
            ),
            entries=(
                count_entry("Items", effect.n, effect.origins),
                *(tested_entry(effect, heading) for heading in NUMBERS[1:]),
            ),
            json_fields={
                "family": effect.family,
                "method": effect.method,
                "seeds": effect.seeds,
                "where": effect.where,
            },
        )
        for effect in item_effect_list
    ]
    title = "Effect of each factor by item"
    headings = ("Measure", "Axis", "Levels", "Within")
    return build_table(data, "items", title, headings, lines, numbers=NUMBERS, notes=_notes(data, item_effect_list))


def _notes(data: SweepData, effects_shown: list[ItemEffect]) -> list[str]:
    """Return the notes on methods and tests; without effects the note that nothing is stored.

    The first note is that of the sweep. Needle accuracies add notes on McNemar's test and the needle.
    """
    if not effects_shown:
        return [sweep_note(data), NOTHING_STORED]
    methods = "; ".join(
        label for name, label in METHODS.items() if any(effect.method == name for effect in effects_shown)
    )
    crossed = any(effect.method == "crossed" for effect in effects_shown)
    notes = [sweep_note(data), MEAN_NOTE, TESTS.format(methods, " and other seeds" if crossed else "")]
    if any(effect.gained is not None for effect in effects_shown):
        notes += [MCNEMAR, needle_note(data)]
    return notes
