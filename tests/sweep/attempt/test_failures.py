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
from atma_sweep.sweep.attempt import failures
from atma_sweep.sweep.attempt.failures import (
    EXIT_MACHINE,
    NODE_LOST,
    OOM_KILLED,
    OomWatch,
    cause_pattern,
    classify_exception,
    classify_exit,
    oom_kills,
)
from atma_sweep.sweep.orchestrator.retries import RetryTracker
from atma_sweep.sweep.planning.planner import Task
from factories import attempt_of
from tiers import long_form

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
    assert classify_exception(error) == failure


@pytest.mark.parametrize(
    ("code", "circumstances", "state", "failure", "cause"),
    [
        (1, {}, "failed", "code", "exit code 1: ImportError: no such thing"),
        (EXIT_MACHINE, {}, "failed", "infrastructure", "exit code 3: ImportError"),
        (-9, {}, "interrupted", "preempted", "killed by SIGKILL (out of memory, or killed by a user)"),
        (OOM_KILLED, {}, "interrupted", "host_oom", "the machine ran out of memory"),
        (-9, {"hung": True}, "interrupted", "hang", "it made no progress"),
        (NODE_LOST, {}, "interrupted", "node_lost", "its node was lost"),
        (-7, {}, "interrupted", "infrastructure", "crashed with SIGBUS"),
        (-11, {}, "interrupted", "infrastructure", "crashed with SIGSEGV"),
        (-15, {}, "interrupted", None, "stopped before training began"),
        (143, {}, "interrupted", None, "stopped before training began"),
        *((code, {"stop_requested": True}, "interrupted", None, "after a stop request: ") for code in (1, 2, -9, -11)),
    ],
)
def test_an_exit_code_is_judged(
    tmp_path: Path, code: int, circumstances: dict[str, bool], state: str, failure: str | None, cause: str
) -> None:
    """Whatever ends an attempt that was asked to stop is no failure."""
    log = tmp_path / "log.txt"
    log.write_text("Traceback\n  something\nImportError: no such thing\n\n")
    ending = classify_exit(code, log, **circumstances)
    assert (ending.state, ending.failure) == (state, failure)
    assert cause in ending.cause


def test_a_log_that_says_nothing_is_judged_by_the_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert "no log was written" in classify_exit(2, log).cause
    log.touch()
    assert [classify_exit(code, log).failure for code in (EXIT_MACHINE, 1)] == ["infrastructure", "code"]
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    assert classify_exit(1, log).failure == "cuda_oom"


def test_causes_of_different_cells_are_alike() -> None:
    first = "ImportError: no module x in /runs/3f0a9c1b22de/1/job.py line 17"
    second = "ImportError: no module x in /runs/77aa01b4e9f0/2/job.py line 17"
    assert (
        cause_pattern(first)
        == cause_pattern(second)
        != cause_pattern("ImportError: no module y in /runs/1/1/job.py line 17")
    )


def test_kernel_kills_are_counted(tmp_path: Path) -> None:
    assert oom_kills() >= 0
    (tmp_path / "memory.events").write_text("low 0\noom 7\noom_kill 99999\n")
    assert oom_kills(tmp_path) >= 99999


def test_kills_between_two_reads_are_all_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 7, 7])
    monkeypatch.setattr(failures, "oom_kills", lambda: next(counts))
    watch = OomWatch()
    assert watch.mark({1: 0, 2: 3}) == {1: 0, 2: 3}, "ends without a kill leave the count unread"
    assert watch.mark({3: -9, 4: 0, 5: -9, 6: -15}) == {3: OOM_KILLED, 4: 0, 5: OOM_KILLED, 6: -15}
    assert watch.mark({7: -9}) == {7: -9}


def test_table_of_failure_classes_is_complete_and_documented() -> None:
    assert set(FAILURES) == set(get_args(Failure))
    page = (Path(__file__).parents[3] / "docs" / "reference" / "failures.md").read_text()
    rows = "\n".join(f"| `{name}` | {failure.meaning} | {failure.reaction} |" for name, failure in FAILURES.items())
    assert rows in page, (
        f"docs/reference/failures.md has another table than results/failure_classes.py, which reads:\n{rows}"
    )
    tries = {None: "without limit", 1: "none", 2: "one more try", 3: "three tries"}
    assert [name for name, policy in FAILURES.items() if tries[policy.tries] not in policy.reaction] == []


# --- policies, without processes ----------------------------------------------------------------------------------


@pytest.fixture
def task(cells: Any) -> Task:
    (cell,) = cells("seeds: [0]\nset: {train.micro_batch: 4}\n")
    return Task(cell, "train", [], "new")


def test_lost_nodes_are_retried_without_limit(task: Task) -> None:
    retries = RetryTracker()
    assert [retries.next_try(task, attempt_of(step=0), "node_lost") == task for _ in range(40)] == [True] * 40


def test_preempted_cell_is_retried_while_it_gains_steps(task: Task) -> None:
    retries = RetryTracker()
    for step in range(50):
        assert retries.next_try(task, attempt_of(step=step), "preempted") is task
    # it stands still: bad luck twice, then a fault of the machine, three times in all
    answers = [retries.next_try(task, attempt_of(step=49), "preempted") is not None for _ in range(6)]
    assert answers == [True, True, True, True, False, False]


