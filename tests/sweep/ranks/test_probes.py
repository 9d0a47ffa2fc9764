"""Probes on three ranks: the same numbers, to the last bit, from a part of the forward passes each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from atma_sweep.sweep.probes import PROBES, Probe
from atma_sweep.sweep.probes.subject import CellSubject
from atma_sweep.sweep.ranks.group import SINGLE
from ranked import run_ranks
from ranked_probes import measure, stop_within

ALONE = {"count_map", "gates", "gate_dynamics", "attention_map", "memory_recall", "decode", "downstream"}
"""Probes that rank 0 runs while the others wait."""


def lengths_of(name: str) -> tuple[int, ...]:
    return ((120, 150) if name == "passkey" else (16, 32)) if PROBES.load(name).by_length else (0,)


def without_clock(results: list) -> list:
    """The results without the speed of decoding, of which no two are the same."""
    return [([m for m in measured if m.metric != "written_per_s"], examples) for measured, examples in results]


def test_plugin_probes_run_on_rank_0_by_default() -> None:
    assert Probe.divided is False
    assert {name for name in PROBES if not PROBES.load(name).divided} == ALONE


@pytest.mark.thorough
@pytest.mark.slow
def test_probes_on_ranks_give_the_same_numbers(subject_for: Callable[[str], CellSubject]) -> None:
    # downstream has no numbers without tasks
    cases = [(name, subject_for(name), lengths_of(name)) for name in PROBES if name != "downstream"]
    reference = measure(SINGLE, cases)
    ranks = run_ranks(3, measure, cases)
    for name, (expected, passes) in reference.items():
        assert any(m.value is not None for measured, _ in expected for m in measured), name
        for ours in ranks:
            assert without_clock(ours[name][0]) == without_clock(expected), name
        shares = [ours[name][1] for ours in ranks]
        assert sum(shares) == passes, name
        if name in ALONE:
            assert shares == [passes, 0, 0], name
        else:
            assert max(shares) <= passes // 3 + 2 * len(lengths_of(name)) + 4, (name, shares)
            assert min(shares) > 0, (name, shares)


@pytest.mark.thorough
def test_stop_of_rank_0_ends_a_probe_on_every_rank(subject_for: Callable[[str], CellSubject]) -> None:
    subject = subject_for("clean")
    ranks = run_ranks(3, stop_within, "clean", subject, 250)
    assert {outcome for outcome, _ in ranks} == {"stopped"}
