"""The finding of a sweep, against differences that pandas pairs by itself."""

from __future__ import annotations

from atma_sweep.reports.dashboard.finding import finding
from atma_sweep.results.store.store import Store
from swept import swept

AXES = ["attn_type", "reg_mode", "distractor", "window"]


def test_finding_of_the_paper_is_what_memory_does(published: Store) -> None:
    rows = published.frames("printed-v2").measurements().reset_index()
    junk = rows[(rows.probe == "junk") & (rows.metric == "nats") & (rows.length == 65536)]
    pairs = junk.pivot_table(index=AXES, columns="memory", values="value")
    differences = (pairs["on"] - pairs["off"]).dropna()
    sentence = finding(published, "printed-v2")
    assert sentence is not None
    assert sentence.startswith(
        f"largest significant effect: with memory against no memory: junk loss at 65,536 {differences.mean():.3f} nats/token (95%"
    )
    assert sentence.endswith(f"p < 0.001 corrected, {len(differences)} pairs)")


def test_finding_without_an_effect_is_the_best_cell(store: Store) -> None:
    values = store.frames("quick").measurements().reset_index()
    losses = values[(values.probe == "val") & (values.metric == "val_loss")].set_index("slug").value
    best = f"best cell: {losses.idxmin()}, validation loss {losses.min():.3f}"
    assert finding(store, "quick") == f"no significant effect; {best}"


def test_finding_of_an_unmeasured_sweep_is_none(empty: Store) -> None:
    swept(empty, seeds=(0,))
    empty.record_revision("none", grid_text="x", grid_file="x.yaml", cells=[])
    assert finding(empty, "none") is None
