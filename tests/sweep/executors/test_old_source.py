"""Sweeps begun by older code, continued by today's launch with that code (`--code kept`) or with today's."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import old_code
import pytest
from atma_sweep.sweep.executors.source_snapshot import PACKAGE, SNAPSHOT_PARTS, fingerprint
from old_code import COMMAND, COMMITS, with_code
from once import once
from patience import PATIENCE_S
from tiers import long_form

from ...testing.bench import Bench

STEPS = 200
SPARES = {"dd87905": False, "0c020c1": True, "a2d1eee": True}
"""Whether that code waits, when it is told to, for an attempt to become."""
JOURNALS = {"dd87905": True, "0c020c1": False, "a2d1eee": False}
"""Whether that code knows an older schema alone, and so writes journals beside a database of today."""


class Begun(NamedTuple):
    """Sweep of two cells begun by one commit; the first cell was interrupted during its training."""

    commit: str
    package: Path
    folder: Path
    plan: dict[str, Any]


@pytest.fixture(scope="module", params=[COMMITS[0], *long_form(*COMMITS[1:])])
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    commit = str(request.param)

    def make(folder: Path) -> None:
        package = old_code.unpack(commit, folder / "code")
        (folder / "desk").mkdir()
        bench = Bench(folder / "desk")
        bench.grid(tokens=128 * STEPS)
        bench.in_turn()
        bench.env = old_code.environment(package)
        launch = bench.start("launch", "micro.yaml", "--executor", "local")
        bench.wait(f"SELECT 1 FROM attempt WHERE step BETWEEN 20 AND {STEPS - 60} AND checkpoint IS NOT NULL", launch)
        launch.send_signal(signal.SIGINT)
        printed, _ = launch.communicate(timeout=PATIENCE_S)
        assert bench.sql("SELECT kind, state FROM attempt") == [("train", "interrupted")], printed
        plan = with_code(package, bench.folder, *COMMAND, "launch", "micro.yaml", "--dry-run", "--json")
        (folder / "plan.json").write_text(plan)

    try:
        folder = once(tmp_path_factory, f"begun-{commit}", make)
    except old_code.NoHistory as error:
        pytest.skip(str(error))
    plan = json.loads((folder / "plan.json").read_text())
    return Begun(commit, folder / "code" / "atma_sweep", folder / "desk", plan)


@pytest.fixture
def bench(begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Copy of the begun sweep, for today's code to continue."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    folder = tmp_path / "copy"
    shutil.copytree(begun.folder, folder)
    resumed = Bench(folder, copied=begun.folder)
    resumed.ask("db", "upgrade")
    return resumed


def assert_resumed(bench: Bench, begun: Begun) -> None:
    """Assert that the interrupted cell was resumed, not restarted, and that every number of both cells exists once."""
    bench.once(cells=2)
    bench.assert_intact()
    after = bench.plan()
    assert [cell["cell"] for cell in after["cells"]] == [cell["cell"] for cell in begun.plan["cells"]]  # type: ignore[attr-defined]
    assert after["counts"] == {"done": 2}
    assert bench.sql("SELECT count(*) FROM event WHERE kind = 'resumed'") == [(1,)]
    for curve in bench.curves().values():
        assert [step for step, _, _, val_loss, *_ in curve if val_loss is not None] == list(range(10, STEPS + 1, 10))
    assert bench.processes() == []


@pytest.mark.slow
@pytest.mark.thorough
def test_half_finished_sweep_goes_on_with_its_own_code(begun: Begun, bench: Bench, spares: list[int]) -> None:
    old_code_id, now = fingerprint(begun.package), fingerprint(PACKAGE)
    assert f"code: that of the last launch ({old_code_id}), not the current code ({now})" in bench.launch(
        "--code", "kept"
    )
    assert_resumed(bench, begun)
    snapshot = bench.folder / "atma-runs" / "source" / old_code_id
    # compiled files go at each launch, so attempts of this one have imported the module that trains
    assert [path for name in ("work", "runner") for path in snapshot.rglob(f"{name}.*.pyc")]
    assert bench.sql("SELECT message FROM event WHERE kind = 'code'") == [(old_code_id,)]
    pids = bench.sql("SELECT pid FROM attempt WHERE number > 1 OR state = 'done' ORDER BY id")
    assert [pid in spares for (pid,) in pids] == [False, SPARES[begun.commit]]
    journals = list((bench.folder / "atma-runs").glob("*/*/journal.jsonl"))
    assert len(journals) == (2 if JOURNALS[begun.commit] else 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_half_finished_sweep_goes_on_with_the_code_of_today(begun: Begun, bench: Bench, spares: list[int]) -> None:
    old_code_id, now = fingerprint(begun.package), fingerprint(PACKAGE)
    printed = bench.launch()
    if old_code_id != now:
        assert f"code: changed since the last launch ({old_code_id} to {now})" in printed
        assert bench.sql("SELECT message FROM event WHERE kind = 'code' ORDER BY id") == [(old_code_id,), (now,)]
    assert_resumed(bench, begun)
    pids = bench.sql("SELECT pid FROM attempt WHERE number > 1 OR state = 'done' ORDER BY id")
    assert [pid in spares for (pid,) in pids] == [False, True]


def test_parts_of_a_snapshot_are_those_of_older_ones() -> None:
    """A part may be added, which no older snapshot has; none may be removed or moved, or fingerprints would change."""
    assert [part for part in SNAPSHOT_PARTS if part in old_code.PARTS] == list(old_code.PARTS)
