"""Tables on terminals of every width: no line is longer, and what is folded away or left out is told."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.reports.render import render
from atma_sweep.reports.table import Table
from atma_sweep.reports.tables import make_table
from atma_sweep.results.console import terminal_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store
from ordinary import TABLES
from patience import PATIENCE_S
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable

WIDTHS = (60, 80, 120, 200)
ME = Owner(name="ada", host="here", pid=1, started=0.0)
PACKAGES = {"torch": "2.13.0+cu130", "triton": "3.5.1", "fla-core": "0.4.1", "numpy": "2.4.1"}
KERNELS = {f"operation_{index}": "atma_sweep.kernels.attention.polar:triton_with_a_long_name" for index in range(8)}


@pytest.fixture(scope="module")
def printed() -> Store:
    return open_published()


@pytest.fixture(scope="module")
def published_tables(printed: Store) -> dict[str, Table]:
    """Two slow tables, as wide as the effects, are left out."""
    return {name: make_table(name, printed, "printed-v2") for name in TABLES if name not in ("interactions", "compare")}


@pytest.fixture
def troubled(empty: Store, make: Any) -> Store:
    """Return a store whose cells have long failure causes, or software lists of 500 characters."""
    cell, _ = make
    cells = [cell(index, seed=index) for index in range(8)]
    empty.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    for index, record in enumerate(cells):
        attempt = empty.start_attempt(record.id, owner=ME, fence=1)
        recorder = DatabaseRecorder(empty, attempt.id, 1)
        provenance = Provenance(
            config={}, seed=index, git_commit=f"{index % 2:040x}", packages=PACKAGES, kernels=KERNELS
        )
        recorder.provenance(provenance)
        recorder.measurements([Measurement(probe="val", metric="val_loss", value=1.0)])
        cause = f"CUDA error: {'an illegal memory access was encountered ' * 4}at /{'deep/' * 30}file.py"
        state = "failed" if index % 2 else "done"
        empty.finish_attempt(attempt.id, 1, state, cause=cause if index % 2 else None)  # type: ignore[arg-type]
    return empty


def fits(table: Table, width: int) -> str:
    text = render(table, "terminal", width=width)
    longest = max(text.splitlines(), key=cell_len)
    assert cell_len(longest) <= width, longest
    return text


@pytest.mark.thorough
def test_paper_tables_fit_the_terminal(published_tables: dict[str, Table]) -> None:
    for width in WIDTHS:
        for name, table in published_tables.items():
            text = fits(table, width)
            if "hidden" not in text and len(table.rows) < 10:
                assert squeezed(text).keys() >= squeezed(" ".join(map(" ".join, table.rows))).keys(), name


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["6", "failures", "provenance"])
def test_long_texts_are_folded(troubled: Store, name: str, width: int) -> None:
    table = make_table(name, troubled, "s")
    text = fits(table, width)
    if "hidden" not in text:
        # words may be broken, and stand beside those of other columns: every piece of six signs is there all the same
        letters = re.sub(r"\s+", "", text)
        for row in table.rows[:1]:
            for word in " ".join(row).split():
                assert word[:6] in letters, word


def squeezed(text: str) -> dict[str, int]:
    tokens = text.split()
    return {word: tokens.count(word) for word in tokens}


@pytest.mark.thorough
def test_dropped_and_folded_columns_are_named(printed: Store) -> None:
    table = make_table("6", printed, "printed-v2")
    narrow = " ".join(fits(table, 60).split())
    assert "3 columns hidden: Ndl@2K, Ndl@64K, MFU; --format csv or a wider terminal shows all." in narrow
    assert "hidden" not in fits(table, 80)
    polar_rows = [row for row in table.rows if row[0] == "polar"]
    lines = terminal_table.table_lines(table.columns, polar_rows, table.text_columns, 60)
    assert "The same in every row: Type polar." in lines
    assert max(map(cell_len, lines)) <= 60


@pytest.mark.thorough
def test_very_wide_row_becomes_a_block(printed: Store) -> None:
    lines = fits(make_table("provenance", printed, "printed-v2"), 60).splitlines()
    assert "GPU        NVIDIA L4" in lines
    assert "Attempts   120" in lines


@pytest.mark.thorough
def test_table_that_fits_equals_the_file(printed: Store) -> None:
    table = make_table("3", printed, "printed-v2")
    assert render(table, "terminal", width=2000) == render(table, "terminal")
    for name in ("6", "provenance"):
        rendered = render(make_table(name, printed, "printed-v2"), "terminal")
        assert "hidden" not in rendered


@pytest.mark.parametrize("signs", ["漢字" * 30, "word " * 60, "x" * 300, ""], ids=["wide", "words", "one word", "none"])
def test_arbitrary_text_fits(signs: str) -> None:
    for num_labels in (0, 1, 2, 3):
        for rows in ([[signs, "b", "1.25"]], [[signs, "b", "1.25"], ["a", signs, signs]] * 9):
            for line in terminal_table.table_lines(["First", signs or "Second", "Third"], rows, num_labels, 60):
                assert cell_len(line) <= 60


def test_rows_align_with_rich(printed: Store) -> None:
    """The renderer pads rows itself, so its output is compared with a table drawn by Rich completely."""
    table = make_table("3", printed, "printed-v2")
    rows = [*table.rows, ["64K 漢字", *table.rows[0][1:]]]
    rich_table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(table.columns):
        rich_table.add_column(heading, justify="left" if index < table.text_columns else "right")
    for row in rows:
        rich_table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=1000).print(rich_table)
    expected = [line.rstrip() for line in out.getvalue().splitlines()]
    assert terminal_table.table_lines(table.columns, rows, table.text_columns, None) == expected
    bold = terminal_table.table_lines(table.columns, rows, table.text_columns, None, bold=table.best, color=True)
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in bold] == expected
    marked = {text for line in bold for text in re.findall(r"\x1b\[1m(.*?)\x1b\[0m", line)}
    assert marked >= {table.rows[r][c] for r, c in table.best}


def test_folded_row_keeps_its_position() -> None:
    rows = [["a", "1.25"], ["word " * 8, "2.5"], ["b", "10.0"]]
    assert terminal_table.table_lines(["Name", "Number"], rows, 1, 32)[2:] == [
        "a" + " " * 25 + "  1.25",
        "word word word word word" + "     2.5",
        "word word word",
        "b" + " " * 25 + "  10.0",
    ]


def seen(arguments: list[str], folder: Path, width: int) -> str:
    """Return the output of a command on a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "atma_sweep.cli", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode())


@pytest.mark.thorough
def test_commands_use_the_terminal_width(tmp_path: Path) -> None:
    arguments = ["report", "--table", "provenance", "--sweep", "printed-v2"]
    output = seen(arguments, tmp_path, 66)
    assert max(map(cell_len, output.splitlines())) <= 66
    assert "GPU        NVIDIA L4" in output
    piped = subprocess.run(
        [sys.executable, "-m", "atma_sweep.cli", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert max(map(cell_len, piped.stdout.splitlines())) > 66
    prepare = [sys.executable, "-m", "atma_sweep.cli", "data", "prepare", "stdlib"]
    subprocess.run(prepare, cwd=tmp_path, check=True, capture_output=True)
    output = seen(["data", "list"], tmp_path, 60)
    assert max(map(cell_len, output.splitlines())) <= 60
    assert "fingerprint" in output
