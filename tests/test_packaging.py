"""The shipped files are complete, and the versions agree."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import atma_sweep
import pytest
from atma_sweep.results.errors import install_hint
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


EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_every_dependency_is_pinned_within_its_range() -> None:
    groups = [PROJECT["project"]["dependencies"], *EXTRAS.values()]
    required = [Requirement(text) for group in groups for text in group if not text.startswith("atma-sweep[")]
    assert len(required) > 20
    for requirement in required:
        pinned = CONSTRAINTS[requirement.name.lower()]
        assert requirement.specifier.contains(Version(pinned)), requirement
    torch = next(requirement for requirement in required if requirement.name == "torch")
    assert torch.specifier.contains("2.11.0")
    assert not torch.specifier.contains("2.10.0")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("triton", "pip install 'atma-sweep[train]'"),
        ("fla", "pip install 'atma-sweep[train]'"),
        ("huggingface_hub", "pip install 'atma-sweep[train]'"),
        ("transformers", "pip install 'atma-sweep[hf]'"),
        ("psycopg", "pip install 'atma-sweep[postgres]'"),
        ("mlflow", "pip install 'atma-sweep[trackers]'"),
        ("ruamel.yaml", "pip install --upgrade atma-sweep"),
        ("a_plugins_need", "pip install a-plugins-need"),
    ],
)
def test_install_hint_names_the_extra(module: str, command: str) -> None:
    assert install_hint(module) == command


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_install_hint_of_torch_names_the_cpu_build(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """PyPI's torch for macOS is a CPU build, so there the extra suffices."""
    monkeypatch.setattr(sys, "platform", platform)
    extra, _, cpu = install_hint("torch.cuda").partition(" (")
    assert extra == "pip install 'atma-sweep[train]'"
    assert ("pip install torch --index-url https://download.pytorch.org/whl/cpu" in cpu) == (platform == "linux")


def test_all_holds_every_extra_of_users() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == set(EXTRAS) - {"all", "test", "dev", "docs", "oracles"}


NOT_IN_BASE = ("torch", "triton", "fla", "ray", "tiktoken", "tokenizers", "datasets", "huggingface_hub", "pyarrow",
               "safetensors", "transformers", "psycopg", "tensorboard", "wandb", "mlflow", "trackio", "lm_eval")  # fmt: skip
"""Modules that only extras install."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (["report", "--sweep", "printed-v2", "--table", "6"], 0, "Table 6"),
        (["report", "--sweep", "printed-v2", "--figure", "needle", "--out", "needle.svg"], 0, "needle.svg"),
        (["report", "--sweep", "printed-v2", "--format", "html", "--table", "6", "--out", "t.html"], 0, "t.html"),
        (["status"], 0, ""),
        (["schema"], 0, "properties"),
        (["data", "list"], 0, ""),
        (["plan", "quick"], 3, "package 'torch', which this command needs, is not installed; pip install"),
        (["launch", "quick"], 3, "package 'torch', which this command needs, is not installed; pip install"),
        (["bench", "kernels"], 3, "package 'torch', which this command needs, is not installed; pip install"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_base_installation_reads_and_names_extras(tmp_path: Path, arguments: list[str], code: int, output: str) -> None:
    """Import of every package of an extra is blocked, as if it were not installed."""
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in NOT_IN_BASE)
    program = f"import sys; {blocked}; sys.argv[1:] = {arguments!r}; from atma_sweep.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert output in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    if code:
        assert ended.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {Path(name).parent for name in tracked.splitlines()}
    code = {folder for folder in folders if folder.parts[:1] not in (("tests",), (".ci",), ("docs",), ("examples",))}
    assert {".".join(("atma_sweep", *folder.parts)) for folder in code} == listed


def test_next_version_agrees_in_every_file() -> None:
    """The fallback version names the release that the changelog begins with, and is above every tag."""
    fallback = Version(PROJECT["tool"]["setuptools_scm"]["fallback_version"])
    assert fallback.is_devrelease
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == fallback.base_version
    assert f"version: {fallback.base_version}\n" in (ROOT / "CITATION.cff").read_text()
    tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(Version(tag) <= Version(fallback.base_version) for tag in tags.split())


def test_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert atma_sweep.__version__ == importlib.metadata.version("atma-sweep")
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert atma_sweep.__version__ == "unknown"
    with pytest.raises(AttributeError, match="has no attribute 'versions'"):
        attrgetter("versions")(atma_sweep)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("commands", "version"),
    [
        ([], r"0\.2\.0\.dev0"),  # no history, as in an archive of the sources
        (["git init -q", "git add .", "git -c user.name=a -c user.email=a@b.c commit -qm a"], r"0\.2\.0\.dev1\+g\w+"),
        (
            ["git init -q", "git add .", "git -c user.name=a -c user.email=a@b.c commit -qm a", "git tag v3.1.4"],
            r"3\.1\.4",
        ),
    ],
    ids=["archive", "without tags", "tagged"],
)
def test_version_comes_from_the_tag(tmp_path: Path, commands: list[str], version: str) -> None:
    scm = pytest.importorskip("setuptools_scm", reason="needs setuptools-scm: pip install -e '.[test]'")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SETUPTOOLS_SCM", "GIT_"))}
    for command in commands:
        subprocess.run(shlex.split(command), cwd=tmp_path, env=environment, check=True)
    ended = subprocess.run(
        [sys.executable, "-m", scm.__name__], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(version, ended.stdout.strip())


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
