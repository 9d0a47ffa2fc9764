"""The shipped files are complete, and the versions agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import atma_sweep
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = {
    requirement.name.lower().replace("_", "-"): str(requirement.specifier).removeprefix("==")
    for requirement in map(Requirement, re.findall(r"^[^#\s].*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
}
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
"""What the metadata of torch's CUDA build requires exactly; the CPU build would not notice another one."""


def test_torch_and_triton_are_pinned_as_a_pair() -> None:
    assert CONSTRAINTS["triton"] == TRITON_OF_TORCH[CONSTRAINTS["torch"]]


def test_every_dependency_is_pinned_within_its_range() -> None:
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    required = [Requirement(text) for group in groups for text in group]
    assert len(required) > 20
    for requirement in required:
        pinned = CONSTRAINTS[requirement.name.lower()]
        assert requirement.specifier.contains(Version(pinned)), requirement
    torch = next(requirement for requirement in required if requirement.name == "torch")
    assert torch.specifier.contains("2.11.0")
    assert not torch.specifier.contains("2.10.0")


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {Path(name).parent for name in tracked.splitlines()}
    code = {folder for folder in folders if folder.parts[:1] not in (("tests",), (".ci",), ("docs",))}
    assert {".".join(("atma_sweep", *folder.parts)) for folder in code} == listed


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == atma_sweep.__version__
    assert f"## {atma_sweep.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {atma_sweep.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_readme_has_exactly_two_commands() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(len(block.splitlines()) == 1 for block in blocks)
    assert "atma-sweep launch grids/quick.yaml" in blocks[0]
    assert "constraints.txt" in blocks[0]
    assert "pytest" in blocks[1]


@pytest.mark.parametrize(
    "name", ["LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", ".pre-commit-config.yaml"]
)
def test_what_a_project_needs_is_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 100


def test_links_of_the_documents_lead_somewhere() -> None:
    n_links = 0
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
            n_links += 1
    assert n_links > 0
