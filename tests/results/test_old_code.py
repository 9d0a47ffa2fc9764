"""Databases, bundles and journals of earlier commits are read with the numbers that those commits printed of them.

fixtures/<commit>/ was written by the code of that commit, by `python tests/testing/old_code.py`: atma.sql.gz is its database as SQL, bundle.zip
its export of that, journal.jsonl.gz the first attempt once more as a node of a cluster runs it, printed.json and measurements.csv what it
printed of the database. Every later release has to read them.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results import open_store
from atma_sweep.results.maintenance.check import check
from atma_sweep.results.store.journal import JOURNAL, JournalReader
from atma_sweep.results.store.schema import HEAD
from old_code import COMMITS, FIXTURES, PRINTING_COMMANDS

Run = Callable[..., tuple[int, str, str]]
MEASURED = "measurements.csv"
OF_ATTEMPT = ("curve_point", "measurement", "example", "provenance")
OF_CLOCK = {
    "created_at", "wall_s", "tokens_per_s", "mfu", "mfu_paper", "seconds", "peak_memory", "extra", "co_tenants", "id",
}  # fmt: skip
"""Columns that differ between two runs of one attempt."""
RECKONED = {("dd87905", "report"): re.compile(r"\.values\[\d+\]\.(low|high): ")}
"""What is reckoned otherwise since: the unit of an accuracy's interval is the trial, no more the digit."""
NOTHING = re.compile(r"(?!)")
OF_MACHINE = ("throughput", "peak_memory", "speed", "decode")
"""What probes or metrics with such a word in their names measure is the machine's."""


@pytest.fixture(params=COMMITS)
def wrote(request: pytest.FixtureRequest) -> Path:
    """The folder of what one commit wrote."""
    return FIXTURES / str(request.param)


@pytest.fixture
def database(wrote: Path, tmp_path: Path) -> Path:
    """Its database, in the folder where commands run."""
    path = tmp_path / "atma.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(gzip.decompress((wrote / "atma.sql.gz").read_bytes()).decode())
    return path


def says(run: Run, *arguments: str) -> str:
    code, out, err = run(*arguments)
    assert code == 0, out + err
    return out


def within(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield the places where today's JSON lacks a key or item of the old one, or says otherwise."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            yield from within(value, new[key], f"{path}.{key}") if key in new else [f"{path}.{key}"]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (expected, actual) in enumerate(zip(old, new, strict=True)):
            yield from within(expected, actual, f"{path}[{index}]")
    elif old != new:
        yield f"{path}: {old!r} is now {new!r}"


def numbers(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.thorough
def test_old_database_prints_the_same_numbers(wrote: Path, database: Path, run: Run) -> None:
    says(run, "db", "upgrade")
    printed = json.loads((wrote / "printed.json").read_text())
    assert set(printed) == set(PRINTING_COMMANDS)
    for name, arguments in PRINTING_COMMANDS.items():
        differing = list(within(printed[name], json.loads(says(run, *arguments))))
        assert [line for line in differing if not RECKONED.get((wrote.name, name), NOTHING).search(line)] == [], name
    says(run, "export", "--to", "csv", "--out", MEASURED)
    old, new = numbers((wrote / MEASURED).read_text()), numbers(Path(MEASURED).read_text())
    assert list(within(old, new)) == []
    assert len(new) > 50


def test_old_bundle_is_imported_with_every_number(wrote: Path, tmp_path: Path, run: Run) -> None:
    says(run, "import", str(wrote / "bundle.zip"))
    says(run, "export", "--to", "csv", "--out", MEASURED)
    assert list(within(numbers((wrote / MEASURED).read_text()), numbers(Path(MEASURED).read_text()))) == []
    [old], [new] = json.loads((wrote / "printed.json").read_text())["status"], json.loads(says(run, "status", "--json"))
    assert list(within([old["counts"], len(old["cells"])], [new["counts"], len(new["cells"])])) == []
    assert [finding for finding in check(str(tmp_path / "atma.db")) if finding.severity == "error"] == []


def rows(database: Path, attempt: int) -> dict[str, list[dict[str, Any]]]:
    """Table -> its rows of that attempt, without what differs between two runs of it."""
    by_table = {}
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row
        for table in OF_ATTEMPT:
            query = f"SELECT * FROM {table} WHERE attempt_id = ?"
            listed = [
                {key: row[key] for key in row.keys() if key not in OF_CLOCK}  # noqa: SIM118, a Row iterates over values
                for row in connection.execute(query, (attempt,))
                if not any(word in f"{dict(row).get('probe')} {dict(row).get('metric')}" for word in OF_MACHINE)
            ]
            by_table[table] = sorted(listed, key=lambda row: json.dumps(row, sort_keys=True, default=str))
    return by_table


def test_old_journal_gives_the_numbers_of_direct_writes(wrote: Path, database: Path, tmp_path: Path, run: Run) -> None:
    says(run, "db", "upgrade")
    before = rows(database, 1)
    assert all(before.values())
    with closing(sqlite3.connect(database)) as connection, connection:
        for table in OF_ATTEMPT:
            connection.execute(f"DELETE FROM {table} WHERE attempt_id = 1")
        connection.execute("UPDATE attempt SET state = 'running', finished_at = NULL, weights = NULL WHERE id = 1")
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]
    lines = gzip.decompress((wrote / "journal.jsonl.gz").read_bytes())
    journal = tmp_path / JOURNAL
    journal.write_bytes(lines)
    with closing(open_store(database)) as store:
        fence = store.attempt(1).fence
        assert JournalReader(journal, store, 1, fence).apply() == len(lines.splitlines())
        ended = store.attempt(1)
    assert (ended.state, ended.exit_code, ended.step, ended.steps_total) == ("done", 0, 12, 12)
    assert ended.weights is not None
    assert ended.weights.endswith("/9/weights.safetensors")
    assert list(within(before, rows(database, 1))) == []
