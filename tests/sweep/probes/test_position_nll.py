"""Loss by position in the document (docs/reference/mechanisms.md, "Losses")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.probes.subject import CellSubject, run_probe

Make = Callable[..., CellSubject]


@pytest.mark.parametrize(("length", "size"), [(64, 16), (61, 16), (61, 7), (13, 256), (17, 1)])
def test_position_nll_weighted_bins_are_clean_loss(length: int, size: int, network: Any, subject: Make) -> None:
    model = network(awake=True, vocab_size=264, attn_type="polar", memory="gated_delta", window=True).eval()
    who = subject(model, lengths=(length,), settings={"position_nll": {"bin": size}})
    ((clean, *_), documents), ((nats, end, run), bins) = (
        next(run_probe(p, who, [length])) for p in ("clean", "position_nll")
    )
    assert (nats.value, nats.n) == (clean.value, clean.n), "to the last bit"
    assert run.value == size
    sizes = [min(size, length - start) for start in range(0, length, size)]
    assert [(e.item, e.position) for e in bins] == [
        (item, position) for position in range(len(sizes)) for item in range(3)
    ]
    of = np.array([e.value for e in bins]).reshape(len(sizes), 3)
    weights = np.array(sizes) / length
    assert weights @ of == pytest.approx([e.value for e in documents], abs=1e-12)
    assert (weights @ of).mean() == pytest.approx(clean.value, abs=1e-12)
    assert (end.value, end.n) == (pytest.approx(of[-1].mean(), abs=1e-12), 3 * sizes[-1])


def test_position_nll_bins_match_loop_over_tokens(network: Any, subject: Make) -> None:
    """In float64, from the logits of the complete network."""
    model = network(awake=True, vocab_size=264, dtype=torch.float64).eval()
    who = subject(model, settings={"position_nll": {"bin": 8}})
    (_, short), (_, long) = run_probe("position_nll", who, [24, 41])
    for item, document in enumerate(who.corpus.heldout[:3]):
        tokens = torch.from_numpy(document[:42].astype(np.int64))[None]
        log_p = model.logits(model.features(tokens[:, :-1], full_context=True).hidden_BTD)[0].log_softmax(-1)
        losses = [-log_p[position, int(tokens[0, position + 1])].item() for position in range(41)]
        expected = [np.mean(losses[start : start + 8]) for start in range(0, 41, 8)]
        assert [e.value for e in long if e.item == item] == pytest.approx(expected, abs=1e-9)
        assert [e.value for e in short if e.item == item] == pytest.approx(expected[:3], abs=1e-9)


def test_position_nll_shows_where_rule_fails(rule: Any, subject: Make) -> None:
    """The rule is right up to token 32, and then predicts a token that never occurs."""
    model = rule(lambda row: np.where(np.arange(len(row)) < 32, np.roll(row, -1), 0))
    who = subject(model, settings={"position_nll": {"bin": 16}})
    ((_, end, _), examples) = next(run_probe("position_nll", who, [64]))
    at = [np.mean([e.value for e in examples if e.position == position]) for position in range(4)]
    assert max(at[:2]) < 1e-3
    assert min(at[2:]) > 19
    assert end.value == pytest.approx(at[3])
    assert all(model.full)
