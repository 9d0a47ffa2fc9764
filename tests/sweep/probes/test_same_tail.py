"""Loss on the same last tokens of a document, at several context lengths (docs/mechanisms.md, "Losses")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig
from atma_sweep.sweep.probes import bound, with_settings
from atma_sweep.sweep.probes.perplexity import SameTailConfig
from atma_sweep.sweep.probes.subject import Network, measure

Make = Callable[..., Network]


@pytest.mark.parametrize("settings", [{}, {"last": 5, "end": 61}, {"last": 7, "end": 64}])
def test_against_a_loop_token_by_token(settings: dict[str, int], network: Any, subject: Make) -> None:
    """In float64: every scored token from the whole network's logits, on what stands before it in that context alone."""
    model = network(
        awake=True, vocab_size=264, dtype=torch.float64, attn_type="polar", memory="gated_delta", window=True
    ).eval()
    lengths = (7, 19, 33, 61)
    who = subject(model, lengths=lengths, settings={"same_tail": settings})
    last, end = settings.get("last", 3), settings.get("end", 61)
    for (measured, examples), length in zip(measure("same_tail", who, lengths), lengths, strict=True):
        expected = []
        for document in who.corpus.heldout[:3]:
            context = torch.from_numpy(document[end - length : end].astype(np.int64))[None]
            log_p = model.logits(model.features(context, full_context=True).hidden_BTD)[0].log_softmax(-1)
            losses = [
                -log_p[place - (end - length) - 1, int(document[place])].item()
                for place in range(end - last + 1, end + 1)
            ]
            expected.append(sum(losses) / last)
        assert [example.value for example in examples] == pytest.approx(expected, abs=1e-9)
        assert [(e.metric, e.item, e.position, e.length) for e in examples] == [
            ("nats", i, 0, length) for i in range(3)
        ]
        nats, place = measured
        assert (nats.value, nats.n) == (pytest.approx(np.mean(expected), abs=1e-9), 3 * last)
        assert (place.metric, place.value) == ("end", end)


def test_the_same_targets_at_every_length_at_full_context(rule: Any, subject: Make) -> None:
    model = rule(lambda row: np.roll(row, -1))
    who = subject(model, settings={"same_tail": {"last": 9}})
    list(measure("same_tail", who, [16, 32, 64]))
    tails = {tuple(row) for targets in model.targets for row in targets.tolist()}
    assert tails == {tuple(document[56:65].tolist()) for document in who.corpus.heldout[:3]}
    assert {targets.shape[1] for targets in model.targets} == {9}, "no other target goes through the head"
    assert all(model.full)
    assert sorted({seen.shape[1] for seen in model.seen}) == [16, 32, 64]


def test_the_longest_context_is_the_end_of_the_clean_one(network: Any, subject: Make) -> None:
    """All 64 targets scored at 64 tokens are those of `clean` at 64."""
    model = network(awake=True, vocab_size=264, dtype=torch.float64).eval()
    who = subject(model, settings={"same_tail": {"last": 64}})
    ((clean, *_), _), ((tail, *_), _) = (next(measure(name, who, [64])) for name in ("clean", "same_tail"))
    assert tail.value == pytest.approx(clean.value, abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "last", "end"),
    [((16, 32), 8, 32), ((2, 3), 1, 3), ((2048, 65536), 512, 65536), ((128, 1024), 64, 1024)],
)
def test_what_nothing_is_said_of_follows_from_the_lengths(lengths: tuple[int, ...], last: int, end: int) -> None:
    known = with_settings(EvalConfig(probes=("same_tail",), lengths=lengths))
    assert known.settings["same_tail"] == {"last": last, "end": end}
    # an evaluation of other lengths scores the same tokens
    later = with_settings(known.model_copy(update={"lengths": (lengths[0], 7 * lengths[-1])}))
    assert later.settings["same_tail"] == {"last": last, "end": end}
    assert SameTailConfig(last=3).settled((16, 32)) == SameTailConfig(last=3, end=32)


def test_a_plan_hears_of_it(subject: Make, network: Any) -> None:
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
