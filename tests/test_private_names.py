"""Private names of packages of others: every package whose private names are used has an upper bound."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PUBLIC = {"_asdict", "_fields", "_make", "_mapping", "_replace"}
"""Documented in spite of the underscore: those of named tuples, and of SQLAlchemy's rows."""
FOREIGN = {
    requirement.name.replace("-", "_"): requirement
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, group)
}
EXPECTED = {"ray", "torch"}
"""Packages whose private names are used by import or through the module; typer's is set on its objects."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, package, dotted name) of every import and attribute below a package that has a private part."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Attribute():
                names = [ast.unparse(node)]
            case ast.Constant(value=str(text)) if "\n" not in text and " " not in text:
                names = [text]  # an argument of import_module, or a key of sys.modules
        for name in names:
            package, *parts = name.split(".")
            if package in FOREIGN and any(map(is_private, parts)):
                yield getattr(node, "lineno", 0), package, name


def test_private_names_of_packages_need_an_upper_bound() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    uses: dict[str, list[str]] = {}
    for file in listed.splitlines():
        if not file.startswith(("tests/", ".ci/")) and (ROOT / file).exists():
            for line, package, name in private_names(ast.parse((ROOT / file).read_text())):
                uses.setdefault(package, []).append(f"{file}:{line} {name}")
    assert set(uses) == EXPECTED, uses
    for package in {*uses, "typer"}:
        assert any(specifier.operator == "<" for specifier in FOREIGN[package].specifier), uses.get(package)


def test_private_names_are_found_in_every_form() -> None:
    text = "import torch._C\nfrom ray._raylet import X\ntorch._foreach_add_(a)\nload('torch._dynamo.config')\nrow._mapping\n"
    assert [name for _, _, name in private_names(ast.parse(text))] == [
        "torch._C", "ray._raylet.X", "torch._foreach_add_", "torch._dynamo.config"
    ]  # fmt: skip
