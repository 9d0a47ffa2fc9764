"""Reading of YAML: limits on size, values and nesting, merge keys, tags, characters and lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid import yaml_document
from atma_sweep.sweep.grid.grid import load_grid, parse_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Write = Callable[..., Path]
LIMIT_ERROR = "more than 100,000 values after expanding aliases; write a smaller grid"


def bomb(levels: int, copies: int = 9) -> str:
    """Return YAML of nested lists, each with `copies` aliases of the one before."""
    lines = [f"a0: &a0 [{', '.join(['x'] * copies)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * copies)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def error_text(path: Path) -> str:
    with pytest.raises(GridError) as caught:
        yaml_document.load(path)
    return str(caught.value)


@pytest.mark.parametrize("levels", [6, 60])
def test_yaml_alias_bomb_stops_at_the_value_limit(write: Write, levels: int) -> None:
    """Expanded in full, sixty levels would exceed any memory."""
    path = write(bomb(levels))
    assert error_text(path) == f"{path}: {LIMIT_ERROR}"


def test_yaml_aliases_within_bounds_are_copies(write: Write) -> None:
    document = yaml_document.load(write("a: &a {b: [1, 2]}\nc: [*a, *a]\n"))
    assert document.data == {"a": {"b": [1, 2]}, "c": [{"b": [1, 2]}] * 2}
    assert document.data["c"][0] is not document.data["c"][1]
    assert document.line("c", 1, "b", 0) == 1, "where it is written"


def test_yaml_values_are_counted_while_composing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []
    compose = yaml_document.Composer.compose_node
    monkeypatch.setattr(
        yaml_document.Composer, "compose_node", lambda self, *rest: (composed.append(1), compose(self, *rest))[1]
    )
    monkeypatch.setattr(yaml_document, "MOST_VALUES", 50)
    assert yaml_document.load(write(f"a: [{', '.join(['0'] * 46)}]\n")).data == {"a": [0] * 46}
    composed.clear()
    assert "more than 50 values" in error_text(write(f"a: [{', '.join(['0'] * 5000)}]\n"))
    assert len(composed) == 50


def test_yaml_file_above_size_limit_is_refused(write: Write) -> None:
    path = write("name: g\n# " + "x" * 2**20)
    assert error_text(path) == f"{path}: is larger than 1,048,576 bytes, the limit for a grid file"


@pytest.mark.parametrize("value", ["9" * 5000, "!!int x", "!!float x"])
def test_yaml_values_python_rejects_are_grid_errors(write: Write, value: str) -> None:
    path = write(f"b: 1\na: {value}\n")
    assert error_text(path).startswith(f"{path}:2: not valid YAML: ")
    assert parse_value(value) == value


def test_yaml_dates_are_text(write: Write) -> None:
    assert yaml_document.load(write("a: 2020-13-45\nb: 2020-01-02T03:04:05Z\n")).data == {
        "a": "2020-13-45", "b": "2020-01-02T03:04:05Z",
    }  # fmt: skip


def test_yaml_alias_bomb_on_the_command_line() -> None:
    nested = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(7)) + "]"
    with pytest.raises(GridError, match=LIMIT_ERROR):
        parse_value(nested)


SOURCES = st.lists(
    st.tuples(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(SOURCES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_yaml_merge_keys_follow_yaml_1_1(write: Write, drawn: list[tuple[list[str], list[int], bool]]) -> None:
    """By the rule itself: a mapping's own keys win, then the merged mapping that is listed first. Every value is its line number."""
    lines: list[str] = []
    expected: dict[str, dict[str, int]] = {}
    for index, (own, merged, first) in enumerate(drawn):
        names = [f"*m{anchor}" for anchor in merged if anchor < index]
        merge = [f"  <<: {names[0] if len(names) == 1 else '[' + ', '.join(names) + ']'}"] if names else []
        lines.append(f"m{index}: &m{index}")
        for line in [*(merge if first else []), *(f"  {key}: LINE" for key in own), *([] if first else merge)]:
            lines.append(line.replace("LINE", str(len(lines) + 1)))
        if lines[-1].startswith("m"):
            lines[-1] += " {}"
        own_lines = {key: len(lines) - len(own) + number for number, key in enumerate(own, 1)}
        if not first and merge:
            own_lines = {key: line - 1 for key, line in own_lines.items()}
        merged_lines = [item for name in reversed(names) for item in expected[name[1:]].items()]
        expected[f"m{index}"] = dict(merged_lines) | own_lines
    document = yaml_document.load(write("\n".join(lines) + "\n"))
    assert document.data == expected
    for name, mapping in document.data.items():
        assert {key: document.line(name, key) for key in mapping} == mapping


