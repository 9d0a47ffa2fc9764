"""Merged settings -> one checked, frozen cell. Knows which line to blame when something does not fit."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from ..model import registry
from ..model.config import ModelConfigError
from . import probes
from .cell import Cell, CellConfig, Plugin, cell_id, slug
from .errors import GridError
from .paths import Layer, Setting, nested
from .plugins import source_of
from .training import corpora, tokenizer

Problem = tuple[str, str, list[str], str | None]
"""(dotted path, what is wrong, what is allowed, the wrong word)."""


def cell_config(merged: Layer, *, seed: int, plugins: tuple[Plugin, ...] = ()) -> CellConfig:
    """Validates merged settings and completes the mixer's and memory's own; the corpus fingerprint is still open.

    Raises GridError with the file and line that set the offending value.
    """
    tree = nested({path: setting.value for path, setting in merged.items()})
    try:
        config = CellConfig.model_validate({**tree, "seed": seed, "plugins": plugins})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise _blame(merged, _problem(path, first)) from error
    for problem in _names(config):
        raise _blame(merged, problem)
    try:
        model = _checked_model(config.model.model_dump_json())
    except ModelConfigError as error:
        raise _blame(merged, (error.path, error.message, list(error.allowed or []), None)) from error
    model = model.model_copy(update={"mixer_source": source_of(model.attn_type, plugins)})
    config = config.model_copy(update={"model": model})
    for problem in _agreement(config):
        raise _blame(merged, problem)
    return config


@functools.lru_cache(maxsize=4096)
def _checked_model(dump: str) -> Any:
    from ..model.config import ModelConfig
    from ..model.resolve import check_model_config

    return check_model_config(ModelConfig.model_validate_json(dump))


def with_fingerprint(config: CellConfig, fingerprint: str) -> CellConfig:
    """The config with its corpus pinned."""
    return config.model_copy(update={"data": config.data.model_copy(update={"fingerprint": fingerprint})})


def make_cell(config: CellConfig, words: Mapping[str, str]) -> Cell:
    """Gives a complete config its id and slug; `words` are the levels of the grid's axes."""
    from .axes import AXES

    extra = {name: word for name, word in words.items() if name not in AXES}
    return Cell(id=cell_id(config), slug=slug(config, extra), config=config, axes=dict(words))


def _problem(path: str, error: Mapping[str, Any]) -> Problem:
    value = error.get("input")
    allowed: list[str] = []
    if error["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return path, f"no such value {value!r}", allowed, str(value)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if error["type"] == "value_error":
        return path, message, allowed, None
    return path, f"must be {message}, got {value!r}", allowed, None


def _names(config: CellConfig) -> Iterable[Problem]:
    checks: list[tuple[str, str, Iterable[str]]] = [
        ("model.attn_type", config.model.attn_type, registry.MIXERS),
        ("model.memory", config.model.memory, ["none", *registry.MEMORIES]),
        ("train.regularizer", config.train.regularizer, ["baseline", *registry.REGULARIZERS]),
        ("data.corpus", config.data.corpus, corpora.CORPORA),
        ("data.tokenizer", config.data.tokenizer, tokenizer.TOKENIZERS),
        *(("eval.probes", name, probes.PROBES) for name in config.eval.probes),
    ]
    for path, name, allowed in checks:
        if name not in allowed:
            yield path, f"no such name {name!r}", list(allowed), name


def _agreement(config: CellConfig) -> Iterable[Problem]:
    """What no single field can know."""
    need = tokenizer.TOKENIZERS[config.data.tokenizer].vocabulary
    if config.model.vocab_size < need:
        yield (
            "model.vocab_size",
            f"is {config.model.vocab_size}, but tokenizer {config.data.tokenizer} has {need} tokens",
            [],
            None,
        )
    if config.train.distractor and not registry.mixer(config.model.attn_type).has_distractor:
        message = (
            f"mixer {config.model.attn_type} has no distractor loss; exclude that combination, or give the mixer one"
        )
        yield "train.distractor", message, [], None


def _blame(merged: Layer, problem: Problem) -> GridError:
    """The error at the setting that caused it: the same path, else the most telling one below it, else the file's head."""
    path, message, allowed, word = problem

    def rank(item: tuple[str, Setting]) -> tuple[int, int]:
        name, setting = item
        named = re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", message) is not None
        return (
            2 if name == path or path.startswith(name + ".") else int(named) + int(name.startswith(path + ".")) - 1,
            setting.line or 0,
        )

    candidates = [item for item in merged.items() if rank(item)[0] >= 1] or [
        item for item in merged.items() if item[0].startswith(path)
    ]
    if not candidates:
        return GridError("grid", None, path, message, allowed, word)
    where = max(candidates, key=rank)[1]
    shown = where.key if where.key.endswith(path) or path.endswith(where.key) else f"{where.key} ({path})"
    return GridError(where.file, where.line, shown, message, allowed, word)
