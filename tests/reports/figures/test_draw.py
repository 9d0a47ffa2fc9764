"""The pictures: everything in the legend, no words over words, the same bytes every time, a trace that reads back."""

import ast
import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
import pytest
from atma_sweep.cli import app
from atma_sweep.reports.figures import make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData
from atma_sweep.reports.figures.canvas.length_frames import line_means
from atma_sweep.reports.figures.files import FORMATS, drawn, read_trace, renderings
from atma_sweep.reports.figures.loss import cells_stand_out
from atma_sweep.reports.report_folder import write_report_folder
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.results import paper
from atma_sweep.results.errors import StoreError
from atma_sweep.results.store.store import Store
from pictures import assert_texts_apart
from tiers import every_nth
from typer.testing import CliRunner

PRINTED = ("needle", "count-map", "length", "effects", "interactions", "pareto", "power", "seeds")
LEVELS = [(kind, memory) for kind in ("polar", "nope", "a-mixer-of-a-long-name") for memory in ("off", "on")]


def figure_of(figure_data: FigureData) -> Any:
    with drawing.settings():
        return drawn(figure_data)


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


class TestReadable:
    @pytest.mark.thorough
    @pytest.mark.parametrize("name", PRINTED)
    def test_no_texts_overlap_in_sweep_of_120_cells(self, published: Store, name: str) -> None:
        assert assert_texts_apart(figure_of(make_figure(name, published, "printed-v2"))) > 10

    def test_overlap_check_detects_overlap(self) -> None:
        with drawing.settings():
            figure = drawing.page(2.0)
            figure.text(0.4, 0.5, "words that meet")
            figure.text(0.45, 0.5, "other words")
            with pytest.raises(AssertionError, match="'words that meet' overlaps 'other words'"):
                assert_texts_apart(figure)

    def test_marker_styles_differ_without_colour(self) -> None:
        looks = [drawing.marker_style(first, second) for first in range(7) for second in range(4)]
        assert len({(style["marker"], str(style["linestyle"]), style["color"]) for style in looks}) == 28
        assert len({(style["marker"], str(style["linestyle"])) for style in looks}) == 28, "without colour too"


class TestLegends:
    @pytest.mark.parametrize("name", every_nth(["needle", "length"], 2))
    def test_every_line_is_named(self, published: Store, name: str) -> None:
        figure_data = make_figure(name, published, "printed-v2")
        labels = [
            f"{memory}, {window}" for memory in ("no memory", "with memory") for window in ("no window", "with window")
        ]
        labels.append("training length (2K)")
        assert legend_of(figure_of(figure_data))[:5] == labels
        assert len(set(figure_data.frame["line"])) == 4

    @pytest.mark.thorough
    def test_every_end_is_named_with_its_count(self, every: Store) -> None:
        handles = legend_of(figure_of(make_figure("timeline", every)))
        ends = ["done (6)", "running (1)", "interrupted (1)", "failed (1)", "diverged (1)"]
        assert handles == [*ends, "failed or diverged"]

    @pytest.mark.thorough
    def test_pareto_names_mixers_and_front(self, every: Store) -> None:
        figure_data = make_figure("pareto", every)
        figure = figure_of(figure_data)
        shown = legend_of(figure)
        assert shown[: len({kind for kind, _ in LEVELS})] == list(
            dict.fromkeys(drawing.level_label(kind) for kind, _ in LEVELS)
        )
        assert "Pareto front" in shown
        for axes, quality in zip(figure.axes, dict.fromkeys(figure_data.frame["quality"]), strict=True):
            front = figure_data.frame[(figure_data.frame["quality"] == quality) & figure_data.frame["front"]]
            numbers = {text.xy: text.get_text() for text in axes.texts if text.get_text().isdigit()}
            assert numbers == {
                (row["speed"], row["value"]): str(row["front_number"]) for row in front.to_dict("records")
            }

    @pytest.mark.thorough
    def test_the_best_constant_answer_is_a_line_among_the_needles(self, published: Store) -> None:
        figure = figure_of(make_figure("pareto", published, "printed-v2"))
        assert "constant digit (17.5 %)" in legend_of(figure)
        flat = [sum(list(line.get_ydata()) == [17.5, 17.5] for line in axes.lines) for axes in figure.axes]
        assert flat == [0, 1]

    @pytest.mark.thorough
    def test_curves_and_writes_are_named(self, every: Store) -> None:
        figure_data = make_figure("loss", every)
        gone = {
            (row["first"], row["second"]) for row in figure_data.frame[figure_data.frame["diverged"]].to_dict("records")
        }
        assert len(gone) == 1
        assert legend_of(figure_of(figure_data))[:2] == ["no memory", "with memory"]
        assert len(legend_of(figure_of(make_figure("state-norm", every)))) == 4
        slopes = legend_of(figure_of(make_figure("count-map", every)))
        assert slopes[1:] == ["at initialization: β = 0.201", "no memory: β = 0.200", "with memory: β = 0.220"]

    @pytest.mark.thorough
    def test_drawn_lines_are_the_numbers_of_the_frame(self, published: Store) -> None:
        figure_data = make_figure("needle", published, "printed-v2")
        means = line_means(figure_data.frame)
        figure = figure_of(figure_data)
        panel = next(axes for axes in figure.axes if axes.get_title() == "NoPE")
        seen = sorted(
            tuple(round(float(y), 9) for y in line.get_ydata())
            for line in panel.lines
            if 3 <= line.get_zorder() < 3.4 and line.get_marker() != "None"
        )
        settings_before = [
            tuple(round(100 * y, 9) for y in line.sort_values("length")["value"])
            for _, line in means[means["panel"] == "nope"].groupby("line")
        ]
        assert seen == sorted(settings_before)