def test_yaml_merged_keys_keep_the_merge_position(write: Write) -> None:
    document = yaml_document.load(write("a: &a {x: 1, y: 2, z: 3}\nb: {p: 0, <<: *a, y: 4, q: 5}\n"))
    assert list(document.data["b"].items()) == [("p", 0), ("x", 1), ("z", 3), ("y", 4), ("q", 5)]


def test_yaml_merge_keys_give_the_same_cells(write: Write) -> None:
    plain = write("name: g\nextends: micro\nset: {train.clip: 0.5, model.d_model: 32}\naxes: {memory: [off, on]}\n")
    head = "name: g\nextends: micro\nset: {train.clip: 0.5, <<: {model.d_model: 32, train.clip: 9}}\n"
    merged = write(head + "axes: {<<: [{memory: [off, on]}]}\n", "merged.yaml")
    ids = [[cell.id for cell in load_grid(path).expand(lambda data: "x")] for path in (plain, merged)]
    assert ids[0] == ids[1]
    wrong = write("name: g\nextends: micro\nset:\n  <<:\n    train.clip: 1\n    train.clop: 1\n", "wrong.yaml")
    with pytest.raises(GridError, match=rf"^{wrong}:6: set.train.clop: no such setting"):
        load_grid(wrong)


DEEP = "more than 50 nested lists and mappings"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"a: 1\nb: {'[' * 3000}{']' * 3000}\n", 2),
        (f"a: 1\nb: {'[' * 500_000}", 2),
        (f"a: 1\nb: {'{a: ' * 3000}1{'}' * 3000}\n", 2),
        ("a: {m0: &m0 {b: 1}, " + ", ".join(f"m{n}: &m{n} {{<<: *m{n - 1}}}" for n in range(1, 999)) + "}\n<<: *m998\n", 1),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 100)), 1),
    ],
)  # fmt: skip
def test_yaml_nesting_limit(write: Write, text: str, line: int) -> None:
    path = write(text)
    assert error_text(path) == f"{path}:{line}: {DEEP}"


def test_yaml_plain_tags_are_accepted(write: Write) -> None:
    text = "a: !!str 5\nb: !!int '5'\nc: !!float 1\nd: !!seq [1]\ne: !!map {f: 1}\nh: !!bool 'true'\ni: !!null ''\n"
    data = yaml_document.load(write(text)).data
    assert data == {"a": "5", "b": 5, "c": 1.0, "d": [1], "e": {"f": 1}, "h": True, "i": None}


def test_yaml_anchored_boolean_is_a_boolean(write: Write) -> None:
    assert yaml_document.load(write("a: &a true\nb: *a\n")).data["b"] is True


@pytest.mark.parametrize(
    "text", ["[" * 3000 + "]" * 3000, "!foo [1]", "&a [*a]", "{<<: 1}", "!!python/tuple [1]", "[1"]
)
def test_invalid_yaml_on_the_command_line_is_text(text: str) -> None:
    assert parse_value(text) == text


def test_yaml_merge_on_the_command_line() -> None:
    assert parse_value("{<<: {a: 1, b: 2}, a: 3}") == {"b": 2, "a": 3}


@pytest.mark.parametrize(("text", "key", "half"), [
    (r'description: "\ud800"', "description: ", r"\ud800"),
    (r'description: "a \uD83D\uDE00 b"', "description: ", r"\ud83d"),
    (r'"x\udfff": 1', "", r"\udfff"),
])  # fmt: skip
def test_yaml_half_surrogate_pair_is_refused(write: Write, text: str, key: str, half: str) -> None:
    path = write(f"name: g\n{text}\n")
    assert error_text(path) == (
        f"{path}:2: {key}{half} is half of a surrogate pair, which is not a character; remove it"
    )


def test_yaml_keeps_characters_beyond_basic_plane(write: Write) -> None:
    assert yaml_document.load(write('name: g\ndescription: "\\U0001F600 😀"\n')).data["description"] == "😀 😀"


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "9" * 4000, "0x" + "f" * 4000])
def test_yaml_integers_beyond_64_bits_are_refused(write: Write, number: str) -> None:
    path = write(f"name: g\nset:\n  train.tokens: {number}\n")
    message = error_text(path)
    assert message.startswith(f"{path}:3: set.train.tokens: the whole number '{number[:60]}")
    assert message.endswith("is out of range (limit 9223372036854775807); quote it if it is text")
    assert yaml_document.load(write("seed: 9223372036854775807\n")).data == {"seed": 2**63 - 1}
    assert yaml_document.load(write(f'commit: "{number}"\n')).data == {"commit": number}
