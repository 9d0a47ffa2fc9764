"""Records of an attempt about its probes: cost, peak memory, reasons, and examples that reproduce every number."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.results.intervals import wilson
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Measurement, Owner
from atma_sweep.results.store.schema import ExampleRow
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.attempt import base_runner as module
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.grid.settings import levels_of
from atma_sweep.sweep.host.hardware import peak_resident, reset_peak_resident
from atma_sweep.sweep.probes import requested
from atma_sweep.sweep.probes.needle import NeedleConfig, make_trials
from sqlalchemy import select

Attempt = Callable[[Any], CellRunner]
Measured = dict[tuple[str, str, int], Any]
MEASURABLE = reset_peak_resident()
"""Whether this system tells the peak of a process, as Linux does."""


@pytest.fixture
def attempt(store: Store, tmp_path: Path) -> Attempt:
    """Fixture: a function from a subject to the runner of an attempt that measures everything."""

    def start(who: Any) -> CellRunner:
        dump = who.config.model_dump(mode="json")
        cell = CellRecord(id="c" * 12, slug="c", seed=0, levels=levels_of(who.config), config=dump)
        store.record_revision("s", grid_text="x", grid_file="x.yaml", cells=[cell])
        running = store.start_attempt(cell.id, owner=Owner(name="ada", host="here", pid=1, started=1.5), fence=1)
        job = Job(
            attempt=running.id, fence=1, cell=cell.id, slug="c", kind="train", folder=running.run_dir, config=dump,
            missing=requested(who.config.eval), resume=[],
        )  # fmt: skip
        return CellRunner(job, tmp_path, DatabaseRecorder(store, running.id, 1), SimpleNamespace(set=False))

    return start


def measured(store: Store) -> Measured:
    """Return every measurement of the attempt, after closing it."""
    store.finish_attempt(1, 1, "done")
    return {(value.probe, value.metric, value.length): value for value in store.measurements("c" * 12)}


def probe_with(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], Any]) -> None:
    """Replace every probe: its n-th call performs the n-th act and then measures 1.0."""
    remaining_acts = iter(acts)

    def probe(subject: Any, lengths: Iterable[int]) -> Iterator[Any]:
        for length in lengths:
            result = next(remaining_acts)()
            yield [Measurement(probe="clean", metric="nats", length=length, value=1.0, n=1)], []
            del result

    monkeypatch.setattr(module, "run_probe", lambda name, subject, lengths: probe(subject, lengths))


# --- cost ---------------------------------------------------------------------------------------------------------


def test_peak_memory_is_recorded_for_every_length(network: Any, subject: Any, attempt: Attempt, store: Store) -> None:
    who = subject(network(vocab_size=264), lengths=(16, 64))
    attempt(who).run_probes(who)
    measured_values = measured(store)
    peaks = {key: value for key, value in measured_values.items() if key[1] == "peak_memory"}
    wanted = [(probe, "peak_memory", length) for probe in ("clean", "junk", "needle") for length in (16, 64)]
    assert sorted(peaks) == (sorted(wanted) if MEASURABLE else [])
    for (probe, _, length), value in peaks.items():
        assert (value.unit, value.reason) == ("bytes", None)
        assert 2**25 < value.value < 2**40, "at least what torch itself takes"
        neighbours = [neighbour for key, neighbour in measured_values.items() if (key[0], key[2]) == (probe, length)]
        assert {neighbour.peak_memory for neighbour in neighbours} == {value.value}
        assert all(neighbour.seconds > 0 for neighbour in neighbours)
    assert (measured_values["val", "val_loss", 0].peak_memory is not None) == MEASURABLE


def test_peak_memory_belongs_to_its_probe(
    network: Any, subject: Any, attempt: Attempt, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 256 * 2**20
    probe_with(monkeypatch, lambda: None, lambda: np.ones(size // 8), lambda: None)
    who = subject(network(vocab_size=264), lengths=(16, 32, 64), probes=("clean",))
    attempt(who).run_probes(who)
    measured_values = measured(store)
    low, high, after = (measured_values["clean", "nats", length].peak_memory for length in (16, 32, 64))
    if MEASURABLE:
        assert 0.95 * size < high - low < 1.2 * size
        assert abs(after - low) < 0.05 * size, "the peak starts anew"
    else:
        assert (low, high, after) == (None, None, None)


def test_peak_memory_is_absent_if_unsupported(
    network: Any, subject: Any, attempt: Attempt, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "reset_peak_resident", lambda: False)
    who = subject(network(vocab_size=264), lengths=(16,), probes=("junk",))
    attempt(who).run_probes(who)
    measured_values = measured(store)
    assert list(measured_values) == [("junk", "nats", 16)]
    assert measured_values["junk", "nats", 16].peak_memory is None


def test_peak_resident_grows_with_allocation() -> None:
    if not MEASURABLE:
        assert not Path("/proc/self/clear_refs").exists()
        return
    reset_peak_resident()
    before = peak_resident()
    held = np.ones(2**23)
    assert before is not None
    assert peak_resident() - before > 0.95 * held.nbytes
    del held
    assert reset_peak_resident()
    assert peak_resident() - before < 2**24


def test_descriptions_hold_differences_between_cells(
    network: Any, subject: Any, attempt: Attempt, store: Store
) -> None:
    """Stored are the chance level of these digits and the answers per trial; no source and no other description."""
    who = subject(network(vocab_size=264), lengths=(16,), needle_trials=2, needle_digits=2)
    attempt(who).run_probes(who)
    digits = [digit for trial in make_trials(NeedleConfig(trials=2, digits=2)) for digit in trial.digits]
    descriptions = {key: value.description for key, value in measured(store).items() if value.description}
    assert descriptions == {
        ("needle", "digit_accuracy", 16): {"chance": max(map(digits.count, digits)) / 4, "trials": 2}
    }
    assert {value.source for value in store.measurements("c" * 12)} == {None}


# --- out of memory ------------------------------------------------------------------------------------------------


def refuse(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(("act", "reason"), [
    (refuse(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nOf it...")),
     "oom: CUDA out of memory. Tried to allocate 9.00 GiB."),
    (lambda: torch.empty(2**50), "DefaultCPUAllocator: can't allocate memory"),
    (lambda: np.empty(2**56), "oom: Unable to allocate 512. PiB"),
    (refuse(MemoryError()), "oom: MemoryError"),
])  # fmt: skip
def test_out_of_memory_length_is_recorded_and_skipped(
    network: Any,
    subject: Any,
    attempt: Attempt,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], Any],
    reason: str,
) -> None:
    probe_with(monkeypatch, act, lambda: None)
    who = subject(network(vocab_size=264), lengths=(16, 32), probes=("clean",))
    attempt(who).run_probes(who)
    measured_values = measured(store)
    lost = measured_values["clean", "nats", 16]
    assert (lost.value, lost.unit, lost.n) == (None, "nats/token", 0)
    assert lost.reason.startswith("oom: ")
    assert reason in lost.reason
    assert "\n" not in lost.reason
    assert measured_values["clean", "nats", 32].value == 1.0
    if MEASURABLE:
        assert (measured_values["clean", "peak_memory", 16].value, measured_values["clean", "peak_memory", 16].reason) == (
            None, lost.reason,
        )  # fmt: skip
        assert measured_values["clean", "peak_memory", 32].value > 0


def test_probes_continue_after_out_of_memory(
    network: Any, subject: Any, attempt: Attempt, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(awake=True, vocab_size=264)
    features, longest = model.features, 120

    def small(tokens_BT: torch.Tensor, **options: Any) -> Any:
        if tokens_BT.shape[1] > longest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return features(tokens_BT, **options)

    monkeypatch.setattr(model, "features", small)
    who = subject(model, lengths=(16, 150), length=200)
    attempt(who).run_probes(who)
    measured_values = measured(store)
    for probe, metric in (("clean", "nats"), ("junk", "nats"), ("needle", "digit_accuracy")):
        assert measured_values[probe, metric, 16].value is not None
        assert measured_values[probe, metric, 150].reason == "oom: CUDA out of memory."
    assert measured_values["val", "val_loss", 0].value is not None
    with store.transaction(write=False) as session:
        assert set(session.scalars(select(ExampleRow.length))) == {16}


@pytest.mark.gpu
def test_cuda_continues_after_out_of_memory(network: Any, subject: Any, attempt: Attempt, store: Store) -> None:
    """Logits of 500 tokens fit next to the allocated memory, those of 40,000 do not; the later probe is measured."""
    cuda = torch.device("cuda")
    model = network(awake=True, vocab_size=50_304).to(cuda)
    settings = {"lengths": (16, 40_000), "documents": 1, "junk_rows": 1, "chunk_tokens": 50_000}
    who = replace(subject(model, length=41_000, validation=41_000, probes=("clean", "junk"), **settings), device=cuda)
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2 * 2**30  # earlier tests of this process may hold memory
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(cuda).total_memory)
    try:
        attempt(who).run_probes(who)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    measured_values = measured(store)
    for probe in ("clean", "junk"):
        assert measured_values[probe, "nats", 16].value is not None
        assert 0 < measured_values[probe, "peak_memory", 16].value < limit
        assert measured_values[probe, "nats", 40_000].reason.startswith("oom: CUDA out of memory")
        assert measured_values[probe, "peak_memory", 40_000].value is None


def test_probe_errors_pass_through(
    network: Any, subject: Any, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_with(monkeypatch, refuse(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    who = subject(network(vocab_size=264), lengths=(16,), probes=("clean",))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        attempt(who).run_probes(who)


def test_peak_memory_is_absent_with_too_few_documents(
    network: Any, subject: Any, attempt: Attempt, store: Store
) -> None:
    who = subject(network(vocab_size=264), lengths=(16, 64), length=40, probes=("clean",))
    attempt(who).run_probes(who)
    measured_values = measured(store)
    reason = "too-few-docs: 0 of 3 held-out documents have 65 tokens"
    assert {value.reason for key, value in measured_values.items() if key[2] == 64} == {reason}
    assert measured_values["clean", "nats", 16].value is not None


# --- examples -----------------------------------------------------------------------------------------------------


def stored(store: Store, probe: str, metric: str, length: int) -> dict[tuple[int, int], float]:
    """Return the stored values by (item, position)."""
    chosen = select(ExampleRow).where(
        ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length
    )
    with store.transaction(write=False) as session:
        return {(row.item, row.position): row.value for row in session.scalars(chosen)}


def test_stored_examples_reproduce_means_and_intervals(
    network: Any, subject: Any, attempt: Attempt, store: Store
) -> None:
    who = subject(network(awake=True, vocab_size=264, memory="gated_delta"), lengths=(16, 64), needle_trials=7)
    attempt(who).run_probes(who)
    measured_values = measured(store)
    for length in (16, 64):
        for probe, items in (("clean", 3), ("junk", 4)):
            rows = stored(store, probe, "nats", length)
            assert sorted(rows) == [(item, 0) for item in range(items)]
            assert np.mean(list(rows.values())) == pytest.approx(
                measured_values[probe, "nats", length].value, rel=1e-14
            )
        digits = stored(store, "needle", "digit_accuracy", length)
        losses = stored(store, "needle", "nats", length)
        assert sorted(digits) == sorted(losses) == [(item, digit) for item in range(7) for digit in range(5)]
        assert np.mean(list(losses.values())) == pytest.approx(
            measured_values["needle", "nats", length].value, rel=1e-14
        )
        rebuilt(measured_values, digits, length)


def rebuilt(measured_values: Measured, digits: dict[tuple[int, int], float], length: int) -> float:
    """Check both accuracies and their intervals against the digits' hits, and return the exact accuracy."""
    assert set(digits.values()) <= {0.0, 1.0}
    trials = sorted({item for item, _ in digits})
    exact = [min(digits[item, digit] for digit in range(5)) for item in trials]
    for metric, hits in (("digit_accuracy", list(digits.values())), ("exact_accuracy", exact)):
        value = measured_values["needle", metric, length]
        assert (value.value, value.n) == (pytest.approx(np.mean(hits), rel=1e-14), len(hits))
        # the digits of a trial are correlated: there are as many independent answers as trials
        interval = wilson(np.mean(hits) * len(trials), len(trials))
        assert (value.low, value.high) == pytest.approx(interval, rel=1e-12)
    return float(np.mean(exact))


