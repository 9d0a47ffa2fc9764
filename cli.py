"""The command tree, and how a command ends. Bodies of commands lie in the packages; nothing heavy is imported before one needs it."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from . import __version__
from .reports.commands import dashboard, report, show, status
from .results.console.command_line import OneLine, completion_line
from .results.console.streams import OutputClosed, open_standard_streams, write_out
from .results.console.terminal_table import forgo_styles
from .results.console.text import echo_text, sentence
from .results.errors import UserError
from .sweep.bench.commands import bench_app
from .sweep.commands.data import data_app
from .sweep.commands.database import db_app, export, import_
from .sweep.commands.delete import delete
from .sweep.commands.delete import gc as collect
from .sweep.commands.generate import generate
from .sweep.commands.plan import plan
from .sweep.commands.reference import OutFile, give_out, page, schema
from .sweep.commands.runs import cancel, doctor, evaluate, launch, logs, pause, prune_checkpoints, resume, retry
from .sweep.commands.sweeps import note, rename, sweeps, tag
from .sweep.host.signals import StopRequested, StopSignals

MAX_WORD_CHARS = 400
"""Letters of one in a message; a longer one is cut, since nobody reads it."""

app = typer.Typer(
    name="atma-sweep",
    cls=OneLine,
    help="From a YAML grid of sequence mixers to the finished ablation appendix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(db_app, name="db")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        echo_text(f"atma-sweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


COMMANDS: tuple[Callable[..., None], ...] = (
    launch, plan, evaluate, generate, status, logs, prune_checkpoints, doctor, pause, resume, cancel, retry, show, report,
    dashboard, sweeps, rename, tag, note, delete, collect, export, import_, schema,
)  # fmt: skip
"""In the order in which help lists them."""
NAMES: dict[Callable[..., None], str] = {collect: "gc", import_: "import"}
"""Of commands whose functions cannot have them."""
for command in COMMANDS:
    app.command(NAMES.get(command))(command)


@app.command(hidden=True)
def reference(out: OutFile = None) -> None:
    """Print the page of all commands, docs/cli.md.

    \b
    Example:
      atma-sweep reference --out docs/cli.md
    """
    give_out(page(typer.main.get_command(app)), out)


def _foreign_exit_location(end: SystemExit) -> str | None:
    """Where foreign code, a plugin say, ended the process; None for an end of ours."""
    from traceback import walk_tb

    # a library may have put a function of its own there, as wandb does; who called it is what counts
    hook = getattr(sys.exit, "__code__", None)
    frame, line = [step for step in walk_tb(end.__traceback__) if step[0].f_code is not hook][-1]
    ours = frame.f_globals.get("__name__", "").partition(".")[0] in ("typer", "click", __package__)
    return None if ours else f"{frame.f_code.co_filename}:{line}"


def _exit_with_message(line: str, code: int) -> NoReturn:
    words = (word if len(word) <= MAX_WORD_CHARS else f"{word[:60]}...{word[-20:]}" for word in sentence(line).split())
    write_out(f"atma-sweep: {' '.join(words)}\n", err=True)
    sys.exit(code)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """As Python tells of an error, without the passwords and control characters that its words may hold."""
    from traceback import format_exception

    echo_text("".join(format_exception(kind, error, trace)), err=True, nl=False)


def lean_app(words: Sequence[str]) -> typer.Typer:
    """Return the command line with the one command that the first word names; all of it when that names none.

    To build all takes `status` a tenth of its time.
    """
    word = words[0] if words else ""
    commands = [one for one in app.registered_commands if _name(one) == word]
    groups = [one for one in app.registered_groups if one.name == word]
    if not commands and not groups:
        return app
    lean = copy.copy(app)
    lean.registered_commands, lean.registered_groups = commands, groups
    return lean


def _name(info: Any) -> str:
    return info.name or typer.main.get_command_name(info.callback.__name__)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        _exit_with_message("the working folder was deleted; change to one that exists (cd) and try again", 3)


def _foreseen(error: Exception) -> UserError | None:
    """Explain an error that a user can mend: of ours, of the system, or of a database; None for a bug."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != __package__:
        from .results.errors import PackageMissing

        return PackageMissing(error.name)
    from .results.console.output_files import store_error_for
    from .results.maintenance.values import damage_of
    from .results.store.database import damage_behind, explain_driver_error, open_engines

    return store_error_for(error) or explain_driver_error(error) or damage_behind() or damage_of(open_engines())


def _run(command: Callable[[], Any]) -> None:
    """Run a command until all that it printed is written."""
    try:
        with StopSignals(raises=True):
            command()
    finally:
        sys.stdout.flush()


def main(command: Callable[[], Any] | None = None) -> None:
    """Run the command line, and end with one clear line and an exit code for every error that was foreseen."""
    # Imports make many objects that live on; collecting garbage meanwhile costs `status` a tenth of its time.
    gc.set_threshold(200_000)
    forgo_styles()
    open_standard_streams()
    _check_working_folder()
    try:
        _run(command or lean_app(sys.argv[1:] or completion_line()))
    except OutputClosed as closed:
        sys.exit(closed.exit_code)
    except SystemExit as end:
        where = _foreign_exit_location(end)
        if where is None:
            raise
        _exit_with_message(
            f"{where} ended the command with exit code {end.code}; foreign code must not call sys.exit", 2
        )
    except Exception as error:
        known = _foreseen(error)
        if known is None:
            sys.excepthook = _print_traceback
            raise
        _exit_with_message(str(known), known.exit_code)
    except StopRequested as stop:
        _exit_with_message(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        _exit_with_message("stopped by Ctrl-C", 130)


if __name__ == "__main__":
    main()
