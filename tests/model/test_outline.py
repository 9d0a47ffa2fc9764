"""What is said of a network before it is built is what the built one has."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from atma_sweep.model import register_mixer, registry
from atma_sweep.model.backbone import Backbone
from atma_sweep.model.bases import Mixer, MixerConfig
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.mixers.polar import Polar
from atma_sweep.model.parameter_shapes import network_shapes, parameters
from atma_sweep.model.resolve import check_model_config
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.planning import admission
from registries import PAIRS
from tiers import every_nth
from torch import nn

ODD: dict[str, Any] = {
    "d_model": 24, "n_layers": 7, "n_heads": 12, "n_kv_heads": 6, "head_dim": 8, "vocab_size": 29, "window_size": 3,
    "mlp_ratio": 3, "conv_taps": 5, "canon_taps": 2, "attn_every": 3, "attn_offset": 1,
}  # fmt: skip
"""No two sizes alike, so that one taken for another is seen."""


def complete(**settings: Any) -> ModelConfig:
    return check_model_config(ModelConfig(**(ODD | settings)))


def built(config: ModelConfig) -> Backbone:
    with torch.device("meta"):
        return Backbone(config)


@pytest.mark.parametrize(("canon", "anywhere"), every_nth([(True, True), (False, True), (True, False)], 3))
@pytest.mark.parametrize(("mixer", "memory"), PAIRS)
def test_the_outline_is_the_network(mixer: str, memory: str, canon: bool, anywhere: bool) -> None:
    config = complete(attn_type=mixer, memory=memory, mixers={mixer: {"canon": canon}}, canon=anywhere)
    network = built(config)
    parts = [registry.MIXERS.outline(mixer), *([registry.MEMORIES.outline(memory)] if memory != "none" else [])]
    if not all("shapes" in vars(part) for part in parts):
        assert network_shapes(config) is None
        return
    assert network_shapes(config) == {name: tuple(one.shape) for name, one in network.named_parameters()}
    said = parameters(config)
    assert said is not None
    groups = {name: group for group, members in network.parameter_groups().items() for name, _ in members}
    assert {name: (group, count) for name, group, count in said} == {
        name: (groups[name], one.numel()) for name, one in network.named_parameters()
    }
    assert list(network.buffers()) == [], "which an outline does not count"
    for narrow, optimizer in itertools.product((False, True), ("muon", "adamw")):
        assert admission.model_sizes(config, narrow=narrow, optimizer=optimizer) == checkpoint.sizes(
            config, narrow=narrow, optimizer=optimizer
        )


def test_the_370m_network_is_counted_without_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "sizes", None)
    config = check_model_config(ModelConfig())
    said = parameters(config)
    assert said is not None
    assert sum(count for _, _, count in said) == 369_758_464
    assert admission.model_sizes(config, narrow=True)[0] == 4 * 369_758_464 - 2 * config.vocab_size * config.d_model


@pytest.mark.parametrize("table", [registry.MIXERS, registry.MEMORIES])
def test_a_part_is_its_outline_and_more(table: registry.Registry) -> None:
    apart = [name for name in table if table.load(name) is not table.outline(name)]
    assert apart, "parts that have an outline apart from themselves"
    for name in apart:
        _is_more(table.load(name), table.outline(name), mixer=table is registry.MIXERS)


def _is_more(part: Any, outline: Any, *, mixer: bool) -> None:
    assert issubclass(part, outline)
    assert not issubclass(outline, nn.Module)
    for attribute in ("Config", "check", "shapes", *(["has_distractor"] if mixer else [])):
        assert getattr(part, attribute) == getattr(outline, attribute) or attribute not in vars(part)


@pytest.mark.usefixtures("registries")
def test_a_mixer_that_says_nothing_is_built_to_be_counted() -> None:
    """Even when the one that it inherits from says something: it may have more than that."""

    class Plain(Mixer):
        def __init__(self, model: ModelConfig, config: MixerConfig) -> None:
            super().__init__(model, config)
            self.slope = nn.Parameter(torch.ones(7))

    class More(Polar):
        def __init__(self, model: ModelConfig, config: Any) -> None:
            super().__init__(model, config)
            self.slope = nn.Parameter(torch.ones(7))

    for mixer, like in ((Plain, "nope"), (More, "polar")):
        register_mixer("mine")(mixer)
        config, other = complete(attn_type="mine"), complete(attn_type=like)
        assert (network_shapes(config), parameters(config)) == (None, None)
        globals_ = sum(map(config.is_global, range(config.n_layers)))
        weights, state = admission.model_sizes(other, narrow=False)
        assert admission.model_sizes(config, narrow=False) == (weights + 4 * 7 * globals_, state + 8 * 7 * globals_)


@pytest.mark.usefixtures("registries")
def test_a_mixer_of_ones_own_may_say_its_shapes() -> None:
    class Said(Mixer):
        @classmethod
        def shapes(cls, model: ModelConfig, config: Any) -> dict[str, tuple[int, ...]]:
            return {"slope": (model.n_heads, 7)}

        def __init__(self, model: ModelConfig, config: MixerConfig) -> None:
            super().__init__(model, config)
            self.slope = nn.Parameter(torch.ones(model.n_heads, 7))

    register_mixer("mine")(Said)
    config = complete(attn_type="mine")
    found = network_shapes(config)
    assert found == {name: tuple(one.shape) for name, one in built(config).named_parameters()}
    assert math.prod(found["blocks.1.mix.mixer.slope"]) == 7 * 12
