"""Validation of config sections from merged settings, with errors traced to the line that caused them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ...model import registry
from ...model.config import ModelConfig, ModelConfigError, quoted
from ...model.resolve import NO_MEMORY, check_model_config, has_distractor, longest_text, memory_settings
from .. import probes
from ..config import CellConfig, DataConfig, EvalConfig, Plugin, Resources, TrainConfig
from ..data import tokenizer
from ..data.corpora import CorpusError, CorpusUnknown, PreparedCorpus
from ..data.registry import CORPORA, all_kinds
from ..errors import GridError
from ..training import flops
from .plugins import with_sources
from .settings import Layer, Setting, missing_library, nested

FP8_MULTIPLE = 16
"""Divisor that torch's 8-bit matrix products require of matrix widths."""


class InvalidConfig(Exception):
    """Raised for a config that is not valid; `blame` traces it to the line that wrote it."""

    def __init__(
        self, paths: tuple[str, ...], message: str, allowed: Iterable[str] = (), word: str | None = None
    ) -> None:
        """Store the problem.

        Args:
            paths: Dotted paths that take part in it; the error later points to the last setting of one of them.
            message: Text of the problem.
            allowed: Allowed values.
            word: Word that may be a misspelling of an allowed value.
        """
        self.paths, self.message, self.allowed, self.word = paths, message, allowed, word
        super().__init__(message)


def section(name: str, layer: Layer, plugins: tuple[Plugin, ...] = ()) -> Any:
    """Return one section of a config, complete and checked on its own.

    Settings of the section's mixer, memory, probes and corpus are filled in; the corpus fingerprint is still missing.

    Args:
        name: Section, such as "model".
        layer: Dotted path -> setting; those of other sections are ignored.
        plugins: Loaded plugins, whose hashes are filled in for the parts that they define.

    Raises:
        InvalidConfig: If the section is not valid.
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
    """Return `values` as a config of class `cls`.

    Raises InvalidConfig for the first value that does not fit, at its dotted path below `path`.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _invalid_value(".".join([path, *map(str, first["loc"])]), first) from error


def _with_probe_settings(config: EvalConfig) -> EvalConfig:
    """Return the eval section with the settings of its probes filled in.

    Raises InvalidConfig for invalid settings, and for a text that does not exist.
    """
    for path in config.texts:
        if not os.path.exists(path):
            raise InvalidConfig(("eval.texts",), f"{path} does not exist")
    for name, values in config.settings.items():
        _validated(probes.PROBES.load(name).Config, values, f"eval.settings.{name}")
    return probes.with_settings(config)


def _with_corpus_settings(config: DataConfig) -> DataConfig:
    """Return the data section with the settings of its own corpus filled in and those of other corpora removed.

    Settings of the others are checked too. A corpus without settings, or that is not registered, gets {}. Raises
    InvalidConfig for invalid settings.
    """
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
    """Return the SHA-256 of the section's corpus.

    Args:
        data: The data section.
        fingerprint: Computes or looks up the hash; called once.

    Raises:
        InvalidConfig: For an unknown corpus, and for a data setting with which the corpus cannot be prepared (a
            CorpusError that begins with the setting's path).
        CorpusError: For any other error of the corpus.
    """
    try:
        return fingerprint(data)
    except CorpusUnknown as error:
        message = f"no built-in or prepared corpus {error.name!r}; atma-sweep data prepare PATH --name {error.name} prepares one"
        raise InvalidConfig(("data.corpus",), message, error.allowed, error.name) from error
    except CorpusError as error:
        setting = re.match(r"(data\.\w+): ", str(error))
        if setting is None:
            raise
        raise InvalidConfig((setting[1],), str(error).removeprefix(setting[0])) from error


def _invalid_value(path: str, error: Mapping[str, Any]) -> InvalidConfig:
    """Return the InvalidConfig for a pydantic error at `path`, in the wording of grid errors.

    For a literal, its allowed values are listed and the value is the word that may be misspelled.
    """
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
    """Return the InvalidConfig for an error of a model config.

    It names the written value if allowed values are known.
    """
    setting = merged.get(error.path)
    if error.allowed and setting is not None:
        return InvalidConfig((error.path,), f"no such value {setting.value!r}", error.allowed, str(setting.value))
    return InvalidConfig((error.path,), _as_requirement(error.message), error.allowed or ())


def _as_requirement(message: str) -> str:
    return re.sub("^Input should be ", "must be ", message)


