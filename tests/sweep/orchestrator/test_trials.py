"""Studies through a supervisor, with attempts that do no work: killed anywhere, no trial is lost or made twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.records import NewRevision
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.results.studies import search as searches
from atma_sweep.results.studies.optuna_study import Trial
from atma_sweep.results.studies.study_store import StudyWriter, trials_of
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import processes
from atma_sweep.sweep.orchestrator import launch, supervisor
from atma_sweep.sweep.orchestrator.launch import LaunchRequest
from atma_sweep.sweep.orchestrator.trials import TrialSource
from atma_sweep.sweep.planning import cost_estimate, planner
from atma_sweep.sweep.planning.studies import TrialSpace, progress_of, space_of
from factories import hold_sweep, supervisor_of
from machine import Killed, Machine

STEPS = 9
GRID = """
name: s
extends: tiny
set: {train.tokens: 13_824, eval: {probes: [val], validate_every: 1}}
search:
  sampler: tpe
  startup: 3
  trials: 8
  objective: val_loss
  ranges:
    train.muon_lr: {low: 1e-3, high: 0.1, log: true}
    train.clip: {low: 0.5, high: 2.0}
"""


def loss(config: Mapping[str, Any], step: int) -> float:
    train = config["train"]
    return (math.log10(train.get("muon_lr", 0.02)) + 2) ** 2 + (train.get("clip", 1.0) - 1) ** 2 + 3 / step


class Bench:
    """Folder with a grid and a database, in which a study is launched any number of times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.store: Store = open_store(folder / "a.db", create=True)
        self.runs = folder / "runs"
        self.write(GRID)

    def write(self, text: str) -> None:
        (self.folder / "g.yaml").write_text(text)

    def edit(self, *changes: tuple[str, str]) -> None:
        text = (self.folder / "g.yaml").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.write(text)

    def space(self) -> TrialSpace:
        grid = load_grid(self.folder / "g.yaml")
        space = space_of(grid, grid.expand(lambda data: "0" * 12), self.folder)
        assert space is not None
        return space

    def launch(self, *, room: int = 1, lives: int | None = None, loss: Any = loss) -> Machine:
        """Launch like launch.run, on a stand-in machine. A killed launch leaves everything as it stood."""
        space, machine = self.space(), Machine(self.store, room, steps=STEPS, loss=loss, lives=lives)
        request = LaunchRequest(grid=space.grid, cells=[], space=space, runs=self.runs)
        revision = NewRevision(
            grid_text=space.grid.document.text, grid_file="g.yaml",
            options={searches.OPTION_KEY: searches.search_as_json(space.search), "requested": [["val", 0]]},
            cells=[planner.to_record(cell) for cell in progress_of(space, self.store).cells.values()],
        )  # fmt: skip
        owner = processes.this_process("launch")
        fence = self.store.acquire_sweep("s", owner, 60.0, revision=revision)
        for attempt in self.store.live_attempts():
            self.store.interrupt_dead(attempt.id, "its launch died")
        plan = launch.plan(request, self.store)
        assert plan.study is not None
        prices = cost_estimate.machine_prices(space.corner_cells, self.runs, self.store)
        supervisor_of(self.store, fence, machine, self.runs).run(
            plan.tasks, TrialSource(plan.study, self.store, fence, prices)
        )
        return machine

    def trials(self) -> list[Trial]:
        return trials_of(self.store, "s")

    def finished(self) -> bool:
        return progress_of(self.space(), self.store, retry_failed=False).finished

    def steps(self) -> dict[str, int]:
        """Return the steps of each cell's attempts, counted each time they were made."""
        proposed_counts: Counter[str] = Counter()
        for cell in {trial.cell for trial in self.trials()} - {None}:
            before = 0
            for attempt in self.store.attempts(str(cell)):
                proposed_counts[str(cell)] += attempt.step - before
                before = attempt.step
        return dict(proposed_counts)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()


def to_the_end(bench: Bench, launch: Callable[[], Any], most: int = 60) -> int:
    """Launches until nothing kills it; how often something did."""
    for kills in range(most):
        try:
            launch()
        except Killed:
            continue
        return kills
    raise AssertionError("it never came to its end")


