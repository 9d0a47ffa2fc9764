"""From a grid file to cells. Every error names file, line, key, what is allowed and the nearest valid word."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...grids import GRIDS as GRIDS
from ...results.contrasts import Contrast
from ...results.names import is_utf8, short, why_not
from ...results.stopping.stopping_rule import Rule
from ...results.studies.search import Search
from ..config import Plugin
from ..errors import GridError
from . import axes, contrasts, designs, named_levels, search_section, settings, stop_section, tuning
from .axes import level_text
from .cell import Cell
from .expansion import Combination, Expansion, Fingerprint
from .named_corpus import Lookup
from .named_levels import NamedLevels
from .plugins import PluginLeft, cause_of, load_plugin
from .settings import Layer, Setting
from .yaml_document import Document, TooManyValues, load, value_of

GRID_KEYS = (
    "name",
    "description",
    "extends",
    "axes",
    "levels",
    "exclude",
    "include",
    "seeds",
    "set",
    "resources",
    "plugins",
    "contrasts",
    "design",
    "stop",
    "search",
    "tune",
)
BASE_KEYS = ("description", "extends", "set", "resources")
SEED = "seed"
"""What a seed is called among the axes of an `exclude` rule."""
MOST_CELLS = 20_000
"""Of a grid, unless `--cells` allows more: planning takes about a quarter of a millisecond a cell."""
MOST_SEED = 2**63 - 1
"""What a database's whole number holds."""
Placed = tuple[int, Mapping[str, Sequence[str]]]
"""A rule of `exclude` behind its place in the list."""


