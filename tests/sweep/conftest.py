"""Grids written on the spot, and models that take a step in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.cell import Cell, DataConfig
from atma_sweep.sweep.grid import load_grid

torch.set_num_threads(1)

FINGERPRINT = "f" * 64
# a base that nobody tunes, so that line numbers, ids and messages of these tests stay
MICRO = """
set:
  model: {d_model: 80, n_layers: 4, n_heads: 4, n_kv_heads: 2, head_dim: 20, vocab_size: 264, window_size: 64}
  data: {corpus: stdlib, tokenizer: bytes}
  train: {tokens: 153_600, seq_len: 128, batch_tokens: 1024, micro_batch: 8}
  eval: {lengths: [128, 256, 512, 1024], validate_every: 30, validation_tokens: 16_384}
"""
SMALL = {"d_model": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "vocab_size": 29, "window_size": 3}
# GPT-2's split of text into words, as its authors published it
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def fake(data: DataConfig) -> str:
    """A corpus hash that needs no corpus."""
    return FINGERPRINT


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file into the test's folder, where the base `micro` lies: write(text, name="g.yaml")."""
    (tmp_path / "micro.yaml").write_text(MICRO)

    def put(text: str, name: str = "g.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return put


@pytest.fixture
def cells(write: Callable[..., Path]) -> Callable[..., list[Cell]]:
    """Cells of a grid with the given lines after `name` and `extends: micro`."""

    def expand(text: str = "", *, base: str = "micro", sets: tuple[str, ...] = ()) -> list[Cell]:
        path = write(f"name: g\nextends: {base}\n{text}")
        return load_grid(path, sets=sets, rename="h" if sets else None).expand(fake)

    return expand


@pytest.fixture
def fake_fingerprint() -> Callable[[DataConfig], str]:
    return fake


@pytest.fixture
def network(wake: Callable[[Backbone], None]) -> Callable[..., Backbone]:
    """network(awake=False, dtype=float32, **model settings); `awake` adds noise so that no branch ends in zeros."""

    def make(*, awake: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Backbone:
        model = build(ModelConfig(**(SMALL | settings)), seed=seed, dtype=dtype)
        if awake:
            wake(model)
        return model

    return make


@pytest.fixture
def gpt2(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """GPT-2's tokenizer from the ranks in the shared folder, without tiktoken's own download."""
    import tiktoken
    from atma_sweep.sweep.training.tokenizer import GPT2
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(shared / "data" / "gpt2" / "gpt2.tiktoken"))
    special = {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("gpt2-local", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    return GPT2()
