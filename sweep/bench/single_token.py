"""Attention of one new token per text: over pages by this package, over dense keys by cuDNN and FlashAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.paged.op import paged_polar, paged_softmax
from ...kernels.paged.page_tables import PAGE, Texts
from ...model.bases import Mixer
from ...model.mixers import softmax as softmax_mixers

SIZES = ((512, 512), (64, 4096), (8, 65536), (1, 65536))
"""(Number of texts, tokens of each)."""
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
