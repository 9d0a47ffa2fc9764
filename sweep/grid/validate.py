"""Merged settings -> checked, frozen sections of a config. Knows which line to blame when something does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ...model import registry
from ...model.config import ModelConfig, ModelConfigError, quoted
from ...model.resolve import NO_MEMORY, check_model_config, longest_text, memory_settings
from .. import probes
from ..config import CellConfig, DataConfig, EvalConfig, Plugin, Resources, TrainConfig
from ..data import tokenizer
from ..data.corpora import CorpusError, CorpusUnknown, PreparedCorpus
from ..data.registry import CORPORA, every_kind
from ..errors import GridError
from .plugins import with_sources
from .settings import Layer, Setting, nested

FP8_MULTIPLE = 16
"""Of which the widths of matrices must be multiples; torch's products of 8-bit matrices ask for it."""


class InvalidConfig(Exception):
    """A config that cannot be, not yet traced to a line; `blame` says where it was written."""

    def __init__(
        self, paths: tuple[str, ...], message: str, allowed: Iterable[str] = (), word: str | None = None
    ) -> None:
        """Take the dotted paths that have a part in it, the message, and a word that may be a misspelling of an allowed one.

        The setting of one of the paths that had the last word is blamed.
        """
        self.paths, self.message, self.allowed, self.word = paths, message, allowed, word
        super().__init__(message)


def section(name: str, layer: Layer, plugins: tuple[Plugin, ...] = ()) -> Any:
    """One section of a config from the settings that reach it, complete and checked. Raises Invalid.

    A mixer's and a memory's own settings are filled in; the corpus's fingerprint is still open.
    """
    tree = nested({path: setting.value for path, setting in layer.items()}).get(name, {})
    cls: Any = CellConfig.model_fields[name].annotation
    config = _validated(cls, tree, name)
    _check_names(name, config)
    if isinstance(config, ModelConfig):
        try:
            config = check_model_config(config)
        except ModelConfigError as error:
            raise _invalid_model(layer, error) from error
    if isinstance(config, EvalConfig):
        config = _with_probe_settings(config)
    if isinstance(config, DataConfig):
        config = _with_corpus_settings(config)
    config = with_sources(name, config, plugins)
    _check_finite(config.model_dump(), name)
    return config


