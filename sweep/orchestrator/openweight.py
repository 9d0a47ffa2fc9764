"""`atma-sweep evaluate hf:NAME`: models from elsewhere, measured on the text of a sweep and kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...results.errors import SweepUnknown
from ...results.names import MAX_NAME_CHARS, quoted_short
from ...results.store.records import CellRecord, NewRevision, Request, missing
from ...results.store.store import Store
from ..attempt import trained_cells
from ..config import CellConfig
from ..data import corpora
from ..errors import GridError, SweepError
from ..external_models.config import KEY, record, resolve_cell
from ..external_models.hub_checkpoint import PREFIX, resolve_checkpoint
from ..external_models.hub_tokenizer import check_lossless
from ..grid.cell import Cell
from ..planning.planner import Task
from ..probes import PROBES, requested
from . import evaluate

ENDING = "-open-weight"
"""Of the name of the sweep that stands beside another and lists the models measured for it."""
PAIRINGS = ("text", "native")


@dataclass(frozen=True)
class OpenWeightPlan:
    """What to measure, in the form of `evaluate.plan`, and what is recorded of it first."""

    shares: dict[str, list[Task]]
    revisions: dict[str, NewRevision]
    told: list[str] = field(default_factory=list)
    """Lines for whoever asked."""


def is_model_reference(word: str) -> bool:
    """Whether a word of the command names a model from elsewhere, not a cell."""
    return word.startswith(PREFIX)


def check_cell_options(*, revision: str | None, pairing: str | None) -> None:
    """Raise SweepError for an option that applies to models from elsewhere alone, where none is named."""
    for option, value in (("--revision", revision), ("--pairing", pairing)):
        if value is not None:
            raise SweepError(
                f"{option} {quoted_short(value)}: applies to models of the hub ({PREFIX}MODEL); remove it to evaluate cells"
            )


def plan(
    store: Store, asked: Sequence[str], *, runs: Path, probes: Sequence[str] = (), lengths: Sequence[int] = (),
    sweep: str | None = None, revision: str | None = None, pairing: str = "text",
) -> OpenWeightPlan:  # fmt: skip
    """All models are found, checked and, where need be, downloaded; nothing is written into the database.

    They get the text, the probes and the lengths of the sweep's cells, as far as these probes look into no network. Without
    `probes` and `lengths` only what is not measured yet. Raises NoWeights, NoCheckpoint, GridError, SweepError, CorpusError.
    """
    if strange := [word for word in asked if not is_model_reference(word)]:
        raise SweepError(
            f"{strange[0]} is a cell, and {PREFIX}... a model from elsewhere; evaluate them one after the other"
        )
    if pairing not in PAIRINGS:
        raise GridError("--pairing", None, pairing, "no such pairing", list(PAIRINGS), pairing)
    if revision is not None and len(asked) > 1:
        raise SweepError("--revision belongs to one model; evaluate the models one after the other")
    beside = store.sweep(sweep).name
    base = _base(store, beside, runs)
    corpus = corpora.verified(runs / "corpora", base.data.fingerprint or "")
    if corpus.computed:
        raise SweepError(
            f"the text of sweep {beside} is made of rows that no language model has seen; name another with --sweep"
        )
    check_lossless(corpus.load_tokenizer())
    evaluate.check_probes("--probe", probes)
    told = []
    able = [name for name in PROBES if PROBES.load(name).of_any]
    if inside := [name for name in probes if name not in able]:
        raise GridError("--probe", None, inside[0], "looks into networks of ours", able)
    if not probes and (left := [name for name in base.eval.probes if name not in able]):
        told.append(f"left out, since they look into networks of ours: {', '.join(left)}")
    if not probes and not set(able) & set(base.eval.probes):
        raise GridError(
            "--probe", None, "", f"no probe of sweep {beside} can measure a model from elsewhere; name one", able
        )
    wished = requested(_probing(base, [name for name in base.eval.probes if name in able]).eval)
    base = _probing(base, probes or [name for name in base.eval.probes if name in able])
    cells = [
        evaluate.with_requested_probes(resolve_cell(resolve_checkpoint(word, revision), base, pairing), (), lengths)
        for word in asked
    ]
    if lengths:
        for cell in cells:
            evaluate.check_lengths(cell, corpus)
    return _beside(store, beside, wished, {cell.id: cell for cell in cells}, bool(probes or lengths), told)


def _probing(config: CellConfig, probes: Sequence[str]) -> CellConfig:
    asked = config.eval.model_copy(update={"probes": tuple(dict.fromkeys(probes))})
    return config.model_copy(update={"eval": asked})


def _base(store: Store, sweep: str, runs: Path) -> CellConfig:
    """The config of the sweep's cells, of which text and probes are those of all. Raises SweepError where they differ."""
    states = store.cell_states(sweep)
    records = [store.cell(state.cell_id) for state in states]
    ours = [one for one in records if KEY not in one.config and "published" not in one.config]
    if not ours:
        raise SweepError(f"sweep {sweep} has no cells of ours to measure a model beside; name one with --sweep")
    texts = {str(one.config["data"].get("fingerprint")) for one in ours}
    if len(texts) > 1:
        raise SweepError(
            f"the cells of sweep {sweep} read {len(texts)} different texts; launch those of one text as a sweep of their own, and name it "
            "with --sweep"
        )
    return trained_cells.restore_cell(ours[0], runs).config


def _beside(
    store: Store, beside: str, wished: Sequence[Request], cells: dict[str, Cell], again: bool, told: list[str]
) -> OpenWeightPlan:
    """`wished`: what tables show of each, as the grid asks for it."""
    name = f"{beside}{ENDING}"
    if len(name) > MAX_NAME_CHARS:
        raise SweepError(
            f"sweep {quoted_short(beside)} has too long a name for models beside it; shorten it with atma-sweep rename"
        )
    listed = _listed(store, name, beside)
    states = store.states(set(cells))
    tasks = []
    for cell in cells.values():
        state = states.get(cell.id)
        pairs = requested(cell.config.eval)
        left = pairs if again or state is None else missing(state, pairs)
        if left:
            tasks.append(Task(cell, "external", left, "needs-eval", repeat=True))
        else:
            told.append(f"{cell.slug}: all is measured; --probe or --length measures again")
    if not tasks:
        return OpenWeightPlan({}, {}, told)
    every = {one.id: one for one in listed} | {cell.id: record(cell) for cell in cells.values()}
    text = f"# models from elsewhere, measured beside sweep {beside}\n" + "".join(
        f"# {one.config[KEY]['name']}, revision {one.config[KEY]['revision']}\n" for one in every.values()
    )
    options: dict[str, Any] = {"requested": [list(pair) for pair in wished], KEY: {"beside": beside}}
    revision = NewRevision(grid_text=text, grid_file=PREFIX, options=options, cells=list(every.values()), beside=beside)
    return OpenWeightPlan({name: tasks}, {name: revision}, told)


def _listed(store: Store, name: str, beside: str) -> list[CellRecord]:
    """The models that stand there already. Raises SweepError for a sweep of other cells."""
    try:
        known = store.revision(name)
    except SweepUnknown:
        return []
    if KEY not in known.options:
        raise SweepError(
            f"a sweep of your own is named {name}, as the models beside {beside} would be; rename it first"
        )
    records = [store.cell(cell) for cell, _ in store.members(name)]
    return [replace(one, axes=dict(one.levels)) for one in records]
