"""Attempts in this process: where their state goes, what is left of it, and that a place far away does as well."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from atma_sweep.reports.live.cell_details import cell_details
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.compile_lock import CompileLock
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.data import corpora
from atma_sweep.sweep.grid import validate
from atma_sweep.sweep.training import loop, optimizer_steps
from attempts import STEPS, Flag, Room, serial
from fsspec.implementations.memory import MemoryFileSystem
from tiers import every_nth


@pytest.fixture
def far() -> str:
    """A place that only this process has."""
    return f"memory://far-{next(serial)}"


@pytest.mark.thorough
def test_an_attempt_far_away_is_stopped_continued_and_evaluated(room: Callable[..., Room], far: str) -> None:
    plain = room()
    uninterrupted = plain.run()
    ours = room()
    first = ours.run(stop=11, path=far)
    assert (first.state, first.checkpoint) == ("interrupted", f"{far}/{ours.cell.id}/1/checkpoint-00000003")
    second = ours.run(path=far)
    assert second.state == "done"
    assert second.weights == f"{far}/{ours.cell.id}/2/weights.safetensors"
    assert ours.curve(second) == plain.curve(uninterrupted)
    assert len(ours.curve(second)) == STEPS
    assert [event.message for event in ours.store.events() if event.kind == "resumed"] == ["from step 3 of attempt 1"]
    assert (ours.names(first), ours.names(second)) == ([], ["weights.safetensors"])
    assert not list(ours.runs.rglob("*.safetensors"))

    third = ours.run("evaluate", weights=second.weights)
    again = {
        (v.probe, v.metric, v.length): v.value for v in ours.store.measurements(ours.cell.id) if v.metric == "nats"
    }
    straight = {(v.probe, v.metric, v.length): v.value for v in plain.store.measurements(plain.cell.id)}
    assert {v.attempt_id for v in ours.store.measurements(ours.cell.id) if v.metric == "nats"} == {third.id}
    assert again == {key: value for key, value in straight.items() if key[1] == "nats"}
    assert again


@pytest.mark.thorough
def test_the_type_of_activations_is_a_setting(room: Callable[..., Room]) -> None:
    provenances = {}
    for workspace in (room(), room("train.activations=bfloat16")):
        attempt = workspace.run()
        provenance = workspace.store.provenances([attempt.id])[attempt.id]
        provenances[provenance.dtype, workspace.cell.id] = torch.tensor(
            [loss for _, loss, *_ in workspace.curve(attempt)]
        )
    (wide, _), (narrow, _) = provenances
    assert (wide, narrow) == ("float32", "bfloat16")
    assert room("train.activations=auto").cell.id == next(iter(provenances))[1]
    a, b = provenances.values()
    # eight bits of a number, averaged over many
    assert 1e-5 < (a - b).abs().max() < 0.05
    assert len({cell for _, cell in provenances}) == 2


@pytest.mark.thorough
def test_refused_capture_is_recorded_and_logged_once(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers are those of an attempt that never tried."""

    def refusing(pieces: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    results = []
    for ours, capture in ((room(), None), (room("train.graphs=on"), loop.without_capture), (room(), refusing)):
        if capture is not None:
            monkeypatch.setattr(loop, "without_capture", capture)
            monkeypatch.setattr(optimizer_steps, "should_capture", lambda *_: (True, "asked for"))
        attempt = ours.run()
        extra = ours.store.provenances([attempt.id])[attempt.id].extra
        results.append((extra["steps"], ours.curve(attempt)))
        # what the text was prepared from: the only trace of it once the runs folder is lost
        assert extra["corpus_request"] == corpora.request(ours.cell.config.data)
    assert [steps for steps, _ in results] == [
        "as they come: no GPU", "CUDA graphs: asked for",
        "as they come: operation not permitted when stream is capturing",
    ]  # fmt: skip
    assert results[0][1] == results[1][1] == results[2][1]
    lines = [line for line in capsys.readouterr().out.splitlines() if "CUDA graphs cannot be used" in line]
    assert len(lines) == 1
    assert lines[0].endswith("with identical results: operation not permitted when stream is capturing")


@pytest.mark.thorough
def test_loss_scaling_is_recorded_and_resumed(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, which has no float16, the scale comes and goes without a trace in the numbers."""
    monkeypatch.setattr(validate, "check_precision", lambda *sections: ())
    plain, scaled = room(), room("train.precision=fp16")
    uninterrupted = plain.run()
    scaled.run(stop=11)
    second = scaled.run()
    assert scaled.curve(second) == plain.curve(uninterrupted)
    assert scaled.cell.id != plain.cell.id
    values = {value.metric: value.value for value in scaled.store.measurements(scaled.cell.id)}
    assert values["skipped_steps"] == 0
    assert "skipped_steps" not in {value.metric for value in plain.store.measurements(plain.cell.id)}
    assert "loss scale 65536, 0 steps skipped" in capsys.readouterr().out
    assert "precision=fp16" in cell_details(scaled.store, scaled.cell.id, None).text()
    assert "precision=bf16" in cell_details(plain.store, plain.cell.id, None).text()


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [b'"step": 10', b'"step": -3', b'"step": "x"', b'"stop": 3', b""])
def test_a_damaged_newest_checkpoint_costs_steps_and_no_number(
    room: Callable[..., Room], damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before is gone on from, to the last bit as if nothing had been stopped."""
    plain, ours = room(), room()
    uninterrupted, first = plain.run(), ours.run(stop=11)
    seal = ours.runs / str(first.checkpoint) / "state.json"
    content = seal.read_bytes()
    assert b'"step": 3' in content
    seal.write_bytes(content.replace(b'"step": 3', damage) if damage else b"")
    capsys.readouterr()
    second = ours.run()
    assert (second.state, ours.curve(second)) == ("done", plain.curve(uninterrupted))
    assert [event.message for event in ours.store.events() if event.kind == "resumed"] == ["from step 2 of attempt 1"]
    out = capsys.readouterr().out
    assert f"{seal.parent} is damaged and was skipped: state.json " in out

    def nats(of: Room) -> dict[tuple[str, int | None], float | None]:
        return {(v.probe, v.length): v.value for v in of.store.measurements(of.cell.id) if v.metric == "nats"}

    assert nats(ours) == nats(plain)


@pytest.mark.thorough
def test_losses_before_the_first_validation_are_stored_once(room: Callable[..., Room]) -> None:
    """Twelve steps with a single validation: the losses are those of an attempt that validates every step."""
    plain, ours = room(), room("eval.validate_every=100")
    every_step = {step: loss for step, loss, *_ in plain.curve(plain.run())}
    first = ours.run(stop=11)
    stopped = [point[:3] for point in ours.curve(first)]
    assert stopped == [(step, every_step[step], None) for step in range(1, len(stopped) + 1)]
    assert 1 < len(stopped) < STEPS
    assert f"curve ({len(stopped)} points)" in cell_details(ours.store, ours.cell.id, None).text()
    curve = ours.store.curve(ours.run().id)
    assert {point.step: point.train_loss for point in curve} == every_step
    assert [point.step for point in curve if point.val_loss is not None] == [STEPS]
    times = [point.wall_s for point in curve]
    assert times == sorted(times)
    assert all(point.tokens_per_s for point in curve)


@pytest.mark.thorough
def test_stops_do_not_pile_up_checkpoints(room: Callable[..., Room], far: str) -> None:
    """Whatever the places of the attempts, two checkpoints are left after each save: the newest and the one before."""
    ours = room()
    for stop, settings in ((8, {}), (6, {"path": far}), (6, {}), (4, {"path": far}), (None, {})):
        ours.run(stop=stop, **settings)
    assert all(len(names) <= 2 for names in ours.saved)
    written = [int(max(names).removeprefix("checkpoint-")) for names in ours.saved]
    assert written == sorted(written)
    assert written[-1] == STEPS
    for before, after in itertools.pairwise(ours.saved):
        assert max(before) in after or max(before) == max(after), "the one before stays"
    plain = room()
    assert ours.curve(ours.store.attempts(ours.cell.id)[-1]) == plain.curve(plain.run())


@pytest.mark.parametrize(("keep", "files"), every_nth([
    ("nothing", []),
    ("weights", ["weights.safetensors"]),
    ("everything", ["checkpoint-00000010", "checkpoint-00000012", "weights.safetensors"]),
], 3))  # fmt: skip
def test_files_of_a_finished_cell(room: Callable[..., Room], keep: str, files: list[str]) -> None:
    ours = room()
    first = ours.run(stop=11, keep=keep)
    assert ours.names(first) == ["checkpoint-00000002", "checkpoint-00000003"]
    second = ours.run(keep=keep)
    assert (ours.names(first), ours.names(second)) == ([], files)
    assert (second.weights is None) == (keep == "nothing")


@pytest.mark.thorough
def test_compile_lock_ends_with_the_first_step_or_without_steps(room: Callable[..., Room]) -> None:
    ours = room()

    class Noted(CompileLock):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int | None]] = []

        def mark_compiled(self) -> None:
            self.calls.append(("mark_compiled", ours.store.attempts(ours.cell.id)[-1].step))

        def release(self) -> None:
            self.calls.append(("release", ours.store.attempts(ours.cell.id)[-1].step))

    def run() -> list[tuple[str, int | None]]:
        job = ours.job("train", ours.settings(), None)
        work = CellRunner(job, ours.runs, DatabaseRecorder(ours.store, job.attempt, job.fence), Flag(None))  # type: ignore[arg-type]
        ours.works.append(work)
        work.compile_lock = turn = Noted()
        work.run(time.monotonic())
        ours.store.interrupt_dead(job.attempt, "killed")
        return turn.calls

    # after the first step, once, however many follow
    assert run() == [("mark_compiled", 0)]
    # the state of the last step is there, so nothing is compiled any more
    assert run() == [("release", STEPS)]


