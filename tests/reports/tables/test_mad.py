"""Table mad and figure recall-state against means by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.render import style
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner
from atma_sweep.results.store.store import Store
from pictures import check_column, figure_of

DIFFICULTIES = {
    "easy": {"task": "recall", "vocabulary": 16},
    "hard": {"task": "recall", "vocabulary": 64},
    "copy": {"task": "copying"},
}
ACCURACY = {"nope": {"easy": 0.9, "hard": 0.5, "copy": 0.7}, "rope": {"easy": 0.8, "hard": 0.6}}


def measured(store: Store, cells: list[Any], numbers: list[list[Measurement]]) -> None:
    """Record the cells as sweep "own", and the numbers of each as those of a finished attempt."""
    store.record_revision("own", grid_text="x", grid_file="x", cells=cells)
    for record, measurements in zip(cells, numbers, strict=True):
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        if measurements:
            DatabaseRecorder(store, attempt.id, 1).measurements(measurements)
        store.finish_attempt(attempt.id, 1, "done")


def test_mad_score_is_mean_of_best_runs(empty: Store, make: Any) -> None:
    """Two seeds, two rates; the second rate is better by 0.05 for one seed and worse for the other. rope has no copy."""
    cell, _ = make
    cells, numbers = [], []
    for kind, accuracy in ACCURACY.items():
        for name, settings in DIFFICULTIES.items():
            for seed in (0, 1):
                for rate, shift in (("1e-3", 0.0), ("1e-4", (0.05, -0.2)[seed])):
                    record = cell(len(cells), attn_type=kind, seed=seed)
                    config = {"model": {"attn_type": kind}, "data": {"settings": {"mad": settings}}}
                    axes = {"difficulty": name, "lr": rate}
                    slug = f"{kind}-{name}-{rate}-{seed}"
                    cells.append(replace(record, slug=slug, axes=axes, config=config | {"train": {"matrix_lr": rate}}))
                    value = accuracy.get(name)
                    description = {"chance": 1 / 8 if name == "easy" else 1 / 32}
                    row = Measurement(
                        probe="mad",
                        metric="accuracy",
                        value=(value or 0) + shift,
                        unit="fraction",
                        n=9,
                        description=description,
                    )
                    numbers.append([row] if value is not None else [])
    measured(empty, cells, numbers)
    table = make_table("mad", empty, "own")
    rows = dict(zip((row[0] for row in table.rows), table.entries, strict=True))
    assert table.columns == ("Type", "Recall", "Copying", "Score")
    recall, copying, score = rows["nope"]
    by_seed = [[0.95, 0.55, 0.75], [0.9, 0.5, 0.7]]
    recalls = [fmean(values[:2]) for values in by_seed]
    assert (recall.value, recall.sd) == (pytest.approx(fmean(recalls)), pytest.approx(stdev(recalls)))
    assert copying.value == pytest.approx(fmean([0.75, 0.7]))
    scores = [fmean([fmean(values[:2]), values[2]]) for values in by_seed]
    assert (score.value, score.sd) == (pytest.approx(fmean(scores)), pytest.approx(stdev(scores)))
    assert [entry.text for entry in rows["rope"][1:]] == ["0 of 1", "incomplete"]
    assert rows["rope"][0].value == pytest.approx(fmean([0.85, 0.65, 0.8, 0.6]))
    notes = " ".join(table.notes)
    assert "Difficulties in this sweep: recall 2, copying 1." in notes
    assert f"Chance level (a random value or token): recall {100 * (1 / 8 + 1 / 32) / 2:.1f} %, copying 3.1 %." in notes


def test_recall_state_lines_are_mixers_and_memories(empty: Store, make: Any) -> None:
    """Each line has its sizes in order of their bytes; a cell without a state is left out."""
    cell, _ = make
    cells, numbers = [], []
    for kind, memory, shares in (("nope", "off", (0.9, 1.0)), ("fox", "off", (0.8, None)), ("nope", "kda", (0.1, 0.4))):
        for size, share in zip((8, 32), shares, strict=True):
            for seed in (0, 1):
                record = cell(
                    len(cells), attn_type=kind, memory=memory, window="on" if memory == "kda" else "off", seed=seed
                )
                cells.append(replace(record, slug=f"{kind}-{memory}-{size}-{seed}", axes={"model.head_dim": str(size)}))
                rows = [
                    Measurement(
                        probe="mqar",
                        metric="accuracy",
                        value=(share or 0.5) - 0.1 * seed,
                        unit="fraction",
                        n=50,
                        low=0.0,
                        high=1.0,
                        description={"chance": 0.25},
                    )
                ]
                rows += (
                    [Measurement(probe="mqar", metric="state_bytes", value=float(size**2 * 4))]
                    if share is not None
                    else []
                )
                numbers.append(rows)
    measured(empty, cells, numbers)
    figure_data = make_figure("recall-state", empty)
    frame = figure_data.frame
    assert list(dict.fromkeys(frame["line"])) == ["NoPE", "FoX", "KDA"]
    assert len(frame) == 10
    assert set(frame[frame["line"] == "KDA"]["length"]) == {256, 4096}
    figure = figure_of(figure_data)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    drawn = {
        tuple(line.get_xdata()): [round(float(y), 6) for y in line.get_ydata()]
        for line in axes.lines
        if len(line.get_xdata()) == 2
    }
    assert [35.0 - 30.0, 35.0] in drawn.values(), "KDA: means of both seeds at both sizes, in percent"
    assert [
        line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":" or list(line.get_ydata()) == [25, 25]
    ] == [25]
    inks = {ink for line in axes.lines if (ink := line.get_color()) in style.FREE_INKS}
    assert len(inks) == 1, "the memory alone has an ink of memories"
    assert not set(style.FREE_INKS) & set(style.MIXER_INKS.values())
    assert min(map(style.contrast, style.FREE_INKS)) >= style.MIN_CONTRAST
    check_column(figure)


def test_recall_state_without_states_says_what_to_run(empty: Store, make: Any) -> None:
    cell, _ = make
    measured(empty, [cell(1)], [[Measurement(probe="mqar", metric="accuracy", value=0.5, unit="fraction", n=5)]])
    with pytest.raises(ReportError, match="evaluate with --probe mqar"):
        make_figure("recall-state", empty)
