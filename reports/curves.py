"""Training curves as arrays, one attempt at a time, for drawings of sweeps with millions of points.

Rows come from the driver's own cursor: an object of Python's for each of them costs more than all the rest of a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, bindparam, func, literal, select
from sqlalchemy.orm import Session

from ..results.store.schema import CurvePointRow


def curves(
    session: Session, attempts: Iterable[int], columns: Sequence[str], *where: ColumnElement[bool]
) -> Iterator[tuple[int, np.ndarray]]:
    """(attempt, its points by step as float64 [points, columns], NaN for NULL) for each attempt that has any, in turn."""
    chosen = [getattr(CurvePointRow, name) for name in columns]
    # infinities stand for NULL on the way, since none is ever stored: numpy takes floats far faster than objects
    read = [func.coalesce(one, literal(math.inf)) if one.nullable else one for one in map(_column, chosen)]
    query: Any = select(*read).where(CurvePointRow.attempt_id == bindparam("attempt"), *where)
    query = query.order_by(CurvePointRow.step)
    connection = session.connection()
    for attempt in attempts:
        cursor = connection.execute(query, {"attempt": attempt}).cursor
        rows = cursor.fetchall() if cursor is not None else []
        if rows:
            flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * len(columns))
            flat[np.isinf(flat)] = np.nan
            yield attempt, flat.reshape(-1, len(columns))


def _column(attribute: Any) -> Any:
    return attribute.property.columns[0]


def kept(points: int, most: int) -> np.ndarray:
    """Which of so many points are drawn, at most `most`: the first, and from the last on back every k-th."""
    if points <= most:
        return np.arange(points)
    every = -(-(points - 1) // (most - 1))
    return np.concatenate([[0], np.arange((points - 1) % every or every, points, every)])
