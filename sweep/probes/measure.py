"""A probe run on a model, with gradients off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from . import bound
from .base import Result
from .subject import Subject


@torch.no_grad()
def measure(name: str, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """What the probe of that name finds at each length, one result a length."""
    yield from bound(name, subject.config).run(subject, lengths)
