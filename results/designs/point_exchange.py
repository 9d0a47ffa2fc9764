"""D-optimal designs over any set of points: an exchange of points, then an order in which every design holds the smaller ones.

The criterion is the determinant of X'X + K over the columns of the model and, with a small weight, those of interactions that
might matter beside it (DuMouchel and Jones, Technometrics 36, 1994), so that of designs that are equal for the model one
is taken which mixes it least with these.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

STARTS = 12
ROUNDS = 50
MAX_MULTIPLICATIONS = 5e8
"""Multiplications that the starts may take together; of a large grid there are fewer."""
PRIMARY_PRIOR = 1e-6
"""What is known beforehand of the model's own numbers: nothing, but the sums stay invertible."""
POTENTIAL_PRIOR = 10.0
"""Of the numbers that might matter besides: as if so many runs had shown them to be nothing."""


def seed_of(content: Mapping[str, Any]) -> int:
    """A seed that is the same wherever the same JSON is asked about."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def order(model: np.ndarray, beside: np.ndarray, seed: int, most: int) -> np.ndarray:
    """The places of the first `most` points in the order that designs take them.

    `model` [point, rank] are the columns to be estimated and `beside` [point, more] those that might matter, both orthonormal
    times the root of the number of points. A design of n >= rank points is the first n.
    """
    chosen = exchanged(model, beside, model.shape[1], seed)
    return extend_design(model, beside, chosen, most)


def exchanged(model: np.ndarray, beside: np.ndarray, runs: int, seed: int) -> np.ndarray:
    """The places of so many points: the best of several random starts, each improved by exchanges until none helps
    (Cook and Nachtsheim, Technometrics 22, 1980)."""
    random = np.random.default_rng(seed)
    columns, prior = _joined(model, beside)
    once = runs * columns.size * 4
    best, highest = np.arange(0), -math.inf
    for _ in range(max(1, min(STARTS, int(MAX_MULTIPLICATIONS / max(once, 1))))):
        found = _improved(columns, prior, random.permutation(len(columns))[:runs])
        value = _log_det(columns[found], prior)
        if value > highest + 1e-9:
            best, highest = found, value
    return np.sort(best)


def improve_design(model: np.ndarray, beside: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The design that exchanges lead to from this one."""
    columns, prior = _joined(model, beside)
    return np.sort(_improved(columns, prior, start))


def extend_design(model: np.ndarray, beside: np.ndarray, chosen: np.ndarray, most: int) -> np.ndarray:
    """The chosen points and behind them, one by one, the point that adds most."""
    columns, prior = _joined(model, beside)
    found = [int(one) for one in chosen]
    inverse = np.linalg.inv(columns[found].T @ columns[found] + np.diag(prior))
    gain = _gains(columns, inverse)
    left = np.ones(len(columns), dtype=bool)
    left[found] = False
    while len(found) < most:
        best = _first_best(np.where(left, gain, -math.inf))
        found.append(best)
        left[best] = False
        inverse, gain = _moved(columns, inverse, gain, best, 1.0)
    return np.array(found)


def _joined(model: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All columns, and what is known of each beforehand."""
    prior = np.concatenate([np.full(model.shape[1], PRIMARY_PRIOR), np.full(beside.shape[1], POTENTIAL_PRIOR)])
    return np.concatenate([model, beside], axis=1), prior


def _improved(columns: np.ndarray, prior: np.ndarray, start: np.ndarray) -> np.ndarray:
    chosen = np.array(start)
    inside = np.zeros(len(columns), dtype=bool)
    inside[chosen] = True
    for _ in range(ROUNDS):
        # from scratch, so that no dust of updates gathers
        inverse = np.linalg.inv(columns[chosen].T @ columns[chosen] + np.diag(prior))
        gain = _gains(columns, inverse)
        moved = False
        for place, old in enumerate(chosen.tolist()):
            cross = columns @ (inverse @ columns[old])
            # the factor by which the determinant changes when `old` leaves for each other point
            factor = (1 + gain) * (1 - gain[old]) + cross**2
            factor[inside] = -math.inf
            new = _first_best(factor)
            if factor[new] <= 1 + 1e-9:
                continue
            inverse, gain = _moved(columns, inverse, gain, new, 1.0)
            inverse, gain = _moved(columns, inverse, gain, old, -1.0)
            inside[old], inside[new], chosen[place] = False, True, new
            moved = True
        if not moved:
            break
    return chosen


def _gains(columns: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """What each point would add to the determinant, as a share of it."""
    return np.asarray(((columns @ inverse) * columns).sum(axis=1))


def _first_best(values: np.ndarray) -> int:
    """The first of those that are the largest but for dust, so that every machine takes the same."""
    largest = float(values.max())
    return int(np.flatnonzero(values >= largest - 1e-7 * max(1.0, abs(largest)))[0])


def _moved(
    columns: np.ndarray, inverse: np.ndarray, gain: np.ndarray, place: int, sign: float
) -> tuple[np.ndarray, np.ndarray]:
    """Inverse and gains after a point came (sign 1) or left (-1)."""
    step = inverse @ columns[place]
    scale = 1 + sign * float(columns[place] @ step)
    if scale < 1e-12:
        scale = 1e-12
    inverse = inverse - sign * np.outer(step, step) / scale
    return inverse, gain - sign * (columns @ step) ** 2 / scale


def _log_det(columns: np.ndarray, prior: np.ndarray) -> float:
    return float(np.linalg.slogdet(columns.T @ columns + np.diag(prior))[1])
