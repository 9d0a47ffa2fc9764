"""The registry that serves every kind of part."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from atma_sweep.model.registry import MEMORIES, REGULARIZERS, Registry, registering_for

PACKAGE = "parts_of_a_test"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    """A registry of a package that exists in memory alone."""
    package, submodule = (ModuleType(f"{PACKAGE}{end}") for end in ("", ".whole"))
    package.__path__ = []  # type: ignore[attr-defined]
    submodule.One, submodule.Two = (type(name, (), {}) for name in ("One", "Two"))  # type: ignore[attr-defined]
    for module in (package, submodule):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Registry("part", PACKAGE, {"one": "whole:One", "two": "whole:Two", "far": "missing:It"}, reserved=("no",))


def test_registry_is_a_mapping_that_imports_on_load(parts: Registry[type]) -> None:
    assert list(parts) == ["one", "two", "far"]
    assert (len(parts), "one" in parts, "no" in parts, parts["two"]) == (3, True, False, "whole:Two")
    assert [parts.load(name).__name__ for name in ("one", "two")] == ["One", "Two"]
    with pytest.raises(ModuleNotFoundError, match="missing"):
        parts.load("far")
    with pytest.raises(KeyError):
        parts.load("three")


def test_registry_scope_undoes_registrations(parts: Registry[type]) -> None:
    with parts.scope():
        mine = parts.register("mine")(type("Mine", (), {"__module__": "elsewhere"}))
        assert parts.load("mine") is parts["mine"] is mine
        assert (parts.owner("mine"), parts.owner("one")) == ("elsewhere", None)
        with parts.scope():
            parts.register("other")(mine)
        assert list(parts) == ["one", "two", "far", "mine"]
    assert list(parts) == ["one", "two", "far"]


def test_registering_a_name_of_another_module_fails(parts: Registry[type]) -> None:
    for name in ("one", "far"):
        with pytest.raises(ValueError, match=f"a part named '{name}' exists already; choose another name"):
            parts.register(name)(type)
    with pytest.raises(ValueError, match="the part name 'no' is reserved"):
        parts.register("no")(type)
    first, second = (type("Mine", (), {"__module__": "elsewhere"}) for _ in range(2))
    parts.register("mine")(first)
    parts.register("mine")(second)  # its own module once more
    assert parts.load("mine") is second
    with pytest.raises(ValueError, match="'mine' exists already"):
        parts.register("mine")(type("Mine", (), {"__module__": "third"}))


def test_plugin_owns_registered_classes_that_it_imports(parts: Registry[type]) -> None:
    with registering_for("plugin_a"):
        parts.register("borrowed")(parts.load("one"))
    assert parts.owner("borrowed") == "plugin_a"
    with registering_for("plugin_b"), pytest.raises(ValueError, match="'borrowed' exists already"):
        parts.register("borrowed")(parts.load("one"))


@pytest.mark.parametrize("name", ["none", "on", "off"])
def test_a_memory_cannot_take_the_word_of_a_level(name: str) -> None:
    with pytest.raises(ValueError, match=f"the memory name '{name}' is reserved"):
        MEMORIES.register(name)


def test_nor_a_regularizer_that_of_its_absence() -> None:
    with pytest.raises(ValueError, match="the regularizer name 'baseline' is reserved"):
        REGULARIZERS.register("baseline")
