"""A list of everything that is wrong with a database, which need not be idle and is not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from ..derived import Derive
from ..errors import StoreDamaged, StoreError, StoreMissing
from ..store.database import file_of, make_engine, place, revision_of, translate_driver_errors
from ..store.schema import HEAD
from . import integrity
from .cell_ids import Identify, check_cell_ids, false_labels
from .files import changed_weights, missing_files
from .finding import SEVERITIES, Finding, unreadable
from .host_checks import check_host, clock, dead
from .values import damaged_rows


def check(
    url_or_path: str | Path | None,
    *,
    runs: Path | None = None,
    identify: Identify | None = None,
    derive: Derive | None = None,
    weights: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Everything that is wrong with a database, worst first; empty when nothing is.

    `runs` is the folder that the database's relative paths lie under (None: they are not looked for). `identify` gives
    the id of a cell's config, the one that it has here if the config may have that (None: ids are not compared).
    `derive` gives the columns that follow from a config (None: they are not compared).
    `weights`: kept weights are read whole and compared with their recorded hashes; `tell` gets a line before that takes
    long. Prints and changes nothing.

    Raises StoreMissing, and StoreError for a file that is somebody else's or a server that does not answer.
    """
    url = place(url_or_path)
    path = file_of(url)
    if path is not None and not path.exists():
        raise StoreMissing(f"there is no database {path}; launch a grid first, or name the database with --db")
    findings = check_host(path) if path is not None else []
    try:
        with translate_driver_errors(url):
            findings += findings_inside(url, runs, identify, derive, weights, tell)
    except StoreError as error:
        if not isinstance(error, StoreDamaged):
            raise
        findings.append(unreadable(str(error).partition("; ")[0], path))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def findings_inside(
    url: URL,
    runs: Path | None,
    identify: Identify | None,
    derive: Derive | None,
    weights: bool,
    tell: Callable[[str], None],
) -> list[Finding]:
    """Look through a database that can be opened, step by step."""
    engine = make_engine(url)
    try:
        with engine.execution_options(begin="BEGIN").connect() as connection:
            found = revision_of(connection)
            findings = [*integrity.integrity(connection, file_of(url)), *integrity.release(found)]
            if found != HEAD:
                return findings
            findings += integrity.schema(connection)
            if any(finding.what.startswith("the table") for finding in findings):
                return findings  # without a table or column nothing else can be asked
            damaged: list[Finding] = []

            def values() -> list[Finding]:
                damaged.extend(damaged_rows(connection))
                return damaged

            steps: list[Callable[[], list[Finding]]] = [
                values,
                lambda: integrity.duplicates(connection),
                lambda: integrity.orphans(connection),
                lambda: dead(connection),
                lambda: clock(connection),
                lambda: missing_files(connection, runs) if runs is not None else [],
                lambda: changed_weights(connection, runs, read=weights, tell=tell) if runs is not None else [],
                lambda: check_cell_ids(connection, identify) if identify is not None else [],
                lambda: false_labels(connection, derive) if derive is not None else [],
            ]
            for step in steps:
                try:
                    findings += step()
                except (DBAPIError, StoreDamaged) as error:
                    why = str(error.orig) if isinstance(error, DBAPIError) else str(error).partition("; ")[0]
                    findings.append(unreadable(why, file_of(url)))
                    break  # the transaction is of no more use on PostgreSQL
                except Exception:
                    if not damaged:  # else the values that are named already are why
                        raise
            return findings
    finally:
        engine.dispose()
