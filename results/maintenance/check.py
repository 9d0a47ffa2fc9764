"""Check of a database for all known problems. The database may be in use and is not changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from ..derived import Derive
from ..errors import StoreDamaged, StoreError, StoreMissing
from ..store.database import make_engine, resolve_url, revision_of, sqlite_file, translate_driver_errors
from ..store.schema import HEAD
from . import integrity
from .cell_ids import ComputeCellId, check_cell_ids, check_labels
from .files import changed_weights, missing_files
from .finding import SEVERITIES, Finding, unreadable_finding
from .host_checks import check_clock, check_host, find_dead_attempts
from .values import damaged_rows


def check(
    url_or_path: str | Path | None,
    *,
    runs: Path | None = None,
    identify: ComputeCellId | None = None,
    derive: Derive | None = None,
    weights: bool = True,
    report_progress: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Return all problems of a database, errors first, then warnings and notes; empty if there are none.

    Prints and changes nothing. The database may be in use, damaged, or of another release; the latter ends the check
    after its first steps.

    Args:
        url_or_path: database URL, file, or None for the default.
        runs: folder of the database's relative paths; None skips the checks of files.
        identify: returns the id of a config, given the id that its cell has; None skips the check of cell ids.
        derive: returns the columns that follow from a config; None skips their check.
        weights: read saved weights completely and compare them with their recorded hashes; False only notes their size.
        report_progress: receives a line before a step that takes long.

    Raises:
        StoreMissing: there is no database.
        StoreError: the file belongs to another program, or the server does not answer.
    """
    url = resolve_url(url_or_path)
    path = sqlite_file(url)
    if path is not None and not path.exists():
        raise StoreMissing(f"there is no database {path}; launch a grid first, or name the database with --db")
    findings = check_host(path) if path is not None else []
    try:
        with translate_driver_errors(url):
            findings += findings_inside(url, runs, identify, derive, weights, report_progress)
    except StoreError as error:
        if not isinstance(error, StoreDamaged):
            raise
        findings.append(unreadable_finding(str(error).partition("; ")[0], path))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def findings_inside(
    url: URL,
    runs: Path | None,
    compute_cell_id: ComputeCellId | None,
    derive: Derive | None,
    weights: bool,
    report_progress: Callable[[str], None],
) -> list[Finding]:
    """Return the problems inside a database that can be opened, in the order of the steps.

    The arguments are those of `check`; `compute_cell_id` is its `identify`. Stops after the integrity check if the
    schema is not this release's, after the schema check if a table or column is missing, and after a step that finds
    unreadable parts. An unforeseen error of a step is swallowed if damaged values were found, which explain it, and
    raised otherwise.
    """
    engine = make_engine(url)
    try:
        with engine.execution_options(begin="BEGIN").connect() as connection:
            revision = revision_of(connection)
            findings = [*integrity.check_integrity(connection, sqlite_file(url)), *integrity.check_release(revision)]
            if revision != HEAD:
                return findings
            findings += integrity.check_schema(connection)
            if any(finding.what.startswith("the table") for finding in findings):
                return findings  # the other checks need all tables and columns
            damaged: list[Finding] = []

            def values() -> list[Finding]:
                damaged.extend(damaged_rows(connection))
                return damaged

            steps: list[Callable[[], list[Finding]]] = [
                values,
                lambda: integrity.find_duplicates(connection),
                lambda: integrity.find_orphans(connection),
                lambda: find_dead_attempts(connection),
                lambda: check_clock(connection),
                lambda: missing_files(connection, runs) if runs is not None else [],
                lambda: (
                    changed_weights(connection, runs, read=weights, report_progress=report_progress)
                    if runs is not None
                    else []
                ),
                lambda: check_cell_ids(connection, compute_cell_id) if compute_cell_id is not None else [],
                lambda: check_labels(connection, derive) if derive is not None else [],
            ]
            for step in steps:
                try:
                    findings += step()
                except (DBAPIError, StoreDamaged) as error:
                    cause = str(error.orig) if isinstance(error, DBAPIError) else str(error).partition("; ")[0]
                    findings.append(unreadable_finding(cause, sqlite_file(url)))
                    break  # after an error PostgreSQL accepts no more queries in the transaction
                except Exception:
                    if not damaged:  # otherwise the damaged values explain the error
                        raise
            return findings
    finally:
        engine.dispose()
