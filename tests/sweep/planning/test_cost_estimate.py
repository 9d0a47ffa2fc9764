"""Prices from hand-made databases, against sums by hand."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from atma_sweep.results import forecast as stored
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Measurement, Owner, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.orchestrator.supervisor import job_config
from atma_sweep.sweep.planning import cost_estimate, planner, render, speed_model
from atma_sweep.sweep.planning.ordering import ordered
from atma_sweep.sweep.planning.speed_model import Calibration, ThreePointEstimate
from atma_sweep.sweep.probes import PROBES, requested
from atma_sweep.sweep.training import flops
from factories import record_sweep

Cells = Callable[..., list[Cell]]
ME = Owner(name="ada", host=socket.gethostname(), pid=1, started=0.0)
GRID = """
axes:
  train.tokens: [153600, 307200]
seeds: 2
set:
  eval: {probes: [val, clean], lengths: [128, 256]}
resources: {gpus: GPUS}
"""
"""150 or 300 steps of 1,024 tokens, with 5 or 10 validations of 16,384."""


WIDE = {"seeds": "\n", "set_": "set:\n  model: {d_model: 160}\n"}
CAPTURED = "CUDA graphs: a micro-batch is 4e+09 FLOPs, at most 1e+13"


def record_training(
    store: Store,
    cell: Cell,
    *,
    gpu: str | None,
    slow: float = 1.0,
    state: str = "done",
    steps: str = CAPTURED,
    neighbours: int = 0,
) -> None:
    """Record 7 s of start, 1.928 s of compiling, 153,600 tokens at 10,000/s, 0.4 s of validation and 6 s of probes."""
    attempt = store.start_attempt(cell.id, owner=ME, fence=1, steps_total=cell.config.train.steps)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    recorder.provenance(
        Provenance(
            config=job_config(cell.config),
            seed=0,
            gpu_name=gpu,
            co_tenants=neighbours,
            extra={"start_seconds": 7.0, "steps": steps},
            host=ME.host,
        )
    )
    rows = [30, 60, 90, 120, 150]
    recorder.curve([CurvePoint(step=step, tokens=1024 * step, wall_s=99.0, train_loss=1.0) for step in (1, 45, 151)])
    recorder.curve(
        [
            CurvePoint(step=n, tokens=1024 * n, wall_s=1.928 + slow * 0.1024 * n, train_loss=1.0, val_loss=1.0)
            for n in rows
        ]
    )
    recorder.measurements(
        [
            Measurement(probe=probe, metric=metric, length=length, value=1.0, unit="nats", seconds=seconds)
            for probe, metric, length, seconds in (("val", "val_loss", 0, 2.0), ("clean", "nats", 128, 1.0), ("clean", "nats", 256, 3.0))
        ]
    )  # fmt: skip
    store.finish_attempt(attempt.id, 1, state)
    took = timedelta(seconds=7 + 1.928 + slow * 15.36 + 0.4 + 6)
    with store.transaction() as session:
        row = session.get(AttemptRow, attempt.id)
        assert row is not None
        assert row.started_at is not None
        row.finished_at = row.started_at + took


def make_plan(store: Store | None, cells: Sequence[Cell]) -> planner.Plan:
    states = store.states({cell.id for cell in cells}) if store is not None else {}
    plan = planner.plan(cells, states)
    tasks = ordered(plan.tasks, cells, ["train.tokens"], states)
    return planner.Plan(tasks, plan.standings, list(cells), counts=plan.counts)


@pytest.fixture
def recorded(store: Store, cells: Cells) -> Callable[..., list[Cell]]:
    """Return a function that records finished attempts of GRID's cells, with replaced texts, and returns the cells."""

    def record(gpus: str = "1", **changes: str) -> list[Cell]:
        every = cells(grid_text(gpus, **changes))
        record_sweep(store, every, "g")
        return every

    return record


