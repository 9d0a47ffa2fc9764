"""Table 5, regularizer modes: what each asks for, and how many cells train with it."""

from __future__ import annotations

from dataclasses import replace

from ...results import paper
from ...results.store.store import Store
from ..sweep_data import gather
from ..table import Entry, Table
from ..table_builder import Line, assemble, sweep_note
from .plain_cells import titled


def table5(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Regularizer modes: what each asks for, and how many cells of the sweep train with it."""
    data = gather(store, sweep, revision=revision)
    objectives = {row["mode"]: row["objective"] for row in paper.rows("regularizers")}
    lines = []
    for mode in data.levels("reg_mode"):
        cells = [cell for cell in data.cells if cell.levels["reg_mode"] == mode]
        done = sum(data.standing(cell) == "done" for cell in cells)
        objective = objectives.get(mode, "not in the paper")
        count = Entry(text=str(len(cells)), heading="Cells", value=float(len(cells)))
        lines.append(
            Line(words=(mode, objective), entries=(count, replace(count, text=str(done), heading="Done", value=float(done))), cells=cells)
        )  # fmt: skip
    title = titled("5", "Regularizer modes", data)
    return assemble(data, "5", title, ("Mode", "Objective"), lines, numbers=("Cells", "Done"), notes=[sweep_note(data)])
