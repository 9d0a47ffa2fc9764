"""What editors and readers need of the commands: docs/cli.md, made from the commands themselves, and the schema of a grid file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...results.console import command_line
from ...results.console.command_line import NAME
from ...results.console.streams import write_out

OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of standard output.")
]
HEAD = f"""\
# Commands

This page is made from the commands. After a change of one: `{NAME} reference --out docs/cli.md`.

"""
COMMON = {
    "db": command_line.Db,
    "runs": command_line.Runs,
    "as_json": command_line.AsJson,
    "sweep": command_line.SweepName,
}
"""By parameter: options that mean the same in every command that has them, and are told of once."""
EXIT_CODES = f"""\
## Exit codes

| code | what it means |
|---|---|
| 0 | all done |
| 1 | cells failed, or what was checked differs |
| 2 | the input is wrong: one line says what, and what to do |
| 3 | the machine lacks something, or is busy |
| 130, 143, 129 | stopped by Ctrl-C, by SIGTERM, by a closed terminal (`nohup` outlives it) |
| 141 | nobody reads standard output any more, as in `{NAME} status \\| head -1`; nothing is printed about it |

The first Ctrl-C of a launch saves every running cell and leaves; another, two seconds later or more, kills.
A launch goes on without a reader of what it says. Standard output that was closed (`>&-`) is a pipe that nobody reads.

"""
FILES = """\
## Files that commands write

`--out` follows links, writes into pipes and devices, and takes `-` for standard output where it names one file. The folder must
be there. The ending of the file says the format unless an option does (`.csv`, `.svg`, `.zip` ...). A file appears whole or not
at all.

"""


def schema(out: OutFile = None) -> None:
    """Print the JSON Schema of a grid file, for editors.

    \b
    Example:
      atma-sweep schema --out schema.json
    """
    from ...results.console.output_files import format_of
    from ..grid.json_schema import grid_schema

    text = json.dumps(grid_schema(), indent=1) + "\n"
    if out is not None:
        format_of(out, None, {".json": "json"}, "json", option="")
    give_out(text, out)


def give_out(text: str, out: Path | None) -> None:
    """Write text to a file, or to standard output."""
    from ...results.console.output_files import write

    if out is None:
        write_out(text)
    else:
        write(out, text)


def page(group: Any) -> str:
    """The Markdown of all commands of a group, `group` as typer.main.get_command makes it."""
    commands = dict(_commands(group, ()))
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_sentence(one)} |" for name, one in commands.items()]
    sections = [_section(name, one) for name, one in commands.items()]
    return (
        HEAD
        + "\n".join(["| command | what it does |", "|---|---|", *rows])
        + "\n\n"
        + _common(commands)
        + EXIT_CODES
        + FILES
        + "\n\n".join(sections)
        + "\n"
    )


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


def _sentence(command: Any) -> str:
    return " ".join(_help(command).partition("\n\n")[0].split())


def _details(command: Any) -> str:
    return _help(command).partition("\b\nExample:\n")[0].partition("\n\n")[2].strip()


def _section(name: str, command: Any) -> str:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    own = [one for one in shown if one not in arguments and not _is_common(one)]
    common = [one for one in shown if _is_common(one)]
    usage = " ".join([NAME, name, "[OPTIONS]", *map(_place, arguments)])
    parts = [f"## {name}", _sentence(command), _details(command), f"```text\n{usage}\n```"]
    if arguments or own:
        parts.append("\n".join(["| word | what it says |", "|---|---|", *map(_row, [*arguments, *own])]))
    if common:
        parts.append(
            f"Also {', '.join(f'`{one.opts[0]}`' for one in common)}: [as everywhere](#options-of-many-commands)."
        )
    parts.append("Example:" if len(examples(command)) == 1 else "Examples:")
    parts.append("\n".join(["```console", *(f"$ {line}" for line in examples(command)), "```"]))
    return "\n\n".join(part for part in parts if part)


def _common(commands: dict[str, Any]) -> str:
    found = {one.name: one for command in commands.values() for one in command.params if _is_common(one)}
    rows = [_row(found[name]) for name in COMMON if name in found]
    text = ["## Options of many commands", "", "| word | what it says |", "|---|---|", *rows]
    text.append("| `-h`, `--help` | Show the help of a command, with its examples. |")
    return "\n".join(text) + "\n\n"


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
