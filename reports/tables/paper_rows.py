"""Selection of the plain-recipe cells that tables 1 to 4 show, and facts that the paper prints in addition.

The plain recipe has the regularizer `baseline` where the sweep has it (else its first), and other switches off unless
the table varies them. A sweep of published numbers gives the rows and columns that were printed; where they contradict
the authors' logs, docs/reference/mechanisms.md says so ("Decisions").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...results.store.records import AXES, CellState
from ...results.store.store import Store
from ..number_format import format_length, format_number
from ..sweep_data import SweepData

MAIN_MIXER = "polar"


def plain_levels(data: SweepData, **levels: str) -> dict[str, str]:
    """Return the levels of the plain recipe by axis: reg_mode, distractor, memory and window, updated by `levels`.

    The regularizer is "baseline" (also for a sweep without levels of reg_mode), else the sweep's first one; the other
    axes are "off". attn_type is a key only if given.
    """
    modes = data.levels("reg_mode")
    mode = "baseline" if "baseline" in modes or not modes else modes[0]
    return {"reg_mode": mode, "distractor": "off", "memory": "off", "window": "off"} | levels


def cells_at_levels(data: SweepData, levels: dict[str, str]) -> dict[tuple[str, ...], list[CellState]]:
    """Return the cells at these levels, grouped by their levels of the extra axes (`data.extra_axes`).

    Cells of a group differ only in their seed, if `levels` fixes all five AXES. Without extra axes the only key is ().
    Without any such cell the result is empty.

    Args:
        data: The sweep.
        levels: Level by axis of AXES; axes that are not named may have any level.
    """
    cells_by_group: dict[tuple[str, ...], list[CellState]] = {}
    for key, cells in data.configurations().items():
        if all(cells[0].levels[axis] == level for axis, level in levels.items()):
            cells_by_group.setdefault(key[len(AXES) :], []).extend(cells)
    return cells_by_group


def memories(data: SweepData) -> list[str]:
    """Return the levels of the axis memory except `off`; ["on"] where the sweep has none."""
    return [level for level in data.levels("memory") if level != "off"] or ["on"]


def mixers(data: SweepData) -> list[str]:
    """Return the levels of attn_type, sorted by name."""
    return sorted(data.levels("attn_type"))


def main_mixer_last(names: Iterable[str]) -> list[str]:
    """Return the mixers sorted by name, with "polar" at the end if it is among them, as the paper orders them."""
    return sorted(names, key=lambda name: (name == MAIN_MIXER, name))


def configuration_label(mixer: str, memory: str, is_single_memory: bool) -> str:
    """Return the label of a row: "polar", "polar + memory", or "polar + kda" where the sweep has several memories."""
    if memory == "off":
        return mixer
    return f"{mixer} + memory" if is_single_memory else f"{mixer} + {memory}"


# --- what the paper prints besides ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrintedDiscrepancy:
    """A printed number that differs from the logged one, in the unit of the metric (shares as fractions).

    `table` is the number of the printed table, `cell` the cell's id, `length` a context length in tokens or 0.
    """

    table: str
    cell: str
    slug: str
    probe: str
    metric: str
    length: int
    printed: float
    logged: float

    @property
    def text(self) -> str:
        """The discrepancy as a sentence, shares in %."""
        percent = self.metric in ("digit_accuracy", "mfu_paper")
        printed, logged = (format_number(value, 2, percent=percent) for value in (self.printed, self.logged))
        at = f" at {format_length(self.length)}" if self.length else ""
        return f"Table {self.table} prints {printed}, the log gives {logged}{at}"


def _half_digit(metric: str, table: str) -> float:
    """Return half of the last digit that a table prints of a metric, in the metric's unit.

    0.0005 for digit_accuracy in table "6", for mfu_paper and for val_loss; 0.005 for digit_accuracy in other tables and
    for every other metric.
    """
    if metric == "digit_accuracy":
        return 0.0005 if table == "6" else 0.005
    return 0.0005 if metric in ("mfu_paper", "val_loss") else 0.005


def printed_discrepancies(data: SweepData, table: str | None = None) -> list[PrintedDiscrepancy]:
    """Return the published numbers that differ from the authors' log by more than rounding explains.

    They are sorted by table, slug, probe, metric and length. Numbers without a log are left out.

    Args:
        data: A sweep of published numbers; any other gives [].
        table: Number of the printed table; None: all tables.
    """
    slugs = {cell.cell_id: cell.slug for cell in data.cells}
    discrepancies = []
    for (cell, number, probe, metric, length), value in data.printed.items():
        logged = data.values.get((cell, probe, metric, length))
        if table not in (None, number) or logged is None or logged.value is None or value.value is None:
            continue
        if abs(value.value - logged.value) > _half_digit(metric, number) * (1 + 1e-6):
            discrepancies.append(
                PrintedDiscrepancy(number, cell, slugs[cell], probe, metric, length, value.value, logged.value)
            )
    return sorted(
        discrepancies,
        key=lambda discrepancy: (
            discrepancy.table,
            discrepancy.slug,
            discrepancy.probe,
            discrepancy.metric,
            discrepancy.length,
        ),
    )


def published_facts(store: Store, cell: str) -> dict[str, str]:
    """Return the texts that are printed of a published model in addition to its numbers, by name.

    Names are such as model, params, train_tokens, native_ctx, train_flops, or name (of a configuration of another
    paper). Values are Python's str() of what is stored. The result is empty for a cell without any.

    Args:
        store: The database.
        cell: Id of the cell.
    """
    facts = store.cell(cell).config.get("published", {})
    return {name: str(text) for name, text in facts.items()}
