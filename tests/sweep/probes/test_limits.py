"""The longest length that is told beforehand is the longest that the probe then measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.sweep.probes import PROBES, load_probe
from atma_sweep.sweep.probes.limits import longest
from atma_sweep.sweep.probes.subject import Subject


@pytest.mark.parametrize("probe", ["clean", "junk", "needle"])
@pytest.mark.parametrize("settings", [{"documents": 3, "junk_rows": 4}, {"documents": 5, "junk_rows": 7}])
def test_one_token_more_is_not_measured(
    probe: str, settings: dict[str, int], subject: Callable[..., Subject], rule: Any
) -> None:
    asked = subject(rule(lambda row: row), needle_trials=2, lengths=(16,), **settings)
    limit = longest(probe, asked.config.eval, asked.corpus)
    assert limit is not None
    assert limit > 1
    found = {}
    for measured, _ in load_probe(probe)(asked, [limit, limit + 1]):
        found |= {one.length: one.reason for one in measured}
    assert found[limit] is None
    assert found[limit + 1] is not None


def test_too_few_documents_give_no_length_at_all(subject: Callable[..., Subject], rule: Any) -> None:
    asked = subject(rule(lambda row: row), documents=6, lengths=(16,))
    for probe in ("clean", "needle", "state_norm"):
        assert longest(probe, asked.config.eval, asked.corpus) == 0


def test_what_has_no_length_has_no_limit(subject: Callable[..., Subject], rule: Any) -> None:
    asked = subject(rule(lambda row: row), lengths=(16,))
    for name, spec in PROBES.items():
        known = longest(name, asked.config.eval, asked.corpus) is not None
        assert known == spec.by_length, f"{name}: a probe over lengths says how long they may be"