def test_checkpoints_of_a_deleted_database_are_not_resumed(room: Callable[..., Room]) -> None:
    """The same cell under the same attempt number, from another life: its curve would have a hole."""
    ours = room()
    stale = ours.runs / ours.cell.id / "1"
    checkpoint.save(stale, torch.nn.Linear(2, 2), {}, step=9, tokens=1, wall_s=1.0)
    first = ours.run(stop=11)
    assert ours.names(first) == ["checkpoint-00000002", "checkpoint-00000003"]
    second = ours.run()
    assert [point[0] for point in ours.curve(second)] == list(range(1, STEPS + 1))


def test_unrecorded_first_checkpoint_is_resumed(room: Callable[..., Room], far: str) -> None:
    """Killed between the upload and the note about it: its place is known from its config."""
    ours = room()

    def die(_: str) -> None:
        raise KeyboardInterrupt

    job = ours.job("train", ours.settings(path=far), None)
    work = CellRunner(job, ours.runs, DatabaseRecorder(ours.store, job.attempt, job.fence), Flag(None))  # type: ignore[arg-type]
    ours.works.append(work)
    work.recorder.checkpoint = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        work.run(time.monotonic())
    ours.store.interrupt_dead(job.attempt, "killed")
    assert ours.store.attempt(job.attempt).checkpoint is None
    second = ours.run()
    assert [event.message for event in ours.store.events() if event.kind == "resumed"] == ["from step 2 of attempt 1"]
    assert second.state == "done"
    assert ours.names(ours.store.attempt(job.attempt)) == []


