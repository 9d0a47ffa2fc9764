"""Mixers from files outside the package."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.model import registry
from atma_sweep.sweep.grid.plugins import PLUGGABLE, PluginChanged, PluginExited, load_plugin, source_of

pytestmark = pytest.mark.usefixtures("registries")
Write = Callable[..., Path]
MIXER_PART = PLUGGABLE[0]
MIXER = """
from atma_sweep.model.bases import Mixer
from atma_sweep.model.registry import register_mixer

@register_mixer("flat")
class Flat(Mixer):
    pass
"""


def test_plugin_is_loaded_once_per_content(write: Write) -> None:
    path = write(MIXER, "flat.py")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    plugin = load_plugin(path)
    assert (plugin.path, plugin.sha256) == (str(path), digest)
    module = sys.modules[f"atma_sweep_plugin_{digest[:12]}"]
    assert registry.MIXERS.load("flat") is module.Flat
    assert load_plugin(path, digest) == plugin
    assert sys.modules[f"atma_sweep_plugin_{digest[:12]}"] is module
    assert source_of(MIXER_PART, "flat", (plugin,)) == digest
    assert source_of(MIXER_PART, "polar", (plugin,)) is None
    assert source_of(MIXER_PART, "flat", ()) is None


def test_plugin_changed_since_planning_is_refused(write: Write) -> None:
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


def test_plugin_failed_import_removes_the_module(write: Write) -> None:
    path = write("import math\nraise KeyError('x')\n", "bad.py")
    name = f"atma_sweep_plugin_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    for _ in range(2):
        with pytest.raises(KeyError):
            load_plugin(path)
        assert name not in sys.modules


def test_plugin_exit_is_an_error_but_ctrl_c_passes(write: Write) -> None:
    path = write("import sys\nsys.exit(0)\n", "leaves.py")
    with pytest.raises(PluginExited, match=r"leaves.py: ends the process with exit code 0 when it is imported"):
        load_plugin(path)
    assert f"atma_sweep_plugin_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" not in sys.modules
    with pytest.raises(KeyboardInterrupt):
        load_plugin(write("raise KeyboardInterrupt\n", "stopped.py"))


OWN = "class Own(BaseException):\n    pass\nraise Own('one\\ntwo')\n"
INTERRUPT = "class Own(KeyboardInterrupt):\n    pass\nraise Own('three')\n"
MUTE = "class Own(Exception):\n    def __str__(self):\n        raise ValueError\nraise Own\n"
CODE = "class Code:\n    def __str__(self):\n        raise ValueError\nraise SystemExit(Code())\n"


@pytest.mark.parametrize(("text", "message"), [
    (OWN, "{path}: raises Own: one two when it is imported; a plugin may raise only an Exception"),
    (INTERRUPT, "{path}: raises Own: three when it is imported; a plugin may raise only an Exception"),
    ("raise GeneratorExit\n", "{path}: raises GeneratorExit:  when it is imported; a plugin may raise only an Exception"),
    (MUTE, "bad.py cannot be loaded: Own: its message cannot be read (ValueError)"),
    (CODE, "{path}: ends the process with exit code Code when it is imported; a plugin must not call sys.exit"),
])  # fmt: skip
def test_plugin_exceptions_give_a_single_line(
    write: Write, command: Callable[..., tuple[int, str, str]], text: str, message: str
) -> None:
    path = write(text, "bad.py")
    grid = write("name: g\nextends: micro\nplugins: [bad.py]\n")
    expected = message.format(path=path).replace(":  when", ": when")
    assert command("launch", str(grid), "--dry-run") == (2, "", f"atma-sweep: {grid}:3: plugins: {expected}\n")


INIT = MIXER.replace("pass", "def __init__(self, *a, **k):\n        import sys; sys.exit(0)")


@pytest.mark.parametrize(("text", "message"), [
    ("import sys\nsys.exit(0)\n", r"g.yaml:3: plugins: .*bad.py: ends the process with exit code 0 when it is imported"),
    (INIT, r"bad.py:8 ended the command with exit code 0; plugins and libraries must not call sys.exit"),
])  # fmt: skip
def test_launch_reports_a_plugin_that_exits(
    write: Write, command: Callable[..., tuple[int, str, str]], text: str, message: str
) -> None:
    write(text, "bad.py")
    write("name: g\nextends: micro\nplugins: [bad.py]\naxes: {attn_type: [flat]}\n")
    code, _, error = command("launch", "g.yaml")
    assert code == 2
    (line,) = [line for line in error.splitlines() if line.startswith("atma-sweep:")]
    assert re.search(message, line), error
