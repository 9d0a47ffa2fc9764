"""Retention of gates (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.data.batches import stream_rows
from atma_sweep.sweep.probes.diagnostics.gate_dynamics import THRESHOLDS, evictable_shares
from atma_sweep.sweep.probes.subject import CellSubject, run_probe
from torch.nn import functional

Make = Callable[..., CellSubject]
ROWS, LENGTH = 5, 13


def measure_gates(who: CellSubject) -> tuple[dict[str, Any], dict[tuple[str, int, int], float]]:
    ((numbers, examples),) = run_probe("gates", who, (0,))
    return {m.metric: m for m in numbers}, {(e.metric, e.item, e.position): e.value for e in examples}


def inputs_of_mixers(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the input of each global block's mixer, from the network's own features."""
    seen: list[torch.Tensor] = []
    hooks = [
        block.mix.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for layer, block in enumerate(model.blocks) if model.config.is_global(layer)
    ]  # fmt: skip
    model.train()
    model.features(tokens, full_context=True)
    model.eval()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_gates_of_fox_and_memory_match_formulas(network: Any, subject: Make, chunk: int) -> None:
    """Each head's gate is exp mean logsigmoid(W x + b), in float64; the logit of the memory is 3.9 higher."""
    model = network(
        awake=True, vocab_size=264, dtype=torch.float64, attn_type="fox", memory="gated_delta", n_layers=7, attn_every=3
    ).eval()
    who = subject(model, chunk_tokens=chunk, settings={"gates": {"rows": ROWS}})
    numbers, gates = measure_gates(who)
    layers = [layer for layer in range(7) if model.config.is_global(layer)]
    assert len(layers) == 2
    tokens, _ = stream_rows(who.corpus.validation, LENGTH, ROWS)
    with torch.no_grad():
        inputs = inputs_of_mixers(model, tokens)
    every, of_memory = [], []
    for layer, x in zip(layers, inputs, strict=True):
        mix = model.blocks[layer].mix
        logit = x @ mix.mixer.gate.weight.double().T + mix.mixer.gate.offset.double()
        retention = functional.logsigmoid(logit).mean((0, 1))
        every.append(retention)
        of_memory.append(functional.logsigmoid(mix.memory.w_gamma(x) + 3.9).mean((0, 1)))
        for name, logs in (("retention", retention), ("memory", of_memory[-1])):
            assert [gates.pop((name, layer, head)) for head in range(model.config.n_heads)] == pytest.approx(
                logs.exp().tolist(), abs=1e-12
            )
    assert gates == {}
    logs = torch.cat(every)
    for name, log in (("retention", logs.mean()), ("lowest", logs.min()), ("highest", logs.max())):
        assert (numbers[name].value, numbers[name].n) == (pytest.approx(log.exp().item(), abs=1e-12), ROWS * LENGTH)
    assert numbers["memory"].value == pytest.approx(torch.cat(of_memory).mean().exp().item(), abs=1e-12)
    assert numbers["channels"].value == 1


@pytest.mark.parametrize("source", ["input", "keys"])
def test_gates_of_wall_are_per_channel(network: Any, subject: Make, source: str) -> None:
    """With zero weights every gate is sigmoid(bias), softly clamped; one raised offset is one channel of one head."""
    settings = {"wall": {"gate_source": source, "g_max": 0.5, "gate_bias": 1.0}}
    model = network(vocab_size=264, attn_type="wall", mixers=settings).eval()
    mixer = next(block.mix.mixer for layer, block in enumerate(model.blocks) if model.config.is_global(layer))
    with torch.no_grad():
        mixer.gate.weight.zero_()
        mixer.gate.offset.view(mixer.gate_heads, mixer.size)[1, 3] = 50.0
    numbers, gates = measure_gates(subject(model))
    plain = functional.logsigmoid(torch.tensor(1.0))
    clamped = float((0.5 * torch.expm1(plain / 0.5)).exp())
    mine = {position: value for (_, _, position), value in gates.items()}
    assert numbers["channels"].value == mixer.size
    assert mine.pop(mixer.size + 3) == pytest.approx(1.0, abs=1e-6) == numbers["highest"].value
    assert len(mine) == mixer.gate_heads * mixer.size - 1
    assert list(mine.values()) == pytest.approx([clamped] * len(mine), abs=1e-6)
    assert numbers["lowest"].value == pytest.approx(clamped, abs=1e-6)


@pytest.mark.parametrize("tie", ["head", "shared"])
def test_gates_of_tra_are_per_head_or_shared(network: Any, subject: Make, tie: str) -> None:
    model = network(awake=True, vocab_size=264, attn_type="tra", mixers={"tra": {"tie_gate": tie}}).eval()
    _, gates = measure_gates(subject(model))
    assert len(gates) == (model.config.n_heads if tie == "head" else 1)
    assert all(0 < value < 1 for value in gates.values())


