"""Plugins that use an old name of the Python API work, and hear the name of today."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from atma_sweep.renamed import REMOVED_IN, RENAMED
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
NAMES = [(module, old, today) for module, names in RENAMED.items() for old, today in names.items()]


@pytest.mark.parametrize(("module", "old", "today"), NAMES, ids=lambda word: word)
def test_old_name_warns_and_is_the_object_of_today(module: str, old: str, today: str) -> None:
    loaded = importlib.import_module(f"atma_sweep.{module}")
    with pytest.warns(DeprecationWarning, match=rf"atma_sweep\.{module}\.{old} is now {today};"):
        assert getattr(loaded, old) is getattr(loaded, today)


def test_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'atma_sweep\.model\.bases' has no attribute 'Nothing'"):
        _ = importlib.import_module("atma_sweep.model.bases").Nothing


def test_page_of_deprecations_lists_every_old_name() -> None:
    page = (ROOT / "docs" / "reference" / "deprecations.md").read_text()
    assert re.findall(r"^\| `atma_sweep\.([\w.]+)` \| `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE) == NAMES
    assert f"are removed in {REMOVED_IN}." in page


def test_old_names_go_with_the_release_that_was_announced() -> None:
    scm = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]
    assert not RENAMED or Version(Version(scm["fallback_version"]).base_version) < Version(REMOVED_IN)
