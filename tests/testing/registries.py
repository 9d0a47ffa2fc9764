"""Every part of the package by name, and registries as they were: a test's plugins are unknown to the next test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS, REGULARIZERS, Registry
from atma_sweep.sweep.data.registry import CORPORA
from atma_sweep.sweep.probes import PROBES

ALL: tuple[Registry, ...] = (MIXERS, MEMORIES, POSITIONS, REGULARIZERS, CORPORA, PROBES)
EVERY_MIXER = list(MIXERS)
EVERY_MEMORY = ["none", *MEMORIES]
EVERY_REGULARIZER = ["baseline", *REGULARIZERS]


def _pairs() -> list[tuple[str, str]]:
    turns = [(mixer, EVERY_MEMORY[index % len(EVERY_MEMORY)]) for index, mixer in enumerate(EVERY_MIXER)]
    return list(dict.fromkeys([*turns, *((mixer, memory) for mixer in ("polar", "nope") for memory in EVERY_MEMORY)]))


PAIRS = _pairs()
"""(mixer, memory): every mixer beside a memory or none, in turn, and two mixers beside each. What a memory reads is added
to what the mixer does, so that the other pairs say nothing new."""


def has_distractor(mixer: str) -> bool:
    """Return whether a mixer has a distractor loss."""
    return bool(MIXERS.load(mixer).has_distractor)


@contextmanager
def scope() -> Iterator[None]:
    """Whatever is registered within is forgotten at the end."""
    with ExitStack() as stack:
        for registry in ALL:
            stack.enter_context(registry.scope())
        yield