@dataclass(frozen=True)
class Grid:
    """A grid file, read and checked; `expand` makes its cells."""

    name: str
    description: str
    document: Document
    axes: dict[str, list[Any]]
    named: NamedLevels
    """Those of them whose levels the file itself defines."""
    besides: NamedLevels
    """What levels of any axis set besides."""
    exclude: list[dict[str, list[str]]]
    """Axis -> the words of levels that a rule is about; a rule with SEED drops these seeds of its combinations alone."""
    include: list[tuple[dict[str, list[Any]], int]]
    """Axis -> the levels to combine, and the line of the rule."""
    seeds: Sequence[int]
    layers: list[Layer]
    """base chain, then `set` and `resources`; axis levels come after."""
    command_line: Layer = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    """The differences that the sweep is launched to see; part of no cell."""
    chosen: designs.Chosen | None = None
    """The part of the combinations of `axes` that is launched; None: all."""
    stop: Rule | None = None
    """When seeds beyond `seeds` are enough; None: no others are added."""
    search: Search | None = None
    """The study whose trials are the cells; None: a factorial."""
    tune: tuning.Tune | None = None
    """The studies that go before the factorial; None: none do."""
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By level of the axis that is tuned: the settings that its cells have."""
    part: str = ""
    """Of a study that goes before a factorial: the level that it is for."""

    def expand(self, fingerprint: Fingerprint, prepared: Lookup = lambda name: None) -> list[Cell]:
        """All cells in grid order: axes in the order written, the last one fastest, seeds innermost.

        Of a grid with `search`, which has no cells before they are proposed, those at the ends of its ranges. `fingerprint` gives the hash of a corpus, `prepared` what was prepared under a name. Raises GridError.
        """
        expansion = self.expansion(fingerprint, prepared)
        if self.search is not None:
            return search_section.ends(
                self.document, self.search, expansion, tuning.KEY if self.part else search_section.KEY
            )
        cells: list[Cell] = []
        seen: dict[str, Cell] = {}
        of_seeds = self._dropping(seeds=True)
        for combination, line in self._combinations():
            for cell in expansion.cells(combination, line):
                seeded = {**cell.axes, SEED: str(cell.config.seed)}
                if line is None and _first(of_seeds, seeded) is not None:
                    continue
                twin = seen.setdefault(cell.id, cell)
                if twin is not cell:
                    raise self._same(twin, cell, line)
                cells.append(cell)
        if not cells:
            raise GridError(
                self.document.path, self.document.line("exclude"), "exclude", "drops every cell; nothing is left to run"
            )
        # whoever asks for other lengths on the command line tries something out
        if not any(path.startswith(contrasts.EVALUATION) for path in self.command_line):
            contrasts.check_lengths(self.document, self.contrasts, cells)
        return cells

    def expansion(self, fingerprint: Fingerprint, prepared: Lookup = lambda name: None) -> Expansion:
        """What makes the cells of its combinations of levels, or of its trials."""
        return Expansion(
            self.layers,
            self.command_line,
            document=self.document,
            seeds=self.seeds,
            plugins=self.plugins,
            fingerprint=fingerprint,
            prepared=prepared,
            named=(self.named, self.besides),
            varied="axes" if self.search is None else tuning.RANGES if self.part else search_section.RANGES,
            settled={(self.tune.per, word): set_ for word, set_ in self.tuned.items()} if self.tune else {},
        )

    @property
    def short_path(self) -> str:
        """Return the path that names the file on a command line; of a shipped grid its name."""
        path = self.document.path
        return path.stem if path.parent == GRIDS else str(path)

    def setting(self, path: str) -> Setting | None:
        """Return the setting of a dotted path that the file, its bases or the command line make, levels of axes aside."""
        return settings.merge([*self.layers, self.command_line]).get(path)

    def studies(self) -> dict[str, Grid]:
        """By level of the axis that is tuned: the study of it, as a grid of its own."""
        if self.tune is None:
            return {}
        found = {}
        for word, level in self.tune.levels.items():
            layer: Layer = {}
            for axis, value in {self.tune.per: level, **self.tune.at}.items():
                named_levels.put(
                    layer,
                    axis,
                    Setting(value, self.document.path, self.tune.line, tuning.KEY),
                    self.named,
                    self.besides,
                )
            found[word] = Grid(
                name=self.tune.sweep(self.name, word),
                description=f"Of {self.name}: {self.tune.per} {word}",
                document=self.document,
                axes={}, named={}, besides={}, exclude=[], include=[], seeds=[*self.seeds][:1],
                layers=[*self.layers, layer],
                command_line=self.command_line,
                plugins=self.plugins,
                search=self.tune.search,
                part=word,
            )  # fmt: skip
        return found

    def _same(self, first: Cell, second: Cell, line: int | None) -> GridError:
        """Two combinations that resolve to one cell; blames the include rule, else the first axis that differs."""
        names = [describe(cell.axes, cell.config.seed) for cell in (first, second)]
        problem = f"cells {names[0]} and {names[1]} are the same cell; exclude one of them"
        if line is not None:
            return GridError(self.document.path, line, "include", problem)
        axis = next(name for name, word in second.axes.items() if first.axes[name] != word)
        return GridError(self.document.path, self.document.line("axes", axis), f"axes.{axis}", problem)

    def _combinations(self) -> Iterator[tuple[Combination, int | None]]:
        if self.axes or not self.include:
            dropped = self._dropping(seeds=False)
            texts = {name: [level_text(name, level) for level in levels] for name, levels in self.axes.items()}
            taken = None if self.chosen is None else set(self.chosen.members.tolist())
            place = 0
            for levels, words in zip(
                itertools.product(*self.axes.values()), itertools.product(*texts.values()), strict=True
            ):
                word = dict(zip(self.axes, words, strict=True)) if dropped else {}
                if _first(dropped, word) is None:
                    if taken is None or place in taken:
                        yield dict(zip(self.axes, levels, strict=True)), None
                    place += 1
        for rule, line in self.include:
            for levels in itertools.product(*rule.values()):
                yield dict(zip(rule, levels, strict=True)), line

    def _dropping(self, *, seeds: bool) -> list[Placed]:
        """The rules of `exclude` that drop whole combinations, or those that drop seeds of them, each with its place."""
        return [(index, rule) for index, rule in enumerate(self.exclude) if (SEED in rule) == seeds]

    def excluded(self) -> Iterator[tuple[int, dict[str, str]]]:
        """What `exclude` drops, each with the place of the first rule that does: a combination, or with SEED one seed of it."""
        if not self.exclude:
            return
        texts = {name: [level_text(name, level) for level in levels] for name, levels in self.axes.items()}
        whole, of_seeds = self._dropping(seeds=False), self._dropping(seeds=True)
        for words in itertools.product(*texts.values()):
            word = dict(zip(texts, words, strict=True))
            if (first := _first(whole, word)) is not None:
                yield first, word
                continue
            for seed in self.seeds if of_seeds else ():
                one = {**word, SEED: str(seed)}
                if (first := _first(of_seeds, one)) is not None:
                    yield first, one

    def check_size(self, most: int) -> None:
        """Counts the cells without making any, those that `exclude` drops too. Raises GridError for more than `most`."""
        seeds = self.seeds.stop if isinstance(self.seeds, range) else len(self.seeds)  # len() ends at 2**63
        seeds = seeds if self.stop is None else self.stop.most
        factors = {f"axes.{name}": len(levels) for name, levels in self.axes.items()}
        crossed = math.prod(factors.values()) if self.axes or not self.include else 0
        included = sum(math.prod(map(len, rule.values())) for rule, _ in self.include)
        cells = (crossed + included) * seeds
        if cells <= most:
            return
        sources = {"seeds": seeds, "include": included, **factors}
        largest = max(sources, key=lambda key: sources[key])
        dropped = ", those that exclude drops counted" if self.exclude else ""
        raise GridError(
            self.document.path,
            self.document.line(*largest.split(".", 1)),
            largest,
            f"the grid has {cells:,} cells{dropped}; more than {most:,} are taken for a mistake, --cells {cells} allows them",
        )


def _first(rules: Iterable[Placed], word: Mapping[str, str]) -> int | None:
    """The place of the first rule that a combination of levels meets; None for one that meets none."""
    return next((index for index, rule in rules if all(word[name] in some for name, some in rule.items())), None)


def describe(words: Mapping[str, str], seed: int) -> str:
    """(attn_type=polar, memory=on, seed=0)."""
    return "(" + ", ".join([*(f"{name}={word}" for name, word in words.items()), f"seed={seed}"]) + ")"


def find_file(name: str | Path, beside: Path | None = None, folder: str = "") -> Path | None:
    """Resolves a grid or base: beside the asking file (or the working folder), then among the shipped ones."""
    given = Path(name)
    if not given.name:
        return None
    # A name with a folder in it means that folder, never a shipped file that happens to have the same name.
    short = [Path(folder) / f"{given.name}.yaml"] if given.parent == Path() else []
    for root in (beside or Path(), GRIDS):
        for candidate in (given, given.with_name(given.name + ".yaml"), *short):
            path = root / candidate
            # unlike is_file, False too for a name that is too long
            if os.path.isfile(path):
                return path
    return None


def shipped(folder: str = "") -> list[str]:
    """Names of the shipped grids, or of the bases with folder="base"."""
    return sorted(path.stem for path in (GRIDS / folder).glob("*.yaml"))


def load_grid(
    name: str | Path, *, sets: Sequence[str] = (), rename: str | None = None, most: int | None = None
) -> Grid:
    """Reads a grid by path or shipped name, with `--set path=value` overrides of highest precedence.

    Raises GridError, also for a grid of more cells than `most`, by default MOST_CELLS.
    """
    path = find_file(name)
    if path is None and Path(name).parent == Path("grids"):
        path = find_file(Path(name).name)
    if path is None:
        raise GridError(name, None, "", "no such grid file", shipped(), Path(name).stem)
    document = load(path)
    search_section.check_no_pruner(document)
    _check_keys(document, GRID_KEYS)
    # Plugins first: their mixers are levels that the rest of the file may name.
    plugins = tuple(_plugins(document))
    layers = _layers(document)
    made = named_levels.read(document)
    found_axes = _axes(document, made)
    included = _include(document, made)
    every = _all_levels(found_axes, included)
    besides = named_levels.besides(document, _section(document, named_levels.KEY, dict), every)
    title = _text(document, "name")
    if not title:
        raise GridError(path, 1, "name", "is missing; give the sweep a name")
    if rename is not None and (why := why_not(rename)):
        raise GridError("--name", None, "", f"{short(rename)} {why}")
    if rename is None and (why := why_not(title)):
        raise GridError(path, document.line("name"), "name", f"{short(title)} {why}")
    if sets and (rename is None or rename == title):
        raise GridError("--set", None, "", f"a changed grid needs a name of its own: add --name, other than {title!r}")
    seeds = _seeds(document)
    grid = Grid(
        name=rename or title,
        description=_text(document, "description"),
        document=document,
        axes=found_axes,
        named=made,
        besides=besides,
        exclude=_exclude(document, found_axes, seeds),
        include=included,
        seeds=seeds,
        layers=layers,
        command_line=_command_line(sets),
        plugins=plugins,
        contrasts=contrasts.read(document, _section(document, contrasts.KEY, list), every),
    )
    allowed = MOST_CELLS if most is None else most
    grid.check_size(allowed)
    if search_section.KEY in document.data:
        return replace(
            grid, search=search_section.read(document, _section(document, search_section.KEY, dict), grid.seeds)
        )
    if tuning.KEY in document.data:
        asked = _section(document, tuning.KEY, dict)
        grid = replace(grid, tune=tuning.read(document, asked, every, grid.name, made, besides))
    if stop_section.KEY in document.data:
        rule = stop_section.read(document, _section(document, stop_section.KEY, dict), every, grid.seeds)
        grid = replace(grid, stop=rule, contrasts=stop_section.with_contrast(grid.contrasts, rule, every))
        grid.check_size(allowed)
    return replace(grid, chosen=_design(grid)) if designs.KEY in document.data else grid


def _design(grid: Grid) -> designs.Chosen:
    texts = {name: [level_text(name, level) for level in levels] for name, levels in grid.axes.items()}
    asked = _section(grid.document, designs.KEY, dict)
    return designs.read(grid.document, asked, grid.axes, grid.exclude, texts, grid.contrasts)


def _check_keys(document: Document, allowed: Sequence[str]) -> None:
    for key in document.data:
        if key not in allowed:
            raise GridError(document.path, document.line(key), key, "no such key", allowed, key)


def _text(document: Document, key: str) -> str:
    value = document.data.get(key, "")
    if not isinstance(value, str):
        raise GridError(document.path, document.line(key), key, f"must be text, got {value!r}")
    return value


def _section(document: Document, key: str, kind: type[dict[Any, Any]] | type[list[Any]]) -> Any:
    value = document.data.get(key)
    if value is None and key not in document.data:
        return kind()
    if not isinstance(value, kind):
        words = "a mapping" if kind is dict else "a list"
        raise GridError(document.path, document.line(key), key, f"must be {words}, got {value!r}")
    return value


def _layers(document: Document, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """The base chain, oldest first, and the file's own `set` and `resources` as one last layer."""
    layers: list[Layer] = []
    parent = _text(document, "extends")
    if parent:
        line = document.line("extends")
        path = find_file(parent, document.path.parent, "base")
        if path is None:
            raise GridError(document.path, line, "extends", f"no base {parent!r}", shipped("base"), parent)
        if path.resolve() in (*seen, document.path.resolve()):
            raise GridError(document.path, line, "extends", f"base {parent!r} extends itself")
        base = load(path)
        _check_keys(base, BASE_KEYS)
        layers = _layers(base, (*seen, document.path.resolve()))
    own: Layer = {}
    for section, prefix in (("set", ""), ("resources", "resources.")):
        for path_, value, line, written in settings.flatten(_section(document, section, dict), document, (section,)):
            settings.add(own, prefix + path_, Setting(value, document.path, line, f"{section}.{written}"))
    return [*layers, own]


