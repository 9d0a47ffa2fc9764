"""The items of a probe (documents, rows, trials) as arrays, one measure at a time: a sweep has millions of them.

Means over the places of an item are taken by the database; rows come from the driver's own cursor, as in curve_arrays.py.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from .queries import in_parts
from .records import Key
from .schema import ExampleRow

COLUMNS = 4


def item_means(session: Session, attempts: Collection[int], measure: Key) -> np.ndarray:
    """[items of all attempts, 4] as float64: attempt, item, and the mean and the least over the item's positions.

    In the order of attempts and items. An item that lacks a value at any position is left out.
    """
    probe, metric, length = measure
    value, one = ExampleRow.value, (ExampleRow.attempt_id, ExampleRow.item)
    asked = select(*one, func.avg(value), func.min(value))
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    asked = asked.group_by(*one).having(func.count() == func.count(value)).order_by(*one)
    parts = []
    for part in in_parts(sorted(attempts)):
        cursor = session.connection().execute(asked.where(ExampleRow.attempt_id.in_(part))).cursor
        rows = cursor.fetchall() if cursor is not None else []
        parts.append(np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * COLUMNS))
    return np.concatenate(parts).reshape(-1, COLUMNS) if parts else np.empty((0, COLUMNS))
