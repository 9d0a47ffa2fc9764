"""Options that several commands share, how they print JSON, and the one line that answers a mistake. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from . import completion
from .streams import write_out
from .text import did_you_mean, echo_text, nearest, sentence

MAX_CELLS = 10**7
"""Cells of a grid; a database of 10,000 is measured."""
MAX_NUMBER = 2**31 - 1
"""Attempts, lines and context lengths that are looked for."""
Db = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="URL|FILE", help="Database; without it the one that ATMA_DB names, else atma.db in this folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; its keys are named as the columns of the database.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="HOST:PORT", help="Head of the Ray cluster to use; without it this machine alone."
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="FOLDER",
        help="Folder of checkpoints, weights, logs and corpora; without it <db name>-runs beside the database.",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option(
        "--cells", metavar="N", min=1, max=MAX_CELLS, help="Allow a grid of up to N cells; without it 20,000."
    ),
]
SweepName = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="NAME",
        help="Name of the sweep; without it the one launched last.",
        autocompletion=completion.sweeps,
    ),
]
BY_NAME = "by id or slug, with or without its seed, or by the beginning of either"
"""The names of a cell that `find_cell` understands, for help texts."""


class Documented:
    """A command whose options are described in the section `Args:` that ends its docstring, and nowhere else.

    An entry `name (METAVAR): text` is about the option --name; or about an argument, if the parameter has no default or is
    annotated with typer.Argument(). Bounds and completion stand in the annotation: Annotated[int, typer.Option(min=1)].
    {NAME} stands for the text of that constant of the command's module.
    The section is no part of the command's help, and is read when the command is first asked for its parameters.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self.__doc__, _, self._entries = (function.__doc__ or "").partition("\n    Args:\n")
        self._function = function

    def __call__(self, *values: Any, **named: Any) -> None:
        self._function(*values, **named)

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        """The signature of the function with what the docstring says of its parameters."""

        def constant(match: re.Match[str]) -> str:
            return str({**globals(), **self._function.__globals__}[match[1]])

        entries = {
            name: (metavar or None, re.sub(r"\{([A-Z_]+)\}", constant, " ".join(text.split())))
            for name, metavar, text in re.findall(r"^ {8}(\w+)(?: \((.+?)\))?: (.*(?:\n {12}.*)*)", self._entries, re.M)
        }
        signature = inspect.signature(self._function, eval_str=True)
        described = (
            _described(parameter, *entries[parameter.name]) if parameter.name in entries else parameter
            for parameter in signature.parameters.values()
        )
        return signature.replace(parameters=[*described])


def _described(parameter: inspect.Parameter, metavar: str | None, text: str) -> inspect.Parameter:
    """Return a parameter as typer reads it, with its name on the command line, metavar and help."""
    kind, *rest = (
        get_args(parameter.annotation) if hasattr(parameter.annotation, "__metadata__") else (parameter.annotation,)
    )
    required = parameter.default is parameter.empty
    info: Any = copy.copy(rest[0]) if rest else (typer.Argument if required else typer.Option)()
    info.metavar, info.help = metavar, text
    if isinstance(info, typer.models.OptionInfo):
        info.param_decls = ("--" + parameter.name.rstrip("_").replace("_", "-"),)
    return parameter.replace(annotation=Annotated[kind, info])


