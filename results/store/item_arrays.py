"""The items of a probe (documents, rows, trials), one measure at a time: a sweep has millions of them.

Means over the places of an item are taken by the database; rows come from the driver's own cursor, as in curve_arrays.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from .queries import in_parts
from .records import Key
from .schema import ExampleRow

COLUMNS = 4


def item_places(session: Session, attempts: Collection[int], measure: Key) -> np.ndarray:
    """[places of all items of all attempts, 4] as float64: attempt, item, position and value, in that order; a value that is
    missing is NaN."""
    probe, metric, length = measure
    one = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    asked = select(*one, ExampleRow.value)
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    return _fetched(session, asked.order_by(*one), attempts)


def item_details(session: Session, attempts: Collection[int], measure: Key) -> list[tuple[Any, ...]]:
    """Attempt, item, position, value and detail of every place that has a detail, in that order."""
    probe, metric, length = measure
    one = (ExampleRow.attempt_id, ExampleRow.item, ExampleRow.position)
    asked = select(*one, ExampleRow.value, ExampleRow.detail).where(ExampleRow.detail.is_not(None)).order_by(*one)
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    parts = (asked.where(ExampleRow.attempt_id.in_(part)) for part in in_parts(sorted(attempts)))
    return [tuple(row) for part in parts for row in session.execute(part)]


def item_means(session: Session, attempts: Collection[int], measure: Key) -> np.ndarray:
    """[items of all attempts, 4] as float64: attempt, item, and the mean and the least over the item's positions.

    In the order of attempts and items. An item that lacks a value at any position is left out.
    """
    probe, metric, length = measure
    value, one = ExampleRow.value, (ExampleRow.attempt_id, ExampleRow.item)
    asked = select(*one, func.avg(value), func.min(value))
    asked = asked.where(ExampleRow.probe == probe, ExampleRow.metric == metric, ExampleRow.length == length)
    asked = asked.group_by(*one).having(func.count() == func.count(value)).order_by(*one)
    return _fetched(session, asked, attempts)


def _fetched(session: Session, asked: Any, attempts: Collection[int]) -> np.ndarray:
    """What these COLUMNS columns are of these attempts, as float64; NULL is NaN."""
    parts = []
    for part in in_parts(sorted(attempts)):
        cursor = session.connection().execute(asked.where(ExampleRow.attempt_id.in_(part))).cursor
        rows = cursor.fetchall() if cursor is not None else []
        flat = (math.nan if one is None else one for one in chain.from_iterable(rows))
        parts.append(np.fromiter(flat, dtype=np.float64, count=len(rows) * COLUMNS))
    return np.concatenate(parts).reshape(-1, COLUMNS) if parts else np.empty((0, COLUMNS))
