"""Table 6: what is printed, against SQL that is written again here."""

import csv
import io
import json
import math
import re
import sqlite3
from fractions import Fraction
from html.parser import HTMLParser

import pytest
from atma_sweep.reports.number_format import format_length, format_number, reason_code
from atma_sweep.reports.render import render
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import make_table
from atma_sweep.results.console.text import csv_field, markdown_escaped, sanitize_line, tex_escaped
from atma_sweep.results.errors import SweepUnknown
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, Owner
from hypothesis import given
from hypothesis import strategies as st
from sweeps import table6

ME = Owner(name="ada", host="here", pid=1, started=0.0)


def cell_of(index: int, *, seed: int) -> CellRecord:
    levels = dict(zip(AXES, ("polar", "baseline", "off", "on", "off"), strict=True))
    return CellRecord(id=f"{index:012x}", slug=f"slug-{index}", seed=seed, levels=levels, config={}, tokens=10)


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
    assert format_number(value, decimals, percent=percent) == printed


@given(st.integers(0, 10**9), st.integers(1, 3))
def test_rounding_against_integer_arithmetic(thousandths, decimals):
    value = thousandths / 10_000
    scaled = Fraction(thousandths * 10**decimals, 10_000)
    assert Fraction(format_number(value, decimals)) == Fraction(math.floor(scaled + Fraction(1, 2)), 10**decimals)