def grid_text(gpus: str = "1", **changes: str) -> str:
    text = GRID.replace("GPUS", gpus)
    for name, value in changes.items():
        text = text.replace({"seeds": "seeds: 2\n", "set_": "set:\n", "tokens": "153600, 307200"}[name], value)
    return text


def billed(
    store: Store | None, cells: Sequence[Cell], folder: Path, gpus: int = 1, **options: float
) -> cost_estimate.Bill:
    prices = cost_estimate.machine_prices(cells, folder, store, gpu="H200")
    return cost_estimate.bill(make_plan(store, cells), prices, gpus=gpus, **options)


SHORT, LONG = 7 + 1.928 + 15.36 + 0.4 + 6, 7 + 1.928 + 30.72 + 0.8 + 6


def test_price_of_measured_cells(store: Store, recorded: Cells, tmp_path: Path) -> None:
    every = recorded()
    assert [cell.config.train.tokens for cell in every] == [153600, 153600, 307200, 307200]
    record_training(store, every[0], gpu="NVIDIA H200")
    bill = billed(store, every, tmp_path, 2, rate=2.5)
    assert (bill.unit, bill.machine, dict(bill.sources)) == ("GPU-hours", "H200", {"measured": 3})
    assert bill.hours.likely * 3600 == pytest.approx(SHORT + 2 * LONG)
    seconds = {part: span.likely * 3600 for part, span in bill.parts.items()}
    assert seconds == pytest.approx(
        {"start": 21, "compile": 3 * 1.928, "training": 15.36 + 2 * 30.72, "validation": 0.4 + 1.6, "probing": 18}
    )
    # the two long ones first, one on each GPU, then the short one
    assert bill.finish.likely == pytest.approx(LONG + SHORT)
    assert bill.kwh is not None
    assert bill.kwh.likely == pytest.approx(bill.hours.likely * 0.7)
    assert bill.money is not None
    assert bill.money.likely == pytest.approx(bill.hours.likely * 2.5)
    assert bill.hours.low < bill.hours.likely < bill.hours.high < 1.2 * bill.hours.likely


@pytest.mark.parametrize(
    ("steps", "setting", "source"),
    [
        ("as they come: train.graphs: off", "auto", "FLOPs"),
        ("", "auto", "FLOPs"),  # from before there were graphs
        ("", "off", "measured"),
        (CAPTURED, "off", "FLOPs"),
        (CAPTURED, "auto", "measured"),
    ],
)
def test_price_distinguishes_graph_modes(
    store: Store, cells: Cells, recorded: Cells, tmp_path: Path, steps: str, setting: str, source: str
) -> None:
    every, before = cells(grid_text(set_=f"set:\n  train.graphs: {setting}\n")), recorded()
    record_training(store, before[0], gpu="NVIDIA H200", steps=steps)
    assert (
        next(iter(cost_estimate.machine_prices(every, tmp_path, store, gpu="H200").speeds.lookup(every[1].config)))
        == source
    )


def test_price_uses_median_and_range_of_attempts(store: Store, recorded: Cells, tmp_path: Path) -> None:
    every = recorded(seeds="seeds: 4\n", tokens="153600")
    for cell, slow in zip(every, (1.0, 1.2, 2.0), strict=False):
        record_training(store, cell, gpu="NVIDIA H200", slow=slow)
    bill = billed(store, every, tmp_path)
    assert bill.parts["training"].likely * 3600 == pytest.approx(1.2 * 15.36)
    assert bill.parts["training"].low * 3600 <= 15.36 < 2 * 15.36 <= bill.parts["training"].high * 3600


def test_price_ignores_unrelated_attempts(store: Store, cells: Cells, recorded: Cells, tmp_path: Path) -> None:
    every = recorded()
    record_training(store, every[0], gpu="NVIDIA H200 NVL")
    record_training(store, every[1], gpu="NVIDIA H200", state="failed")
    assert dict(billed(store, every, tmp_path).sources) == {"FLOPs": 3}
    record_training(store, every[1], gpu="NVIDIA H200")
    wide = cells(grid_text(**WIDE))
    bill = billed(store, wide, tmp_path)
    assert dict(bill.sources) == {"FLOPs": 2}
    # at the FLOP/s that the narrow one reached
    narrow, wider = (flops.training_flops(cell.config.model, 128) or 0.0 for cell in (every[0], wide[0]))
    assert bill.parts["training"].likely * 3600 == pytest.approx((153600 + 307200) / 10_000 * wider / narrow)


