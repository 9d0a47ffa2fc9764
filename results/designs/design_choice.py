"""Selection of the combinations of a design. The same grid gets the same selection on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import point_exchange, regular_fractions
from .design_option import Design
from .design_space import EXACT, DesignSpace, LinearModel, Term, residual


def d_optimal(space: DesignSpace, terms: Sequence[Term], runs: int) -> tuple[Design, np.ndarray]:
    """Return a D-optimal design and the sorted indices of its points.

    Deterministic: the random seed follows from space and terms. With the same terms, a larger design contains the
    points of every smaller one. Among equally good designs, one that confounds the model least with other interactions
    of two axes is preferred.

    Args:
        space: all possible points.
        terms: terms to estimate, without the mean.
        runs: number of points; fewer than the rank of the model are raised to the rank, in `Design.runs` too.
    """
    model = LinearModel(space, tuple(terms))
    potential_model = LinearModel(space, tuple(term for term in space.terms(2) if term not in model.terms))
    potential = residual(potential_model.full_matrix[:, 1:], model.full_matrix)
    if potential.shape[1]:
        basis, sizes, _ = np.linalg.svd(potential, full_matrices=False)
        potential = basis[:, sizes > EXACT * max(sizes[0], 1.0)] * np.sqrt(len(basis))
    content = {
        "axes": [[axis, list(levels)] for axis, levels in space.axes.items()],
        "exclude": [{axis: sorted(excluded) for axis, excluded in rule.items()} for rule in space.exclude],
        "terms": [list(term) for term in terms],
    }
    members = point_exchange.point_order(model.whitened, potential, point_exchange.seed_of(content), runs)
    return Design(method="d-optimal", runs=len(members), space=space, terms=model.terms), np.sort(members)


def regular_fraction(
    space: DesignSpace, terms: Sequence[Term], fraction: regular_fractions.RegularFraction
) -> tuple[Design, np.ndarray]:
    """Return a regular fraction as a design, and the sorted indices of its points.

    Args:
        space: all possible points.
        terms: terms to estimate, for the record; they do not change the points.
        fraction: the regular fraction.
    """
    members = fraction.members(space)
    relation = tuple(fraction.relation_as_terms())
    return Design(
        method="regular", runs=len(members), space=space, terms=tuple(terms), defining_relation=relation
    ), members
