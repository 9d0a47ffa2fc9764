"""What mixes tokens in a block: global attention (attention.py) or a gated convolution (gated_conv.py).

B batch, T length, D model width, R distractors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .inference.kv_cache import Room, Step
from .layers import Linear, RMSNorm


class Mix(nn.Module):
    """The branch of a block that lets tokens see earlier ones: `x + mix(norm(x))`."""

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(what to add to the residual stream [B, T, D], the distractor loss where there is one and it is asked for).

        `x_BTD` is the normed stream. A window bounds what a global layer sees.
        """
        raise NotImplementedError

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """The first of what `forward` returns, worked out `chunk` tokens at a time."""
        raise NotImplementedError

    def projections(self) -> list[Linear]:
        """Those between the stream and what mixes, whose products may be taken in 8 bits; never a mixer's own."""
        raise NotImplementedError

    def why_no_step(self) -> str | None:
        """The part that has no form for one token at a time, in words; None when all have."""
        raise NotImplementedError

    def one_stream(self) -> bool:
        """Whether `step` asks the device for no number, so that it can be captured as a CUDA graph."""
        return True

    def open(self, room: Room) -> Any:
        """Empty states of texts that `step` goes on with."""
        raise NotImplementedError

    def begin(self, x_1TD: Tensor, states: Any, step: Step, *, chunk: int) -> Tensor:
        """`evaluate` of one text from its start, of which the states then hold what `step` needs."""
        raise NotImplementedError

    def step(self, x_BD: Tensor, states: Any, step: Step) -> Tensor:
        """What `forward` gives at the next token of some texts, [B, D]; their states are changed in place."""
        raise NotImplementedError

    def few_step(self, x_BD: Tensor, norm: RMSNorm, under_BD: Tensor, states: Any, step: Step) -> Tensor:
        """under + what `step` gives at norm(x), for so few texts that a product costs what reading its matrix does.

        The matrices are in x's type and side by side (`Backbone.join`).
        """
        raise NotImplementedError

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        raise NotImplementedError
