"""Table 6: what is printed, against SQL that is written again here."""

import csv
import io
import json
import math
import re
import sqlite3
from fractions import Fraction

import pytest
from atma_sweep.reports.render import markdown_escaped, plain, tex_escaped
from atma_sweep.reports.tables import (
    FORMATS,
    ReportError,
    length_name,
    make_table,
    reason_code,
    render,
    rounded,
    table6,
)
from atma_sweep.results.records import Measurement
from atma_sweep.results.store import SweepUnknown, open_store
from hypothesis import given
from hypothesis import strategies as st

HEADINGS = (
    "Type", "Reg", "Dist", "Mem", "Win", "Val", "Clean@128", "Clean@64K", "Junk@128", "Junk@64K", "Ndl@128", "Ndl@64K",
    "MFU",
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "decimals", "percent", "printed"),
    [
        (0.125, 2, False, "0.13"),
        (2.675, 2, False, "2.68"),
        (0.9625, 1, True, "96.3"),
        (0.00049999, 3, False, "0.000"),
        (-0.0001, 3, False, "0.000"),
        (-0.125, 2, False, "-0.13"),
        (1.0, 1, True, "100.0"),
        (0.285, 2, False, "0.29"),
        (3, 3, False, "3.000"),
        (1e30, 1, False, "1" + "0" * 30 + ".0"),
        (5e-324, 1, False, "0.0"),
    ],
)
def test_rounding_half_up(value, decimals, percent, printed):
    assert rounded(value, decimals, percent=percent) == printed


@given(st.integers(0, 10**9), st.integers(1, 3))
def test_rounding_against_whole_number_arithmetic(thousandths, decimals):
    value = thousandths / 10_000
    scaled = Fraction(thousandths * 10**decimals, 10_000)
    assert Fraction(rounded(value, decimals)) == Fraction(math.floor(scaled + Fraction(1, 2)), 10**decimals)


def test_length_names():
    assert [length_name(n) for n in (0, 1, 128, 1000, 1024, 2048, 65536, 262144, 1 << 20)] == [
        "0", "1", "128", "1000", "1K", "2K", "64K", "256K", "1M",
    ]  # fmt: skip


def test_reason_codes():
    assert [
        reason_code(text)
        for text in (
            "n/a: no peak", "no peak FLOPs known", "oom: at 64K", "too-few-docs: 3 of 32", "",
            "something long without any colon",
        )
    ] == ["n/a", "n/a", "oom", "too-few-docs", "n/a", "something"]  # fmt: skip


def test_the_printed_rows(store):
    table = table6(store, "quick")
    assert table.columns == HEADINGS
    val = ("0.125", "0.13", "0.19", "2.68", "oom", "96.3", "96.3", "n/a")
    assert table.rows == (
        ("polar", "baseline", "off", "on", "off", *val),
        ("nope", "baseline", "off", "on", "off", "3.142", *["needs-eval"] * 7),
        ("polar", "baseline", "off", "off", "off", *["running"] * 8),
        ("polar", "weak", "off", "on", "off", *["diverged"] * 8),
        ("polar", "baseline", "off", "on", "on", *["new"] * 8),
    )
    assert "quick" in table.title
    notes = "\n".join(table.notes)
    assert "Sweep quick, revision 1: 2 of 5 cells done." in notes
    assert "unigram entropy 7.432, bigram entropy 5.500" in notes
    assert "oom (1 values): 3 GiB asked, 1 free." in notes
    assert "n/a (1 values): no peak FLOPs known for cpu." in notes


def test_every_number_equals_an_independent_query(store):
    connection = sqlite3.connect(store.path)
    rows = json.loads(render(table6(store), "json"))
    assert [row["cell"] for row in rows] == [f"{index:012x}" for index in (4, 1, 3, 2, 0)]
    compared = 0
    for row in rows:
        for value in row["values"]:
            found = connection.execute(
                "SELECT m.value, m.reason, m.attempt_id FROM measurement m, attempt a WHERE a.id = m.attempt_id "
                "AND a.state = 'done' AND a.cell_id = ? AND m.probe = ? AND m.metric = ? AND m.length = ? "
                "ORDER BY a.id DESC LIMIT 1",
                (row["cell"], value["probe"], value["metric"], value["length"]),
            ).fetchone()
            assert (value["value"], value["reason"], value["attempt_id"]) == (found or (None, None, None))
            compared += found is not None
        assert (row["sweep"], row["state"]) == connection.execute(
            "SELECT sweep, state FROM results WHERE cell = ?", (row["cell"],)
        ).fetchone()
    assert compared == 9
    columns = {column[0] for column in connection.execute("SELECT * FROM results").description}
    assert set(rows[0]) | set(rows[0]["values"][0]) >= columns


def test_a_newer_attempt_replaces_and_a_failed_one_does_not(store, run, make):
    _, numbers = make
    run(store, f"{4:012x}", "done", numbers(2.5)[:1])
    run(store, f"{4:012x}", "failed", numbers(9.0))
    row = table6(store).rows[0]
    assert row[5:8] == ("2.500", "0.13", "0.19")


