"""Attention of one new token per text: over pages by this package, over dense keys by cuDNN and FlashAttention."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.key_gated_step.op import KeyGates, paged_wall_from_keys
from ...kernels.paged.op import paged_polar, paged_softmax
from ...kernels.paged.page_tables import PAGE, Texts
from ...kernels.wall_step import fp8
from ...kernels.wall_step.op import MAX_CHUNK, paged_wall
from ...model.bases import Mixer
from ...model.mixers import softmax as softmax_mixers

SIZES = ((512, 512), (64, 4096), (8, 65536), (1, 65536))
"""(Number of texts, tokens of each)."""
WALL_SIZES = ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 4096), (16, 32768))
"""(Number of texts, tokens of each) of Wall attention."""
STEEPEST_LOG2 = 0.02
"""Largest fall of the timed gates per token, in units of log 2."""
CACHE_PARTS = 7
"""Tensors of `wall_inputs` for each number of gate heads."""
DENSE = {"softmax, cuDNN": SDPBackend.CUDNN_ATTENTION, "softmax, flash": SDPBackend.FLASH_ATTENTION}
BASELINE = "softmax, cuDNN"


def texts(b: int, tokens: int, device: torch.device) -> Texts:
    """Return the page table of `b` texts of equal length, stored one after the other in a pool that they fill."""
    pages = -(-tokens // PAGE)
    table = torch.arange(b * pages, dtype=torch.int32, device=device).view(b, pages)
    return Texts(table, torch.full((b,), tokens, dtype=torch.int32, device=device))


def dense(b: int, tokens: int, backend: SDPBackend) -> Callable[..., Tensor]:
    """Return softmax attention of one token per text by a backend of torch.

    The function takes queries [B, H, X] and pools of keys and values [pages, PAGE, J, X] in which each text is
    contiguous, and returns [B, H, X]. `b` is not used; the queries give the number of texts.

    Args:
        b: Number of texts.
        tokens: Tokens of each text that are read.
        backend: Backend of torch.
    """

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        return _dense_attention(q_BHX, k_pool, v_pool, tokens, backend)

    return call


def _dense_attention(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tokens: int, backend: SDPBackend, scale: float | None = None
) -> Tensor:
    """Return softmax attention [B, H, X] over the first `tokens` tokens of each of B texts.

    Args:
        q_BHX: Queries, one per text and head.
        k_pool: Keys [pages, PAGE, J, X], filled by texts of equal length, one after the other.
        v_pool: Values, laid out as the keys.
        tokens: Tokens of each text that are read.
        backend: Backend of torch.
        scale: Factor of the scores; None for 1 / sqrt(X).
    """
    k, v = (pool.view(len(q_BHX), -1, *pool.shape[2:])[:, :tokens].transpose(1, 2) for pool in (k_pool, v_pool))
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q_BHX[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]


@torch.library.custom_op("atma_bench::dense_attend", mutates_args=())
def _dense_attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, first: int, tokens: int, scale: float, backend: str
) -> Tensor:
    """Return `_dense_attention` of texts that start at page `first`, as one operation for the compiler.

    `backend` is the name of an SDPBackend member, the other arguments are those of `_dense_attention`.
    """
    own = slice(first, first + len(q_BHX) * -(-tokens // k_pool.shape[1]))
    named = getattr(SDPBackend, backend)
    return _dense_attention(q_BHX, k_pool[own], v_pool[own], tokens, named, scale).contiguous()


@_dense_attend.register_fake
def _(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, first: int, tokens: int, scale: float, backend: str) -> Tensor:
    return torch.empty_like(q_BHX, memory_format=torch.contiguous_format)


def takes_dense(model: torch.nn.Module) -> bool:
    """Return True if every mixer of the network is plain softmax attention, which `dense_network` can replace.

    False for a network without mixers.
    """
    steps = [type(part).step for part in model.modules() if isinstance(part, Mixer)]
    return bool(steps) and all(step is softmax_mixers.NoPE.step for step in steps)


@contextmanager
def dense_network(tokens: int, backend: SDPBackend) -> Iterator[None]:
    """Replace paged softmax attention by torch's, over dense keys, while the context is open.

    Each step reads the first `tokens` tokens of each text contiguously from page 1 on, as if texts were opened one
    after the other. Newer tokens are not read, which favours the replacement. It sets a global of the module
    `softmax_mixers`, which is restored at the end.

    Args:
        tokens: Tokens of each text that are read.
        backend: Backend of torch.
    """
    original = softmax_mixers.paged_softmax

    def dense_attention(
        q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, _: Texts, *, scale: float | None, window: int | None
    ) -> Any:
        """Return the attention of one step, in place of `paged_softmax`; sliding windows are not supported."""
        assert window is None
        scale = q_BHX.shape[-1] ** -0.5 if scale is None else scale
        return _dense_attend(q_BHX, k_pool, v_pool, 1, tokens, scale, backend.name)

    softmax_mixers.paged_softmax = dense_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        softmax_mixers.paged_softmax = original


def paged(b: int, tokens: int, device: torch.device, per_head: list[Tensor] | None = None) -> Callable[..., object]:
    """Return attention of one token per text over pages that `b` texts fill: softmax, or polar attention.

    The function takes queries [B, H, X] and pools of keys and values [pages, PAGE, J, X], as `texts` lays them out.

    Args:
        b: Number of texts.
        tokens: Tokens of each text.
        device: Device of the page table.
        per_head: Base, slope, length gain, magnitude gain and null value of polar attention; None for softmax.
    """
    page_texts = texts(b, tokens, device)

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor) -> object:
        if per_head is None:
            return paged_softmax(q_BHX, k_pool, v_pool, page_texts)
        base, slope, gain, beta, v_null = per_head
        return paged_polar(q_BHX, k_pool, v_pool, base, slope, gain, beta, v_null, page_texts)

    return call


def wall_inputs(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, gate_heads: Sequence[int], tokens: int) -> list[Tensor]:
    """Return inputs of steps of Wall attention: q, k, v, and for each number of gate heads P what its cache holds.

    The latter are the keys with their decay [pages, PAGE, P, X], the float64 sums of log gates at the first of every 64
    tokens [pages, PAGE / 64, P, X], those at the last token, [B, P, X], and of an 8-bit cache keys, values and their
    powers of two. Every gate is constant over tokens, between
    2^-0.02 and 1, drawn from torch's generator.

    Args:
        q_BHX: Queries.
        k_pool: Keys [pages, PAGE, J, X], of texts of equal length that fill their pages, one after the other.
        v_pool: Values, laid out as the keys.
        gate_heads: Numbers of gate heads, J or H.
        tokens: Tokens of each text, a multiple of PAGE.
    """
    (b, _, x), j, rows, inputs = q_BHX.shape, k_pool.shape[2], PAGE // MAX_CHUNK, [q_BHX, k_pool, v_pool]
    for p in gate_heads:
        rate_PX = STEEPEST_LOG2 * math.log(2) * torch.rand(p, x, dtype=torch.float64, device=q_BHX.device)
        at_C = torch.arange(MAX_CHUNK, device=q_BHX.device)[:, None, None]
        grown = torch.exp(at_C * rate_PX).to(k_pool.dtype).repeat(rows, 1, 1)
        first = torch.arange(1, tokens + 1, MAX_CHUNK, device=q_BHX.device)[:, None, None]
        anchor = (-first * rate_PX).unflatten(0, (-1, rows)).repeat(b, 1, 1, 1)
        decayed = k_pool.repeat_interleave(p // j, 2) * grown
        shared = fp8.shift_tokens(STEEPEST_LOG2 * math.log(2))
        own_shift = fp8.key_shifts(-at_C * rate_PX, torch.zeros_like(rate_PX))[::shared].repeat(rows, 1, 1)
        k_shift, v_shift = own_shift.expand(len(k_pool), -1, -1, -1).contiguous(), fp8.value_shifts(v_pool)
        inputs += [
            decayed,
            anchor,
            (-tokens * rate_PX).expand(b, p, x).contiguous(),
            fp8.quantize(decayed, k_shift.repeat_interleave(shared, 1)),
            fp8.quantize(v_pool, v_shift[..., None]),
            k_shift,
            v_shift,
        ]
    return inputs


def wall(
    b: int, tokens: int, device: torch.device, case: int = 0, *, eight_bits: bool = False
) -> Callable[..., Tensor]:
    """Return Wall attention of one token per text, as a function of `wall_inputs` that gives [B, H, X].

    Args:
        b: Number of texts.
        tokens: Tokens of each text.
        device: Device of the page table.
        case: Index of the number of gate heads whose cache is read.
        eight_bits: True to read the 8-bit cache.
    """
    page_texts = texts(b, tokens, device)

    def call(q_BHX: Tensor, _: Tensor, v_pool: Tensor, *caches: Tensor) -> Tensor:
        """Return the attention of one case, [B, H, X]; the arguments are `wall_inputs`."""
        k_pool, anchor_pool, fall_BPX, *packed = caches[CACHE_PARTS * case : CACHE_PARTS * (case + 1)]
        shifts: list[Tensor] = []
        if eight_bits:
            k_pool, v_pool, *shifts = packed
        return paged_wall(q_BHX, k_pool, v_pool, anchor_pool, fall_BPX, page_texts, shifts=shifts)

    return call


def wall_from_keys(b: int, tokens: int, device: torch.device, gates: KeyGates) -> Callable[..., Tensor]:
    """Return Wall attention of one token per text with gates from plain keys, from the q, k and v of `wall_inputs`.

    Args:
        b: Number of texts.
        tokens: Tokens of each text.
        device: Device of the page table.
        gates: Projection of keys to gates.
    """
    page_texts = texts(b, tokens, device)

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, *_: Tensor) -> Tensor:
        return paged_wall_from_keys(q_BHX, k_pool, v_pool, gates, page_texts)

    return call


def fla_wall(q_BHX: Tensor, _: Tensor, v_pool: Tensor, *caches: Tensor) -> Tensor:
    """Return Wall attention [B, H, X] by flash-linear-attention, from `wall_inputs` whose last case has P = H."""
    b, x = len(q_BHX), q_BHX.shape[-1]
    k_pool, anchor_pool, fall_BPX = caches[-CACHE_PARTS:][:3]
    k, v = (pool.view(b, -1, *pool.shape[2:]) for pool in (k_pool, v_pool))
    anchor, newest = (
        (part / math.log(2)).float() for part in (anchor_pool.view(b, -1, *anchor_pool.shape[2:]), fall_BPX)
    )
    decode = importlib.import_module("fla.ops.wall_attn").parallel_wall_attn_decode
    y: Tensor = decode(q_BHX[:, None], v, newest[:, None], k, anchor, None, x**-0.5, MAX_CHUNK)[0]
    return y[:, 0]


def unsupported_reason(backend: SDPBackend, device: torch.device, heads: int, kv_heads: int, size: int) -> str | None:
    """Return torch's reason why a backend cannot attend with one query per text on this device, or None if it can.

    The backend is tried on small tensors of bf16. Devices other than CUDA are not checked and give None.

    Args:
        backend: Backend of torch.
        device: Device to try it on.
        heads: Query heads.
        kv_heads: KV heads.
        size: Head size.
    """
    if device.type != "cuda":
        return None
    tensors = [torch.zeros(2, n, size, device=device, dtype=torch.bfloat16) for n in (heads, PAGE * kv_heads)]
    pool = tensors[1].view(2, PAGE, kv_heads, size)
    try:
        dense(2, PAGE, backend)(tensors[0], pool, pool)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
