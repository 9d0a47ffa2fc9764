"""Mixing branch of a block that holds a block part.

Letters of shapes: B batch, T length, D model width, R distractors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..bases import BlockPart
from ..config import ModelConfig
from ..kv_cache import CacheCapacity, DecodeStep, has_step
from ..layers import Linear, RMSNorm
from ..registry import MIXERS
from ..resolve import mixer_settings


class BlockLayer(nn.Module):
    """Global layer of a network whose `attn_type` names a block part: out = part(x).

    Implements the same methods as `Attention`, so that a block can hold either.
    """

    def __init__(self, model: ModelConfig, layer: int) -> None:
        """Build the part of block `layer` (0-based) that `model` names; ModelConfigError for invalid settings."""
        super().__init__()
        part = MIXERS.load(model.attn_type)(model, mixer_settings(model))
        assert isinstance(part, BlockPart)
        part.layer = layer
        self.part = part

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (output [B, T, D] of the normed stream `x_BTD`, None); the other arguments are ignored."""
        return self.part(x_BTD), None

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """Return the output [B, T, D] of `forward`, computed about `chunk` tokens at a time; `window` is ignored."""
        return self.part.evaluate(x_BTD, chunk=chunk)

    def projections(self) -> list[Linear]:
        """Return no projections: those of the part never multiply in 8 bits."""
        return []

    def no_step_reason(self) -> str | None:
        """Return "mixer CLASS" if the part cannot decode token by token; None if it can."""
        return None if has_step(self.part) else f"mixer {type(self.part).__name__}"

    def is_capturable(self) -> bool:
        """Return True if the part belongs to this package and says that its `step` never copies to the host."""
        ours = __name__.rpartition(".")[0].rpartition(".")[0]
        return type(self.part).__module__.startswith(f"{ours}.") and self.part.is_capturable

    def open(self, capacity: CacheCapacity) -> Any:
        """Allocate empty states of the part for every slot of a cache of that capacity."""
        return self.part.open(capacity)

    def begin(self, x_1TD: Tensor, states: Any, step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill: return the part's output [1, T, D] for one new sequence; store its state in `states`."""
        return self.part.begin(x_1TD, states, step.slots_B, chunk=chunk)

    def step(self, x_BD: Tensor, states: Any, step: DecodeStep) -> Tensor:
        """Return the part's output [B, D] for one new token per sequence; updates `states` in place."""
        return self.part.decode(x_BD, states, step.slots_B)

    def fused_step(self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: Any, step: DecodeStep) -> Tensor:
        """Return residual + the output of `step` at norm(x), [B, D]; nothing is fused."""
        return residual_BD + self.step(norm(x_BD), states, step)

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return op name -> description of the part's implementation on that device and dtype."""
        return self.part.kernel_paths(device, dtype)
