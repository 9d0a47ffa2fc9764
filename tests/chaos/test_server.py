"""Sweep in PostgreSQL: server, trainer and launch die, and every cell is still measured once."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path

import postgres
import pytest

from ..testing.bench import Bench, Curves, OnServer
from ..testing.proxy import Proxy
from .storm import EVERY, FEW, TOKENS, finish_and_assert_invariants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(postgres.not_ours() is not None, reason=postgres.not_ours() or ""),
]
AWAY_S = 3.0


class ServerBench(OnServer, Bench):
    """Bench with its database on a server."""


def test_launch_recovers_from_dead_server_trainer_and_launch(tmp_path: Path, reference: Curves) -> None:
    """The server dies without a checkpoint of its own, like a machine that goes down.

    The trainer while it cannot be recorded.
    """
    with postgres.cluster() as server, contextlib.closing(ServerBench(tmp_path)) as bench:
        server.start()
        bench.grid(tokens=TOKENS, seeds=FEW // 2)
        bench.in_turn()
        bench.put_on(server.url)
        launch = bench.start("launch", "micro.yaml", "--executor", "local")
        bench.wait(f"SELECT 1 FROM attempt WHERE state = 'running' AND step > {EVERY}")
        server.stop(signal.SIGQUIT)
        bench.processes()[0].kill()
        time.sleep(AWAY_S)
        assert launch.poll() is None, "it waits for the server"
        server.start()
        bench.wait(f"SELECT 1 FROM attempt WHERE number > 1 AND state = 'running' AND step > {2 * EVERY}")
        launch.kill()
        launch.communicate()
        finish_and_assert_invariants(bench, FEW, reference)
        causes = bench.sql("SELECT failure FROM attempt WHERE state <> 'done' ORDER BY id")
        assert len(causes) == 2


def test_launch_recovers_from_lost_commit_answers(tmp_path: Path, reference: Curves) -> None:
    """Each commit succeeds, and the connection is cut before the answer."""
    with postgres.cluster() as server, Proxy(server.url) as proxy, contextlib.closing(ServerBench(tmp_path)) as bench:
        server.start()
        bench.grid(tokens=TOKENS, seeds=1)
        bench.put_on(server.url)
        bench.run("launch", "micro.yaml", "--dry-run")
        proxy.lose = math.inf
        bench.env["ATMA_DB"] = proxy.url
        bench.launch()
        assert proxy.lost > 30
        bench.once(2)
        assert {slug: reference[slug] for slug in bench.curves()} == bench.curves()
        assert bench.sql("SELECT kind, count(*) FROM event GROUP BY kind ORDER BY kind") == [
            ("code", 1),
            ("done", 2),
            ("started", 2),
        ]
