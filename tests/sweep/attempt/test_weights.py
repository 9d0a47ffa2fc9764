"""Kept weights that changed on the disk: noticed by all that would read them, and never measured.

The hash that an attempt records is compared with Python's own SHA-256 of the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import atma_sweep
import numpy as np
import pytest
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.schema import ProvenanceRow
from atma_sweep.results.store.store import open_store
from atma_sweep.results.weights import NO_HASH, WEIGHTS_SHA256
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.checkpoints.checkpoint import CheckpointError
from atma_sweep.sweep.checkpoints.weights import damage
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.orchestrator.launch import LaunchRequest, plan
from attempts import Flag, Room, room_of
from bundles import packed, unpacked
from fsspec.implementations.memory import MemoryFileSystem

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def original(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> Room:
    """Return a cell, trained to its end by a real attempt."""
    ours = room_of(grid, tmp_path_factory.mktemp("trained"))
    assert ours.run().state == "done"
    ours.store.close()
    return ours


@pytest.fixture
def trained(original: Room, tmp_path: Path) -> Room:
    """A copy of it for one test."""
    store = shutil.copyfile(original.store.path, tmp_path / "atma.db")  # type: ignore[type-var]
    shutil.copytree(original.runs, tmp_path / "atma-runs", symlinks=True)
    return Room(open_store(store), tmp_path / "atma-runs", original.cell)


def file_of(ours: Room) -> Path:
    return ours.runs / str(ours.store.attempts(ours.cell.id)[0].weights)


def data_start(content: bytes) -> int:
    """The first byte after the header of a safetensors file."""
    return 8 + int.from_bytes(content[:8], "little")


def flip_bit(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[data_start(content) + 1001] ^= 4
    return bytes(changed)


def thousand_values(content: bytes) -> bytes:
    start = data_start(content)
    values = np.frombuffer(content[start:], np.float32).copy()
    values[:1000] *= np.float32(1.001)
    return content[:start] + values.tobytes()


DAMAGES = {
    "one bit": flip_bit,
    "a thousand values": thousand_values,
    "cut short": lambda content: content[:-5],
    "longer": lambda content: content + b"\0",
    "another cell's": lambda content: content[: data_start(content)] + bytes(len(content) - data_start(content)),
}


def wanting_more(ours: Room, grid: Path, *, retrain: bool = False) -> LaunchRequest:
    """A launch of the same cell that asks for one more context length."""
    eval_ = ours.cell.config.eval.model_copy(update={"lengths": (*ours.cell.config.eval.lengths, 128)})
    cell = replace(ours.cell, config=ours.cell.config.model_copy(update={"eval": eval_}))
    return LaunchRequest(
        grid=load_grid(grid, rename="g"), cells=[cell], runs=ours.runs, executor="local", retrain=retrain
    )


@pytest.mark.thorough
def test_weights_are_recorded_with_their_hash(trained: Room, grid: Path, command_line: Command) -> None:
    """And sound ones pass wherever a changed one is refused."""
    db, origin = str(trained.store.path), trained.store.provenance(1)
    assert origin is not None
    assert origin.weights_sha256 == hashlib.sha256(file_of(trained).read_bytes()).hexdigest()
    assert origin.weights_sha256 == origin.extra[WEIGHTS_SHA256]
    assert atma_sweep.load(trained.cell.id, db=db).weights_sha256 == origin.weights_sha256
    assert command_line("generate", trained.cell.id, "--tokens", "1", "--db", db, "--device", "cpu")[::2] == (0, "")
    assert command_line("export", "--with-weights", "--out", "whole.zip", "--db", db)[0] == 0
    assert command_line("import", "whole.zip", "--db", "other.db")[0] == 0
    assert command_line("db", "check", "--db", db)[:2] == (0, "no problems found\n")
    assert command_line("db", "check", "--db", "other.db")[:2] == (0, "no problems found\n")
    code, out, _ = command_line("db", "check", "--skip-weights", "--db", db)
    assert (code, "1 files of kept weights, 0.0 GB, were not read" in out) == (0, True)
    assert [task.kind for task in plan(wanting_more(trained, grid), trained.store).tasks] == ["evaluate"]


@pytest.mark.thorough
@pytest.mark.parametrize("change", DAMAGES)
def test_changed_weights_are_refused_everywhere(trained: Room, grid: Path, command_line: Command, change: str) -> None:
    file, db, cell = file_of(trained), str(trained.store.path), trained.cell.id
    sound = file.read_bytes()
    file.write_bytes(DAMAGES[change](sound))
    before, after = (hashlib.sha256(content).hexdigest() for content in (sound, file.read_bytes()))
    line = (
        f"{file}: the kept weights have changed since they were written: SHA-256 is {after}, recorded was {before}; "
        "restore the file from a copy, or train the cell again: launch its grid with --retrain"
    )
    for command in (
        ("evaluate", cell, "--executor", "local"),
        ("generate", cell, "--device", "cpu"),
        ("export", "--with-weights", "--out", "damaged.zip"),
    ):
        code, out, err = command_line(*command, "--db", db)
        assert (code, out) == (2, "")
        assert line in err
        assert err.count("\n") == 1
    assert not Path("damaged.zip").exists()
    with pytest.raises(CheckpointError) as caught:
        atma_sweep.load(cell, db=db)
    assert str(caught.value) == line
    code, out, _ = command_line("db", "check", "--db", db)
    assert code == 1
    assert out == "error: {}\n  -> {}\n".format(*line.split("; ", 1))
    planned = plan(wanting_more(trained, grid), trained.store)
    assert (planned.counts, planned.tasks) == ({"weights gone": 1}, [])
    assert list(planned.damaged) == [f"{trained.cell.slug}: {line}"]
    assert [task.kind for task in plan(wanting_more(trained, grid, retrain=True), trained.store).tasks] == ["train"]
    file.write_bytes(sound)
    assert plan(wanting_more(trained, grid), trained.store).damaged == ()


def test_an_attempt_measures_no_changed_weights(trained: Room) -> None:
    """Should the file change after the launch looked at it."""
    attempt, origin = trained.store.attempts(trained.cell.id)[0], trained.store.provenance(1)
    assert origin is not None
    file_of(trained).write_bytes(flip_bit(file_of(trained).read_bytes()))
    job = trained.job("evaluate", trained.settings(), attempt.weights)
    job = replace(job, weights_sha256=origin.weights_sha256)
    assert Job.read(job.write(trained.runs)) == job
    work = CellRunner(job, trained.runs, DatabaseRecorder(trained.store, job.attempt, job.fence), Flag(None))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the kept weights have changed since they were written"):
        work.run(time.monotonic())
    assert {value.attempt_id for value in trained.store.measurements(trained.cell.id)} == {attempt.id}


def test_weights_without_a_hash_are_accepted_and_named(trained: Room, command_line: Command) -> None:
    """Earlier versions kept them without one."""
    origin = trained.store.provenance(1)
    assert origin is not None
    bare = {name: value for name, value in origin.extra.items() if name != WEIGHTS_SHA256}
    with trained.store.transaction() as session:
        session.get_one(ProvenanceRow, 1).extra = bare
    db, cell = str(trained.store.path), trained.cell.id
    assert atma_sweep.load(cell, db=db).weights_sha256 is None
    code, _, err = command_line("generate", cell, "--tokens", "1", "--device", "cpu", "--db", db)
    assert (code, NO_HASH in err) == (0, True)
    assert command_line("export", "--with-weights", "--out", "whole.zip", "--db", db)[0] == 0
    assert command_line("import", "whole.zip", "--db", "other.db")[0] == 0
    code, out, _ = command_line("db", "check", "--db", db)
    assert (code, f"note: the kept weights of 1 attempts have {NO_HASH}" in out) == (0, True)


def test_weights_elsewhere_are_compared_on_request(trained: Room) -> None:
    """Since that downloads them; an attempt that loads them compares them in any case."""
    content = file_of(trained).read_bytes()
    recorded = hashlib.sha256(content).hexdigest()
    MemoryFileSystem().pipe_file("/weights/w.safetensors", flip_bit(content))
    assert damage("memory://weights/w.safetensors", recorded) is None
    line = damage("memory://weights/w.safetensors", recorded, fetch=True)
    assert line is not None
    assert line.startswith("memory://weights/w.safetensors: the kept weights have changed")
    MemoryFileSystem().pipe_file("/weights/w.safetensors", content)
    assert damage("memory://weights/w.safetensors", recorded, fetch=True) is None
    assert damage("memory://weights/none.safetensors", recorded, fetch=True) is None


def test_a_bundle_with_changed_weights_is_refused(trained: Room, command_line: Command) -> None:
    """Even one whose manifest fits them."""
    assert command_line("export", "--with-weights", "--out", "whole.zip", "--db", str(trained.store.path))[0] == 0
    members = unpacked(Path("whole.zip"))
    (name,) = [name for name in members if name.endswith(".safetensors")]
    packed(Path("evil.zip"), members | {name: flip_bit(members[name])})
    code, _, err = command_line("import", "evil.zip", "--db", "other.db")
    assert (code, "files/1/weights.safetensors differs from the weights that attempt 1 recorded" in err) == (2, True)
    assert json.loads(members["provenance.jsonl"].splitlines()[0])["extra"][WEIGHTS_SHA256]
