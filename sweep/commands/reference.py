"""What editors and readers need of the commands: docs/cli.md, made from the commands themselves, and the schema of a grid file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...results.console import command_line
from ...results.console.streams import write_out

OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of standard output.")
]
COMMON = {
    "db": command_line.Db,
    "runs": command_line.Runs,
    "as_json": command_line.AsJson,
    "sweep": command_line.SweepName,
}
"""By parameter: options that mean the same in every command that has them, and are told of once."""


def schema(out: OutFile = None) -> None:
    """Print the JSON Schema of a grid file, for editors.

    \b
    Example:
      atma-sweep schema --out schema.json
    """
    from ...results.console.output_files import resolve_format
    from ..grid.json_schema import grid_schema

    text = json.dumps(grid_schema(), indent=1) + "\n"
    if out is not None:
        resolve_format(out, None, {".json": "json"}, "json", option="")
    give_out(text, out)


def give_out(text: str, out: Path | None) -> None:
    """Write text to a file, or to standard output."""
    from ...results.console.output_files import write

    if out is None:
        write_out(text)
    else:
        write(out, text)


def page(group: Any) -> str:
    """Return the Markdown of all commands of a group, `group` as typer.main.get_command makes it."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True
    )
    commands = dict(_commands(group, ()))
    common = {one.name: one for command in commands.values() for one in command.params if _is_common(one)}
    return environment.get_template("reference.md.jinja").render(
        commands=commands, common=[common[name] for name in COMMON if name in common], help=_help, parameters=_parameters,
        usage=_place, row=_row, examples=examples,
    )  # fmt: skip


def examples(command: Any) -> list[str]:
    """The lines under "Example:" in a command's help."""
    return [line.strip() for line in _help(command).partition("\b\nExample:\n")[2].splitlines()]


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help)


def _parameters(command: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the arguments of a command, its own options, and those that many commands have."""
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    common = [one for one in shown if _is_common(one)]
    return arguments, [one for one in shown if one not in (*arguments, *common)], common


def _is_common(parameter: Any) -> bool:
    shared = COMMON.get(parameter.name)
    return shared is not None and shared.__metadata__[0].help == parameter.help  # type: ignore[attr-defined]


def _place(argument: Any) -> str:
    """An argument in the line of usage."""
    word = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs != 1 else "")
    return word if argument.required else f"[{word}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = [_place(parameter)]
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        if not parameter.is_flag:
            names = [f"{name} {parameter.metavar or parameter.name.upper()}" for name in names]
    told = parameter.help
    default = _default(parameter)
    if default is not None:
        told += f" Default: {default}."
    shown = ", ".join(f"`{name}`" for name in names)
    return " | ".join(("", *(cell.replace("|", "\\|") for cell in (shown, told.replace("<", "&lt;"))), "")).strip()


def _default(parameter: Any) -> str | None:
    """The value that holds without the option, where it is one that the help does not tell; a flag's without its opposite is off."""
    if parameter.required or parameter.default is None:
        return None
    if not getattr(parameter, "is_flag", False):
        return f"`{parameter.default}`"
    return (
        f"`{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`"
        if parameter.secondary_opts
        else None
    )
