"""Work and state of the layers of flash-linear-attention: closed forms against hand counts, torch's counter and naive forms.

Letters of shapes: T length, D model width, H heads, J KV heads, X head size, S keys, C tokens per chunk.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from atma_sweep.model.block_parts import fla_catalogue, fla_costs
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.mixers import path
from atma_sweep.model.registry import MIXERS
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

if not fla_catalogue.fla_names():
    pytest.skip("needs flash-linear-attention", allow_module_level=True)

MEAN = 513 / 2
"""Keys of a token on average in a row of 512 tokens."""
KERNEL_FLOPS = {
    "DeltaFormerAttention": 8 * 1024 * MEAN,
    "Parallax": 8 * 1024 * MEAN,
    "BasedLinearAttention": 2 * 12 * (16 + 1024 / 12) * MEAN,
    "ReBasedLinearAttention": 2 * 16 * (16 + 64) * MEAN,
    "MomentumDeltaNet": 10 * 4 * 256 * 512,
    "MesaNet": 16 * 128 * 128 * (3 + 3 + 2 + 60),
    "Mamba3": 2048 * 128 * (1 + 4 + 2),
    "Raven": 4 * 2 * 5 * 256 * 256,
    "RodimusAttention": 5 * 64 * 2048,
    "CyclicFlowAttention": 4 * (5 * 128 * 512 + 2 * 2 * 127 * 128),
}
"""Work of a layer beside projections and convolutions, FLOPs per token at width 1024 in rows of 512 tokens."""
WIDTH, TOKENS, CHUNK = 64, 24, 4
"""Sizes of the naive forms; CHUNK replaces the chunks of fla's kernels."""


def default_settings(name: str) -> dict[str, Any]:
    return {key: argument.default for key, argument in fla_catalogue.fla_layer(name).arguments.items()}


def test_state_of_a_gated_delta_net_by_hand() -> None:
    """Six heads of [256, 512] in float32, and four inputs of the convolutions on q, k and v in 16 bits."""
    convolutions = 4 * (6 * 256 + 6 * 256 + 6 * 512)
    bytes_ = fla_costs.state_bytes("GatedDeltaNet", default_settings("GatedDeltaNet"), 1024)
    assert bytes_ == (4 * 6 * 256 * 512 + 2 * convolutions, 0)


def test_states_of_layers_without_cpu_kernels_by_hand() -> None:
    """The shapes that their source allocates, at width 1024 with fla's defaults."""
    mamba3 = 4 * (2048 * 128 + 32 * 32) + 2 * (32 * 128 + 2048)  # state, angles; last key of each head, and value
    assert fla_costs.state_bytes("Mamba3", default_settings("Mamba3"), 1024) == (mamba3, 0)
    mesa = 4 * 2 * 16 * 128 * 128 + 2 * 4 * 2 * 2048  # two states of 16 heads; convolutions on q and k
    assert fla_costs.state_bytes("MesaNet", default_settings("MesaNet"), 1024) == (mesa, 0)
    # 256 chunks of 64 tokens give levels 0 to 8, and fla stores one more
    matrices, chunk = 10 * 32 * 128 * 64, 64 * (2 * 128 + 32 * 64)
    log_linear = 4 * (matrices + 1 + 64 * 32 * (1 + 15)) + 2 * (chunk + 4 * (2048 + 2 * 128))
    assert fla_costs.state_bytes("LogLinearMamba2", default_settings("LogLinearMamba2"), 1024) == (log_linear, 0)


