"""Contract of every figure of the registry, drawn for sweeps of every kind.

A figure is a picture without a warning, or one line that says why there is none. It has the same bytes every time,
texts that neither overlap nor are cut off, and a trace of what is drawn.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from atma_sweep.reports.check import check_file
from atma_sweep.reports.figures import FIGURES, make_figure, redraw
from atma_sweep.reports.figures.canvas.base import frame_sha256
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.files import FORMATS, read_trace, rendered, renderings
from atma_sweep.reports.figures.state_norm import NORMS
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Example, Measurement, Owner
from atma_sweep.results.store.store import Store, open_store
from pictures import COLUMN, assert_texts_apart, check_column, figure_of
from probed import FIGURES as PROBED
from probed import probe_items
from studied import FIGURES as STUDIED
from tiers import long_form

ME = Owner(name="ada", host="here", pid=1, started=0.0)
LENGTHS = (128, 256)


def cell(
    sweep: int, index: int, kind: str = "polar", memory: str = "on", seed: int = 0, mode: str = "baseline"
) -> CellRecord:
    levels = dict(zip(AXES, (kind, mode, "off", memory, "off"), strict=True))
    config = {"train": {"seq_len": 128, "loss_reduction": "sum", "regularizer": mode}}
    return CellRecord(
        id=f"{sweep:06x}{index:06x}", slug=f"{kind}-{memory}-{index}", seed=seed, levels=levels, config=config, axes={}, tokens=100
    )  # fmt: skip


def numbers(loss: float, share: float, speed: float) -> list[Measurement]:
    measurements = [
        Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token", n=11),
        Measurement(probe="throughput", metric="tokens_per_s", value=speed),
    ]
    for length in LENGTHS:
        measurements.append(
            Measurement(probe="needle", metric="digit_accuracy", length=length, value=share, unit="fraction", n=20)
        )
        for probe in ("clean", "junk"):
            measurements.append(
                Measurement(probe=probe, metric="nats", length=length, value=loss, unit="nats/token", n=9)
            )
        for metric in NORMS:
            measurements.append(Measurement(probe="state_norm", metric=metric, length=length, value=share))
    return measurements


def ran(
    store: Store, record: CellRecord, state: str = "done", loss: float = 3.0, share: float = 0.5, speed: float = 9e4
) -> None:
    """Record an attempt with a curve, numbers and the digits of four trials; a diverged one has only its curve."""
    attempt = store.start_attempt(record.id, owner=ME, fence=1)
    recorder = DatabaseRecorder(store, attempt.id, 1)
    steps = [(0, 11.0), (5, (11.0 + loss) / 2), (10, loss)]
    recorder.curve(
        [
            CurvePoint(step=step, tokens=10 * step, wall_s=float(step), train_loss=value, val_loss=value)
            for step, value in steps
        ]
    )
    if state == "done":
        recorder.measurements(numbers(loss, share, speed))
        probe_items(recorder, loss, share)
        right = round(20 * share)
        for length in LENGTHS:
            recorder.examples(
                [
                    Example(
                        probe="needle", metric="digit_accuracy", length=length, item=index // 5, position=index % 5,
                        value=float(index < right),
                    )
                    for index in range(20)
                ]
            )  # fmt: skip
    store.finish_attempt(attempt.id, 1, state)


Run = dict[str, Any] | None
"""What `ran` is told of a cell; None for one that never started."""


def crossed() -> list[tuple[str, str]]:
    return [(kind, memory) for kind in ("polar", "nope") for memory in ("on", "off")]


def single_cell() -> list[tuple[CellRecord, Run]]:
    return [(cell(1, 0), {})]


def no_pairs() -> list[tuple[CellRecord, Run]]:
    """No two cells differ in a single axis."""
    return [(cell(2, 0), {}), (cell(2, 1, "nope", "off"), {"loss": 4.0, "share": 0.25})]


def odd_names() -> list[tuple[CellRecord, Run]]:
    """Return mixers whose names are long, contain terminal escapes, markup or formulas."""
    every = [(kind, memory, seed) for kind in ODD for memory in ("on", "off") for seed in (0, 1)]
    runs: list[Run] = [{"loss": 3 + 0.1 * i, "share": i / 20, "speed": 9e4 + i} for i in range(len(every))]
    return [(cell(6, i, *levels), run) for i, (levels, run) in enumerate(zip(every, runs, strict=True))]


def never_started() -> list[tuple[CellRecord, Run]]:
    return [(cell(7, 0, "nope"), None)]


def all_diverged() -> list[tuple[CellRecord, Run]]:
    return [(cell(3, i, *levels), {"state": "diverged", "loss": 1e30}) for i, levels in enumerate(crossed())]


def seeds_missing() -> list[tuple[CellRecord, Run]]:
    """Return three seeds per configuration: two never ran, and one of another configuration diverged."""
    every = [cell(4, 12 * i + seed, *levels, seed) for i, levels in enumerate(crossed()) for seed in range(3)]
    runs: list[Run] = [{"loss": 3 + 0.1 * i, "share": i / 20, "speed": 9e4 + i} for i in range(12)]
    runs[1] = runs[2] = None
    runs[5] = {"state": "diverged", "loss": 1e30}
    return list(zip(every, runs, strict=True))


def constant() -> list[tuple[CellRecord, Run]]:
    """Return cells whose numbers are all equal, with no correct digit."""
    levels = [(*levels, mode) for levels in crossed() for mode in ("baseline", "weak", "zipfian")]
    return [(cell(5, i, kind, memory, mode=mode), {"share": 0.0}) for i, (kind, memory, mode) in enumerate(levels)]


CASES: dict[str, Callable[[], list[tuple[CellRecord, Run]]]] = {
    "one-cell": single_cell, "no-pairs": no_pairs, "all-diverged": all_diverged, "seeds-missing": seeds_missing, "constant": constant,
    "odd-names": odd_names, "never-started": never_started,
}  # fmt: skip
ODD = ("$x$ <b>\x1b[31m & | \n", "a-mixer-of-a-long-name")
ALONE = ("one-cell", "no-pairs", "all-diverged")
NOTHING: dict[str, tuple[str, ...]] = {
    "state-norm": ("all-diverged",), "needle": ("all-diverged",), "length": ("all-diverged",), "items": ("all-diverged",),
    "pareto": ("all-diverged",), **dict.fromkeys(PROBED, ("all-diverged",)), "effects": ALONE, "interactions": ALONE, "power": ALONE, "seeds": ALONE,
    **dict.fromkeys(("response", "recall-state", *STUDIED), tuple(CASES)),
}  # fmt: skip
"""By figure the cases that give it nothing; every other case is a picture."""
PAIRS = [(figure, case) for figure in FIGURES for case in CASES]
FIRST = {(figure, list(CASES)[index % len(CASES)]) for index, figure in enumerate(FIGURES)}
"""Of each figure one case, in turn: what the first tier takes."""
FULL_PAIRS = [pair for index, pair in enumerate(PAIRS) if pair in FIRST or index % 2]


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory, blank: Path) -> Store:
    """Return a store with a sweep for each of CASES, by its name."""
    store = open_store(shutil.copy(blank, tmp_path_factory.mktemp("poor") / "poor.db"))
    for name, listed in CASES.items():
        store.record_revision(name, grid_text="x", grid_file="x.yaml", cells=[record for record, _ in listed()])
        for listed_record, how in listed():
            if how is not None:
                ran(store, listed_record, **how)
    return store


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("figure", "case"),
    [*FULL_PAIRS, *long_form(*sorted(set(PAIRS) - set(FULL_PAIRS)))],
)
def test_every_case_draws_or_says_why(poor: Store, figure: str, case: str, capfd: Any, caplog: Any) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        if case == "never-started" or case in NOTHING.get(figure, ()):
            with pytest.raises(ReportError, match=rf"^[^\n]*sweep {case}\b[^\n]*$"):
                make_figure(figure, poor, case)
        else:
            figure_data = make_figure(figure, poor, case)
            picture = rendered(figure_data, look=FigureOptions() if case == "odd-names" else COLUMN)
            assert b"\x1b" not in picture
            text_content = "".join(ElementTree.fromstring(picture).itertext())
            assert (
                "$x$ <b>" in text_content
                or case != "odd-names"
                or figure not in ("needle", "power", "seeds", "items", "pareto")
            )
            if case not in ("odd-names", "constant"):
                assert_texts_apart(figure_of(figure_data))
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


CROWDED = ("length", "loss", "pareto")
"""Figures whose words meet in a column where a mixer has a long name."""


@pytest.mark.thorough
@pytest.mark.usefixtures("few_deals")
@pytest.mark.parametrize(
    "figure", [*list(FIGURES)[::4], *long_form(*(figure for index, figure in enumerate(FIGURES) if index % 4))]
)
def test_texts_fit_a_column_and_a_page(shown: Callable[[str], Store], figure: str) -> None:
    figure_data = make_figure(figure, shown(figure))
    if figure not in CROWDED:
        # rows of these figures are layers, of which these networks have two with gates, or texts, of which there are two
        plain = figure in STUDIED or figure in ("retention", "gate-dynamics", "texts")
        (assert_texts_apart if plain else check_column)(figure_of(figure_data))
    assert assert_texts_apart(figure_of(figure_data, FigureOptions())) > 5


@pytest.mark.thorough
@pytest.mark.usefixtures("few_deals")
@pytest.mark.parametrize(
    "figure", [*list(FIGURES)[::3], *long_form(*(figure for index, figure in enumerate(FIGURES) if index % 3))]
)
def test_it_repeats_byte_for_byte_and_traces_what_is_drawn(
    shown: Callable[[str], Store], tmp_path: Path, figure: str
) -> None:
    store = shown(figure)
    figure_data, again = make_figure(figure, store), make_figure(figure, store)
    pictures = renderings(figure_data, FORMATS)
    (tmp_path / "x.svg").write_bytes(pictures["svg"])
    assert check_file(tmp_path / "x.svg", store) == []
    assert renderings(again, FORMATS) == pictures
    for format, content in pictures.items():
        trace = read_trace(content, format)
        assert trace["figure"] == figure_data.name == figure
        assert trace.pop("drawn_with") == redraw.drawing_versions()
        assert trace.pop("look") == {"style": "paper", "title": True, "font": "DejaVu Sans"}
        assert trace == json.loads(json.dumps(figure_data.trace))
    assert figure_data.trace["data"] == frame_sha256(figure_data.frame)
    rows = pd.DataFrame(figure_data.as_json()["rows"], columns=figure_data.frame.columns)
    assert rows.to_csv() == figure_data.frame.to_csv()
    cells = set(figure_data.frame["cell"].dropna()) if "cell" in figure_data.frame else set()
    assert cells <= set(figure_data.trace["cells"])


@pytest.mark.thorough
def test_diverged_loss_does_not_flatten_rest(poor: Store) -> None:
    figure_data = make_figure("loss", poor, "seeds-missing")
    assert "1 diverged and are excluded from means." in figure_data.notes
    figure = figure_of(figure_data, FigureOptions())
    assert [axes.get_ylim()[1] < 13 for axes in figure.axes] == [True, True]
    # polar without memory: seeds 0 and 1 of three, at 3.3 and 3.4
    assert "3.350" in {text.get_text() for text in figure.axes[0].texts}
    all_diverged = make_figure("loss", poor, "all-diverged")
    assert f"{all_diverged.frame['cell'].nunique()} diverged and are excluded from means." in all_diverged.notes
    every = figure_of(all_diverged, FigureOptions())
    assert every.axes[0].get_ylim()[1] == pytest.approx(1.1 * 11)
