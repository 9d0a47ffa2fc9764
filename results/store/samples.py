"""Texts that a network wrote while it was trained (`eval.samples`), kept as items without a number.

The item says which prompt, the length at which step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ..metrics import SAMPLES
from .database import storable
from .queries import in_parts
from .records import Example
from .schema import ExampleRow

METRIC = "text"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the network wrote behind one prompt after `step` steps; `item` numbers the prompts of a step."""

    step: int
    item: int
    prompt: str
    text: str

    def as_example(self) -> Example:
        """The same as the database holds it."""
        detail = {"prompt": storable(self.prompt), "text": storable(self.text)}
        return Example(probe=SAMPLES, metric=METRIC, length=self.step, item=self.item, value=None, detail=detail)


def samples(session: Session, attempts: Collection[int]) -> dict[int, list[Sample]]:
    """By attempt, in the order of steps and prompts; attempts without any are absent."""
    columns = (ExampleRow.attempt_id, ExampleRow.length, ExampleRow.item, ExampleRow.detail)
    asked = select(*columns).where(ExampleRow.probe == SAMPLES, ExampleRow.metric == METRIC)
    found: dict[int, list[Sample]] = {}
    for part in in_parts(sorted(attempts)):
        rows = session.execute(asked.where(ExampleRow.attempt_id.in_(part)).order_by(*columns[:3]))
        for attempt, step, item, detail in rows:
            told = detail or {}
            one = Sample(step=step, item=item, prompt=str(told.get("prompt", "")), text=str(told.get("text", "")))
            found.setdefault(attempt, []).append(one)
    return found
