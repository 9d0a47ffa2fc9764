"""A question of a probe, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...results.lazy_import import Late

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")


@dataclass(frozen=True)
class Prompt:
    """Token ids of one trial and where its answer stands."""

    tokens: np.ndarray
    """Whole sequence; the model reads all but the last token."""
    scored: np.ndarray
    """Positions in `tokens` of the digit-bearing tokens of the answer."""
