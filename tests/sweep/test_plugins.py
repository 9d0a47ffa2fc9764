"""Mixers from files outside the package."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.model import registry
from atma_sweep.sweep.plugins import PluginChanged, load_plugin, source_of

Write = Callable[..., Path]
MIXER = """
from atma_sweep.model.mixers.base import Mixer
from atma_sweep.model.registry import register_mixer

@register_mixer("flat")
class Flat(Mixer):
    pass
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MIXERS", registry.MIXERS.copy())


def test_loaded_once_and_known_by_its_bytes(write: Write) -> None:
    path = write(MIXER, "flat.py")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    plugin = load_plugin(path)
    assert (plugin.path, plugin.sha256) == (str(path), digest)
    module = sys.modules[f"atma_sweep_plugin_{digest[:12]}"]
    assert registry.mixer("flat") is module.Flat
    assert load_plugin(path, digest) == plugin
    assert sys.modules[f"atma_sweep_plugin_{digest[:12]}"] is module
    assert source_of("flat", (plugin,)) == digest
    assert source_of("polar", (plugin,)) is None
    assert source_of("flat", ()) is None


def test_a_file_that_changed_since_it_was_planned_is_refused(write: Write) -> None:
    path = write(MIXER + "# one\n", "flat.py")
    digest = load_plugin(path).sha256
    path.write_text(MIXER + "# two\n")
    new = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = (
        f"has changed since its cell was planned (sha256 {new[:12]}, planned {digest[:12]}); launch the grid again"
    )
    with pytest.raises(PluginChanged) as caught:
        load_plugin(path, digest)
    assert str(caught.value) == f"{path} {expected}"


def test_a_failed_import_leaves_no_half_module(write: Write) -> None:
    path = write("import math\nraise KeyError('x')\n", "bad.py")
    name = f"atma_sweep_plugin_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    for _ in range(2):
        with pytest.raises(KeyError):
            load_plugin(path)
        assert name not in sys.modules
