"""The batch script of docs/ made ready, and a Slurm of our own: controller, one node and munge in a temporary folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from patience import PATIENCE_S, end_with_parent, until

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "slurm.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
# KillWait is shorter and cred_expire, after which a requeued job may start, much shorter than the usual 120 s
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=500 State=UNKNOWN
PartitionName=usual Nodes={host} Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=graceful Nodes={host} PriorityTier=1 GraceTime=30 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes={host} PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def script(folder: Path, program: str) -> Path:
    """A copy of the batch script in `folder` with its three lines set; `program` is the text of its atma-sweep."""
    command = folder / "environment" / "bin" / "atma-sweep"
    command.parent.mkdir(parents=True)
    command.write_text(program)
    command.chmod(0o755)
    text = SCRIPT.read_text()
    # SQLite will do, since there is but one node
    values = {"environment": command.parents[1], "database": folder / "atma.db", "runs": folder / "runs"}
    for name, value in values.items():
        text, n_replaced = re.subn(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        assert n_replaced == 1, name
    path = folder / "slurm.sbatch"
    path.write_text(text)
    return path


def missing() -> str | None:
    """Return the reason why there is no Slurm to test on, None when there is one."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"needs Slurm: apt-get install slurm-wlm munge (no {', '.join(lacking)})" if lacking else None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("", 0))
        return [bound.getsockname()[1] for bound in sockets]


class Slurm:
    """Slurm with one node of one core. `env` makes Slurm's commands speak to it."""

    def __init__(self) -> None:
        # not pytest's folder: a socket's path may have 107 bytes
        self.home = Path(tempfile.mkdtemp(prefix="atma-slurm-", dir="/tmp"))
        self.host = socket.gethostname().split(".")[0]
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.home / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for folder in ("munge", "state", "spool"):
            (self.home / folder).mkdir(mode=0o755)
        key = self.home / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        conf = CONF.format(home=self.home, host=self.host, ports=_free_ports(2), user=getpass.getuser())
        (self.home / "slurm.conf").write_text(conf)

    def start(self) -> None:
        """Starts the daemons and waits until the node is idle."""
        munge = self.home / "munge"
        files = [f"--{name}={munge / name.removesuffix('-file')}" for name in ("key-file", "pid-file", "seed-file")]
        files += [f"--socket={munge / 'socket'}", f"--log-file={munge / 'log'}"]
        self._start("munged", "--foreground", "--force", *files)
        self._until(lambda: (munge / "socket").exists(), "munged")
        self._start("slurmctld", "-D", "-i")
        self._start("slurmd", "-D")
        self._until(lambda: "State=IDLE" in self.run("scontrol", "show", "node", self.host, check=False), "the node")

    def _start(self, program: str, *arguments: str) -> None:
        with (self.home / f"{program}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [shutil.which(program, path=PATH) or program, *arguments],
                    env=self.env, cwd=self.home, stdout=out, stderr=out, preexec_fn=end_with_parent(),
                )
            )  # fmt: skip

    def _until(self, true: object, what: str) -> None:
        assert callable(true)

        def output() -> str:
            dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            return f"{what} ({dead}): " + "".join(path.read_text()[-1500:] for path in self.home.glob("*.out"))

        until(lambda: true() or any(daemon.poll() is not None for daemon in self._daemons), output, pause=0.1)
        assert true(), output()

    def run(self, *arguments: str, cwd: Path | None = None, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(arguments, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
        assert not check or done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def submit(self, script: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """Submits a script from the folder that it lies in; returns the job's id."""
        out = self.run("sbatch", "--parsable", *options, str(script), *arguments, cwd=script.parent)
        return out.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, Restarts, ExitCode, Reason and so on."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def stop(self) -> None:
        """Cancels every job and ends the daemons."""
        if len(self._daemons) == 3 and all(daemon.poll() is None for daemon in self._daemons):
            self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False)
            self.run("scancel", "--user", getpass.getuser(), check=False)
            until(lambda: not self.run("squeue", "--noheader", check=False).strip(), "the end of all jobs", pause=0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        self._daemons.clear()


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """A running Slurm; stopped and removed afterwards."""
    daemons = Slurm()
    try:
        daemons.start()
        yield daemons
    finally:
        daemons.stop()
        shutil.rmtree(daemons.home, ignore_errors=True)
