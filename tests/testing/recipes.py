"""The recipes of docs/how-to/add-a-part.md, followed letter by letter on a copy of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^```(?:python|yaml)\n# ([\w./]+)(?:, (?:in (\w+)|(at the end)|(a plugin)))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """Block of a recipe: a new file, lines for a registry, lines for the end of a file, or a plugin beside the grid."""

    path: str
    registry: str
    at_the_end: bool
    plugin: bool
    text: str


def recipes() -> dict[str, list[Block]]:
    """By title: what is to be written."""
    by_title: dict[str, list[Block]] = {}
    page = (ROOT / "docs" / "how-to" / "add-a-part.md").read_text()
    for section in re.split(r"\n##+ ", page)[1:]:
        blocks = [
            Block(path, name, bool(end), bool(plugin), text) for path, name, end, plugin, text in BLOCK.findall(section)
        ]
        if blocks:
            by_title[section.splitlines()[0]] = blocks
    return by_title


def copy(folder: Path) -> Path:
    """The package as its files are now, in `folder`, under the name that it is imported by."""
    root = folder / "atma_sweep"
    named = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in named.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


def follow(block: Block, root: Path) -> None:
    """Writes what the block says; AssertionError where its place is not there, or taken."""
    file = root / block.path
    if block.at_the_end:
        file.write_text(f"{file.read_text()}\n\n{block.text}")
    elif block.registry:
        lines = file.read_text().splitlines(keepends=True)
        (start,) = [i for i, line in enumerate(lines) if re.match(rf"{block.registry}\b.*[{{(\[]$", line.rstrip())]
        at = next(i for i in range(start, len(lines)) if lines[i].rstrip().endswith(("{", "[")))
        file.write_text("".join([*lines[: at + 1], block.text, *lines[at + 1 :]]))
    else:
        assert not file.exists(), f"{block.path} exists"
        file.write_text(block.text)
