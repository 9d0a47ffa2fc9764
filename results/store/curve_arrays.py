"""Training curves as arrays, one attempt at a time, for drawings of sweeps with millions of points.

Rows come from the driver's own cursor: an object of Python's for each of them costs more than all the rest of a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import bindparam, func, literal, select
from sqlalchemy.orm import Session

from .schema import CurvePointRow


def curve_arrays(
    session: Session, attempts: Iterable[int], columns: Sequence[str], *, having: Sequence[str] = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """(attempt, its points by step as float64 [points, columns], NaN for NULL) for each attempt that has any, in turn.

    `columns` are fields of CurvePoint; points where one of `having` is NULL are left out.
    """
    table = CurvePointRow.__table__.columns
    # infinities stand for NULL on the way, since none is ever stored: numpy takes floats far faster than objects
    read = [func.coalesce(table[name], literal(math.inf)) if table[name].nullable else table[name] for name in columns]
    query: Any = select(*read).where(CurvePointRow.attempt_id == bindparam("attempt"))
    query = query.where(*(table[name].is_not(None) for name in having)).order_by(CurvePointRow.step)
    connection = session.connection()
    for attempt in attempts:
        cursor = connection.execute(query, {"attempt": attempt}).cursor
        rows = cursor.fetchall() if cursor is not None else []
        if rows:
            flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * len(columns))
            flat[np.isinf(flat)] = np.nan
            yield attempt, flat.reshape(-1, len(columns))