def test_failed_checkpoint_removal_is_recorded_as_an_event(
    room: Callable[..., Room], far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = room("checkpoint.every_steps=100")

    remove = MemoryFileSystem.rm

    def fail(self: Any, path: str, **options: Any) -> None:
        if "checkpoint" in path:
            raise ConnectionResetError("gone")
        remove(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "rm", fail)
    done = ours.run(path=far)
    assert done.state == "done"
    (message,) = [event.message for event in ours.store.events() if event.kind == "storage"]
    assert message.startswith(f"old checkpoints could not be removed: {far}/{ours.cell.id}/1 cannot be used: gone; ")


@pytest.fixture
def inexact() -> Iterator[None]:
    """Deterministic operations are off again after the test."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        stack.callback(setattr, torch.backends.cudnn, "deterministic", False)
        stack.callback(torch.use_deterministic_algorithms, False)
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("inexact")
def test_deterministic_attempt_equals_a_normal_run_on_the_cpu(room: Callable[..., Room]) -> None:
    plain, exact = room(), room("train.deterministic=on")
    assert plain.cell.id != exact.cell.id
    expected = plain.curve(plain.run())
    assert not torch.are_deterministic_algorithms_enabled()
    assert exact.curve(exact.run()) == expected
    assert torch.are_deterministic_algorithms_enabled()
    for key in ("clean", "needle", "val", "junk"):
        results, wanted = (
            {(v.metric, v.length): v.value for v in r.store.measurements(r.cell.id) if v.probe == key}
            for r in (exact, plain)
        )
        assert {k: v for k, v in results.items() if k[0] != "peak_memory"} == {
            k: v for k, v in wanted.items() if k[0] != "peak_memory"
        }
