"""No inert switch: every level of every axis changes a number, and every parameter of every network learns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Auxiliary, Backbone
from torch import Tensor

Awake = Callable[..., Backbone]
Aux = Callable[..., Auxiliary]
MIXERS, MEMORIES = ("polar", "nope", "rope"), ("none", "gated_delta")


def loss_of(model: Backbone, tokens: Tensor, auxiliary: Auxiliary | None = None, **options: Any) -> Tensor:
    features = model.features(tokens[:, :-1], auxiliary=auxiliary, **options)
    loss = model.token_losses(features.hidden_BTD, tokens[:, 1:]).mean()
    for term in (features.regularizer, features.distractor):
        loss = loss if term is None else loss + 0.01 * term
    return loss


def differ(values: list[Tensor]) -> bool:
    numbers = sorted(float(value) for value in values)
    return all(high - low > 1e-7 for low, high in pairwise(numbers))


def test_mixers_memories_and_windows_all_differ(awake: Awake, tokens: Tensor) -> None:
    cells = product(MIXERS, MEMORIES, (False, True))
    assert differ([loss_of(awake(attn_type=a, memory=m, window=w), tokens).detach() for a, m, w in cells])


@pytest.mark.parametrize("attn_type", MIXERS)
def test_full_context_lifts_the_window(awake: Awake, tokens: Tensor, attn_type: str) -> None:
    with torch.no_grad():
        windowed = awake(attn_type=attn_type, window=True)
        full = loss_of(windowed, tokens, full_context=True)
        assert full == loss_of(awake(attn_type=attn_type), tokens)
        assert abs(full - loss_of(windowed, tokens)) > 1e-7


@pytest.mark.parametrize("attn_type", MIXERS)
def test_regularizers_and_distractor_all_differ(awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str) -> None:
    model = awake(attn_type=attn_type)
    names = ("baseline", "weak", "strong", "discrete", "zipfian")
    cells = [auxiliary(regularizer=r, distractor=d) for r, d in product(names, (False, True))]
    assert differ([loss_of(model, tokens, cell).detach() for cell in cells])
    watched = model.blocks[2].mix.w_q.weight
    gradients = [torch.autograd.grad(loss_of(model, tokens, cell), watched)[0] for cell in cells]
    for i, one in enumerate(gradients):
        assert all((one - other).abs().max() > 1e-9 for other in gradients[:i])


@pytest.mark.parametrize(("attn_type", "setting"), [
    ("nope", {"distractor_norm": False}), ("nope", {"distractor_window": False}), ("nope", {"scale": 0.12}),
    ("nope", {"canon": False}), ("rope", {"rotary": "half-truncated"}), ("rope", {"base": 16.0}),
    ("rope", {"distractor_window": False}), ("polar", {"n_eff_floor": 0.9}), ("polar", {"canon": False}),
    ("polar", {"null_base_init": 3.0}), ("polar", {"null_slope_init": 0.1}), ("polar", {"len_gain_init": 0.0}),
    ("polar", {"mag_beta_init": 0.0}),
])  # fmt: skip
def test_every_mixer_setting_acts(
    awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str, setting: dict[str, Any]
) -> None:
    options = {"attn_type": attn_type, "window": True}
    aux = auxiliary(distractor=True)
    with torch.no_grad():
        losses = [loss_of(awake(**options, mixers=m), tokens, aux) for m in ({}, {attn_type: setting})]
    assert differ(losses)


def test_distractor_count_acts(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model = awake()
    cells = [auxiliary(distractor=True, distractor_count=n) for n in (None, 1, 3)]
    assert differ([loss_of(model, tokens, cell).detach() for cell in cells])


@pytest.mark.parametrize(("attn_type", "memory", "window"), list(product(MIXERS, MEMORIES, (False, True))))
def test_gradients_reach_every_parameter(
    awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str, memory: str, window: bool
) -> None:
    model = awake(attn_type=attn_type, memory=memory, window=window)
    loss_of(model, tokens, auxiliary(regularizer="weak", distractor=True)).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert silent == []


def test_distractors_do_not_train_the_key_projection(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    """Polar's distractor loss sees detached keys of random inputs only: w_k and w_v of its layer learn nothing."""
    model = awake()
    model.features(tokens, auxiliary=auxiliary(distractor=True)).distractor.backward()
    attention = model.blocks[2].mix
    assert attention.w_k.weight.grad is None
    assert attention.w_v.weight.grad is None
    for parameter in (attention.w_q.weight, attention.mixer.len_gain, attention.mixer.null_base):
        assert parameter.grad.abs().max() > 0


def test_a_memory_that_ends_in_zero_adds_nothing(awake: Awake, tokens: Tensor) -> None:
    model = awake(memory="gated_delta")
    with torch.no_grad():
        for parameter in model.blocks[2].mix.memory.proj.parameters():
            parameter.zero_()
        without = awake()
        assert torch.equal(model(tokens), without(tokens))


def test_rope_gives_its_memory_unrotated_keys(awake: Awake) -> None:
    """The memory's input is the mixer's, so a rotation inside the mixer leaves the memory as nope's."""
    x = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: list[list[Tensor]] = []
    for attn_type in ("nope", "rope"):
        attention = awake(attn_type=attn_type, memory="gated_delta").blocks[2].mix
        attention.memory.register_forward_hook(lambda _, args, __: seen.append(list(args)))
        attention(x, window=None)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