def test_seeds_and_further_axes_keep_rows_apart(tmp_path, make):
    cell, _ = make
    store = open_store(tmp_path / "seeds.db", create=True)
    cells = [
        cell(index, seed=index % 2, axes={"attn_type": "polar", "train.lr": rate, "fixed": "1"})
        for index, rate in enumerate(("0.1", "0.1", "0.2", "0.2"))
    ]
    store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    table = table6(store)
    assert table.columns[:8] == ("Type", "Reg", "Dist", "Mem", "Win", "Seed", "train.lr", "Val")
    assert [row[5:7] for row in table.rows] == [("0", "0.1"), ("1", "0.1"), ("0", "0.2"), ("1", "0.2")]
    assert len(set(table.rows)) == 4
    assert table.columns[8:10] == ("Clean@shortest", "Clean@longest")
    asked = table6(store, lengths={"clean": [4096, 256], "junk": [512]})
    assert asked.columns[8:12] == ("Clean@256", "Clean@4K", "Junk@512", "Junk@512")
    json.loads(render(table, "json"))


def test_orphans_and_old_revisions(store, make):
    cell, _ = make
    store.record_revision("quick", grid_text="y", grid_file="x.yaml", cells=[cell(1, attn_type="nope")])
    assert [row[0] for row in table6(store).rows] == ["nope"]
    assert [raw["cell"][-1] for raw in table6(store, orphans=True).raw] == ["4", "3", "2", "0"]
    assert len(table6(store, revision=1).rows) == 5


def test_what_does_not_exist(store):
    with pytest.raises(ReportError, match="choose one of: 6"):
        make_table(5, store)
    with pytest.raises(ReportError, match="terminal, md, csv, tex, json"):
        render(make_table("6", store), "pdf")
    with pytest.raises(SweepUnknown):
        make_table("6", store, "none")


class TestFormats:
    def test_csv_is_one_header_line_and_the_printed_rows(self, store):
        table = table6(store)
        lines = list(csv.reader(io.StringIO(render(table, "csv"))))
        assert [tuple(line) for line in lines] == [table.columns, *table.rows]

    def test_every_format_shows_every_printed_value(self, store):
        table = table6(store)
        for format in FORMATS:
            text = render(table, format)
            assert text.endswith("\n")
            for printed in ("0.125", "2.68", "96.3", "oom", "n/a", "needs-eval", "diverged", "new"):
                assert printed in text, (format, printed)

    def test_markdown_has_equal_columns(self, store):
        lines = [line for line in render(table6(store), "md").splitlines() if line.startswith("|")]
        assert len(lines) == 2 + 5
        assert {line.count("|") for line in lines} == {14}
        assert len({len(line) for line in lines}) == 1

    def test_terminal_never_wraps(self, store):
        lines = render(table6(store), "terminal").splitlines()
        assert any(line.split()[:5] == ["nope", "baseline", "off", "on", "off"] for line in lines)
        assert max(map(len, lines)) < 240

    def test_tex_has_as_many_cells_as_columns(self, store):
        text = render(table6(store), "tex")
        body = text[text.index(r"\endfoot") : text.index(r"\end{longtable}")].splitlines()[1:]
        assert [line.count(" & ") for line in body] == [12] * 5
        assert all(line.endswith(r" \\") for line in body)
        assert r"\begin{longtable}{lllllrrrrrrrr}" in text
        assert text.count(r"\toprule") == 2


HOSTILE = "a|b_{x}$\\input{/etc/passwd}%#&~^<script>alert(1)</script>[bold red]`*\x1b[31m\nnext"


class TestHostileText:
    @pytest.fixture
    def hostile(self, tmp_path, make, run):
        cell, _ = make
        store = open_store(tmp_path / "hostile.db", create=True)
        cells = [cell(0, attn_type=HOSTILE, axes={HOSTILE: "1"}), cell(1, axes={HOSTILE: "[/]"})]
        store.record_revision(HOSTILE, grid_text="x", grid_file="x", cells=cells)
        run(store, cells[0].id, "done", [Measurement(probe="val", metric="val_loss", reason=HOSTILE)])
        return store

    def test_tex(self, hostile):
        text = render(table6(hostile), "tex")
        rest = re.sub(r"\\(text\w+\{\}|[&%$#_{}])", "", tex_escaped(HOSTILE))
        assert not re.search(r"[\\&%$#_{}~^<>|\x1b\n]", rest)
        assert tex_escaped(HOSTILE) in text
        assert r"\input" not in text
        assert "\x1b" not in text

    def test_markdown(self, hostile):
        text = render(table6(hostile), "md")
        assert "<script" not in text
        assert markdown_escaped(HOSTILE) in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {15}

    def test_terminal_and_csv(self, hostile):
        text = render(table6(hostile), "terminal")
        assert "\x1b" not in text
        assert plain(HOSTILE) in text
        assert "[/]" in text
        assert list(csv.reader(io.StringIO(render(table6(hostile), "csv"))))[1][0] == HOSTILE
        assert json.loads(render(table6(hostile), "json"))[0]["attn_type"] == HOSTILE
