"""Figures at the width of a journal's column: no words over words, three ticks at least, marks where the numbers are."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.timeline import distinct_name_parts
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from pictures import check_column, figure_of
from sqlalchemy import update

PRINTED = ("count-map", "state-norm")
START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_sweep_fits_a_column(published: Store, name: str) -> None:
    check_column(figure_of(make_figure(name, published, "printed-v2")))


class TestStart:
    def test_guides_grow_as_the_count_and_as_its_root(self, published: Store) -> None:
        axes = figure_of(make_figure("state-norm", published, "printed-v2")).axes[0]
        guides = [line for line in axes.lines if str(line.get_label()).startswith("_guide")]
        slopes = [float(np.polyfit(np.log(line.get_xdata()), np.log(line.get_ydata()), 1)[0]) for line in guides]
        assert slopes == pytest.approx([1.0]), "Hebbian writes without decay are their root themselves"
        hebbian = max((line for line in axes.lines if line not in guides), key=lambda line: max(line.get_ydata()))
        growth = np.polyfit(np.log(hebbian.get_xdata()), np.log(hebbian.get_ydata()), 1)[0]
        assert growth == pytest.approx(0.5, abs=1e-6)
        assert {"∝ N", "∝ √N"} <= {text.get_text() for text in axes.texts}

    def test_the_map_stays_below_both_of_its_guides_in_the_end(self, published: Store) -> None:
        axes = figure_of(make_figure("count-map", published, "printed-v2")).axes[0]
        guides = [line for line in axes.lines if str(line.get_label()).startswith("_guide")]
        slopes = [
            float(np.polyfit(np.log(np.expm1(line.get_xdata())), np.log(line.get_ydata()), 1)[0]) for line in guides
        ]
        assert slopes == pytest.approx([1.0, 0.5])
        assert {"∝ m", "∝ √m"} <= {text.get_text() for text in axes.texts}
        curves = [line for line in axes.lines if line.get_color() == "#000000" and line.get_linestyle() != "None"]
        tops = sorted(max(line.get_ydata()) for line in curves)
        assert tops == pytest.approx([np.tanh(f * np.log1p(np.exp(-1.5)) * np.log(1001)) for f in (0.5, 1, 2)])


def follow(store: Store, make: Any, count: int, *, name: str = "", states: dict[int, str]) -> None:
    """Record a sweep `times` of cells that run for an hour each, one after the other; `states` sets other ends."""
    cell, _ = make
    cells = [replace(cell(i), slug=f"{name}{i}-s0") for i in range(count)]
    store.record_revision("times", grid_text="x", grid_file="x.yaml", cells=cells)
    for i, record in enumerate(cells):
        attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
        state = states.get(i, "done")
        store.finish_attempt(attempt.id, 1, state, **({"failure": "cuda_oom"} if state == "failed" else {}))
        times = {"started_at": START + timedelta(hours=i), "finished_at": START + timedelta(hours=i + 1)}

        def move(session: Any, which: int = attempt.id, times: dict[str, Any] = times) -> None:
            session.execute(update(AttemptRow).where(AttemptRow.id == which).values(**times))

        store.write(move)


class TestTimeline:
    def test_every_bar_has_its_cells_name_in_it(self, empty: Store, make: Any) -> None:
        follow(empty, make, 4, states={})
        figure_data = make_figure("timeline", empty, "times")
        axes = figure_of(figure_data).axes[0]
        renderer = axes.figure.canvas.get_renderer()
        names = {text.get_text(): text.get_window_extent(renderer) for text in axes.texts}
        assert list(names) == list(figure_data.frame["name"]) == ["0", "1", "2", "3"]
        for bar, box in zip(axes.patches, names.values(), strict=True):
            seen = bar.get_window_extent(renderer)
            assert seen.x0 <= box.x0 <= box.x1 <= seen.x1
            assert seen.y0 <= box.y0 <= box.y1 <= seen.y1

    def test_narrow_bars_are_numbered_with_key(self, empty: Store, make: Any) -> None:
        follow(empty, make, 20, name="mixer_", states={7: "failed", 11: "diverged"})
        figure_data = make_figure("timeline", empty, "times")
        figure = figure_of(figure_data)
        check_column(figure)
        texts = [text.get_text() for text in figure.axes[0].texts]
        key = "   ".join(texts[-1].split("\n")).split("   ")
        expected = [f"{i + 1} {name}" for i, name in enumerate(figure_data.frame["name"])]
        expected[7] += " (cuda_oom)"
        assert key == expected
        assert texts[:-1] == [str(i + 1) for i in range(20)]
        crosses = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
        assert [list(line.get_xdata()) for line in crosses] == [[8.0, 12.0]]
        assert "A cross marks an attempt that failed or diverged." in figure_data.notes

    def test_timeline_of_the_pilot_has_paper_names(self) -> None:
        figure_data = make_figure("timeline", shipped_store("replication-longer"), "replication-longer")
        assert set(figure_data.frame["name"]) == {
            f"{mixer}, {memory}{tokens}"
            for mixer in ("PoLAR", "NoPE", "RoPE")
            for memory in ("", "with memory, ")
            for tokens in ("65.5M tokens", "131M tokens")
        }
        assert figure_data.notes[2] == "All done.", "no cross, no note on it"
        assert figure_data.notes[3].startswith("12 attempts shared a GPU, up to 12 of this sweep at one time.")
        figure = figure_of(figure_data)
        assert not any(note.startswith("Last in each name") for note in figure_data.notes), "names say their unit"
        assert not figure.legends, "names beside the bars say what a key would"
        rows = [" ".join(label.get_text().split()) for label in figure.axes[0].get_yticklabels()]
        by_tokens = sorted(figure_data.frame["name"], key=lambda name: name.split(", ")[::-1])
        assert rows == by_tokens, "each attempt has a row with its name, in groups of training tokens"

    @pytest.mark.thorough
    def test_key_of_large_timeline_names_failed_cells(self, empty: Store, make: Any) -> None:
        follow(empty, make, 45, name="mixer_", states={7: "failed"})
        figure = figure_of(make_figure("timeline", empty, "times"))
        assert [text.get_text() for text in figure.axes[0].texts][-1] == "8 mixer_7 (cuda_oom)"

    def test_a_name_is_what_not_all_slugs_share(self) -> None:
        slugs = ["polar-weak-d0-m1-s0", "nope-weak-d0-m0-s0"]
        assert distinct_name_parts(slugs) == {slugs[0]: "polar-m1", slugs[1]: "nope-m0"}
        assert distinct_name_parts(["polar-a"]) == {"polar-a": "polar-a"}
        assert distinct_name_parts(["a-b", "a-b-c"]) == {"a-b": "a-b", "a-b-c": "a-b-c"}