def _check_axis(document: Document, made: NamedLevels, name: str, *where: str | int) -> None:
    if name in axes.AXES or name in made:
        return
    wrong = settings.unknown(name)
    if wrong:
        problem, allowed, word = (
            wrong
            if "." in name or name in settings.COMPUTED
            else ("no such axis", [*axes.AXES, *made, "or a config path such as train.muon_lr"], name)
        )
        raise GridError(document.path, document.line(*where), _shown(where), problem, allowed, word)


def _shown(where: Sequence[str | int]) -> str:
    """A place in the file as people write it: include[0].memory."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)[1:]


def _check_level(document: Document, made: NamedLevels, name: str, level: Any, *where: str | int) -> None:
    if name in axes.AXES or name in made:
        levels = made[name] if name in made else axes.AXES[name].levels()
        if level_text(name, level) not in levels:
            raise GridError(
                document.path,
                document.line(*where),
                f"axes.{name}" if where[0] == "axes" else _shown(where),
                f"no level {level!r}",
                levels,
                str(level),
            )


def _axes(document: Document, made: NamedLevels) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, levels in _section(document, "axes", dict).items():
        if name in made:
            found[name] = [*made[name]]
            continue
        _check_axis(document, made, name, "axes", name)
        line = document.line("axes", name)
        if not isinstance(levels, list):
            raise GridError(document.path, line, f"axes.{name}", f"must be a list of levels, got {levels!r}")
        if not levels:
            raise GridError(document.path, line, f"axes.{name}", "has no levels; give at least one, or remove the axis")
        seen: set[str] = set()
        for index, level in enumerate(levels):
            _check_level(document, made, name, level, "axes", name, index)
            word = level_text(name, level)
            if word in seen:
                line = document.line("axes", name, index)
                raise GridError(document.path, line, f"axes.{name}", f"level {word!r} given twice")
            seen.add(word)
        found[name] = levels
    return found


def _rules(document: Document, key: str) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    for index, rule in enumerate(_section(document, key, list)):
        if not isinstance(rule, dict) or not rule:
            raise GridError(
                document.path, document.line(key, index), f"{key}[{index}]", f"must map axes to levels, got {rule!r}"
            )
        yield index, {name: level if isinstance(level, list) else [level] for name, level in rule.items()}


def _exclude(document: Document, known: Mapping[str, list[Any]], seeds: Sequence[int]) -> list[dict[str, list[str]]]:
    rules = []
    texts = {name: dict.fromkeys(level_text(name, level) for level in levels) for name, levels in known.items()}
    for index, rule in _rules(document, "exclude"):
        for name, levels in rule.items():
            line = document.line("exclude", index, name)
            if name == SEED:
                _check_seeds(document, index, levels, seeds)
                continue
            if name not in known:
                raise GridError(
                    document.path, line, f"exclude[{index}].{name}", "not an axis of this grid", [*known, SEED], name
                )
            for level in levels:
                if level_text(name, level) not in texts[name]:
                    raise GridError(
                        document.path,
                        line,
                        f"exclude[{index}].{name}",
                        f"no level {level!r} in this grid",
                        texts[name],
                        str(level),
                    )
        rules.append({name: [level_text(name, level) for level in levels] for name, levels in rule.items()})
    return rules


def _check_seeds(document: Document, index: int, named: Sequence[Any], seeds: Sequence[int]) -> None:
    where = document.line("exclude", index, SEED), f"exclude[{index}].{SEED}"
    for key in (designs.KEY, stop_section.KEY):
        if key in document.data:
            raise GridError(
                document.path, *where, f"does not go with {key}, which has the same seeds for all; leave one out"
            )
    for seed in named:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed not in seeds:
            few = [str(one) for one in itertools.islice(seeds, 20)]
            raise GridError(document.path, *where, f"no seed {seed!r} in this grid", few)


def _include(document: Document, made: NamedLevels) -> list[tuple[dict[str, list[Any]], int]]:
    found = []
    for index, rule in _rules(document, "include"):
        for name, levels in rule.items():
            _check_axis(document, made, name, "include", index, name)
            for level in levels:
                _check_level(document, made, name, level, "include", index, name)
        found.append((rule, document.line("include", index)))
    return found


def _all_levels(
    crossed: Mapping[str, list[Any]], included: Sequence[tuple[Mapping[str, list[Any]], int]]
) -> dict[str, list[Any]]:
    """Every level that a cell of the grid may stand at, by axis."""
    found = {name: list(levels) for name, levels in crossed.items()}
    for rule, _ in included:
        for name, levels in rule.items():
            found.setdefault(name, []).extend(levels)
    return found


def _seeds(document: Document) -> Sequence[int]:
    value = document.data.get("seeds", 1)
    line = document.line("seeds")
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise GridError(document.path, line, "seeds", f"must be at least 1, got {value}")
        return range(value)
    whole = isinstance(value, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in value)
    if not whole or not value or len(set(value)) < len(value):
        raise GridError(
            document.path, line, "seeds", f"must be a count or a list of different whole numbers, got {value!r}"
        )
    if max(value) > MOST_SEED:
        raise GridError(document.path, line, "seeds", f"must be at most {MOST_SEED}, got {max(value)}")
    return list(value)


def _plugins(document: Document) -> Iterator[Plugin]:
    for index, name in enumerate(_section(document, "plugins", list)):
        line = document.line("plugins", index)
        path = document.path.parent / str(name)
        if not os.path.isfile(path):
            near = sorted(p.name for p in document.path.parent.glob("*.py"))
            raise GridError(document.path, line, "plugins", f"no file {name!r} beside the grid", near, str(name))
        try:
            yield load_plugin(path.resolve())
        except PluginLeft as error:
            raise GridError(document.path, line, "plugins", str(error)) from error
        except Exception as error:
            raise GridError(document.path, line, "plugins", f"{name} cannot be loaded: {cause_of(error)}") from error


def parse_value(text: str) -> Any:
    """A command-line value as YAML would read it. Raises GridError for one that is too large, or not in UTF-8."""
    if not is_utf8(text):
        raise GridError("command line", None, short(text), "is not in UTF-8, so it cannot be written down")
    try:
        return value_of(text)
    except TooManyValues as error:
        raise GridError("command line", None, text[:40], str(error)) from error


def _command_line(sets: Sequence[str]) -> Layer:
    layer: Layer = {}
    for item in sets:
        path, equals, value = item.partition("=")
        if not equals:
            raise GridError("--set", None, item, "must read path=value, for example train.tokens=1e6")
        settings.add(layer, path.strip(), Setting(parse_value(value), "--set", None, path.strip()))
    return layer