class TestSamples:
    @pytest.mark.parametrize("name", every_nth(["needle", "length"], 2))
    def test_banded_lines_have_no_lines_of_cells(self, published: Store, name: str) -> None:
        from matplotlib.collections import LineCollection

        figure_data = make_figure(name, published, "printed-v2")
        drawn_marks = [mark for axes in figure_of(figure_data).axes for mark in axes.collections]
        lines = figure_data.frame.groupby(["panel", "line", "probe"])["cell"].nunique()
        bars = [mark for mark in drawn_marks if isinstance(mark, LineCollection)]
        assert len(bars) == len(lines) == len(drawn_marks)
        # Student's t of ten cells, clipped to a share
        each = figure_data.frame.groupby(["panel", "line", "probe", "length"])["value"].agg(["mean", "std"])
        half, factor = 2.262157162798 * each["std"] / math.sqrt(10), 100 if name == "needle" else 1
        low, high = factor * (each["mean"] - half), factor * (each["mean"] + half)
        if name == "needle":
            low, high = low.clip(0, 100), high.clip(0, 100)
        drawn_ends = sorted((float(bar[0, 1]), float(bar[1, 1])) for mark in bars for bar in mark.get_segments())
        assert np.array(drawn_ends) == pytest.approx(np.array(sorted(zip(low, high, strict=True))), abs=1e-6)
        assert set(lines) == {10}
        assert "(n = 10 cells per line). Bars" in figure_data.notes[0]
        assert not any("leave the axes" in note or "single cells" in note for note in figure_data.notes)

    @pytest.mark.thorough
    def test_samples_of_differences_are_in_their_captions(self, published: Store) -> None:
        effects, interactions = (make_figure(name, published, "printed-v2") for name in ("effects", "interactions"))
        assert "n matched pairs" in effects.notes[0]
        assert "n matched quadruples" in interactions.notes[0]
        figure = figure_of(effects)
        counts = [text.get_text() for text in figure.axes[0].texts if text.get_text().isdigit()]
        overall = effects.frame[effects.frame["where"] == ""]
        assert {str(pairs) for pairs in overall["pairs"]} <= set(counts) <= {str(n) for n in effects.frame["pairs"]}
        shown = interactions.frame[~interactions.frame["floor"]].groupby("measure", sort=False).head(6)
        for axes, (_, rows) in zip(figure_of(interactions).axes, shown.groupby("measure", sort=False), strict=True):
            texts = [text.get_text() for text in axes.texts]
            assert [text for text in texts if text.isdigit()] == [str(fours) for fours in rows["fours"]]
            assert [text for text in texts if text.endswith("/4")] == [f"{k}/4" for k in rows["unrecalled"] if k]
        assert "average of strata that differ" in legend_of(figure)
        written = [sum(text.get_text() == "no recall" for text in axes.texts) for axes in figure.axes]
        assert written[:2] == [0, 0]
        assert written[2] > 4

    @pytest.mark.thorough
    def test_effects_between_levels_without_recall_are_marked(self, published: Store) -> None:
        """By hand: means of the printed accuracies at 64K, of which a constant digit gets 17.5 %.

        Of an average over mixers none of which recalls, whatever the memory, every stratum has such a mean.
        """
        frame = make_figure("effects", published, "printed-v2").frame
        rows = list(paper.rows("complete-v2"))
        memory = frame[(frame["axis"] == "memory") & (frame["measure"] == "Ndl@64K")]
        for row in memory.to_dict("records"):
            mixer = row["where"].removeprefix("attn_type=")
            if "=" in mixer or not row["where"].startswith("attn_type="):
                continue
            means = [
                fmean(float(own["needle_64k"]) for own in rows if (own["attn_type"], own["memory"]) == (mixer, level))
                for level in ("on", "off")
            ]
            assert row["floor"] == all(mean <= 17.5 for mean in means)
        overall = frame[(frame["measure"] == "Ndl@64K") & (frame["where"] == "")]
        for row in overall[overall["axis"] == "attn_type"].to_dict("records"):
            strata = {
                key: fmean(float(own["needle_64k"]) for own in rows if (own["attn_type"], own["memory"]) == key)
                for key in product((row["level"], row["reference"]), ("on", "off"))
            }
            assert row["floor"] == all(mean <= 17.5 for mean in strata.values())
        # PoLAR with memory recalls, so that no average over all mixers lacks recall
        assert not overall[overall["axis"] != "attn_type"]["floor"].any()

    @pytest.mark.parametrize("name", every_nth(["power", "seeds"], 2))
    def test_spreads_at_the_floor_of_trials_are_marked(self, published: Store, name: str) -> None:
        figure_data = make_figure(name, published, "printed-v2")
        spread = "run_sd" if name == "power" else "sd"
        at_floor = figure_data.frame[figure_data.frame[spread] < figure_data.frame["floor"]]
        count = len(at_floor.drop_duplicates(["measure", "stratum"]))
        starred = [text.get_text() for axes in figure_of(figure_data).axes for text in axes.texts]
        assert count == sum(text.endswith(" *") for text in starred)
        assert count == (1 if name == "power" else 3), "the power of RoPE, all at 0 %, is not estimable"
        assert any("*: a lower bound" in note for note in figure_data.notes)

    def test_cells_of_training_curves_are_drawn_if_visible(self, published: Store) -> None:
        figure_data = make_figure("loss", published, "printed-v2")
        frame = figure_data.frame
        assert not cells_stand_out(frame, "val_loss")
        assert "n = 20 cells per line" in figure_data.notes[0]
        assert "single cells" not in figure_data.notes[0]
        # one cell a tenth above the mean of its group, of 20 cells
        high = frame["cell"] == frame["cell"].iloc[0]
        assert cells_stand_out(frame.assign(val_loss=frame["val_loss"] + 0.1 * high), "val_loss")


