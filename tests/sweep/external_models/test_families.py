"""Every family of the paper's table, as a tiny random checkpoint saved in the hub's format: what is loaded, and read piece by piece."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.external_models.hub_checkpoint import resolve_checkpoint
from atma_sweep.sweep.external_models.subject import ChunkedScorer, load_model
from atma_sweep.sweep.external_models.tiny import FAMILIES, make
from atma_sweep.sweep.probes.base import Prompt

pytestmark = pytest.mark.thorough
CPU = torch.device("cpu")
TOKENS = np.random.default_rng(0).integers(0, 320, 97)


def loaded(folder: Path, family: str, device: torch.device = CPU) -> Any:
    if family.startswith("qwen3_5") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: transformers runs its linear attention through kernels for one")
    return load_model(make(folder / family, family), torch.float32, device)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_through_the_cache_equal_one_forward(family: str, tmp_path: Path) -> None:
    device = torch.device("cuda") if family.startswith("qwen3_5") else CPU
    model = loaded(tmp_path, family, device)
    with torch.no_grad():
        whole = model(input_ids=torch.from_numpy(TOKENS)[None].to(device), use_cache=False).logits[0]
    wanted = torch.nn.functional.cross_entropy(whole[:-1], torch.from_numpy(TOKENS[1:]).to(device), reduction="none")
    for piece in (1, 32, 41, 200):
        reader = ChunkedScorer(model, device, piece=piece)
        found = torch.cat([logits for _, logits in reader.logits(TOKENS)])
        assert (found - whole).abs().max() <= 1e-5, piece
        assert np.abs(reader.losses(TOKENS) - wanted.cpu().numpy()).max() <= 1e-5
        asked = np.array([3, 50, 96])
        hits, nats = reader.score_prompt(Prompt(TOKENS, asked))
        assert np.abs(nats.numpy() - wanted.cpu().numpy()[asked - 1]).max() <= 1e-5
        assert hits.tolist() == (whole[asked - 1].argmax(-1).cpu().numpy() == TOKENS[asked]).tolist()


def test_pieces_bound_what_is_read_at_once(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    seen: list[tuple[int, int]] = []

    def watched(**given: Any) -> Any:
        seen.append((given["input_ids"].shape[1], given["logits_to_keep"]))
        return model(**given)

    ChunkedScorer(watched, CPU, piece=40).score_prompt(Prompt(TOKENS, np.array([96])))
    assert seen == [(40, 1), (40, 1), (16, 1)], "of all logits only those that are asked for"


def test_a_uniform_model_costs_the_logarithm_of_its_vocabulary(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen2")
    torch.nn.init.zeros_(model.lm_head.weight)
    nats = ChunkedScorer(model, CPU, piece=10).losses(TOKENS)
    assert np.allclose(nats / math.log(2), math.log2(320), atol=1e-6)


def test_what_was_saved_is_what_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "tiny", "gemma3_text")
    found = resolve_checkpoint(f"hf:{folder}")
    assert (found.name, found.family, found.context, found.max_positions) == ("tiny", "gemma3_text", 64, None)
    assert [found.dtype(cuda=cuda) for cuda in (False, True)] == ["float32", "float32"]
    assert resolve_checkpoint(str(make(tmp_path / "other", "qwen3"))).dtype(cuda=True) == "bfloat16"
    again = resolve_checkpoint(f"hf:{make(tmp_path / 'again' / 'tiny', 'gemma3_text')}")
    assert (again.revision, again.tokenizer) == (found.revision, found.tokenizer), "the same files, elsewhere"
    other = resolve_checkpoint(f"hf:{make(tmp_path / 'third', 'gemma3_text', seed=1)}")
    assert other.revision != found.revision
    assert other.tokenizer == found.tokenizer


def test_a_checkpoint_without_one_of_its_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make(tmp_path / "tiny", "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SweepError, match=r"lacks weights of its model, 1 of them, such as model\.layers\.1\.mlp\.up_proj"
    ):
        load_model(folder, torch.float32, CPU)
