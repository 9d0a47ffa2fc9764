"""Commands of the documents that run: a ```console block after the line `<!-- run -->`.

`python -m tests.testing.page_commands FOLDER [PAGE ...]` runs those of all or the named pages, each page in a copy of FOLDER,
which holds the database atma.db and the runs of a sweep named quick.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- run -->"
HANG_S = 900
"""No page works as long, on the slowest machine."""
GRID = """\
name: quick
extends: tiny
axes:
  attn_type: [polar, nope, rope]
  memory: [off, on]
  window: [off, on]
set:
  train: {tokens: 3072, batch_tokens: 1536}
  eval: {lengths: [128, 1024], validate_every: 1, documents: 2, junk_rows: 2, validation_tokens: 2048}
"""
"""The cells of the shipped grid quick, under the same names, trained for two steps."""


@dataclass(frozen=True)
class Command:
    """A command of a page, with the number of its first line."""

    line: int
    text: str


def pages() -> list[Path]:
    """Return all pages in which commands may be marked."""
    return sorted(
        [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    )


def marked_commands(text: str) -> list[Command]:
    """Return the commands of the marked blocks: lines with a prompt, joined with the next ones where a backslash ends them.

    Other lines of a block show what the command before prints. ValueError for a mark without such a block.
    """
    lines = text.splitlines()
    commands: list[Command] = []
    for number, line in enumerate(lines):
        if line.strip() != MARK:
            continue
        block = list(_block(lines, number + 1))
        if not block:
            raise ValueError(
                f"line {number + 1}: {MARK} must be followed by a ```console block with lines that start with '$ '"
            )
        commands += block
    return commands


def _block(lines: list[str], start: int) -> Iterator[Command]:
    """Yield the commands of the block that opens at the index `start`; none if no block of a console does."""
    if start >= len(lines) or lines[start].strip() != "```console":
        return
    index = start + 1
    while index < len(lines) and not lines[index].strip().startswith("```"):
        first, text = index, lines[index].strip()
        if text.startswith("$ "):
            while text.endswith("\\") and index + 1 < len(lines):
                index += 1
                text = f"{text[:-1]} {lines[index].strip()}"
            yield Command(first + 1, text.removeprefix("$ "))
        index += 1


def run_page(page: Path, folder: Path) -> str | None:
    """Run the marked commands of a page in a folder, in one shell that ends at the first failure; return that failure.

    It names page, line, command and exit code, with the end of the output. None if all commands succeed.
    """
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
    commands = marked_commands(page.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        program, progress = Path(scratch) / "atma-sweep", Path(scratch) / "line"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m atma_sweep "$@"\n')
        program.chmod(0o755)
        script = "".join(f"echo {command.line} >'{progress}'\n{command.text}\n" for command in commands)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ATMA_")}
        environment["PATH"] = f"{scratch}:{Path(sys.executable).parent}:{environment['PATH']}"
        ended = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG_S,
        )  # fmt: skip
        if ended.returncode == 0:
            return None
        line = int(progress.read_text())
    text = next(command.text for command in commands if command.line == line)
    output = "\n".join(f"    {row}" for row in ended.stdout.splitlines()[-15:])
    return f"{name}:{line}: exit code {ended.returncode} of: {text}\n{output}"


def prepare(folder: Path) -> None:
    """Train the sweep quick in a folder, which gets atma.db and atma-runs, for two steps per cell."""
    (folder / "grid.yaml").write_text(GRID, encoding="utf-8")
    launch = [sys.executable, "-m", "atma_sweep", "launch", "grid.yaml"]
    ended = subprocess.run(launch, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise RuntimeError(f"the sweep for the pages failed: {ended.stderr[-2000:]}")
    (folder / "grid.yaml").unlink()


def failures(prepared: Path, chosen: list[Path]) -> list[str]:
    """Run the marked commands of pages, each page in a copy of the prepared folder; return the failures."""
    problems = []
    for page in chosen:
        if marked_commands(page.read_text(encoding="utf-8")):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "work"
                shutil.copytree(prepared, folder)
                problems.append(run_page(page, folder))
    return [problem for problem in problems if problem]


if __name__ == "__main__":
    lines = failures(Path(sys.argv[1]), [Path(name).resolve() for name in sys.argv[2:]] or pages())
    sys.exit("\n".join(lines) or None)
