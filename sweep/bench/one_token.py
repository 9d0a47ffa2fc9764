"""Attention of one new token a text: over pages by our kernels, and over dense keys by cuDNN and FlashAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.paged.attention import paged_polar, paged_softmax
from ...kernels.paged.pages import PAGE, Texts

SIZES = ((512, 512), (64, 4096), (8, 65536), (1, 65536))
"""Texts, and tokens of each."""
DENSE = {"softmax, cuDNN": SDPBackend.CUDNN_ATTENTION, "softmax, flash": SDPBackend.FLASH_ATTENTION}
YARDSTICK = "softmax, cuDNN"


def texts(b: int, tokens: int, device: torch.device) -> Texts:
    """B texts of one length, one behind the other in a pool that they fill."""
    pages = -(-tokens // PAGE)
    table = torch.arange(b * pages, dtype=torch.int32, device=device).view(b, pages)
    return Texts(table, torch.full((b,), tokens, dtype=torch.int32, device=device))


def dense(b: int, tokens: int, backend: SDPBackend) -> Callable[..., Tensor]:
    """softmax(q k') v of [B, H, X] over the same pools, which here hold each text in one piece: [B, H, X]."""

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        k, v = (pool.view(b, -1, *pool.shape[2:])[:, :tokens].transpose(1, 2) for pool in (k_pool, v_pool))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q_BHX[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return call


def paged(b: int, tokens: int, device: torch.device, per_head: list[Tensor] | None = None) -> Callable[..., object]:
    """Softmax attention of the same tensors in pages, or with `per_head`, its parameters, polar attention."""
    where = texts(b, tokens, device)

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor) -> object:
        if per_head is None:
            return paged_softmax(q_BHX, k_pool, v_pool, where)
        base, slope, gain, beta, v_null = per_head
        return paged_polar(q_BHX, k_pool, v_pool, base, slope, gain, beta, v_null, where)

    return call


def why_not(backend: SDPBackend, device: torch.device, heads: int, kv_heads: int, size: int) -> str | None:
    """What torch says against one query a text on this device; None where it takes it."""
    if device.type != "cuda":
        return None
    tensors = [torch.zeros(2, n, size, device=device, dtype=torch.bfloat16) for n in (heads, PAGE * kv_heads)]
    pool = tensors[1].view(2, PAGE, kv_heads, size)
    try:
        dense(2, PAGE, backend)(tensors[0], pool, pool)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
