"""Validation, clean and junk: which tokens are read, and what their mean is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.data.batches import DataError
from atma_sweep.sweep.probes import requested
from atma_sweep.sweep.probes.perplexity import stream_loss
from atma_sweep.sweep.probes.subject import evaluating, measure
from torch import Tensor

Rows = list[Tensor]


@pytest.fixture
def silent(rule: Any) -> Any:
    """A stand-in that always says token 97 and remembers what it read."""
    return rule(lambda row: np.full(len(row), 97))


def reference(model: Any, rows: np.ndarray, *, full: bool = True) -> float:
    """Mean loss of rows [B, T + 1], one at a time, through the logits."""
    losses = []
    for row in rows.astype(np.int64):
        tokens = torch.from_numpy(row)
        with torch.no_grad():
            logits = model.logits(model.features(tokens[None, :-1], full_context=full).hidden_BTD)[0]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), tokens[1:]).item())
    return float(np.mean(losses))


# --- clean --------------------------------------------------------------------------------------------------------


def test_clean_reads_nested_prefixes_of_the_first_documents(silent: Any, subject: Any) -> None:
    who = subject(silent)
    list(measure("clean", who, [16, 32, 64]))
    assert [tuple(seen.shape) for seen in silent.seen] == [(3, 16), (3, 32), (3, 64)]
    for length, inputs, targets in zip((16, 32, 64), silent.seen, silent.targets, strict=True):
        for row in range(3):
            whole = who.corpus.heldout[row][: length + 1].tolist()
            assert [*inputs[row].tolist(), targets[row, -1].item()] == whole
            assert targets[row].tolist() == whole[1:]
    short, double = silent.seen[0], silent.seen[1]
    assert torch.equal(double[:, :16], short)
    assert all(silent.full)


@pytest.mark.parametrize("lengths", [(16,), (16, 64), (16, 32, 64, 5000)])
def test_clean_takes_the_first_documents_whatever_lengths_are_asked(silent: Any, subject: Any, lengths: Any) -> None:
    """Lengths of the documents are 63 to 67, so two of the first three lack the 65 tokens that a length of 64 takes."""
    who = subject(silent, held=5, length=63, lengths=lengths)
    ((measured, examples),) = measure("clean", who, [16])
    assert [row.tolist() for row in silent.seen[0]] == [who.corpus.heldout[i][:16].tolist() for i in (0, 1, 2)]
    assert (len(examples), measured[0].n) == (3, 48)


def test_clean_is_the_mean_over_targets_and_documents(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264, window=True).eval()
    who = subject(model)
    for (measured, examples), length in zip(measure("clean", who, [16, 64]), (16, 64), strict=True):
        (value,) = measured
        rows = np.stack([d[: length + 1] for d in who.corpus.heldout[:3]])
        assert (value.probe, value.metric, value.length, value.n, value.unit) == (
            "clean",
            "nats",
            length,
            3 * length,
            "nats/token",
        )
        assert value.value == pytest.approx(reference(model, rows), abs=2e-6)
        assert [e.value for e in examples] == pytest.approx(
            [reference(model, rows[i : i + 1]) for i in range(3)], abs=2e-6
        )
        assert [(e.probe, e.length, e.item) for e in examples] == [("clean", length, i) for i in range(3)]


# --- junk ---------------------------------------------------------------------------------------------------------


def test_junk_reads_rows_from_the_start_that_do_not_overlap(silent: Any, subject: Any) -> None:
    who = subject(silent)
    list(measure("junk", who, [16, 64]))
    for length, inputs, targets in zip((16, 64), silent.seen, silent.targets, strict=True):
        start = who.corpus.validation[: 4 * length + 1].tolist()
        assert inputs.flatten().tolist() == start[:-1]
        assert targets.flatten().tolist() == start[1:]


def test_junk_is_the_mean_over_its_rows(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264).eval()
    who = subject(model)
    ((measured, examples),) = measure("junk", who, [32])
    rows = np.stack([who.corpus.validation[32 * i : 32 * i + 33] for i in range(4)])
    assert (measured[0].n, len(examples)) == (128, 4)
    assert measured[0].value == pytest.approx(reference(model, rows), abs=2e-6)


# --- validation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [False, True])
def test_validation_keeps_the_window_and_full_does_not(network: Any, subject: Any, window: bool) -> None:
    model = network(awake=True, vocab_size=264, window=window).eval()
    who = subject(model)
    ((measured, examples),) = measure("val", who, [0])
    trained, full = measured
    assert [(m.metric, m.length, m.n) for m in measured] == [("val_loss", 0, 299), ("val_loss_full", 0, 299)]
    assert examples == []
    rows = np.stack([who.corpus.validation[13 * i : 13 * i + 14] for i in range(23)])
    assert trained.value == pytest.approx(reference(model, rows, full=False), abs=2e-6)
    assert full.value == pytest.approx(reference(model, rows, full=True), abs=2e-6)
    assert (trained.value == full.value) == (not window)


def test_a_window_as_wide_as_the_row_changes_nothing(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264, window=True, window_size=13).eval()
    trained, full = next(iter(measure("val", subject(model), [0])))[0]
    assert trained.value == pytest.approx(full.value, abs=1e-6)


def test_a_short_validation_split_is_never_a_smaller_sample(network: Any, subject: Any) -> None:
    with pytest.raises(DataError, match="the stream has 299 tokens; 23 rows of 13 need 300"):
        stream_loss(subject(network(vocab_size=264), validation=299), full_context=False)


# --- all of them --------------------------------------------------------------------------------------------------


def test_the_mode_comes_back_after_an_error(network: Any) -> None:
    model = network().train()
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training


def test_rows_of_one_forward(silent: Any, subject: Any) -> None:
    list(measure("junk", subject(silent, chunk_tokens=40), [16, 64]))
    assert [tuple(seen.shape) for seen in silent.seen] == [(2, 16), (2, 16), (1, 64), (1, 64), (1, 64), (1, 64)]
    assert set(silent.chunks) == {40}


def test_what_a_cell_is_asked_for(subject: Callable[..., Any], silent: Any) -> None:
    config = subject(silent, probes=("junk", "val", "needle"), lengths=(8, 16)).config.eval
    assert requested(config) == [("junk", 8), ("junk", 16), ("val", 0), ("needle", 8), ("needle", 16)]


def test_a_probe_can_be_left_between_forwards(subject: Any, silent: Any) -> None:
    """A probe of minutes must not keep its process from leaving when it is asked to."""
    calls = iter((None, None))

    def pause() -> None:
        if next(calls, "leave") == "leave":
            raise InterruptedError

    made = replace(subject(silent, chunk_tokens=16), pause=pause)
    with pytest.raises(InterruptedError):
        list(measure("clean", made, [16]))
    assert len(silent.seen) == 2
