"""Which combinations a design takes. The same grid gets the same ones on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import point_exchange, regular_fractions
from .design_option import Design
from .design_space import EXACT, DesignSpace, LinearModel, Term, residual


def d_optimal(space: DesignSpace, terms: Sequence[Term], runs: int) -> tuple[Design, np.ndarray]:
    """The design and the places of its points, for at least as many runs as the model has numbers.

    With the same terms a larger design holds the points of every smaller one.
    """
    model = LinearModel(space, tuple(terms))
    others = LinearModel(space, tuple(term for term in space.terms(2) if term not in model.terms))
    left = residual(others.every[:, 1:], model.every)
    if left.shape[1]:
        basis, sizes, _ = np.linalg.svd(left, full_matrices=False)
        left = basis[:, sizes > EXACT * max(sizes[0], 1.0)] * np.sqrt(len(basis))
    content = {
        "axes": [[axis, list(levels)] for axis, levels in space.axes.items()],
        "exclude": [{axis: sorted(words) for axis, words in rule.items()} for rule in space.exclude],
        "terms": [list(term) for term in terms],
    }
    members = point_exchange.order(model.whitened, left, point_exchange.seed_of(content), runs)
    return Design(method="d-optimal", runs=runs, space=space, terms=model.terms), np.sort(members)


def regular_fraction(
    space: DesignSpace, terms: Sequence[Term], fraction: regular_fractions.RegularFraction
) -> tuple[Design, np.ndarray]:
    """The design and the places of its points."""
    members = fraction.members(space)
    words = tuple(fraction.named())
    return Design(method="regular", runs=len(members), space=space, terms=tuple(terms), words=words), members
