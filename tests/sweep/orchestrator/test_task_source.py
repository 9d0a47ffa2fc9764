"""Supervisor that receives further tasks while it runs, with attempts that do no work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.records import Attempt
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.orchestrator import supervisor
from atma_sweep.sweep.orchestrator.supervisor import CapacityCheck
from atma_sweep.sweep.planning import planner
from atma_sweep.sweep.planning.planner import Task
from factories import hold_sweep, supervisor_of
from machine import Machine


class Waves:
    """Two tasks, then two more when both have ended, while cells remain; one attempt is pruned."""

    def __init__(self, tasks: Sequence[Task], hopeless: str | None = None) -> None:
        self.remaining, self.out, self.pruned_cell = list(tasks), set[str](), hopeless
        self.ends: list[tuple[str, str, str | None]] = []

    def next_tasks(self, fits: CapacityCheck) -> Sequence[Task]:
        if self.out or not self.remaining or not fits(self.remaining[0].cell.config.resources):
            return []
        wave, self.remaining = self.remaining[:2], self.remaining[2:]
        self.out = {task.cell.id for task in wave}
        return wave

    def ended(self, task: Task, attempt: Attempt, will_retry: bool) -> None:
        assert not will_retry
        self.out.discard(task.cell.id)
        self.ends.append((task.cell.id, attempt.state, attempt.failure))

    def attempts_to_prune(self, attempts: Sequence[Attempt]) -> Mapping[int, str]:
        return {
            attempt.id: "worse than all" for attempt in attempts if attempt.cell_id == self.pruned_cell and attempt.step
        }


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, int, list[Task]]]:
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    cells = load_grid("quick").expand(lambda data: "0" * 12)
    store = open_store(tmp_path / "a.db", create=True)
    yield store, hold_sweep(store, cells, "quick"), planner.plan(cells, {}).tasks
    store.close()


def run(held: Any, tasks: Sequence[Task], source: Waves, room: int, runs: Path) -> Machine:
    store, fence, _ = held
    machine = Machine(store, room)
    supervisor_of(store, fence, machine, runs, name="quick").run(tasks, source)
    return machine


def test_task_source_is_polled_until_empty(held: Any, tmp_path: Path) -> None:
    store, _, tasks = held
    first, rest = tasks[:1], tasks[1:6]
    source = Waves(rest)
    machine = run(held, first, source, 4, tmp_path)
    assert [cell for cell, _, _ in source.ends[:1]] == [first[0].cell.id], "of its own tasks it tells, too"
    assert sorted(source.ends) == sorted((task.cell.id, "done", None) for task in [*first, *rest])
    assert machine.most == 3, "while the first ran there was room for the first wave"
    assert all(len(store.attempts(task.cell.id)) == 1 for task in [*first, *rest])


def test_task_source_is_not_polled_without_capacity(held: Any, tmp_path: Path) -> None:
    source = Waves(held[2][1:4])
    assert run(held, held[2][:1], source, 1, tmp_path).most == 1
    assert len(source.ends) == 4


def test_attempts_to_prune_are_ended_and_marked_pruned(held: Any, tmp_path: Path) -> None:
    store, _, tasks = held
    lost = tasks[1].cell.id
    source = Waves(tasks[:4], hopeless=lost)
    machine = run(held, [], source, 4, tmp_path)
    (attempt,) = store.attempts(lost)
    assert machine.stopped == {attempt.id}
    assert (attempt.state, attempt.failure, attempt.cause) == ("interrupted", "pruned", "worse than all")
    assert (lost, "interrupted", "pruned") in source.ends
    states = {state.cell_id: state.state for state in store.cell_states("quick")}
    assert [states[task.cell.id] for task in tasks[:5]] == ["done", "pruned", "done", "done", "new"]
    assert store.sweep("quick").counts == {"done": 3, "pruned": 1, "new": len(states) - 4}
    # whoever lists it as an ordinary cell has it trained to its end
    again = planner.plan([tasks[1].cell], store.states({lost}))
    assert [(task.kind, task.standing) for task in again.tasks] == [("train", "pruned")]
    run(held, again.tasks, Waves([]), 1, tmp_path)
    assert store.states({lost})[lost].state == "done"