def test_gates_of_memory_under_mixer_without_gates(network: Any, subject: Make) -> None:
    numbers, gates = measure_gates(subject(network(vocab_size=264, attn_type="nope", memory="gated_delta").eval()))
    assert {name: m.reason for name, m in numbers.items()} == {
        **dict.fromkeys(("retention", "lowest", "highest", "channels"), "n/a: mixer nope has no gates"), "memory": None,
    }  # fmt: skip
    assert {metric for metric, _, _ in gates} == {"memory"}
    numbers, gates = measure_gates(subject(network(vocab_size=264, attn_type="nope").eval()))
    assert numbers["memory"].reason == "n/a: the network has no memory with gates"
    assert gates == {}


# --- gate_dynamics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixer", "chunk"), [("wall", 30), ("fox", 10_000)])
def test_gate_dynamics_match_the_gates_of_every_token(network: Any, subject: Make, mixer: str, chunk: int) -> None:
    """Against numpy over the mixer's own gates at each token; `chunk` splits the rows into batches."""
    model = network(awake=True, vocab_size=264, dtype=torch.float64, attn_type=mixer, n_layers=7, attn_every=3).eval()
    settings = {"gate_dynamics": {"rows": ROWS, "bins": 4, "trace": 6}}
    who = subject(model, chunk_tokens=chunk, settings=settings)
    ((measured, examples),) = run_probe("gate_dynamics", who, (0,))
    numbers = {m.metric: m.value for m in measured}
    tokens = who.validation_rows(ROWS)
    assert isinstance(tokens, torch.Tensor)
    layers = [layer for layer in range(7) if model.config.is_global(layer)]
    gates = []
    with torch.no_grad():
        for layer, x in zip(layers, inputs_of_mixers(model, tokens), strict=True):
            # the gates of this test read the block's input; keys matter by their shape alone
            k = torch.zeros(ROWS, LENGTH, model.config.n_kv_heads, model.config.head_dim, dtype=torch.float64)
            log = model.blocks[layer].mix.mixer.log_gates(x_BTD=x, k_BTJX=k)
            gates.append((log if log.ndim == 4 else log[..., None]).exp().numpy().reshape(ROWS, LENGTH, -1))
    every = np.concatenate(gates, -1)
    assert numbers["mean"] == pytest.approx(every.mean(), abs=1e-12)
    assert numbers["spread"] == pytest.approx(every.std((0, 1)).mean(), abs=1e-10)
    on = (every.mean((0, 1)) > 0.99) & (every.std((0, 1)) < 0.01)
    assert numbers["always_on"] == on.mean()
    assert (numbers["bin"], numbers["trace"]) == (4, 6)
    assert numbers["channels"] == (model.config.head_dim if mixer == "wall" else 1)
    evictable = [e for e in examples if e.metric == "evictable"]
    assert [e.item for e in evictable] == [layer for layer in layers for _ in THRESHOLDS]
    assert numbers["evictable"] == pytest.approx(
        np.mean([e.value for e in evictable if (e.detail or {})["threshold"] == 1e-3])
    )
    of = {(e.metric, e.item, e.position): e for e in examples}
    for layer, gate in zip(layers, gates, strict=True):
        for channel in range(gate.shape[-1]):
            assert of["mean", layer, channel].value == pytest.approx(gate[..., channel].mean(), abs=1e-12)
            assert of["spread", layer, channel].value == pytest.approx(gate[..., channel].std(), abs=1e-10)
        for index, start in enumerate(range(0, LENGTH, 4)):
            assert of["bin", layer, index].value == pytest.approx(gate[:, start : start + 4].mean(), abs=1e-12)
        traced = [e for e in examples if (e.metric, e.item) == ("trace", layer)]
        order = gate.std((0, 1)).argsort()
        assert len(traced) == 12
        for example in traced:
            detail = example.detail or {}
            channel = detail["head"] * int(numbers["channels"] or 0) + detail["channel"]
            assert channel in (order[0], order[-1])
            assert example.value == pytest.approx(gate[0, detail["token"], channel], abs=1e-12)


def test_evictable_keys_are_those_with_all_channels_faded() -> None:
    """Counts, key by key, products of random gates that fade within a hundred tokens; 2 heads of 3 channels, 150 tokens."""
    draw = np.random.default_rng(0)
    gates = draw.uniform(0.7, 1.0, (2, 150, 2, 3))
    shares = evictable_shares(torch.from_numpy(gates).log())
    assert list(shares) == [(length, threshold) for length in (64, 128, 150) for threshold in THRESHOLDS]
    for (length, threshold), share in shares.items():
        rows = itertools.product(range(2), range(length), range(2))
        faded = [(gates[b, j + 1 : length, p].prod(0) < threshold).all() for b, j, p in rows]
        assert share == pytest.approx(np.mean(faded), abs=1e-12)
    assert 0 < shares[64, 1e-3] < shares[150, 1e-3] < 1
    assert set(evictable_shares(torch.zeros(1, 70, 1, 1, dtype=torch.float64)).values()) == {0.0}


def test_gate_dynamics_of_a_mixer_without_gates(network: Any, subject: Make) -> None:
    ((measured, examples),) = run_probe(
        "gate_dynamics", subject(network(vocab_size=264, attn_type="nope").eval()), (0,)
    )
    assert {m.reason for m in measured} == {"n/a: mixer nope has no gates"}
    assert examples == []
