"""A folder in which whole commands run, for tests of launches: a grid, some text, a database that can be asked."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
from atma_sweep.sweep.host.hardware import memory_gb
from here import run_in_process
from patience import PATIENCE_S, until
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

COMMAND = [sys.executable, "-m", "atma_sweep.cli"]
SENTENCE = "the model reads a long row of bytes and guesses what comes next from all that it has seen so far".split()
MICRO = """
name: micro
extends: tiny
axes:
  attn_type: [nope, polar]
seeds: {seeds}
set:
  model: {{d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, window_size: 8}}
  data: {{corpus: files, path: {text}, heldout_tokens: 400}}
  train: {{tokens: {tokens}, seq_len: 32, batch_tokens: 128, micro_batch: 2}}
  eval: {{lengths: [32, 64], documents: 2, junk_rows: 2, needle_trials: 2, validate_every: 10, validation_tokens: 256}}
  checkpoint: {{every_steps: 7}}
"""
EXAMPLE_MIXER = (Path(__file__).resolve().parents[2] / "examples" / "mixer" / "my_mixer.py").read_text()
Curves = dict[str, list[tuple[object, ...]]]


class Bench:
    """A folder with a grid, some text, and a database; commands run in it.

    `copied`: `folder` is one that was made before, or a copy of it, and its text stays where it was made.
    """

    def __init__(self, folder: Path, *, copied: Path | None = None) -> None:
        self.folder = folder
        self.text = (copied or folder) / "text"
        self._env = dict(os.environ)
        self.env = dict(self._env)
        if copied is not None:
            return
        draw = random.Random(0)
        self.text.mkdir()
        for index in range(40):
            (self.text / f"{index}.txt").write_text(" ".join(draw.choice(SENTENCE) for _ in range(300)))
        self.grid()

    def grid(self, *, tokens: int = 128 * 12, seeds: int = 1, more: str = "", name: str = "micro") -> Path:
        text = MICRO.format(text=self.text, tokens=tokens, seeds=seeds)
        path = self.folder / f"{name}.yaml"
        path.write_text(text.replace("name: micro", f"name: {name}") + more)
        return path

    def in_turn(self) -> None:
        """Lets no two attempts run at once, whatever cores there are: each is given most of the memory."""
        path = self.folder / "micro.yaml"
        path.write_text(f"{path.read_text()}resources: {{memory_gb: {0.6 * memory_gb():.3f}}}\n")

    def edit(self, old: str, new: str) -> None:
        path = self.folder / "micro.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def start(self, *arguments: str, out: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [*COMMAND, *arguments]
        return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=out, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str, code: int = 0) -> str:
        """Return the output of a command that must end with `code`.

        In this process, since imports are most of what it takes; in one of its own where that could make a difference:
        for Ray, for a plugin, which a process loads once, and with an environment that the test has set.
        """
        plugins = any("plugins:" in grid.read_text() for grid in self.folder.glob("*.yaml"))
        if plugins or "ray" in arguments or self.env != self._env:
            process = self.start(*arguments)
            out, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == code, out
            return out
        ended, out, _ = run_in_process(self.folder, *arguments, together=True)
        assert ended == code, out
        return out

    def launch(self, *arguments: str, code: int = 0, executor: str = "local") -> str:
        return self.run("launch", "micro.yaml", "--executor", executor, *arguments, code=code)

    def ask(self, *arguments: str) -> str:
        """Return the output of a read-only command, run in this process because imports take most of its time."""
        from atma_sweep import cli

        with contextlib.chdir(self.folder):
            result = CliRunner().invoke(cli.app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout

    def plan(self) -> dict[str, object]:
        plan_json: dict[str, object] = json.loads(self.ask("launch", "micro.yaml", "--dry-run", "--json"))
        return plan_json

    def sql(self, query: str) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self.folder / "atma.db", timeout=PATIENCE_S)) as connection:
            return connection.execute(query).fetchall()

    def wait(self, query: str, launch: subprocess.Popen[str] | None = None) -> None:
        """Until the query gives a row, or the launch that could make it true has ended."""

        def true() -> bool:
            over = launch is not None and launch.poll() is not None
            try:
                return bool(self.sql(query)) or over
            except (sqlite3.OperationalError, DBAPIError):
                return over  # the database is only just being made, or away

        until(true, query)

    def gone(self) -> None:
        """Until no attempt of this bench runs."""
        until(lambda: self.processes() == [], "the end of every attempt")

    def curves(self) -> Curves:
        """By slug: the curve of the finished training, without what depends on the clock."""
        rows = self.sql(
            "SELECT slug, p.step, tokens, train_loss, val_loss, grad_norm, lr FROM curve_point p "
            "JOIN attempt a ON a.id = attempt_id JOIN cell c ON c.id = cell_id "
            "WHERE a.state = 'done' ORDER BY slug, p.step"
        )
        curves: Curves = {}
        for slug, *point in rows:
            curves.setdefault(str(slug), []).append(tuple(point))
        return curves

    def once(self, cells: int) -> None:
        """Every cell has one finished training, and every number of it stands once."""
        done = self.sql("SELECT count(*) FROM attempt WHERE kind='train' AND state='done' GROUP BY cell_id")
        assert done == [(1,)] * cells
        assert self.sql("SELECT count(*) FROM attempt WHERE state = 'running'") == [(0,)]
        values = self.sql(
            "SELECT count(DISTINCT cell), max(n) FROM (SELECT cell, count(*) AS n FROM results "
            "WHERE probe = 'val' AND metric = 'val_loss' GROUP BY sweep, cell) AS counted"
        )
        assert values == [(cells, 1)]

    def assert_intact(self) -> None:
        """The database itself is sound."""
        assert self.sql("PRAGMA integrity_check") == [("ok",)]
        assert self.sql("PRAGMA foreign_key_check") == []

    def close(self) -> None:
        """Kills what still runs of it."""
        for process in self.processes():
            process.kill()

    def processes(self) -> list[psutil.Process]:
        """Attempts of this bench that still run."""
        processes = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if "atma_sweep.sweep.job" in line and any(str(self.folder) in part for part in line):
                processes.append(process)
        return processes


class OnServer:
    """Mix-in for a bench whose database is on a PostgreSQL server; stands before Bench in the bases."""

    env: dict[str, str]

    def put_on(self, url: str) -> None:
        """Every command from now on uses that database."""
        self.env["ATMA_DB"] = url
        self._engine = create_engine(url, poolclass=NullPool)

    def sql(self, query: str) -> list[tuple[object, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def assert_intact(self) -> None:
        """Nothing to ask: a server that answers has recovered."""
