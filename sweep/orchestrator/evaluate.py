"""`atma-sweep evaluate`: probes on kept weights, again or at other lengths, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...results.store.records import MeasuredValue, NewRevision
from ...results.store.store import Store
from ..attempt import trained_cells
from ..checkpoints import storage
from ..checkpoints.weights import CheckpointError, damage
from ..data import corpora
from ..errors import GridError, SweepError
from ..executors.executor import ExecutorContext
from ..executors.registry import DEFAULT, open_executor
from ..executors.source_snapshot import git_state
from ..grid.cell import Cell
from ..host import processes
from ..host.signals import Interrupted
from ..planning.planner import Task
from ..probes import PROBES, bound, requested, with_settings
from . import supervisor
from .launch import run_tasks
from .supervisor import Listener


class CellNotListed(SweepError):
    """No sweep that takes launches lists the cell."""


@dataclass(frozen=True)
class Measured:
    """The new numbers of one cell; none when its evaluation failed."""

    cell: Cell
    values: Sequence[MeasuredValue]

    def as_json(self) -> list[dict[str, Any]]:
        """A row a number, with the names of the database's columns."""
        names = ("probe", "metric", "length", "value", "unit", "n", "reason")
        about = {"cell": self.cell.id, "slug": self.cell.slug}
        return [{**about, **{name: getattr(value, name) for name in names}} for value in self.values]

    def text(self) -> str:
        """One line: probe, metric, length and value of each; where there is no value the code of its reason."""
        return f"{self.cell.slug}: {', '.join(map(_said, self.values))}"


def _said(value: MeasuredValue) -> str:
    words = [value.probe, value.metric, *([str(value.length)] if value.length else [])]
    found = f"{value.value:.6g}" if value.value is not None else (value.reason or "").partition(":")[0]
    return " ".join([*words, found])


def plan(
    store: Store, asked: Sequence[str], *, runs: Path, probes: Sequence[str] = (), lengths: Sequence[int] = (),
    sweep: str | None = None,
) -> dict[str, list[Task]]:  # fmt: skip
    """What to measure, by the sweep that has to be held for it: all cells are checked, nothing is written.

    `asked` names cells as `Store.find_cell` takes them; `probes` and `lengths` (tokens) stand in for those of the
    cells' configs. A cell is evaluated within the given sweep, else within the newest that lists it. Raises GridError
    for an unknown probe or a length that cannot be measured, NoSweep, CorpusError, CheckpointError for damaged weights,
    and what `loading.kept` raises.
    """
    for length in lengths:
        if length < 2:
            raise GridError("--length", None, str(length), "a context length is 2 tokens or more")
    # the cells first: their plugins may bring the probes
    found = [trained_cells.kept(store, name, runs, sweep) for name in asked]
    for one in found:
        if (line := damage(storage.resolve(runs, one.weights), one.sha256)) is not None:
            raise CheckpointError(line)
    check_probes("--probe", probes)
    if lengths and probes and not any(PROBES.load(name).by_length for name in probes):
        raise GridError("--length", None, "", f"{', '.join(probes)} has no context length; leave --length out")
    listed = _listed(store) if sweep is None else {}
    shares: dict[str, list[Task]] = {}
    for kept in {one.cell.id: one for one in found}.values():
        cell = with_requested_probes(kept.cell, probes, lengths)
        corpus = corpora.verified(runs / "corpora", cell.config.data.fingerprint or "")
        if lengths:
            check_lengths(cell, corpus)
        holder = sweep or next((known for known, ids in listed.items() if cell.id in ids), None)
        if holder is None:
            raise CellNotListed(f"no sweep lists cell {cell.id} ({cell.slug}) any more; launch a grid that has it")
        pairs = requested(cell.config.eval)
        task = Task(cell, "evaluate", pairs, "needs-eval", kept.weights, kept.attempt, repeat=True)
        shares.setdefault(holder, []).append(task)
    return shares


