"""Validation, clean, junk and same_tail: tokens that are read, and means of their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig
from atma_sweep.sweep.data.batches import DataError
from atma_sweep.sweep.probes import bound, requested, with_settings
from atma_sweep.sweep.probes.perplexity import SameTailConfig, stream_loss
from atma_sweep.sweep.probes.subject import evaluating, run_probe
from torch import Tensor

Rows = list[Tensor]


@pytest.fixture
def silent(rule: Any) -> Any:
    """Stand-in that always predicts token 97 and records its input."""
    return rule(lambda row: np.full(len(row), 97))


def reference(model: Any, rows: np.ndarray, *, full: bool = True) -> float:
    """Return the mean loss of rows [B, T + 1], one at a time, from the logits."""
    losses = []
    for row in rows.astype(np.int64):
        tokens = torch.from_numpy(row)
        with torch.no_grad():
            logits = model.logits(model.features(tokens[None, :-1], full_context=full).hidden_BTD)[0]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), tokens[1:]).item())
    return float(np.mean(losses))


# --- clean --------------------------------------------------------------------------------------------------------


def test_clean_reads_prefixes_of_first_documents(silent: Any, subject: Any) -> None:
    who = subject(silent)
    list(run_probe("clean", who, [16, 32, 64]))
    assert [tuple(seen.shape) for seen in silent.seen] == [(3, 16), (3, 32), (3, 64)]
    for length, inputs, targets in zip((16, 32, 64), silent.seen, silent.targets, strict=True):
        for row in range(3):
            document = who.corpus.heldout[row][: length + 1].tolist()
            assert [*inputs[row].tolist(), targets[row, -1].item()] == document
            assert targets[row].tolist() == document[1:]
    short, double = silent.seen[0], silent.seen[1]
    assert torch.equal(double[:, :16], short)
    assert all(silent.full)


@pytest.mark.parametrize("lengths", [(16,), (16, 64), (16, 32, 64, 5000)])
def test_clean_documents_do_not_depend_on_lengths(silent: Any, subject: Any, lengths: Any) -> None:
    """Documents have 63 to 67 tokens, so two of the first three lack the 65 tokens for a length of 64."""
    who = subject(silent, held=5, length=63, lengths=lengths)
    ((measured, examples),) = run_probe("clean", who, [16])
    assert [row.tolist() for row in silent.seen[0]] == [who.corpus.heldout[i][:16].tolist() for i in (0, 1, 2)]
    assert (len(examples), measured[0].n) == (3, 48)


def test_clean_is_mean_over_targets_and_documents(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264, window=True).eval()
    who = subject(model)
    for (measured, examples), length in zip(run_probe("clean", who, [16, 64]), (16, 64), strict=True):
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


def test_junk_reads_disjoint_rows_from_start(silent: Any, subject: Any) -> None:
    who = subject(silent)
    list(run_probe("junk", who, [16, 64]))
    for length, inputs, targets in zip((16, 64), silent.seen, silent.targets, strict=True):
        start = who.corpus.validation[: 4 * length + 1].tolist()
        assert inputs.flatten().tolist() == start[:-1]
        assert targets.flatten().tolist() == start[1:]


def test_junk_is_mean_over_rows(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264).eval()
    who = subject(model)
    ((measured, examples),) = run_probe("junk", who, [32])
    rows = np.stack([who.corpus.validation[32 * i : 32 * i + 33] for i in range(4)])
    assert (measured[0].n, len(examples)) == (128, 4)
    assert measured[0].value == pytest.approx(reference(model, rows), abs=2e-6)


# --- same tail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"last": 5, "end": 61}, {"last": 7, "end": 64}])
def test_same_tail_matches_loop_over_tokens(settings: dict[str, int], network: Any, subject: Any) -> None:
    """In float64, every scored token is predicted from the tokens before it in its context alone."""
    model = network(
        awake=True, vocab_size=264, dtype=torch.float64, attn_type="polar", memory="gated_delta", window=True
    ).eval()
    lengths = (7, 19, 33, 61)
    who = subject(model, lengths=lengths, settings={"same_tail": settings})
    last, end = settings.get("last", 3), settings.get("end", 61)
    for (measured, examples), length in zip(run_probe("same_tail", who, lengths), lengths, strict=True):
        expected = []
        for document in who.corpus.heldout[:3]:
            context = torch.from_numpy(document[end - length : end].astype(np.int64))[None]
            log_p = model.logits(model.features(context, full_context=True).hidden_BTD)[0].log_softmax(-1)
            losses = [
                -log_p[position - (end - length) - 1, int(document[position])].item()
                for position in range(end - last + 1, end + 1)
            ]
            expected.append(sum(losses) / last)
        assert [example.value for example in examples] == pytest.approx(expected, abs=1e-9)
        assert [(e.metric, e.item, e.position, e.length) for e in examples] == [
            ("nats", i, 0, length) for i in range(3)
        ]
        nats, end_measurement = measured
        assert (nats.value, nats.n) == (pytest.approx(np.mean(expected), abs=1e-9), 3 * last)
        assert (end_measurement.metric, end_measurement.value) == ("end", end)


def test_same_tail_has_same_targets_at_every_length(rule: Any, subject: Any) -> None:
    model = rule(lambda row: np.roll(row, -1))
    who = subject(model, settings={"same_tail": {"last": 9}})
    list(run_probe("same_tail", who, [16, 32, 64]))
    tails = {tuple(row) for targets in model.targets for row in targets.tolist()}
    assert tails == {tuple(document[56:65].tolist()) for document in who.corpus.heldout[:3]}
    assert {targets.shape[1] for targets in model.targets} == {9}, "no other target goes through the head"
    assert all(model.full)
    assert sorted({seen.shape[1] for seen in model.seen}) == [16, 32, 64]


def test_same_tail_of_all_tokens_is_clean_loss(network: Any, subject: Any) -> None:
    """The 64 targets scored at 64 tokens are those of `clean` at 64."""
    model = network(awake=True, vocab_size=264, dtype=torch.float64).eval()
    who = subject(model, settings={"same_tail": {"last": 64}})
    ((clean, *_), _), ((tail, *_), _) = (next(run_probe(name, who, [64])) for name in ("clean", "same_tail"))
    assert tail.value == pytest.approx(clean.value, abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "last", "end"),
    [((16, 32), 8, 32), ((2, 3), 1, 3), ((2048, 65536), 512, 65536), ((128, 1024), 64, 1024)],
)
def test_same_tail_settings_follow_lengths(lengths: tuple[int, ...], last: int, end: int) -> None:
    completed = with_settings(EvalConfig(probes=("same_tail",), lengths=lengths))
    assert completed.settings["same_tail"] == {"last": last, "end": end}
    # an evaluation of other lengths scores the same tokens
    later = with_settings(completed.model_copy(update={"lengths": (lengths[0], 7 * lengths[-1])}))
    assert later.settings["same_tail"] == {"last": last, "end": end}
    assert SameTailConfig(last=3).settled((16, 32)) == SameTailConfig(last=3, end=32)


def test_lack_of_same_tail_names_end(subject: Any, network: Any) -> None:
    who = subject(network(vocab_size=264).eval(), settings={"same_tail": {"end": 300}})
    probe = bound("same_tail", who.config)
    assert probe.longest(who.corpus) == 0
    assert "301 tokens" in str(probe.lack(who.corpus, 64))
    probe = bound(
        "same_tail", CellConfig(eval=EvalConfig(lengths=(16, 64), documents=3, settings={"same_tail": {"end": 32}}))
    )
    assert probe.longest(who.corpus) == 32
    assert probe.lack(who.corpus, 32) is None
    assert "raise eval.settings.same_tail.end" in str(probe.lack(who.corpus, 64))


# --- validation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [False, True])
def test_validation_uses_window_and_full_does_not(network: Any, subject: Any, window: bool) -> None:
    model = network(awake=True, vocab_size=264, window=window).eval()
    who = subject(model)
    ((measured, examples),) = run_probe("val", who, [0])
    trained, full = measured
    assert [(m.metric, m.length, m.n) for m in measured] == [("val_loss", 0, 299), ("val_loss_full", 0, 299)]
    assert examples == []
    rows = np.stack([who.corpus.validation[13 * i : 13 * i + 14] for i in range(23)])
    assert trained.value == pytest.approx(reference(model, rows, full=False), abs=2e-6)
    assert full.value == pytest.approx(reference(model, rows, full=True), abs=2e-6)
    assert (trained.value == full.value) == (not window)


def test_validation_with_window_of_row_length(network: Any, subject: Any) -> None:
    model = network(awake=True, vocab_size=264, window=True, window_size=13).eval()
    trained, full = next(iter(run_probe("val", subject(model), [0])))[0]
    assert trained.value == pytest.approx(full.value, abs=1e-6)


def test_validation_rejects_short_split(network: Any, subject: Any) -> None:
    with pytest.raises(DataError, match="the stream has 299 tokens; 23 rows of 13 need 300"):
        stream_loss(subject(network(vocab_size=264), validation=299), full_context=False)


# --- all probes ---------------------------------------------------------------------------------------------------


def test_evaluating_restores_mode_after_error(network: Any) -> None:
    model = network().train()
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training


def test_batches_of_rows_per_forward(silent: Any, subject: Any) -> None:
    list(run_probe("junk", subject(silent, chunk_tokens=40), [16, 64]))
    assert [tuple(seen.shape) for seen in silent.seen] == [(2, 16), (2, 16), (1, 64), (1, 64), (1, 64), (1, 64)]
    assert set(silent.chunks) == {40}


def test_requested_pairs_of_cell(subject: Callable[..., Any], silent: Any) -> None:
    config = subject(silent, probes=("junk", "val", "needle"), lengths=(8, 16)).config.eval
    assert requested(config) == [("junk", 8), ("junk", 16), ("val", 0), ("needle", 8), ("needle", 16)]


def test_probe_can_be_stopped_between_forwards(subject: Any, silent: Any) -> None:
    """A probe that takes minutes must not delay a requested stop of its process."""
    calls = iter((None, None))

    def pause() -> None:
        if next(calls, "leave") == "leave":
            raise InterruptedError

    paused = replace(subject(silent, chunk_tokens=16), pause=pause)
    with pytest.raises(InterruptedError):
        list(run_probe("clean", paused, [16]))
    assert len(silent.seen) == 2
