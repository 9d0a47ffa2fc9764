"""Attention of one new token a text: over pages by our kernels, and over dense keys by cuDNN and FlashAttention."""

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
        return _in_one_piece(q_BHX, k_pool, v_pool, tokens, backend)

    return call


def _in_one_piece(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, tokens: int, backend: SDPBackend, scale: float | None = None
) -> Tensor:
    """[B, H, X]: over the first `tokens` tokens of each text of pools that B texts of one length fill, one behind the other."""
    k, v = (pool.view(len(q_BHX), -1, *pool.shape[2:])[:, :tokens].transpose(1, 2) for pool in (k_pool, v_pool))
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q_BHX[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]


@torch.library.custom_op("atma_bench::dense_attend", mutates_args=())
def _dense_attend(
    q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, first: int, tokens: int, scale: float, backend: str
) -> Tensor:
    """The same as one operation for the compiler, with the texts in the pools from page `first` on."""
    own = slice(first, first + len(q_BHX) * -(-tokens // k_pool.shape[1]))
    named = getattr(SDPBackend, backend)
    return _in_one_piece(q_BHX, k_pool[own], v_pool[own], tokens, named, scale).contiguous()


@_dense_attend.register_fake
def _(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, first: int, tokens: int, scale: float, backend: str) -> Tensor:
    return torch.empty_like(q_BHX, memory_format=torch.contiguous_format)


def takes_dense(model: torch.nn.Module) -> bool:
    """Whether the network's attention is plain softmax, which `dense_network` can work out otherwise."""
    steps = [type(part).step for part in model.modules() if isinstance(part, Mixer)]
    return bool(steps) and all(step is softmax_mixers.NoPE.step for step in steps)


@contextmanager
def dense_network(tokens: int, backend: SDPBackend) -> Iterator[None]:
    """Within, a step of softmax attention reads the first `tokens` tokens of each text as one piece from page 1 on, as texts lie that
    were opened one after the other. It reads none of the newer ones, which is in its favour."""
    ours = softmax_mixers.paged_softmax

    def theirs(
        q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor, _: Texts, *, scale: float | None, window: int | None
    ) -> Any:
        assert window is None
        scale = q_BHX.shape[-1] ** -0.5 if scale is None else scale
        return _dense_attend(q_BHX, k_pool, v_pool, 1, tokens, scale, backend.name)

    softmax_mixers.paged_softmax = theirs  # type: ignore[assignment]
    try:
        yield
    finally:
        softmax_mixers.paged_softmax = ours


def paged(b: int, tokens: int, device: torch.device, per_head: list[Tensor] | None = None) -> Callable[..., object]:
    """Softmax attention of the same tensors in pages, or with `per_head`, its parameters, polar attention."""
    where = texts(b, tokens, device)

    def call(q_BHX: Tensor, k_pool: Tensor, v_pool: Tensor) -> object:
        if per_head is None:
            return paged_softmax(q_BHX, k_pool, v_pool, where)
        base, slope, gain, beta, v_null = per_head
        return paged_polar(q_BHX, k_pool, v_pool, base, slope, gain, beta, v_null, where)

    return call


def unsupported_reason(backend: SDPBackend, device: torch.device, heads: int, kv_heads: int, size: int) -> str | None:
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
