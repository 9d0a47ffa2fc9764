"""Validation, clean and junk: which tokens are read, and what their mean is."""

from __future__ import annotations

import math
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


def test_too_few_documents_is_a_reason_and_no_number(silent: Any, subject: Any) -> None:
    found = list(measure("clean", subject(silent, held=2), [16, 64]))
    for (measured, examples), length in zip(found, (16, 64), strict=True):
        (only,) = measured
        assert (only.probe, only.length, only.value, only.n, examples) == ("clean", length, None, 0, [])
        assert only.reason == f"too-few-docs: 2 of 3 held-out documents have {length + 1} tokens"
    assert silent.seen == []


@pytest.mark.parametrize("probe", ["clean", "junk", "needle"])
def test_a_text_longer_than_the_table_of_positions_is_a_reason_and_no_number(
    network: Any, subject: Any, probe: Any
) -> None:
    """A network without places for it cannot read it; the needle's own text counts."""
    settings = {"positions": "ape", "position_settings": {"ape": {"length": 128}}}
    who = subject(network(vocab_size=264, **settings).eval(), validation=900)
    found = [measured[0] for measured, _ in measure(probe, who, [16, 120, 160])]
    tokens = 160 + (2 * len(" The access code for record 8394266 is 1 0 1 9 0") if probe == "needle" else 0)
    assert [one.value is None for one in found] == [False, probe == "needle", True]
    assert found[-1].reason == f"n/a: positions ape has 128 places, fewer than {tokens} tokens"


def test_only_the_lengths_that_a_document_lacks_go_without_a_number(silent: Any, subject: Any) -> None:
    who = subject(silent, held=5, length=63)
    short, long, exact = (measured[0] for measured, _ in measure("clean", who, [16, 64, 62]))
    assert short.value is not None
    assert exact.value is not None, "the shortest document has 63 tokens, all that a length of 62 takes"
    assert long.reason == "too-few-docs: 1 of 3 held-out documents have 65 tokens"
    assert [tuple(seen.shape) for seen in silent.seen] == [(3, 16), (3, 62)]


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


def test_a_stream_too_short_for_all_rows_is_a_reason_and_no_number(silent: Any, subject: Any) -> None:
    found = [measured[0] for measured, _ in measure("junk", subject(silent, validation=256), [16, 32, 64])]
    assert [m.value is None for m in found] == [False, False, True]
    assert found[2].reason == "too-short: the validation split holds 3 of 4 rows of 64 tokens"
    enough = [measured[0] for measured, _ in measure("junk", subject(silent, validation=257), [64])]
    assert enough[0].value is not None


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


def test_a_uniform_model_loses_ln_v_everywhere(network: Any, subject: Any) -> None:
    who = subject(network(vocab_size=264).eval())
    for probe, lengths in (("val", [0]), ("clean", [16, 64]), ("junk", [16, 64])):
        for measured, _ in measure(probe, who, lengths):
            assert [m.value for m in measured] == pytest.approx([math.log(264)] * len(measured), abs=1e-6)


# --- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["val", "clean", "junk", "needle"])
@pytest.mark.parametrize("training", [False, True])
def test_a_probe_leaves_the_model_as_it_was(network: Any, subject: Any, name: str, training: bool) -> None:
    model = network(awake=True, vocab_size=264, window=True, memory="gated_delta").train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = model.config.model_dump()
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        logits = model(tokens)
    drawn = torch.random.get_rng_state()
    with evaluating(model):
        assert not model.training
        for _ in measure(name, subject(model), [0] if name == "val" else [16, 64]):
            pass
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    assert model.config.model_dump() == config
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    with torch.no_grad():
        assert torch.equal(model(tokens), logits), "the window is still there"


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
