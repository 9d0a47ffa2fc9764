"""Each class of failure is recognised, has its own policy, and is seen in the database with its cause."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from atma_sweep.results.failure_classes import FAILURES, Failure
from atma_sweep.sweep.attempt.failures import NODE_LOST, OOM_KILLED, alike, classify, judge, oom_kills
from atma_sweep.sweep.orchestrator.retries import Retries
from atma_sweep.sweep.planning.planner import Task
from factories import attempt_of

from ...testing.bench import Bench


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "cuda_oom"),
        (RuntimeError("CUDA error: out of memory"), "cuda_oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "host_oom"),
        (MemoryError(), "host_oom"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "infrastructure"),
        (OSError(errno.ENOENT, "No such file", "x"), "code"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "infrastructure"),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, unhandled system error"), "infrastructure"),
        (RuntimeError("CUDA error: device-side assert triggered"), "code"),
        (ValueError("q has 3 heads"), "code"),
        (ZeroDivisionError("division by zero"), "code"),
    ],
)
def test_an_exception_has_a_class(error: BaseException, failure: str) -> None:
    assert classify(error) == failure


def test_a_process_that_is_gone_is_judged(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    assert judge(1, log).failure == "cuda_oom"
    assert judge(-9, log, oom_killed=True).failure == "host_oom"
    assert judge(-9, log, hung=True).failure == "hang"
    assert judge(-9, log).failure == "preempted"
    assert judge(NODE_LOST, log).failure == "node_lost"
    assert judge(OOM_KILLED, log).failure == "host_oom"
    assert judge(-7, log).failure == "infrastructure"


def test_causes_of_different_cells_are_alike() -> None:
    one = "ImportError: no module x in /runs/3f0a9c1b22de/1/job.py line 17"
    other = "ImportError: no module x in /runs/77aa01b4e9f0/2/job.py line 17"
    assert alike(one) == alike(other) != alike("ImportError: no module y in /runs/1/1/job.py line 17")


def test_kernel_kills_are_counted(tmp_path: Path) -> None:
    assert oom_kills() >= 0
    (tmp_path / "memory.events").write_text("low 0\noom 7\noom_kill 99999\n")
    assert oom_kills(tmp_path) >= 99999


def test_the_table_of_classes_is_whole_and_documented() -> None:
    assert set(FAILURES) == set(get_args(Failure))
    page = (Path(__file__).parents[3] / "docs" / "robustness.md").read_text()
    rows = "\n".join(f"| `{name}` | {one.meaning} | {one.reaction} |" for name, one in FAILURES.items())
    assert rows in page, f"docs/robustness.md has another table than results/failure_classes.py, which reads:\n{rows}"


# --- policies, without processes ----------------------------------------------------------------------------------


@pytest.fixture
def task(cells: Any) -> Task:
    (cell,) = cells("seeds: [0]\nset: {train.micro_batch: 4}\n")
    return Task(cell, "train", [], "new")


def test_a_cell_whose_node_is_lost_goes_on_without_end(task: Task) -> None:
    retries = Retries()
    assert [retries.after(task, attempt_of(step=0), "node_lost") == task for _ in range(40)] == [True] * 40


def test_a_preempted_cell_goes_on_as_long_as_it_gains_steps(task: Task) -> None:
    retries = Retries()
    for step in range(50):
        assert retries.after(task, attempt_of(step=step), "preempted") is task
    # it stands still: bad luck twice, then a fault of the machine, three times in all
    answers = [retries.after(task, attempt_of(step=49), "preempted") is not None for _ in range(6)]
    assert answers == [True, True, True, True, False, False]


def test_infrastructure_waits_longer_each_time_and_ends(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atma_sweep.sweep.orchestrator.retries.time", SimpleNamespace(monotonic=lambda: 100.0))
    retries = Retries()
    waits = []
    for _ in range(2):
        again = retries.after(task, attempt_of(step=0), "infrastructure")
        assert again is not None
        waits.append(again.not_before - 100.0)
    assert waits == [5, 10]
    assert retries.after(task, attempt_of(step=0), "infrastructure") is None


def test_want_of_memory_gives_one_more_try_alone(task: Task) -> None:
    retries = Retries()
    again = retries.after(task, attempt_of(step=0), "host_oom")
    assert again is not None
    assert again.alone
    assert retries.after(again, attempt_of(step=0), "host_oom") is None


def test_want_of_gpu_memory_halves_the_micro_batch_only_where_the_grid_says_so(task: Task) -> None:
    assert Retries().after(task, attempt_of(step=0), "cuda_oom") is None
    resources = task.cell.config.resources.model_copy(update={"on_cuda_oom": "halve"})
    config = task.cell.config.model_copy(update={"resources": resources})
    allowed = replace(task, cell=replace(task.cell, config=config))
    retries = Retries()
    again = retries.after(allowed, attempt_of(step=0), "cuda_oom")
    assert again is not None
    assert dict(again.deviation) == {"train.micro_batch": 2}
    assert again.config.train.micro_batch == 2
    assert again.config.train.accumulation == 2 * allowed.cell.config.train.accumulation
    assert again.cell.id == task.cell.id
    assert retries.after(again, attempt_of(step=0), "cuda_oom") is None


def test_mistakes_are_not_retried_and_break_the_sweep(task: Task) -> None:
    retries = Retries()
    assert FAILURES["code"].tries == 1
    assert retries.after(task, attempt_of(step=0), "code") is None
    assert retries.broken("a", "KeyError: 'x' in cell 1234567") is None
    assert retries.broken("a", "KeyError: 'x' in cell 1234567") is None
    assert retries.broken("b", "KeyError: 'x' in cell abcdef0") is None
    broken = retries.broken("c", "KeyError: 'x' in cell 99")
    assert broken is not None
    assert "3 cells failed alike" in str(broken)


# --- the same in whole launches -----------------------------------------------------------------------------------

PLUGIN = """
import os, pathlib, time
import torch
from atma_sweep.model import Mixer, register_mixer