def test_price_of_a_half_trained_cell(store: Store, recorded: Cells, tmp_path: Path) -> None:
    every = recorded()
    record_training(store, every[0], gpu="NVIDIA H200")
    attempt = store.start_attempt(every[1].id, owner=ME, fence=1, steps_total=150)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    recorder.progress(75, 150, 1.0, 1.0, "training")
    recorder.checkpoint("a/b")
    store.finish_attempt(attempt.id, 1, "interrupted")
    task = next(task for task in make_plan(store, every).tasks if task.cell.id == every[1].id)
    cost = cost_estimate.machine_prices(every, tmp_path, store).remaining_cost(task)
    assert cost.seconds.likely == pytest.approx(7 + 1.928 + 15.36 / 2 + 0.2 + 6)


def test_price_of_probes_is_proportional_to_tokens(store: Store, cells: Cells, recorded: Cells, tmp_path: Path) -> None:
    every = recorded()
    record_training(store, every[0], gpu="NVIDIA H200")
    longer = cells(grid_text().replace("lengths: [128, 256]", "lengths: [128, 256], documents: 32"))
    assert longer[0].config.eval.documents == 2 * every[0].config.eval.documents
    cost = cost_estimate.machine_prices(longer, tmp_path, store).full_costs(longer[0].config)["measured"]
    assert cost.parts["probing"].likely == pytest.approx(2 + 2 * (1 + 3))


