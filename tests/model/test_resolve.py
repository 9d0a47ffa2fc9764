"""Model settings: what is kept, what is filled in, what is refused, and a mixer from outside the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model import Mixer, MixerConfig, register_mixer, registry
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.config import Float, ModelConfig, ModelConfigError, knob
from atma_sweep.model.resolve import check_model_config, check_regularizer

Small = Callable[..., ModelConfig]


def test_only_the_chosen_parts_settings_remain(small: Small) -> None:
    config = small(attn_type="rope", mixers={"rope": {"base": "1_024", "canon": "off"}, "polar": {"canon": False}})
    checked = check_model_config(config)
    assert checked.mixers == {
        "rope": {"canon": False, "scale": None, "distractor_norm": True, "distractor_window": True, "rotary": "full",
                 "base": 1024.0}
    }  # fmt: skip
    assert checked.memories == {}
    assert check_model_config(checked) == checked
    assert config.mixers["rope"] == {"base": "1_024", "canon": "off"}


def test_memory_settings(small: Small) -> None:
    assert check_model_config(small(memory="gated_delta")).memories == {"gated_delta": {"chunk": 64}}
    assert check_model_config(small(memories={"gated_delta": {"chunk": 16}})).memories == {}


@pytest.mark.parametrize(("changes", "path", "message", "allowed"), [
    ({"attn_type": "poler"}, "model.attn_type", "no mixer named 'poler'", ["none", *sorted(registry.MIXERS)]),
    ({"memory": "titan"}, "model.memory", "no memory named 'titan'", ["none", *sorted(registry.MEMORIES)]),
    ({"mixers": {"poler": {}}}, "model.mixers.poler", "no such section", sorted(registry.MIXERS)),
    ({"attn_type": "rope", "mixers": {"rope": {"bse": 1}}}, "model.mixers.rope.bse", "no such setting",
     ["base", "canon", "distractor_norm", "distractor_window", "rotary", "scale"]),
    ({"attn_type": "rope", "mixers": {"rope": {"rotary": "half"}}}, "model.mixers.rope.rotary", "half",
     ["full", "half-truncated"]),
    ({"mixers": {"polar": {"n_eff_floor": 0}}}, "model.mixers.polar.n_eff_floor", "greater than 0", None),
    ({"attn_type": "rope", "head_dim": 7}, "model.mixers.rope", "even head_dim, got 7", None),
    ({"memory": "gated_delta", "memories": {"gated_delta": {"chunk": 0}}}, "model.memories.gated_delta.chunk",
     "greater than or equal to 1", None),
])  # fmt: skip
def test_errors_name_path_and_choices(
    small: Small, changes: dict[str, Any], path: str, message: str, allowed: list[str] | None
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        check_model_config(small(**changes))
    assert caught.value.path == path
    assert message in caught.value.message
    assert caught.value.allowed == allowed
    with pytest.raises(ModelConfigError):
        Backbone(small(**changes))


def test_regularizer_names() -> None:
    assert [check_regularizer(x) for x in ("baseline", "weak")] == ["baseline", "weak"]
    with pytest.raises(ModelConfigError, match=f"allowed: baseline, {', '.join(sorted(registry.REGULARIZERS))}"):
        check_regularizer("none")


@pytest.fixture
def running_mean(registries: None) -> str:
    """A mixer as a plugin file would write it."""

    class MeanConfig(MixerConfig):
        decay: Float = knob(1.0, "Weight of the value one step earlier.", identity=1.0, gt=0)

    class Mean(Mixer):
        Config = MeanConfig

        def __init__(self, model: ModelConfig, config: MeanConfig) -> None:
            super().__init__(model, config)
            self.mix = torch.nn.Parameter(torch.randn(model.n_heads))

        def forward(self, q_BTHX, k_BTJX, v_BTJX, *, window):  # type: ignore[no-untyped-def]
            v = v_BTJX.repeat_interleave(q_BTHX.shape[2] // v_BTJX.shape[2], 2)
            count = torch.arange(1, v.shape[1] + 1, dtype=v.dtype)[:, None, None]
            return self.config.decay * v.cumsum(1) / count * self.mix[:, None].to(v.dtype)

    register_mixer("mean")(Mean)
    return "mean"


def test_a_mixer_from_outside(small: Small, tokens: torch.Tensor, running_mean: str) -> None:
    config = small(attn_type=running_mean, mixers={running_mean: {"decay": 0.5}}, memory="gated_delta")
    torch.manual_seed(0)
    network = build(config, seed=0)
    torch.manual_seed(1)
    two = build(config, seed=0)
    mix = network.blocks[2].mix.mixer.mix
    assert torch.equal(mix, two.blocks[2].mix.mixer.mix)
    assert not torch.equal(mix, build(config, seed=1).blocks[2].mix.mixer.mix)
    assert network(tokens).shape == (2, 12, 37)
    assert any("mixer.mix" in name for name, _ in network.parameter_groups()["scalar"])
    with pytest.raises(ValueError, match="mixer 'mean' has no distractor loss"):
        network.features(tokens, auxiliary=AuxiliaryTerms("baseline", 5, True, None, 0, 0, 0))


def test_names_of_parts_are_unique(running_mean: str) -> None:
    for name in ("polar", running_mean):
        with pytest.raises(ValueError, match=f"a mixer named '{name}' exists already"):
            register_mixer(name)(Mixer)
