"""What is known of a scheme with one table before it is built."""

from __future__ import annotations

from typing import ClassVar

from ..bounds import MAX_FLOAT, MAX_LENGTH
from ..config import Config, Float, Int, ModelConfig, knob
from ..specs import PositionConfig, PositionOutline, Shapes


class TableConfig(PositionConfig):
    """Settings of a scheme with one table."""

    length: Int = knob(
        8192, "Places in the table; longer text can be neither trained on nor measured.", ge=1, le=MAX_LENGTH
    )
    std: Float = knob(0.02, "Standard deviation of the table's initial values.", ge=0, le=MAX_FLOAT)


class TableOutline(PositionOutline):
    """One row a place."""

    Config: ClassVar[type[Config]] = TableConfig

    @classmethod
    def shapes(cls, model: ModelConfig, config: TableConfig) -> Shapes:
        return {"table.weight": (config.length, model.d_model)}

    @classmethod
    def longest(cls, model: ModelConfig, config: TableConfig) -> int:
        return config.length