def as_text(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def print_json(value: Any, *, err: bool = False) -> None:
    write_out(as_text(value), err=err)


def print_result(value: Any, lines: Sequence[str], *, as_json: bool) -> None:
    """Print what a command has found or done: as JSON, or in lines for people."""
    if as_json:
        print_json(value)
    else:
        echo_text("\n".join(lines))


NAME = "atma-sweep"
COMPLETE = "_ATMA_SWEEP_COMPLETE"
"""Variable in which a shell says that it asks for completions, as typer derives it from the name."""
# newer releases of typer carry a click of their own, so that the classes of the package click are not always those raised
_MISTAKE: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
_GIVEN_UP: type[BaseException] = typer.Abort


class _AsGiven:
    """What typer makes of an option's value, without pydantic where there is nothing to make: none, the default, or text."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """As the object in typer whose place it takes."""
        if getattr(ctx, "resilient_parsing", False):
            return value  # a completion reads words as they stand
        several = param.multiple or param.nargs == -1
        text = param.type_descriptor.annotation is str and isinstance(value, str)
        if not several and (value is None or text or (value == param.default and isinstance(value, int | float))):
            return value
        param._runtime_param = None  # typer then makes its own
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _spared(command: Any, ctx: Any) -> None:
    """Has the options of a command converted so; releases of typer that have no such thing convert by themselves."""
    for param in command.get_params(ctx):
        if getattr(param, "_runtime_param", command) is None and hasattr(param, "type_descriptor"):
            param._runtime_param = _AsGiven()


class OneLine(TyperGroup):
    """The outermost group of commands: prints one line on standard error for a mistake in the words of a command."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As typer's, without its import of pydantic for options that are not given: that takes `status` a tenth of its time."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _spared(command, ctx)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's, for the options before the command."""
        _spared(self, ctx)
        return super().parse_args(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """As typer's. Ends with exit code 2 for a mistake."""
        if os.environ.get(COMPLETE):
            # a message would be printed into the line that is being typed
            with contextlib.suppress(Exception):
                super().main(args, prog_name or NAME, complete_var, windows_expand_args=windows_expand_args, **extra)
            sys.exit(0)
        try:
            code = super().main(
                args,
                prog_name or NAME,
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except _MISTAKE as error:
            if not standalone_mode:
                raise
            said = told(error)
            if said:
                echo_text(f"{NAME}: {said}", err=True)
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        except _GIVEN_UP:
            if not standalone_mode:
                raise
            echo_text(f"{NAME}: stopped", err=True)
            sys.exit(130)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def completion_line() -> list[str]:
    """Return the words of the line that a shell asks completions for, without the program; none for an ordinary call."""
    if not os.environ.get(COMPLETE):
        return []
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def told(error: Any) -> str:
    """The mistake, what was perhaps meant, and where to read more; "" where help is what was asked for and given."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    ctx = getattr(error, "ctx", None)
    said = sentence(getattr(error, "message", "") if hasattr(error, "possibilities") else error.format_message())
    said = said.replace("Value error, ", "").partition(". Did you mean ")[0].rstrip(".") + (
        _meant(error, ctx) if ctx is not None else ""
    )
    return said if ctx is None else f"{said} ({_path(ctx)} --help)"


def _path(ctx: Any) -> str:
    words = [] if ctx.parent is None else [*_path(ctx.parent).split(), ctx.info_name]
    return " ".join(words or [NAME])


def _meant(error: Any, ctx: Any) -> str:
    """What is near to the word that is not known: an option, a command, or a choice."""
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        elsewhere = [name for name, command in _commands(ctx).items() if option in _options(command)]
        if elsewhere:
            return f"; write it after the command, as in {_path(ctx)} {elsewhere[0]} {option}"
        near = nearest(option.strip("-"), [name.strip("-") for name in _options(ctx.command) if name.startswith("--")])
        return f"; did you mean --{near}?" if near and option.startswith("--") else ""
    param = getattr(error, "param", None)
    kind = getattr(param, "type_descriptor", None) or getattr(param, "type", None)
    choices = getattr(kind, "choices", None)
    if choices:
        value = error.message.partition("'")[2].partition("'")[0]
        return did_you_mean(value, [str(getattr(choice, "value", choice)) for choice in choices])
    if error.message.startswith("No such command"):
        # the context is that of the group whose command it would be
        return did_you_mean(error.message.partition("'")[2].partition("'")[0], _commands(ctx))
    return ""


def _commands(ctx: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(ctx.command, "commands", {})
    return found


def _options(command: Any) -> list[str]:
    return [name for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]
