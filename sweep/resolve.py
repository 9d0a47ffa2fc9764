"""Merged settings -> one checked, frozen cell. Knows which line to blame when something does not fit."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from ..model import registry
from ..model.config import ModelConfigError
from . import probes
from .cell import Cell, CellConfig, Plugin, id_of, identity, slug
from .errors import GridError
from .paths import Layer, nested
from .plugins import source_of
from .training import tokenizer
from .training.corpora import CorpusUnknown


class Problem(NamedTuple):
    """Something wrong with a config, not yet traced to a line."""

    paths: tuple[str, ...]
    """Dotted paths that have a part in it; the setting of one of them that had the last word is blamed."""
    message: str
    allowed: Sequence[str] = ()
    word: str | None = None
    """The word that is wrong, if it may be a misspelling of an allowed one."""


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
        raise _blame(merged, _model_problem(merged, error)) from error
    model = model.model_copy(update={"mixer_source": source_of(model.attn_type, plugins)})
    config = config.model_copy(update={"model": model})
    for problem in (*_infinite(config), *_agreement(config)):
        raise _blame(merged, problem)
    return config


@functools.lru_cache(maxsize=4096)
def _checked_model(dump: str) -> Any:
    from ..model.config import ModelConfig
    from ..model.resolve import check_model_config

    return check_model_config(ModelConfig.model_validate_json(dump))


def unknown_corpus(merged: Layer, error: CorpusUnknown) -> GridError:
    """The error at the line that names a corpus which is neither built in nor prepared."""
    message = (
        f"no corpus {error.name!r} is built in or prepared; atma-sweep data prepare PATH --name {error.name} would"
    )
    return _blame(merged, Problem(("data.corpus",), message, error.allowed, error.name))


def with_fingerprint(config: CellConfig, fingerprint: str) -> CellConfig:
    """The config with its corpus pinned."""
    return config.model_copy(update={"data": config.data.model_copy(update={"fingerprint": fingerprint})})


def make_cells(config: CellConfig, words: Mapping[str, str], seeds: Sequence[int]) -> list[Cell]:
    """A complete config with each seed, its id and its slug; `words` are the levels of the grid's axes."""
    from .axes import AXES

    extra = {name: word for name, word in words.items() if name not in AXES}
    base, stem = identity(config), slug(config, extra).removesuffix(f"s{config.seed}")
    return [
        Cell(
            id=id_of({**base, "seed": seed}),
            slug=f"{stem}s{seed}",
            config=config if seed == config.seed else config.model_copy(update={"seed": seed}),
            axes=dict(words),
        )
        for seed in seeds
    ]


def _problem(path: str, error: Mapping[str, Any]) -> Problem:
    value = error.get("input")
    if error["type"] == "literal_error":
        return Problem(
            (path,), f"no such value {value!r}", re.findall(r"'([^']*)'", error["ctx"]["expected"]), str(value)
        )
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return Problem((path,), message)
    return Problem((path,), f"{_must_be(message)}, got {value!r}")


def _model_problem(merged: Layer, error: ModelConfigError) -> Problem:
    setting = merged.get(error.path)
    if error.allowed and setting is not None:
        return Problem((error.path,), f"no such value {setting.value!r}", error.allowed, str(setting.value))
    return Problem((error.path,), _must_be(error.message), error.allowed or [])


def _must_be(message: str) -> str:
    return re.sub("^Input should be ", "must be ", message)


def _names(config: CellConfig) -> Iterator[Problem]:
    checks: list[tuple[str, str, Iterable[str]]] = [
        ("model.attn_type", config.model.attn_type, registry.MIXERS),
        ("model.memory", config.model.memory, ["none", *registry.MEMORIES]),
        ("train.regularizer", config.train.regularizer, ["baseline", *registry.REGULARIZERS]),
        ("data.tokenizer", config.data.tokenizer, tokenizer.TOKENIZERS),
        *(("eval.probes", name, probes.PROBES) for name in config.eval.probes),
    ]
    for path, name, allowed in checks:
        if name not in allowed:
            yield Problem((path,), f"no such name {name!r}", list(allowed), name)


def _infinite(config: CellConfig) -> list[Problem]:
    dump = config.model_dump(mode="python")
    try:
        json.dumps(dump, allow_nan=False, default=str)
    except ValueError:  # it says not where
        return list(_finite(dump))
    return []


def _finite(values: Any, path: str = "") -> Iterator[Problem]:
    """Infinity and NaN have no place in JSON, so none in an id."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _finite(value, f"{path}.{name}" if path else name)
    elif isinstance(values, float) and not math.isfinite(values):
        yield Problem((path,), f"must be a finite number, got {values}")


def _agreement(config: CellConfig) -> Iterator[Problem]:
    """What no single field can know."""
    data = config.data
    need = tokenizer.TOKENIZERS[data.tokenizer].vocabulary
    if need is None:
        try:
            need = tokenizer.load_tokenizer(data.tokenizer, data.tokenizer_file, data.end_of_text).vocabulary
        except tokenizer.TokenizerError as error:
            yield Problem(("data.tokenizer_file", "data.tokenizer"), str(error))
            return
    if config.model.vocab_size < need:
        yield Problem(
            ("model.vocab_size", "data.tokenizer"),
            f"model.vocab_size is {config.model.vocab_size}, but tokenizer {config.data.tokenizer} has {need} tokens",
        )
    if config.train.distractor and not registry.mixer(config.model.attn_type).has_distractor:
        yield Problem(
            ("train.distractor", "model.attn_type"),
            f"mixer {config.model.attn_type} has no distractor loss; exclude that combination, or give the mixer one",
        )


def _blame(merged: Layer, problem: Problem) -> GridError:
    """The error at the setting that caused it.

    That is a setting of one of the problem's paths, else one in the same section that the message names, else any in
    it; among several the one that had the last word. Without any, defaults disagree and there is no line.
    """
    section = problem.paths[0].partition(".")[0] + "."

    def at(name: str) -> bool:
        return any(path == name or path.startswith(name + ".") for path in problem.paths)

    def named(name: str) -> bool:
        return (
            name.startswith(section)
            and re.search(rf"\b{re.escape(name.split('.')[-1])}\b", problem.message) is not None
        )

    for fits in (at, named, lambda name: any(name.startswith(path + ".") for path in problem.paths)):
        found = [setting for name, setting in merged.items() if fits(name)]
        if found:
            where = found[-1]
            return GridError(where.file, where.line, where.key, problem.message, problem.allowed, problem.word)
    return GridError("grid", None, problem.paths[0], problem.message, problem.allowed, problem.word)
