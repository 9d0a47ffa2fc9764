"""Expansion of a grid's combinations into cells, with shared work cached.

Cells of one grid differ in a few settings each, so most config sections and parts of ids are computed once and shared
as the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..config import SECTIONS, CellConfig, DataConfig
from ..data import corpora, tokenizer
from ..data.corpora import PreparedCorpus
from ..data.registry import CORPORA
from . import initial, settings, validate
from .cell import Cell, base_slug, canonical_json, data_identity, id_of_parts, model_identity, slug_part, train_identity
from .settings import Layer, Setting
from .yaml_document import GridDocument

Combination = Mapping[str, Any]
"""Axis -> level, as written in the file."""
Fingerprint = Callable[[DataConfig], str]
_ALL_FIELDS = set(CellConfig.model_fields)
SEARCH, TUNE = "search", "tune"
"""Keys of the grid file that declare studies."""


@dataclass(frozen=True, eq=False)
class _ResolvedLevel:
    """A level of an axis as written at one line of the file, with the settings that it makes."""

    axis: str
    word: str
    """The level as text."""
    setting: Setting
    layer: Layer
    sections: tuple[str, ...]
    """Sections of the config that the level changes."""
    slug: str | None
    """Text that the level adds to a slug; None for the five built-in axes, which every slug has."""


@dataclass(frozen=True)
class _ResolvedSection:
    """A complete section of a config, with its part of the cell's id."""

    config: Any
    identity: str = ""
    prepared: PreparedCorpus | None = None
    """Data section only: the corpus, if it was prepared under the name that the section gives."""


