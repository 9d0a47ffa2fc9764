"""Refusals of the operating system: one line, exit code 3, no traceback, no cell claimed."""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.console.output_files import store_error_for
from atma_sweep.sweep.orchestrator.display import BestEffortStream
from bench import COMMAND, Bench
from patience import PATIENCE_S

Run = Callable[..., tuple[int, str, str]]
LAUNCH = ("launch", "micro.yaml", "--executor", "local", "--only", "attn_type=nope")


def sole_line(code: int, error: str, expected: int = 3) -> str:
    """Return the only line of an error; assert its exit code."""
    assert code == expected, error
    (line,) = [line for line in error.splitlines() if not line.startswith(("text:", "micro:", "to train:", "disk:"))]
    assert line.startswith("atma-sweep: ")
    return line


@pytest.mark.parametrize(("runs", "expected", "expected_text"), [
    ("file", 2, "is not a folder; choose another with --runs"),
    ("file/below", 2, "Not a directory"),
    ("dangling", 2, "is a broken symbolic link; choose another with --runs"),
    ("/proc/nowhere", 2, "No such file or directory"),
    (b"\xff".decode(errors="surrogateescape"), 3, "is not valid UTF-8 and cannot be recorded; rename it"),
])  # fmt: skip
def test_unusable_runs_folder_is_refused(
    tmp_path: Path, run: Run, runs: str, expected: int, expected_text: str
) -> None:
    Bench(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("/nowhere/x")
    code, _, error = run(*LAUNCH, "--runs", runs)
    assert expected_text in sole_line(code, error, expected)
    assert not (tmp_path / "atma.db").exists()


def test_working_folder_with_an_undecodable_name_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bench(tmp_path)
    strange = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(strange)
    shutil.copy(tmp_path / "micro.yaml", os.fsdecode(strange))
    monkeypatch.chdir(os.fsdecode(strange))
    code, _, error = run(*LAUNCH)
    assert "is not valid UTF-8" in sole_line(code, error)
    assert os.listdir(strange) == [b"micro.yaml"]


def test_grid_with_an_undecodable_path_is_refused(tmp_path: Path, run: Run) -> None:
    Bench(tmp_path)
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(strange)
    shutil.copy(tmp_path / "micro.yaml", strange)
    code, out, error = run("launch", f"{strange}/micro.yaml", "--executor", "local")
    assert "is not valid UTF-8 and cannot be recorded" in sole_line(code, out + error)


def test_bug_stays_a_traceback() -> None:
    assert store_error_for(FileNotFoundError(2, "No such file or directory", "x")) is None
    with pytest.raises(UnicodeEncodeError) as caught:
        "\u00e9".encode("ascii")
    assert store_error_for(caught.value) is None


class Gone(io.StringIO):
    """Terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_best_effort_stream_ignores_a_closed_terminal() -> None:
    stream = BestEffortStream(Gone())
    assert stream.write("text") == 4
    stream.flush()
    assert stream.encoding is None, "what it does not know it asks the stream"


def refused(bench: Bench, *arguments: str, before: Callable[[], object] | None = None) -> str:
    """Run a command as a user who is bound by permissions, which root is not; return its only line of output."""
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
        if shutil.which(prefix[0]) is None:
            pytest.skip(
                "needs setpriv (apt-get install util-linux) or another user than root, whom no permission binds"
            )
    done = subprocess.run(
        [*prefix, *COMMAND, *arguments], cwd=bench.folder, env=bench.env, capture_output=True, text=True, timeout=PATIENCE_S,
        preexec_fn=before,
    )  # fmt: skip
    return sole_line(done.returncode, done.stdout + done.stderr)


@pytest.mark.thorough
@pytest.mark.slow
def test_unwritable_database_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch("--only", "attn_type=nope")
    database = tmp_path / "atma.db"
    database.chmod(0o444)
    assert f"{database} is read-only here; check its permissions" in refused(bench, *LAUNCH)
    second = tmp_path / "other"
    second.mkdir()
    shutil.copy(database, second / "atma.db")
    second.chmod(0o555)
    try:
        for arguments in (
            ("status", "--db", "other/atma.db"),
            (*LAUNCH, "--db", "other/atma.db", "--runs", "atma-runs"),
        ):
            assert "is not writable here, which SQLite needs even for reading" in refused(bench, *arguments)
        assert "Permission denied; check its permissions, or choose another path" in refused(
            bench, *LAUNCH, "--db", "other/new.db"
        )
    finally:
        second.chmod(0o755)


@pytest.mark.thorough
@pytest.mark.slow
def test_file_size_limit_is_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # noqa: E731
    assert "File too large; raise the file size limit (ulimit -f)" in refused(bench, *LAUNCH, before=small)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("where", "expected_text"), [
    ("/proc/nowhere", "ray-.* cannot be used: .* set RAY_TMPDIR to another folder"),
    ("/tmp/" + 90 * "x", "Ray cannot start: .*107 bytes.*; set RAY_TMPDIR to another folder, or launch with --executor local"),
])  # fmt: skip
def test_ray_start_failure_is_reported(tmp_path: Path, where: str, expected_text: str) -> None:
    bench = Bench(tmp_path)
    bench.env["RAY_TMPDIR"] = where
    line = refused(bench, "launch", "micro.yaml", "--executor", "ray", "--only", "attn_type=nope")
    shutil.rmtree(where, ignore_errors=True)
    assert re.search(expected_text, line), line
    assert bench.sql("SELECT owner FROM sweep") == [(None,)]
