"""D-optimal designs over any set of points, by point exchange and an order in which designs are nested.

The criterion is the determinant of X'X + K. X has the columns of the model and, with a small weight, those of potential
interactions (DuMouchel and Jones, Technometrics 36, 1994). Among designs that are equally good for the model, the one
that confounds it least with these is chosen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

STARTS = 12
"""Number of random starts of an exchange."""
ROUNDS = 50
"""Maximum number of passes over the chosen points."""
MAX_MULTIPLICATIONS = 5e8
"""Limit of the multiplications of all starts together; large grids get fewer starts."""
PRIMARY_PRIOR = 1e-6
"""Prior precision of the model's own coefficients: nearly none, but the sums stay invertible."""
POTENTIAL_PRIOR = 10.0
"""Prior precision of the potential interactions: as if so many runs had shown them to be zero."""


def seed_of(content: Mapping[str, Any]) -> int:
    """Return a random seed that is the same for the same JSON value on every machine."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def point_order(model: np.ndarray, potential: np.ndarray, seed: int, runs: int) -> np.ndarray:
    """Return the indices of the first `runs` points in the order in which designs use them.

    A design of n >= rank points consists of the first n. The first rank points come from an exchange, sorted by index;
    each further one increases the determinant most. At least rank indices are returned.

    Args:
        model: columns to be estimated, [point, rank].
        potential: columns of potential interactions, [point, more]; both orthonormal times the root of the number of
            points.
        seed: random seed of the starts.
        runs: number of points to return.
    """
    chosen = exchange_design(model, potential, model.shape[1], seed)
    return extend_design(model, potential, chosen, runs)


def exchange_design(model: np.ndarray, potential: np.ndarray, runs: int, seed: int) -> np.ndarray:
    """Return the sorted indices of `runs` points: the best of several random starts, each improved by exchanges.

    The criterion is the log-determinant of X'X + K (see the module). 12 starts are made (STARTS). There are fewer, but
    at least one, where 4 x runs x points x columns x starts would exceed 5e8 (MAX_MULTIPLICATIONS).

    Args:
        model: columns to be estimated, [point, rank].
        potential: columns of potential interactions, [point, more].
        runs: number of points.
        seed: random seed.

    Source: Cook and Nachtsheim, Technometrics 22, 1980.
    """
    random = np.random.default_rng(seed)
    columns, prior = _join_columns(model, potential)
    multiplications = runs * columns.size * 4
    best, highest = np.arange(0), -math.inf
    for _ in range(max(1, min(STARTS, int(MAX_MULTIPLICATIONS / max(multiplications, 1))))):
        members = _exchange_points(columns, prior, random.permutation(len(columns))[:runs])
        value = _log_det(columns[members], prior)
        if value > highest + 1e-9:
            best, highest = members, value
    return np.sort(best)


def improve_design(model: np.ndarray, potential: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the sorted indices of the design that exchanges reach from the design `start`; its size stays.

    Args:
        model: columns to be estimated, [point, rank].
        potential: columns of potential interactions, [point, more].
        start: distinct indices of the starting design.
    """
    columns, prior = _join_columns(model, potential)
    return np.sort(_exchange_points(columns, prior, start))


def extend_design(model: np.ndarray, potential: np.ndarray, chosen: np.ndarray, runs: int) -> np.ndarray:
    """Return the chosen points, in their order, followed by further ones, each the best of those that are left.

    The best point is the one that increases the determinant most; of equal ones the first.

    Args:
        model: columns to be estimated, [point, rank].
        potential: columns of potential interactions, [point, more].
        chosen: indices of the chosen points.
        runs: number of points in total; if it is not more than the chosen ones, these are returned.
    """
    columns, prior = _join_columns(model, potential)
    members = [int(index) for index in chosen]
    inverse = np.linalg.inv(columns[members].T @ columns[members] + np.diag(prior))
    gain = _gains(columns, inverse)
    is_free = np.ones(len(columns), dtype=bool)
    is_free[members] = False
    while len(members) < runs:
        best = _first_best(np.where(is_free, gain, -math.inf))
        members.append(best)
        is_free[best] = False
        inverse, gain = _update_inverse(columns, inverse, gain, best, 1.0)
    return np.array(members)