class Expansion:
    """Factory of a grid's cells, one combination at a time; caches levels, sections and fingerprints."""

    def __init__(self, grid: Any, fingerprint: Fingerprint, prepared: PreparedLookup) -> None:
        """Index the grid's settings by section.

        Args:
            grid: A `grid.Grid`, typed Any because this module must not import it.
            fingerprint: Returns the SHA-256 of the corpus of a data section; called once per section.
            prepared: Returns the corpus prepared under a name, or None.
        """
        self._grid, self._fingerprint, self._prepared = grid, fingerprint, prepared
        study = grid.search is not None
        self._levels_key = f"{TUNE if grid.study_level else SEARCH}.ranges" if study else "axes"
        """Key of the file under which levels stand, by axis."""
        self._layers: Sequence[Layer] = grid.layers
        self._command_line: Layer = grid.command_line
        self._document: GridDocument = grid.document
        self._layer_order = _LayerOrder(grid.layers, grid.document.path)
        self._file_settings = _by_section(settings.merge(grid.layers))
        self._command_line_settings = _by_section(settings.merge([grid.command_line]))
        self._levels: dict[tuple[int | None, str, str], _ResolvedLevel] = {}
        self._sections: dict[tuple[str, tuple[_ResolvedLevel, ...], PreparedCorpus | None], _ResolvedSection] = {}
        self._fingerprints: dict[DataConfig, str] = {}
        self._pinned: dict[int, _ResolvedSection] = {}
        self._base_slugs: dict[tuple[int, int], str] = {}
        self._initial: dict[str, initial.InitialWeights] = {}

    def cells(self, combination: Combination, line: int | None) -> list[Cell]:
        """Return the cells of one combination: one per seed of the grid, in the order of the seeds.

        Config sections are shared objects between cells. Rules of `exclude` are not applied.

        Args:
            combination: Axis or setting path -> level, as written in the file; settings not named keep the file's
                values.
            line: Line of the `include` rule that adds the combination; None for a combination of `axes` or a trial.

        Raises:
            GridError: For a setting that is not valid, with the file and line that wrote it, and for two levels that
                set the same path.
        """
        levels = [self._level(name, level, line) for name, level in combination.items()]
        self._check_disjoint(levels)
        try:
            prepared = self._section("data", levels).prepared
            parts = {name: self._section(name, levels, prepared) for name in SECTIONS}
            parts["train"] = self._with_initial_weights(parts["train"], parts["model"].config)
            model, data, train = (parts[name].config for name in ("model", "data", "train"))
            validate.check_agreement(model, data, train, prepared)
            validate.check_precision(model, train, parts["resources"].config)
            validate.check_ranks(train, parts["resources"].config)
            parts["data"] = self._pin(parts["data"])
        except validate.InvalidConfig as error:
            raise validate.blame(self._merged(levels), error, self._document.path) from error
        axis_levels = {level.axis: level.word for level in levels}
        shared = {name: part.config for name, part in parts.items()} | {"plugins": self._grid.plugins}
        configs = [CellConfig.model_construct(_ALL_FIELDS, **shared, seed=seed) for seed in self._grid.seeds]
        identities = {name: parts[name].identity for name in ("model", "data", "train")}
        extra = (level.slug for level in levels if level.slug is not None)
        stem = "-".join([self._base_slug(configs[0]), *extra, "s"])
        return [
            Cell(
                id=id_of_parts(**identities, seed=config.seed),
                slug=f"{stem}{config.seed}",
                config=config,
                axes=axis_levels,
            )
            for config in configs
        ]

    def _level(self, name: str, level: Any, line: int | None) -> _ResolvedLevel:
        """Return the resolved level of axis `name`, cached by line, axis and the way the level is written.

        The layer holds the level's settings and, for the tuned axis, the settings that its study selected. Raises
        GridError for an unknown axis or level.
        """
        # repr, because "5" and 5 have the same text but are different levels
        cache_key = (line, name, repr(level))
        resolved = self._levels.get(cache_key)
        if resolved is None:
            where = line or self._document.line(*self._levels_key.split("."), name)
            key = f"{'include' if line else self._levels_key}.{name}"
            setting, layer = Setting(level, self._document.path, where, key), Layer()
            settings.add_level(layer, name, setting, self._grid.custom_axes, self._grid.level_settings)
            word = settings.level_text(name, level)
            tune = self._grid.tune
            tuned = self._grid.tuned.get(word, {}) if tune is not None and tune.per == name else {}
            for path, value in tuned.items():
                settings.add_setting(layer, path, Setting(value, self._document.path, self._document.line(TUNE), TUNE))
            extra = None if name in settings.AXES else slug_part(name.rpartition(".")[2] + word)
            sections = tuple(dict.fromkeys(path.partition(".")[0] for path in layer))
            resolved = self._levels[cache_key] = _ResolvedLevel(name, word, setting, layer, sections, extra)
        return resolved

    def _check_disjoint(self, levels: Iterable[_ResolvedLevel]) -> None:
        """Raise GridError if two of the levels set the same path; the error names both sources."""
        combined: Layer = {}
        for level in levels:
            if not combined.keys().isdisjoint(level.layer):
                settings.add_setting(combined, level.axis, level.setting)  # raises the error that names both sources
            combined.update(level.layer)

    def _section(
        self, name: str, levels: Iterable[_ResolvedLevel], prepared: PreparedCorpus | None = None
    ) -> _ResolvedSection:
        """Return section `name` of the config at these levels with its part of the id, cached.

        The data section comes without fingerprint and identity.

        Args:
            name: "model", "data", "train", "eval", "resources" or "checkpoint".
            levels: Levels of the combination; those that do not reach the section are ignored.
            prepared: The prepared corpus, used for the model section alone: a larger vocabulary raises its
                `vocab_size`.

        Raises:
            InvalidConfig: If the section is not valid.
        """
        reaching = tuple(level for level in levels if name in level.sections)
        key = name, reaching, prepared if name == "model" else None
        resolved = self._sections.get(key)
        if resolved is None:
            layer = self._layer(name, reaching)
            if name == "data":
                resolved = self._data(layer)
            else:
                config = validate.section(name, layer, self._grid.plugins)
                if name == "model" and prepared is not None and config.vocab_size < prepared.vocabulary:
                    config = self._with_vocab_size(config, layer, levels, prepared)
                resolved = _ResolvedSection(config, _identity(name, config))
            self._sections[key] = resolved
        return resolved

    def _layer(self, name: str, levels: Iterable[_ResolvedLevel]) -> Layer:
        """Return all settings of section `name`, in rising precedence: file layers, levels, command line.

        Keys are full dotted paths, such as train.tokens.
        """
        own = [
            {path: setting for path, setting in level.layer.items() if path.startswith(f"{name}.")} for level in levels
        ]
        return settings.merge([self._file_settings.get(name, {}), *own, self._command_line_settings.get(name, {})])

    def _data(self, layer: Layer) -> _ResolvedSection:
        """Return the data section of these settings, with the tokenizer of its corpus if that is a prepared one.

        Computed corpora count as prepared. Tokenizer settings of files below the one that names the corpus are dropped
        then. Raises InvalidConfig for invalid settings and for a tokenizer other than the corpus's.
        """
        corpus = layer.get("data.corpus")
        name = corpus.value if corpus is not None else None
        prepared = None
        if isinstance(name, str):
            prepared = corpora.describe_computed(name) if name in CORPORA else self._prepared(name)
        if corpus is None or prepared is None:
            return _ResolvedSection(validate.section("data", layer, self._grid.plugins))
        layer = self._layer_order.without_base_tokenizer(layer, corpus)
        section = validate.section("data", layer, self._grid.plugins)
        if name in CORPORA:
            prepared = corpora.describe_computed(section.corpus, section.settings.get(section.corpus, {})) or prepared
        return _ResolvedSection(_with_tokenizer(section, layer, prepared), prepared=prepared)

    def _with_vocab_size(
        self, model: Any, layer: Layer, levels: Iterable[_ResolvedLevel], prepared: PreparedCorpus
    ) -> Any:
        """Return the model section with `vocab_size` set to the corpus's vocabulary.

        The section is returned unchanged if `model.vocab_size` is set in the file that names the corpus or in one above
        it.

        Args:
            model: The model section, whose vocabulary is smaller than the corpus's.
            layer: Settings of the model section.
            levels: Levels of the combination, one of which may name the corpus.
            prepared: The prepared corpus.
        """
        vocab_size, corpus = layer.get("model.vocab_size"), self._layer("data", levels)["data.corpus"]
        if vocab_size is not None and not self._layer_order.is_base_of(vocab_size, corpus):
            return model
        return validate.section(
            "model", {**layer, "model.vocab_size": replace(corpus, value=prepared.vocabulary)}, self._grid.plugins
        )

    def _pin(self, data: _ResolvedSection) -> _ResolvedSection:
        """Return the data section with the corpus fingerprint and its part of the id filled in, cached by section.

        Equal sections share one call of the fingerprint function. Raises InvalidConfig for a corpus that is not known.
        """
        pinned = self._pinned.get(id(data))  # the id stays unique, since self._sections keeps the section alive
        if pinned is None:
            config = cast(DataConfig, data.config)
            if config not in self._fingerprints:
                self._fingerprints[config] = validate.corpus_fingerprint(config, self._fingerprint)
            config = config.model_copy(update={"fingerprint": self._fingerprints[config]})
            pinned = self._pinned[id(data)] = _ResolvedSection(
                config, canonical_json(data_identity(config)), data.prepared
            )
        return pinned

    def _with_initial_weights(self, train: _ResolvedSection, model: Any) -> _ResolvedSection:
        """Return the train section with the hash of its initial weights, if it names any, cached by section.

        Raises InvalidConfig for weights that are missing, and for those of another network than `model`.
        """
        source = train.config.init_from
        if source is None:
            return train
        pinned = self._pinned.get(id(train))
        if source not in self._initial:
            self._initial[source] = self._grid.initial(source)
        initial.check_initial_network(model, train.config, self._initial[source])
        if pinned is None:
            config = train.config.model_copy(update={"init_sha256": self._initial[source].sha256})
            pinned = self._pinned[id(train)] = _ResolvedSection(config, _identity("train", config))
        return pinned

    def _base_slug(self, config: CellConfig) -> str:
        """Return the slug prefix of the cell, the levels of the five built-in axes; cached by model and train."""
        # only these two sections hold levels of the five axes; self._sections keeps them alive
        key = id(config.model), id(config.train)
        if key not in self._base_slugs:
            self._base_slugs[key] = base_slug(config)
        return self._base_slugs[key]

    def _merged(self, levels: Iterable[_ResolvedLevel]) -> Layer:
        return settings.merge([*self._layers, *(level.layer for level in levels), self._command_line])


