"""Decisions of examples/slurm/slurm.sbatch, with stand-ins for atma-sweep, scontrol and its long pause; no Slurm is needed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from factories import ended
from patience import PATIENCE_S, until
from slurm import script

# Each stand-in notes how it was called. The launch takes its exit codes from the file `codes`, one a call; `-143`
# stands for a launch that goes on until SIGTERM and then leaves after a while with 143, as the real one does.
LAUNCH = """#!/bin/bash
code=$(head -n 1 codes); sed -i.old 1d codes
trap 'echo TERM >>calls; sleep 0.5; exit ${code#-}' TERM
echo "launch $ATMA_DB $*" >>calls
[ "${code#-}" = "$code" ] && exit "$code"
while :; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>calls
exit "${SCONTROL_CODE:-0}"
"""
SLEEP = """#!/bin/bash
[ "$1" = 90 ] || exec /bin/sleep "$@"
echo "sleep $1" >>calls
[ -z "$LONG_PAUSE" ] || exec /bin/sleep 60
"""


class Job:
    """The script in a folder, run by bash as Slurm would run it."""

    def __init__(self, folder: Path, *codes: int | str) -> None:
        self.folder = folder
        (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        (folder / "calls").touch()
        for name, text in {"scontrol": SCONTROL, "sleep": SLEEP}.items():
            path = folder / "fake" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        self.script = script(folder, LAUNCH)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        path = f"{self.folder / 'fake'}:{os.environ['PATH']}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return subprocess.Popen(
            ["bash", str(self.script), "full", *arguments],
            cwd=self.folder, env={**clean, "SLURM_JOB_ID": "42", "PATH": path, **env},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, **env: str) -> tuple[int, str]:
        """Return exit code and last line."""
        process = self.start(*arguments, **env)
        out, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out.strip().splitlines()[-1]

    @property
    def calls(self) -> list[str]:
        """Return the calls of the stand-ins, with paths of this folder removed."""
        return (self.folder / "calls").read_text().replace(f"{self.folder}/", "").splitlines()

    def once(self, call: str) -> None:
        """Wait until a stand-in was called."""
        until(lambda: any(line.startswith(call) for line in self.calls), call)


FIRST = "launch atma.db launch --runs runs full"
AGAIN = "launch atma.db launch --runs runs --code kept full"
PAUSE = "sleep 90"
REQUEUE = "scontrol requeue 42"


@pytest.mark.parametrize(
    ("restarts", "codes", "calls", "message"),
    [
        (0, [0], [FIRST], "all cells are done"),
        (0, [1], [FIRST], "some cells failed"),
        (0, [2], [FIRST], "which a requeue would not fix"),
        (0, [3, 0], [FIRST, PAUSE, FIRST], "all cells are done"),
        (0, [3, 3], [FIRST, PAUSE, FIRST], "which a requeue would not fix"),
        (0, [3, 1], [FIRST, PAUSE, FIRST], "some cells failed"),
        (0, [130], [FIRST], "which a requeue would not fix"),
        (0, [137], [FIRST], "which a requeue would not fix"),
        (0, [143], [FIRST], "cancelled, so not requeued"),
        (2, [0], [AGAIN], "all cells are done"),
        (2, [1], [AGAIN], "some cells failed"),
        (2, [2, 2], [AGAIN, PAUSE, AGAIN], "which a requeue would not fix"),
        (2, [2, 0], [AGAIN, PAUSE, AGAIN], "all cells are done"),
        (2, [143], [AGAIN], "cancelled, so not requeued"),
    ],
)
def test_finished_launch_is_never_requeued(
    tmp_path: Path, restarts: int, codes: list[int], calls: list[str], message: str
) -> None:
    job = Job(tmp_path, *codes)
    code, last = job.run(SLURM_RESTART_COUNT=str(restarts))
    assert code == codes[-1]
    assert message in last
    assert job.calls == calls


WARNING, SCANCEL = signal.SIGUSR1, signal.SIGTERM


@pytest.mark.parametrize(
    ("launch", "signals", "code", "calls", "message"),
    [
        # a second warning does not become a second SIGTERM, which would kill
        ("-143", [WARNING, WARNING], 143, [FIRST, "TERM", REQUEUE], "asking Slurm to requeue"),
        # the sweep ends just after the warning
        ("-0", [WARNING], 0, [FIRST, "TERM"], "all cells are done"),
        ("-143", [SCANCEL], 143, [FIRST, "TERM"], "stopped by scancel"),
        ("-143", [WARNING, SCANCEL], 143, [FIRST, "TERM"], ""),
    ],
)
def test_signals_save_and_only_a_warning_requeues(
    tmp_path: Path, launch: str, signals: list[signal.Signals], code: int, calls: list[str], message: str
) -> None:
    job = Job(tmp_path, launch)
    process = job.start()
    for number, before in zip(signals, ("launch", "TERM"), strict=False):
        job.once(before)
        process.send_signal(number)
    assert message in ended(process, code)
    assert job.calls == calls


def test_warning_signal_during_the_pause_requeues(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    process = job.start(LONG_PAUSE="yes")
    job.once("sleep")
    ended(process, 143, WARNING)
    assert job.calls == [FIRST, PAUSE, REQUEUE]


@pytest.mark.parametrize(
    ("env", "calls", "message"),
    [
        ({"SCONTROL_CODE": "1"}, [FIRST, "TERM", REQUEUE], "Slurm refused; sbatch again"),
        ({"SLURM_RESTART_COUNT": "99"}, [AGAIN, "TERM", REQUEUE], "asking Slurm to requeue"),
        ({"SLURM_RESTART_COUNT": "100"}, [AGAIN, "TERM"], "for the 101th time and not requeued"),
    ],
)
def test_impossible_requeue_is_reported(tmp_path: Path, env: dict[str, str], calls: list[str], message: str) -> None:
    job = Job(tmp_path, "-143")
    process = job.start(**env)
    job.once("launch")
    out = ended(process, 143, signal.SIGUSR1)
    assert message in out.splitlines()[-1]
    assert job.calls == calls


def test_options_reach_the_launch_and_win(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    arguments = ("--set", "data.corpus=my text", "--name", "mine", "--executor", "ray")
    job.run(*arguments, SLURM_GPUS_ON_NODE="1")
    assert job.calls == [f"launch atma.db launch --runs runs --executor local full {' '.join(arguments)}"]


def test_several_gpus_are_ray_s(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    job.run(SLURM_GPUS_ON_NODE="4")
    assert job.calls == [FIRST]


def test_wrong_environment_is_an_error(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    (tmp_path / "environment" / "bin" / "atma-sweep").unlink()
    code, last = job.run()
    assert code == 2
    assert "set `environment` at the top" in last
    assert job.calls == []
