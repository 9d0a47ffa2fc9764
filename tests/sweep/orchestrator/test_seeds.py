"""Waves of seeds: from the database alone, within a budget, never past a failed cell, and the same after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.results.errors import LeaseLost
from atma_sweep.results.forecast import forecast_from_options
from atma_sweep.results.stopping.interim_analysis import stopping_status
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host.processes import this_process
from atma_sweep.sweep.orchestrator import launch
from atma_sweep.sweep.orchestrator.launch import LaunchRequest
from atma_sweep.sweep.orchestrator.seeds import Seeds
from atma_sweep.sweep.planning import replicates
from bench import Bench
from factories import fingerprint
from tiers import only_long

HEAD = "name: g\nextends: micro\naxes: {attn_type: [polar, nope], memory: [off, on]}\nset: {eval: {probes: [val]}}\n"
RULE = "stop: {contrast: memory, within: {attn_type: polar}, metric: val_loss, ci: %s, max_seeds: 5}\n"
NOISE = np.random.default_rng(3).normal(size=100)
ME = this_process("launch")
Write = Callable[..., Path]


def value(cell: Cell) -> float:
    return float(
        NOISE[cell.config.seed * 4 + 2 * (cell.levels["memory"] == "on") + (cell.config.model.attn_type == "polar")]
    )


class Sweep:
    """Sweep whose cells are done as soon as a test says so."""

    def __init__(self, write: Write, folder: Path, ci: float, more: str = "") -> None:
        self.store = open_store(folder / "a.db", create=True)
        self.runs = folder
        self.grid = load_grid(write(HEAD + RULE % ci + more))
        self.lines: list[str] = []

    @contextmanager
    def launched(self, allowed: float | None = None) -> Iterator[Seeds]:
        """Claim the sweep and yield its source of seeds, as a launch does."""
        request = LaunchRequest(
            grid=self.grid, cells=self.grid.expand(fingerprint), runs=self.runs, commit=("c", False)
        )
        request = replace(launch.with_stop_seeds(request, self.store), budget=allowed)
        self.fence = launch.claim_sweep(request, self.store, ME)
        seeds = launch.seeds_source(request, self.store, self.fence, self.lines.append)
        assert seeds is not None
        yield seeds
        self.store.release_sweep("g", self.fence)

    def finish(self, cells: Sequence[Cell], state: str = "done") -> None:
        for cell in cells:
            attempt = self.store.start_attempt(cell.id, owner=ME, fence=self.fence, sweep="g")
            if state == "done":
                DatabaseRecorder(self.store, attempt.id, attempt.fence).measurements(
                    [Measurement(probe="val", metric="val_loss", value=value(cell), unit="nats/token")]
                )
            self.store.finish_attempt(attempt.id, attempt.fence, state)  # type: ignore[arg-type]

    def through(self, seeds: Seeds, most: int = 99) -> list[list[str]]:
        """Return the slugs of every wave, until there is none or that many cells were made."""
        tasks_done = []
        while len(tasks_done) < most and (tasks := seeds.next_tasks(lambda resources: True)):
            tasks_done.append(sorted(task.cell.slug for task in tasks))
            self.finish([task.cell for task in tasks])
        return tasks_done


def slugs(*seeds: int) -> list[list[str]]:
    return [[f"polar-baseline-d0-m0-w0-s{seed}", f"polar-baseline-d0-m1-w0-s{seed}"] for seed in seeds]


@pytest.fixture
def sweep(write: Write, tmp_path: Path) -> Callable[..., Sweep]:
    return lambda ci, more="": Sweep(write, tmp_path, ci, more)


def test_added_seed_cells_equal_those_of_a_grid_with_these_seeds(write: Write) -> None:
    grid = load_grid(write(HEAD + RULE % 1))
    with_seeds = replicates.with_further_seeds(grid, grid.expand(fingerprint), None)
    assert [cell.config.seed for cell in with_seeds] == [0, 0, 0, 0, 1, 1, 2, 2]
    listed = {cell.slug: cell for cell in load_grid(write(HEAD + "seeds: 5\n")).expand(fingerprint)}
    every = replicates.every_cell(grid, with_seeds)
    assert len(every) == 4 + 2 * 4
    for cell in every:
        assert cell == listed[cell.slug]
    assert replicates.with_further_seeds(grid, with_seeds, None) == with_seeds


def test_waves_until_it_is_narrow_enough(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1e-9)
    with seeded.launched() as seeds:
        assert seeds.next_tasks(lambda resources: True) == [], "nothing before the first cells are there"
        seeded.finish(seeds.cells)
        assert seeded.through(seeds) == slugs(3, 4)
    assert seeds.end_messages == [
        "stopped after 5 seeds, the maximum (max_seeds), although no interval is at most 0.0000000010 nats wide"
    ]
    looks = [event.message for event in seeded.store.events(sweep="g") if event.kind == "look"]
    assert [message.partition(" of at most 3")[0] for message in looks] == [f"memory: on - off, val.val_loss, attn_type polar: interim analysis {n}" for n in (1, 2, 3)]  # fmt: skip
    listed = seeded.store.cell_states("g")
    assert [state.slug for state in listed[8:]] == [slug for wave in slugs(3, 4) for slug in wave]
    forecast = forecast_from_options(seeded.store.revision("g").options)
    assert forecast is not None
    assert all(forecast.cell(position) for position in range(12)), "what was added is predicted, too"
    # once more: the same looks, no further seed, the same revision
    with seeded.launched() as again:
        assert again.next_tasks(lambda resources: True) == []
    assert (again.end_messages, seeded.store.revision("g").number) == (seeds.end_messages, 1)
    assert len([event for event in seeded.store.events(sweep="g") if event.kind == "look"]) == 3


@pytest.mark.thorough
def test_restarted_launch_makes_the_same_looks(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1e-9)
    with seeded.launched() as seeds:
        seeded.finish(seeds.cells)
        (wave,) = [seeds.next_tasks(lambda resources: True)]
        seeded.finish([wave[0].cell])  # and is killed
    with seeded.launched() as seeds:
        assert [cell.slug for cell in seeds.cells[8:]] == slugs(3)[0]
        assert seeds.next_tasks(lambda resources: True) == [], "the wave is not complete"
        seeded.finish([wave[1].cell])
        assert seeded.through(seeds) == slugs(4)
    assert seeded.store.revision("g").number == 1
    seen = stopping_status(seeded.store, "g")
    assert seen is not None
    assert [look.seeds for look in seen.looks] == [3, 4, 5]


@pytest.mark.thorough
def test_wide_enough_from_the_start_adds_nothing(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1000)
    with seeded.launched() as seeds:
        seeded.finish(seeds.cells)
        assert seeded.through(seeds) == []
    assert seeds.end_messages[0].startswith("stopped after 3 seeds: ")
    assert seeds.end_messages[0].endswith(" nats wide, and at most 1000.000 nats was requested")


@pytest.mark.thorough
def test_failed_cell_blocks_the_look_and_diverged_cell_does_not(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1e-9)
    with seeded.launched() as seeds:
        last, rest = seeds.cells[-1], seeds.cells[:-1]
        seeded.finish(rest)
        seeded.finish([last], "failed")
        assert seeded.through(seeds) == []
    with seeded.launched() as seeds:
        seeded.finish([last], "diverged")
        assert seeded.through(seeds, 1) == slugs(3)
    assert "after 3 of at most 5 seeds" in seeded.lines[0]
    assert seeded.lines[0].endswith("1 seed excluded for missing values")


@pytest.mark.thorough
def test_budget_ends_the_rule_and_a_larger_budget_resumes(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1e-9)
    with seeded.launched(allowed=1e-6) as seeds:
        seeded.finish(seeds.cells)
        assert seeded.through(seeds) == []
    assert seeds.end_messages[0].startswith("stopped after 3 seeds by the budget: ")
    budget = float(seeds.end_messages[0].rpartition("--budget ")[2].split("h")[0])
    with seeded.launched(allowed=budget) as seeds:
        assert seeded.through(seeds, 1) == slugs(3)


@pytest.mark.thorough
def test_cells_that_another_sweep_has_trained_cost_nothing(sweep: Callable[..., Sweep], write: Write) -> None:
    seeded = sweep(1e-9)
    longer_grid = load_grid(write(HEAD.replace("name: g", "name: other") + "seeds: 5\n", name="other.yaml"))
    cells = longer_grid.expand(fingerprint)
    claimed = LaunchRequest(grid=longer_grid, cells=cells, runs=seeded.runs, commit=("c", False))
    seeded.fence = launch.claim_sweep(claimed, seeded.store, ME)
    for cell in cells:
        attempt = seeded.store.start_attempt(cell.id, owner=ME, fence=seeded.fence, sweep="other")
        measurement = Measurement(probe="val", metric="val_loss", value=value(cell), unit="nats/token")
        DatabaseRecorder(seeded.store, attempt.id, attempt.fence).measurements([measurement])
        seeded.store.finish_attempt(attempt.id, attempt.fence, "done")
    seeded.store.release_sweep("other", seeded.fence)
    with seeded.launched() as seeds:
        assert seeded.through(seeds) == []
    assert seeds.end_messages[0].startswith("stopped after 5 seeds")
    assert len(seeded.store.cell_states("g")) == 12


@pytest.mark.thorough
def test_seeds_are_not_added_after_losing_the_lease(sweep: Callable[..., Sweep]) -> None:
    seeded = sweep(1e-9)
    with seeded.launched() as seeds:
        seeded.finish(seeds.cells)
        seeded.store.release_sweep("g", seeded.fence)
        with pytest.raises(LeaseLost):
            seeds.next_tasks(lambda resources: True)
        assert len(seeded.store.cell_states("g")) == 8


def test_plan_prices_all_seeds(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(more="stop: {contrast: attn_type, metric: val_loss, ci: 0.1, max_seeds: 6}\n")
    planned = bench.plan()
    stop: Any = planned["stop"]
    assert (stop["looks_after"], stop["seeds_now"], stop["configurations"], stop["verdict"]) == (
        [3, 4, 5, 6],
        3,
        2,
        None,
    )
    price: Any = planned["price"]
    assert stop["price_of_all"]["hours"]["likely"] == pytest.approx(2 * price["hours"]["likely"], rel=0.01)
    plan_text = bench.ask("plan", "micro.yaml")
    assert (
        "stop: attn_type: polar - nope, val.val_loss: seeds are added to 2 configurations until its interval is at most 0.100 nats wide"
        in plan_text
    )
    assert "stop: this price is for 3 seeds; if all 6 are needed, it is" in plan_text


@only_long
@pytest.mark.thorough
def test_stop_rule_survives_a_killed_launch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(
        tokens=128 * 4, more="stop: {contrast: attn_type, metric: val_loss, ci: 1e-9, max_seeds: 4, spending: pocock}\n"
    )
    process = bench.start("launch", "micro.yaml")
    bench.wait("SELECT 1 FROM attempt a JOIN cell c ON c.id = cell_id WHERE seed = 3 AND a.state = 'running'", process)
    process.kill()
    process.communicate()
    bench.gone()
    (before,) = bench.sql("SELECT count(*) FROM revision_cell")
    assert before == (8,), "a wave is listed as a whole before it starts"
    output = bench.launch()
    bench.once(8)
    assert bench.sql("SELECT DISTINCT number FROM revision") == [(1,)]
    assert [message.partition(" of at most 2,")[0][-18:] for (message,) in bench.sql("SELECT message FROM event WHERE kind = 'look'")] == ["interim analysis 1", "interim analysis 2"]  # fmt: skip
    assert "stop: stopped after 4 seeds, as many as max_seeds allows" in output
    report = bench.ask("report", "--table", "contrasts")
    assert "Interim analysis 2 of at most 2, after 4 of at most 4 seeds" in " ".join(report.split())
