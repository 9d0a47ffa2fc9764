"""Nodes that die or are cut off, launches and supervisors that are killed: each cell is measured once, as undisturbed.

Every node has its own network, name and processes; see helpers/nodes.py.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ..helpers import nodes as machines
from ..helpers.bench import Curves
from ..helpers.nodes import HEAD, ClusterBench, Nodes
from .storm import CELLS, EVERY, TOKENS, calm, lost

pytestmark = [pytest.mark.slow, pytest.mark.skipif(machines.missing() is not None, reason=machines.missing() or "")]
long = pytest.mark.skipif(not os.environ.get("ATMA_LONG"), reason="needs ATMA_LONG=1: takes minutes")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with machines.cluster("head", "left") as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path, nodes: Nodes) -> Iterator[ClusterBench]:
    folder = tmp_path / "stormy"
    folder.mkdir()
    made = ClusterBench(folder, nodes)
    made.grid(tokens=TOKENS, seeds=2)
    with watched(made):
        yield made
    for left in made.processes():
        left.kill()


class watched:  # noqa: N801 - reads as a statement
    """Looks all the time whether a cell has two live processes, whoever started them."""

    def __init__(self, bench: ClusterBench) -> None:
        self.bench, self.most, self._over = bench, Counter[str](), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.3):
            now: Counter[str] = Counter()
            for process in self.bench.processes():
                try:
                    line = process.cmdline()
                    now[line[line.index("--folder") + 1].split("/")[0]] += process.status() != psutil.STATUS_ZOMBIE
                except (psutil.Error, ValueError):
                    continue
            self.most |= now

    def __enter__(self) -> watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert len(self.most) == CELLS, "it has seen every cell"
        assert set(self.most.values()) == {1}, "no cell had two processes at once"


def trains(bench: ClusterBench, host: str, more: str = "") -> None:
    """Waits until an attempt on that node has a checkpoint behind it."""
    bench.wait(f"SELECT 1 FROM attempt WHERE state = 'running' AND host = '{host}' AND step > {2 * EVERY} {more}", 120)


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_node_is_killed_another_comes_and_the_launch_is_killed(
    bench: ClusterBench, nodes: Nodes, reference: Curves
) -> None:
    launch = bench.start("launch", "micro.yaml", "--address", HEAD)
    trains(bench, "left")
    nodes.kill("left")
    nodes.start("spare", 3)
    trains(bench, "spare")
    family = psutil.Process(launch.pid).children(recursive=True)
    for one in [psutil.Process(launch.pid), *family]:
        one.kill()
    launch.communicate()
    calm(bench, CELLS, reference)
    hosts = {host for (host,) in bench.sql("SELECT host FROM attempt WHERE state = 'interrupted'")}
    assert {"left", "spare"} <= hosts


def test_a_node_is_cut_off_and_the_detached_supervisor_killed(
    bench: ClusterBench, nodes: Nodes, reference: Curves
) -> None:
    said = bench.launch("--detach")
    assert "goes on without this command" in said
    assert "has a supervisor on the cluster already" in bench.launch("--detach", code=3)
    trains(bench, "left")
    nodes.cut(2)
    again = (
        "SELECT 1 FROM attempt a JOIN attempt b USING (cell_id) WHERE a.host = 'left' AND b.id > a.id AND b.step > 8"
    )
    bench.wait(again, 120)
    assert [one for one in bench.processes() if host_of(one) == "left"] == [], "the lease has ended there"
    ((before,),) = bench.sql("SELECT owner_pid FROM sweep")
    supervisor = next(one for one in psutil.process_iter() if "ray::Detached" in " ".join(line_of(one)))
    os.kill(supervisor.pid, signal.SIGKILL)
    nodes.mend(2)
    until(lambda: nodes.ended("left"))  # Ray does not take it back as the node that it was
    nodes.start("left", 2)
    bench.wait(f"SELECT 1 FROM sweep WHERE owner_pid != {before}")
    assert "run by" in bench.run("status")
    bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL", 200)
    calm(bench, CELLS, reference)
    until(lambda: not [one for one in psutil.process_iter() if "ray::Detached" in " ".join(line_of(one))])


def line_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def host_of(process: psutil.Process) -> str:
    """The name that the process's machine has for it."""
    done = os.popen(f"nsenter -t {process.pid} -u hostname 2>/dev/null")
    return done.read().strip()


@long
def test_cancel_pause_and_retry_reach_a_detached_supervisor(bench: ClusterBench, reference: Curves) -> None:
    bench.launch("--detach")
    trains(bench, "left")
    assert "waits" in bench.run("pause")
    bench.wait("SELECT 1 FROM event WHERE kind = 'paused'")
    assert bench.processes() == []
    bench.run("resume")
    trains(bench, "left")
    assert "saves its cells and stops" in bench.run("cancel")
    bench.wait("SELECT 1 FROM sweep WHERE owner_pid IS NULL")
    assert {cause for (cause,) in bench.sql("SELECT DISTINCT cause FROM attempt WHERE state = 'interrupted'")} == {
        "stopped on request"
    }
    calm(bench, CELLS, reference)
    assert lost(bench) == 0, "each was saved when it was asked to leave"


def test_a_cluster_is_looked_at(bench: ClusterBench, nodes: Nodes) -> None:
    """By doctor, and by a launch that is refused: a token that is wrong, a folder that one node alone sees."""

    def checks(*arguments: str, code: int) -> dict[str, tuple[str, str]]:
        found = json.loads(bench.run("doctor", "--address", HEAD, "--json", *arguments, code=code))
        return {check["name"]: (check["state"], check["found"]) for check in found if "cluster" in check["name"]}

    found = checks(code=0)
    assert found["cluster"] == ("ok", f"{HEAD}: head (1 cores, 0 GPUs), left (1 cores, 0 GPUs)")
    assert {found[f"cluster {what}"][0] for what in ("versions", "runs folder", "clocks")} == {"ok"}
    own = "/tmp/ray/own"  # each node has a folder /tmp/ray of its own
    found = checks("--runs", own, code=3)
    assert found["cluster runs folder"] == ("bad", f"left cannot see {own}")
    said = bench.launch("--runs", own, code=3)
    assert f"atma-sweep: left cannot see {own}; pass --runs with a folder that every node sees" in said
    assert bench.sql("SELECT count(*) FROM sweep") == [(0,)], "a launch that is refused changes nothing"
    nodes.token.write_text("0" * 64)
    found = checks(code=3)
    assert found["cluster"][0] == "bad"
    assert "refuses our token" in found["cluster"][1]
    (line,) = bench.launch(code=3).splitlines()
    assert line.startswith(
        f"atma-sweep: the cluster at {HEAD} refuses our token; copy the head's ~/.ray/auth_token here"
    )