def _identity(section: str, config: Any) -> str:
    """Return a section's part of the cell's id as canonical JSON; "" for sections other than model and train.

    The data section gets its identity later, when its fingerprint is known.
    """
    if section == "model":
        return canonical_json(model_identity(config))
    return canonical_json(train_identity(config)) if section == "train" else ""


def _by_section(layer: Layer) -> dict[str, Layer]:
    """Return section -> its settings, keyed by full dotted path as in the layer."""
    layers: dict[str, Layer] = {}
    for path, setting in layer.items():
        layers.setdefault(path.partition(".")[0], {})[path] = setting
    return layers


# --- corpora that were prepared under a name --------------------------------------------------------------------------

PreparedLookup = Callable[[str], PreparedCorpus | None]
"""Returns the corpus prepared under a name, or None for a name that was never prepared."""
TOKENIZER_FIELDS = ("tokenizer", "tokenizer_file", "end_of_text")
"""Fields of the data section that define the tokenizer."""


class _LayerOrder:
    """Precedence of a grid's files: the base lowest, then the files that extend it, then the command line."""

    def __init__(self, layers: Sequence[Layer], grid_path: Path) -> None:
        self._top = len(layers)
        self._ranks: dict[Path | str, int] = {grid_path: len(layers) - 1}
        for rank, layer in enumerate(layers):
            self._ranks |= {setting.file: rank for setting in layer.values()}

    def is_base_of(self, lower: Setting, upper: Setting) -> bool:
        """Return True if `lower` was written in a file that the file of `upper` extends, directly or not.

        The command line counts as a file above all others. False for settings of the same file.
        """
        return self._ranks.get(lower.file, self._top) < self._ranks.get(upper.file, self._top)

    def without_base_tokenizer(self, layer: Layer, corpus: Setting) -> Layer:
        """Return the data layer without tokenizer settings from files below the one that names the corpus.

        Args:
            layer: Settings of the data section.
            corpus: The setting that names the corpus.
        """
        tokenizer_paths = {f"data.{name}" for name in TOKENIZER_FIELDS}
        return {
            path: setting
            for path, setting in layer.items()
            if path not in tokenizer_paths or not self.is_base_of(setting, corpus)
        }


