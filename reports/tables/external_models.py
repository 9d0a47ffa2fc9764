"""Models from elsewhere that were measured here, on the text of a sweep: what the tables beside open-weight models show of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...results import paper
from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import large, length_name
from ..sweep_data import SweepData, gather

KEY = "open_weight"
"""Section of a stored config that says which model a cell is, and option of a revision that lists such cells."""
MARK = " (external)"


@dataclass(frozen=True)
class External:
    """A model measured here; nobody here has trained it."""

    data: SweepData
    """Of the sweep that lists it."""
    cell: CellState
    model: Mapping[str, Any]
    """Name, revision, dtype, pairing, context, ..., as stored."""

    @property
    def native(self) -> bool:
        """Whether its texts were cut by its own tokens, the published way."""
        return self.model.get("pairing") == "native"

    @property
    def label(self) -> str:
        """Its name as a table prints it."""
        ways = [str(self.model.get("dtype")), *(["native pairing"] if self.native else [])]
        return f"{self.model.get('name')}, {', '.join(ways)}{MARK}"

    @property
    def params(self) -> str:
        """Its parameters, counted."""
        found = self.data.value(self.cell.cell_id, "throughput", "parameters", 0)
        return large(found.value) if found is not None and found.value is not None else "-"

    @property
    def context(self) -> int | None:
        """Tokens that it was trained to read, as its config says."""
        found = self.model.get("context")
        return found if isinstance(found, int) else None

    @property
    def budget(self) -> Mapping[str, str]:
        """What the paper prints of its training, by its name; empty for a model that the paper has not."""
        name = str(self.model.get("name")).rpartition("/")[2]
        return next((row for row in paper.rows("budgets") if row["model"] == name), {})

    @property
    def about(self) -> dict[str, Any]:
        """What JSON says of its row."""
        known = {name: self.model.get(name) for name in ("name", "revision", "dtype", "pairing", "context")}
        return {
            "model": self.label,
            "external": True,
            **known,
            **{k: v for k, v in self.budget.items() if k != "model"},
        }


def externals(store: Store, data: SweepData) -> list[External]:
    """Those that read the text that the sweep's own cells read, whichever sweep they were measured beside."""
    texts = set(map(_text, data.configs.values())) - {None}
    if not texts or paper.is_published(data.sweep):
        return []
    return [one for one in _all(store) if _text(one.data.configs[one.cell.cell_id]) in texts]


def _all(store: Store) -> Iterator[External]:
    for summary in store.sweeps():
        if summary.read_only and paper.is_published(summary.name):
            continue
        if KEY not in store.revision(summary.name).options:
            continue
        data = gather(store, summary.name)
        for cell in data.cells:
            model = data.setting(cell, KEY)
            if isinstance(model, Mapping) and cell.trained_attempt_id is not None:
                yield External(data, cell, model)


def _text(config: Mapping[str, Any]) -> str | None:
    found = (config.get("data") or {}).get("fingerprint")
    return str(found) if found else None


def notes_on(found: Sequence[External], lengths: Sequence[int]) -> list[str]:
    """What a reader of their rows has to know."""
    if not found:
        return []
    notes = [f"{MARK.strip()}: a model from elsewhere, measured here on this sweep's text."]
    if any(one.native for one in found):
        notes.append("Native pairing: texts cut by the model's own tokens, the published way; bits per token of GPT-2.")
    far = [one for one in found if one.context and lengths and one.context < lengths[-1]]
    if far:
        told = ", ".join(f"{one.model.get('name')} ({length_name(one.context or 0)})" for one in far)
        notes.append(f"Measured beyond the context that they were trained for: {told}.")
    return notes
