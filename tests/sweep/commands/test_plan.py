"""Command plan, and launch with a budget, before and after a launch of the grid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atma_sweep.sweep.planning import render
from bench import Bench
from tiers import only_long

Command = Callable[..., tuple[int, str, str]]
CONTRAST = "contrasts:\n  - {measure: val.val_loss, axis: attn_type, level: polar, reference: nope}\n"


def test_plan_shows_groups_and_price_without_writing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.edit("attn_type: [nope, polar]", "attn_type: [nope, polar, rope]")
    bench.edit("seeds: 1", "seeds: 2\nexclude:\n  - {attn_type: rope}")
    before = sorted(tmp_path.rglob("*"))
    plan_text = bench.ask("plan", "micro.yaml", "--rate", "2.50/h")
    assert sorted(tmp_path.rglob("*")) == before
    lines = plan_text.splitlines()
    assert lines[0] == "micro: 4 cells"
    assert "  new                   4" in lines
    assert "  excluded              2  exclude[0] (attn_type: rope)" in lines
    assert "core-hours, finishes in" in plan_text
    assert "at 2.5 per hour; attempts: 4 from FLOPs" in plan_text
    assert "nope-baseline-d0-m0-w0-s1" not in plan_text, "cells stand there with --list"
    assert "nope-baseline-d0-m0-w0-s1" in bench.ask("plan", "micro.yaml", "--list")
    planned = json.loads(bench.ask("plan", "micro.yaml", "--json", "--gpus", "3"))
    assert {word: len(group) for word, group in planned["groups"].items()} == {"new": 4, "excluded": 1}
    price = planned["price"]
    hours = price["hours_by_part"]
    assert price["hours"]["likely"] == pytest.approx(sum(part["likely"] for part in hours.values()), abs=3e-4)
    assert price["hours"]["low"] < price["hours"]["likely"] < price["hours"]["high"]
    assert price["sources"] == {"FLOPs": 4}
    assert price["disk_bytes_kept"] > 0
    assert json.loads(bench.ask("launch", "micro.yaml", "--dry-run", "--json"))["price"]["hours"] == price["hours"]
    assert "price: " in bench.ask("launch", "micro.yaml", "--dry-run")


def test_calibrating_a_missing_gpu_is_refused(command: Command) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs no GPU: CUDA_VISIBLE_DEVICES= hides it")
    code, _, err = command("plan", "full", "--calibrate", "--only", "attn_type=polar")
    assert code == 3
    assert "no usable CUDA GPU" in err


def test_plan_prices_gpus_of_another_machine(command: Command) -> None:
    code, out, _ = command("plan", "full", "--gpus", "8", "--gpu", "H200", "--json")
    assert code == 0
    price = json.loads(out)["price"]
    assert (price["unit"], price["place"], price["gpus"], price["watts"]) == ("GPU-hours", "H200", 8, 700)
    assert price["kwh"]["likely"] == pytest.approx(price["hours"]["likely"] * 0.7, rel=1e-3)
    # eight at a time, 120 cells of much the same length
    assert price["finish_seconds"]["likely"] == pytest.approx(price["hours"]["likely"] * 3600 / 8, rel=0.1)


@only_long
@pytest.mark.slow
@pytest.mark.thorough
def test_calibrated_price_matches_launch_and_budget_resumes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grid(tokens=128 * 100, seeds=2, more=CONTRAST)
    bench.in_turn()

    def plan() -> dict[str, Any]:
        planned: dict[str, Any] = json.loads(bench.ask("plan", "micro.yaml", "--json"))
        return planned

    bench.run("plan", "micro.yaml", "--calibrate")
    assert plan()["price"]["sources"] == {"calibrated": 4}
    full_hours = plan()["price"]["hours"]["likely"]
    output = bench.run("launch", "micro.yaml", "--budget", f"{0.6 * full_hours:.6f}h")
    assert "2 cells for about" in output
    assert "over budget: 2 cells" in output
    slugs = [slug for (slug,) in bench.sql("SELECT slug FROM cell JOIN attempt a ON a.cell_id = cell.id ORDER BY a.id")]
    assert [str(slug)[-2:] for slug in slugs] == ["s0", "s0"], "the pair of the first seed"
    table = json.loads(bench.ask("report", "--table", "budget", "--format", "json"))
    rows = table["rows"] if isinstance(table, dict) else table
    last = rows[-1]
    assert last["ratio"] > 0  # how near it is depends on who else uses the CPU
    # the same budget once more, and then one that is large enough
    again = bench.run("launch", "micro.yaml", "--budget", f"{0.6 * full_hours:.6f}h")
    assert "to train: 0 cells" in again or "0 cells for about" in again
    assert plan()["price"]["sources"] == {"measured": 2}
    enough = bench.ask("launch", "micro.yaml", "--budget", "1000h", "--dry-run")
    assert "2 cells for about" in enough


@pytest.mark.parametrize(("count", "shown"), [
    (3, ["id0  new          cell-0", "id1  done         cell-1", "id2  new          cell-2"]),
    (120, ["    60 new              cell-0 to cell-118", "    60 done             cell-1 to cell-119", "--list shows every cell"]),
])  # fmt: skip
def test_dry_run_folds_cells_of_equal_standing(count: int, shown: list[str]) -> None:
    cells = [SimpleNamespace(id=f"id{index}", slug=f"cell-{index}") for index in range(count)]
    standings = {cell.id: "done" if index % 2 else "new" for index, cell in enumerate(cells)}
    plan: Any = SimpleNamespace(cells=cells, standings=standings, budget=None)
    assert list(render.cell_lines(plan, list_all=False)) == shown
    every = list(render.cell_lines(plan, list_all=True))
    assert len(every) == count
    plan.budget = SimpleNamespace(deferred=[SimpleNamespace(cell=cells[2])])
    assert list(render.cell_lines(plan, list_all=True)) == [*every[:2], every[2] + "  over budget", *every[3:]]
