"""docs/reference/cli.md matches the commands, and its examples work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from atma_sweep import cli
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands import reference
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning import planner
from synthetic import synthetic_sweep

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "cli.md"
SHOWN = re.findall(r"^\$ (atma-sweep .*)$", PAGE.read_text(), re.MULTILINE)
EXCLUDED = {
    "launch": "trains",
    "evaluate": "needs weights",
    "generate": "needs weights",
    "logs": "needs an attempt's log",
    "status --sweep quick --watch": "watches",
    "doctor": "looks at the machine",
    "report --all": "writes every figure, which has its own tests",
    "report --check": "reads what that writes",
    "data prepare": "reads a whole corpus",
    "data tokenizer": "reads text of its own; it has its own tests",
    "bench": "takes minutes or a GPU",
    "dashboard": "serves until Ctrl-C",
    "delete": "takes what the examples after it need; it has its own tests",
}
"""By how an example begins: why it is not run here. `launch --dry-run` is."""


def test_reference_page_matches_the_commands() -> None:
    assert PAGE.read_text() == reference.reference_page(typer.main.get_command(cli.app)), (
        "atma-sweep reference --out docs/reference"
    )


def test_reference_page_lists_every_option() -> None:
    """The options come from the parser itself, not from the generator of the page."""
    sections = dict(re.findall(r"^## ([\w -]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    group = typer.main.get_command(cli.app)
    seen = 0
    for name, section in sections.items():
        command = group
        for word in name.split():
            command = getattr(command, "commands", {}).get(word)
        for option in () if command is None else command.params:
            for word in (*option.opts, *option.secondary_opts) if option.param_type_name == "option" else ():
                assert f"`{word}`" in section or f"`{word} " in section, f"{name} {word}"
                seen += 1
    assert seen > 100


@pytest.mark.slow
def test_examples_do_what_they_say(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The examples run in order, as a reader pastes them, on a sweep named quick."""
    store = open_store("atma.db", create=True)
    cells = [planner.to_record(cell) for cell in load_grid("quick").expand(lambda _: "f" * 64)]
    synthetic_sweep(store, len(cells), 12, name="quick", cells=cells)
    store.close()
    Path("report.yaml").write_text("sweep: quick\nitems:\n  - table: 6\n")
    done = 0
    for line in SHOWN:
        arguments = line.removeprefix("atma-sweep ")
        if arguments.startswith(tuple(EXCLUDED)) and "launch quick --dry-run" not in arguments:
            continue
        code, _, err = run(*shlex.split(arguments))
        assert (code, "Traceback" in err) == (0, False), f"{line}: {err}"
        done += 1
    assert done >= 20
    for name in ("quick.zip", "quick-curves.csv", "needle.svg", "quick.html", "schema.json", "backups.db"):
        assert (tmp_path / name).stat().st_size > 100, name


@pytest.mark.parametrize("arguments", sorted(EXCLUDED))
def test_commands_excluded_from_the_examples_exist(arguments: str) -> None:
    assert any(line.startswith(f"atma-sweep {arguments}") for line in SHOWN)
