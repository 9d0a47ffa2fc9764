"""Evaluation in pieces: the same hidden states, whatever the chunk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from atma_sweep.kernels.shapes import query_block
from atma_sweep.model import register_mixer
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, build
from atma_sweep.model.bases import Mixer
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.layers import chunk_bounds, map_chunks
from registries import PAIRS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Awake = Callable[..., Backbone]
T = 43


@pytest.fixture
def rows() -> Tensor:
    """[3, 43] tokens."""
    return torch.randint(0, 37, (3, T), generator=torch.Generator().manual_seed(3))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "window"), [(*pair, window) for pair in PAIRS for window in (False, True)]
)
def test_hidden_states_are_the_same_in_any_pieces(
    awake: Awake, rows: Tensor, attn_type: str, memory: str, window: bool
) -> None:
    # five taps and a memory solved five tokens at a time, so that no border falls together with another
    changes: dict[str, Any] = {"canon_taps": 5, "memories": {"gated_delta": {"chunk": 5}}}
    model = awake(attn_type=attn_type, memory=memory, window=window, **changes)
    with torch.no_grad():
        for full in (False, True):
            at_once = model.features(rows, full_context=full).hidden_BTD
            for chunk in (1, 3, 8, 20, 128):
                pieces = model.features(rows, full_context=full, chunk=chunk).hidden_BTD
                assert (pieces - at_once).abs().max() <= 1e-12
            assert torch.equal(model.features(rows, full_context=full, chunk=3 * T).hidden_BTD, at_once)


def test_losses_are_the_same_in_any_pieces(awake: Awake, rows: Tensor) -> None:
    model = awake()
    with torch.no_grad():
        hidden = model.features(rows).hidden_BTD
        at_once = model.token_losses(hidden, rows)
        assert at_once.shape == (3, T)
        for chunk in (1, 7, 3 * T, 1000):
            assert (model.token_losses(hidden, rows, chunk=chunk) - at_once).abs().max() <= 1e-13


@pytest.mark.usefixtures("registries")
def test_mixer_without_evaluate_runs_forward_at_once(awake: Awake, rows: Tensor) -> None:
    lengths: list[int] = []

    class Average(Mixer):
        """Mean of all values so far."""

        def forward(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None) -> Tensor:
            lengths.append(v_BTJX.shape[1])
            count = torch.arange(1, v_BTJX.shape[1] + 1, dtype=v_BTJX.dtype).view(1, -1, 1, 1)
            return (v_BTJX.cumsum(1) / count).repeat_interleave(2, 2)

    register_mixer("average")(Average)
    model = awake(attn_type="average")
    with torch.no_grad():
        at_once = model.features(rows).hidden_BTD
        assert (model.features(rows, chunk=4).hidden_BTD - at_once).abs().max() <= 1e-12
    assert lengths == [T, T]


def test_impossible_pieces(awake: Awake, rows: Tensor, auxiliary: Callable[..., AuxiliaryTerms]) -> None:
    model = awake()
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        model.features(rows, chunk=0)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        model.token_losses(model.features(rows).hidden_BTD, rows, chunk=0)
    with pytest.raises(ValueError, match="auxiliary terms cannot be computed in chunks"):
        model.features(rows, chunk=8, auxiliary=auxiliary(regularizer="weak"))


def test_bfloat16_stays_bfloat16() -> None:
    model = build(ModelConfig(d_model=24, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, vocab_size=37,
                              memory="gated_delta"), seed=0, dtype=torch.bfloat16)  # fmt: skip
    with torch.no_grad():
        hidden = model.features(torch.arange(30)[None], chunk=7).hidden_BTD
    assert (hidden.dtype, hidden.shape) == (torch.bfloat16, (1, 30, 24))
    assert torch.isfinite(hidden).all()


@pytest.mark.parametrize(("rows", "length", "chunk", "multiple"), [
    (1, 10, 3, 1), (2, 10, 7, 1), (5, 10, 3, 1), (1, 10, 3, 4), (3, 130, 200, 64), (1, 10, 100, 64), (1, 1, 1, 1),
])  # fmt: skip
def test_spans_cover_the_length_once(rows: int, length: int, chunk: int, multiple: int) -> None:
    bounds = list(chunk_bounds(rows, length, chunk, multiple))
    assert [token for start, stop in bounds for token in range(start, stop)] == list(range(length))
    assert all((stop - start) % multiple == 0 for start, stop in bounds[:-1])
    assert max(stop - start for start, stop in bounds) <= max(1, chunk // rows) + multiple - 1


@pytest.mark.parametrize("halo", [0, 1, 4])
def test_a_piece_sees_its_halo_and_no_more(halo: int) -> None:
    """A rising sequence minus its own value `halo` tokens earlier, or minus its first: min(t, halo) at token t."""
    x = torch.arange(23.0).view(1, 23, 1).expand(2, 23, 3)

    def spread(part: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.stack([part[:, max(0, i - halo)] for i in range(part.shape[1])], 1)
        return part - first, part[..., :1]

    for chunk in (2, 5, 11, 46):
        change, same = map_chunks(spread, (x,), chunk, halo)
        assert torch.equal(change, torch.arange(23.0).clamp(max=halo).view(1, 23, 1).expand(2, 23, 3))
        assert torch.equal(same, x[..., :1])


def test_query_blocks_keep_their_scores_within_the_chunk() -> None:
    assert query_block(8192, 1, 65_536) == 256
    assert query_block(8192, 4, 2048) == 1024
    assert query_block(1, 1, 10**9) == 1
    for chunk, rows, length in product((1, 100, 8192), (1, 3), (1, 70, 2047, 65_536)):
        block = query_block(chunk, rows, length)
        assert 1 <= block <= 1024
        assert rows * block * length <= max(2048 * chunk, rows * length)


class Live(TorchDispatchMode):
    """Sums the bytes of all tensors that operations made and that still exist; `peak` is the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = WeakIdKeyDictionary()

    def _forget(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self.seen:
                self.seen[storage] = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self._forget, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


@pytest.mark.parametrize(("attn_type", "memory", "blocks", "with_head"), [
    ("polar", "gated_delta", (3, 5), (7, 7.5)), ("nope", "none", (3, 5), (7, 7.5)),
    # logits of pairs in torch: ten tensors of a block's scores
    ("cope", "none", (6, 10), (7, 10)),
])  # fmt: skip
@pytest.mark.thorough
def test_65536_tokens_of_the_370m_network_take_less_than_20_gb(
    attn_type: str, memory: str, blocks: tuple[float, float], with_head: tuple[float, float]
) -> None:
    """Tensors without data: every operation runs on shapes alone, and their bytes are what they would be.

    Shapes take torch's plain attention, whose scores are real tensors; a fused kernel needs less. Three of the sixteen
    layers run, the last with attention, because the others would take the same memory again.
    """
    with torch.device("meta"):
        network = Backbone(ModelConfig(attn_type=attn_type, memory=memory), dtype=torch.bfloat16)
        model = Backbone(network.config.model_copy(update={"n_layers": 3}), dtype=torch.bfloat16)
        tokens = torch.zeros(1, 65_536, dtype=torch.int64)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    assert 1.3e9 < weights < 1.5e9
    with torch.device("meta"), torch.no_grad(), Live() as watch:
        hidden = model.features(tokens, chunk=8192).hidden_BTD
        assert blocks[0] < (weights + watch.peak) / 1e9 < blocks[1]
        model.token_losses(hidden, tokens, chunk=8192)
        assert with_head[0] < (weights + watch.peak) / 1e9 < with_head[1]
        model.token_losses(hidden, tokens, chunk=65_536)
        assert weights + watch.peak > 40e9, "whole"
