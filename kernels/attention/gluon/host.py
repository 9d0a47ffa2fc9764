"""Host-side set-up that the Gluon kernels share: tensor descriptors, multiprocessors, and supported inputs."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from .shared import HALF, TILE, TensorDescriptor, _missing, gl


@functools.cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(block), kinds[dtype])


def check_tile_window(window: int | None) -> None:
    """Raise ValueError for a window below 128 keys, which could cut inside the diagonal's tile.

    Args:
        window: Attention window in keys, or None for all earlier keys, which passes.
    """
    if window is not None and window < TILE:
        raise ValueError(
            f"window {window} is smaller than the {TILE}-token tile, which the Gluon kernels do not support; use backend triton"
        )


def head_blocks(x: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of contiguous x [B, T, H, X] as [B, T, H X], in blocks of `rows` tokens of one head."""
    bsz, t, heads, d = x.shape
    block = (1, rows, d)
    return TensorDescriptor(
        x, [bsz, t, heads * d], [t * heads * d, heads * d, 1], list(block), layout(block, x.dtype))  # fmt: skip


def row_blocks(x: Tensor, width: int = HALF) -> Any:
    """Return a TMA descriptor of contiguous x [B, H, T] as [B H, T], in blocks of `width` positions of one head.

    T is padded by zeros to a multiple of 4 where needed, in a copy that later writes to x do not reach: the copy engine
    steps by 16 bytes.
    """
    bsz, h, t = x.shape
    if t % 4:
        # the copy engine steps by multiples of 16 bytes
        x = torch.nn.functional.pad(x, (0, -t % 4))
        t = x.shape[2]
    return TensorDescriptor(x, [bsz * h, t], [t, 1], [1, width], layout((1, width), x.dtype))


@functools.cache
def float_bits(x: float) -> int:
    """Return the bits of x as a float32, as a signed integer."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """Return the reason why the Gluon kernels cannot run on such tensors, or None when they can.

    They need Triton with Hopper's Gluon, compute capability 9.0, bfloat16 or float16, head size 64 or 128, and a window
    of at least 128 or none.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        window: Attention window in keys, or None.
    """
    if _missing:
        return _missing
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {dtype}"
    if head_dim not in (64, 128):
        return f"needs a head size of 64 or 128, got {head_dim}"
    if window is not None and window < TILE:
        return f"window {window} is smaller than the {TILE}-token tile"
    return None
