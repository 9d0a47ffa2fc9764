"""Norms of the memory's state against a loop over tokens, and learned count maps. B documents, T tokens, H heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.kernels import features
from atma_sweep.kernels.omega.reference import omega_reference
from atma_sweep.model.attention import Attention
from atma_sweep.model.backbone import Backbone
from atma_sweep.model.memory.gated_delta import GatedDelta
from atma_sweep.model.registry import MEMORIES, register_memory
from atma_sweep.sweep.config import EvalConfig
from atma_sweep.sweep.probes import requested
from atma_sweep.sweep.probes.diagnostics.memory_state import OWN_WRITE_METRICS, STATE_METRICS
from atma_sweep.sweep.probes.subject import run_probe

LAYERS = (2, 6)
LENGTH = 150  # not a multiple of the 64 tokens that are solved together, and more than one piece


def memories(model: Backbone) -> list[GatedDelta]:
    mixes = [block.mix for block in model.blocks if isinstance(block.mix, Attention)]
    return [mix.memory for mix in mixes if isinstance(mix.memory, GatedDelta)]


def by_hand(memory: GatedDelta, x: Any, q: Any, k: Any, v: Any) -> np.ndarray:
    """Return norms [4, B, H] in float64, token by token.

    M <- gamma M (I - beta k kᵀ) + beta v kᵀ, and the same without the erasing.
    """
    gammas = torch.sigmoid(x @ memory.w_gamma.weight.T + memory.w_gamma.bias + 3.9).detach().numpy()
    betas = torch.sigmoid(x @ memory.w_beta.weight.T + memory.w_beta.bias).detach().numpy()
    keys, values = k.detach().numpy(), v.detach().numpy()
    b, t, h, size = q.shape
    group = h // k.shape[2]
    norms = np.zeros((4, b, h))
    for row in range(b):
        for head in range(h):
            states = np.zeros((4, size, size))
            for i in range(t):
                key, value = keys[row, i, head // group], values[row, i, head // group]
                key = key / np.linalg.norm(key)
                beta, gamma = betas[row, i, head], gammas[row, i, head]
                write, erase = beta * np.outer(value, key), np.eye(size) - beta * np.outer(key, key)
                states[0] = gamma * states[0] @ erase + write
                states[1] = gamma * states[1] + write
                states[2] = states[2] @ erase + write
                states[3] = states[3] + write
            norms[:, row, head] = np.linalg.norm(states, axis=(1, 2))
    return norms


def inputs(model: Backbone, watched: list[Any], documents: list[np.ndarray], length: int) -> dict[int, Any]:
    """Return (x, q, k, v) of every memory for the first tokens of the documents."""
    seen: dict[int, Any] = {}
    hooks = [
        memory.register_forward_pre_hook(lambda _, inputs, index=index: seen.__setitem__(index, inputs))
        for index, memory in enumerate(watched)
    ]
    rows = torch.from_numpy(np.stack([d[:length] for d in documents]).astype(np.int64))
    with torch.no_grad():
        model.features(rows, full_context=True)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture
def model(network: Any) -> Backbone:
    sizes = {"vocab_size": 264, "memory": "gated_delta", "n_layers": 7}
    model: Backbone = network(awake=True, dtype=torch.float64, attn_type="nope", **sizes)
    assert len(memories(model)) == 2
    return model.eval()


def test_state_norm_matches_loop_over_tokens(model: Backbone, subject: Any) -> None:
    who = subject(model, documents=3, lengths=(LENGTH,), chunk_tokens=70)
    seen = inputs(model, memories(model), who.documents, LENGTH)
    expected = np.stack([by_hand(memory, *seen[index]) for index, memory in enumerate(memories(model))], 2)  # 4 B L H
    ((measured, examples),) = run_probe("state_norm", who, [LENGTH])
    assert [measurement.metric for measurement in measured] == list(STATE_METRICS)
    for measurement, norms in zip(measured, expected, strict=True):
        assert measurement.value == pytest.approx(norms.mean(), rel=1e-10)
        assert (measurement.length, measurement.unit, measurement.n, measurement.reason) == (
            LENGTH,
            "frobenius",
            norms.size,
            None,
        )
        mine = {(e.item, e.position): e.value for e in examples if e.metric == measurement.metric}
        heads = range(norms.shape[2])
        wanted = {(layer, h): norms[:, index, h].mean() for index, layer in enumerate(LAYERS) for h in heads}
        assert mine == pytest.approx(wanted, rel=1e-10)
    delta, hebbian, *_, hebbian_retained = (measurement.value for measurement in measured)
    assert delta < hebbian < hebbian_retained, "erasing and forgetting both keep the state small"


def kda_by_hand(memory: Any, x: Any, k: Any, v: Any) -> list[torch.Tensor]:
    """Return the norms of one row and head for each of STATES, token by token, with retention per key channel."""
    logit = memory.w_gamma(memory.w_down(x)).unflatten(-1, (memory.heads, memory.head_dim))[:, 0]
    gammas, betas = torch.sigmoid(logit + 3.9), torch.sigmoid(memory.w_beta(x))[:, 0]
    states = [torch.zeros(memory.head_dim, memory.head_dim, dtype=x.dtype) for _ in STATE_METRICS]
    for gamma, beta, key, value in zip(gammas, betas, k / k.norm(dim=-1, keepdim=True), v, strict=True):
        for index, name in enumerate(STATE_METRICS):
            state = states[index] if name.endswith("kept") else states[index] * gamma
            missing = value - state @ key if name.startswith("delta") else value
            states[index] = state + beta * torch.outer(missing, key)
    return [state.norm() for state in states]


def omega_by_hand(memory: Any, x: Any, k: Any, v: Any) -> list[torch.Tensor]:
    """Return the norms of one row and head for each of OWN, token by token, with gradients by autograd."""
    norms, how = [], memory.config
    logit = {name: rate(x)[:, 0] for name, rate in memory.rates.items()}
    keep, step = torch.sigmoid(logit["keep"] + how.keep_offset), torch.sigmoid(logit["step"] + how.step_offset)
    slow = torch.sigmoid(logit["momentum"] + how.momentum_offset) if "momentum" in logit else None
    unit = k / k.norm(dim=-1, keepdim=True)
    feature = features.poly2(unit) if how.features == "poly2" else unit
    feature = feature / feature.norm(dim=-1, keepdim=True)
    start = list(memory.start) if how.memory == "mlp2" else [x.new_zeros(memory.head_dim, feature.shape[-1])]
    for alpha in (keep, torch.ones_like(keep)):
        args = feature, feature, v, alpha, step, torch.sigmoid(logit["weight"]) / how.window, slow, start
        orthogonal = getattr(how, "orthogonal", "none")
        _, layers = omega_reference(*args, window=how.window, chunk=how.chunk, orthogonal=orthogonal)
        norms.append(sum(layer.square().sum() for layer in layers) ** 0.5)
    return norms


@pytest.mark.parametrize(
    ("name", "settings", "by_hand"),
    [
        ("kda", {}, kda_by_hand),
        ("omega", {"window": 3, "chunk": 4, "features": "poly2"}, omega_by_hand),
        ("omega", {"window": 3, "chunk": 4, "memory": "mlp2"}, omega_by_hand),
        ("atlas", {"window": 3, "chunk": 8}, omega_by_hand),
        ("atlas", {"window": 3, "chunk": 8, "memory": "mlp2", "orthogonal": "token"}, omega_by_hand),
    ],
)
def test_state_norm_of_further_memories_matches_loop(
    name: str, settings: Any, by_hand: Any, network: Any, subject: Any
) -> None:
    sizes = {"vocab_size": 264, "memory": name, "memories": {name: settings}, "n_layers": 3}
    model = network(awake=True, dtype=torch.float64, attn_type="nope", **sizes).eval()
    who = subject(model, documents=2, lengths=(20,), chunk_tokens=24)
    (memory,) = [block.mix.memory for block in model.blocks if getattr(block.mix, "memory", None) is not None]
    x, _, k, v = inputs(model, [memory], who.documents, 20)[0]
    with torch.no_grad():
        wanted = torch.stack([torch.stack(by_hand(memory, x[b], k[b, :, 0], v[b, :, 0])) for b in range(2)]).mean(0)
    ((measured, examples),) = run_probe("state_norm", who, [20])
    has = STATE_METRICS if name == "kda" else OWN_WRITE_METRICS
    assert {measurement.metric for measurement in measured if measurement.value is not None} == set(has)
    assert {measurement.reason for measurement in measured} - {None} <= {
        f"n/a: memory {name} does not write by a delta rule"
    }
    mine = [e.value for metric in has for e in examples if (e.metric, e.item, e.position) == (metric, 2, 0)]
    assert mine == pytest.approx(wanted.tolist(), rel=1e-9)


@pytest.mark.parametrize("name", list(MEMORIES))
def test_state_norm_of_every_memory(name: str, network: Any, subject: Any) -> None:
    who = subject(network(awake=True, vocab_size=264, memory=name).eval(), documents=2, lengths=(16,))
    ((measured, examples),) = run_probe("state_norm", who, [16])
    assert {measurement.metric for measurement in measured if measurement.value} >= set(OWN_WRITE_METRICS)
    assert {(e.item, e.position) for e in examples} == {(2, head) for head in range(who.config.model.n_heads)}


def test_state_norm_of_memory_without_norm_has_reason(network: Any, subject: Any) -> None:
    with MEMORIES.scope():
        register_memory("still")(type("Still", (MEMORIES.load("gated_delta"),), {"norm": None}))
        who = subject(network(vocab_size=264, memory="still").eval(), documents=2, lengths=(16,))
        ((measured, _),) = run_probe("state_norm", who, [16])
    assert {measurement.reason for measurement in measured} == {"n/a: memory still defines no norm"}


def test_observe_memories_is_removed_after_error(
    model: Backbone, subject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = subject(model, documents=2, lengths=(32,))

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(memories(model)[0].proj, "forward", fails)
    with pytest.raises(MemoryError, match="no more"):
        list(run_probe("state_norm", who, [32]))
    assert all("evaluate" not in vars(memory) for memory in memories(model))


def test_state_norm_runs_only_on_request() -> None:
    assert {name for name, _ in requested(EvalConfig())} == {"val", "clean", "junk", "needle"}
    pairs = requested(EvalConfig(probes=("state_norm", "count_map"), lengths=(8, 16)))
    assert pairs == [("state_norm", 8), ("state_norm", 16), ("count_map", 0)]


def test_count_map_slopes_match_parameters(network: Any, subject: Any) -> None:
    model = network(vocab_size=264, attn_type="polar")
    raw = []
    for index, block in enumerate(b for b in model.blocks if isinstance(b.mix, Attention)):
        block.mix.mixer.mag_beta.data = torch.tensor([-1.5 + index, 0.25])
        raw.append([-1.5 + index, 0.25])
    slopes = np.log1p(np.exp(np.array(raw)))
    ((measured, examples),) = run_probe("count_map", subject(model), [0])
    values = {measurement.metric: measurement.value for measurement in measured}
    assert values == pytest.approx(
        {"beta": slopes.mean(), "beta_lowest": slopes.min(), "beta_highest": slopes.max()}, rel=1e-6
    )
    assert {(e.item, e.position): e.value for e in examples} == pytest.approx(dict(np.ndenumerate(slopes)), rel=1e-6)
