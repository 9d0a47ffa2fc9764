"""A grid file's size is bounded before it is read, while it is composed, and when its aliases are put in their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.sweep import yamlfile
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid import parse_value

Write = Callable[..., Path]
TOO_MANY = "more than 100,000 values, aliases put in their places; write a grid with fewer"


def bomb(levels: int, copies: int = 9) -> str:
    """A list of lists of lists, each of `copies` aliases of the one before."""
    lines = [f"a0: &a0 [{', '.join(['x'] * copies)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * copies)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def refused(path: Path) -> str:
    with pytest.raises(GridError) as caught:
        yamlfile.load(path)
    return str(caught.value)


@pytest.mark.parametrize("levels", [6, 60])
def test_aliases_of_aliases_stop_at_the_number_that_is_allowed(write: Write, levels: int) -> None:
    """Sixty levels would be more values than there are atoms in the world."""
    path = write(bomb(levels))
    assert refused(path) == f"{path}: {TOO_MANY}"


def test_aliases_within_bounds_are_copies(write: Write) -> None:
    document = yamlfile.load(write("a: &a {b: [1, 2]}\nc: [*a, *a]\n"))
    assert document.data == {"a": {"b": [1, 2]}, "c": [{"b": [1, 2]}] * 2}
    assert document.data["c"][0] is not document.data["c"][1]
    assert document.line("c", 1, "b", 0) == 1, "where it is written"


def test_values_as_written_are_counted_before_all_are_composed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []
    compose = yamlfile.Composer.compose_node
    monkeypatch.setattr(
        yamlfile.Composer, "compose_node", lambda self, *rest: (composed.append(1), compose(self, *rest))[1]
    )
    monkeypatch.setattr(yamlfile, "MOST_VALUES", 50)
    assert yamlfile.load(write(f"a: [{', '.join(['0'] * 46)}]\n")).data == {"a": [0] * 46}
    composed.clear()
    assert "more than 50 values" in refused(write(f"a: [{', '.join(['0'] * 5000)}]\n"))
    assert len(composed) == 50


def test_a_file_larger_than_a_mebibyte_is_not_read_to_its_end(write: Write) -> None:
    path = write("name: g\n# " + "x" * 2**20)
    assert refused(path) == f"{path}: is larger than 1,048,576 bytes; a grid file that large is a mistake"


@pytest.mark.parametrize(("value", "said"), [
    ("9" * 5000, "Exceeds the limit (4300 digits) for integer string conversion"), ("2020-13-45", "month must be in 1..12"),
])  # fmt: skip
def test_values_that_python_refuses_are_errors_of_the_file(write: Write, value: str, said: str) -> None:
    path = write(f"a: {value}\n")
    assert refused(path).startswith(f"{path}: not valid YAML: {said}")
    assert parse_value(value) == value


def test_a_bomb_on_the_command_line() -> None:
    nested = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(7)) + "]"
    with pytest.raises(GridError, match=TOO_MANY):
        parse_value(nested)
