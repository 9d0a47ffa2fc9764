"""Networks without a mixer (`attn_type: none`), against NoPE whose own branch adds nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from atma_sweep.model.backbone import Backbone, build, count_parameters
from atma_sweep.model.config import ModelConfig, ModelConfigError
from atma_sweep.model.inference.decode import PagedDecoder
from atma_sweep.model.resolve import check_model_config
from atma_sweep.sweep.training.flops import forward_flops

Awake = Callable[..., Backbone]
LENGTH = 13


@pytest.mark.parametrize("memory", ["gated_delta", "atlas"])
@torch.no_grad()
def test_memory_alone_is_nope_with_a_silent_branch(awake: Awake, memory: str) -> None:
    """Forward pass, evaluation in pieces and decoding; the output projection of NoPE is zero."""
    alone = awake(attn_type="none", memory=memory).eval()
    reference = build(
        ModelConfig(**alone.config.model_dump() | {"attn_type": "nope", "output_gate": False}),
        seed=0,
        dtype=torch.float64,
    ).eval()
    missing, unexpected = reference.load_state_dict(alone.state_dict(), strict=False)
    assert {name.split("mix.")[1] for name in missing} == {"proj.weight", "proj.bias"}
    assert unexpected == []
    for name in missing:
        reference.get_parameter(name).zero_()
    text_T = torch.randint(0, 37, (LENGTH,), generator=torch.Generator().manual_seed(4))
    expected = reference.logits(reference.features(text_T[None]).hidden_BTD)[0]
    decoder = PagedDecoder(alone, tokens=LENGTH, page=4)
    slot, last_V = decoder.begin(text_T[:5])
    torch.testing.assert_close(last_V, expected[4], rtol=0, atol=1e-10)
    for position in range(5, LENGTH):
        logits = decoder.step([slot], text_T[position][None])[0]
        torch.testing.assert_close(logits, expected[position], rtol=0, atol=1e-10)
    hidden = alone.features(text_T[None]).hidden_BTD
    torch.testing.assert_close(alone.logits(hidden)[0], expected, rtol=0, atol=1e-12)


def test_memory_alone_counts_parameters_and_flops() -> None:
    """Less than NoPE by gate and output projection (2 H X D weights, H X + D biases), and by attention's FLOPs."""
    sizes = {"d_model": 24, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 37}
    alone, nope = (ModelConfig(**sizes, attn_type=name, memory="gated_delta") for name in ("none", "nope"))
    assert count_parameters(nope) - count_parameters(alone) == 2 * 32 * 24 + 32 + 24
    keys = (1 + 2 + 3 + 4 + 5) / 5
    first, second = forward_flops(nope, 5), forward_flops(alone, 5)
    assert first is not None
    assert second is not None
    assert first - second == pytest.approx(2 * 2 * 32 * 24 + 4 * 32 * keys)


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({}, "model.attn_type", "model.memory is none too"),
        ({"memory": "atlas", "window": True}, "model.window", "a memory has no window"),
    ],
)
def test_memory_alone_is_refused(changes: dict[str, object], path: str, text: str) -> None:
    with pytest.raises(ModelConfigError, match=text) as error:
        check_model_config(ModelConfig(attn_type="none", **changes))
    assert error.value.path == path