def _join_columns(model: np.ndarray, potential: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all columns, [point, rank + more], and the prior precision of each.

    The precision is 1e-6 for columns to be estimated (PRIMARY_PRIOR) and 10 for potential interactions
    (POTENTIAL_PRIOR).
    """
    prior = np.concatenate([np.full(model.shape[1], PRIMARY_PRIOR), np.full(potential.shape[1], POTENTIAL_PRIOR)])
    return np.concatenate([model, potential], axis=1), prior


def _exchange_points(columns: np.ndarray, prior: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the indices of a design after exchanges that increase the determinant, in at most 50 passes.

    A pass goes over the chosen points in order and replaces each by the best free point, if that increases the
    determinant. The determinant changes by the factor (1 + g_new) (1 - g_old) + (x_newᵀ A⁻¹ x_old)², with g of
    `_gains`; it must exceed 1 + 1e-9. The result is not sorted: an exchanged point takes the position of the one
    before.

    Args:
        columns: columns of all points, [point, column].
        prior: prior precision of each column.
        start: distinct indices of the starting design.
    """
    chosen = np.array(start)
    is_chosen = np.zeros(len(columns), dtype=bool)
    is_chosen[chosen] = True
    for _ in range(ROUNDS):
        # from scratch, so that rounding errors of updates do not accumulate
        inverse = np.linalg.inv(columns[chosen].T @ columns[chosen] + np.diag(prior))
        gain = _gains(columns, inverse)
        has_changed = False
        for position, old in enumerate(chosen.tolist()):
            cross = columns @ (inverse @ columns[old])
            # factor by which the determinant changes if `old` is exchanged for each other point
            factor = (1 + gain) * (1 - gain[old]) + cross**2
            factor[is_chosen] = -math.inf
            new = _first_best(factor)
            if factor[new] <= 1 + 1e-9:
                continue
            inverse, gain = _update_inverse(columns, inverse, gain, new, 1.0)
            inverse, gain = _update_inverse(columns, inverse, gain, old, -1.0)
            is_chosen[old], is_chosen[new], chosen[position] = False, True, new
            has_changed = True
        if not has_changed:
            break
    return chosen


def _gains(columns: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Return the leverage x' M x of each point, [point], where M is the inverse information matrix.

    Adding the point multiplies the determinant by 1 + leverage.
    """
    return np.asarray(((columns @ inverse) * columns).sum(axis=1))


def _first_best(values: np.ndarray) -> int:
    """Return the first index of the maximum up to rounding (1e-7), so that every machine chooses the same."""
    largest = float(values.max())
    return int(np.flatnonzero(values >= largest - 1e-7 * max(1.0, abs(largest)))[0])


def _update_inverse(
    columns: np.ndarray, inverse: np.ndarray, gain: np.ndarray, index: int, sign: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse information matrix and the gains after one point was added or removed (rank-one update).

    The arguments are not changed.

    With u = A⁻¹ x for the point's row x and the sign s, the inverse becomes A⁻¹ - s u uᵀ / (1 + s xᵀu), and the gain of
    a row r falls by s (rᵀu)² / (1 + s xᵀu). The divisor is at least 1e-12.

    Args:
        columns: columns of all points, [point, column].
        inverse: inverse information matrix before, [column, column].
        gain: gain of each point before, [point].
        index: point that is added or removed.
        sign: 1 for added, -1 for removed.
    """
    step = inverse @ columns[index]
    scale = 1 + sign * float(columns[index] @ step)
    if scale < 1e-12:
        scale = 1e-12
    inverse = inverse - sign * np.outer(step, step) / scale
    return inverse, gain - sign * (columns @ step) ** 2 / scale


def _log_det(columns: np.ndarray, prior: np.ndarray) -> float:
    return float(np.linalg.slogdet(columns.T @ columns + np.diag(prior))[1])
