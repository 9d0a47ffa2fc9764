"""The table of layers in tests/testing/layers.toml, and the drawing that docs/explanation/architecture.md makes of it.

`python -m tests.testing.layers` puts the drawing of today's packages into docs/explanation/architecture.md.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "```text\n", "```"
LINE_WIDTH = 99
"""Characters of the longest line of the drawing."""


@dataclass(frozen=True)
class Folder:
    """A folder of the root: what it may import, and its packages and single files from the highest layer to the lowest."""

    imports: frozenset[str]
    never: frozenset[str]
    layers: tuple[tuple[str, ...], ...]

    @property
    def packages(self) -> list[str]:
        """The packages of all layers, the highest first."""
        return [name for layer in self.layers for name in layer if not name.endswith(".py")]

    @property
    def height(self) -> dict[str, int]:
        """The layer of each package or file, the lowest being 0."""
        return {name: height for height, layer in enumerate(reversed(self.layers)) for name in layer}


@cache
def table() -> dict[str, Folder]:
    """Return the folders of the root by name, as tests/testing/layers.toml has them."""
    folders = tomllib.loads((Path(__file__).with_name("layers.toml")).read_text(encoding="utf-8"))
    return {
        name: Folder(
            frozenset(section.get("imports", ())),
            frozenset(section.get("never", ())),
            tuple(map(tuple, section.get("layers", ()))),
        )
        for name, section in folders.items()
    }


def summary(package: Path) -> str:
    """Return the first line of a package's docstring without its full stop."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].rstrip(".")


def drawing() -> str:
    """Return the tree of packages, the highest layer first, each with the first line of its docstring."""
    rows: list[tuple[str, str]] = [
        ("cli.py", "parses the words of a command, calls one function, prints"),
        ("api.py", "the same functions for Python and notebooks"),
        ("│", ""),
    ]
    for name, folder in table().items():
        if not (ROOT / name).is_dir():
            continue
        rows.append((f"├── {name}/", summary(ROOT / name)))
        for package in folder.packages:
            branch = "└" if package == folder.packages[-1] else "├"
            rows.append((f"│   {branch}── {package}/", summary(ROOT / name / package)))
        rows.append(("│", ""))
    rows.append(("└── grids/", summary(ROOT / "grids")))
    width = max(len(name) for name, _ in rows) + 2
    lines = list[str]()
    for name, text in rows:
        first, *more = textwrap.wrap(text, LINE_WIDTH - width) or [""]
        lines += [f"{name:<{width}}{first}".rstrip()]
        # the branches go on beside a text of several lines
        trunk = "│" if name.startswith(("├", "│")) else ""
        branch = "   │" if name.startswith("│   ├") else ""
        lines += [f"{trunk + branch:<{width}}{line}" for line in more]
    return "".join(f"{line}\n" for line in lines)


def page() -> str:
    """Return docs/explanation/architecture.md with the drawing of today's packages."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + drawing() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
