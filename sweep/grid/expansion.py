"""The cells of a grid's combinations. What combinations share is worked out once: sections of a config, parts of an id.

Ten thousand cells differ in a few settings each, so most of their sections are one and the same object.
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
from . import settings, validate
from .cell import Cell, canonical, data_identity, five_levels, id_of_parts, model_identity, slug_part, train_identity
from .settings import Layer, Setting
from .yaml_document import GridDocument

Combination = Mapping[str, Any]
"""Axis -> level, as written in the file."""
Fingerprint = Callable[[DataConfig], str]
_GIVEN = set(CellConfig.model_fields)
SEARCH, TUNE = "search", "tune"
"""Keys of studies."""


@dataclass(frozen=True, eq=False)
class _Level:
    """One level of an axis as one place of the file writes it, with what it sets."""

    axis: str
    word: str
    setting: Setting
    layer: Layer
    sections: tuple[str, ...]
    """Of the config, that it reaches."""
    slug: str | None
    """What it adds to a slug; None for one of the five axes, which every slug has."""


@dataclass(frozen=True)
class _Parts:
    """A section, complete, and what an id or a slug takes of it."""

    config: Any
    identity: str = ""
    known: PreparedCorpus | None = None
    """Of the data section: the corpus, when it was prepared under the name that the section gives."""


class Expansion:
    """Makes cells, combination by combination. It remembers what it worked out, and lives as long as one expansion."""

    def __init__(self, grid: Any, fingerprint: Fingerprint, prepared: PreparedLookup) -> None:
        """Take a `grid.Grid`, which this file must not import: its layers, levels, seeds and plugins make the cells."""
        self._grid, self._fingerprint, self._prepared = grid, fingerprint, prepared
        study = grid.search is not None
        self._varied = f"{TUNE if grid.part else SEARCH}.ranges" if study else "axes"
        """Key of the file under which levels stand, by axis."""
        self._layers: Sequence[Layer] = grid.layers
        self._command_line: Layer = grid.command_line
        self._document: GridDocument = grid.document
        self._chain = _Chain(grid.layers, grid.document.path)
        self._below = _by_section(settings.merge(grid.layers))
        self._above = _by_section(settings.merge([grid.command_line]))
        self._levels: dict[tuple[int | None, str, str], _Level] = {}
        self._sections: dict[tuple[str, tuple[_Level, ...], PreparedCorpus | None], _Parts] = {}
        self._prints: dict[DataConfig, str] = {}
        self._pinned: dict[int, _Parts] = {}
        self._stems: dict[tuple[int, int], str] = {}

    def cells(self, combination: Combination, line: int | None) -> list[Cell]:
        """The cells of one combination, one a seed; `line` is that of the `include` rule which adds it, None for none.

        Raises GridError with the file and line of the setting that is wrong.
        """
        levels = [self._level(name, level, line) for name, level in combination.items()]
        self._check_disjoint(levels)
        try:
            known = self._section("data", levels).known
            parts = {name: self._section(name, levels, known) for name in SECTIONS}
            model, data, train = (parts[name].config for name in ("model", "data", "train"))
            validate.check_agreement(model, data, train, known)
            validate.check_precision(model, train, parts["resources"].config)
            parts["data"] = self._pin(parts["data"])
        except validate.InvalidConfig as error:
            raise validate.blame(self._merged(levels), error, self._document.path) from error
        words = {level.axis: level.word for level in levels}
        shared = {name: part.config for name, part in parts.items()} | {"plugins": self._grid.plugins}
        configs = [CellConfig.model_construct(_GIVEN, **shared, seed=seed) for seed in self._grid.seeds]
        identities = {name: parts[name].identity for name in ("model", "data", "train")}
        extra = (level.slug for level in levels if level.slug is not None)
        stem = "-".join([self._five_levels(configs[0]), *extra, "s"])
        return [
            Cell(id=id_of_parts(**identities, seed=one.seed), slug=f"{stem}{one.seed}", config=one, axes=words)
            for one in configs
        ]

    def _level(self, name: str, level: Any, line: int | None) -> _Level:
        # by how the level is written: "5" and 5 read alike and are not
        place = (line, name, repr(level))
        found = self._levels.get(place)
        if found is None:
            where = line or self._document.line(*self._varied.split("."), name)
            key = f"{'include' if line else self._varied}.{name}"
            setting, layer = Setting(level, self._document.path, where, key), Layer()
            settings.put(layer, name, setting, self._grid.named, self._grid.besides)
            word = settings.level_text(name, level)
            tune = self._grid.tune
            tuned = self._grid.tuned.get(word, {}) if tune is not None and tune.per == name else {}
            for path, value in tuned.items():
                settings.add(layer, path, Setting(value, self._document.path, self._document.line(TUNE), TUNE))
            extra = None if name in settings.AXES else slug_part(name.rpartition(".")[2] + word)
            sections = tuple(dict.fromkeys(path.partition(".")[0] for path in layer))
            found = self._levels[place] = _Level(name, word, setting, layer, sections, extra)
        return found

    def _check_disjoint(self, levels: Iterable[_Level]) -> None:
        together: Layer = {}
        for level in levels:
            if not together.keys().isdisjoint(level.layer):
                settings.add(together, level.axis, level.setting)  # raises, naming both sources
            together.update(level.layer)

    def _section(self, name: str, levels: Iterable[_Level], known: PreparedCorpus | None = None) -> _Parts:
        """The section that these levels give, beside the corpus that is known by its name; raises Invalid."""
        reaching = tuple(level for level in levels if name in level.sections)
        key = name, reaching, known if name == "model" else None
        found = self._sections.get(key)
        if found is None:
            layer = self._layer(name, reaching)
            if name == "data":
                found = self._data(layer)
            else:
                config = validate.section(name, layer, self._grid.plugins)
                if name == "model" and known is not None and config.vocab_size < known.vocabulary:
                    config = self._fitting(config, layer, levels, known)
                found = _Parts(config, _identity(name, config))
            self._sections[key] = found
        return found

    def _layer(self, name: str, levels: Iterable[_Level]) -> Layer:
        """What is set in a section, the last word last."""
        own = [{path: one for path, one in level.layer.items() if path.startswith(f"{name}.")} for level in levels]
        return settings.merge([self._below.get(name, {}), *own, self._above.get(name, {})])

    def _data(self, layer: Layer) -> _Parts:
        corpus = layer.get("data.corpus")
        name = corpus.value if corpus is not None else None
        known = None
        if isinstance(name, str):
            known = corpora.with_own_tokens(name) if name in CORPORA else self._prepared(name)
        if corpus is None or known is None:
            return _Parts(validate.section("data", layer, self._grid.plugins))
        layer = self._chain.without_below(layer, corpus)
        section = validate.section("data", layer, self._grid.plugins)
        return _Parts(_with_tokenizer(section, layer, known), known=known)

    def _fitting(self, model: Any, layer: Layer, levels: Iterable[_Level], known: PreparedCorpus) -> Any:
        """The model with room for the corpus's vocabulary, unless whoever names the corpus says how much there is."""
        said, corpus = layer.get("model.vocab_size"), self._layer("data", levels)["data.corpus"]
        if said is not None and not self._chain.below(said, corpus):
            return model
        return validate.section(
            "model", {**layer, "model.vocab_size": replace(corpus, value=known.vocabulary)}, self._grid.plugins
        )

    def _pin(self, data: _Parts) -> _Parts:
        """The data section with the fingerprint of its corpus; raises Invalid for a corpus that nobody knows."""
        found = self._pinned.get(id(data))  # which self._sections keeps alive
        if found is None:
            config = cast(DataConfig, data.config)
            if config not in self._prints:
                self._prints[config] = validate.pinned(config, self._fingerprint)
            config = config.model_copy(update={"fingerprint": self._prints[config]})
            found = self._pinned[id(data)] = _Parts(config, canonical(data_identity(config)), data.known)
        return found

    def _five_levels(self, config: CellConfig) -> str:
        # only these two have levels of the five axes, and self._sections keeps them alive
        key = id(config.model), id(config.train)
        if key not in self._stems:
            self._stems[key] = five_levels(config)
        return self._stems[key]

    def _merged(self, levels: Iterable[_Level]) -> Layer:
        return settings.merge([*self._layers, *(level.layer for level in levels), self._command_line])