@pytest.mark.parametrize(("span", "keys"), [
    (fla_costs.KeySpan(1.0), lambda token: token),
    (fla_costs.KeySpan(1.0, 10), lambda token: min(token, 10)),
    (fla_costs.KeySpan(1.0, 100), lambda token: token),
    (fla_costs.KeySpan(1.0, 12, 4), lambda token: min((token - 1) // 4, 2) * 4 + (token - 1) % 4 + 1),
    (fla_costs.BlockSpan(1.0, 4), lambda token: token // 4),
    (fla_costs.BlockSpan(1.0, 5), lambda token: token // 5),
    (fla_costs.BlockSpan(1.0, 100), lambda token: 0),
    (fla_costs.LevelSpan(1.0, 4), lambda token: bin((token - 1) // 4).count("1")),
    (fla_costs.LevelSpan(1.0, 5), lambda token: bin((token - 1) // 5).count("1")),
])  # fmt: skip
def test_mean_keys_of_a_span_by_counting(span: Any, keys: Callable[[int], int]) -> None:
    """Keys, blocks or states of each token of a row of 64, counted."""
    assert span.mean_keys(65 / 2) == pytest.approx(sum(map(keys, range(1, 65))) / 64, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(KERNEL_FLOPS))
def test_flops_are_torch_projections_and_kernel_by_hand(name: str) -> None:
    """At width 1024, rows of 512: projections of the layer on the meta device by torch's counter, and KERNEL_FLOPS."""
    part = MIXERS.load(f"fla:{name}")
    config = part.Config()
    with torch.device("meta"):
        inner = part(ModelConfig(d_model=1024, n_layers=2), config).inner
    linears = [module for module in inner.modules() if isinstance(module, nn.Linear)]
    with FlopCounterMode(display=False) as counter:
        for linear in linears:
            linear(torch.empty(1, linear.in_features, device="meta"))
    taps = sum(2 * module.weight.numel() for module in inner.modules() if isinstance(module, nn.Conv1d))
    flops = part.forward_flops(ModelConfig(d_model=1024, n_layers=2), config, MEAN)
    assert flops == pytest.approx(counter.get_total_flops() + taps + KERNEL_FLOPS[name], rel=1e-12)


def project(module: nn.Module, x_TD: Tensor) -> Tensor:
    """The products of a projection; norms within it, which have kernels, are left out."""
    for linear in module.modules():
        x_TD = linear(x_TD) if isinstance(linear, nn.Linear) else x_TD
    return x_TD


def convolve(module: nn.Conv1d, x_TD: Tensor) -> Tensor:
    taps = module.weight.shape[-1]
    return functional.conv1d(functional.pad(x_TD.T, (taps - 1, 0)), module.weight, groups=len(module.weight)).T


def heads(x_TD: Tensor, size: int, copies: int = 1) -> Tensor:
    """[H, T, X], each KV head as often as query heads share it."""
    return x_TD.unflatten(-1, (-1, size)).transpose(0, 1).repeat_interleave(copies, 0)


def attend(q_HX: Tensor, k_HSX: Tensor, v_HSX: Tensor) -> Tensor:
    """Mean of one query's values [H, X], weighted by its scores."""
    return (q_HX[:, None] @ k_HSX.mT).softmax(-1).matmul(v_HSX)[:, 0]


def means(x_HTX: Tensor, size: int) -> Tensor:
    """Means of the complete blocks, [H, N, X]."""
    return x_HTX[:, : x_HTX.shape[1] // size * size].unflatten(1, (-1, size)).mean(2)


def naive_latent(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Multi-head latent attention: rotary keys are shared by the heads, values are smaller than keys."""
    nope, size = layer.qk_nope_head_dim, layer.qk_nope_head_dim + layer.v_head_dim
    q_HTX = heads(project(layer.q_proj, x_TD), layer.qk_head_dim)
    kv_HTX = heads(project(layer.kv_proj, x_TD), size)
    rotary_HTX = layer.k_rope(x_TD).expand(layer.num_heads, -1, -1)
    k_HTX, v_HTX = torch.cat([kv_HTX[..., :nope], rotary_HTX], -1), kv_HTX[..., nope:]
    for token in range(TOKENS):
        seen = slice(0 if layer.window_size is None else max(0, token + 1 - layer.window_size), token + 1)
        layer.o_proj(attend(q_HTX[:, token], k_HTX[:, seen], v_HTX[:, seen]).flatten())
        yield 0


def naive_shared_key(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Attention to a window with one key head."""
    q_HTX, v_HTX = (heads(module(x_TD), layer.head_dim) for module in (layer.q_proj, layer.v_proj))
    k_HTX = heads(layer.k_proj(x_TD), layer.head_dim, layer.num_heads)
    for token in range(TOKENS):
        seen = slice(max(0, token + 1 - layer.window_size), token + 1)
        layer.o_proj(attend(q_HTX[:, token], k_HTX[:, seen], v_HTX[:, seen]).flatten())
        yield 0


def naive_selected(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Mixture of block attention: the token's own block, and the best of the others by the mean key. Here the first."""
    size, most = layer.moba_chunk_size, layer.moba_topk
    q_HTX = heads(layer.q_proj(x_TD), layer.head_dim)
    k_HTX, v_HTX = (heads(module(x_TD), layer.head_dim, layer.num_kv_groups) for module in (layer.k_proj, layer.v_proj))
    for token in range(TOKENS):
        own = token // size
        if most > 1:
            q_HTX[:, token, None] @ means(k_HTX[:, : token + 1], size).mT
        blocks = [*range(min(own, most - 1 if most > 1 else own)), own]
        seen = [key for block in blocks for key in range(block * size, min(token + 1, (block + 1) * size))]
        layer.o_proj(attend(q_HTX[:, token], k_HTX[:, seen], v_HTX[:, seen]).flatten())
        yield 0


def naive_sparse(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Native sparse attention: means of blocks, which select blocks (here the first, and the own one), and a window."""
    size = layer.block_size
    q_HTX = heads(layer.q_proj(x_TD), layer.head_dim)
    k_HTX, v_HTX = (heads(module(x_TD), layer.head_dim, layer.num_kv_groups) for module in (layer.k_proj, layer.v_proj))
    for token in range(TOKENS):
        q_HX, now, own = q_HTX[:, token], token + 1, token // size
        blocks = [*range(min(own, layer.block_counts - 1)), own]
        seen = [key for block in blocks for key in range(block * size, min(now, (block + 1) * size))]
        y_HX = attend(q_HX, means(k_HTX[:, :now], size), means(v_HTX[:, :now], size))
        y_HX = y_HX + attend(q_HX, k_HTX[:, seen], v_HTX[:, seen])
        if layer.window_size:
            seen = range(max(0, now - layer.window_size), now)
            y_HX = y_HX + attend(q_HX, k_HTX[:, seen], v_HTX[:, seen])
        layer.g_proj(x_TD[token])
        layer.o_proj(y_HX.flatten())
        yield 0


def naive_mixture(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Mixture of memories: a gated delta rule in each memory of a token (here the first), and in the shared one."""
    for token in range(TOKENS):
        x_1D = x_TD[token, None]
        layer.gate(x_1D)
        layer.g_proj(x_1D)
        for memory in (*range(layer.topk), *(["shared"] if layer.shared_mem else [])):
            if layer.single_kv_proj or memory == "shared":
                k, v, a, b = layer.shared_k, layer.shared_v, layer.shared_a, layer.shared_b
            else:
                k, v, a, b = (getattr(layer, f"{letter}_proj")[memory] for letter in "kvab")
            q_H1X, k_H1X, v_H1X = (
                heads(convolve(taps, projection(x_1D)), size)
                for taps, projection, size in (
                    (layer.q_conv1d, layer.q_proj, layer.head_dim), (layer.k_conv1d, k, layer.head_dim),
                    (layer.v_conv1d, v, layer.head_v_dim),
                )
            )  # fmt: skip
            a(x_1D), b(x_1D)
            state = torch.zeros(layer.num_heads, layer.head_dim, layer.head_v_dim)
            yield state.numel()
            state = state + k_H1X.mT @ (v_H1X - k_H1X @ state)
            y_H1X = q_H1X @ state
        layer.o_proj(y_H1X.flatten())


def naive_path(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """PaTH: within a chunk by a triangular solve, row by row; each chunk's transition moves the queries of later ones."""
    q_HTX, size = heads(layer.q_proj(x_TD), layer.head_dim), layer.head_dim
    w_D = project(layer.w_proj, x_TD)
    k_JTX, v_JTX = heads(layer.k_proj(x_TD), size), heads(layer.v_proj(x_TD), size)
    w_JTX = heads(convolve(layer.w_conv1d, w_D) if layer.use_w_shortconv else w_D, size)
    layer.bt_proj(x_TD)
    chunks = []
    copies = layer.num_heads // layer.num_kv_heads
    for first in range(0, TOKENS, CHUNK):
        w, k = w_JTX[:, first : first + CHUNK], k_JTX[:, first : first + CHUNK]
        lower, solved = w @ w.mT, torch.cat([w, (w @ k.mT).tril(-1)], -1)
        for row in range(1, CHUNK):
            solved[:, row, None] -= lower[:, row, None, :row] @ solved[:, :row]
        u, moved = solved[..., :size], solved[..., size:]
        tensors = w, u, k, moved, k - moved.mT @ w
        chunks.append([tensor.repeat_interleave(copies, 0) for tensor in tensors])
    for token in range(TOKENS):
        q_H1X, own, rest = q_HTX[:, token, None], token // CHUNK, token % CHUNK + 1
        w, u, k, moved, _ = chunks[own]
        along = q_H1X @ w[:, :rest].mT
        scores = [q_H1X @ k[:, :rest].mT - functional.pad(along, (0, CHUNK - rest)) @ moved[..., :rest]]
        q_H1X = q_H1X - along @ u[:, :rest]
        for w, u, _, _, k in reversed(chunks[:own]):
            scores.append(q_H1X @ k.mT)
            q_H1X = q_H1X - (q_H1X @ w.mT) @ u
        y_H1X = torch.cat(scores[::-1], -1).softmax(-1) @ v_JTX[:, : token + 1].repeat_interleave(copies, 0)
        layer.o_proj(y_H1X.flatten())
        yield 0


def naive_log_linear(layer: Any, x_TD: Tensor) -> Iterator[int]:
    """Log-linear attention: the own chunk by pairs of tokens; states of 1, 2, 4, ... earlier chunks as a binary counter."""
    inner, keys, size = layer.intermediate_size, layer.n_groups * layer.ssm_state_size, layer.ssm_state_size
    convolved = convolve(layer.conv1d, layer.in_proj(x_TD)[:, inner : 2 * inner + 2 * keys])
    values, k_TD, q_TD = convolved.split([inner, keys, keys], -1)
    v_HTX, copies = heads(values, layer.head_dim), layer.num_heads // layer.n_groups
    k_HTX, q_HTX = heads(k_TD, size, copies), heads(q_TD, size, copies)
    levels: dict[int, Tensor] = {}
    for token in range(TOKENS):
        first, q_H1X = token // CHUNK * CHUNK, q_HTX[:, token, None]
        y_HX = attend(q_HTX[:, token], k_HTX[:, first : token + 1], v_HTX[:, first : token + 1])
        for state in levels.values():
            y_HX = y_HX + (q_H1X @ state)[:, 0]
        layer.out_proj(y_HX.flatten())
        if token % CHUNK == CHUNK - 1:
            yield sum(state.numel() for state in levels.values())
            carried, level = k_HTX[:, first : token + 1].mT @ v_HTX[:, first : token + 1], 0
            while level in levels:
                carried, level = carried + levels.pop(level), level + 1
            levels[level] = carried


@pytest.mark.parametrize("rank", [None, 12])
def test_flops_of_our_path_are_those_of_the_naive_form(monkeypatch: pytest.MonkeyPatch, rank: int | None) -> None:
    """The mixer's projections of w and beta count; those of q, k, v and the result are the layer's."""
    monkeypatch.setattr(path, "CHUNK", CHUNK)
    model = ModelConfig(d_model=WIDTH, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16)
    config = path.PaTHConfig(rank=rank)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        mixer, k_TE, q_TE = path.PaTH(model, config), torch.empty(TOKENS, 32), torch.empty(TOKENS, 64)
        low = [] if mixer.low is None else [nn.Linear(WIDTH, mixer.w.weight.shape[1])]
        layer = SimpleNamespace(
            head_dim=16, num_heads=4, num_kv_heads=2, use_w_shortconv=False, q_proj=lambda _: q_TE,
            k_proj=lambda _: k_TE, v_proj=lambda _: k_TE, o_proj=lambda _: None,
            w_proj=nn.Sequential(*low, nn.Linear(*reversed(mixer.w.weight.shape))),
            bt_proj=nn.Linear(WIDTH, 2),
        )  # fmt: skip
        assert sum(naive_path(layer, torch.empty(TOKENS, WIDTH))) == 0
    flops = path.PaTH.forward_flops(model, config, (TOKENS + 1) / 2)
    assert flops * TOKENS == pytest.approx(counter.get_total_flops(), rel=1e-12)


SHARED = {"num_heads": 4, "head_dim": 16}
NAIVE: list[tuple[str, Callable[[Any, Tensor], Iterator[int]], dict[str, Any]]] = [
    ("MultiheadLatentAttention", naive_latent, {
        "num_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
        "qk_head_dim": 16, "v_head_dim": 8,
    }),
    ("MultiheadLatentAttention", naive_latent, {"num_heads": 4, "q_lora_rank": None, "window_size": 5}),
    ("SlidingWindowSharedKeyAttention", naive_shared_key, {"num_heads": 4, "window_size": 7}),
    ("MoBA", naive_selected, {"num_heads": 4, "num_kv_heads": 2, "moba_chunk_size": 4, "moba_topk": 3}),
    ("MoBA", naive_selected, {"num_heads": 4, "moba_chunk_size": 4, "moba_topk": 1}),
    ("NativeSparseAttention", naive_sparse, {
        **SHARED, "num_kv_heads": 2, "block_size": 4, "block_counts": 3, "window_size": 6,
    }),
    ("NativeSparseAttention", naive_sparse, {**SHARED, "block_size": 4, "block_counts": 2, "window_size": 0}),
    ("MomAttention", naive_mixture, {**SHARED, "num_memories": 5, "topk": 2, "shared_mem": True}),
    ("MomAttention", naive_mixture, {**SHARED, "num_memories": 3, "topk": 2, "single_kv_proj": True}),
    ("PaTHAttention", naive_path, {"num_heads": 4, "num_kv_heads": 2}),
    ("PaTHAttention", naive_path, {"num_heads": 2, "use_low_rank_w": False, "use_w_shortconv": False}),
    ("LogLinearMamba2", naive_log_linear, {"head_dim": 16, "state_size": 8, "n_groups": 2, "use_conv_bias": False}),
]  # fmt: skip
"""Layer, its naive form, and its settings. A form yields the entries of states that decay, which torch does not count."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "naive", "settings"), NAIVE, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(NAIVE)]
)
def test_flops_are_those_of_a_naive_form(
    monkeypatch: pytest.MonkeyPatch, name: str, naive: Callable[[Any, Tensor], Iterator[int]], settings: dict[str, Any]
) -> None:
    """A row of 24 tokens, written out token by token on the meta device with the layer's own projections."""
    monkeypatch.setattr(fla_costs, "PATH_CHUNK", CHUNK)
    monkeypatch.setattr(fla_costs, "LOG_LINEAR_CHUNK", CHUNK)
    module = importlib.import_module(fla_catalogue.fla_layer(name).module)
    monkeypatch.setattr(module, "flash_attn_func", math.nan, raising=False)  # MLA only looks whether it is there
    part, model = MIXERS.load(f"fla:{name}"), ModelConfig(d_model=WIDTH, n_layers=2)
    config = part.Config(**settings)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        decayed = sum(naive(part(model, config).inner, torch.empty(TOKENS, WIDTH)))
    flops = part.forward_flops(model, config, (TOKENS + 1) / 2)
    assert flops * TOKENS == pytest.approx(counter.get_total_flops() + decayed, rel=1e-12)
