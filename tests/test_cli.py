"""Command line: help for everything, one line for every error, and the documented exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest
import typer.main
from atma_sweep import cli
from atma_sweep.reports import report_folder
from atma_sweep.reports.figures import files
from atma_sweep.results.console import command_line
from atma_sweep.results.store.records import CellRecord, Owner
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.data.registry import CORPORA
from ruamel.yaml import YAML
from typer.core import TyperGroup
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def commands() -> dict[str, click.Command]:
    commands: dict[str, click.Command] = {}

    def walk(group: click.Command, path: str) -> None:
        for name, command in getattr(group, "commands", {}).items():
            if hasattr(command, "commands"):
                walk(command, f"{path}{name} ")
            else:
                commands[path + name] = command

    walk(typer.main.get_command(cli.app), "")
    return commands


@pytest.mark.parametrize("name", sorted(commands()))
def test_commands_and_options_all_have_help(name: str) -> None:
    command = commands()[name]
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []  # type: ignore[attr-defined]
    assert len(command.params) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["", "bench", "data", "db", *sorted(commands())])
def test_help_has_an_example_and_no_python_types(name: str) -> None:
    result = CliRunner().invoke(cli.app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert re.search(rf"Example: *\n +atma-sweep {name}", result.stdout)
    assert not re.search("<(bool|str|int|float|path)>", result.stdout)


def test_tutorial_counts_the_existing_formats() -> None:
    count = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
    expected = f"every table in {count[len(report_folder.FORMAT_SUFFIXES)]} formats, every figure in {count[len(files.FORMATS)]}"
    assert expected in " ".join((ROOT / "docs" / "tutorials" / "from-sweep-to-appendix.md").read_text().split())


def test_version(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--version") == (0, f"atma-sweep {version('atma-sweep')}\n", "")


MISTAKES = [
    pytest.param(
        group["database"], arguments, message, marks=[pytest.mark.thorough] if index % group.get("first", 1) else []
    )
    for group in YAML(typ="safe", pure=True).load((ROOT / "tests" / "mistakes.yaml").read_text()).values()
    for index, (arguments, message) in enumerate(group["cases"])
]


@pytest.mark.parametrize(("database", "arguments", "message"), MISTAKES)
def test_user_error_is_a_single_line_with_the_remedy(
    run, tmp_path: Path, database: str, arguments: list[str], message: str
) -> None:  # type: ignore[no-untyped-def]
    numbers = {"FOLDER": str(tmp_path), "CORPORA": ", ".join(CORPORA), "N4000": "9" * 4000, "N5000": "9" * 5000}
    arguments, (message,) = (
        [Template(text).safe_substitute(numbers, LONG="x" * 5000) for text in texts] for texts in (arguments, [message])
    )
    if database != "none":
        store = open_store("atma.db", create=True)
        if database == "demo":
            store.record_revision("demo", grid_text="x", grid_file="x.yaml", cells=[])
        store.close()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    # nothing that a terminal would obey, no frame, and no word that nobody reads
    assert err[:-1].isprintable()
    assert not set(err) & set("╭│╰")
    assert len(err) < 1000
    assert (
        err == f"{message}\n"
        if message.startswith("atma-sweep: ")
        else err.startswith("atma-sweep: ") and message in err
    )
    allowed = ("atma-runs",) if database == "none" else ("atma.db", "atma-runs")
    assert all(path.name.startswith(allowed) for path in tmp_path.iterdir())


def test_help_without_a_command_stays_help(run) -> None:  # type: ignore[no-untyped-def]
    for arguments in ([], ["db"]):
        code, out, err = run(*arguments)
        assert (code, err) == (2, "")
        assert "Usage: atma-sweep" in out


def test_replaced_sys_exit_blames_the_caller(run, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """Wandb replaces sys.exit; a plugin that calls it still counts as foreign code."""
    there: dict[str, Any] = {}
    exec(compile("def hooked(code=0):\n    raise SystemExit(code)", "/library/hooks.py", "exec"), there)
    monkeypatch.setattr(sys, "exit", there["hooked"])
    assert run("--version") == (0, f"atma-sweep {version('atma-sweep')}\n", "")
    exec(compile("import sys\ndef leave():\n    sys.exit(0)", "/plugin/mine.py", "exec"), there)
    with pytest.raises(SystemExit, match="2"):
        cli.main(there["leave"])
    expected = "atma-sweep: /plugin/mine.py:3 ended the command with exit code 0; plugins and libraries must not call sys.exit\n"
    assert capsys.readouterr().err == expected


def test_file_that_is_no_database_is_refused_unchanged(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "atma.db").write_text("not a database" * 100)
    code, _, err = run("status")
    assert (code, len(err.splitlines())) == (2, 1)
    assert (tmp_path / "atma.db").read_text() == "not a database" * 100


def _filled(path: Path) -> None:
    store = open_store(path / "atma.db", create=True)
    levels = {"attn_type": "polar", "reg_mode": "weak", "distractor": "off", "memory": "on", "window": "off"}
    cells = [
        CellRecord(id=f"{i:012x}", slug=f"cell-{i}", seed=i, levels=levels, config={"train": {}}, tokens=1000)
        for i in range(3)
    ]
    options = {"requested": [["val", 0]]}
    store.record_revision("demo", grid_text="", grid_file="demo.yaml", options=options, cells=cells)
    owner = Owner(name="test", host="here", pid=1, started=1.0)
    attempt = store.start_attempt(cells[0].id, owner=owner, fence=0, steps_total=10)
    store.finish_attempt(attempt.id, 0, "failed", cause="ValueError: it broke")
    store.close()


def test_status_and_show_tell_the_same_in_text_and_json(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _filled(tmp_path)
    code, out, _ = run("status")
    assert code == 0
    assert re.search(r"^demo \(revision 1, launched .* UTC\): 3 cells: 1 failed, 2 new$", out, re.MULTILINE)
    assert "000000000000 cell-0: failed: ValueError: it broke" in out
    (sweep,) = json.loads(run("status", "--json")[1])
    assert (sweep["sweep"], sweep["counts"]) == ("demo", {"failed": 1, "new": 2})
    assert [cell["standing"] for cell in sweep["cells"]] == ["failed", "new", "new"]
    assert run("status", "--sweep", "demos")[0] == 2
    assert re.search(r"attempts:\n  attempt 1: failed in \d+ s, step 0/10", run("show", "cell-0")[1])
    assert json.loads(run("show", "000000000000", "--json")[1])["attempts"][0]["cause"] == "ValueError: it broke"
    code, _, err = run("show", "cell")
    assert (code, len(err.splitlines())) == (2, 1)


def test_report_writes_a_file_and_refuses_unknown_names(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _filled(tmp_path)
    code, out, err = run("report", "--table", "6", "--format", "csv", "--out", "table.csv")
    assert (code, out, err) == (0, "", "wrote table.csv\n")
    # a header and the mean over the seeds
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 1
    assert run("report", "--check", "table.csv")[0] == 0
    assert run("report", "--table", "6", "--seeds", "--out", "seeds.csv")[0] == 0
    assert len((tmp_path / "seeds.csv").read_text().splitlines()) == 1 + 3
    assert run("report", "--table", "66")[0] == 2
    assert run("report", "--table", "6", "--format", "xls")[0] == 2


def test_printed_schema_equals_the_shipped_file(run) -> None:  # type: ignore[no-untyped-def]
    assert run("schema")[1] == (ROOT / "grids" / "schema.json").read_text()


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/x/y"),
            3,
            "cannot use /x/y: Read-only file system; choose another",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            3,
            "cannot use /x: Permission denied; check its perm",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device; free disk space"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000),
            2,
            "(5000 letters): File name too long; choose",
        ),
    ],
)
def test_system_error_is_a_single_line(run, monkeypatch, error: OSError, code: int, expected: str) -> None:  # type: ignore[no-untyped-def]
    from atma_sweep.reports.live import status

    def refuse(*rest: object) -> None:
        raise error

    open_store("atma.db", create=True).close()
    monkeypatch.setattr(status, "sweep_statuses", refuse)
    exit_code, out, err = run("status")
    assert (exit_code, out, len(err.splitlines())) == (code, "", 1)
    assert expected in err
    assert len(err) < 300


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file", "/x"), OSError("ours"), ValueError("x")]
)
@pytest.mark.usefixtures("no_databases")
def test_possible_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken() -> None:
        raise error

    with pytest.raises(type(error)):
        cli.main(broken)


def test_missing_package_is_a_single_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a Python without that package, like a machine that has only torch."""
    monkeypatch.setitem(sys.modules, "pydantic", None)

    def command() -> None:
        import pydantic  # noqa: F401

    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 3
    assert capsys.readouterr().err == (
        "atma-sweep: the Python package 'pydantic', which this command needs, is not installed; "
        "pip install --upgrade atma-sweep\n"
    )


