"""Probes on several ranks, run by `run_ranks`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atma_sweep.sweep.probes.subject import CellSubject, evaluating, run_probe
from atma_sweep.sweep.ranks.group import Ranks
from atma_sweep.sweep.training.loop import Stopped


def measure(ranks: Ranks, cases: list[tuple[str, CellSubject, tuple[int, ...]]]) -> dict[str, tuple[list[Any], int]]:
    """Return by probe its results at every length, and the number of forward passes of this rank."""
    outcomes = {}
    for name, subject, lengths in cases:
        passes = [0]

        def count(passes: list[int] = passes) -> None:
            passes[0] += 1

        on_ranks = replace(subject, ranks=ranks, pause=count)
        with evaluating(on_ranks.model):
            outcomes[name] = list(run_probe(name, on_ranks, lengths)), passes[0]
    return outcomes


def stop_within(ranks: Ranks, name: str, subject: CellSubject, length: int) -> tuple[str, int]:
    """Return the class of the error that ends the probe when rank 0 is stopped, and the forward passes of this rank."""
    passes = [0]

    def pause() -> None:
        passes[0] += 1
        if ranks.is_first and passes[0] == 2:
            raise Stopped

    try:
        list(run_probe(name, replace(subject, ranks=ranks, pause=pause), [length]))
    except Stopped:
        # nothing hangs, and the group can go on
        return ranks.agree("stopped"), passes[0]
    return "done", passes[0]
