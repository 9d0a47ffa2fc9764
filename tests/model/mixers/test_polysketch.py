"""PolySketch decoding: the state after every token, against whole sequences."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.model.backbone import build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.inference.decode import PagedDecoder


@pytest.mark.parametrize("full_context", [True, False])
@torch.no_grad()
def test_polysketch_decodes_from_its_state(full_context: bool) -> None:
    """Prompts that end within, at the end of and after a block of 4; full context reads the state, a window pages."""
    settings = {"polysketch": {"block": 4, "sketch": 3}}
    model = build(ModelConfig(
        d_model=16, n_layers=1, attn_every=1, attn_offset=0, n_heads=4, n_kv_heads=2, head_dim=4, vocab_size=31,
        attn_type="polysketch", mixers=settings, window=True, window_size=6,
    ), seed=0, dtype=torch.float64).eval()  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    tokens_BT, lengths = torch.randint(0, 31, (3, 18), generator=draw), (1, 8, 10)
    expected = model.logits(model.features(tokens_BT, full_context=full_context).hidden_BTD)
    decoder = PagedDecoder(model, texts=3, tokens=18, page=4, full_context=full_context)
    slots = [decoder.begin(row[:length])[0] for row, length in zip(tokens_BT, lengths, strict=True)]
    for done in range(8):
        new = torch.stack([row[length + done] for row, length in zip(tokens_BT, lengths, strict=True)])
        for row, logits_V in enumerate(decoder.step(slots, new)):
            torch.testing.assert_close(logits_V, expected[row, lengths[row] + done], rtol=0, atol=1e-10)
