"""No inert switch: every level of every axis changes a number, and every parameter of every network learns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import MIXERS
from atma_sweep.sweep.grid.plugins import PLUGGABLE
from graded import loss_of
from pydantic.fields import FieldInfo
from registries import EVERY_MIXER, EVERY_REGULARIZER, PAIRS, has_distractor
from torch import Tensor

Awake = Callable[..., Backbone]
Aux = Callable[..., AuxiliaryTerms]


def differ(values: list[Tensor]) -> bool:
    numbers = sorted(float(value) for value in values)
    return all(high - low > 1e-7 for low, high in pairwise(numbers))


def test_mixers_memories_and_windows_all_differ(awake: Awake, tokens: Tensor) -> None:
    cells = ((*pair, window) for pair in PAIRS for window in (False, True))
    assert differ([loss_of(awake(attn_type=a, memory=m, window=w), tokens).detach() for a, m, w in cells])


@pytest.mark.parametrize("attn_type", EVERY_MIXER)
def test_full_context_lifts_the_window(awake: Awake, tokens: Tensor, attn_type: str) -> None:
    with torch.no_grad():
        windowed = awake(attn_type=attn_type, window=True)
        full = loss_of(windowed, tokens, full_context=True)
        assert full == loss_of(awake(attn_type=attn_type), tokens)
        assert abs(full - loss_of(windowed, tokens)) > 1e-7


@pytest.mark.thorough
@pytest.mark.parametrize("attn_type", EVERY_MIXER)
def test_regularizers_and_distractor_all_differ(awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str) -> None:
    model = awake(attn_type=attn_type)
    levels = (False, True) if has_distractor(attn_type) else (False,)
    cells = [auxiliary(regularizer=r, distractor=d) for r, d in product(EVERY_REGULARIZER, levels)]
    assert differ([loss_of(model, tokens, cell).detach() for cell in cells])
    watched = model.blocks[2].mix.w_q.weight
    gradients = [torch.autograd.grad(loss_of(model, tokens, cell), watched)[0] for cell in cells]
    for i, gradient in enumerate(gradients):
        assert all((gradient - earlier).abs().max() > 1e-9 for earlier in gradients[:i])


def changed_value(field: FieldInfo) -> Any:
    """A value of a setting that is not its default."""
    if field.default is None:
        return 0.12
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, str):
        return next(word for word in get_args(field.annotation) if word != field.default)
    # an int stays one, and a limit at zero holds
    value = type(field.default)(0.3 * field.default + (2 if isinstance(field.default, int) else 0.7))
    return value if value != field.default else 2 * value


OF_GRADIENTS: dict[str, dict[str, Any]] = {"n_eff_floor_gradient": {"n_eff_floor": 0.3}}
"""Setting that acts on gradients alone -> what makes it act."""
WITHIN_A_SHORT_TEXT = {"positions": 2, "buckets": 2, "subdim": 3, "degree": 2, "block": 2}
"""Setting -> a value that eleven tokens, or heads of eight channels, feel."""
REQUIRED_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("wall", "base"): {"rotary": "full"}, ("polysketch", "sketch"): {"block": 2},
}  # fmt: skip
"""Mixer and setting -> what must be set beside it, or it says nothing."""


@pytest.mark.parametrize(
    ("attn_type", "setting"),
    [(name, setting) for name in MIXERS for setting in MIXERS.load(name).Config.model_fields],
)
def test_every_setting_of_every_mixer_acts(
    awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str, setting: str
) -> None:
    options = {"attn_type": attn_type, "window": True}
    aux = auxiliary(distractor=has_distractor(attn_type))
    required = OF_GRADIENTS.get(setting, {})
    value = changed_value(MIXERS.load(attn_type).Config.model_fields[setting])
    changed = required | {setting: WITHIN_A_SHORT_TEXT.get(setting, value)}
    losses, slopes = [], []
    for mixer in (required, changed):
        model = awake(**options, mixers={attn_type: REQUIRED_SETTINGS.get((attn_type, setting), {}) | mixer})
        losses.append(loss_of(model, tokens, aux))
        gradients = torch.autograd.grad(losses[-1], list(model.parameters()), allow_unused=True)
        slopes.append(sum(g.abs().sum() for g in gradients if g is not None))
    assert differ(slopes if required else [loss.detach() for loss in losses]), changed
    assert losses[0] == losses[1] or not required


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "d_model": (32, {}), "n_layers": (5, {}), "n_heads": (8, {}), "n_kv_heads": (4, {}), "head_dim": (16, {}),
    "vocab_size": (41, {}), "attn_every": (3, {"attn_offset": 0}), "attn_offset": (1, {}), "mlp": ("swiglu", {}), "mlp_ratio": (2, {}),
    "match": ("parameters", {"attn_type": "wall"}),
    "mlp_width": (20, {}), "qk_norm_weight": (True, {"canon": False}),
    "conv_taps": (2, {}), "canon": (False, {}), "canon_taps": (3, {}), "qk_norm": (False, {}), "output_gate": (False, {}), "bias": (False, {}),
    "qkv_bias": (False, {}), "head_bias": (False, {}),
    "norm_eps": (0.01, {}), "residual": ("normed", {}), "dropout": (0.25, {}), "logit_cap": (None, {}),
    "tie_head": (True, {}), "init": ("llama", {}), "attn_type": ("rope", {}), "memory": ("gated_delta", {}),
    "decoder": ("row", {}), "positions": ("ape", {}), "window": (True, {}), "window_size": (5, {"window": True}),
}  # fmt: skip
"""Setting -> another value, and what must be set beside it."""
OF_PARTS = {"mixers", "memories", "position_settings"} | {part.source for part in PLUGGABLE if part.section == "model"}
"""Settings of the parts themselves, which have tests of their own, and the hashes of their files."""


def test_switches_cover_every_setting_of_the_network() -> None:
    assert set(CHANGES) | OF_PARTS | {"embedding_dtype"} == set(ModelConfig.model_fields)


@pytest.mark.parametrize("setting", CHANGES)
def test_every_setting_of_the_network_acts(awake: Awake, tokens: Tensor, auxiliary: Aux, setting: str) -> None:
    value, required = CHANGES[setting]
    with torch.no_grad():
        losses = [loss_of(awake(**options), tokens, auxiliary()) for options in (required, required | {setting: value})]
    assert differ(losses)


def test_distractor_count_acts(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model = awake()
    cells = [auxiliary(distractor=True, distractor_count=n) for n in (None, 1, 3)]
    assert differ([loss_of(model, tokens, cell).detach() for cell in cells])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "window"), [(*pair, window) for pair in PAIRS for window in (False, True)]
)
def test_gradients_reach_every_parameter(
    awake: Awake, tokens: Tensor, auxiliary: Aux, attn_type: str, memory: str, window: bool
) -> None:
    model = awake(attn_type=attn_type, memory=memory, window=window)
    loss_of(model, tokens, auxiliary(regularizer="weak", distractor=has_distractor(attn_type))).backward()
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
