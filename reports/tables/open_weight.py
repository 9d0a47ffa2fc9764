"""The tables `open-weight` and `budgets`: open-weight models, as printed and as measured here, beside the cells of a sweep."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...results import paper
from ...results.contrasts import weighted
from ...results.store.records import CellState
from ...results.store.store import Store
from ..number_format import CLEAN, NEEDLE, Column, column_of, format_count, format_length, format_number
from ..stats.effects.needle_baseline import needle_note
from ..sweep_data import ReportError, SweepData, load_sweep_data
from ..table import Table, TableEntry
from ..table_builder import (
    NO_CELL_TEXT,
    TableRow,
    build_table,
    derived_entry,
    measured_entry,
    placeholder_notes,
    seed_notes,
    sweep_note,
)
from .paper_rows import MAIN_MIXER, cells_at_levels, memories, mixers, named, plain_levels, published_facts


def _lengths(data: SweepData) -> list[int]:
    return sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*CLEAN)})


def _ends(data: SweepData) -> list[int]:
    lengths = _lengths(data)
    return list(dict.fromkeys((lengths[0], lengths[-1]))) if lengths else []


def _bits(probe: str, length: int, name: str) -> Column:
    if probe == "needle":
        return column_of(probe, "digit_accuracy", f"Ndl {name}", length=length)
    return column_of(probe, "bits", f"{probe.capitalize()} {name}", length=length)


def _own_entry(
    data: SweepData, cells: Sequence[CellState], column: Column, lengths: Sequence[int], loss: str = "nats"
) -> TableEntry:
    """A number of cells measured here in bits per token, at a length or (0) weighted over all of them."""
    metric = "digit_accuracy" if column.probe == "needle" else loss
    asked = [column.length] if column.length else lengths
    parts = [measured_entry(data, cells, replace(column, metric=metric, length=length)) for length in asked]
    found = {length: part.value for length, part in zip(asked, parts, strict=True) if part.value is not None}
    scale = 1 / math.log(2) if metric == "nats" else 1.0
    whole = len(found) == len(parts) > 0
    made = derived_entry(data, column, weighted(found) * scale if whole else None, parts, NO_CELL_TEXT)
    return replace(made, seeds=max((part.seeds for part in parts), default=0))


def open_weight(store: Store, data: SweepData) -> Table:
    """Losses in bits per token and needle accuracy beside open-weight models, the published ones as printed.

    `WAvg` weights every length by itself. Our own rows are the plain recipe, computed from the sweep's numbers; published
    models are shown where the sweep's context lengths are theirs.
    """
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no open-weight table; ask for --sweep {paper.SWEEPS[1]}")
    ends = _ends(data)
    own = not paper.is_published(data.sweep)
    shown = [format_length(length) for length in ends] or ["shortest", "longest"]
    columns = [
        _bits(probe, length, name)
        for probe in ("clean", "junk", "needle")
        for length, name in zip((0, *(ends or (-1, -1))), ("WAvg", *shown), strict=True)
    ]
    lines: list[TableRow] = []
    if not own or ends == [paper.LENGTHS[0], paper.LENGTHS[-1]]:
        lines = _published_rows(store, columns)
        notes = ["Models by name: as the paper's second version prints them."]
    else:
        where = f"from {' to '.join(shown)}" if len(shown) > 1 else f"at {shown[0]} alone"
        notes = [f"The published models were measured from 2K to 64K tokens, this sweep {where}: left out."]
    elsewhere = external_models(store, data)
    data = replace(data, sources=dict(ChainMap(*(dict(one.data.sources) for one in elsewhere), dict(data.sources))))
    lines += _external_rows(elsewhere, data, columns)
    lines += _own_rows(data, columns) if own else []
    grid = [line.entries for line in lines]
    about = f"Clean and Junk: bits per token (published: per GPT-2 token of the text). {needle_note(data)} "
    n = max((len(line.cells) for line in lines), default=0)
    notes = [sweep_note(data), about + "WAvg: weighted by length.", *notes]
    notes += [*external_model_notes(elsewhere, ends), *seed_notes(grid, n), *placeholder_notes(grid)]
    title = "Beside open-weight models"
    numbers = [column.heading for column in columns]
    return build_table(
        data, "open-weight", title, ("Model", "Params"), lines, numbers=numbers, notes=notes, rank="column"
    )


def _published_rows(store: Store, columns: Sequence[Column]) -> list[TableRow]:
    home = paper.with_published(store, paper.OPEN_WEIGHT)
    data = load_sweep_data(home, paper.OPEN_WEIGHT)
    lines = []
    for cell in data.cells:
        if not any((cell.cell_id, *NEEDLE, length) in data.values for length in paper.LENGTHS):
            continue
        facts = published_facts(home, cell.cell_id)
        # attempts of a temporary database mean nothing in ours
        entries = (
            replace(one, origins=((cell.cell_id, None),)) for one in (measured_entry(data, [cell], c) for c in columns)
        )
        about = {"model": facts["model"]}
        lines.append(
            TableRow(words=(facts["model"], facts["params"]), entries=tuple(entries), cells=[cell], about=about)
        )
    return lines


def _external_rows(found: Sequence[ExternalModel], data: SweepData, columns: Sequence[Column]) -> list[TableRow]:
    """Where texts are paired the loss is over the very tokens of our own rows; else over tokens of GPT-2."""
    lengths = _lengths(data)
    lines = []
    for one in found:
        loss = "bits" if one.native else "nats"
        entries = tuple(_own_entry(one.data, [one.cell], column, lengths, loss) for column in columns)
        lines.append(TableRow(words=(one.label, one.params), entries=entries, cells=[one.cell], about=one.about))
    return lines


def _own_rows(data: SweepData, columns: Sequence[Column]) -> list[TableRow]:
    lengths = _lengths(data)
    known = memories(data)
    lines = []
    for memory in (*known, "off"):
        for mixer in sorted(mixers(data), key=lambda name: (name != MAIN_MIXER, name)):
            for group, cells in cells_at_levels(data, plain_levels(data, attn_type=mixer, memory=memory)).items():
                name = " ".join((named(mixer, memory, len(known) == 1), *(f"[{level}]" for level in group)))
                size = measured_entry(data, cells, column_of("throughput", "parameters", "Params"))
                words = (name, format_count(size.value) if size.value is not None else "-")
                entries = tuple(_own_entry(data, cells, column, lengths) for column in columns)
                lines.append(TableRow(words=words, entries=entries, cells=cells, about={"model": name}))
    return lines


# --- models measured here ---------------------------------------------------------------------------------------------


CONFIG_SECTION = "open_weight"
"""Section of a stored config that says which model a cell is, and option of a revision that lists such cells."""
EXTERNAL_SUFFIX = " (external)"


@dataclass(frozen=True)
class ExternalModel:
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
        return f"{self.model.get('name')}, {', '.join(ways)}{EXTERNAL_SUFFIX}"

    @property
    def params(self) -> str:
        """Its parameters, counted."""
        found = self.data.value(self.cell.cell_id, "throughput", "parameters", 0)
        return format_count(found.value) if found is not None and found.value is not None else "-"

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


def external_models(store: Store, data: SweepData) -> list[ExternalModel]:
    """Those that read the text that the sweep's own cells read, whichever sweep they were measured beside."""
    texts = set(map(_text, data.configs.values())) - {None}
    if not texts or paper.is_published(data.sweep):
        return []
    return [one for one in _all(store) if _text(one.data.configs[one.cell.cell_id]) in texts]