def check_lengths(cell: Cell, corpus: corpora.Corpus) -> None:
    """Refuses lengths that a probe of this cell can never measure: they would stand in its tables as holes for good."""
    config = cell.config
    probes = [probe for probe in (bound(name, config) for name in config.eval.probes) if probe.by_length]
    known = {probe.name: limit for probe in probes if (limit := probe.longest(corpus)) is not None}
    beyond = [length for length in config.eval.lengths if any(length > limit for limit in known.values())]
    if beyond:
        told = ", ".join(f"{name} {limit:,}" if limit > 1 else f"{name} none" for name, limit in known.items())
        problem = f"more than the text of cell {cell.id} ({cell.slug}) is long enough for; the longest length by probe, in tokens: {told}"
        raise GridError("--length", None, str(beyond[0]), problem)
    for probe in probes:
        if (why := probe.inapplicable()) is not None:
            told = f"cell {cell.id} ({cell.slug}) {why}; leave the probe or the cell out"
            raise GridError("--probe", None, probe.name, told)


def _listed(store: Store) -> dict[str, set[str]]:
    """The cells of every sweep that takes launches, the sweep launched last first."""
    names = [summary.name for summary in store.sweeps() if not summary.read_only]
    return {name: {state.cell_id for state in store.cell_states(name)} for name in names}


def check_probes(key: str, names: Sequence[str]) -> None:
    """Raises GridError for a probe that there is none of; `key` says who asked for it."""
    for name in names:
        if name not in PROBES:
            raise GridError(key, None, name, "no such probe", list(PROBES), name)


def with_requested_probes(cell: Cell, probes: Sequence[str], lengths: Sequence[int]) -> Cell:
    """The cell with the probes and lengths that are to be measured; its id does not depend on them."""
    asked: dict[str, Any] = {"probes": tuple(dict.fromkeys(probes))} if probes else {}
    config = cell.config.model_copy(update={"eval": cell.config.eval.model_copy(update=asked)})
    check_probes(f"eval.probes of cell {cell.id}", config.eval.probes)
    try:
        # settings that follow from the lengths follow from those of the grid
        known = with_settings(config.eval)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]["msg"]
        told = f"{wrong}; launch its grid again, which stores them anew"
        raise GridError(f"settings of the probes of cell {cell.id}", None, "", told) from error
    further = {"lengths": tuple(sorted(set(lengths)))} if lengths else {}
    return replace(cell, config=config.model_copy(update={"eval": known.model_copy(update=further)}))


def run(
    store: Store, shares: dict[str, list[Task]], listener: Listener, *, runs: Path, executor: str = DEFAULT,
    revisions: Mapping[str, NewRevision] | None = None,
) -> list[Measured]:  # fmt: skip
    """Carries a plan out and returns what was measured, cell by cell.

    Every sweep is claimed before the first attempt starts; a revision is recorded where `revisions` has one for it. Raises SweepBusy when somebody runs
    one of them, SweepReadOnly, MachineError when a GPU is missing or held, Interrupted after a clean stop.
    """
    owner = processes.this_process("evaluate")
    cells = [task.cell for share in shares.values() for task in share]
    with ExitStack() as held:
        claimed = []
        for sweep, share in shares.items():
            fence = store.acquire_sweep(
                sweep, owner, supervisor.LEASE_S, is_alive=processes.is_alive, revision=(revisions or {}).get(sweep)
            )
            held.callback(store.release_sweep, sweep, fence)
            claimed.append((sweep, fence, share))
        supervisor.reap(store, cells, runs)
        before = {cell.id: max((attempt.id for attempt in store.attempts(cell.id)), default=0) for cell in cells}
        try:
            place = held.enter_context(
                closing(open_executor(executor, ExecutorContext(store, runs, tell=lambda line: None)))
            )
            run_tasks(store, claimed, listener, place, runs=runs, commit=git_state())
        except Interrupted as stop:
            raise Interrupted(stop.number, "evaluate again what was not finished") from stop
    return [Measured(cell, _new(store, cell, before[cell.id])) for cell in cells]


def _new(store: Store, cell: Cell, before: int) -> list[MeasuredValue]:
    """What the newest finished evaluation after the attempt `before` has measured."""
    attempts = [attempt for attempt in store.attempts(cell.id) if attempt.kind != "train" and attempt.id > before]
    done = [attempt.id for attempt in attempts if attempt.state == "done"]
    return [value for value in store.measurements(cell.id) if value.attempt_id == done[-1]] if done else []
