"""Learned positions: token t gets row t of a table, or sorted random rows of a longer table.

Source: docs/reference/mechanisms.md, "Positions".
Letters of shapes: T length, D model width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..bases import EmbeddingTable, Position, PositionConfig
from ..bounds import MAX_FLOAT, MAX_LENGTH
from ..config import Config, Float, Int, ModelConfig, knob


class TableConfig(PositionConfig):
    """Settings of a scheme with one table."""

    length: Int = knob(
        8192, "Positions in the table; longer texts can be neither trained on nor measured.", ge=1, le=MAX_LENGTH
    )
    std: Float = knob(0.02, "Standard deviation of the table's initial values.", ge=0, le=MAX_FLOAT)


class APE(Position):
    """Learned absolute positions: a table with one row per position, added to the embedding.

    Rows beyond the trained length keep their initial values. A sequence longer than the table is refused (`longest`).
    """

    Config: ClassVar[type[Config]] = TableConfig

    @classmethod
    def longest(cls, model: ModelConfig, config: TableConfig) -> int:
        """Return the number of rows of the table, the longest supported sequence in tokens."""
        return config.length

    def __init__(self, model: ModelConfig, config: TableConfig) -> None:
        super().__init__(model, config)
        self.table = EmbeddingTable(config.length, model.d_model, config.std)

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Return the table's rows [B, T, D] of positions int64 [B, T]."""
        rows_BTD: Tensor = self.table(positions_BT)
        return rows_BTD


class Label(APE):
    """APE with random positions: T rows of the table, drawn without replacement for each sequence and sorted.

    Every row is trained, so a sequence as long as the table has the distances that the network was trained with. Cannot
    decode token by token, because a token's position changes as its sequence grows.
    """

    def places(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw `length` distinct positions below the table's size per row, sorted ascending: int64 [rows, length].

        All subsets are equally likely. torch raises RuntimeError if `length` exceeds the table.

        Args:
            rows: sequences of the batch, drawn independently.
            length: tokens per sequence.
            generator: random stream of the draw; the result is on its device.
        """
        # float64, so that ties are practically impossible
        shape = (rows, self.table.num_embeddings)
        keys = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return keys.topk(length, sorted=False).indices.sort().values
