"""Whatever a name, a level or a log holds: no exit lets it steer a terminal, break a format, or tell a password."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from atma_sweep.results.console import text
from hypothesis import example, given
from hypothesis import strategies as st

STEERING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
NASTY = "\x1b[31m\x1b]0;owned\x07\x9b2J\u202e\u2066\u200f\ufeff\x00\x7f\r\n\t\x85\u2028\ud800\ufffe=1+1"
# surrogates too: bytes of a path or a log that are no UTF-8 arrive as them
ANYTHING = st.text(st.characters(exclude_categories=[]), max_size=60) | st.just(NASTY) | st.text("-=+@<&|`~^,[ ")


def steering(raw: str, allowed: str = "") -> list[str]:
    return [sign for sign in raw if sign not in allowed and unicodedata.category(sign) in STEERING]


@given(ANYTHING)
@example(NASTY)
def test_nothing_steers(raw: str) -> None:
    for exit in (
        text.sanitize_line,
        text.sanitize_sentence,
        text.html_escaped,
        text.markdown_escaped,
        text.tex_escaped,
    ):
        assert steering(exit(raw)) == [], exit
    for exit in (text.sanitize_text, text.sanitize_log, text.csv_field):
        assert steering(exit(raw), "\n\t") == [], exit
    assert steering(text.json_safe(json.dumps(raw, ensure_ascii=False)), "\n") == []
    # what was cleaned stays so
    assert text.sanitize_line(text.sanitize_line(raw)) == text.sanitize_line(raw)


@given(st.text("abc é中½ ±-.,:;()!?", max_size=40))
def test_harmless_text_is_unchanged(raw: str) -> None:
    assert text.sanitize_line(raw) == text.sanitize_text(raw) == text.sanitize_log(raw) == raw


@given(ANYTHING)
def test_xml_and_html_are_well_formed(raw: str) -> None:
    safe = text.html_escaped(raw)
    root = ElementTree.fromstring(f'<x y="{safe}">{safe}</x>')
    assert (root.text or "") == root.attrib["y"] == text.sanitize_line(raw)

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            assert tag == "p"

        def handle_comment(self, data: str) -> None:
            raise AssertionError(data)

    Tags().feed(f"<p>{safe}</p>")


@given(st.lists(ANYTHING, min_size=1, max_size=4))
def test_csv_field_stays_a_single_field_and_no_formula(row: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(map(text.csv_field, row))
    ((*read,),) = csv.reader(io.StringIO(out.getvalue()), strict=True)
    assert read == [text.csv_field(cell) for cell in row]
    for cell in read:
        if cell.lstrip(" \n")[:1] in tuple("=+-@\t"):
            assert cell in "+-" or re.fullmatch(
                r"[+-](\d+\.?\d*|\.\d+)([eE][+-]?\d+)?( ± \d+(\.\d+)?)?( \(n=\d+\))?", cell
            )


@pytest.mark.parametrize(
    ("raw", "cell"),
    [
        ("=1+1", "'=1+1"),
        (" =cmd|' /C calc'!A0", "' =cmd|' /C calc'!A0"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+cmd", "'+cmd"),
        ("-1+1", "'-1+1"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\n=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-1.5", "-1.5"),
        ("+0.012 ± 0.003 (n=2)", "+0.012 ± 0.003 (n=2)"),
        ("-1e-5", "-1e-5"),
        ("-", "-"),
        ("a=b", "a=b"),
    ],
)
def test_what_a_spreadsheet_would_calculate_gets_an_apostrophe(raw: str, cell: str) -> None:
    assert text.csv_field(raw) == cell


@given(ANYTHING)
@example("---- and ,,,,,")
def test_latex_has_no_special_sign_and_joins_nothing(raw: str) -> None:
    safe = text.tex_escaped(raw)
    rest = re.sub(r"\\text\w+\{\}|\\[&%$#_{}]|\[U\+[0-9A-F]+\]", "", safe).replace("-{}", "-").replace(",{}", ",")
    assert not set(rest) & set("\\&%$#_{}~^<>|\"'`\n\r\t")
    assert "--" not in safe
    assert ",," not in safe


@given(ANYTHING)
def test_markdown_has_no_markup(raw: str) -> None:
    safe = text.markdown_escaped(raw)
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_\[\]|~$]", safe)
    assert not set(safe) & set("<>\n")


@given(
    st.recursive(
        ANYTHING | st.integers(), lambda item: st.lists(item, max_size=3) | st.dictionaries(ANYTHING, item, max_size=3)
    )
)
def test_json_keeps_every_value(value: object) -> None:
    written = json.dumps(value, ensure_ascii=False, indent=1)
    assert json.loads(text.json_safe(written)) == json.loads(written)


WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="*@ '\""), min_size=4, max_size=20)


@pytest.mark.thorough
@given(
    user=st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    password=WORD,
    host=st.from_regex(r"[a-z.]{1,12}", fullmatch=True),
)
def test_the_password_of_an_address_is_hidden(user: str, password: str, host: str) -> None:
    address = f"postgresql+psycopg://{user}:{password}@{host}:5432/runs?sslmode=require"
    safe = text.without_passwords(f"cannot use {address} as a database")
    assert safe == f"cannot use postgresql+psycopg://{user}:***@{host}:5432/runs?sslmode=require as a database"
    for exit in (text.sanitize_line, text.sanitize_sentence, text.sanitize_text, text.sanitize_log, text.csv_field):
        assert password not in exit(address).replace(user, "").replace(host, "").replace(
            exit("5432/runs?sslmode=require"), ""
        )


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("postgresql://me:p@ss:w/rd@host/db", "postgresql://me:***@host/db"),
        ("postgresql:///db?host=h&password=geheim&sslmode=x", "postgresql:///db?host=h&password=***&sslmode=x"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        ("?sslpassword=x&token=y&sig=z#k", "?sslpassword=***&token=***&sig=***#k"),
        ("PGPASSWORD=abc run", "PGPASSWORD=*** run"),
        ("train.tokens=1e9, tokenizer=json, key=3", "train.tokens=1e9, tokenizer=json, key=3"),
        ("Clean@128: the file says 3", "Clean@128: the file says 3"),
        ("http://host:80/path", "http://host:80/path"),
    ],
)
def test_passwords(raw: str, safe: str) -> None:
    assert text.without_passwords(raw) == safe


def test_a_log_loses_colours_and_movements_but_no_word() -> None:
    log = "\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 50%\r100%\r\ndone\x1b[2K\x1b(B\x1b7\x07\n\tend"
    assert text.sanitize_log(log) == "red link 50%\n100%\ndone\ufffd\n\tend"


@pytest.mark.parametrize(
    ("word", "hint"), [("htlm", "choose one of: csv, html; did you mean html?"), ("xyz", "choose one of: csv, html")]
)
def test_a_choice_names_the_nearest(word: str, hint: str) -> None:
    assert text.choices_hint(word, ["csv", "html"]) == hint
