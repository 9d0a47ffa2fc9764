"""Options that several commands share, JSON output, and the one-line messages about usage errors.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from . import completion
from .streams import write_out
from .text import closest_match, did_you_mean, echo_text, sanitize_sentence

MAX_CELLS = 10**7
"""Maximum number of cells of a grid; 10,000 have been tested."""
MAX_NUMBER = 2**31 - 1
"""Maximum of options that give a number of attempts, lines or tokens."""
Db = Annotated[
    str | None,
    typer.Option(
        "--db", metavar="PATH|URL", help="Database, as a file or URL; default: ATMA_DB, else atma.db in this folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with the column names of the database as keys.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Head of the Ray cluster to use; default: this machine only."),
]
Runs = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="FOLDER",
        help="Folder of checkpoints, weights, logs and corpora; default: <db name>-runs next to the database.",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option("--cells", metavar="N", min=1, max=MAX_CELLS, help="Allow a grid of up to N cells; default: 20,000."),
]
SweepName = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="NAME",
        help="Name of the sweep; default: the one launched last.",
        autocompletion=completion.sweeps,
    ),
]
BY_NAME = "by id or slug (with or without the seed), or the beginning of either"
"""Help text about the names of a cell that `find_cell` accepts."""


OPTION_PANELS: Mapping[str, Sequence[str]] = {
    "Cells": ("set_", "only", "name", "retrain", "code", "most", "probe", "length", "pairing", "revision"),
    "Where it runs": ("executor", "address", "detach", "gpus", "gpu", "device"),
    "Cost": ("budget", "rate", "watts", "calibrate"),
    "Figures": ("style", "width", "title", "highlight", "by", "log", "against"),
    "Database and output": ("sweep", "runs", "db", "as_json"),
}
"""Parameters of the options by the panel of `--help` that shows them; the others are in the panel "Options"."""
_PANEL_BY_PARAMETER = {name: panel for panel, names in OPTION_PANELS.items() for name in names}
MIN_PANEL_OPTIONS = 6
"""Commands with fewer options have a single panel."""


class Documented:
    """A command whose options are described only in the section `Args:` at the end of its docstring.

    An entry `name (METAVAR): text` describes the option --name, or an argument if the parameter has no default or is
    annotated with typer.Argument(). Bounds and completion are in the annotation: Annotated[int, typer.Option(min=1)].
    {NAME} stands for the text of that constant of the command's module. The section is not part of the command's help.
    It is parsed when the command is first asked for its parameters.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        """Wrap a command function, and split its docstring into the help and the entries of `Args:`."""
        functools.update_wrapper(self, function)
        # Python 3.13 and later remove the indentation of docstrings, earlier versions keep it
        self.__doc__, _, self._entries = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
        self._function = function

    def __call__(self, *values: Any, **named: Any) -> None:
        self._function(*values, **named)

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        """The function's signature with metavars and help texts from the docstring; computed once.

        Parameters without an entry stay as they are.
        """

        def constant(match: re.Match[str]) -> str:
            return str({**globals(), **self._function.__globals__}[match[1]])

        entries = {
            name: (metavar or None, re.sub(r"\{([A-Z_]+)\}", constant, " ".join(text.split())))
            for name, metavar, text in re.findall(r"^ {4}(\w+)(?: \((.+?)\))?: (.*(?:\n {8}.*)*)", self._entries, re.M)
        }
        signature = inspect.signature(self._function, eval_str=True)
        described = (
            _described(parameter, *entries[parameter.name]) if parameter.name in entries else parameter
            for parameter in signature.parameters.values()
        )
        return signature.replace(parameters=[*described])


def _described(parameter: inspect.Parameter, metavar: str | None, text: str) -> inspect.Parameter:
    """Return a parameter annotated for typer with its option name, metavar and help.

    Without a typer annotation it becomes an argument if it has no default, else an option. The option's name is the
    parameter's with hyphens, without a trailing underscore.

    Args:
        parameter: parameter of the command's function.
        metavar: placeholder of its value; None for typer's default.
        text: help text.
    """
    kind, *rest = (
        get_args(parameter.annotation) if hasattr(parameter.annotation, "__metadata__") else (parameter.annotation,)
    )
    required = parameter.default is parameter.empty
    info: Any = copy.copy(rest[0]) if rest else (typer.Argument if required else typer.Option)()
    info.metavar, info.help = metavar, text
    if isinstance(info, typer.models.OptionInfo):
        info.param_decls = ("--" + parameter.name.rstrip("_").replace("_", "-"),)
    return parameter.replace(annotation=Annotated[kind, info])


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def print_json(value: Any, *, err: bool = False) -> None:
    write_out(json_text(value), err=err)


def print_result(value: Any, lines: Sequence[str], *, as_json: bool) -> None:
    """Print the result of a command on standard output, as JSON or as lines for the user.

    Args:
        value: result as JSON values; values that JSON lacks are printed as text.
        lines: the same as text lines, which are sanitized.
        as_json: print the JSON.
    """
    if as_json:
        print_json(value)
    else:
        echo_text("\n".join(lines))


NAME = "atma-sweep"
COMPLETE = "_ATMA_SWEEP_COMPLETE"
"""Environment variable by which a shell requests completions; typer derives its name from the program's."""
# newer releases of typer contain their own click, whose classes are not those of the package click
_USAGE_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_ABORT: type[BaseException] = typer.Abort


