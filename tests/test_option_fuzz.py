"""Numeric and enumerated options of every command: each has bounds, and what lies outside is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import typer
from atma_sweep import cli
from atma_sweep.sweep.executors.registry import EXECUTORS

Command = Callable[..., tuple[int, str, str]]
ODD = (
    "",
    "x",
    "--",
    "1e",
    "9" * 29,
    "-" + "9" * 29,
    "9" * 4000,
    "9" * 5000,
    "1e400",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "१e9",
)
"""Values that no option takes: no numbers, not finite, or beyond all bounds."""


def commands(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that name it."""
    children = getattr(node, "commands", None)
    if children is None:
        yield path, node
        return
    for name, child in children.items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


def options() -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, command in COMMANDS.items():
        for option in command.params:
            if hasattr(option, "type_descriptor"):
                yield path, option


def kind(option: Any) -> type | None:
    """The type of the numbers that an option takes, None for another option."""
    annotation = option.type_descriptor.annotation
    types = {annotation, *get_args(annotation)} & {int, float}
    return types.pop() if types else None


def arguments(path: tuple[str, ...]) -> list[str]:
    """A command with a word for each argument that it needs."""
    needed = [option for option in COMMANDS[path].params if option.param_type_name == "argument" and option.required]
    return [*path, *("x" for _ in needed)]


NUMERIC = [(path, option) for path, option in options() if kind(option) is not None]
LISTED = [(path, option) for path, option in options() if option.type_descriptor.choices]


def test_every_numeric_option_has_both_bounds() -> None:
    loose = [
        f"{' '.join(path)} {option.opts[0]}"
        for path, option in NUMERIC
        if option.type_descriptor.parameter_info.min is None or option.type_descriptor.parameter_info.max is None
    ]
    assert loose == []
    assert len(NUMERIC) > 20


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "option"), NUMERIC, ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.opts[0]
)
def test_numbers_outside_the_bounds_are_refused(command_line: Command, path: Any, option: Any) -> None:
    info = option.type_descriptor.parameter_info
    step = 1 if kind(option) is int else 1e-3 * max(1.0, abs(info.max))
    for value in (*ODD, str(info.min - 1), str(info.max + step)):
        code, out, err = command_line(*arguments(path), f"{option.opts[0]}={value}")
        assert (code, out) == (2, ""), value[:40]
        assert err.count("\n") == 1
        assert err.startswith("atma-sweep: "), value[:40]
        assert option.opts[0] in err or "is not a valid" in err, err[:200]


def test_enumerated_options_are_checked_alike(command_line: Command) -> None:
    """An option whose help lists words (a|b) takes these alone, and says which one was perhaps meant."""
    listed = {(*path, option.opts[0]): option.type_descriptor.choices for path, option in LISTED}
    open_options = {"--executor"}
    for path, option in options():
        metavar = option.metavar or ""
        if "|" in metavar and metavar == metavar.lower() and not metavar.startswith("["):
            assert (*path, option.opts[0]) in listed or option.opts[0] in open_options, (path, option.opts)
    for path, option in LISTED:
        choices = [str(getattr(choice, "value", choice)) for choice in option.type_descriptor.choices]
        code, out, err = command_line(*arguments(path), option.opts[0], f"{choices[0]}x")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert f"'{choices[0]}x' is not one of {', '.join(map(repr, choices))}; did you mean {choices[0]}?" in err
    code, _, err = command_line("launch", "quick", "--executor", "locl")
    assert (code, err.count("\n")) == (2, 1)
    assert f"allowed: {', '.join(EXECUTORS)}; did you mean 'local'?" in err


@pytest.mark.parametrize("option", ["--revision", "--pairing"])
def test_options_of_hub_models_are_refused_for_cells(command_line: Command, option: str) -> None:
    value = "text" if option == "--pairing" else "main"
    assert command_line("evaluate", "nope-baseline", option, value) == (
        2,
        "",
        f"atma-sweep: {option} '{value}': applies to models of the hub (hf:MODEL) only; leave it out to evaluate cells\n",
    )


def test_settings_that_are_not_utf8_are_refused(command_line: Command) -> None:
    """Bytes of a command line that are no UTF-8 come as halves of surrogate pairs."""
    for path in ("data.path", "data.corpus", "resources.gpu_type", "checkpoint.path"):
        assert command_line("launch", "quick", "--dry-run", "--name", "x", "--set", f"{path}=a\udcff") == (
            2,
            "",
            "atma-sweep: command line: 'a\\udcff': is not valid UTF-8 and cannot be recorded\n",
        )