def test_price_skips_timed_probes_that_are_not_loaded(
    store: Store, cells: Cells, recorded: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database holds times of a probe that this grid's plugins do not register."""
    record_training(store, recorded()[0], gpu="NVIDIA H200")
    cheaper = cells(grid_text().replace("probes: [val, clean]", "probes: [val]"))
    monkeypatch.delitem(PROBES._targets, "clean")
    cost = cost_estimate.machine_prices(cheaper, tmp_path, store).full_costs(cheaper[0].config)["measured"]
    assert cost.parts["probing"].likely == pytest.approx(2)


def test_price_from_flops_of_a_large_network(cells: Cells, tmp_path: Path) -> None:
    (cell,) = cells("set: {data: {corpus: stdlib}}\nresources: {gpus: 1}\n", base="intended-370m")
    prices = cost_estimate.machine_prices([cell], tmp_path, None, gpu="H200")
    (cost,) = prices.full_costs(cell.config).values()
    each = flops.training_flops(cell.config.model, 2048)
    assert each is not None
    tokens = cell.config.train.steps * cell.config.train.batch_tokens
    assert cost.parts["training"].likely == pytest.approx(tokens * each / (0.4 * 989e12))
    # docs/experiments/speed.md: 294,000 tokens a second on an H200
    assert cost.parts["training"].low < tokens / 294_000 < cost.parts["training"].high
    bill = cost_estimate.bill(make_plan(None, [cell]), prices, gpus=1)
    lines = "\n".join(render.price_lines(bill, list_all=True))
    assert "1 from FLOPs" in lines
    assert "off by a factor of several" in lines


def test_price_from_flops_counts_recomputed_blocks(cells: Cells, tmp_path: Path) -> None:
    """A step takes three forward passes; recomputation of every block adds one, of every second block half of one."""
    likely = {}
    for way in ("none", "selective", "block"):
        grid = f"set: {{data: {{corpus: stdlib}}, train: {{recompute: {way}}}}}\nresources: {{gpus: 1}}\n"
        (cell,) = cells(grid, base="intended-370m")
        (cost,) = cost_estimate.machine_prices([cell], tmp_path, None, gpu="H200").full_costs(cell.config).values()
        likely[way] = cost.parts["training"].likely
    assert likely["selective"] == pytest.approx(likely["none"] * 3.5 / 3)
    assert likely["block"] == pytest.approx(likely["none"] * 4 / 3)


def test_gpu_share_price_lies_between_alone_and_taking_turns(cells: Cells, tmp_path: Path) -> None:
    full_gpu, quarter = (cells(grid_text(share)) for share in ("1", "0.25"))
    prices = cost_estimate.machine_prices(full_gpu, tmp_path, None, gpu="H200")
    alone, shared = (
        next(iter(prices.full_costs(shared_cells[0].config).values())) for shared_cells in (full_gpu, quarter)
    )
    assert shared.parts["training"].low == alone.parts["training"].low
    assert shared.parts["training"].high == pytest.approx(4 * alone.parts["training"].high)
    assert shared.hours.low == pytest.approx(alone.hours.low / 4)


def test_price_counts_neighbours_only_once(store: Store, cells: Cells, recorded: Cells, tmp_path: Path) -> None:
    """Times measured on a quarter of the GPU include neighbours and are not lengthened again."""

    def training(measured_on: str, priced_on: str, neighbours: int = 0) -> ThreePointEstimate:
        record_training(store, recorded(measured_on)[0], gpu="NVIDIA H200", neighbours=neighbours)
        priced_cells = cells(grid_text(priced_on, **WIDE))
        prices = cost_estimate.machine_prices(priced_cells, tmp_path, store, gpu="H200")
        return prices.full_costs(priced_cells[0].config)["FLOPs"].parts["training"]

    alone = training("1", "0.25")
    # on a quarter, but with nobody beside it: what neighbours will cost is not known yet
    assert training("0.25", "0.25") == alone
    shared = training("0.25", "0.25", 3)
    assert alone.likely == pytest.approx(2.5 * shared.likely)
    assert alone.high == pytest.approx(4 * shared.high)
    assert training("0.25", "1", 3).likely == pytest.approx(shared.likely)


def test_price_from_a_stored_calibration(cells: Cells, tmp_path: Path) -> None:
    every = cells(grid_text("0"))
    prices = cost_estimate.machine_prices(every, tmp_path, None)
    like = prices.speeds.speed_classes.key(every[0].config)
    assert {prices.speeds.speed_classes.key(cell.config) for cell in every} == {like}, "tokens and seed change no speed"
    calibration = Calibration(
        like=like, device=prices.speeds.machine.name(every[0].config), slug="x", step_s=0.2, low_s=0.19, high_s=0.3,
        start_s=5.0, compile_s=0.5, validation_token_s=1e-5,
    )  # fmt: skip
    speed_model.save_calibrations(tmp_path, [calibration])
    speed_model.save_calibrations(tmp_path, [calibration])
    assert speed_model.read_calibrations(tmp_path) == [calibration]
    cost = cost_estimate.machine_prices(every, tmp_path, None).full_costs(every[0].config)["calibrated"]
    parts = {part: span.likely for part, span in cost.parts.items() if part != "probing"}
    assert parts == pytest.approx({"start": 5, "compile": 0.5, "training": 150 * 0.2, "validation": 5 * 0.16384})
    (tmp_path / speed_model.CALIBRATION_FILE).write_text('[{"like": 1}, 3, {"a": 2}]')
    assert speed_model.read_calibrations(tmp_path) == []


def test_price_is_computed_once_per_speed_key(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = ", ".join(f"{n / 1000}" for n in range(1, 101))
    every = cells(f"axes:\n  memory: [off, on]\n  train.muon_lr: [{rates}]\nseeds: 50\n")
    assert len(every) == 10_000
    requests: list[object] = []
    monkeypatch.setattr(cost_estimate, "requested", lambda section: (requests.append(section), requested(section))[1])
    bill = billed(None, every, tmp_path)
    assert sum(group.attempts for group in bill.groups) == 10_000
    assert (len(bill.groups), len(requests)) == (2, 2)


# --- when it would be through -----------------------------------------------------------------------------------------


def test_makespan_of_attempts_that_share_gpus() -> None:
    quarter = Resources(gpus=0.25)
    for n, gpus in ((1, 1), (4, 1), (5, 1), (9, 2), (16, 2)):
        assert cost_estimate.makespan([(10.0, quarter)] * n, gpus) == pytest.approx(10 * math.ceil(n / (4 * gpus)))
    assert cost_estimate.makespan([], 3) == 0.0


def test_makespan_starts_next_attempt_on_a_free_gpu() -> None:
    draw = random.Random(1)
    full_gpu = Resources(gpus=1)
    for _ in range(50):
        times, gpus = [draw.uniform(1, 9) for _ in range(draw.randint(1, 30))], draw.randint(1, 5)
        free = [0.0] * gpus
        for seconds in times:
            first = free.index(min(free))
            free[first] += seconds
        assert cost_estimate.makespan([(seconds, full_gpu) for seconds in times], gpus) == pytest.approx(max(free))


def test_makespan_full_gpu_waits_for_its_shares() -> None:
    half, full_gpu = Resources(gpus=0.5), Resources(gpus=1)
    assert cost_estimate.makespan([(4.0, half), (10.0, full_gpu), (3.0, half)], 1) == pytest.approx(14.0)


# --- kept with the launch ---------------------------------------------------------------------------------------------


def test_forecast_is_stored_without_a_new_revision(store: Store, cells: Cells, tmp_path: Path) -> None:
    every = cells(GRID.replace("GPUS", "1"))
    result = cost_estimate.forecast(every, cost_estimate.machine_prices(every, tmp_path, store))
    assert (len(result.groups), result.group_of_position) == (2, (0, 0, 1, 1))
    records = [planner.to_record(cell) for cell in every]

    def launch(**more: object) -> int:
        options = {"requested": [], **more}
        return store.record_revision("g", grid_text="a: 1\n", grid_file="g.yaml", options=options, cells=records)

    assert launch(price=stored.forecast_as_json(result)) == 1
    assert launch(price={"of": [1], "groups": []}) == launch() == 1
    assert stored.forecast_from_options(store.revision("g").options) == result
    assert launch(set={"a": 1}) == 2


@pytest.mark.parametrize("junk", [
    None, [], 3, {}, {"of": "x", "groups": []}, {"of": [1.5], "groups": []}, {"of": [0], "groups": [3]},
    {"of": [0, 7, -1], "groups": [{"FLOPs": [1, 2]}, {"FLOPs": ["a", 1, 2]}, {"FLOPs": [1, 2, -1]}]},
])  # fmt: skip
def test_forecast_of_an_invalid_option_is_none(junk: object) -> None:
    result = stored.forecast_from_options({stored.OPTION_KEY: junk})
    assert result is None or all(result.cell(position) == {} for position in range(-1, 9))


def test_estimates_keep_low_likely_high_order() -> None:
    span = ThreePointEstimate.from_samples([3.0, 1.0, 2.0], 0.5)
    assert span == ThreePointEstimate(0.5, 2.0, 4.5)
    assert speed_model.sum_estimates([span, ThreePointEstimate.exactly(1)]).scaled(2).multiplied(
        ThreePointEstimate(1, 2, 3)
    ) == ThreePointEstimate(3.0, 12.0, 33.0)


def test_energy_of_cpu_cells_is_unknown(cells: Callable[..., list[Cell]], tmp_path: Path) -> None:
    """The power of a GPU says nothing about the hours of a core."""
    cpu_cells = cells("set: {resources: {gpus: 0}}\n")
    for options in ({}, {"watts": 300.0}):
        bill = billed(None, cpu_cells, tmp_path, **options)
        assert (bill.unit, bill.watts, bill.kwh) == ("core-hours", None, None)
        assert "  energy: n/a for a CPU" in list(render.price_lines(bill, list_all=False))