def test_length_names():
    assert [format_length(n) for n in (0, 1, 128, 1000, 1024, 2048, 65536, 262144, 1 << 20)] == [
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
    assert "oom (1 value): 3 GiB asked, 1 free." in notes
    assert "n/a (1 value): no peak FLOPs known for cpu." in notes


def test_every_number_equals_an_independent_query(store):
    connection = sqlite3.connect(store.path)
    rows = json.loads(render(table6(store), "json"))
    assert [row["cell"] for row in rows] == [f"{index:012x}" for index in (4, 1, 3, 2, 0)]
    compared = 0
    for row in rows:
        for value in row["values"]:
            stored_rows = connection.execute(
                "SELECT m.value, m.reason, m.attempt_id FROM measurement m, attempt a WHERE a.id = m.attempt_id "
                "AND a.state = 'done' AND a.cell_id = ? AND m.probe = ? AND m.metric = ? AND m.length = ? "
                "ORDER BY a.id DESC LIMIT 1",
                (row["cell"], value["probe"], value["metric"], value["length"]),
            ).fetchone()
            assert (value["value"], value["reason"], value["attempt_id"]) == (stored_rows or (None, None, None))
            compared += stored_rows is not None
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


def test_seeds_and_further_axes_keep_rows_apart(empty, make):
    cell, _ = make
    store = empty
    cells = [
        cell(index, seed=index % 2, axes={"attn_type": "polar", "train.lr": rate, "fixed": "1"})
        for index, rate in enumerate(("0.1", "0.1", "0.2", "0.2"))
    ]
    store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
    table = table6(store, seeds=True)
    assert table.columns[:8] == ("Type", "Reg", "Dist", "Mem", "Win", "Seed", "train.lr", "Val")
    assert [row[5:7] for row in table.rows] == [("0", "0.1"), ("1", "0.1"), ("0", "0.2"), ("1", "0.2")]
    assert len(set(table.rows)) == 4
    assert table.columns[8:10] == ("Clean@shortest", "Clean@longest")
    requested_table = table6(store, lengths={"clean": [4096, 256], "junk": [512]}, seeds=True)
    assert requested_table.columns[8:12] == ("Clean@256", "Clean@4K", "Junk@512", "Ndl@shortest")
    json.loads(render(table, "json"))


def test_orphans_and_old_revisions(store, make):
    cell, _ = make
    store.record_revision("quick", grid_text="y", grid_file="x.yaml", cells=[cell(1, attn_type="nope")])
    assert [row[0] for row in table6(store).rows] == ["nope"]
    assert [raw["cell"][-1] for raw in table6(store, orphans=True).raw] == ["4", "3", "2", "0"]
    assert len(table6(store, revision=1).rows) == 5


def test_what_does_not_exist(store):
    with pytest.raises(ReportError, match=r"choose one of: .*1, 2, .*compare"):
        make_table(7, store)
    with pytest.raises(ReportError, match="terminal, md, csv, tex, html, json"):
        render(make_table("6", store), "pdf")
    with pytest.raises(SweepUnknown):
        make_table("6", store, "none")


class TestFormats:
    def test_csv_has_header_and_printed_rows(self, store):
        table = table6(store)
        lines = list(csv.reader(io.StringIO(render(table, "csv"))))
        assert [tuple(line) for line in lines] == [table.columns, *table.rows]
        assert render(table, "csv", trace=False) == render(table, "csv")

    def test_markdown_has_equal_columns(self, store):
        lines = [line for line in render(table6(store), "md").splitlines() if line.startswith("|")]
        assert len(lines) == 2 + 5
        assert {line.count("|") for line in lines} == {14}
        assert len({len(line) for line in lines}) == 1

    def test_terminal_never_wraps(self, store):
        lines = render(table6(store), "terminal").splitlines()
        assert any(line.split()[:5] == ["nope", "baseline", "off", "on", "off"] for line in lines)
        assert max(map(len, lines)) < 240

    def test_tex_rows_have_a_cell_per_column(self, store):
        text = render(table6(store), "tex")
        body = text[text.index(r"\endlastfoot") : text.index(r"\end{longtable}")].splitlines()[1:]
        body = [line for line in body if not line.startswith("%")]
        assert [line.count(" & ") for line in body] == [12] * 5
        assert all(line.endswith(r" \\") for line in body)
        spec = re.search(r"\\begin\{longtable\}\{@\{\}(.*)@\{\}\}", text)
        assert spec is not None
        assert re.fullmatch(
            r"lllllS\[table-format=1.3\](S\[table-format=\d.2\]){3}r(S\[table-format=2.1\]){2}r", spec[1]
        )
        assert text.count(r"\toprule") == 2
        assert text.splitlines()[-1].startswith("% atma-sweep-trace: {")
        statuses = [word for line in body for word in re.findall(r"needs-eval|running|diverged|oom|n/a|new", line)]
        assert len(statuses) == len(
            [w for line in body for w in re.findall(r"\{(?:needs-eval|running|diverged|oom|n/a|new)\}", line)]
        )


HOSTILE = "a|b_{x}$\\input{/etc/passwd}%#&~^<script>alert(1)</script>[bold red]`*\x1b[31m\nnext"


class TestHostileText:
    @pytest.fixture
    def hostile(self, empty, make, run):
        cell, _ = make
        store = empty
        cells = [cell(0, attn_type=HOSTILE, axes={HOSTILE: "1"}), cell(1, axes={HOSTILE: "[/]"})]
        store.record_revision(HOSTILE, grid_text="x", grid_file="x", cells=cells)
        run(store, cells[0].id, "done", [Measurement(probe="val", metric="val_loss", reason=HOSTILE)])
        return store

    def test_tex(self, hostile):
        text = render(table6(hostile), "tex")
        rest = re.sub(r"\\(text\w+\{\}|[&%$#_{}])", "", tex_escaped(HOSTILE))
        assert not re.search(r"[\\&%$#_{}~^<>|\x1b\n]", rest)
        assert tex_escaped(HOSTILE) in text.replace(r"\hspace{0pt}", "")  # where a long word may break
        *rows, trace = text.splitlines()
        assert trace.startswith("% ")
        assert not any(r"\input" in line for line in rows)
        assert "\x1b" not in text

    def test_markdown(self, hostile):
        text = render(table6(hostile), "md")
        assert "<script" not in text
        assert markdown_escaped(HOSTILE) in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {15}
        (comment,) = [line for line in text.splitlines() if "atma-sweep-trace" in line]
        assert comment.count("-->") == 1
        assert "<" not in comment[4:]

    def test_terminal_and_csv(self, hostile):
        text = render(table6(hostile), "terminal")
        assert "\x1b" not in text
        assert sanitize_line(HOSTILE) in text
        assert "[/]" in text
        assert list(csv.reader(io.StringIO(render(table6(hostile), "csv"))))[1][0] == csv_field(HOSTILE)
        assert json.loads(render(table6(hostile), "json"))[0]["attn_type"] == HOSTILE

    def test_html(self, hostile):
        text = render(table6(hostile), "html")
        assert "<script" not in text
        assert "\x1b" not in text
        page = Page()
        page.feed(text)
        # MFU is the last heading, below common ones
        assert page.cells[page.cells.index("MFU") + 1] == sanitize_line(HOSTILE)
        assert set(page.tags) <= set("html head meta title style body p table caption thead tbody tr th td b".split())
        trace = json.loads(page.attributes["data-atma-sweep-trace"])
        assert trace["sweep"] == HOSTILE
        numbers = [attributes for tag, attributes in page.start_tags if tag == "td" and "data-probe" in attributes]
        assert numbers[0]["data-reason"] == sanitize_line(HOSTILE)
        assert (numbers[0]["data-attempts"], numbers[0]["data-cells"]) == ("1", "0" * 12)


class Page(HTMLParser):
    """Every tag of a page with its attributes, and the text of every cell of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.start_tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.start_tags]

    @property
    def attributes(self) -> dict[str, str]:
        return next(
            {key: value or "" for key, value in attributes.items()}
            for tag, attributes in self.start_tags
            if tag == "table"
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.start_tags.append((tag, dict(attrs)))
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data.strip()


def add_seeds(store, run, values: dict[int, float | None]) -> None:
    """Add cells 10, 11, ... that differ only in their seed; a value of None is a failed one."""
    records = [cell_of(10 + index, seed=index) for index in range(len(values))]
    store.record_revision("seeds", grid_text="x", grid_file="x", cells=records)
    for index, value in values.items():
        measurements = [Measurement(probe="val", metric="val_loss", value=value)] if value is not None else []
        run(store, records[index].id, "failed" if value is None else "done", measurements)


class TestSeeds:
    def test_mean_deviation_and_count(self, store, run):
        add_seeds(store, run, {0: 1.0, 1: 2.0, 2: 4.0})
        table = table6(store, "seeds")
        assert table.columns[5] == "Seeds"
        # mean 7/3; sample variance ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2 = 7/3
        assert table.rows == (("polar", "baseline", "off", "on", "off", "3", "2.333 ± 1.528", *["needs-eval"] * 7),)
        value = table.raw[0]["values"][0]
        assert (value["seeds"], value["attempts"]) == (3, [5, 6, 7])
        assert value["sd"] == pytest.approx(math.sqrt(7 / 3))
        assert r"2.333 +- 1.528" in render(table, "tex")
        listed = table6(store, "seeds", seeds=True)
        assert [row[5:7] for row in listed.rows] == [("0", "1.000"), ("1", "2.000"), ("2", "4.000")]

    def test_missing_seed_is_noted(self, store, run):
        add_seeds(store, run, {0: 1.0, 1: None, 2: 2.0})
        row = table6(store, "seeds").rows[0]
        assert row[6] == "1.500 ± 0.707 (n=2)"
        assert row[7] == "needs-eval/failed"

    def test_single_remaining_seed_has_no_deviation(self, store, run):
        add_seeds(store, run, {0: 1.0, 1: None})
        assert table6(store, "seeds").rows[0][6] == "1.000 (n=1)"


class TestBest:
    def test_best_values_with_ties_and_directions(self, empty, make, run):
        cell, _ = make
        store = empty
        cells = [cell(index, attn_type=name) for index, name in enumerate("abcd")]
        store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
        for record, (loss, mfu) in zip(cells, [(1.0004, 0.5), (1.0001, 0.4), (1.2, 0.5)], strict=False):
            measurements = [Measurement(probe="val", metric="val_loss", value=loss)]
            measurements.append(Measurement(probe="throughput", metric="mfu_paper", value=mfu))
            measurements.append(Measurement(probe="clean", metric="nats", length=8, value=3.0))
            run(store, record.id, "done", measurements)
        table = table6(store)
        named = {(r, table.columns[c]) for r, c in table.best}
        # 1.0004 and 1.0001 both print as 1.000; a column without a difference has no best
        assert named == {(0, "Val"), (1, "Val"), (0, "MFU"), (2, "MFU")}
        assert "**1.000**" in render(table, "md")
        assert r"\bfseries 1.000" in render(table, "tex")
        assert "<b>50.0</b>" in render(table, "html")
        assert "*" not in render(table, "csv", trace=False)
        assert "\x1b[1m" in render(table, "terminal", color=True)
        assert "\x1b" not in render(table, "terminal")

    def test_out_of_memory_has_its_own_code(self, store):
        attempt = store.start_attempt(f"{0:012x}", owner=ME, fence=1)
        store.finish_attempt(attempt.id, 1, "failed", cause="no memory", failure="cuda_oom")
        assert table6(store).rows[4][5:] == ("oom",) * 8