def _validated(cls: type[BaseModel], values: Any, path: str) -> Any:
    """Return the config of that class; raises Invalid for the first value below `path` that does not fit."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _invalid_value(".".join([path, *map(str, first["loc"])]), first) from error


def _with_probe_settings(config: EvalConfig) -> EvalConfig:
    """Return the section with the settings of its probes filled in."""
    for name, values in config.settings.items():
        _validated(probes.PROBES.load(name).Config, values, f"eval.settings.{name}")
    return probes.with_settings(config)


def _with_corpus_settings(config: DataConfig) -> DataConfig:
    """Return the section with the settings of its own corpus filled in, and none of others."""
    checked = {
        name: _validated(CORPORA.load(name).Config, values, f"data.settings.{name}").model_dump(mode="json")
        for name, values in config.settings.items()
    }
    own = CORPORA.load(config.corpus).Config if config.corpus in CORPORA else None
    if own is None or not own.model_fields:
        return config.model_copy(update={"settings": {}})
    settings = checked.get(config.corpus) or own().model_dump(mode="json")
    return config.model_copy(update={"settings": {config.corpus: settings}})


def corpus_fingerprint(data: DataConfig, fingerprint: Callable[[DataConfig], str]) -> str:
    """The fingerprint of the section's corpus; raises Invalid for a name that nothing has, and for a setting of the section
    that the corpus cannot be made with.
    """
    try:
        return fingerprint(data)
    except CorpusUnknown as error:
        message = (
            f"no corpus {error.name!r} is built in or prepared; atma-sweep data prepare PATH --name {error.name} would"
        )
        raise InvalidConfig(("data.corpus",), message, error.allowed, error.name) from error
    except CorpusError as error:
        setting = re.match(r"(data\.\w+): ", str(error))
        if setting is None:
            raise
        raise InvalidConfig((setting[1],), str(error).removeprefix(setting[0])) from error


def _invalid_value(path: str, error: Mapping[str, Any]) -> InvalidConfig:
    value = error.get("input")
    if error["type"] == "literal_error":
        return InvalidConfig(
            (path,), f"no such value {quoted(value)}", re.findall(r"'([^']*)'", error["ctx"]["expected"]), str(value)
        )
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return InvalidConfig((path,), message)
    return InvalidConfig((path,), f"{_as_requirement(message)}, got {quoted(value)}")


def _invalid_model(merged: Layer, error: ModelConfigError) -> InvalidConfig:
    setting = merged.get(error.path)
    if error.allowed and setting is not None:
        return InvalidConfig((error.path,), f"no such value {setting.value!r}", error.allowed, str(setting.value))
    return InvalidConfig((error.path,), _as_requirement(error.message), error.allowed or ())


def _as_requirement(message: str) -> str:
    return re.sub("^Input should be ", "must be ", message)


def _check_names(section: str, config: Any) -> None:
    tables: dict[str, Iterable[str]] = {
        "model.attn_type": registry.MIXERS,
        "model.memory": ["none", *registry.MEMORIES],
        "model.positions": ["none", *registry.POSITIONS],
        "train.regularizer": ["baseline", *registry.REGULARIZERS],
        "data.tokenizer": tokenizer.TOKENIZERS,
        "eval.probes": probes.PROBES,
    }
    for path, allowed in tables.items():
        section_name, _, field = path.partition(".")
        if section_name != section:
            continue
        value = getattr(config, field)
        for name in (value,) if isinstance(value, str) else value:
            if name not in allowed:
                raise InvalidConfig((path,), f"no such name {name!r}", list(allowed), name)


def _check_finite(values: Any, path: str) -> None:
    """Raise Invalid for what is infinite or NaN, which has no place in JSON, so none in an id."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            _check_finite(value, f"{path}.{name}")
    elif isinstance(values, float) and not math.isfinite(values):
        raise InvalidConfig((path,), f"must be a finite number, got {values}")


def check_agreement(
    model: ModelConfig, data: DataConfig, train: TrainConfig, prepared: PreparedCorpus | None = None
) -> None:
    """Raise Invalid for what no single section can know; `prepared` is the corpus when it was prepared under a name."""
    need = prepared.vocabulary if prepared is not None else tokenizer.TOKENIZERS[data.tokenizer].vocabulary
    if need is None:
        try:
            need = tokenizer.load_tokenizer(data.tokenizer, data.tokenizer_file, data.end_of_text).vocabulary
        except tokenizer.TokenizerError as error:
            raise InvalidConfig(("data.tokenizer_file", "data.tokenizer"), str(error)) from error
    if model.vocab_size < need:
        has = f"tokenizer {data.tokenizer} has {need} tokens"
        if prepared is not None:
            has = f"corpus {prepared.name!r} was prepared with tokenizer {prepared.tokenizer} of {need} tokens"
        raise InvalidConfig(
            ("model.vocab_size", "data.tokenizer"), f"model.vocab_size is {model.vocab_size}, but {has}"
        )
    kind = CORPORA.load(data.corpus) if data.corpus in CORPORA else None
    if train.loss_on == "marked" and not (kind is not None and kind.may_mark if prepared is None else prepared.marked):
        able = ", ".join(name for name, corpus_kind in every_kind().items() if corpus_kind.may_mark)
        raise InvalidConfig(
            ("train.loss_on",),
            f"corpus {data.corpus} does not mark which tokens count; set train.loss_on to all, or name one that may: "
            f"{able}",
        )
    row = kind and kind.row_length(kind.Config.model_validate(data.settings.get(data.corpus, {})))
    if row is not None and row != train.seq_len:
        raise InvalidConfig(
            (f"data.settings.{data.corpus}.length", "train.seq_len"),
            f"train.seq_len is {train.seq_len}, but the rows of corpus {data.corpus} have {row} tokens "
            f"(data.settings.{data.corpus}.length); make them the same",
        )
    if not model.n_global_layers:
        raise InvalidConfig(
            ("model.attn_offset", "model.attn_every", "model.n_layers"),
            f"none of the {model.n_layers} blocks is global, so mixer {model.attn_type} has no place; "
            f"set model.attn_offset, which is {model.attn_offset}, below model.n_layers",
        )
    longest = longest_text(model)
    if longest is not None and longest < train.seq_len:
        raise InvalidConfig(
            (f"model.position_settings.{model.positions}", "model.positions", "train.seq_len"),
            f"positions {model.positions} has {longest} places, fewer than train.seq_len ({train.seq_len}); "
            f"set model.position_settings.{model.positions}.length to as many as the longest text has",
        )
    if model.memory != NO_MEMORY:
        why = registry.MEMORIES.load(model.memory).unfit(memory_settings(model), train.seq_len)
        if why is not None:
            section = f"model.memories.{model.memory}"
            raise InvalidConfig((section, "model.memory"), f"{section}: {why}")
    if train.distractor and not registry.MIXERS.load(model.attn_type).has_distractor:
        raise InvalidConfig(
            ("train.distractor", "model.attn_type"),
            f"mixer {model.attn_type} has no distractor loss; exclude that combination, or give the mixer one",
        )


