"""`atma-sweep evaluate hf:NAME`: open-weight models measured on a sweep's text, kept in a companion sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...results.errors import SweepUnknown
from ...results.names import MAX_NAME_CHARS, quoted_short
from ...results.store.records import CellRecord, NewRevision, ProbeRequest, missing_requests
from ...results.store.store import Store
from ..attempt import trained_cells
from ..config import CellConfig
from ..data import corpora
from ..errors import GridError, SweepError
from ..external_models.config import KEY, resolve_cell, to_record
from ..external_models.hub_checkpoint import PREFIX, resolve_checkpoint
from ..external_models.hub_tokenizer import check_lossless
from ..grid.cell import Cell
from ..planning.planner import Task
from ..probes import PROBES, requested
from . import evaluate

SWEEP_SUFFIX = "-open-weight"
"""Suffix of the companion sweep's name, which lists the models measured for a sweep."""
PAIRINGS = ("text", "native")
"""Values of `--pairing`: the same characters as the cells read, or the same number of the model's own tokens."""


@dataclass(frozen=True)
class OpenWeightPlan:
    """Evaluation tasks for open-weight models, and the revision of the companion sweep to record first."""

    tasks_by_sweep: dict[str, list[Task]]
    """Tasks by the name of the companion sweep, as `evaluate.run` takes them; empty if everything is measured."""
    revisions: dict[str, NewRevision]
    """Revision to record, by the name of the companion sweep."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user."""


def is_model_reference(name: str) -> bool:
    """Return True if an argument of the command names a model (hf:NAME) and not a cell."""
    return name.startswith(PREFIX)


def check_cell_options(*, revision: str | None, pairing: str | None) -> None:
    """Raise SweepError if `--revision` or `--pairing`, which apply to models only, is given for cells."""
    for option, value in (("--revision", revision), ("--pairing", pairing)):
        if value is not None:
            raise SweepError(
                f"{option} {quoted_short(value)}: applies to models of the hub ({PREFIX}MODEL) only; leave it out to evaluate cells"
            )


def plan(
    store: Store, model_names: Sequence[str], *, runs: Path, probes: Sequence[str] = (), lengths: Sequence[int] = (),
    sweep: str | None = None, revision: str | None = None, pairing: str = "text",
    settings: evaluate.ProbeSettings = evaluate.NO_SETTINGS,
) -> OpenWeightPlan:  # fmt: skip
    """Plan the evaluation of open-weight models. Downloads models if needed; writes nothing to the database.

    The models get the text, probes and lengths of the host sweep's first own cell, restricted to probes that need no
    access to a network's internals. With `probes` or `lengths`, all their measurements are planned; otherwise only
    missing ones.

    Args:
        store: Database with the host sweep.
        model_names: Models as hf:NAME, where NAME is a repository of the hub or a folder.
        runs: Runs folder with the corpora.
        probes: Probes to run; empty for those of the host sweep's cells that can measure any model.
        lengths: Context lengths in tokens; empty for those of the cells.
        sweep: Host sweep whose text is measured; None for the sweep launched last.
        revision: Branch, tag or commit of the single model; None for its default.
        pairing: "text" for the same characters as the cells read, "native" for the same number of the model's own
            tokens.
        settings: Settings of probes that replace those of the cells, by name of the probe.

    Returns:
        Tasks and revision by the name of the companion sweep, HOST-open-weight; both empty if everything is measured.
        The notes name probes left out and models without work.

    Raises:
        SweepError: Cells are mixed with models, several models share one `revision`, the host sweep has no own cells or
            several texts, its text does not suit a model, or the companion sweep's name is too long or taken.
        GridError: A probe or a length cannot be measured, or the pairing is unknown.
        CorpusError: The text is missing or damaged.
        ShardError: The text is damaged.
        WeightsUnavailable: A model's weights are neither on this machine nor downloadable.
        InvalidCheckpoint: A model cannot be found, or is none that can be measured.
        MachineError: The package transformers is missing, or a model cannot run here.
    """
    if cell_names := [word for word in model_names if not is_model_reference(word)]:
        raise SweepError(
            f"{cell_names[0]} is a cell and {PREFIX}... is an open-weight model; evaluate them with separate commands"
        )
    if pairing not in PAIRINGS:
        raise GridError("--pairing", None, pairing, "no such pairing", list(PAIRINGS), pairing)
    if revision is not None and len(model_names) > 1:
        raise SweepError("--revision applies to one model; evaluate the models with separate commands")
    host_sweep = store.sweep(sweep).name
    config = _reference_config(store, host_sweep, runs)
    corpus = corpora.open_verified(runs / "corpora", config.data.fingerprint or "")
    if corpus.computed:
        raise SweepError(
            f"the text of sweep {host_sweep} consists of synthetic rows that no language model has seen; name another sweep with --sweep"
        )
    check_lossless(corpus.load_tokenizer())
    evaluate.check_probes("--probe", probes)
    notes = []
    applicable = [name for name in PROBES if PROBES.load(name).of_any]
    if inapplicable := [name for name in probes if name not in applicable]:
        raise GridError("--probe", None, inapplicable[0], "needs a model that atma-sweep trained", applicable)
    if not probes and (skipped := [name for name in config.eval.probes if name not in applicable]):
        notes.append(f"probes excluded, since they need a model that atma-sweep trained: {', '.join(skipped)}")
    if not probes and not set(applicable) & set(config.eval.probes):
        raise GridError(
            "--probe",
            None,
            "",
            f"no probe of sweep {host_sweep} can measure an open-weight model; name one",
            applicable,
        )
    requested_pairs = requested(_with_probes(config, [name for name in config.eval.probes if name in applicable]).eval)
    config = _with_probes(config, probes or [name for name in config.eval.probes if name in applicable])
    cells = [
        evaluate.with_requested_probes(
            resolve_cell(resolve_checkpoint(word, revision), config, pairing), (), lengths, settings
        )
        for word in model_names
    ]
    if lengths:
        for cell in cells:
            evaluate.check_lengths(cell, corpus)
    return _build_plan(
        store, host_sweep, requested_pairs, {cell.id: cell for cell in cells}, bool(probes or lengths), notes
    )


