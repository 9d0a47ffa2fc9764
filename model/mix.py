"""What mixes tokens in a block: global attention (attention.py) or a gated convolution (gated_conv.py).

B batch, T length, D model width, R distractors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        raise NotImplementedError
