"""The forms of rotary positions, and which sizes of heads each takes. Imports no torch."""

from __future__ import annotations

from typing import Literal

Kind = Literal["full", "half-truncated"]


def check_rotary(kind: Kind, head_dim: int) -> None:
    """Raises ValueError when heads of that size cannot be rotated this way."""
    if kind == "full" and head_dim % 2:
        raise ValueError(f"full rotary needs an even head_dim, got {head_dim}")
    if kind == "half-truncated" and (head_dim % 4 or head_dim < 8):
        raise ValueError(f"half-truncated rotary needs a head_dim of at least 8 that 4 divides, got {head_dim}")