def check_precision(model: ModelConfig, train: TrainConfig, resources: Resources) -> None:
    """Raise Invalid for a `train.precision` that the network or the machine, as far as the grid says it, does not allow."""
    if train.precision == "bf16":
        return
    if not resources.gpus:
        raise InvalidConfig(
            ("train.precision", "resources.gpus"),
            f"train.precision is {train.precision}, which only a GPU computes in, and resources.gpus is 0; "
            "set train.precision to bf16, with which the CPU computes in float32",
        )
    if train.precision != "fp8":
        return
    widths = {
        "model.d_model": model.d_model,
        "model.n_heads times model.head_dim": model.n_heads * model.head_dim,
        "model.n_kv_heads times model.head_dim": model.n_kv_heads * model.head_dim,
    }
    for name, width in widths.items():
        if width % FP8_MULTIPLE:
            raise InvalidConfig(
                ("train.precision", "model.d_model", "model.head_dim"),
                f"train.precision is fp8, whose products take multiples of {FP8_MULTIPLE}, and {name} is {width}; "
                f"make it a multiple of {FP8_MULTIPLE}, or set train.precision to bf16",
            )


def base_of(setting: Setting, grid: Path) -> str | None:
    """Return the name of the base that makes a setting of the file `grid`; None for one of the file or the command line."""
    return setting.file.stem if isinstance(setting.file, Path) and setting.file != grid else None


def blame(merged: Layer, problem: InvalidConfig, grid: Path) -> GridError:
    """The error at the setting that caused it; a setting of a base is said to be inherited by the file `grid`.

    That is a setting below one of the problem's paths that the message names, else one of the paths, else one in the same section
    that the message names, else any in it; among several the one that had the last word. Without any, defaults disagree and there is no line.
    """
    section = problem.paths[0].partition(".")[0] + "."

    def is_at(path: str) -> bool:
        return any(path == path or path.startswith(path + ".") for path in problem.paths)

    def is_below(path: str) -> bool:
        return any(path.startswith(path + ".") for path in problem.paths)

    def is_named(path: str) -> bool:
        return (
            path.startswith(section)
            and re.search(rf"\b{re.escape(path.split('.')[-1])}\b", problem.message) is not None
        )

    for fits in (lambda name: is_below(name) and is_named(name), is_at, is_named, is_below):
        candidates = [setting for name, setting in merged.items() if fits(name)]
        if candidates:
            setting = candidates[-1]
            base, key = base_of(setting, grid), setting.key.removeprefix("set.")
            more = f"; inherited from base {base}: set {key} in {grid.name} to change it" if base is not None else ""
            return GridError(
                setting.file, setting.line, setting.key, problem.message + more, problem.allowed, problem.word
            )
    return GridError("grid", None, problem.paths[0], problem.message, problem.allowed, problem.word)
