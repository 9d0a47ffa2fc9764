"""Every command of the command line, from its own tree, so that a new one is tested without another line."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from atma_sweep import cli
from atma_sweep.results.console.streams import NEAREST_ASCII, OutputFile
from atma_sweep.results.store.records import AXES, CellRecord
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands.reference import examples
from synthetic import synthetic_sweep

HANG_S = 120
"""No command that is tested here works as long, on the slowest machine."""


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


def _tree() -> list[tuple[tuple[str, ...], Any]]:
    return list(_commands(typer.main.get_command(cli.app)))


def paths() -> list[tuple[str, ...]]:
    """The arguments of every group and command, hidden ones too; none for the outermost group."""
    return [path for path, _ in _tree()]


def example_lines() -> list[tuple[str, ...]]:
    """The arguments of every example in a command's help, without the name of the program.

    Those of benchmarks are left out, which work for long without a database, and launches only make a plan.
    """
    lines = [line for _, command in _tree() if not hasattr(command, "commands") for line in examples(command)]
    lines_of_examples = [tuple(shlex.split(line)[1:]) for line in lines]
    return [
        (*arguments, "--dry-run") if arguments[0] == "launch" else arguments
        for arguments in lines_of_examples
        if arguments[0] != "bench"
    ]


def fill_database(folder: Path) -> Path:
    """Make `atma.db` in a folder, with the sweep and the cells that the examples of the commands name."""
    levels = [dict(zip(AXES, (mixer, "baseline", "off", "on", "off"), strict=True)) for mixer in ("polar", "nope")]
    cells = [
        CellRecord(
            id=f"{seed + 2 * index:012x}", slug=f"{axes['attn_type']}-baseline-d0-m1-w0-s{seed}", seed=seed, levels=axes,
            config={}, axes=axes | {"seed": str(seed)}, tokens=1,
        )
        for index, axes in enumerate(levels) for seed in (0, 1)
    ]  # fmt: skip
    store = open_store(folder / "atma.db", create=True)
    synthetic_sweep(store, len(cells), 400, name="quick", cells=cells)
    store.close()
    return folder / "atma.db"


@contextmanager
def unread_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let standard output of this process, as the command line sets it up, be a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.BufferedWriter(OutputFile(writer, "w", closefd=False)), "utf-8", NEAREST_ASCII)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        try:
            yield
        finally:
            stream.close()
            os.close(writer)


@contextmanager
def narrow_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Let both output streams of this process, as the command line sets them up, take ASCII alone; yield what was written."""
    streams = [io.TextIOWrapper(io.BytesIO(), "ascii", NEAREST_ASCII, write_through=True) for _ in range(2)]

    def written() -> str:
        return "".join(stream.buffer.getvalue().decode("ascii") for stream in streams)  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        yield written


@contextmanager
def no_hang(arguments: tuple[str, ...]) -> Iterator[None]:
    """Fail when a command takes longer than HANG_S."""

    def late(*_: object) -> None:
        raise AssertionError(f"{' '.join(arguments)} did not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