def test_ctrl_c_message_has_no_launch_advice(capsys: pytest.CaptureFixture[str]) -> None:
    """The stopped command may have been a report."""

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        cli.main(stopped)
    assert capsys.readouterr().err == "atma-sweep: stopped by Ctrl-C\n"


def examples(command: click.Command) -> list[str]:
    """Return the lines below "Example:" in a command's help."""
    return [line.strip() for line in str(command.help).partition("\b\nExample:\n")[2].splitlines()]


@pytest.mark.parametrize("name", sorted(commands()))
def test_examples_of_every_command_parse_in_80_columns(name: str) -> None:
    """Its own options and valid values appear in lines that a terminal of 80 columns does not break."""
    shown = examples(commands()[name])
    assert shown
    for line in shown:
        assert len(line) <= 75
        assert line.split()[: 1 + len(name.split())] == ["atma-sweep", *name.split()]
        arguments = shlex.split(line)[1 + len(name.split()) :]
        # an unknown option, a missing argument or a value of the wrong kind raises here
        commands()[name].make_context(name, arguments)


@pytest.mark.usefixtures("no_databases")
def test_bug_prints_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        cli.main(broken)


@pytest.mark.parametrize("word", ["status", "launch", "db", "bench", "prune-checkpoints", "gc"])
def test_lean_app_command_equals_that_of_the_full_app(word: str) -> None:
    full_command = typer.main.get_command(cli.app).commands[word]  # type: ignore[attr-defined]
    lean = typer.main.get_command(cli.lean_app([word, "--help"])).commands  # type: ignore[attr-defined]
    assert list(lean) == [word]

    def describe_command(command: Any) -> Any:
        inside = {name: describe_command(parameter) for name, parameter in getattr(command, "commands", {}).items()}
        return (
            command.help,
            [(parameter.name, parameter.opts, parameter.default) for parameter in command.params],
            inside,
        )

    assert describe_command(lean[word]) == describe_command(full_command)
    for arguments in ([], ["--version"], ["staus"], ["--json", word]):
        assert cli.lean_app(arguments) is cli.app