class _UnconvertedParam:
    """Replacement for typer's conversion of an option's value, to avoid importing pydantic if possible."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value unchanged if no conversion is needed; otherwise convert it by typer.

        No conversion is needed for a completion, for None, for text of a text option, and for a number that is the
        default; an option with several values is always converted.

        Args:
            value: value from the command line or default.
            param: typer's parameter.
            ctx: context of the command.
        """
        if getattr(ctx, "resilient_parsing", False):
            return value  # a completion uses the words unchanged
        several = param.multiple or param.nargs == -1
        text = param.type_descriptor.annotation is str and isinstance(value, str)
        if not several and (value is None or text or (value == param.default and isinstance(value, int | float))):
            return value
        param._runtime_param = None  # typer then creates its own
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _skip_conversion(command: Any, ctx: Any) -> None:
    """Install _UnconvertedParam for the options of a command.

    Has no effect with releases of typer that lack the attributes.
    """
    for param in command.get_params(ctx):
        if getattr(param, "_runtime_param", command) is None and hasattr(param, "type_descriptor"):
            param._runtime_param = _UnconvertedParam()


def _hide_types(command: Any, ctx: Any) -> None:
    """Hide "<bool>" of flags, `--help` among them, and "<str>" of arguments, whose names say what is wanted."""
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""


def _arrange_help(command: Any, ctx: Any) -> None:
    """Assign the options of a command, or of every command of a group, to panels of `--help`, and hide their types."""
    for subcommand in getattr(command, "commands", {}).values():
        _arrange_help(subcommand, ctx)
    _hide_types(command, ctx)
    options = [param for param in command.params if param.param_type_name == "option"]
    for param in options:
        if len(options) >= MIN_PANEL_OPTIONS and param.rich_help_panel is None:
            param.rich_help_panel = _PANEL_BY_PARAMETER.get(param.name)


class OneLineErrorGroup(TyperGroup):
    """The outermost command group, which prints one line on standard error for a usage error."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name as typer does, but without importing pydantic; None for an unknown one.

        The import takes a tenth of the time of `status`.
        """
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _skip_conversion(command, ctx)
            _arrange_help(command, ctx)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command as typer does, without the import of pydantic."""
        _skip_conversion(self, ctx)
        _hide_types(self, ctx)
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
        """Run the command line as typer does, with one-line messages on standard error, and exit.

        Exits with the command's result if that is an int, else 0; with code 2 for a usage error and 130 for an abort.
        Completions exit with code 0 and never print a message. With `standalone_mode` False, errors are raised and the
        result is returned. Other exceptions of a command pass through.

        Args:
            args: words after the program's name; None for those of the process.
            prog_name: name in messages; None for `atma-sweep`.
            complete_var: environment variable of the completion.
            standalone_mode: exit at the end.
            windows_expand_args: as in click.
            **extra: passed on to typer.
        """
        if os.environ.get(COMPLETE):
            # a message would be printed into the line that the user is typing
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
        except _USAGE_ERROR as error:
            if not standalone_mode:
                raise
            message = usage_error_line(error)
            if message:
                echo_text(f"{NAME}: {message}", err=True)
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        except _ABORT:
            if not standalone_mode:
                raise
            echo_text(f"{NAME}: stopped", err=True)
            sys.exit(130)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def completion_line() -> list[str]:
    """Return the words of the line that a shell requests completions for, without the program.

    Empty for an ordinary call. Words are split at spaces; quotes are not interpreted.
    """
    if not os.environ.get(COMPLETE):
        return []
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def usage_error_line(error: Any) -> str:
    """Return the line about a usage error: the error, a suggestion, and the help command in parentheses.

    Empty if help was requested by a call without arguments. `error` is an exception of click or typer; without a
    context the help command is left out.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    ctx = getattr(error, "ctx", None)
    message = sanitize_sentence(
        getattr(error, "message", "") if hasattr(error, "possibilities") else error.format_message()
    )
    message = message.replace("Value error, ", "").partition(". Did you mean ")[0].rstrip(".") + (
        _suggestion(error, ctx) if ctx is not None else ""
    )
    return message if ctx is None else f"{message} ({_command_path(ctx)} --help)"


def _command_path(ctx: Any) -> str:
    parts = [] if ctx.parent is None else [*_command_path(ctx.parent).split(), ctx.info_name]
    return " ".join(parts or [NAME])


def _suggestion(error: Any, ctx: Any) -> str:
    """Return a clause for an unknown option, command or choice, such as "; did you mean --sweep?".

    Empty if none is similar. For an option of a subcommand that was written before it, the clause shows the right
    order.

    Args:
        error: usage error of click or typer.
        ctx: its context.
    """
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        elsewhere = [name for name, command in _commands(ctx).items() if option in _options(command)]
        if elsewhere:
            return f"; write it after the command, as in {_command_path(ctx)} {elsewhere[0]} {option}"
        similar = closest_match(
            option.strip("-"), [name.strip("-") for name in _options(ctx.command) if name.startswith("--")]
        )
        return f"; did you mean --{similar}?" if similar and option.startswith("--") else ""
    param = getattr(error, "param", None)
    kind = getattr(param, "type_descriptor", None) or getattr(param, "type", None)
    choices = getattr(kind, "choices", None)
    if choices:
        value = error.message.partition("'")[2].partition("'")[0]
        return did_you_mean(value, [str(getattr(choice, "value", choice)) for choice in choices])
    if error.message.startswith("No such command"):
        # the context is that of the command group
        return did_you_mean(error.message.partition("'")[2].partition("'")[0], _commands(ctx))
    return ""


def _commands(ctx: Any) -> dict[str, Any]:
    commands: dict[str, Any] = getattr(ctx.command, "commands", {})
    return commands


def _options(command: Any) -> list[str]:
    return [name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]
