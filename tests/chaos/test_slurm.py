"""examples/slurm/slurm.sbatch under a real Slurm: however the job ends, each cell is measured once, with undisturbed numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..testing import slurm as daemons
from ..testing.bench import Bench, Curves
from ..testing.patience import until
from .storm import EVERY, lost

PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m atma_sweep.cli "$@"\n'
CELLS = 2
STEPS = 250
SLOW = """
import os, time
import torch
from atma_sweep.model import Mixer, MixerConfig, register_mixer


@register_mixer("slow")
class Slow(Mixer):
    Config = MixerConfig

    def forward(self, q, k, v, *, window):
        if os.path.exists(os.environ.get("SLOW", "")):  # as long as that file is there, training does not end
            time.sleep(0.2)
        means = v.cumsum(1) / torch.arange(1, v.size(1) + 1)[:, None, None]
        return means.repeat_interleave(q.size(2) // v.size(2), dim=2)
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(daemons.missing() is not None, reason=daemons.missing() or ""),
]


def bench_in(folder: Path) -> Bench:
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    (folder / "slow.py").write_text(SLOW)
    bench.grid(tokens=128 * STEPS, seeds=CELLS, more="plugins: [slow.py]\n")
    bench.edit("[nope, polar]", "[slow]")
    return bench


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Curves of the same grid, fast and undisturbed."""
    bench = bench_in(tmp_path_factory.mktemp("calm"))
    bench.launch()
    bench.once(CELLS)
    return bench.curves()


@pytest.fixture(scope="module")
def slurm() -> Iterator[daemons.Slurm]:
    with daemons.cluster() as slurm_cluster:
        yield slurm_cluster


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(bench_in(tmp_path / "bench")) as bench:
        yield bench


def submit(slurm: daemons.Slurm, bench: Bench, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """Submit the script and wait until training is under way, which lasts until `faster` is called."""
    slow = bench.folder / "slow"
    slow.touch()
    submit_options = ("--cpus-per-task=1", f"--export=ALL,SLOW={slow}", *options)
    job = slurm.submit(daemons.script(bench.folder, PROGRAM), "micro.yaml", *arguments, options=submit_options)
    bench.wait("SELECT 1 FROM attempt WHERE state = 'running' AND step > 10")
    return job


def faster(bench: Bench) -> None:
    (bench.folder / "slow").unlink()


def output(bench: Bench, job: str) -> str:
    return (bench.folder / f"atma-sweep-{job}.out").read_text()


def finished(slurm: daemons.Slurm, job: str) -> dict[str, str]:
    """Return Slurm's facts about a job that has ended for good."""
    until(lambda: slurm.job(job)["JobState"] in ENDED, "the end of the job", pause=0.3)
    return slurm.job(job)


def restarted(slurm: daemons.Slurm, job: str) -> None:
    until(lambda: slurm.job(job)["Restarts"] == "1", "a restart of the job", pause=0.3)


def right(bench: Bench, reference: Curves) -> None:
    bench.once(CELLS)
    assert bench.curves() == reference
    assert lost(bench) <= EVERY, "an attempt went back further than one checkpoint interval"
    assert bench.sql("SELECT owner_pid FROM sweep") == [(None,)], "nobody holds the sweep"


def test_job_continues_after_its_time_limit(slurm: daemons.Slurm, bench: Bench, reference: Curves) -> None:
    job = submit(slurm, bench, options=("--time=30", "--signal=B:USR1@5"))
    hours, minutes, seconds = map(int, slurm.job(job)["RunTime"].split(":"))
    limit = hours * 60 + minutes + (1 if seconds < 30 else 2)  # whole minutes; the warning comes 5 to 65 s before
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    restarted(slurm, job)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    faster(bench)
    facts = finished(slurm, job)
    log_text = output(bench, job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), log_text
    assert log_text.count("asking Slurm to requeue") == 1
    assert log_text.rstrip().endswith("all cells are done")
    ends = bench.sql("SELECT state, cause FROM attempt ORDER BY id")
    assert set(ends[:-CELLS]) == {("interrupted", "stopped on request")}, "saved, not killed"
    assert ends[-CELLS:] == [("done", None)] * CELLS
    right(bench, reference)
    assert lost(bench) == 0


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_scancel_saves_and_ends_the_job(slurm: daemons.Slurm, bench: Bench, reference: Curves, executor: str) -> None:
    """Slurm sends SIGTERM to every process of the job, and processes pass it on to each other."""
    bench.edit("every_steps: 7", "every_steps: 1000")
    job = submit(slurm, bench, "--executor", executor)
    slurm.run("scancel", job)
    assert finished(slurm, job)["JobState"] == "CANCELLED"
    ends = bench.sql("SELECT DISTINCT state, cause, step = 0 OR checkpoint IS NOT NULL FROM attempt")
    assert ends == [("interrupted", "stopped on request", 1)]
    assert "asking Slurm to requeue" not in output(bench, job)
    faster(bench)
    bench.run("launch", "micro.yaml", "--executor", "local", "--runs", str(bench.folder / "runs"))
    assert "from step" in str(bench.sql("SELECT message FROM event WHERE kind = 'resumed'"))
    right(bench, reference)
    assert lost(bench) == 0


@pytest.mark.parametrize("partition", ["usual", "graceful"])
def test_preempted_job_continues(
    slurm: daemons.Slurm, bench: Bench, reference: Curves, partition: str, tmp_path: Path
) -> None:
    """The job is preempted by an urgent partition, at once or after a grace time."""
    job = submit(slurm, bench, options=(f"--partition={partition}",))
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    urgent_job = slurm.submit(urgent, options=("--partition=urgent",))
    restarted(slurm, job)
    faster(bench)
    assert finished(slurm, urgent_job)["JobState"] == "COMPLETED"
    facts = finished(slurm, job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), output(bench, job)
    assert bench.sql("SELECT state, cause FROM attempt ORDER BY id")[0] == ("interrupted", "stopped on request")
    right(bench, reference)
    assert lost(bench) == 0


def test_cancelled_sweep_is_not_requeued(slurm: daemons.Slurm, bench: Bench) -> None:
    job = submit(slurm, bench)
    assert "saves its cells and stops" in bench.run("cancel")
    facts = finished(slurm, job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "143:0")
    assert "cancelled, so not requeued" in output(bench, job)
    assert bench.sql("SELECT DISTINCT state, cause FROM attempt") == [("interrupted", "stopped on request")]


def test_killed_launch_is_reported(slurm: daemons.Slurm, bench: Bench) -> None:
    job = submit(slurm, bench)
    ((pid,),) = bench.sql("SELECT owner_pid FROM sweep")
    assert isinstance(pid, int)
    os.kill(pid, 9)
    facts = finished(slurm, job)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "137:0")
    assert "exit code 137" in output(bench, job)