def _all(store: Store) -> Iterator[ExternalModel]:
    for summary in store.sweeps():
        if summary.read_only and paper.is_published(summary.name):
            continue
        if CONFIG_SECTION not in store.revision(summary.name).options:
            continue
        data = load_sweep_data(store, summary.name)
        for cell in data.cells:
            model = data.setting(cell, CONFIG_SECTION)
            if isinstance(model, Mapping) and cell.trained_attempt_id is not None:
                yield ExternalModel(data, cell, model)


def _text(config: Mapping[str, Any]) -> str | None:
    found = (config.get("data") or {}).get("fingerprint")
    return str(found) if found else None


def external_model_notes(found: Sequence[ExternalModel], lengths: Sequence[int]) -> list[str]:
    """What a reader of their rows has to know."""
    if not found:
        return []
    notes = [f"{EXTERNAL_SUFFIX.strip()}: a model from elsewhere, measured here on this sweep's text."]
    if any(one.native for one in found):
        notes.append("Native pairing: texts cut by the model's own tokens, the published way; bits per token of GPT-2.")
    far = [one for one in found if one.context and lengths and one.context < lengths[-1]]
    if far:
        told = ", ".join(f"{one.model.get('name')} ({format_length(one.context or 0)})" for one in far)
        notes.append(f"Measured beyond the context that they were trained for: {told}.")
    return notes


