"""The registries as they were: what a test's plugins register is unknown to the next test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS, REGULARIZERS, Registry

ALL: tuple[Registry, ...] = (MIXERS, MEMORIES, POSITIONS, REGULARIZERS)


@contextmanager
def scope() -> Iterator[None]:
    """Whatever is registered within is forgotten at the end."""
    with ExitStack() as stack:
        for registry in ALL:
            stack.enter_context(registry.scope())
        yield
