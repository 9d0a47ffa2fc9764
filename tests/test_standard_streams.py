"""Closed, full and narrow standard streams, and a working folder that is gone, for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.console.streams import NEAREST_ASCII, OutputClosed, nearest_ascii, write_out
from atma_sweep.sweep.orchestrator.display import SafeConsole
from bench import Bench
from every_command import example_lines, fill_database, narrow_output, no_hang, paths, unread_output
from patience import PATIENCE_S

Run = Callable[..., tuple[int, str, str]]
COMMAND = [sys.executable, "-m", "atma_sweep.cli"]


def ends(arguments: tuple[str, ...], folder: Path, shell: str = "", **environment: str) -> tuple[int, str, str]:
    """Run a command in a process of its own, with a shell's redirections behind it."""
    done = subprocess.run(
        ["bash", "-c", f'"$@" {shell}', "bash", *COMMAND, *arguments], cwd=folder, env=os.environ | environment,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)


def unread(arguments: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Run a command in a process of its own whose output nobody reads; return its exit status and standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_unread_help_of_every_command_ends_silently(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(paths()) > 40
    results = {}
    for path in paths():
        with unread_output(monkeypatch):
            results[path] = run(*path, "--help")
    assert {path: ended for path, ended in results.items() if ended != (141, "", "")} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("path", [(), ("db", "check"), None])
def test_closed_output_ends_silently(tmp_path: Path, path: tuple[str, ...] | None) -> None:
    for arguments in paths()[::4] if path is None else [path]:
        assert unread((*arguments, "--help"), tmp_path) == (141, ""), arguments
        assert ends((*arguments, "--help"), tmp_path, ">&-") == (141, "", ""), arguments


@pytest.mark.thorough
def test_a_report_into_closed_output_ends_silently(tmp_path: Path) -> None:
    assert ends(("report", "--table", "6", "--sweep", "printed-v2"), tmp_path, ">&-") == (141, "", "")
    assert ends(("reference", "--out", "-"), tmp_path, ">&-") == (141, "", "")
    # without standard error only messages are lost, so the command ends as it would with it
    assert ends(("sweeps",), tmp_path, ">/dev/null 2>&- <&-") == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("share", range(4))
def test_no_example_fails_when_its_output_is_unread(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """By the tree of commands: each prints its example's output into a pipe that nobody reads."""
    fill_database(tmp_path)
    content = (tmp_path / "atma.db").read_bytes()
    for arguments in [item for item in example_lines() if item[0] != "doctor"][share::4]:
        (tmp_path / "atma.db").write_bytes(content)
        with no_hang(arguments), unread_output(monkeypatch):
            code, _, err = run(*arguments)
        # 0: it prints nothing there; 2 and 3: it lacks what its example takes for granted, such as a file
        assert code in (0, 2, 3, 141), (arguments, err)
        assert code in (0, 141) or len(err.splitlines()) == 1, (arguments, err)


def test_a_launch_speaks_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread_output(monkeypatch):
        terminal = SafeConsole()
        terminal.print("one line")
        terminal.print("another")
        with pytest.raises(OutputClosed):
            write_out("a result")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_launch_without_a_reader_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread_pipe:
        launch = bench.start("launch", "micro.yaml", "--executor", "local", out=unread_pipe)
        assert launch.wait(PATIENCE_S) == 0
    assert bench.sql("SELECT state, count(*) FROM attempt GROUP BY 1") == [("done", 2)]


def test_a_full_output_is_a_single_line(tmp_path: Path) -> None:
    message = "atma-sweep: cannot write standard output: No space left on device; free disk space, or write to a file\n"
    assert ends(("sweeps", "--help"), tmp_path, ">/dev/full") == (3, "", message)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("encoding", "columns"),
    [("latin-1", 20), ("ascii", 80), ("cp437", 80)],
)
def test_a_narrow_encoding_gets_the_nearest_ascii(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, columns: int
) -> None:
    arguments = ("report", "--table", "6", "--sweep", "printed-v2")
    monkeypatch.setenv("COLUMNS", str(columns))
    _, complete, _ = run(*arguments)
    code, out, err = ends(arguments, tmp_path, PYTHONIOENCODING=encoding)
    assert (code, err) == (0, "")
    assert out == complete.encode(encoding, NEAREST_ASCII).decode(encoding)
    assert "─" in complete


@pytest.mark.thorough
def test_no_example_fails_in_a_narrow_output(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ASCII and 20 columns: an exception that the command line does not know would end the test."""
    fill_database(tmp_path)
    content = (tmp_path / "atma.db").read_bytes()
    monkeypatch.setenv("COLUMNS", "20")
    endless = ("doctor", "dashboard")
    n_bytes = 0
    for arguments in [item for item in example_lines() if item[0] not in endless and "--watch" not in item]:
        (tmp_path / "atma.db").write_bytes(content)
        with no_hang(arguments), narrow_output(monkeypatch) as written:
            code, *_ = run(*arguments)
        text = written()
        n_bytes += len(text)
        assert code in (0, 1, 2, 3), (arguments, text)
    assert n_bytes > 10_000


def test_what_an_encoding_lacks_is_written_as_ascii() -> None:
    assert nearest_ascii("0.5 ± 0.1 × 3 – é ≤ 中") == "0.5 +- 0.1 x 3 - e <= ?"
    assert "½ ± 中\udc80".encode("latin-1", NEAREST_ASCII) == b"\xbd \xb1 ??"


def test_a_deleted_folder_is_a_single_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    message = "atma-sweep: the working folder was deleted; change to one that exists (cd) and try again\n"
    assert {run(*arguments) for arguments in [*paths(), *example_lines()]} == {(3, "", message)}
