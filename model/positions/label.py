"""Randomized labels: a text gets ordered rows of a longer table, drawn anew (docs/mechanisms.md, "Positions"). T length."""

from __future__ import annotations

import torch
from torch import Tensor

from .ape import APE


class Label(APE):
    """APE whose places are T of the table's, drawn without replacement for each row of a batch, and in order.

    So every row of the table is trained, and a text as long as the table sees distances that it was trained with.
    """

    def places(self, rows: int, length: int, draw: torch.Generator) -> Tensor:
        # float64, so that no two are equal
        of = (rows, self.table.num_embeddings)
        numbers = torch.rand(of, generator=draw, device=draw.device, dtype=torch.float64)
        return numbers.topk(length, sorted=False).indices.sort().values
