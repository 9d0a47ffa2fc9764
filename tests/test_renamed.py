"""Plugins that use an old name of the Python API work, and hear the name of today."""

from __future__ import annotations

import importlib

import pytest
from atma_sweep.renamed import RENAMED

NAMES = [(module, old, today) for module, names in RENAMED.items() for old, today in names.items()]


@pytest.mark.parametrize(("module", "old", "today"), NAMES, ids=lambda word: word)
def test_old_name_warns_and_is_the_object_of_today(module: str, old: str, today: str) -> None:
    loaded = importlib.import_module(f"atma_sweep.{module}")
    with pytest.warns(DeprecationWarning, match=rf"atma_sweep\.{module}\.{old} is now {today};"):
        assert getattr(loaded, old) is getattr(loaded, today)


def test_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'atma_sweep\.model\.bases' has no attribute 'Nothing'"):
        _ = importlib.import_module("atma_sweep.model.bases").Nothing
