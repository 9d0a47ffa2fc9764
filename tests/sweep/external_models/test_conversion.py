"""Llama-shaped models of transformers as `rope` transformers; the oracle is transformers' own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.checkpoints.initial import load_initial, write_copy
from atma_sweep.sweep.external_models.conversion import open_hub_weights
from atma_sweep.sweep.external_models.hub_checkpoint import InvalidCheckpoint, WeightsUnavailable

pytestmark = pytest.mark.thorough  # importing transformers takes seconds
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "intermediate_size": 64}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


def saved(folder: Path, family: str, **settings: Any) -> Any:
    """Save a random model of transformers into the folder and return it; no tensor is constant."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def loaded(folder: Path, runs: Path, **settings: Any) -> Backbone:
    """Return our network with the weights of the folder."""
    weights = open_hub_weights(folder)
    model = build(ModelConfig(**(weights.model_settings() | settings)), seed=3)
    write_copy(runs, "a" * 64, weights.state())
    report = load_initial(runs, model, source="hf:x", sha256="a" * 64, allow_missing=False)
    assert (report.new, report.unused) == ((), ())
    return model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_converted_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "hub", CASES[case][0], **CASES[case][1])
    ours = loaded(tmp_path / "hub", tmp_path / "runs")
    tokens_BT = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens_BT).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens_BT), expected, rtol=0, atol=1e-4)
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1  # in shards


REFUSED = {
    "rope_scaling: {": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    'hidden_act: "gelu"': {"hidden_act": "gelu"},
    "sliding_window: 8": {"model_type": "mistral", "sliding_window": 8},
    "layer_types": {"layer_types": ["sliding_attention", "full_attention"]},
    "missing or invalid setting: 'rms_norm_eps'": {"rms_norm_eps": None},
}


def test_settings_that_cannot_be_expressed_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    for text, settings in REFUSED.items():
        changed = {name: value for name, value in (config | settings).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(InvalidCheckpoint) as refusal:
            open_hub_weights(tmp_path).model_settings()
        assert text in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Llama")
    (shard, *_) = sorted(tmp_path.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidCheckpoint, match="half a download"):
        open_hub_weights(tmp_path)
    shard.unlink()
    with pytest.raises(WeightsUnavailable, match=f"lacks 1 of the .* such as {shard.name}"):
        open_hub_weights(tmp_path)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved(tmp_path, "Llama")
    name = "model.layers.0.self_attn.sinks"
    save_file({name: torch.zeros(4)}, tmp_path / "more.safetensors")
    with pytest.raises(InvalidCheckpoint, match=f"tensor {name} has no counterpart"):
        open_hub_weights(tmp_path).state()


def test_exported_cell_loads_unchanged(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build(ModelConfig(d_model=16, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, vocab_size=61), seed=1)
    save_file({f"network.{name}": value for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    facts = {"model_type": "atma-sweep", "network": model.config.model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    again = loaded(tmp_path, tmp_path / "runs").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
