"""The finding of a sweep, against differences that pandas pairs by itself."""

from __future__ import annotations

import pytest
from atma_sweep.reports.dashboard.overview import finding
from atma_sweep.results.store.store import Store
from swept import swept


@pytest.mark.thorough
def test_finding_of_the_paper_is_the_largest_effect(published: Store) -> None:
    rows = published.frames("printed-v2").measurements().reset_index()
    needle = rows[(rows.probe == "needle") & (rows.metric == "digit_accuracy") & (rows.length == 65536)]
    axes = ["reg_mode", "distractor", "window", "memory"]
    pairs = needle.pivot_table(index=axes, columns="attn_type", values="value")
    differences = (pairs["polar"] - pairs["rope"]).dropna()
    by_memory = {level: 100 * values.mean() for level, values in differences.groupby(level="memory")}
    sentence = finding(published, "printed-v2")
    assert sentence is not None
    assert sentence.startswith(
        f"Needle accuracy at 64K tokens is {100 * differences.mean():.1f} points higher with PoLAR than with RoPE (95% interval "
    )
    assert f", {len(differences)} pairs): the largest significant effect." in sentence
    assert f"no memory {by_memory['off']:+.1f}, with memory {by_memory['on']:+.1f} points." in sentence


def test_finding_without_an_effect_is_the_best(store: Store) -> None:
    values = store.frames("quick").measurements().reset_index()
    needle = values[(values.probe == "needle") & (values.metric == "digit_accuracy") & (values.length == 65536)].value
    sentence = finding(store, "quick")
    assert sentence is not None
    assert sentence.startswith(
        "No effect over the whole sweep is significant after correction. Best by needle accuracy"
    )
    assert f" {100 * needle.max() + 1e-9:.1f} %" in sentence


def test_finding_of_an_unmeasured_sweep_is_none(empty: Store) -> None:
    swept(empty, seeds=(0,))
    empty.record_revision("none", grid_text="x", grid_file="x.yaml", cells=[])
    assert finding(empty, "none") is None