class TestFiles:
    @pytest.mark.parametrize(
        ("format", "content"), [("svg", b"<svg/>"), ("pdf", b"%PDF-1.4"), ("png", b"\x89PNG"), ("svg", b"<")]
    )
    def test_a_strange_file_has_none(self, format: str, content: bytes) -> None:
        with pytest.raises(ReportError, match=f"this {format} has no atma-sweep trace"):
            read_trace(content, format)

    @pytest.mark.thorough
    def test_bytes_repeat_in_another_process(self, every: Store, tmp_path: Path) -> None:
        figure_data = make_figure("needle", every)
        contents = renderings(figure_data, FORMATS)
        again = renderings(make_figure("needle", every), FORMATS)
        assert contents == again
        code = (
            "import sys; from pathlib import Path; from atma_sweep.results.store.store import open_store; "
            "from atma_sweep.reports.figures import make_figure; from atma_sweep.reports.figures.files import renderings\n"
            "made = make_figure('needle', open_store(sys.argv[1]))\n"
            "for format, content in renderings(made).items(): Path(sys.argv[2], 'x.' + format).write_bytes(content)"
        )
        database = str(tmp_path / "empty.db")
        environment = os.environ | {"PYTHONHASHSEED": "4711", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1"}
        path = os.pathsep.join(p for p in sys.path if p)
        subprocess.run(
            [sys.executable, "-c", code, database, str(tmp_path)], check=True, env=environment | {"PYTHONPATH": path}
        )
        for format, content in contents.items():
            assert (tmp_path / f"x.{format}").read_bytes() == content, format

    @pytest.mark.thorough
    def test_drawing_restores_global_settings(self, every: Store) -> None:
        before = dict(matplotlib.rcParams)
        renderings(make_figure("length", every), ["svg"])
        assert dict(matplotlib.rcParams) == before

    @pytest.mark.thorough
    def test_matplotlib_waits_until_something_is_drawn(self) -> None:
        code = (
            "import sys\n"
            "from atma_sweep.reports import figures\n"
            "for line in figures.FIGURES.values(): line.load(figures.__name__)\n"
            "assert not {'matplotlib.figure', 'torch'} & set(sys.modules), sorted(sys.modules)"
        )
        path = os.pathsep.join(p for p in sys.path if p)
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})
        for file in Path(drawing.__file__).parent.glob("*.py"):
            tree = ast.parse(file.read_text())
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not any("pyplot" in name for name in imported), file
            top = {
                str(getattr(node, "module", "")) + node.names[0].name
                for node in tree.body
                if isinstance(node, ast.Import | ast.ImportFrom)
            }
            assert not any(name.startswith("matplotlib") for name in top), file

    def test_an_unknown_format_is_refused(self, every: Store) -> None:
        with pytest.raises(ReportError, match="figures cannot be written as 'gif'"):
            renderings(make_figure("length", every), ["gif"])


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["report", *arguments])

    @pytest.mark.thorough
    def test_default_output_file_is_reported(self, every: Store, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        result = self.run("--figure", "1", "--db", "empty.db")
        assert (result.exit_code, result.stderr) == (0, "wrote all-needle.svg\n")
        assert read_trace((tmp_path / "all-needle.svg").read_bytes(), "svg")["sweep"] == "all"

    @pytest.mark.thorough
    def test_a_name_from_before_there_was_a_rule_stays_in_the_folder(
        self, every: Store, tmp_path: Path, monkeypatch: Any
    ) -> None:
        (tmp_path / "inner").mkdir()
        monkeypatch.chdir(tmp_path / "inner")
        with (
            contextlib.closing(sqlite3.connect("old.db")) as old,
            contextlib.closing(sqlite3.connect(every.path)) as now,
        ):
            now.backup(old)
            old.execute("UPDATE sweep SET name = '../../../x' WHERE name = 'all'")
            old.commit()
        assert self.run("--figure", "length", "--db", "old.db").exit_code == 0
        result = CliRunner().invoke(app, ["export", "--db", "old.db", "--to", "csv"])
        assert result.exit_code == 0, result.output
        names = sorted(path.name for path in (tmp_path / "inner").iterdir() if not path.name.startswith("old.db"))
        assert names == ["x-0274b718-length.svg", "x-0274b718-measurements.csv"]
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("empty.db")] == ["inner"]

    @pytest.mark.thorough
    def test_the_ending_says_the_format(self, every: Store, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.run("--figure", "loss", "--db", "empty.db", "--out", "loss.pdf").exit_code == 0
        assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
        assert self.run("--figure", "loss", "--db", "empty.db", "--format", "png").exit_code == 0
        assert (tmp_path / "all-loss.png").read_bytes().startswith(b"\x89PNG")

    def test_json_is_what_is_drawn(self, every: Store, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        payload = json.loads(self.run("--figure", "pareto", "--db", "empty.db", "--json").stdout)
        assert (payload["figure"], len(payload["rows"])) == ("pareto", 12)
        assert payload["trace"] == make_figure("pareto", every).trace

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (
                ("--figure", "needle", "--out", "x.docx"),
                "'x.docx' has no file extension of a known format; use one of .svg, .pdf, .png",
            ),
            (("--figure", "needle", "--format", "docx"), "figures cannot be written as 'docx'"),
            (("--figure", "9"), "unknown figure 9"),
            (("--figure", "needle", "--table", "6"), "a table and a figure need one command each"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, every: Store, tmp_path: Path, monkeypatch: Any, arguments: Any, why: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = self.run(*arguments, "--db", "empty.db")
        assert isinstance(result.exception, ReportError | StoreError)
        assert why in str(result.exception)


@pytest.mark.thorough
def test_a_folder_of_everything(every: Store, tmp_path: Path) -> None:
    out = tmp_path / "all"
    written = write_report_folder(every, out=out, formats=["md", "tex"], figures=("needle", "timeline"))
    names = {path.name for path in written.files}
    assert {f"figure-{name}.{format}" for name in ("needle", "timeline") for format in FORMATS} <= names
    page = (out / "index.html").read_text()
    assert '<img loading="lazy" src="figure-needle.png" alt="Needle accuracy over context length.' in page
    assert '<a href="figure-timeline.pdf">pdf</a>' in page
    assert "[svg](figure-needle.svg)" in (out / "index.md").read_text()
    assert "{figure-needle.pdf}" in (out / "appendix.tex").read_text()


@pytest.mark.thorough
def test_report_folder_says_which_figure_is_omitted(published: Store, tmp_path: Path) -> None:
    (tmp_path / "failures.log").write_text("of an earlier call")
    written = write_report_folder(published, "printed-v1", out=tmp_path, formats=[], figures=("timeline",))
    assert written.skipped["figure timeline"].startswith("sweep printed-v1 has printed numbers only")
    assert "figure timeline skipped: sweep printed-v1 has printed numbers only" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "failures.log").exists()