# --- training budgets -------------------------------------------------------------------------------------------------


ZETTA = 1e21


def budgets(store: Store, data: SweepData) -> Table:
    """Training budgets of the open-weight models as printed, and of the sweep's own: 6 x parameters x tokens FLOPs.

    A ZF is 1e21 floating-point operations.
    """
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no table of budgets; ask for --sweep {paper.SWEEPS[1]}")
    other_store = paper.with_published(store, paper.OPEN_WEIGHT)
    other = load_sweep_data(other_store, paper.OPEN_WEIGHT)
    printed = {row["model"] for row in paper.rows("budgets")}
    lines = []
    for cell in other.cells:
        facts = published_facts(other_store, cell.cell_id)
        if facts["model"] in printed:
            words = tuple(facts[name] for name in ("model", "params", "train_tokens", "native_ctx", "train_flops"))
            lines.append(TableRow(words=words, cells=[cell], about=facts))
    lines += map(_external_budget, found := external_models(store, data))
    if not paper.is_published(data.sweep):
        lines.append(_own_budget(store, data))
    title = "Training budgets"
    notes = [sweep_note(data), "Training FLOPs: 6 x parameters x tokens; ZF: 1e21."]
    if found:
        notes.append(
            f"{EXTERNAL_SUFFIX.strip()}: measured here; parameters counted, context as its config says, the rest as printed."
        )
    headings = ("Model", "Params", "Train tokens", "Native context", "Train FLOPs")
    return build_table(data, "budgets", title, headings, lines, notes=notes)


def _external_budget(one: ExternalModel) -> TableRow:
    context = format_length(one.context) if one.context else "-"
    printed = [one.budget.get(name, "-") for name in ("train_tokens", "train_flops")]
    return TableRow(words=(one.label, one.params, printed[0], context, printed[1]), cells=[one.cell], about=one.about)


def _range(texts: Iterable[str], unit: str = "") -> str:
    """One text, or the first and the last of several; a shared unit is printed once."""
    found = list(dict.fromkeys(texts))
    return (f"{found[0]}–{found[-1]}" if len(found) > 1 else found[0] if found else "-") + (unit if found else "")


def _own_budget(store: Store, data: SweepData) -> TableRow:
    sizes = {key[0]: value.value for key, value in data.values.items() if key[1:3] == ("throughput", "parameters")}
    known = [(size, cell.tokens_total) for cell in data.cells if (size := sizes.get(cell.cell_id)) is not None]
    known.sort(key=lambda pair: pair[0] * pair[1])
    contexts = {store.cell(cell.cell_id).config.get("train", {}).get("seq_len") for cell in data.cells[:1]}
    flops = [format_number(6 * size * tokens / ZETTA, 4) for size, tokens in known]
    if known and not float(flops[-1]):
        flops = [f"{6 * size * tokens / ZETTA:.2e}" for size, tokens in known]
    words = (
        f"sweep {data.sweep}",
        _range(format_count(size) for size in sorted(size for size, _ in known)),
        _range(format_count(tokens) for tokens in sorted({cell.tokens_total for cell in data.cells})),
        _range(format_length(length) for length in contexts if length),
        _range(flops, " ZF"),
    )
    return TableRow(words=words, cells=list(data.cells), about={"model": words[0]})
