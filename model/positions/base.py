"""What a position scheme is: something added to the embeddings because of where their tokens stand.

B batch, T length, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..parts import PositionConfig as PositionConfig
from ..parts import PositionOutline


class Table(nn.Embedding):
    """Learned vectors, one for each of `rows` places, that start normal with the deviation `std`."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width))
        self.std = std


class Position(PositionOutline, nn.Module):
    """A vector for each place of a text, added to the embedding before the first block.

    Its matrices are learned as the embedding is, in the embedding's type.
    """

    def __init__(self, model: ModelConfig, config: PositionConfig) -> None:
        super().__init__()
        self.config = config

    def places(self, rows: int, length: int, draw: torch.Generator) -> Tensor:
        """What `forward` is to be called with, int64 [rows or 1, length], on the generator's device.

        All chance belongs here, drawn from `draw`: in training anew at each micro-batch, in evaluation the same for all
        texts of one length. The default are 0, 1, 2, ...
        """
        return torch.arange(length, device=draw.device)[None]

    def forward(self, places_BT: Tensor) -> Tensor:
        """[B, T, D] to add; B may be 1."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")
