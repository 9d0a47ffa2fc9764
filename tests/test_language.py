"""Names and documents follow docs/language.toml; what departs from it may only become less."""

from __future__ import annotations

import pytest
from language import counts, findings_of_code, findings_of_document, limits, parts_of


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