def _with_tokenizer(data: DataConfig, layer: Layer, prepared: PreparedCorpus) -> DataConfig:
    """Return the data section with the tokenizer, tokenizer file and end-of-text token that prepared the corpus.

    A file or token that the layer sets is kept if it gives the same tokenizer.

    Raises:
        InvalidConfig: If the layer sets a tokenizer, file or end-of-text token that gives a different tokenizer or
            none.
    """
    layer_values = {name: layer[f"data.{name}"].value for name in TOKENIZER_FIELDS if f"data.{name}" in layer}
    if "tokenizer" in layer_values and data.tokenizer != prepared.kind:
        raise validate.InvalidConfig(("data.tokenizer",), _tokenizer_conflict(prepared, data.tokenizer))
    file, end = data.tokenizer_file, data.end_of_text
    if prepared.kind == "json" and (file is not None or end is not None):
        path = "data.tokenizer_file" if file is not None else "data.end_of_text"
        try:
            requested = tokenizer.load_tokenizer(
                "json", file or prepared.file, end or (prepared.end_of_text if file is None else None)
            )
        except tokenizer.TokenizerError as error:
            raise validate.InvalidConfig((path,), str(error)) from error
        if requested.name != prepared.tokenizer:
            raise validate.InvalidConfig((path,), _tokenizer_conflict(prepared, requested.name))
    update = {
        "tokenizer": prepared.kind,
        "tokenizer_file": file or prepared.file,
        "end_of_text": end or prepared.end_of_text,
    }
    return data.model_copy(update=update)


def _tokenizer_conflict(prepared: PreparedCorpus, requested: str) -> str:
    return (
        f"corpus {prepared.name!r} was prepared with tokenizer {prepared.tokenizer}, but the grid requests {requested}"
    )
