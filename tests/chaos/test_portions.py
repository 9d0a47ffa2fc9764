"""`.ci/gpu portion`: a sweep on machines that are empty afterwards; each starts from what the previous one copied home."""

from __future__ import annotations

import contextlib
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..testing.bench import Bench
from ..testing.patience import PATIENCE_S, until
from ..testing.tiers import only_long

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
SCRIPT = Path(__file__).parents[2] / ".ci" / "gpu"
ATTEMPTS = "SELECT cell_id, number, state FROM attempt ORDER BY id"
DONE = "SELECT cell_id, number FROM attempt WHERE state = 'done' ORDER BY id"
CELLS = 4


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as bench:
        bench.grid(tokens=128 * 300, seeds=CELLS // 2)
        bench.in_turn()
        yield bench


def portion(bench: Bench, number: int, *, finish_s: int) -> tuple[int, str]:
    """Return exit code and output of a portion that resumes the previous one; `bench` then queries its database."""
    with begun(bench, number, ATMA_FINISH_S=str(finish_s)) as process:
        out, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert brought_home(bench, number)
    return process.returncode, out


def around(folder: Path) -> dict[str, str]:
    """Return the environment of the script: this Python, and temporary files below the test's folder."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}


@contextlib.contextmanager
def begun(bench: Bench, number: int, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Run a portion in the background; kill what is left of it at the end."""
    before, after = (bench.folder / f"portion-{index}" for index in (number - 1, number))
    before.mkdir(exist_ok=True)
    process = subprocess.Popen(
        ["bash", str(SCRIPT), "portion", str(before), str(after), str(int(PATIENCE_S)), str(bench.folder / "micro.yaml")],
        env=around(bench.folder) | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        vanish(process)


def vanish(process: subprocess.Popen[str]) -> None:
    """Kill all processes of a portion at once, like a machine that vanishes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait(PATIENCE_S)


def brought_home(bench: Bench, number: int) -> bool:
    """Return True if a portion has left its database; `bench` then queries that one."""
    folder = bench.folder / f"portion-{number}"
    folder = folder / "new" if (folder / "new" / "whole").exists() else folder
    try:
        packed = b"".join(path.read_bytes() for path in sorted(folder.glob("atma.db.xz.*")))
        content = lzma.decompress(packed)
    except (FileNotFoundError, lzma.LZMAError):  # just being replaced
        return False
    if not content:
        return False
    (bench.folder / "atma.db").write_bytes(content)
    return True


@only_long
def test_portion_does_not_retrain_copied_cells(bench: Bench) -> None:
    # asked at once: the cell that runs is the only one
    code, out = portion(bench, 1, finish_s=10**6)
    first = bench.sql(ATTEMPTS)
    assert (code, "no cell is started from here on" in out) == (143, True), out
    assert 1 <= len(first) < CELLS, out
    assert {state for _, _, state in first} == {"done"}, out
    code, out = portion(bench, 2, finish_s=0)
    assert (code, f"before: {len(first)} cells trained, 0 of them twice" in out) == (0, True), out
    every = bench.sql(ATTEMPTS)
    assert every[: len(first)] == first
    assert [(number, state) for _, number, state in every] == [(1, "done")] * CELLS
    bench.once(CELLS)
    # the weights of the first portion's cells are nowhere, and nobody asks for them
    assert not (bench.folder / "atma-runs").exists()
    assert "4 of 4 cells done" in bench.ask("report", "--table", "6")
    code, out = portion(bench, 3, finish_s=0)
    assert (code, bench.sql(ATTEMPTS)) == (0, every), out


def first_cell(bench: Bench, process: subprocess.Popen[str]) -> None:
    """Wait until a portion has copied a cell home."""

    def come() -> bool:
        assert process.poll() is None
        return brought_home(bench, 1) and bool(bench.sql(DONE))

    until(come, "a cell that came home", pause=0.2)


@only_long
def test_vanished_machine_loses_only_the_last_minutes(bench: Bench) -> None:
    with begun(bench, 1, ATMA_HOME_S="1", ATMA_FILE_MIB="4K") as process:
        first_cell(bench, process)
        vanish(process)
    assert brought_home(bench, 1)
    assert len(list((bench.folder / "portion-1").rglob("atma.db.xz.*"))) > 1
    first = bench.sql(DONE)
    assert 1 <= len(first) < CELLS
    code, out = portion(bench, 2, finish_s=0)
    assert (code, f"before: {len(first)} cells trained, 0 of them twice" in out) == (0, True), out
    done = bench.sql(DONE)
    assert done[: len(first)] == first
    assert len(done) == len({cell for cell, _ in done}) == CELLS


@only_long
def test_failed_copy_home_keeps_the_previous_database(bench: Bench) -> None:
    broken, folder = bench.folder / "broken", bench.folder / "stubs"
    folder.mkdir()
    stub = folder / "python3"
    stub.write_text(
        f'#!/bin/sh\ncase "$*" in *"db backup"*) [ -e {broken} ] && exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    stub.chmod(0o755)
    with begun(bench, 1, ATMA_HOME_S="1", PATH=f"{folder}:{os.environ['PATH']}") as process:
        first_cell(bench, process)
        broken.touch()
        out, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 1, out
    assert "what came before is still there" in out
    assert brought_home(bench, 1)
    assert 1 <= len(bench.sql(DONE)) < CELLS


INTACT = lzma.compress(b"whole")


def half_replaced(folder: Path) -> None:
    """Write the files of a machine that vanished while it replaced parts of a database.

    They are parts of two databases, and a complete one in new/.
    """
    (folder / "new").mkdir(parents=True)
    (folder / "new" / "atma.db.xz.00").write_bytes(INTACT[:20])
    (folder / "new" / "atma.db.xz.01").write_bytes(INTACT[20:])
    (folder / "new" / "whole").touch()
    (folder / "atma.db.xz.00").write_bytes(INTACT[20:])


def short_portion(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a portion that ends at once, since its grid does not exist, and has no database to copy home."""
    return subprocess.run(
        ["bash", str(SCRIPT), "portion", str(folder / "before"), str(folder / "after"), "100", "no-such-grid"],
        env=around(folder), capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize("from_new", [False, True])
def test_portion_resumes_from_an_intact_database(tmp_path: Path, from_new: bool) -> None:
    before = tmp_path / "before"
    half_replaced(before)
    if not from_new:
        (before / "new" / "whole").unlink()
        (before / "atma.db.xz.00").write_bytes(INTACT)
    done = short_portion(tmp_path)
    assert "before: nothing trained yet" in done.stdout, done.stdout + done.stderr


def test_only_intact_database_is_moved_home_first(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    half_replaced(tmp_path / "after")
    done = short_portion(tmp_path)
    assert (done.returncode, "what came before is still there" in done.stdout) == (1, True), done.stdout + done.stderr
    parts = sorted((tmp_path / "after").glob("atma.db.xz.*"))
    assert lzma.decompress(b"".join(part.read_bytes() for part in parts)) == b"whole"


@pytest.mark.parametrize("arguments", [(), ("portion",), ("speed", "out"), ("dance",)])
def test_portion_without_arguments_prints_usage(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bash .ci/gpu portion FROM TO SECONDS GRID" in done.stderr
