"""Names and documents follow tests/testing/language.toml; what departs from it may only become less."""

from __future__ import annotations

import pytest
from language import counts, findings_of_code, findings_of_document, limits, parts_of, prose_counts, sentences


@pytest.mark.thorough
def test_counts_do_not_rise() -> None:
    risen = {rule: (count, limits()[rule]) for rule, count in counts().items() if count > limits()[rule]}
    assert risen == {}, "python -m tests.testing.language FILE ... lists the findings of files"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("kept_cells", ["kept", "cells"]),
        ("KVCache", ["kv", "cache"]),
        ("x_BTD", ["x", "btd"]),
        ("OneHot", ["one", "hot"]),
    ],
)
def test_identifiers_split_at_capitals_and_underscores(name: str, parts: list[str]) -> None:
    assert parts_of(name) == parts


def test_findings_name_rule_file_and_line() -> None:
    code = 'def f(kept):\n    """Whether it is."""\n    one_hot = found = kept\n'
    assert sorted(findings_of_code("a.py", code)) == [
        ("product docstrings", "a.py", 1, "Whether it is."),
        ("product identifiers", "a.py", 1, "kept"),
        ("product identifiers", "a.py", 3, "found"),
    ]
    body = "\n    return a" * 5
    assert [rule for rule, *_ in findings_of_code("a.py", f"def f(a):{body}")] == ["undocumented functions"]
    assert [rule for rule, *_ in findings_of_code("a.py", f"def f(a):{body[:-13]}")] == []
    assert [rule for rule, *_ in findings_of_code("tests/a.py", f"def test_{'a' * 56}(): ...")] == ["long test names"]
    assert [rule for rule, *_ in findings_of_code("tests/a.py", f"def test_{'a' * 55}(): ...")] == []
    assert list(findings_of_code("tests/a.py", "def known(): ...")) == [("tests identifiers", "tests/a.py", 1, "known")]
    lines = f"{'x' * 101}\n| {'x' * 100}\nhttp://{'x' * 100}\n{'x' * 100}\n"
    assert list(findings_of_document("a.md", lines)) == [("document lines", "a.md", 1, "x" * 80)]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{'a ' * 40}a.\n", ["document sentences"]),
        (f"{'a ' * 39}a.\n", []),
        ("a " * 20 + "end. " + "a " * 30 + "end.", ["document lines"]),
        ("\n".join(["a " * 21, "a " * 20]), ["document sentences"]),
        (f"- {'a ' * 40}a.\n- b.\n", ["document sentences"]),
        (f"```text\n{'a ' * 41}\n```\n", []),
        (f"| {'word ' * 41}|\n", []),
    ],
    ids=["41 words", "40 words", "two sentences", "over two lines", "an item of a list", "code", "a table"],
)
def test_long_lines_and_sentences_of_a_document(text: str, rules: list[str]) -> None:
    assert [rule for rule, *_ in findings_of_document("docs/how-to/generate-text.md", text)] == rules


def test_generated_documents_have_no_findings() -> None:
    assert list(findings_of_document("docs/reference/cli.md", "a " * 60)) == []


def test_sentences_of_prose_leave_out_code_and_tables() -> None:
    text = "# Title\n\nOne two. Three\nfour.\n\n| a b |\n\n```console\n$ five six\n```\n\n<!-- run -->\n- seven\n"
    assert list(sentences(text)) == [(2, "One two."), (2, "Three four."), (13, "seven")]


def test_prose_counts_stop_at_their_goals() -> None:
    assert prose_counts({"docs/explanation/architecture.md": "One two three."}) == {
        "prose words": 30_000,
        "prose words per 100 sentences": 2500,
    }
    names = (
        "docs/explanation/architecture.md",
        "docs/explanation/security.md",
        "docs/experiments/speed.md",
        "README.md",
    )
    pages = dict.fromkeys(names, "word " * 20_000)
    assert prose_counts(pages) == {"prose words": 40_000, "prose words per 100 sentences": 2_000_000}
