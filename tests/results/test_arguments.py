"""Arguments of another type are refused by name where a user passes them, before anything is looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import atma_sweep
import numpy as np
import pytest
from atma_sweep.results import open_store
from atma_sweep.results.arguments import COUNT, FLAG, NUMBER, check_argument
from atma_sweep.sweep.attempt.trained_cells import LoadedModel

WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (open_store, (5,), {}, "open_store: url_or_path must be a str or a path or None, got int 5"),
    (open_store, (b"atma.db",), {}, "open_store: url_or_path must be a str or a path or None, got bytes b'atma.db'"),
    (open_store, ("atma.db",), {"create": 1}, "open_store: create must be True or False, got int 1"),
    (open_store, ("atma.db",), {"patience": "1"}, "open_store: patience must be a number, got str '1'"),
    (atma_sweep.load, (5,), {}, "load: cell must be a str, got int 5"),
    (atma_sweep.load, (None,), {}, "load: cell must be a str, got NoneType None"),
    (atma_sweep.load, ("a",), {"db": 5}, "load: db must be a str or a path or None, got int 5"),
    (atma_sweep.load, ("a",), {"runs": ["x"]}, "load: runs must be a str or a path or None, got list ['x']"),
    (atma_sweep.load, ("a",), {"sweep": 1.5}, "load: sweep must be a str or None, got float 1.5"),
    (atma_sweep.load, ("a",), {"device": None}, "load: device must be a str, got NoneType None"),
]
GENERATED = [
    ({"prompt": 5}, "generate: prompt must be a str, got int 5"),
    ({"tokens": 2.5}, "generate: tokens must be an int, got float 2.5"),
    ({"tokens": True}, "generate: tokens must be an int, got bool True"),
    ({"temperature": "hot"}, "generate: temperature must be a number, got str 'hot'"),
    ({"top_p": None}, "generate: top_p must be a number, got NoneType None"),
    ({"seed": "0"}, "generate: seed must be an int, got str '0'"),
    ({"full_context": "no"}, "generate: full_context must be True or False, got str 'no'"),
]


@pytest.mark.parametrize(("function", "positional", "named", "message"), WRONG)
def test_arguments_of_another_type_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, positional: Any, named: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as caught:
        function(*positional, **named)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("named", "message"), GENERATED)
def test_generate_names_arguments_of_another_type(named: dict[str, Any], message: str) -> None:
    trained = LoadedModel(None, None, None, "0123456789ab", "polar-s0")  # type: ignore[arg-type]
    with pytest.raises(TypeError) as caught:
        trained.generate(**named)
    assert str(caught.value) == message


def test_frames_name_arguments_of_another_type(tmp_path: Path) -> None:
    store = open_store(tmp_path / "atma.db", create=True)
    for named, message in (
        ({"sweep": 5}, "frames: sweep must be a str or None, got int 5"),
        ({"revision": "1"}, "frames: revision must be an int or None, got str '1'"),
    ):
        with pytest.raises(TypeError) as caught:
            store.frames(**named)  # type: ignore[arg-type]
        assert str(caught.value) == message


def test_numbers_of_numpy_are_numbers() -> None:
    check_argument("f", "n", np.int64(3), COUNT)
    check_argument("f", "x", np.float32(0.5), NUMBER)
    check_argument("f", "x", 1, NUMBER)
    check_argument("f", "yes", True, FLAG)
    check_argument("f", "n", None, COUNT, optional=True)
