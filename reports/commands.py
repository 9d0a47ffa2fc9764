"""Commands that read the database: status, show, dashboard and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..results.console import completion
from ..results.console.command_line import BY_NAME, AsJson, Db, SweepName, print_json
from ..results.console.streams import terminal_width
from ..results.console.text import echo_text, sanitize_all
from .figures import FIGURES
from .report_options import SIGNATURE, Compare, ReportRequest, listing
from .report_spec import ReportSpec
from .tables import TABLES


def status(
    sweep: SweepName = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show one sweep live until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, max=86_400, help="Time between two updates of --watch."),
    ] = 2.0,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="With --watch: exit when the sweep is no longer running.")
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of sweeps: counts, running cells with speed and remaining time, failures with their cause.

    \b
    Example:
      atma-sweep status
      atma-sweep status --sweep quick --watch
    """
    from ..results import shipped
    from ..results.builtin_sweeps import nothing_launched, open_store_with_builtins
    from ..results.errors import StoreMissing
    from ..results.paper import is_published
    from ..results.store.store import open_store

    if watch:
        from rich.console import Console

        from .live.watch import watch as follow
        from .sweep_data import ReportError

        if sweep is not None and is_published(sweep):
            raise ReportError(f"{sweep} holds numbers of the paper and never runs; leave --watch out")
        if (
            sweep is not None
            and shipped.is_shipped(sweep)
            and open_store_with_builtins(db, sweep) is shipped.shipped_store(sweep)
        ):
            raise ReportError(f"{sweep} is built in and never runs; leave --watch out")

        follow(open_store(db), sweep, Console(), interval=interval, until_end=until_end, as_json=as_json)
        return
    from .live.status import Status, sweep_statuses

    try:
        report = sweep_statuses(open_store_with_builtins(db, sweep), sweep)
    except StoreMissing as error:
        # a database or sweep named by the user must exist
        if db is not None or sweep is not None:
            raise
        report = Status((), nothing_launched(error))
    if as_json:
        print_json(report.as_json())
    else:
        echo_text(sanitize_all(report).text(terminal_width(sys.stdout)))


def show(
    cell: Annotated[str, typer.Argument(metavar="CELL", help=f"Cell {BY_NAME}.", autocompletion=completion.cells)],
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show one cell: its config, attempts, loss curve and measurements.

    \b
    Example:
      atma-sweep show polar-baseline-d0-m1-w0-s0
    """
    from ..results.builtin_sweeps import open_store_with_builtins
    from .live.cell_details import cell_details

    sheet = cell_details(open_store_with_builtins(db, sweep), cell, sweep)
    if as_json:
        print_json(sheet.as_json())
    else:
        echo_text(sanitize_all(sheet).text(terminal_width(sys.stdout)))


def dashboard(
    sweep: SweepName = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 selects a free one.")
    ] = 0,
    compare: Compare = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address without opening a browser.")] = False,
    db: Db = None,
) -> None:
    """Serve a live page of a sweep to this machine only and open it in the browser. Ctrl-C ends it.

    The address contains a password, which is new each time. The page cannot change anything.

    \b
    Example:
      atma-sweep dashboard
      atma-sweep dashboard --sweep quick --compare printed-v2
      atma-sweep dashboard --port 8000 --no-open
    """
    _limit_blas_threads()
    from .dashboard.server.serve import serve

    def tell(address: str) -> None:
        echo_text(address)
        echo_text("the page is updated while this command runs; Ctrl-C ends it", err=True)

    serve(sweep, db, compare=compare, port=port, browser=not no_open, tell=tell)
    echo_text("ended: the page is no longer served", err=True)


def report(**options: Any) -> None:
    """Write the tables and figures of the paper from the database, compare them with published numbers, or check written files.

    Tables: {tables}.

    Figures: {figures}.

    The numbers of the paper are built in as sweeps printed-v1, printed-v2 and printed-v2-open-weight, and those of
    related papers as printed-tra, printed-wall and printed-atlas: for this command, dashboard, show, status and export.
    Also built in are the sweeps replication, replication-pilot, replication-rates, replication-longer,
    replication-retrieval and headline-370m, which this project ran.

    Exit code 1: --check found a file that differs from the database, or with --all a table or figure of an installed
    package failed.

    \b
    Example:
      atma-sweep report --list
      atma-sweep report --table 6
      atma-sweep report --figure needle --sweep printed-v2 --out needle.svg
      atma-sweep report --figure loss --style nature --width 89mm
      atma-sweep report --table 6 --sweep printed-v2 --only memory=on
      atma-sweep report --figure loss --against time --compare printed-v2
      atma-sweep report --compare printed-v2
      atma-sweep report --dashboard quick.html
      atma-sweep report --all --out appendix
      atma-sweep report --from report.yaml
      atma-sweep report --check appendix
    """
    request = ReportRequest(**options)
    if request.list_:
        if request.as_json:
            print_json([{"kind": kind, "name": name, "shows": shows} for kind, name, shows in listing()])
        else:
            echo_text("\n".join(f"{f'--{kind} {name}':<24} {shows}" for kind, name, shows in listing()))
        return
    _limit_blas_threads()
    from .report_request import run_report

    if not run_report(request):
        raise typer.Exit(1)


def _limit_blas_threads() -> None:
    """Let NumPy's BLAS use one thread in this process, unless the environment says otherwise; before NumPy's import.

    The matrices of reports are small: a second thread spends its time waiting, at the cost of other programs.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _listed(lines: Mapping[str, ReportSpec]) -> str:
    return "; ".join(
        f"{name} ({spec.number}: {spec.shows})" if spec.number else f"{name} ({spec.shows})"
        for name, spec in lines.items()
    )


# the registries import none of the tables and figures, so help stays fast
report.__doc__ = str(report.__doc__).format(tables=_listed(TABLES.own), figures=_listed(FIGURES.own))
report.__signature__ = SIGNATURE  # type: ignore[attr-defined]
report.__annotations__ = {name: option.annotation for name, option in SIGNATURE.parameters.items()}