def _check_names(section: str, config: Any) -> None:
    """Raise InvalidConfig for an unknown name of a part or probe in the section.

    Checked are mixer, memory, position scheme, regularizer, tokenizer and probes. Unknown corpora are noticed later,
    when their fingerprint is looked up.
    """
    tables: dict[str, Iterable[str]] = {
        "model.attn_type": ["none", *registry.MIXERS.every_name()],
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
                choices = [choice for choice in allowed if (":" in choice) == (":" in name)]
                raise InvalidConfig((path,), f"no such name {name!r}{missing_library(name)}", choices, name)


def _check_finite(values: Any, path: str) -> None:
    """Raise InvalidConfig for an infinite or NaN number, which JSON and so an id cannot hold.

    Mappings are searched at every depth; lists are not.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            _check_finite(value, f"{path}.{name}")
    elif isinstance(values, float) and not math.isfinite(values):
        raise InvalidConfig((path,), f"must be a finite number, got {values}")


def check_agreement(
    model: ModelConfig, data: DataConfig, train: TrainConfig, prepared: PreparedCorpus | None = None
) -> None:
    """Raise InvalidConfig for the first contradiction between settings of different sections.

    May load the tokenizer's file. Checked in this order:

    - `vocab_size` is at least the tokenizer's vocabulary.
    - The corpus can mark targets, for `loss_on: marked`.
    - Rows of the corpus, if their length is fixed, have `seq_len` tokens.
    - At least one layer is global.
    - The position table, if there is one, is at least as long as a row.
    - The memory is of use for rows of that length.
    - The mixer is small enough to be matched, with `match: parameters`.
    - The mixer has a distractor loss, if `train.distractor` is on.

    Args:
        model: Model section.
        data: Data section, without fingerprint.
        train: Train section.
        prepared: The corpus, if the grid names a prepared one; its vocabulary and marks then decide.
    """
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
            ("model.vocab_size", "data.tokenizer"),
            f"model.vocab_size is {model.vocab_size}, but {has}; raise it to {need} or more",
        )
    kind = CORPORA.load(data.corpus) if data.corpus in CORPORA else None
    if train.loss_on == "marked" and not (kind is not None and kind.may_mark if prepared is None else prepared.marked):
        able = ", ".join(name for name, corpus_kind in all_kinds().items() if corpus_kind.may_mark)
        raise InvalidConfig(
            ("train.loss_on",),
            f"corpus {data.corpus} does not mark which tokens count; set train.loss_on: all, or use a corpus that can: "
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
            f"none of the {model.n_layers} blocks is global, so mixer {model.attn_type} is not used; "
            f"set model.attn_offset ({model.attn_offset}) below model.n_layers",
        )
    longest = longest_text(model)
    if longest is not None and longest < train.seq_len:
        raise InvalidConfig(
            (f"model.position_settings.{model.positions}", "model.positions", "train.seq_len"),
            f"position scheme {model.positions} supports at most {longest} tokens, fewer than train.seq_len "
            f"({train.seq_len}); set model.position_settings.{model.positions}.length to at least the longest "
            "context",
        )
    if model.memory != NO_MEMORY:
        why = registry.MEMORIES.load(model.memory).unfit(memory_settings(model), train.seq_len)
        if why is not None:
            section = f"model.memories.{model.memory}"
            raise InvalidConfig((section, "model.memory"), f"{section}: {why}")
    try:
        flops.global_mlp_width(model)
    except ModelConfigError as error:
        raise InvalidConfig((error.path, "model.attn_type"), error.message) from error
    if train.distractor and not has_distractor(model.attn_type):
        raise InvalidConfig(
            ("train.distractor", "model.attn_type"),
            f"mixer {model.attn_type} has no distractor loss; exclude that combination, or implement the loss for the mixer",
        )


def check_precision(model: ModelConfig, train: TrainConfig, resources: Resources) -> None:
    """Raise InvalidConfig if the network or the requested resources do not allow `train.precision`.

    bf16 always passes. fp16 and fp8 need a GPU; fp8 also needs widths that are multiples of 16.
    """
    if train.precision == "bf16":
        return
    if not resources.gpus:
        raise InvalidConfig(
            ("train.precision", "resources.gpus"),
            f"train.precision is {train.precision}, which needs a GPU, but resources.gpus is 0; "
            "set train.precision to bf16 (float32 on the CPU), or request a GPU",
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
                f"train.precision is fp8, which needs multiples of {FP8_MULTIPLE}, but {name} is {width}; "
                f"make it a multiple of {FP8_MULTIPLE}, or set train.precision to bf16",
            )


def check_ranks(train: TrainConfig, resources: Resources) -> None:
    """Raise InvalidConfig if a cell has more GPUs, or ranks on the CPU, than a step has micro-batches to divide."""
    name = f"resources.{'gpus' if resources.gpus else 'ranks'}"
    problem = train.ranks_problem(name, resources.n_ranks)
    if problem is not None:
        raise InvalidConfig((name, "train.micro_batch", "train.batch_tokens"), problem)


def base_of(setting: Setting, grid: Path) -> str | None:
    """Return the file name without ending of the base that wrote a setting.

    None for the grid file `grid` itself or the command line.
    """
    return setting.file.stem if isinstance(setting.file, Path) and setting.file != grid else None


def blame(merged: Layer, problem: InvalidConfig, grid: Path) -> GridError:
    """Return the GridError of a problem, at the line of the setting that most likely caused it.

    The first rule that matches any setting decides, and of several settings the last one in the layer is used:

    1. It is below one of the problem's paths, and the message names it.
    2. It is at or below one of the paths.
    3. It is in the section of the first path, and the message names it.

    Without any, defaults disagree and the error has no line. A setting of a base is reported as inherited.

    Args:
        merged: All settings of the cell, in rising precedence.
        problem: The problem.
        grid: Path of the grid file.
    """
    section = problem.paths[0].partition(".")[0] + "."

    def is_at(name: str) -> bool:
        return any(path == name or path.startswith(name + ".") for path in problem.paths)

    def is_below(name: str) -> bool:
        return any(name.startswith(path + ".") for path in problem.paths)

    def is_named(name: str) -> bool:
        return (
            name.startswith(section)
            and re.search(rf"\b{re.escape(name.split('.')[-1])}\b", problem.message) is not None
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
