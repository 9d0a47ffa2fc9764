"""Tables `open-weight` and `budgets`.

Open-weight models, as printed and as measured here, next to the cells of a sweep.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...results import paper
from ...results.contrasts import length_weighted_mean
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
from .paper_rows import (
    MAIN_MIXER,
    cells_at_levels,
    configuration_label,
    memories,
    mixers,
    plain_levels,
    published_facts,
)


def _clean_lengths(data: SweepData) -> list[int]:
    """Return the context lengths in tokens at which clean loss was measured or requested, ascending."""
    return sorted({*data.requested_lengths().get("clean", ()), *data.lengths(*CLEAN)})


def _end_lengths(data: SweepData) -> list[int]:
    """Return the shortest and the longest length of clean loss; one if they are equal, [] without any."""
    lengths = _clean_lengths(data)
    return list(dict.fromkeys((lengths[0], lengths[-1]))) if lengths else []


def _bits_column(probe: str, length: int, name: str) -> Column:
    """Return the column of a probe at a length: digit accuracy of the needle, or loss in bits per token.

    The metric of a loss is "bits", whatever unit is stored; `_own_entry` converts.

    Args:
        probe: "clean", "junk" or "needle".
        length: Context length in tokens; 0 for the weighted mean, -1 for a length that is not known.
        name: Second word of the heading, such as "WAvg" or "2K".
    """
    if probe == "needle":
        return column_of(probe, "digit_accuracy", f"Ndl {name}", length=length)
    return column_of(probe, "bits", f"{probe.capitalize()} {name}", length=length)


def _own_entry(
    data: SweepData, cells: Sequence[CellState], column: Column, lengths: Sequence[int], loss: str = "nats"
) -> TableEntry:
    """Return the mean of a number over cells that were measured here, losses in bits per token.

    The value is None if any of its lengths has no number; the text is then the placeholder of the first such length.

    Args:
        data: The sweep of the cells.
        cells: Seeds of one configuration.
        column: The number; its length 0 means the mean over `lengths`, each weighted by its tokens.
        lengths: Context lengths in tokens.
        loss: Metric of the stored losses: "nats" (converted to bits) or "bits" (taken as they are). Not used for the
            needle.
    """
    metric = "digit_accuracy" if column.probe == "needle" else loss
    entry_lengths = [column.length] if column.length else lengths
    parts = [measured_entry(data, cells, replace(column, metric=metric, length=length)) for length in entry_lengths]
    values = {length: part.value for length, part in zip(entry_lengths, parts, strict=True) if part.value is not None}
    scale = 1 / math.log(2) if metric == "nats" else 1.0
    is_complete = len(values) == len(parts) > 0
    entry = derived_entry(
        data, column, length_weighted_mean(values) * scale if is_complete else None, parts, NO_CELL_TEXT
    )
    return replace(entry, seeds=max((part.seeds for part in parts), default=0))


def open_weight_table(store: Store, data: SweepData) -> Table:
    """Return the table `open-weight`: losses in bits per token and needle accuracy, next to printed models.

    Rows in this order: published models, models from elsewhere that were measured here, and the plain-recipe cells of
    this sweep (none for a published sweep). Columns: Model, Params, and for each of Clean, Junk and Ndl `WAvg` (the
    mean over lengths, weighted by their tokens) and the shortest and the longest length. Published models are shown
    only if the sweep has the same shortest and longest context length; otherwise a note says so.

    Raises:
        ReportError: The sweep is a published one without such a table.
    """
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no open-weight table; use --sweep {paper.SWEEPS[1]}")
    ends = _end_lengths(data)
    own = not paper.is_published(data.sweep)
    shown = [format_length(length) for length in ends] or ["shortest", "longest"]
    columns = [
        _bits_column(probe, length, name)
        for probe in ("clean", "junk", "needle")
        for length, name in zip((0, *(ends or (-1, -1))), ("WAvg", *shown), strict=True)
    ]
    lines: list[TableRow] = []
    if not own or ends == [paper.LENGTHS[0], paper.LENGTHS[-1]]:
        lines = _published_rows(store, columns)
        notes = ["Models by name: as printed in the paper's second version."]
    else:
        where = f"from {' to '.join(shown)}" if len(shown) > 1 else f"only at {shown[0]}"
        notes = [f"Published models are excluded: they were measured from 2K to 64K tokens, this sweep {where}."]
    elsewhere = external_models(store, data)
    data = replace(data, sources=dict(ChainMap(*(dict(model.data.sources) for model in elsewhere), dict(data.sources))))
    lines += _external_rows(elsewhere, data, columns)
    lines += _own_rows(data, columns) if own else []
    grid = [line.entries for line in lines]
    units_note = f"Clean and Junk: bits per token (published: per GPT-2 token of the text). {needle_note(data)} "
    n = max((len(line.cells) for line in lines), default=0)
    notes = [
        sweep_note(data),
        units_note + "WAvg: mean over the context lengths, each weighted by its number of tokens.",
        *notes,
    ]
    notes += [*external_model_notes(elsewhere, ends), *seed_notes(grid, n), *placeholder_notes(grid)]
    title = "Comparison with open-weight models"
    numbers = [column.heading for column in columns]
    return build_table(
        data, "open-weight", title, ("Model", "Params"), lines, numbers=numbers, notes=notes, rank="column"
    )


def _published_rows(store: Store, columns: Sequence[Column]) -> list[TableRow]:
    """Return the rows of the published open-weight models that have a needle accuracy; others are left out.

    Labels: model and number of parameters, as printed. Origins name cells without attempts. JSON fields: model.
    """
    home = paper.with_published(store, paper.OPEN_WEIGHT)
    data = load_sweep_data(home, paper.OPEN_WEIGHT)
    lines = []
    for cell in data.cells:
        if not any((cell.cell_id, *NEEDLE, length) in data.values for length in paper.LENGTHS):
            continue
        facts = published_facts(home, cell.cell_id)
        # the attempts belong to a temporary database and have no meaning in this one
        entries = (
            replace(entry, origins=((cell.cell_id, None),))
            for entry in (measured_entry(data, [cell], c) for c in columns)
        )
        json_fields = {"model": facts["model"]}
        lines.append(
            TableRow(
                labels=(facts["model"], facts["params"]), entries=tuple(entries), cells=[cell], json_fields=json_fields
            )
        )
    return lines


def _external_rows(models: Sequence[ExternalModel], data: SweepData, columns: Sequence[Column]) -> list[TableRow]:
    """Return one row per model that was measured here, in the given order, with labels for name and parameters.

    With paired texts the loss is over the same tokens as that of our own rows, so stored nats become bits. With the
    model's own tokens the stored bits, per token of GPT-2, are shown.

    Args:
        models: External models.
        data: This sweep, which gives the lengths of the weighted mean.
        columns: Number columns.
    """
    lengths = _clean_lengths(data)
    lines = []
    for model in models:
        loss = "bits" if model.uses_native_tokens else "nats"
        entries = tuple(_own_entry(model.data, [model.cell], column, lengths, loss) for column in columns)
        lines.append(
            TableRow(
                labels=(model.label, model.params), entries=entries, cells=[model.cell], json_fields=model.json_fields
            )
        )
    return lines


def _own_rows(data: SweepData, columns: Sequence[Column]) -> list[TableRow]:
    """Return the rows of the sweep's plain-recipe cells, one per configuration.

    They are ordered by memory level, without memory last, and within it by mixer name, "polar" first. Labels: a name
    such as "polar + memory", with levels of extra axes in brackets, and the mean number of parameters ("-" if unknown).
    JSON fields: model (the name).
    """
    lengths = _clean_lengths(data)
    memory_levels = memories(data)
    lines = []
    for memory in (*memory_levels, "off"):
        for mixer in sorted(mixers(data), key=lambda name: (name != MAIN_MIXER, name)):
            for group, cells in cells_at_levels(data, plain_levels(data, attn_type=mixer, memory=memory)).items():
                name = " ".join(
                    (configuration_label(mixer, memory, len(memory_levels) == 1), *(f"[{level}]" for level in group))
                )
                size = measured_entry(data, cells, column_of("throughput", "parameters", "Params"))
                labels = (name, format_count(size.value) if size.value is not None else "-")
                entries = tuple(_own_entry(data, cells, column, lengths) for column in columns)
                lines.append(TableRow(labels=labels, entries=entries, cells=cells, json_fields={"model": name}))
    return lines


# --- models measured here ---------------------------------------------------------------------------------------------


CONFIG_SECTION = "open_weight"
"""Section of a stored config that names an external model, and option of a revision that lists such cells."""
EXTERNAL_SUFFIX = " (external)"


@dataclass(frozen=True)
class ExternalModel:
    """An open-weight model that was evaluated here but not trained here: one cell of a sweep that lists such models."""

    data: SweepData
    """Data of the sweep that lists the model."""
    cell: CellState
    model: Mapping[str, Any]
    """Stored fields of the model: name, revision, dtype, pairing, context, ..."""

    @property
    def uses_native_tokens(self) -> bool:
        """True if its texts were cut by its own tokens, as published numbers are."""
        return self.model.get("pairing") == "native"

    @property
    def label(self) -> str:
        """Name of the model as a table prints it, with dtype and pairing."""
        ways = [str(self.model.get("dtype")), *(["native pairing"] if self.uses_native_tokens else [])]
        return f"{self.model.get('name')}, {', '.join(ways)}{EXTERNAL_SUFFIX}"

    @property
    def params(self) -> str:
        """Number of parameters as text, abbreviated (1.3B); "-" where unknown."""
        count = self.data.value(self.cell.cell_id, "throughput", "parameters", 0)
        return format_count(count.value) if count is not None and count.value is not None else "-"

    @property
    def context(self) -> int | None:
        """Trained context length in tokens, from its config; None where unknown."""
        tokens = self.model.get("context")
        return tokens if isinstance(tokens, int) else None

    @property
    def budget(self) -> Mapping[str, str]:
        """Texts that the paper prints of its training, by name: model, train_tokens, train_flops, ...

        Empty for a model that the paper does not list. The name without its owner ("owner/name") is looked up.
        """
        name = str(self.model.get("name")).rpartition("/")[2]
        return next((row for row in paper.rows("budgets") if row["model"] == name), {})

    @property
    def json_fields(self) -> dict[str, Any]:
        """JSON fields of its row, without measured numbers.

        Keys: `model` (the label), `external` (True), the stored `name`, `revision`, `dtype`, `pairing` and `context`
        (None where not stored), and the printed training facts of `budget` as texts, if the paper lists the model.
        """
        stored = {name: self.model.get(name) for name in ("name", "revision", "dtype", "pairing", "context")}
        return {
            "model": self.label,
            "external": True,
            **stored,
            **{k: v for k, v in self.budget.items() if k != "model"},
        }


def external_models(store: Store, data: SweepData) -> list[ExternalModel]:
    """Return the external models, of any sweep, that were measured on a text that cells of this sweep read.

    A text is known by `data.fingerprint` of a config; without any fingerprint the list is empty, as for a published
    sweep.
    """
    texts = set(map(_text_fingerprint, data.configs.values())) - {None}
    if not texts or paper.is_published(data.sweep):
        return []
    return [
        model
        for model in _all_external_models(store)
        if _text_fingerprint(model.data.configs[model.cell.cell_id]) in texts
    ]


def _all_external_models(store: Store) -> Iterator[ExternalModel]:
    """Yield the external models of every sweep of the database that lists some, in the order of `store.sweeps`.

    Only sweeps whose newest revision has the option `open_weight` are read, built-in published ones never. Cells
    without that section in their config or without a training attempt are skipped.
    """
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


def _text_fingerprint(config: Mapping[str, Any]) -> str | None:
    fingerprint = (config.get("data") or {}).get("fingerprint")
    return str(fingerprint) if fingerprint else None


def external_model_notes(models: Sequence[ExternalModel], lengths: Sequence[int]) -> list[str]:
    """Return the notes on external models: their origin, native pairing, and lengths beyond their trained context.

    Each note is there only where it applies; without models the list is empty.

    Args:
        models: The external models of a table.
        lengths: The shortest and the longest context length shown, in tokens; may be empty.
    """
    if not models:
        return []
    notes = [f"{EXTERNAL_SUFFIX.strip()}: an external model, measured here on this sweep's text."]
    if any(model.uses_native_tokens for model in models):
        notes.append(
            "Native pairing: texts are cut by the model's own tokens, as published, so models do not read the same characters; loss in bits per GPT-2 token."
        )
    far = [model for model in models if model.context and lengths and model.context < lengths[-1]]
    if far:
        models_with_context = ", ".join(
            f"{model.model.get('name')} ({format_length(model.context or 0)})" for model in far
        )
        notes.append(f"Measured beyond their training context: {models_with_context}.")
    return notes


# --- training budgets -------------------------------------------------------------------------------------------------


ZETTA = 1e21


def training_budgets_table(store: Store, data: SweepData) -> Table:
    """Return the table `budgets`: training budgets of the open-weight models as printed, and of the sweep.

    Columns: Model, Params, Train tokens, Native context, Train FLOPs, all as texts. Rows: published models that the
    paper lists, models from elsewhere measured here, and one row for the sweep itself (none for a published sweep).
    Training FLOPs are 6 x parameters x tokens; a ZF is 1e21 floating-point operations.

    Raises:
        ReportError: The sweep is a published one without such a table.
    """
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no table of budgets; use --sweep {paper.SWEEPS[1]}")
    published_store = paper.with_published(store, paper.OPEN_WEIGHT)
    published = load_sweep_data(published_store, paper.OPEN_WEIGHT)
    printed = {row["model"] for row in paper.rows("budgets")}
    lines = []
    for cell in published.cells:
        facts = published_facts(published_store, cell.cell_id)
        if facts["model"] in printed:
            labels = tuple(facts[name] for name in ("model", "params", "train_tokens", "native_ctx", "train_flops"))
            lines.append(TableRow(labels=labels, cells=[cell], json_fields=facts))
    lines += map(_external_budget_row, measured_models := external_models(store, data))
    if not paper.is_published(data.sweep):
        lines.append(_own_budget_row(store, data))
    title = "Training budgets"
    notes = [sweep_note(data), "Training FLOPs: 6 x parameters x tokens; ZF: 1e21."]
    if measured_models:
        notes.append(
            f"{EXTERNAL_SUFFIX.strip()}: measured here; parameters are counted, context is from its config, the "
            "rest as printed."
        )
    headings = ("Model", "Params", "Train tokens", "Native context", "Train FLOPs")
    return build_table(data, "budgets", title, headings, lines, notes=notes)


def _external_budget_row(model: ExternalModel) -> TableRow:
    """Return the row of an external model, with "-" for what is unknown.

    Parameters are counted, the context is that of its config, and training tokens and FLOPs are as printed.
    """
    context = format_length(model.context) if model.context else "-"
    printed = [model.budget.get(name, "-") for name in ("train_tokens", "train_flops")]
    return TableRow(
        labels=(model.label, model.params, printed[0], context, printed[1]),
        cells=[model.cell],
        json_fields=model.json_fields,
    )


def _range_text(texts: Iterable[str], unit: str = "") -> str:
    """Return the only text, or "first–last" of several distinct ones in the given order, followed by the unit.

    Without any text the result is "-", without a unit.
    """
    distinct = list(dict.fromkeys(texts))
    return (f"{distinct[0]}–{distinct[-1]}" if len(distinct) > 1 else distinct[0] if distinct else "-") + (
        unit if distinct else ""
    )


def _own_budget_row(store: Store, data: SweepData) -> TableRow:
    """Return the row of the sweep's own cells: ranges of parameters, tokens, context and FLOPs in ZF.

    Ranges are lowest–highest. Parameters and FLOPs come from the cells whose parameters were measured. The context is
    the training length of the first cell alone. An unknown field is "-". JSON fields: model.
    """
    sizes = {key[0]: value.value for key, value in data.values.items() if key[1:3] == ("throughput", "parameters")}
    sizes_and_tokens = [
        (size, cell.tokens_total) for cell in data.cells if (size := sizes.get(cell.cell_id)) is not None
    ]
    sizes_and_tokens.sort(key=lambda pair: pair[0] * pair[1])
    contexts = {store.cell(cell.cell_id).config.get("train", {}).get("seq_len") for cell in data.cells[:1]}
    flops = [format_number(6 * size * tokens / ZETTA, 4) for size, tokens in sizes_and_tokens]
    if sizes_and_tokens and not float(flops[-1]):
        flops = [f"{6 * size * tokens / ZETTA:.2e}" for size, tokens in sizes_and_tokens]
    labels = (
        f"sweep {data.sweep}",
        _range_text(format_count(size) for size in sorted(size for size, _ in sizes_and_tokens)),
        _range_text(format_count(tokens) for tokens in sorted({cell.tokens_total for cell in data.cells})),
        _range_text(format_length(length) for length in contexts if length),
        _range_text(flops, " ZF"),
    )
    return TableRow(labels=labels, cells=list(data.cells), json_fields={"model": labels[0]})