CALLS = [0]

@register_mixer("broken")
class Broken(Mixer):
    def forward(self, q, k, v, *, window):
        mark = pathlib.Path({mark!r}) / str(os.getpid())
        CALLS[0] += 1
        if CALLS[0] == 12 and len(list(mark.parent.iterdir())) < {times}:
            mark.touch()
            {what}
        return q * v.repeat_interleave(q.shape[2] // v.shape[2], 2).cumsum(1)
"""


def broken(bench: Bench, what: str, times: int, more: str = "", seeds: int = 1) -> None:
    (bench.folder / "marks").mkdir()
    (bench.folder / "bad.py").write_text(PLUGIN.format(mark=str(bench.folder / "marks"), what=what, times=times))
    bench.grid(seeds=seeds, more=more)
    bench.edit("attn_type: [nope, polar]", "attn_type: [broken]")
    bench.edit("extends: tiny", "extends: tiny\nplugins: [bad.py]")


def endings(bench: Bench) -> list[tuple[object, ...]]:
    return bench.sql("SELECT state, failure FROM attempt ORDER BY id")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_crash_of_the_interpreter_is_tried_again(bench: Bench) -> None:
    broken(bench, "os.kill(os.getpid(), 11)", times=1)
    bench.launch()
    assert endings(bench) == [("interrupted", "infrastructure"), ("done", None)]
    ((cause,),) = bench.sql("SELECT cause FROM attempt WHERE failure IS NOT NULL")
    assert "crashed with SIGSEGV" in str(cause)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_full_disk_is_tried_three_times(bench: Bench) -> None:
    broken(bench, "raise OSError(28, 'No space left on device')", times=2)
    bench.launch()
    assert endings(bench) == [("failed", "infrastructure"), ("failed", "infrastructure"), ("done", None)]


@pytest.mark.thorough
@pytest.mark.slow
def test_want_of_gpu_memory_is_marked_as_a_deviation(bench: Bench) -> None:
    broken(
        bench, "raise torch.OutOfMemoryError('CUDA out of memory')", times=1, more="resources: {on_cuda_oom: halve}\n"
    )
    bench.launch()
    assert endings(bench) == [("failed", "cuda_oom"), ("done", None)]
    assert bench.sql("SELECT deviation FROM attempt ORDER BY id") == [(None,), ('{"train.micro_batch": 1}',)]
    assert bench.sql("SELECT count(*) FROM curve_point WHERE attempt_id = 2") != [(0,)]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hang_is_killed_with_its_stack_in_the_log(bench: Bench) -> None:
    broken(bench, "time.sleep(600)", times=1, more="resources: {hang_minutes: 0.3}\n")
    bench.launch()
    assert endings(bench) == [("interrupted", "hang"), ("done", None)]
    ((folder,),) = bench.sql("SELECT run_dir FROM attempt WHERE failure = 'hang'")
    log = (bench.folder / "atma-runs" / str(folder) / "log.txt").read_text()
    assert "most recent call first" in log
    assert "bad.py" in log or "_bad" in log


@pytest.mark.thorough
@pytest.mark.slow
def test_the_same_mistake_in_three_cells_stops_the_sweep(bench: Bench) -> None:
    broken(bench, "raise KeyError('colour')", times=99, seeds=6)
    bench.in_turn()
    out = bench.launch(code=1)
    assert "3 cells failed alike" in out
    assert "KeyError" in out
    assert endings(bench) == [("failed", "code")] * 3
    assert bench.sql("SELECT count(*) FROM event WHERE kind = 'stopped'") == [(1,)]


@pytest.mark.thorough
@pytest.mark.slow
def test_killed_from_outside_is_preempted(bench: Bench) -> None:
    broken(bench, "os.kill(os.getpid(), 9)", times=2)
    bench.launch()
    assert endings(bench) == [("interrupted", "preempted")] * 2 + [("done", None)]
