"""Cluster with dying nodes and killed launches: each cell is measured once, with undisturbed numbers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import postgres
import psutil
import pytest

from ..testing import nodes as machines
from ..testing.bench import Bench, Curves, OnServer
from ..testing.nodes import HEAD, ClusterBench, Nodes
from ..testing.patience import until
from .storm import EVERY, finish_and_assert_invariants, lost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(machines.missing() is not None, reason=machines.missing() or ""),
]
CELLS = 2
TOKENS = 128 * 250
"""So many steps that no attempt is done before a lease has ended."""
Scenario = Callable[[Path, Curves], Bench]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Curves of the same grid, undisturbed and on this machine."""
    bench = Bench(tmp_path_factory.mktemp("calm"))
    bench.grid(tokens=TOKENS)
    bench.launch()
    bench.once(CELLS)
    return bench.curves()


@contextlib.contextmanager
def bench_on(nodes: Nodes, folder: Path, kind: type[ClusterBench] = ClusterBench) -> Iterator[ClusterBench]:
    """Yield a bench on these nodes, while a thread records if a cell ever has two live attempts."""
    bench = kind(folder, nodes)
    bench.grid(tokens=TOKENS)
    together: set[tuple[str, ...]] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            # by folder, CELL/NUMBER: an attempt that forks is still one
            now = {line[line.index("--folder") + 1] for line in map(line_of, bench.processes()) if "--folder" in line}
            for cell in {entry.split("/")[0] for entry in now}:
                together.add(tuple(sorted(entry for entry in now if entry.startswith(f"{cell}/"))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield bench
    finally:
        over.set()
        watcher.join()
        bench.close()
    assert [attempts for attempts in together if len(attempts) > 1] == [], "no cell had two live attempts at once"


def line_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if the process is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def supervisors(nodes: Nodes) -> list[psutil.Process]:
    """Return the detached supervisors of these nodes; other processes of this machine are left out."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            theirs = process.environ().get("RAY_AUTH_TOKEN_PATH") == str(nodes.token)
            if theirs and "ray::Detached" in " ".join(process.cmdline()):
                matches.append(process)
    return matches


def host_of(process: psutil.Process) -> str:
    """Return the host name that a process sees."""
    command = ["nsenter", "-t", str(process.pid), "-u", "hostname"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def trains(bench: ClusterBench, host: str) -> None:
    """Wait until an attempt on that node has a checkpoint."""
    bench.wait(f"SELECT 1 FROM attempt WHERE state = 'running' AND host = '{host}' AND step > {2 * EVERY}")


def cut_off_and_supervisor_killed(folder: Path, reference: Curves) -> Bench:
    with machines.cluster(head=1, left=1) as nodes, bench_on(nodes, folder) as bench:
        assert "now runs detached on the cluster" in bench.launch("--detach")
        trains(bench, "left")
        paths = {process.environ()["PYTHONPATH"] for process in bench.processes()}
        (source,) = (bench.folder / "atma-runs" / "source").iterdir()
        assert paths == {f"{source}:{nodes.home}/modules"}, "the frozen copy, before what the node has"
        nodes.cut("left")
        assert "has a supervisor on the cluster already" in bench.launch("--detach", code=3)
        again = "SELECT 1 FROM attempt a JOIN attempt b USING (cell_id) WHERE a.host = 'left' AND b.id > a.id"
        bench.wait(f"{again} AND b.step > 8")
        assert [process for process in bench.processes() if host_of(process) == "left"] == [], (
            "the lease has ended there"
        )
        ((before,),) = bench.sql("SELECT owner_pid FROM sweep")
        assert before is not None, "the sweep is still under way"
        (supervisor,) = supervisors(nodes)
        os.kill(supervisor.pid, signal.SIGKILL)
        nodes.mend("left")
        bench.wait(f"SELECT 1 FROM sweep WHERE owner_pid != {before}")
        bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL")
        finish_and_assert_invariants(bench, CELLS, reference)
        until(lambda: supervisors(nodes) == [], "the supervisor's end", pause=0.2)
    return bench


def killed_and_launch_killed(folder: Path, reference: Curves) -> Bench:
    """Kill a node and the launch; the head trains nothing, and another node joins after the first is dead."""
    with machines.cluster(head=0, left=1) as nodes, bench_on(nodes, folder) as bench:
        launch = bench.start("launch", "micro.yaml", "--address", HEAD)
        trains(bench, "left")
        nodes.kill("left")
        nodes.start("spare", cpus=1)
        trains(bench, "spare")
        for process in [psutil.Process(launch.pid), *psutil.Process(launch.pid).children(recursive=True)]:
            process.kill()
        launch.communicate()
        finish_and_assert_invariants(bench, CELLS, reference)
        hosts = {host for (host,) in bench.sql("SELECT host FROM attempt WHERE state = 'interrupted'")}
        assert hosts == {"left", "spare"}
    return bench


def wishes(folder: Path, reference: Curves) -> Bench:
    """Send pause, resume and cancel to a detached supervisor."""
    with machines.cluster(head=1, left=1) as nodes, bench_on(nodes, folder) as bench:
        bench.launch("--detach")
        trains(bench, "left")
        assert "waits" in bench.run("pause")
        bench.wait("SELECT 1 FROM event WHERE kind = 'paused'")
        assert bench.processes() == []
        bench.run("resume")
        trains(bench, "left")
        assert "saves its cells and stops" in bench.run("cancel")
        bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL")
        causes = bench.sql("SELECT DISTINCT cause FROM attempt WHERE state = 'interrupted'")
        assert causes == [("stopped on request",)]
        finish_and_assert_invariants(bench, CELLS, reference)
        assert lost(bench) == 0, "each was saved when it was asked to leave"
    return bench


def looked_at_and_refused(folder: Path, reference: Curves) -> Bench:
    """Check a sound cluster, a runs folder that a single node sees, and a wrong token, with doctor and launch."""
    with machines.cluster(head=1, left=1) as nodes, bench_on(nodes, folder) as bench:

        def checks(*arguments: str, code: int) -> dict[str, tuple[str, str]]:
            report = json.loads(bench.run("doctor", "--address", HEAD, "--json", *arguments, code=code))
            return {check["name"]: (check["state"], check["found"]) for check in report if "cluster" in check["name"]}

        first_checks = checks(code=0)
        assert first_checks["cluster"] == ("ok", f"{HEAD}: head (1 core, 0 GPUs), left (1 core, 0 GPUs)")
        assert {first_checks[f"cluster {what}"][0] for what in ("versions", "runs folder", "clocks")} == {"ok"}
        own = "/tmp/ray/own"  # each node has a folder /tmp/ray of its own
        assert checks("--runs", own, code=3)["cluster runs folder"] == ("bad", f"left cannot see {own}")
        error_text = bench.launch("--runs", own, code=3)
        assert f"atma-sweep: left cannot see {own}; pass --runs with a folder that every node sees" in error_text
        assert bench.sql("SELECT count(*) FROM sweep") == [(0,)], "a launch that is refused changes nothing"
        broken = nodes.home / "broken"
        broken.mkdir()
        (broken / "sqlalchemy.py").write_text("raise ImportError('no such luck')")
        nodes.start("poor", cpus=1, modules="broken")
        error_text = bench.launch()
        assert "node poor is excluded for now: its agent did not start: ImportError: no such luck" in error_text
        assert "2 done" in error_text
        nodes.token.write_text("0" * 64)
        state, finding = checks(code=3)["cluster"]
        assert (state, "refused this machine's token" in finding) == ("bad", True)
        *text, line = bench.launch(code=3).splitlines()
        assert line.startswith(f"atma-sweep: the cluster at {HEAD} refused this machine's token; copy the head's")
        assert [line for line in text if not line.startswith("text: ")] == [], "Ray itself says nothing"
    return bench


class ServerClusterBench(OnServer, ClusterBench):
    """Cluster bench with its database on a server."""


def supervisor_goes_elsewhere(folder: Path, reference: Curves) -> Bench:
    """Kill the supervisor's node, and PostgreSQL for a while, before Ray restarts the supervisor."""
    if reason := postgres.not_ours():
        pytest.skip(reason)
    with (
        postgres.cluster() as server,
        machines.cluster(head=1, left=1) as nodes,
        bench_on(nodes, folder, ServerClusterBench) as bench,
    ):
        assert isinstance(bench, ServerClusterBench)
        server.start()
        bench.put_on(server.url)
        bench.node = "left"
        for _ in range(10):
            bench.launch("--detach")
            bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NOT NULL")
            if bench.sql("SELECT owner_host FROM sweep") == [("left",)]:
                break
            # where the order was given Ray only prefers to start it
            bench.run("cancel")
            bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL")
            until(lambda: supervisors(nodes) == [], "the supervisor's end", pause=0.2)
        trains(bench, "left")
        assert bench.sql("SELECT owner_host FROM sweep") == [("left",)]
        server.stop(signal.SIGQUIT)
        nodes.kill("left")
        bench.node = "head"
        until(lambda: supervisors(nodes) != [], "a supervisor")
        time.sleep(5)
        server.start()
        bench.wait("SELECT 1 FROM sweep WHERE owner_host = 'head'")
        bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL")
        finish_and_assert_invariants(bench, CELLS, reference)
        until(lambda: supervisors(nodes) == [], "the supervisor's end", pause=0.2)
    return bench


LONG = (killed_and_launch_killed, supervisor_goes_elsewhere, wishes, looked_at_and_refused)
SCENARIOS = (cut_off_and_supervisor_killed, *(LONG if os.environ.get("ATMA_LONG") else ()))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_cluster(scenario: Scenario, tmp_path: Path, reference: Curves) -> None:
    assert scenario(tmp_path, reference).processes() == []
