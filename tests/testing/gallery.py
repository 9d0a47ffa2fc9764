"""The gallery: every figure and table, drawn from sweeps that come along, with the command under each.

`python tests/testing/gallery.py` writes docs/gallery.md and docs/images/gallery/. Figures whose data no shipped sweep
has are drawn from invented data of the test factories, and the page says so.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plausible
import studied
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import FigureData, caption
from atma_sweep.reports.figures.canvas.figure_options import FigureOptions
from atma_sweep.reports.figures.files import drawn
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import TABLES, make_table
from atma_sweep.results.names import PUBLISHED, SHIPPED
from atma_sweep.results.paper import open_published
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.store import Store, open_store
from PIL import Image
from swept import swept

ROOT = Path(__file__).resolve().parents[2]
PAGE, IMAGES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"
SWEEPS = (
    "printed-v2", "replication-pilot", "replication-rates", "replication-retrieval", "replication-longer", "replication",
    "printed-v2-open-weight", "printed-tra", "printed-wall", "printed-atlas", "printed-v1",
)  # fmt: skip
"""Sweeps that come along, in the order in which they are tried."""
PREFERRED = {
    "timeline": "replication-pilot",
    "seeds": "replication-longer",
    "response": "replication-rates",
    "contours": "joint",
}
"""Sweep of a figure that shows it better than the first that has its data."""
GUIDES = {"downstream": "How to measure them: [Evaluate downstream tasks](how-to/evaluate-downstream-tasks.md)."}
"""Sentence below the description of a figure or table."""
LOOK = FigureOptions(width_mm=120.0, title=False)
DOTS_PER_INCH = 170
COLOURS = 256
"""Colours of a picture's palette, which makes its file a third as large."""
TRUE_COLOUR = ("attention-map", "contours", "gate-dynamics", "items", "passkey", "retention")
"""Figures with heat maps, whose shades a palette would break into bands."""
MAX_ROWS, MAX_COLUMNS = 6, 8
"""Rows and columns of a table that the page shows."""


def invented() -> dict[str, Store]:
    """Return temporary stores of invented sweeps by the name of the sweep, from the factories of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="gallery"))
    fills: dict[str, Callable[[Store], Any]] = {
        plausible.NAME: plausible.fill_plausible, plausible.TASKS: plausible.fill_tasks, "rates": swept, "tuned": studied.record_study, "both": studied.two, "joint": studied.joint,
    }  # fmt: skip
    stores = {}
    for name, fill in fills.items():
        stores[name] = open_store(folder / f"{name}.db", create=True)
        fill(stores[name])
    return stores


class Source:
    """The sweeps that the gallery shows: those that come along, and invented ones."""

    def __init__(self) -> None:
        self.published, self.invented = open_published(), invented()

    def store(self, sweep: str) -> Store:
        """Return the store that holds a sweep."""
        if sweep in SHIPPED:
            return shipped_store(sweep)
        return self.published if sweep in PUBLISHED else self.invented[sweep]

    def first(self, name: str, make: Callable[..., Any]) -> tuple[str, Any] | None:
        """Return (sweep, figure or table) of the first sweep with the data; None if no sweep has them.

        Args:
            name: Name of the figure or table.
            make: `make_figure` or `make_table`.
        """
        preferred = [PREFERRED[name]] if name in PREFERRED else []
        for sweep in (*preferred, *SWEEPS, *self.invented):
            try:
                item = make(name, self.store(sweep), sweep)
            except ReportError:
                continue
            if not isinstance(item, Table) or item.rows:
                return sweep, item
        return None


def _sentence(text: str) -> str:
    """Return a description as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def write_picture(figure_data: FigureData, path: Path) -> None:
    """Write a figure as a small PNG without a trace, with a palette unless it has shades (TRUE_COLOUR)."""
    with drawing.settings(LOOK):
        out = io.BytesIO()
        drawn(figure_data, LOOK).savefig(out, format="png", dpi=DOTS_PER_INCH, metadata={"Software": "atma-sweep"})
    image = Image.open(out).convert("RGB")
    if figure_data.name not in TRUE_COLOUR:
        image = image.quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def caption_of(source: Source, name: str) -> str:
    """Return the caption of a figure as the page has it."""
    sample = source.first(name, make_figure)
    assert sample is not None, f"no sweep shows the figure {name}"
    return caption(sample[1])


def figure_section(source: Source, name: str) -> list[str]:
    """Return the lines of a figure's section, and write its picture."""
    lines = [f"### {name}", "", " ".join(filter(None, (_sentence(FIGURES[name].shows), GUIDES.get(name)))), ""]
    sample = source.first(name, make_figure)
    assert sample is not None, f"no sweep shows the figure {name}"
    sweep, figure_data = sample
    write_picture(figure_data, IMAGES / f"{name}.png")
    lines += [f"![{FIGURES[name].shows}](images/gallery/{name}.png)", ""]
    if sweep in source.invented:
        lines += [
            "**Invented data**: no sweep that comes along has what this figure needs. Of a sweep of your own:",
            "",
        ]
    command = f"atma-sweep report --figure {name} --out {name}.pdf --width 120mm --no-title"
    lines += [
        "```console",
        command if sweep in source.invented else command.replace("report", f"report --sweep {sweep}"),
        "```",
        "",
    ]
    return [*lines, f"> {caption(figure_data)}", ""]


def table_section(source: Source, name: str) -> list[str]:
    """Return the lines of a table's section: its first rows and columns, and its command."""
    lines = [
        f"### Table {name}" if name[0].isdigit() else f"### Table `{name}`",
        "",
        " ".join(filter(None, (_sentence(TABLES[name].shows), GUIDES.get(name)))),
        "",
    ]
    sample = source.first(name, make_table)
    if sample is None:
        return [
            *lines,
            "No sweep that comes along has what this table needs.",
            "",
            "```console",
            f"atma-sweep report --table {name}",
            "```",
            "",
        ]
    sweep, table = sample
    if sweep in source.invented:
        lines += ["**Invented data**: no sweep that comes along has what this table needs. Of a sweep of your own:", ""]
    across, down = len(table.columns), len(table.rows)
    shown = [list(table.columns[:MAX_COLUMNS]), *(list(row[:MAX_COLUMNS]) for row in table.rows[:MAX_ROWS])]
    rows = ["| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |" for row in shown]
    lines += [rows[0], "|" + "---|" * len(shown[0]), *rows[1:], ""]
    if across > MAX_COLUMNS or down > MAX_ROWS:
        lines += [
            f"The first {min(down, MAX_ROWS)} of {down} rows, {min(across, MAX_COLUMNS)} of {across} columns.",
            "",
        ]
    command = (
        f"atma-sweep report --table {name}"
        if sweep in source.invented
        else f"atma-sweep report --sweep {sweep} --table {name}"
    )
    return [*lines, "```console", command, "```", ""]


def page() -> str:
    """Return the text of the gallery, and write its pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for old in IMAGES.glob("*.png"):
        old.unlink()
    source = Source()
    lines = ["# Gallery", "", "Every figure and table of `atma-sweep report`, with the command under each.", ""]
    lines += ["The sweeps named here come along with the program: no run and no database is needed.", ""]
    lines += [
        "`python tests/testing/gallery.py` writes this page. Options of style, width and format: [make-figures.md](how-to/make-figures.md).",
        "",
    ]
    lines += ["## Figures", ""]
    for name in FIGURES:
        lines += figure_section(source, name)
    lines += ["## Tables", ""]
    for name in TABLES:
        lines += table_section(source, name)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
