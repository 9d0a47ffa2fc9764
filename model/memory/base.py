"""What a memory is: a recurrent branch beside the mixer of every global layer.

B batch, T length, H query heads, J KV heads, X head size, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..parts import MemoryConfig as MemoryConfig
from ..parts import MemoryOutline


class Memory(MemoryOutline, nn.Module):
    """A causal branch over the mixer's q, k and v whose output is added after the output projection."""

    def __init__(self, model: ModelConfig, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        """[B, T, D] to add. x is the block's normed input; q, k, v are the mixer's, before any rotation."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """`forward` for evaluation, which works through `chunk` tokens at a time. The default is `forward` itself."""
        return self.forward(x_BTD, q_BTHX, k_BTJX, v_BTJX)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        return {}
