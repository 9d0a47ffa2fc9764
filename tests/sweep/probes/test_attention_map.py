"""Attention maps from values that form the identity (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.bases import Mixer
from atma_sweep.model.registry import MIXERS, register_mixer
from atma_sweep.sweep.probes.subject import CellSubject, observe_evaluations, run_probe
from registries import EVERY_MIXER
from torch import Tensor
from torch.nn import functional

Make = Callable[..., CellSubject]
T = 21
SIZES = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
NORMED = ("polar", "diff")


def maps_of(who: CellSubject) -> tuple[dict[str, Any], dict[tuple[int, int], np.ndarray]]:
    """Return the measurements, and the map in the examples by layer and head."""
    ((numbers, examples),) = run_probe("attention_map", who, (0,))
    maps: dict[tuple[int, int], np.ndarray] = {}
    for example in examples:
        detail = json.loads(json.dumps(example.detail))
        row = maps.setdefault((detail["layer"], detail["head"]), np.zeros((T, T)))
        row[example.position, : example.position + 1] = detail["weights"]
        assert len(detail["weights"]) == example.position + 1, "keys up to the query alone"
    return {m.metric: m for m in numbers}, maps


def read_by(model: Any, who: CellSubject, layer: int) -> dict[str, Tensor]:
    """Return the inputs of a layer's mixer and its output `y`, each [T, ...] in float64."""
    mix, seen = model.blocks[layer].mix, {}

    def look(_: int, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> None:
        seen.update(q=q[0], k=k[0], v=v[0], **{name: x[0] for name, x in more.items() if isinstance(x, Tensor)})
        mixed = type(mix.mixer).evaluate(mix.mixer, q, k, v, **more)
        seen["y"] = (mixed[0] if isinstance(mixed, tuple) else mixed)[0]

    with observe_evaluations([mix.mixer], look), torch.no_grad():
        model.features(torch.from_numpy(who.corpus.validation[:T].astype(np.int64))[None], full_context=True, chunk=64)
    return seen


def awake(network: Any, mixer: str, **settings: Any) -> Any:
    return network(awake=True, vocab_size=264, dtype=torch.float64, attn_type=mixer, window=True, **settings).eval()


def subject_of(subject: Make, model: Any, **settings: Any) -> CellSubject:
    return subject(model, validation=300, settings={"attention_map": {"tokens": T, **settings}})


@pytest.mark.parametrize("mixer", [name for name in EVERY_MIXER if name not in NORMED])
def test_attention_map_times_values_is_output(mixer: str, network: Any, subject: Make) -> None:
    """21 keys need three rounds of the 7 channels that a head of size 8 leaves for them."""
    model = awake(network, mixer, **SIZES)
    who = subject_of(subject, model)
    numbers, maps = maps_of(who)
    assert list(maps) == [(2, 0), (2, 1)]
    seen = read_by(model, who, 2)
    for (_, head), weights in maps.items():
        v = seen["v"][:, 0].numpy()
        assert weights @ v == pytest.approx(seen["y"][:, head].numpy(), abs=1e-3)
    every = np.stack(list(maps.values()))
    assert numbers["row_sum"].value == pytest.approx(every.sum(-1).mean(), abs=1e-4)
    squares = (every**2).sum(-1)
    keys = np.divide(np.abs(every).sum(-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)
    assert numbers["keys"].value == pytest.approx(keys.mean(), rel=1e-3)
    assert numbers["keys"].n == 2 * T


def test_attention_map_of_polar_is_softmax_over_keys(network: Any, subject: Make) -> None:
    """Compare with the formula, for a null whose value is large."""
    model = awake(network, "polar", **SIZES)
    with torch.no_grad():
        model.blocks[2].mix.mixer.v_null.fill_(3.0)
    who = subject_of(subject, model)
    numbers, maps = maps_of(who)
    seen, mixer = read_by(model, who, 2), model.blocks[2].mix.mixer
    n = torch.arange(1, T + 1, dtype=torch.float64)
    for head in (0, 1):
        temp = 1 + functional.softplus(mixer.len_gain[head].double()) * n.log()
        scores = temp[:, None] * (seen["q"][:, head] @ seen["k"][:, 0].T) / math.sqrt(8)
        masked = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        assert maps[2, head] == pytest.approx(masked.softmax(-1).detach().numpy(), abs=1e-4)
    assert numbers["row_sum"].value == pytest.approx(1.0, abs=1e-4)


def test_attention_map_of_diff_is_softmax_difference(network: Any, subject: Make) -> None:
    """Both heads of a pair have the same map, whatever the weights of its norm."""
    model = awake(network, "diff", mixers={"diff": {"rotary": "none"}}, **(SIZES | {"n_kv_heads": 2}))
    mixer = model.blocks[2].mix.mixer
    with torch.no_grad():
        mixer.norm.weight.copy_(torch.linspace(0.3, 2.0, len(mixer.norm.weight)))
    who = subject_of(subject, model)
    _, maps = maps_of(who)
    seen = read_by(model, who, 2)
    hidden = torch.ones(T, T).triu(1).bool()
    first, second = (
        (seen["q"][:, head] @ seen["k"][:, head].T / math.sqrt(8)).masked_fill(hidden, -math.inf).softmax(-1)
        for head in (0, 1)
    )
    share = mixer.lambda_value().item()
    expected = ((first - share * second) / (1 - share)).detach().numpy()
    assert maps[2, 0] == pytest.approx(expected, abs=1e-4)
    assert maps[2, 1] == pytest.approx(expected, abs=1e-4)


def test_attention_map_of_nonlinear_mixer_has_reason(network: Any, subject: Make) -> None:
    class Squared(Mixer):
        Config, config = MIXERS.load("nope").Config, None

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
            y: Tensor = v.square().cumsum(1).repeat_interleave(q.shape[2] // v.shape[2], 2)
            return y

    class Shifted(Squared):
        """Mixer that grows with its values and adds a term that is no value."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
            y: Tensor = (v.cumsum(1) + v.abs()).repeat_interleave(q.shape[2] // v.shape[2], 2)
            return y

    with MIXERS.scope():
        for name, kind in (("squared", Squared), ("shifted", Shifted)):
            register_mixer(name)(kind)
            model = network(awake=True, vocab_size=264, attn_type=name, memory="gated_delta").eval()
            numbers, maps = maps_of(subject_of(subject, model))
            assert {m.reason for m in numbers.values()} == {
                f"n/a: mixer {name} is not linear in its values, even up to a scale factor"
            }
            assert maps == {}


def test_attention_map_layers_and_heads(network: Any, subject: Make) -> None:
    model = network(vocab_size=264, n_layers=7, attn_type="nope", **SIZES).eval()
    assert list(maps_of(subject_of(subject, model, layers=[6]))[1]) == [(6, 0), (6, 1)]
    assert list(maps_of(subject_of(subject, model, heads=1))[1]) == [(2, 0), (6, 0)]
