"""Every family of the paper's table, as a tiny random checkpoint: loading, and scoring in chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.external_models.hub_checkpoint import InvalidCheckpoint, resolve_checkpoint
from atma_sweep.sweep.external_models.subject import ChunkedScorer, load_model
from atma_sweep.sweep.external_models.tiny import FAMILIES, make_tiny_checkpoint
from atma_sweep.sweep.probes.base import Prompt

pytestmark = pytest.mark.thorough
CPU = torch.device("cpu")
TOKENS = np.random.default_rng(0).integers(0, 320, 97)


def loaded(folder: Path, family: str, device: torch.device = CPU) -> Any:
    if family.startswith("qwen3_5") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: transformers runs its linear attention through kernels for one")
    return load_model(make_tiny_checkpoint(folder / family, family), torch.float32, device)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_scorer_matches_single_forward(family: str, tmp_path: Path) -> None:
    device = torch.device("cuda") if family.startswith("qwen3_5") else CPU
    model = loaded(tmp_path, family, device)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(TOKENS)[None].to(device), use_cache=False).logits[0]
    wanted = torch.nn.functional.cross_entropy(expected[:-1], torch.from_numpy(TOKENS[1:]).to(device), reduction="none")
    for piece in (1, 32, 41, 200):
        reader = ChunkedScorer(model, device, chunk_tokens=piece)
        actual = torch.cat([logits for _, logits in reader.logits(TOKENS)])
        assert (actual - expected).abs().max() <= 1e-5, piece
        assert np.abs(reader.losses(TOKENS) - wanted.cpu().numpy()).max() <= 1e-5
        positions = np.array([3, 50, 96])
        hits, nats = reader.score_prompt(Prompt(TOKENS, positions))
        assert np.abs(nats.numpy() - wanted.cpu().numpy()[positions - 1]).max() <= 1e-5
        assert hits.tolist() == (expected[positions - 1].argmax(-1).cpu().numpy() == TOKENS[positions]).tolist()


def test_chunked_scorer_bounds_tokens_per_forward(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    seen: list[tuple[int, int]] = []

    def watched(**inputs: Any) -> Any:
        seen.append((inputs["input_ids"].shape[1], inputs["logits_to_keep"]))
        return model(**inputs)

    ChunkedScorer(watched, CPU, chunk_tokens=40).score_prompt(Prompt(TOKENS, np.array([96])))
    assert seen == [(40, 1), (40, 1), (16, 1)], "of all logits only those that are asked for"


def test_chunked_scorer_of_uniform_model_is_log_vocabulary(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen2")
    torch.nn.init.zeros_(model.lm_head.weight)
    nats = ChunkedScorer(model, CPU, chunk_tokens=10).losses(TOKENS)
    assert np.allclose(nats / math.log(2), math.log2(320), atol=1e-6)


def test_resolve_checkpoint_identifies_saved_model(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "gemma3_text")
    checkpoint = resolve_checkpoint(f"hf:{folder}")
    assert (checkpoint.name, checkpoint.family, checkpoint.context, checkpoint.max_positions) == (
        "tiny",
        "gemma3_text",
        64,
        None,
    )
    assert [checkpoint.dtype(cuda=cuda) for cuda in (False, True)] == ["float32", "float32"]
    assert resolve_checkpoint(str(make_tiny_checkpoint(tmp_path / "other", "qwen3"))).dtype(cuda=True) == "bfloat16"
    again = resolve_checkpoint(f"hf:{make_tiny_checkpoint(tmp_path / 'again' / 'tiny', 'gemma3_text')}")
    assert (again.revision, again.tokenizer) == (checkpoint.revision, checkpoint.tokenizer), "the same files, elsewhere"
    second_checkpoint = resolve_checkpoint(f"hf:{make_tiny_checkpoint(tmp_path / 'third', 'gemma3_text', seed=1)}")
    assert second_checkpoint.revision != checkpoint.revision
    assert second_checkpoint.tokenizer == checkpoint.tokenizer


def test_load_model_rejects_unfit_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights, content = load_file(file), file.read_bytes()
    for changed, problem in (
        ({key: tensor for key, tensor in weights.items() if key != name}, "lack a tensor of the network"),
        (weights | {name: weights[name][:-1].clone()}, "have another shape than the network's for tensor"),
        (weights | {name.replace("up", "side"): weights[name].clone()}, "hold a tensor that the network lacks"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(SweepError, match=rf"{problem}: model\.layers\.1\.mlp\.[a-z]*_proj\.weight; "):
            load_model(folder, torch.float32, CPU)
    file.write_bytes(content[:-9])
    with pytest.raises(InvalidCheckpoint, match="it may be half a download, so download it again"):
        resolve_checkpoint(f"hf:{folder}")