def test_lean_conversion_equals_that_of_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given values, including wrong ones, are converted by typer; defaults, None and text need no conversion."""
    calls: list[dict[str, Any]] = []
    for lazily in (True, False):
        if not lazily:
            monkeypatch.setattr(command_line.OneLineErrorGroup, "get_command", TyperGroup.get_command)

        def status(**options: Any) -> None:
            calls.append(options)

        command = typer.main.get_command(cli.app)
        monkeypatch.setattr(command.commands["status"], "callback", status)  # type: ignore[attr-defined]
        for arguments in ([], ["--db", "x.db", "--interval", "3"], ["--watch", "--interval", "2.0", "--sweep", "a b"]):
            command(["status", *arguments], standalone_mode=False)
        with pytest.raises(Exception, match=r"greater than or equal to 0\.1"):
            command(["status", "--interval", "0.01"], standalone_mode=False)
    assert calls[:3] == calls[3:]
    assert [type(call["interval"]) for call in calls] == [float] * 6


@pytest.mark.thorough
@pytest.mark.parametrize(("setting", "styled"), [("NO_COLOR=1", False), ("TERM=dumb", False), ("TERM=xterm", True)])
def test_help_on_a_terminal_heeds_no_color(setting: str, styled: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm"} | dict([setting.split("=")])
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "atma_sweep.cli", "db", "--help"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    out = b""
    with contextlib.suppress(OSError):  # Linux says so at the end of a terminal
        while part := os.read(master, 65536):
            out += part
    os.close(master)
    assert process.wait() == 0
    assert b"atma-sweep db" in out
    assert (b"\x1b" in out) is styled
