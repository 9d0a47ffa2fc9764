"""Earlier commits of this package, from the repository's history: as a package that a process can run, and what they wrote.

`python tests/testing/old_code.py` writes the fixtures of tests/results/test_old_code.py that are missing, by running the code of each
commit; an existing one is never written again, since it stands for files that people have.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
COMMITS = ("dd87905", "0c020c1", "a2d1eee")
"""Before modules moved into packages, before smaller modules, and before packages were renamed."""
PARTS = ("__init__.py", "cli.py", "grids", "kernels", "model", "reports", "results", "sweep")
"""All that a snapshot of any of them holds."""
FIXTURES = CHECKOUT / "tests" / "results" / "fixtures"
PRINTING_COMMANDS = {
    "status": ("status", "--json"),
    "report": ("report", "--table", "6", "--json"),
    "provenance": ("report", "--table", "provenance", "--json"),
}
"""What a commit said of its own database, by the command line."""
COMMAND = ("-m", "atma_sweep.cli")


class NoHistory(Exception):
    """This checkout does not hold the commit."""


def unpack(commit: str, folder: Path) -> Path:
    """Return the package of that commit, unpacked into `folder`. Raises NoHistory."""
    archive = subprocess.run(["git", "archive", commit, *PARTS], cwd=CHECKOUT, capture_output=True, timeout=120)
    if archive.returncode:
        raise NoHistory(f"needs history back to commit {commit}: git fetch --unshallow")
    package = folder / "atma_sweep"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(package, filter="data")
    return package


def environment(package: Path) -> dict[str, str]:
    """Return the environment of a process that runs that package."""
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def with_code(package: Path, folder: Path, *arguments: str) -> str:
    """Return what this interpreter says in `folder` when the package is that one."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(package), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- making fixtures ------------------------------------------------------------------------------------------------


@contextmanager
def _folder(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"old-{commit}-") as name:
        yield Path(name)


def write(commit: str, target: Path) -> None:
    """Write the database, bundle, journal and words of one commit into the folder `target`."""
    from bench import Bench

    with _folder(commit) as folder, _folder(commit) as home:
        package = unpack(commit, home)
        bench = Bench(folder)
        grid = folder / "micro.yaml"
        grid.write_text(grid.read_text().replace(str(bench.text), "text"))  # no folder of the machine that made it
        with_code(package, folder, *COMMAND, "launch", "micro.yaml", "--executor", "local")
        target.mkdir(parents=True)
        printed = {
            name: json.loads(with_code(package, folder, *COMMAND, *command))
            for name, command in PRINTING_COMMANDS.items()
        }
        measured = "measurements.csv"
        with_code(package, folder, *COMMAND, "export", "--to", "csv", "--out", measured)
        (target / measured).write_bytes((folder / measured).read_bytes())
        (target / "printed.json").write_text(json.dumps(printed, indent=1) + "\n")
        with_code(package, folder, *COMMAND, "export", "--out", str(target / "bundle.zip"))
        with closing(sqlite3.connect(folder / "atma.db")) as connection:
            text = "\n".join(connection.iterdump()) + "\n"
        _pack(text.encode(), target / "atma.sql.gz")
        # the same attempt once more, as a node of a cluster runs it
        runs = folder / "atma-runs"
        jobs = [json.loads(path.read_text()) for path in runs.glob("*/1/job.json")]
        job = next(job for job in jobs if job["attempt"] == 1)
        again = runs / job["cell"] / "9"
        again.mkdir()
        (again / "job.json").write_text(json.dumps(job | {"folder": f"{job['cell']}/9"}))
        arguments = ("--runs", str(runs), "--folder", f"{job['cell']}/9", "--parent", str(os.getpid()), "--journal")
        with_code(package, again, "-m", "atma_sweep.sweep.job", *arguments)
        _pack((again / "journal.jsonl").read_bytes(), target / "journal.jsonl.gz")


def _pack(content: bytes, file: Path) -> None:
    with file.open("wb") as stream, gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, filename="") as packed:
        packed.write(content)


if __name__ == "__main__":
    for commit in COMMITS:
        if not (FIXTURES / commit).exists():
            write(commit, FIXTURES / commit)
            print(f"wrote {FIXTURES / commit}")
