"""Learned positions (docs/mechanisms.md, "Positions"): token t gets row t, or ordered rows of a longer table, drawn anew. T length, D model width."""

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
        8192, "Places in the table; longer text can be neither trained on nor measured.", ge=1, le=MAX_LENGTH
    )
    std: Float = knob(0.02, "Standard deviation of the table's initial values.", ge=0, le=MAX_FLOAT)


class APE(Position):
    """A table with a row for each place. Rows beyond the trained length stay as they start."""

    Config: ClassVar[type[Config]] = TableConfig

    @classmethod
    def longest(cls, model: ModelConfig, config: TableConfig) -> int:
        return config.length

    def __init__(self, model: ModelConfig, config: TableConfig) -> None:
        super().__init__(model, config)
        self.table = EmbeddingTable(config.length, model.d_model, config.std)

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Rows of the table [B, T, D]."""
        rows_BTD: Tensor = self.table(positions_BT)
        return rows_BTD


class Label(APE):
    """APE whose places are T of the table's, drawn without replacement for each row of a batch, and in order.

    So every row of the table is trained, and a text as long as the table sees distances that it was trained with.
    """

    def places(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        # float64, so that no two are equal
        shape = (rows, self.table.num_embeddings)
        keys = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
        return keys.topk(length, sorted=False).indices.sort().values
