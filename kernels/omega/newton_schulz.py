"""Newton-Schulz orthogonalisation: five steps towards the nearest matrix with orthonormal rows or columns.

See docs/reference/mechanisms.md, "Omega memory".
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 5
FACTORS = (3.4445, -4.7750, 2.0315)
"""Factors of M, M Mᵀ M and (M Mᵀ)² M per step: singular values from 0.01 to 1 end between 0.68 and 1.14."""
EPS = 1e-7


def newton_schulz(x: Tensor) -> Tensor:
    """Return x [..., R, C] with singular values near 1, same shape and dtype; a zero matrix stays zero.

    Each matrix is divided by its Frobenius norm + 1e-7, then takes five steps of `FACTORS`, all in x's dtype.
    Differentiable. The result is not exactly orthogonal: singular values below a hundredth of the norm stay smaller.
    """
    start, length = _wide_and_norm(x)
    m = start / (length + EPS)
    for _ in range(STEPS):
        _gram, _factor, m = _step(m)
    return _restore_orientation(m, x)


def _wide_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x transposed where it has more rows than columns, its Frobenius norm [..., 1, 1])."""
    start = x if x.shape[-2] <= x.shape[-1] else x.mT
    return start, torch.linalg.matrix_norm(start, keepdim=True)


def _restore_orientation(m: Tensor, like: Tensor) -> Tensor:
    return m if m.shape[-2:] == like.shape[-2:] else m.mT


def _step(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (M Mᵀ, b M Mᵀ + c (M Mᵀ)², next M) of one step, with (a, b, c) = `FACTORS`.

    The next M is a M + the second result times M. m is [..., R, C] with R <= C.
    """
    a, b, c = FACTORS
    gram = m @ m.mT
    factor = b * gram + c * gram @ gram
    return gram, factor, a * m + factor @ m


class NewtonSchulzTape:
    """Forward results of Newton-Schulz on many matrices [N, G, R, C], with gradients on request.

    The forward runs for all N at once; `gradient` goes back through one [G, R, C] at a time, for sequences in which
    each gradient depends on the next matrix's.
    """

    def __init__(self, x: Tensor) -> None:
        """Run the forward on all matrices x [N, G, R, C] and save the results of every step.

        `result` is then [N, G, R, C], as `newton_schulz` gives it. Five matrices per input matrix, their Gram matrices
        and factors stay in memory.
        """
        self._start, self._length = _wide_and_norm(x)
        m = self._start / (self._length + EPS)
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for _ in range(STEPS):
            gram, factor, after = _step(m)
            self._steps.append((m, gram, factor))
            m = after
        self.result = _restore_orientation(m, x)
        """[N, G, R, C]."""

    def gradient(self, index: int, g: Tensor) -> Tensor:
        """Return the gradient of input matrix `index`, [G, R, C], from the gradient g of its result.

        Args:
            index: Index of the matrix on the first axis of the tape's input.
            g: Gradient of `result[index]`, [G, R, C].
        """
        a, b, c = FACTORS
        gradient_of_result, g = g, _restore_orientation(g, self._start)
        for m, gram, factor in ((m[index], gram[index], factor[index]) for m, gram, factor in reversed(self._steps)):
            # gradient of `factor`, and of gram gram as its two equal factors
            of_factor = g @ m.mT
            both = of_factor + of_factor.mT
            crossed = both @ gram
            g = a * g + factor @ g + (b * both + c * (crossed + crossed.mT)) @ m
        x, length = self._start[index], self._length[index]
        norm = length + EPS
        along = (g * x).sum((-2, -1), keepdim=True) / (length * norm * norm).clamp(min=torch.finfo(g.dtype).tiny)
        return _restore_orientation(g / norm - along * x, gradient_of_result)