def _identity(section: str, config: Any) -> str:
    """What an id takes of a section, as canonical JSON; of data when its fingerprint is known."""
    if section == "model":
        return canonical(model_identity(config))
    return canonical(train_identity(config)) if section == "train" else ""


def _by_section(layer: Layer) -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    for path, setting in layer.items():
        found.setdefault(path.partition(".")[0], {})[path] = setting
    return found


# --- corpora that were prepared under a name --------------------------------------------------------------------------

PreparedLookup = Callable[[str], PreparedCorpus | None]
"""The corpus that was prepared under a name; None for a name that nothing has."""
SAID = ("tokenizer", "tokenizer_file", "end_of_text")


class _Chain:
    """The files of a grid, from the base at the bottom to the command line."""

    def __init__(self, layers: Sequence[Layer], own: Path) -> None:
        self._top = len(layers)
        self._ranks: dict[Path | str, int] = {own: len(layers) - 1}
        for rank, layer in enumerate(layers):
            self._ranks |= {setting.file: rank for setting in layer.values()}

    def below(self, one: Setting, other: Setting) -> bool:
        """Whether the first stands in a file that the other's file extends; the command line is over all."""
        return self._ranks.get(one.file, self._top) < self._ranks.get(other.file, self._top)

    def without_below(self, layer: Layer, corpus: Setting) -> Layer:
        """The data section without what files below the one that names the corpus say of a tokenizer."""
        gone = {f"data.{name}" for name in SAID}
        return {path: one for path, one in layer.items() if path not in gone or not self.below(one, corpus)}


def _with_tokenizer(data: DataConfig, layer: Layer, known: PreparedCorpus) -> DataConfig:
    """The section with the tokenizer that made the corpus; raises Invalid when the layer says another."""
    said = {name: layer[f"data.{name}"].value for name in SAID if f"data.{name}" in layer}
    if "tokenizer" in said and data.tokenizer != known.kind:
        raise validate.InvalidConfig(("data.tokenizer",), _differs(known, data.tokenizer))
    file, end = data.tokenizer_file, data.end_of_text
    if known.kind == "json" and (file is not None or end is not None):
        path = "data.tokenizer_file" if file is not None else "data.end_of_text"
        try:
            asked = tokenizer.load_tokenizer(
                "json", file or known.file, end or (known.end_of_text if file is None else None)
            )
        except tokenizer.TokenizerError as error:
            raise validate.InvalidConfig((path,), str(error)) from error
        if asked.name != known.tokenizer:
            raise validate.InvalidConfig((path,), _differs(known, asked.name))
    update = {"tokenizer": known.kind, "tokenizer_file": file or known.file, "end_of_text": end or known.end_of_text}
    return data.model_copy(update=update)


def _differs(known: PreparedCorpus, asked: str) -> str:
    return f"corpus {known.name!r} was prepared with tokenizer {known.tokenizer}, but the grid asks for {asked}"
