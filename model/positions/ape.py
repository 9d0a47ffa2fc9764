"""Absolute positions, learned: token t gets row t (docs/mechanisms.md, "Positions"). D model width."""

from __future__ import annotations

from torch import Tensor

from ..bases import Position, Table
from ..config import ModelConfig
from .table_outline import TableConfig, TableOutline


class APE(TableOutline, Position):
    """A table with a row for each place. Rows beyond the trained length stay as they start."""

    def __init__(self, model: ModelConfig, config: TableConfig) -> None:
        super().__init__(model, config)
        self.table = Table(config.length, model.d_model, config.std)

    def forward(self, places_BT: Tensor) -> Tensor:
        """Rows of the table [B, T, D]."""
        rows_BTD: Tensor = self.table(places_BT)
        return rows_BTD
