"""Generated pages of docs/reference match the declarations, and the examples of the commands work."""

from __future__ import annotations

import contextlib
import csv
import re
import shlex
import sqlite3
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from atma_sweep import cli
from atma_sweep.model import registry
from atma_sweep.results.failure_classes import Failure
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands import reference
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.data.registry import CORPORA
from atma_sweep.sweep.grid.cell import cell_id
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.settings import COMPUTED
from atma_sweep.sweep.planning import planner
from atma_sweep.sweep.probes import PROBES
from atma_sweep.sweep.reference.schema_text import markdown_table, values_text
from synthetic import synthetic_sweep

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "cli.md"
SHOWN = re.findall(r"^\$ (atma-sweep .*)$", PAGE.read_text(), re.MULTILINE)
EXCLUDED = {
    "launch": "trains",
    "evaluate": "needs weights",
    "generate": "needs weights",
    "export polar": "needs weights",
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


def code_of_rows(page: str) -> list[str]:
    """Return the code in the first column of all tables of a page, in order."""
    return re.findall(r"^\| `([^`]+)` \|", (PAGE.parent / page).read_text(), re.MULTILINE)


@pytest.mark.slow
def test_reference_command_writes_all_pages(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("reference", "--out", str(tmp_path))[0] == 0
    written = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert sorted(written) == [
        "cli.md",
        "database.md",
        "failures.md",
        "grid.md",
        "metrics.md",
        "parts.md",
        "settings.md",
    ]
    stale = [name for name, text in written.items() if (PAGE.parent / name).read_text() != text]
    assert stale == [], "atma-sweep reference --out docs/reference"


def test_settings_page_has_every_field_that_a_grid_sets() -> None:
    paths = {
        f"{section}.{name}"
        for section, field in CellConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    }
    shown = code_of_rows("settings.md")
    assert paths - set(shown) == {"eval.samples", *(name for name in COMPUTED if name in paths)}
    assert {path for path in shown if path not in paths} == {
        f"eval.samples.{name}" for name in ("prompts", "tokens", "temperature", "top_p")
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("| `model.d_model` | integer ≥ 8, ≤ 2^20 | `1024` | yes |", "always in the id"),
        ("| `model.mlp_ratio` | integer ≥ 1, ≤ 1,024 | `4` | unless `4` |", "an identity default"),
        ("| `train.loss_reduction` | `mean`, `sum` | `mean` | unless `mean` |", "words"),
        ("| `data.path` | text or null | `null` | no |", "a path"),
        ("| `eval.lengths` | list of integers ≤ 2^30 | `[2048, 4096, 8192, 16384, 32768, 65536]` | no |", "outside"),
        ("| `model.bias` | on, off | `on` | unless `on` |", "a switch"),
    ],
)
def test_settings_page_states_values_default_and_id(line: str, reason: str) -> None:
    assert line in (PAGE.parent / "settings.md").read_text(), reason


def test_settings_outside_the_id_change_no_id() -> None:
    """Compute ids of cells that differ in one number or switch, and compare with the column of the page."""
    rows = re.findall(
        r"^\| `((?:model|train|data)\.\w+)` \|.*?\| `([^`]+)` \| (\w+)",
        (PAGE.parent / "settings.md").read_text(),
        re.MULTILINE,
    )
    usual = CellConfig()
    seen = set()
    for path, default, in_id in rows:
        section, name = path.split(".")
        if default in ("on", "off") and not name.startswith("distractor"):
            part = getattr(usual, section).model_copy(update={name: default == "off"})
            changed = usual.model_copy(update={section: part})
            assert (cell_id(changed) != cell_id(usual)) == (in_id != "no"), path
            seen.add(path)
    assert len(seen) > 8


def test_database_page_describes_every_column(tmp_path: Path) -> None:
    """The columns come from the database itself, as SQLite has it after all migrations."""
    open_store(tmp_path / "a.db", create=True).close()
    page = (PAGE.parent / "database.md").read_text()
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        names = [name for name in names if name not in ("alembic_version", "sqlite_sequence")]
        columns = {name: [row[1] for row in database.execute(f"PRAGMA table_info({name})")] for name in names}
    sections = dict(re.findall(r"^## (?:View `)?(\w+)`?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(columns)
    for name, section in sections.items():
        meanings = dict(re.findall(r"^\| `(\w+)` \|(?:.*\|)? ([^|]*) \|$", section, re.MULTILINE))
        assert sorted(meanings) == sorted(columns[name])
        assert [column for column, meaning in meanings.items() if not meaning.endswith(".")] == [], name


def test_parts_metrics_and_failures_have_their_rows() -> None:
    parts = (registry.MIXERS, registry.MEMORIES, registry.POSITIONS, registry.REGULARIZERS, PROBES, CORPORA)
    shown = [name for name in code_of_rows("parts.md") if "." not in name]
    assert shown == [name for part in parts for name in part]
    with (ROOT / "results" / "metrics.csv").open(newline="") as file:
        assert sorted(code_of_rows("metrics.md")) == sorted(row["name"] for row in csv.DictReader(file))
    assert code_of_rows("failures.md") == list(get_args(Failure))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 1000}, "integer ≥ 1, ≤ 1,000"),
        ({"anyOf": [{"type": "number", "gt": 0, "le": 1e18}, {"type": "null"}, {"const": "none"}]}, "number > 0 or null or `none`"),
        ({"type": ["boolean", "string"], "pattern": "on|off"}, "on, off"),
        ({"type": "array", "items": {"type": "string"}}, "list of texts"),
        ({"enum": ["on", True, False]}, "`on`, `off`"),
        ({"$ref": "#/$defs/A"}, "mapping"),
        ({}, ""),
    ],
)  # fmt: skip
def test_values_text_of_schema_nodes(node: dict[str, Any], text: str) -> None:
    assert values_text(node, {"A": {"type": "object"}}) == text


def test_markdown_table_escapes_its_entries() -> None:
    table = markdown_table(["a", "b"], [["x|y", ""], ["<i>\nz", "see docs/explanation/security.md"]])
    assert (
        table == "| a | b |\n| --- | --- |\n| x\\|y | |\n| &lt;i> z | see [security.md](../explanation/security.md) |\n"
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


@pytest.mark.thorough
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