def _with_probes(config: CellConfig, probes: Sequence[str]) -> CellConfig:
    """Return the config with these probes, without duplicates."""
    evaluation = config.eval.model_copy(update={"probes": tuple(dict.fromkeys(probes))})
    return config.model_copy(update={"eval": evaluation})


def _reference_config(store: Store, sweep: str, runs: Path) -> CellConfig:
    """Return the config of the sweep's first own cell, which models are measured like.

    Open-weight models and cells with published numbers are not own cells.

    Raises:
        SweepError: The sweep has no cells of its own, or they read different texts.
    """
    states = store.cell_states(sweep)
    records = [store.cell(state.cell_id) for state in states]
    own_records = [
        cell_record
        for cell_record in records
        if KEY not in cell_record.config and "published" not in cell_record.config
    ]
    if not own_records:
        raise SweepError(
            f"sweep {sweep} has no cells to compare an open-weight model with; name another sweep with --sweep"
        )
    texts = {str(cell_record.config["data"].get("fingerprint")) for cell_record in own_records}
    if len(texts) > 1:
        raise SweepError(
            f"the cells of sweep {sweep} use {len(texts)} different texts, and a model is measured on one; launch the cells of one text "
            "as a separate sweep and name it with --sweep"
        )
    return trained_cells.restore_cell(own_records[0], runs).config


def _build_plan(
    store: Store,
    host_sweep: str,
    requested_pairs: Sequence[ProbeRequest],
    cells: dict[str, Cell],
    measure_again: bool,
    notes: list[str],
) -> OpenWeightPlan:
    """Return the tasks for models with missing measurements, and the revision of the companion sweep.

    The revision lists the models that the companion sweep has already, and these ones (also those without work).
    Without any task, tasks and revisions are empty.

    Args:
        store: Database.
        host_sweep: Sweep whose text is measured.
        requested_pairs: (probe, length) pairs that tables show for each model.
        cells: Models as cells, by id.
        measure_again: True to plan measurements that exist already.
        notes: Lines for the user, returned in the plan; a line per model without work is appended to this list.

    Raises:
        SweepError: The companion sweep's name would be too long, or a sweep of other cells has it.
    """
    name = f"{host_sweep}{SWEEP_SUFFIX}"
    if len(name) > MAX_NAME_CHARS:
        raise SweepError(
            f"the name of sweep {quoted_short(host_sweep)} is too long to be extended for open-weight models; shorten it with atma-sweep rename"
        )
    existing = _existing_models(store, name, host_sweep)
    states = store.states(set(cells))
    tasks = []
    for cell in cells.values():
        state = states.get(cell.id)
        pairs = requested(cell.config.eval)
        missing_pairs = pairs if measure_again or state is None else missing_requests(state, pairs)
        if missing_pairs:
            tasks.append(Task(cell, "external", missing_pairs, "needs-eval", should_remeasure=True))
        else:
            notes.append(f"{cell.slug}: already measured; --probe or --length measures again")
    if not tasks:
        return OpenWeightPlan({}, {}, notes)
    records = {cell_record.id: cell_record for cell_record in existing} | {
        cell.id: to_record(cell) for cell in cells.values()
    }
    text = f"# models from elsewhere, measured beside sweep {host_sweep}\n" + "".join(
        f"# {cell_record.config[KEY]['name']}, revision {cell_record.config[KEY]['revision']}\n"
        for cell_record in records.values()
    )
    options: dict[str, Any] = {"requested": [list(pair) for pair in requested_pairs], KEY: {"beside": host_sweep}}
    revision = NewRevision(
        grid_text=text, grid_file=PREFIX, options=options, cells=list(records.values()), companion_of=host_sweep
    )
    return OpenWeightPlan({name: tasks}, {name: revision}, notes)


def _existing_models(store: Store, name: str, host_sweep: str) -> list[CellRecord]:
    """Return the records of the models that the companion sweep `name` lists; empty if there is no such sweep.

    The axes of each record are its levels.

    Raises:
        SweepError: A sweep of that name lists other cells.
    """
    try:
        revision = store.revision(name)
    except SweepUnknown:
        return []
    if KEY not in revision.options:
        raise SweepError(
            f"a sweep of yours is named {name}, which is reserved for open-weight models measured with "
            f"{host_sweep}; rename it with atma-sweep rename"
        )
    records = [store.cell(cell) for cell, _ in store.members(name)]
    return [replace(cell_record, axes=dict(cell_record.levels)) for cell_record in records]
