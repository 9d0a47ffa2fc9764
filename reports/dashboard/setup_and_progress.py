"""Setup and progress of a sweep: the parts of the first page that need no statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ...results.console.quantities import format_duration
from ...results.console.text import counted
from ...results.store.records import RevisionRecord
from ...results.store.store import Store
from ..figures.canvas.drawing import axis_label, level_label
from ..live.status import printed_source
from ..live.watch import live_state
from ..number_format import format_count, format_length
from ..stats.effects.effects import varying_axes
from ..sweep_data import SweepData

RECIPE_PHRASES = {"optimizer": "optimizer {}", "schedule": "{} schedule", "loss_reduction": "loss as a {}", "matrix_lr": "rate {:g}", "muon_lr": "rate {:g}"}  # fmt: skip
"""Phrases of the training settings that are named if all cells share them."""


def setup_facts(store: Store, data: SweepData, launched: RevisionRecord) -> dict[str, Any]:
    """Return the axes with their levels, and facts of model, training, evaluation and machine, as JSON.

    Returns:
        axes: name, words (label) and levels (labels) of every axis that varies. facts: [name, text] pairs, without
        those whose text is empty.
    """
    axes = [
        {"name": axis, "words": axis_label(axis), "levels": [level_label(level, axis) for level in data.levels(axis)]}
        for axis in varying_axes(data)
    ]
    configs = list(data.configs.values())
    seeds = sorted({cell.seed for cell in data.cells})
    lengths = sorted({length for probe_lengths in data.requested_lengths_by_probe.values() for length in probe_lengths})
    printed = printed_source(launched)
    means = f"means over {counted(data.printed_runs, 'run')}, as printed"
    once = means if data.printed_runs else "one run per configuration"
    facts = [
        ("Cells", _cells_text(data, axes, len(seeds))),
        ("Model", _model_text(data)),
        ("Training", _training_text(data, configs)),
        ("Recipe", _recipe_text(configs)),
        ("Seeds", ", ".join(map(str, seeds)) if len(seeds) > 1 else once),
        ("Context lengths", f"{', '.join(map(format_length, lengths))} tokens" if lengths else ""),
        ("GPU or device", _counted_texts(source.gpu for source in data.sources.values() if source.gpu)),
        ("Source", f"numbers printed in {printed}; nothing ran here" if printed else ""),
    ]
    return {"axes": axes, "facts": [[name, text] for name, text in facts if text]}


def _cells_text(data: SweepData, axes: Sequence[Mapping[str, Any]], seeds: int) -> str:
    """Return the number of cells: "2 × 3 = 6, all combinations", "5 of 6 combinations", or the number alone.

    The product is that of the levels of the axes that vary, and of the seeds. The number stands alone for a single
    factor or a product that does not exceed it.

    Args:
        data: The sweep.
        axes: JSON of the axes that vary.
        seeds: Number of different seeds.
    """
    sizes = [len(axis["levels"]) for axis in axes] + ([seeds] if seeds > 1 else [])
    count = len(data.cells)
    if len(sizes) > 1 and prod(sizes) == count:
        return f"{' × '.join(map(str, sizes))} = {count}, all combinations"
    return f"{count} of {counted(prod(sizes), 'combination')}" if prod(sizes) > count else str(count)


def _model_text(data: SweepData) -> str:
    """Return the range of parameter counts; empty where none is measured."""
    sizes = sorted({v.value for k, v in data.values.items() if k[1:3] == ("throughput", "parameters") and v.value})
    if not sizes:
        return ""
    ends = list(dict.fromkeys(format_count(size) for size in (sizes[0], sizes[-1])))
    return f"{' to '.join(ends)} parameters"


def _shared_setting(configs: Sequence[Mapping[str, Any]], section: str, name: str) -> Any:
    """Return the setting that all cells have in common; None where they differ or do not have it.

    Args:
        configs: Configs of the cells.
        section: Section of a config, such as "train".
        name: Name of the setting in it.
    """
    settings = {str(config.get(section, {}).get(name)): config.get(section, {}).get(name) for config in configs}
    return next(iter(settings.values())) if len(settings) == 1 else None


def _training_text(data: SweepData, configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the text on training tokens (range over the cells), and on corpus, tokenizer and row length.

    The latter three are left out where the cells do not share them.
    """
    tokens = sorted({cell.tokens_total for cell in data.cells})
    phrases = (
        [f"{' to '.join(dict.fromkeys(format_count(t) for t in (tokens[0], tokens[-1])))} tokens each"]
        if tokens
        else []
    )
    paths = ("data", "corpus"), ("data", "tokenizer"), ("train", "seq_len")
    corpus, tokenizer, row_tokens = (_shared_setting(configs, *path) for path in paths)
    phrases += [f"of {corpus}"] if corpus else []
    phrases += [f"({tokenizer} tokenizer)"] if tokenizer else []
    phrases += [f"in rows of {format_length(int(row_tokens))}"] if row_tokens else []
    return " ".join(phrases)


def _recipe_text(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the training settings that all cells share, as phrases joined by commas.

    They are optimizer, schedule, loss_reduction and the learning rate of the matrices (matrix_lr, muon_lr). Of the two
    learning rates the one that the optimizer does not use is left out.
    """
    shared = {name: _shared_setting(configs, "train", name) for name in RECIPE_PHRASES}
    unused_rate = "muon_lr" if shared["optimizer"] == "adamw" else "matrix_lr"
    named = [name for name in RECIPE_PHRASES if shared[name] not in (None, {}) and name != unused_rate]
    return ", ".join(RECIPE_PHRASES[name].format(shared[name]) for name in named)


def _counted_texts(texts: Iterable[str]) -> str:
    """Return the only distinct text, or "text (count)" of each, the most frequent first; "" for none."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} ({count})" for word, count in counts.most_common())


def progress_json(store: Store, data: SweepData) -> dict[str, Any]:
    """Return the progress of the sweep as JSON.

    Returns:
        counts: [status, number of cells], done, running and new first, others by name; only those that occur. running:
        a dict per running cell with slug, doing (text) and left (remaining time as text, or None). left: remaining time
        of the sweep as text, or None. runs: whether a launch owns the sweep now.
    """
    state = live_state(store, data.sweep)
    counts = Counter(data.status_word(cell) for cell in data.cells)
    leading_states = [word for word in ("done", "running", "new") if counts[word]]
    running = [
        {"slug": row["slug"], "doing": _activity_text(row), "left": _remaining_time(row)} for row in state["running"]
    ]
    ordered = [[word, counts[word]] for word in [*leading_states, *sorted(counts.keys() - set(leading_states))]]
    return {"counts": ordered, "running": running, "left": _remaining_time(state), "runs": bool(state["owned"])}


def _remaining_time(row: Mapping[str, Any]) -> str | None:
    return None if row["seconds_left"] is None else format_duration(row["seconds_left"])


def _activity_text(row: Mapping[str, Any]) -> str:
    """Return what a running cell does: "step 5 of 10, loss 3.210" for training, else its phase.

    A cell without a phase gives "starting"; the loss is left out where it is unknown.
    """
    if row["kind"] != "train" or row["phase"] != "training":
        return str(row["phase"] or "starting")
    loss = f", loss {row['loss']:.3f}" if row["loss"] is not None else ""
    return f"step {row['step']} of {row['steps_total'] or '?'}{loss}"
