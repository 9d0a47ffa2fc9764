"""Command tree and exit handling of `atma-sweep`.

Commands live in the packages and import heavy modules only when they run.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .reports.commands import dashboard, report, show, status
from .results.console.command_line import OneLineErrorGroup, completion_line
from .results.console.streams import OutputClosed, open_standard_streams
from .results.console.terminal_table import forgo_styles
from .results.console.text import echo_text, sanitize_sentence
from .results.errors import UserError
from .sweep.bench.commands import bench_app
from .sweep.commands.data import data_app
from .sweep.commands.database import db_app, export, import_, track
from .sweep.commands.delete import delete
from .sweep.commands.delete import gc as collect
from .sweep.commands.generate import generate
from .sweep.commands.plan import plan
from .sweep.commands.reference import OutFile, reference_page, schema, write_output
from .sweep.commands.runs import cancel, doctor, evaluate, launch, logs, pause, prune_checkpoints, resume, retry
from .sweep.commands.sweeps import note, rename, sweeps, tag
from .sweep.host.signals import StopRequested, StopSignals
from .sweep.reference.part_list import parts

if TYPE_CHECKING:
    from .results.store.store import Store

MAX_WORD_CHARS = 400
"""Maximum length of a word in an error message; longer words are shortened."""

app = typer.Typer(
    name="atma-sweep",
    cls=OneLineErrorGroup,
    help="""From a YAML grid of sequence mixers to the finished ablation appendix.

    \b
    Example:
      atma-sweep report --table 6 --sweep printed-v2
      atma-sweep launch quick
      atma-sweep status --watch
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    """Print the version and exit, if requested."""
    if is_requested:
        from . import __version__  # only now, since it searches the installed packages

        echo_text(f"atma-sweep {__version__}")
        raise typer.Exit


def _finding(store: Store, sweep: str) -> str | None:
    """Return the finding of a sweep for the end of a launch, which may not import the reports itself.

    The launch is recorded by then, so that an expected error only gives None.
    """
    from .reports.dashboard.overview import finding

    try:
        return finding(store, sweep)
    except UserError:
        return None


@app.callback()
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of the program itself; each acts in its own callback. `launch` finds `_finding` in `ctx.obj`."""
    ctx.ensure_object(dict)["finding"] = _finding


COMMANDS: Mapping[str, Sequence[Callable[..., None] | typer.Typer]] = {
    "Run": (launch, plan, evaluate, generate),
    "Watch and control": (status, logs, track, pause, resume, cancel, retry),
    "Results": (show, report, dashboard, export, import_),
    "Maintain": (sweeps, rename, tag, note, delete, collect, prune_checkpoints, db_app),
    "Prepare and check": (doctor, parts, data_app, schema, bench_app),
}
"""Commands and groups by panel, in the order of the help."""
NAMES: dict[Callable[..., None] | typer.Typer, str] = {
    collect: "gc", import_: "import", db_app: "db", data_app: "data", bench_app: "bench",
}  # fmt: skip
"""Names of groups, and of commands whose functions cannot have them."""
for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=NAMES[command], rich_help_panel=panel)
        else:
            app.command(NAMES.get(command), rich_help_panel=panel)(command)


@app.command(hidden=True)
def reference(out: OutFile = None) -> None:
    """Print the page of all commands, or write every generated page of the reference into a folder.

    \b
    Example:
      atma-sweep reference --out docs/reference
    """
    page = reference_page(typer.main.get_command(app))
    if out is None or not out.is_dir():
        return write_output(page, out)
    from .sweep.reference.pages import reference_pages

    for name, text in {"cli.md": page, **reference_pages()}.items():
        write_output(text, out / name)


def _foreign_exit_location(exit_error: SystemExit) -> str | None:
    """Return file:line if foreign code, such as a plugin, called sys.exit; None if our own code did."""
    from traceback import walk_tb

    # a library such as wandb may replace sys.exit by a function of its own; its caller counts
    hook = getattr(sys.exit, "__code__", None)
    frame, line = [step for step in walk_tb(exit_error.__traceback__) if step[0].f_code is not hook][-1]
    is_own_code = frame.f_globals.get("__name__", "").partition(".")[0] in ("typer", "click", __package__)
    return None if is_own_code else f"{frame.f_code.co_filename}:{line}"


def _exit_with_message(line: str, code: int) -> NoReturn:
    """Print one line to standard error, without passwords and with long words shortened, and exit with the code."""
    shortened = (
        word if len(word) <= MAX_WORD_CHARS else f"{word[:60]}...{word[-20:]}"
        for word in sanitize_sentence(line).split()
    )
    echo_text(f"atma-sweep: {' '.join(shortened)}", err=True)
    sys.exit(code)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback as Python does, without passwords and control characters. Serves as `sys.excepthook`."""
    from traceback import format_exception

    echo_text("".join(format_exception(kind, error, trace)), err=True, nl=False)


def lean_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app reduced to the command or group that the first argument names; the complete app if it names none.

    Building the complete app takes a tenth of the time of `status`.
    """
    command_name = arguments[0] if arguments else ""
    commands = [command for command in app.registered_commands if _command_name(command) == command_name]
    groups = [group for group in app.registered_groups if group.name == command_name]
    if not commands and not groups:
        return app
    lean = copy.copy(app)
    lean.registered_commands, lean.registered_groups = commands, groups
    return lean


def _command_name(info: Any) -> str:
    return info.name or typer.main.get_command_name(info.callback.__name__)


def _check_working_folder() -> None:
    """Exit with code 3 if the working folder was deleted."""
    try:
        os.getcwd()
    except OSError:
        _exit_with_message("the working folder was deleted; change to one that exists (cd) and try again", 3)


def _explain_error(error: Exception) -> UserError | None:
    """Return the expected error behind an exception: our own, of the system, or of a database; None for a bug.

    A missing package becomes PackageMissing. Damage of an open database may be found as the cause.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != __package__:
        from .results.errors import PackageMissing

        return PackageMissing(error.name)
    from .results.console.output_files import store_error_for
    from .results.maintenance.values import damage_of
    from .results.store.database import explain_driver_error, find_damage, open_engines

    return store_error_for(error) or explain_driver_error(error) or find_damage() or damage_of(open_engines())


def _run(command: Callable[[], Any]) -> None:
    """Run a command with stop signals turned into exceptions, and flush standard output afterwards."""
    try:
        with StopSignals(raises=True):
            command()
    finally:
        sys.stdout.flush()


def main(command: Callable[[], Any] | None = None) -> None:
    """Run the command line. An expected error prints one line and sets the exit code; a bug prints a traceback.

    Args:
        command: Function to run instead of the command that sys.argv names.
    """
    # Imports create many long-lived objects; collecting garbage meanwhile takes a tenth of the time of `status`.
    gc.set_threshold(200_000)
    forgo_styles()
    open_standard_streams()
    _check_working_folder()
    try:
        _run(command or lean_app(sys.argv[1:] or completion_line()))
    except OutputClosed as closed:
        sys.exit(closed.exit_code)
    except SystemExit as end:
        foreign_location = _foreign_exit_location(end)
        if foreign_location is None:
            raise
        _exit_with_message(
            f"{foreign_location} ended the command with exit code {end.code}; plugins and libraries must not call sys.exit",
            2,
        )
    except Exception as error:
        user_error = _explain_error(error)
        if user_error is None:
            sys.excepthook = _print_traceback
            raise
        _exit_with_message(str(user_error), user_error.exit_code)
    except StopRequested as stop:
        _exit_with_message(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        _exit_with_message("stopped by Ctrl-C", 130)


if __name__ == "__main__":
    main()