def test_infrastructure_waits_longer_each_time_and_ends(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atma_sweep.sweep.orchestrator.retries.time", SimpleNamespace(monotonic=lambda: 100.0))
    retries = RetryTracker()
    waits = []
    for _ in range(2):
        again = retries.next_try(task, attempt_of(step=0), "infrastructure")
        assert again is not None
        waits.append(again.not_before - 100.0)
    assert waits == [5, 10]
    assert retries.next_try(task, attempt_of(step=0), "infrastructure") is None


def test_want_of_memory_gives_one_more_try_alone(task: Task) -> None:
    retries = RetryTracker()
    again = retries.next_try(task, attempt_of(step=0), "host_oom")
    assert again is not None
    assert again.alone
    assert retries.next_try(again, attempt_of(step=0), "host_oom") is None


def test_cuda_oom_halves_the_micro_batch_only_if_the_grid_allows(task: Task) -> None:
    assert RetryTracker().next_try(task, attempt_of(step=0), "cuda_oom") is None
    resources = task.cell.config.resources.model_copy(update={"on_cuda_oom": "halve"})
    config = task.cell.config.model_copy(update={"resources": resources})
    allowed = replace(task, cell=replace(task.cell, config=config))
    retries = RetryTracker()
    again = retries.next_try(allowed, attempt_of(step=0), "cuda_oom")
    assert again is not None
    assert dict(again.deviation) == {"train.micro_batch": 2}
    assert again.config.train.micro_batch == 2
    assert again.config.train.accumulation == 2 * allowed.cell.config.train.accumulation
    assert again.cell.id == task.cell.id
    assert retries.next_try(again, attempt_of(step=0), "cuda_oom") is None


def test_mistakes_are_not_retried_and_break_the_sweep(task: Task) -> None:
    retries = RetryTracker()
    assert FAILURES["code"].tries == 1
    assert retries.next_try(task, attempt_of(step=0), "code") is None
    assert retries.note_code_failure("a", "KeyError: 'x' in cell 1234567") is None
    assert retries.note_code_failure("a", "KeyError: 'x' in cell 1234567") is None
    assert retries.note_code_failure("b", "KeyError: 'x' in cell abcdef0") is None
    broken = retries.note_code_failure("c", "KeyError: 'x' in cell 99")
    assert broken is not None
    assert "3 cells failed with the same error" in str(broken)


# --- the same in whole launches -----------------------------------------------------------------------------------

PLUGIN = """
import dataclasses, os, pathlib, time
import torch
from atma_sweep.model import Mixer, register_mixer
from atma_sweep.results.failure_classes import FAILURES

CALLS = [0]
# in the launch, which loads this, too; how long it waits is test_infrastructure_waits_longer_each_time_and_ends
FAILURES["infrastructure"] = dataclasses.replace(FAILURES["infrastructure"], wait_s=0.0)

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


ONCE_MORE: dict[str, tuple[str, int, str, list[tuple[str, str | None]], str]] = {
    "a crash of the interpreter": (
        "os.kill(os.getpid(), 11)", 1, "", [("interrupted", "infrastructure")], "crashed with SIGSEGV",
    ),
    "a full disk": (
        "raise OSError(28, 'No space left on device')", 2, "", [("failed", "infrastructure")] * 2, "No space left on",
    ),
    "want of GPU memory": (
        "raise torch.OutOfMemoryError('CUDA out of memory')", 1, "resources: {on_cuda_oom: halve}\n",
        [("failed", "cuda_oom")], "CUDA out of memory",
    ),
    "a kill from outside": (
        "os.kill(os.getpid(), 9)", 2, "", [("interrupted", "preempted")] * 2, "killed by SIGKILL",
    ),
    "a hang": (
        "time.sleep(600)", 1, "resources: {hang_minutes: 0.3}\n", [("interrupted", "hang")], "it made no progress",
    ),
}  # fmt: skip
"""What a mixer does, in how many attempts, the grid's further lines, how these attempts end, and a word of their cause."""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", [*list(ONCE_MORE)[-2:], *long_form(*list(ONCE_MORE)[:-2])])
def test_a_cell_is_tried_again(bench: Bench, case: str) -> None:
    what, times, more, ends, message = ONCE_MORE[case]
    broken(bench, what, times, more)
    bench.launch()
    assert endings(bench) == [*ends, ("done", None)]
    causes = {str(cause) for (cause,) in bench.sql("SELECT cause FROM attempt WHERE failure IS NOT NULL")}
    assert all(message in cause for cause in causes)
    smaller = '{"train.micro_batch": 1}' if case == "want of GPU memory" else None
    assert bench.sql("SELECT deviation FROM attempt ORDER BY id") == [(None,)] * len(ends) + [(smaller,)]
    assert bench.sql(f"SELECT count(*) FROM curve_point WHERE attempt_id = {len(ends) + 1}") != [(0,)]
    if case == "a hang":
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
    assert "3 cells failed with the same error" in out
    assert "KeyError" in out
    assert endings(bench) == [("failed", "code")] * 3
    assert bench.sql("SELECT count(*) FROM event WHERE kind = 'stopped'") == [(1,)]
