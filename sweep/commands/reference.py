"""Generated reference of the commands (docs/reference/cli.md) and the JSON Schema of grid files."""

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
"""Options, by parameter name, that mean the same in every command and are documented once."""


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
    write_output(text, out)


def write_output(text: str, out: Path | None) -> None:
    """Write text unchanged to a file, replaced atomically, or to standard output without one; no newline is added.

    Prints nothing else. Raises StoreError if the parent folder does not exist, and WriteRefused if the file cannot be
    written.
    """
    from ...results.console.output_files import write_file

    if out is None:
        write_out(text)
    else:
        write_file(out, text)


def reference_page(group: Any) -> str:
    """Return the Markdown reference of all visible commands, from the template reference.md.jinja.

    Args:
        group: Click group, as typer.main.get_command returns it.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True
    )
    commands = dict(_commands(group, ()))
    common = {
        parameter.name: parameter
        for command in commands.values()
        for parameter in command.params
        if _is_common(parameter)
    }
    return environment.get_template("reference.md.jinja").render(
        commands=commands, common=[common[name] for name in COMMON if name in common], help=_help, parameters=_parameters,
        usage=_usage_argument, row=_table_row, examples=examples,
    )  # fmt: skip


def examples(command: Any) -> list[str]:
    """Return the lines, stripped, below "Example:" in a command's help; empty without examples."""
    return [line.strip() for line in _help(command).partition("\b\nExample:\n")[2].splitlines()]


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name with its groups, such as "db check", command) of all visible commands, depth first.

    Args:
        group: Click group.
        path: Names of the groups above.
    """
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help)


def _parameters(command: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return (arguments, own options, common options) of a command, each in its order. Hidden ones are left out.

    Common options are those of COMMON with the same help text.
    """
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    common = [parameter for parameter in shown if _is_common(parameter)]
    return arguments, [parameter for parameter in shown if parameter not in (*arguments, *common)], common


def _is_common(parameter: Any) -> bool:
    shared = COMMON.get(parameter.name)
    return shared is not None and shared.__metadata__[0].help == parameter.help  # type: ignore[attr-defined]


def _usage_argument(argument: Any) -> str:
    """Return an argument as the usage line shows it, in brackets if optional."""
    word = (argument.metavar or argument.name.upper()) + ("..." if argument.nargs != 1 else "")
    return word if argument.required else f"[{word}]"


def _table_row(parameter: Any) -> str:
    """Return a parameter as a row of a Markdown table: its names as code, and its help with the default."""
    if parameter.param_type_name == "argument":
        names = [_usage_argument(parameter)]
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        if not parameter.is_flag:
            names = [f"{name} {parameter.metavar or parameter.name.upper()}" for name in names]
    help_text = parameter.help
    default = _default(parameter)
    if default is not None:
        help_text += f" Default: {default}."
    shown = ", ".join(f"`{name}`" for name in names)
    return " | ".join(("", *(cell.replace("|", "\\|") for cell in (shown, help_text.replace("<", "&lt;"))), "")).strip()


def _default(parameter: Any) -> str | None:
    """Return a parameter's default as Markdown code; None where it is required, None, or a flag without an opposite.

    For a flag with an opposite it is the name of the option that applies.
    """
    if parameter.required or parameter.default is None:
        return None
    if not getattr(parameter, "is_flag", False):
        return f"`{parameter.default}`"
    return (
        f"`{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`"
        if parameter.secondary_opts
        else None
    )