KINDS = {
    "tpe": (),
    "asha": (("search:", "search:\n  pruner: asha"),),
    "cmaes": (("tpe", "cmaes"),),
    "nsga2": (("tpe", "nsga2"), ("startup: 3", "population: 4")),
    "random": (("tpe", "random"), ("  startup: 3\n", "")),
    "median": (("search:", "search:\n  pruner: median"),),
    "hyperband": (("search:", "search:\n  pruner: hyperband"),),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_repeatedly_killed_study_makes_identical_trials(bench: Bench, tmp_path: Path, kind: str) -> None:
    uninterrupted = Bench(tmp_path / "whole")
    for candidate in (bench, uninterrupted):
        candidate.edit(*KINDS[kind])
    uninterrupted.launch()
    lives = iter([0, 3, 11, 1, 14, *[17] * 50])
    assert to_the_end(bench, lambda: bench.launch(lives=next(lives))) >= 3
    assert [trial.number for trial in bench.trials()] == list(range(8))
    assert bench.trials() == uninterrupted.trials()
    assert {trial.standing for trial in bench.trials()} <= {"done", "pruned"}
    assert bench.finished()
    # every step once, whoever made it: what was made before a kill was gone on with
    assert {bench.steps()[str(trial.cell)] for trial in bench.trials() if trial.standing == "done"} == {STEPS}
    if kind in ("asha", "median", "hyperband"):
        assert 1 <= sum(trial.standing == "pruned" for trial in bench.trials()) <= 7
        pruned = {trial.cell for trial in bench.trials() if trial.standing == "pruned"}
        assert pruned == {state.cell_id for state in bench.store.cell_states("s") if state.state == "pruned"}
    before = bench.store.events()
    bench.launch()
    assert bench.store.events() == before, "a study that is made is not made again"
    uninterrupted.store.close()


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["propose", "update_trials", "start_attempt"])
@pytest.mark.parametrize("after", [False, True])
def test_kill_between_two_writes_leaves_nothing_to_repair(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    uninterrupted = Bench(tmp_path / "whole")
    for candidate in (bench, uninterrupted):
        candidate.edit(*KINDS["asha"])
    uninterrupted.launch()
    owner: Any = Store if call == "start_attempt" else StudyWriter
    real, calls = getattr(owner, call), [0]

    def dying(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        dies = calls[0] % 4 == 0
        if dies and not after:
            raise Killed
        result = real(*arguments, **more)
        if dies:
            raise Killed
        return result

    monkeypatch.setattr(owner, call, dying)
    assert to_the_end(bench, bench.launch) >= 2
    assert bench.trials() == uninterrupted.trials()
    uninterrupted.store.close()


@pytest.mark.thorough
def test_parallel_study_numbers_each_trial_once_despite_kills(bench: Bench) -> None:
    bench.edit(("trials: 8", "trials: 12"))
    lives = iter([4, 6, *[9] * 50])
    assert to_the_end(bench, lambda: bench.launch(room=3, lives=next(lives))) >= 2
    trials = bench.trials()
    assert [trial.number for trial in trials] == list(range(12))
    assert {trial.standing for trial in trials} == {"done"}
    assert set(bench.steps().values()) == {STEPS}
    for trial in trials:
        assert trial.values == (
            pytest.approx(loss({"train": {path.split(".")[1]: v for path, v in trial.params.items()}}, STEPS)),
        )
    assert Bench.launch(bench, room=3).most == 0


@pytest.mark.thorough
def test_study_fills_the_machine_with_trials(bench: Bench) -> None:
    assert bench.launch(room=3).most == 3
    assert len({trial.params["train.muon_lr"] for trial in bench.trials()}) == 8


def train(bench: Bench, cells: Sequence[Cell]) -> None:
    """Train cells as those of another sweep."""
    fence = hold_sweep(bench.store, cells, "other")
    machine = Machine(bench.store, 1, steps=STEPS, loss=loss)
    supervisor_ = supervisor_of(bench.store, fence, machine, bench.runs, name="other")
    supervisor_.run(planner.plan(cells, bench.store.states({cell.id for cell in cells})).tasks)
    bench.store.release_sweep("other", fence)


CHOICES = GRID[: GRID.index("  ranges")] + "  ranges: {train.muon_lr: [0.01, 0.02], train.clip: [1.0, 0.5]}\n"


def test_repeated_proposal_costs_nothing(bench: Bench) -> None:
    bench.write(CHOICES.replace("tpe", "random").replace("  startup: 3\n", "").replace("trials: 8", "trials: 12"))
    bench.launch(room=2)
    trials = bench.trials()
    assert len(trials) == 12
    assert len(bench.store.cell_states("s")) == len(bench.steps()) == 4
    assert set(bench.steps().values()) == {STEPS}
    assert len({(trial.cell, trial.values) for trial in trials}) == 4
    assert {trial.standing for trial in trials} == {"done"}


@pytest.mark.thorough
def test_cell_trained_by_another_sweep_counts_at_once(bench: Bench) -> None:
    bench.write(CHOICES.replace("trials: 8", "trials: 1"))
    cell = bench.space().cell({"train.muon_lr": 0.02, "train.clip": 0.5})
    every = [
        bench.space().cell({"train.muon_lr": rate, "train.clip": clip}) for rate in (0.01, 0.02) for clip in (1.0, 0.5)
    ]
    train(bench, every)
    assert len(bench.store.attempts(cell.id)) == 1
    assert bench.launch().most == 0
    (trial,) = bench.trials()
    assert trial.standing == "done"
    assert len(trial.curve) == STEPS


@pytest.mark.thorough
def test_failed_trial_is_retried_only_by_the_next_launch(bench: Bench) -> None:
    def broken(config: Mapping[str, Any], step: int) -> float:
        if len(bench.trials()) == 3 and step == 2:
            raise ValueError("no memory")
        return loss(config, step)

    bench.launch(loss=broken)
    failed = [trial for trial in bench.trials() if trial.standing == "failed"]
    assert [(trial.number, trial.reason) for trial in failed] == [(2, "no memory")]
    assert not bench.finished()
    before = bench.trials()
    bench.launch()
    assert bench.finished()
    assert [trial.params for trial in bench.trials()] == [trial.params for trial in before]
    assert len(bench.store.attempts(str(failed[0].cell))) == 2


@pytest.mark.thorough
def test_diverged_trial_is_a_bad_result(bench: Bench) -> None:
    bench.edit(("startup: 3", "startup: 6"), ("trials: 8", "trials: 14"))
    bench.launch(loss=lambda config, step: math.nan if config["train"]["muon_lr"] > 0.01 else loss(config, step))
    standings = {trial.number: trial.standing for trial in bench.trials()}
    assert set(standings.values()) == {"done", "diverged"}
    assert bench.finished()
    # at random half of the rates are too high; later ones are taken from where none was
    assert sum(standings[number] == "diverged" for number in range(6, 14)) <= 3


def test_invalid_settings_are_a_trial_without_a_cell(bench: Bench) -> None:
    ranges = "  ranges: {model.n_heads: [4, 2], model.n_kv_heads: [2, 4]}\n"
    bench.write((GRID[: GRID.index("  ranges")] + ranges).replace("tpe", "random").replace("  startup: 3\n", ""))
    bench.launch()
    none = [trial for trial in bench.trials() if trial.cell is None]
    assert 0 < len(none) < 8
    assert all(trial.params == {"model.n_heads": 2, "model.n_kv_heads": 4} for trial in none)
    assert all(trial.standing == "failed" and str(trial.reason).startswith("not a valid cell: ") for trial in none)
    assert bench.finished()


@pytest.mark.thorough
def test_study_continues_with_more_trials_and_wider_ranges(bench: Bench) -> None:
    bench.launch()
    first = bench.trials()
    bench.edit(
        ("trials: 8", "trials: 12"),
        ("low: 1e-3", "low: 1e-4"),
        ("    train.clip", "    model.mlp_ratio: [2, 3]\n    train.clip"),
    )
    bench.launch()
    trials = bench.trials()
    assert [trial.params for trial in trials[:8]] == [trial.params for trial in first]
    assert [trial.cell for trial in trials[:8]] == [trial.cell for trial in first]
    assert len(trials) == 12
    assert all("model.mlp_ratio" in trial.params for trial in trials[8:])
    assert [cell for cell, _ in bench.store.members("s")] == [trial.cell for trial in trials]
    assert [bench.store.revision("s").number, len(bench.store.attempts(str(first[0].cell)))] == [2, 1]


@pytest.mark.thorough
def test_shared_settings_of_trials_cannot_change(bench: Bench) -> None:
    bench.edit(("trials: 8", "trials: 2"))
    bench.launch()
    bench.edit(("set: {train.tokens: 13_824", "set: {train.seq_len: 64, train.tokens: 13_824"))
    with pytest.raises(SweepError, match=r"trial 0 of study s was made with other settings .* rename the changed grid"):
        bench.launch()


@pytest.mark.thorough
def test_pruned_trial_trained_to_its_end_counts_as_done(bench: Bench) -> None:
    bench.edit(*KINDS["asha"])
    bench.launch()
    pruned = next(trial for trial in bench.trials() if trial.standing == "pruned")
    cell = bench.space().cell(pruned.params)
    train(bench, [cell])
    assert bench.steps()[cell.id] == STEPS, "it went on from where it was ended"
    bench.launch()
    now = bench.trials()[pruned.number]
    assert (now.standing, now.values) == ("done", (pytest.approx(now.curve[-1][1]),))
