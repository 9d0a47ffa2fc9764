"""Which points of a training curve are drawn."""

from __future__ import annotations

import numpy as np


def kept(points: int, most: int) -> np.ndarray:
    """Which of so many points are drawn, at most `most`: the first, and from the last on back every k-th."""
    if points <= most:
        return np.arange(points)
    every = -(-(points - 1) // (most - 1))
    return np.concatenate([[0], np.arange((points - 1) % every or every, points, every)])
