"""Sizes of features, for those who plan without torch."""

from __future__ import annotations


def columns(kind: str, size: int, sketch: int) -> int:
    """Columns of the feature of `size` channels; a sketch has the square of its own number."""
    if kind == "poly2":
        return 1 + size + size * (size + 1) // 2
    return sketch * sketch if kind == "sketch" else size