def test_stored_examples_reproduce_exact_accuracy(rule: Any, subject: Any, attempt: Attempt, store: Store) -> None:
    """The oracle misses the last digit after every odd key. The needle is at the front, after end of text."""
    key_ends, pair = len(" The access code for record 1234567"), len(" The access code for record 1234567 is 1 2 3 4 5")

    def mostly(row: np.ndarray) -> np.ndarray:
        return np.append(row[1:], 97 if row[key_ends] % 2 else row[pair])

    who = subject(rule(mostly), needle_trials=7, lengths=(16,), probes=("needle",))
    attempt(who).run_probes(who)
    digits = stored(store, "needle", "digit_accuracy", 16)
    even = [1.0 - int(trial.cue.split()[-2]) % 2 for trial in make_trials(NeedleConfig(trials=7))]
    assert 0 < sum(even) < 7
    assert digits == {(item, digit): 1.0 if digit < 4 else even[item] for item in range(7) for digit in range(5)}
    assert rebuilt(measured(store), digits, 16) == pytest.approx(sum(even) / 7)


def test_cells_read_same_needles_and_documents(rule: Any, subject: Any) -> None:
    """For any seed and mixer of the cells, item i of one cell is item i of the other."""
    reads = []
    for settings in ({"seed": 0}, {"seed": 7}, {"seed": 7, "chunk_tokens": 100}, {"lengths": (16, 64, 128)}):
        model = rule(lambda row: np.full(len(row), 97))
        who = subject(model, **settings)
        seen_inputs = [
            (e.probe, e.metric, e.length, e.item, e.position)
            for name in ("clean", "junk", "needle")
            for _, examples in module.run_probe(name, who, [16, 64])
            for e in examples
        ]
        rows = [row.tolist() for tokens in model.seen for row in tokens]
        reads.append((seen_inputs, rows))
    assert len(reads[0][1]) == 2 * (3 + 4 + 6) + 6
    assert all(read == reads[0] for read in reads)
