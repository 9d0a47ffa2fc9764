"""Grid files: reading, checking and expansion to cells.

Errors name file, line, key, allowed values and the nearest valid word.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...grids import GRIDS as GRIDS
from ...results.contrasts import Contrast
from ...results.names import is_utf8, quoted_short, sweep_name_problem
from ...results.stopping.stopping_rule import StoppingRule
from ...results.studies.search import Search
from ..config import Plugin
from ..errors import GridError
from . import designs, sections, settings
from .cell import Cell
from .expansion import SEARCH, TUNE, Combination, Expansion, Fingerprint, PreparedLookup
from .grid_file import BASE_KEYS, GridFile
from .grid_file import find_file as find_file
from .grid_file import shipped as shipped
from .initial import InitialWeights, provisional_weights
from .plugins import PluginExited, cause_of, installed_plugins, load_plugin
from .settings import Layer, NamedLevels, Setting, level_text
from .yaml_document import GridDocument, KeyPath, ValueLimitExceeded, load, value_of

SEED = "seed"
"""Key of an `exclude` rule that selects seeds."""
MOST_CELLS = 20_000
"""Default limit on the cells of a grid; `--cells` raises it. Planning takes about 0.25 ms per cell."""
NumberedRule = tuple[int, Mapping[str, Sequence[str]]]
"""Index in `exclude`, and the rule."""


@dataclass(frozen=True)
class Grid:
    """A grid file, read and checked; `expand` returns its cells."""

    name: str
    description: str
    document: GridDocument
    axes: dict[str, list[Any]]
    """Axis -> levels as written, in the order of the file."""
    custom_axes: NamedLevels
    """Axes of `axes` whose levels the file itself defines."""
    level_settings: NamedLevels
    """Additional settings of levels, from the file's `levels`."""
    exclude: list[dict[str, list[str]]]
    """Rules: axis -> levels that match. A rule with the key SEED drops only these seeds of its combinations."""
    include: list[tuple[dict[str, list[Any]], int]]
    """Rules: axis -> levels to combine, and the line of the rule."""
    seeds: Sequence[int]
    layers: list[Layer]
    """Settings of the base chain, oldest first, then of `set` and `resources`; axis levels override them."""
    command_line: Layer = field(default_factory=dict)
    """Overrides of `--set`, of highest precedence."""
    plugins: tuple[Plugin, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    """Declared comparisons; they are no part of any cell."""
    chosen: designs.ChosenDesign | None = None
    """Fractional design: the combinations of `axes` that are launched; None for all."""
    stop: StoppingRule | None = None
    """Rule that adds seeds beyond `seeds` until an interval is narrow enough; None adds none."""
    search: Search | None = None
    """Study whose trials are the cells; None for a factorial."""
    tune: sections.Tune | None = None
    """Studies that run before the factorial; None without."""
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Level of the tuned axis -> settings that its study selected."""
    study_level: str = ""
    """Level that this study tunes; "" for a grid that is not part of `tune`."""
    initial: Callable[[str], InitialWeights] = provisional_weights
    """Returns the weights of a `train.init_from`; by default a provisional hash, for grids that are not launched."""

    def expand(self, fingerprint: Fingerprint, prepared: PreparedLookup = lambda name: None) -> list[Cell]:
        """Return all cells in grid order: axes as written, the last one fastest, seeds innermost; `include` comes last.

        Cells of `exclude` and those outside a design are left out. Seeds of a stopping rule beyond the file's are not
        included. A grid with `search` has no cells before they are proposed: the cells at the ends of its ranges are
        returned.

        Args:
            fingerprint: Returns the SHA-256 of the corpus of a data section.
            prepared: Returns the corpus prepared under a name, or None.

        Raises:
            GridError: For invalid settings, two equal cells, an `exclude` that drops every cell, or a contrast at a
                probe or length that no cell measures (not checked if the command line changes `eval`).
        """
        expansion = self.expansion(fingerprint, prepared)
        if self.search is not None:
            return sections.corner_cells(self.document, self.search, expansion, TUNE if self.study_level else SEARCH)
        cells: list[Cell] = []
        cells_by_id: dict[str, Cell] = {}
        seed_rules = self._exclude_rules(seeds=True)
        for combination, line in self._combinations():
            for cell in expansion.cells(combination, line):
                seeded = {**cell.axes, SEED: str(cell.config.seed)}
                if line is None and _first_matching_rule(seed_rules, seeded) is not None:
                    continue
                twin = cells_by_id.setdefault(cell.id, cell)
                if twin is not cell:
                    raise self._duplicate_cell_error(twin, cell, line)
                cells.append(cell)
        if not cells:
            raise self.document.error(("exclude",), "drops every cell; nothing is left to run")
        # other lengths on the command line are an experiment, for which declared contrasts need not fit
        if not any(path.startswith(sections.EVALUATION) for path in self.command_line):
            sections.check_lengths(self.document, self.contrasts, cells)
        return cells

    def expansion(self, fingerprint: Fingerprint, prepared: PreparedLookup = lambda name: None) -> Expansion:
        """Return the factory that makes cells of single combinations or trials; its caches last as long as it does."""
        return Expansion(self, fingerprint, prepared)

    @property
    def short_path(self) -> str:
        """Return the path that names the file on a command line; the name alone for a shipped grid."""
        path = self.document.path
        return path.stem if path.parent == GRIDS else str(path)

    def setting(self, path: str) -> Setting | None:
        """Return the effective setting of a dotted path from base, file or command line; None if it is unset.

        Levels of axes are ignored, and so are defaults. A relative file path comes back absolute. Raises GridError for
        a file path that is not valid.
        """
        return settings.merge([*self.layers, self.command_line]).get(path)

    def studies(self) -> dict[str, Grid]:
        """Return level name -> the study of that level, as a grid of its own; empty without `tune`.

        A study has the grid's settings, the level, the fixed levels of other axes, and the first seed. It has no axes,
        contrasts or design.
        """
        if self.tune is None:
            return {}
        studies = {}
        for word, level in self.tune.levels.items():
            layer: Layer = {}
            for axis, value in {self.tune.per: level, **self.tune.fixed_levels}.items():
                settings.add_level(
                    layer,
                    axis,
                    Setting(value, self.document.path, self.tune.line, TUNE),
                    self.custom_axes,
                    self.level_settings,
                )
            studies[word] = Grid(
                name=self.tune.study_name(self.name, word),
                description=f"Tuning study of {self.name} for {self.tune.per} {word}",
                document=self.document,
                axes={}, custom_axes={}, level_settings={}, exclude=[], include=[], seeds=[*self.seeds][:1],
                layers=[*self.layers, layer],
                command_line=self.command_line,
                plugins=self.plugins,
                search=self.tune.search,
                study_level=word,
                initial=self.initial,
            )  # fmt: skip
        return studies

    def _duplicate_cell_error(self, first: Cell, second: Cell, line: int | None) -> GridError:
        """Return the error for two combinations that resolve to one cell.

        The error points to the `include` rule at `line`, or for None to the first axis whose levels differ.
        """
        names = [combination_text(cell.axes, cell.config.seed) for cell in (first, second)]
        problem = f"cells {names[0]} and {names[1]} are the same cell; exclude one of them"
        if line is not None:
            return GridError(self.document.path, line, "include", problem)
        axis = next(name for name, word in second.axes.items() if first.axes[name] != word)
        return self.document.error(("axes", axis), problem)

    def _crossed(self) -> Iterator[tuple[Combination, dict[str, str]]]:
        """Yield every combination of `axes` in grid order: (axis -> level as written, axis -> level as text).

        Without axes, one empty combination.
        """
        texts = [[level_text(name, level) for level in levels] for name, levels in self.axes.items()]
        for levels, level_names in zip(itertools.product(*self.axes.values()), itertools.product(*texts), strict=True):
            yield dict(zip(self.axes, levels, strict=True)), dict(zip(self.axes, level_names, strict=True))

    def _combinations(self) -> Iterator[tuple[Combination, int | None]]:
        """Yield (combination, line) after `exclude` and design: those of `axes` first, then those of `include`.

        The line is None for combinations of `axes`, else that of the `include` rule. A combination is axis -> level as
        written, without a seed. Rules of `exclude` that name seeds are not applied. A grid with `include` and without
        axes yields those of `include` alone.
        """
        if self.axes or not self.include:
            dropped = self._exclude_rules(seeds=False)
            members = None if self.chosen is None else set(self.chosen.members.tolist())
            combinations = (
                levels for levels, level_names in self._crossed() if _first_matching_rule(dropped, level_names) is None
            )
            yield from (
                (levels, None) for index, levels in enumerate(combinations) if members is None or index in members
            )
        for rule, line in self.include:
            for levels in itertools.product(*rule.values()):
                yield dict(zip(rule, levels, strict=True)), line

    def _exclude_rules(self, *, seeds: bool) -> list[NumberedRule]:
        """Return the `exclude` rules with their indices: those with a key "seed" for `seeds`, else those without."""
        return [(index, rule) for index, rule in enumerate(self.exclude) if (SEED in rule) == seeds]

    def excluded_combinations(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (index in `exclude` of the first rule that matches, combination) for all that `exclude` drops.

        A combination is axis -> level text. Where a rule drops single seeds, there is one item per dropped seed, with
        the additional key SEED. Combinations of `include` are never dropped.
        """
        if not self.exclude:
            return
        combination_rules, seed_rules = self._exclude_rules(seeds=False), self._exclude_rules(seeds=True)
        for _, level_names in self._crossed():
            if (first := _first_matching_rule(combination_rules, level_names)) is not None:
                yield first, level_names
                continue
            for seed in self.seeds if seed_rules else ():
                seeded = {**level_names, SEED: str(seed)}
                if (first := _first_matching_rule(seed_rules, seeded)) is not None:
                    yield first, seeded

    def check_size(self, max_cells: int) -> None:
        """Raise GridError if the grid has more than `max_cells` cells; the error points to the largest factor.

        Cells are counted, not made; those that `exclude` or a design drops count too, and so do all seeds of a stopping
        rule.
        """
        seeds = self.seeds.stop if isinstance(self.seeds, range) else len(self.seeds)  # len() fails beyond 2**63
        seeds = seeds if self.stop is None else self.stop.max_seeds
        factors = {f"axes.{name}": len(levels) for name, levels in self.axes.items()}
        crossed = math.prod(factors.values()) if self.axes or not self.include else 0
        included = sum(math.prod(map(len, rule.values())) for rule, _ in self.include)
        cells = (crossed + included) * seeds
        if cells <= max_cells:
            return
        sources = {"seeds": seeds, "include": included, **factors}
        largest = max(sources, key=lambda key: sources[key])
        dropped = ", including those dropped by exclude" if self.exclude else ""
        raise self.document.error(
            tuple(largest.split(".", 1)),
            f"the grid has {cells:,} cells{dropped}, more than the limit of {max_cells:,}; --cells {cells} raises the limit",
        )


def _first_matching_rule(rules: Iterable[NumberedRule], level_names: Mapping[str, str]) -> int | None:
    """Return the index in `exclude` of the first rule that matches a combination of level texts; None if none does.

    A rule matches if the level of each of its axes is among the rule's levels. KeyError for an axis that is missing.
    """
    return next(
        (index for index, rule in rules if all(level_names[name] in levels for name, levels in rule.items())), None
    )


def combination_text(levels: Mapping[str, str], seed: int) -> str:
    """Return a combination and its seed as text, such as "(attn_type=polar, memory=on, seed=0)"."""
    return "(" + ", ".join([*(f"{name}={word}" for name, word in levels.items()), f"seed={seed}"]) + ")"


def load_grid(
    name: str | Path, *, sets: Sequence[str] = (), rename: str | None = None, max_cells: int | None = None
) -> Grid:
    """Read and check a grid file with its bases; plugins that it names are imported first.

    A stopping rule's contrast is added to the contrasts. No cell is made, so invalid values of settings are not noticed
    yet.

    Args:
        name: Path of the file, or name of a shipped grid.
        sets: Overrides `path=value` of `--set`, of highest precedence; they require `rename` to another name.
        rename: Name of the sweep instead of the file's own.
        max_cells: Largest number of cells; None for 20,000 (MOST_CELLS).

    Raises:
        GridError: For a file that is missing or invalid, and for a grid that is too large.
    """
    path = find_file(name)
    if path is None and Path(name).parent == Path("grids"):
        path = find_file(Path(name).name)
    if path is None:
        raise GridError(name, None, "", "no such grid file", shipped(), Path(name).stem)
    document = load(path)
    # Plugins first: their mixers are levels that the rest of the file may name.
    plugins = (*_plugins(document), *installed_plugins(lambda: _mentioned_names(document, sets)))
    file = _validated(document)
    layers = _layers(document, file)
    custom_axes = settings.named_axes(document, file.axes)
    crossed = _axes(document, file.axes, custom_axes)
    included = _include(document, file.include, custom_axes)
    all_levels = {axis: list(levels) for axis, levels in crossed.items()}
    for rule, _ in included:
        for axis, levels in rule.items():
            all_levels.setdefault(axis, []).extend(levels)
    if not file.name:
        raise GridError(path, 1, "name", "is missing; give the sweep a name")
    if rename is not None and (why := sweep_name_problem(rename)):
        raise GridError("--name", None, "", f"{quoted_short(rename)} {why}")
    if rename is None and (why := sweep_name_problem(file.name)):
        raise document.error(("name",), f"{quoted_short(file.name)} {why}")
    if sets and (rename is None or rename == file.name):
        raise GridError("--set", None, "", f"a changed grid needs its own name; add --name with a name other than {file.name!r}")  # fmt: skip
    grid = Grid(
        name=rename or file.name,
        description=file.description,
        document=document,
        axes=crossed,
        custom_axes=custom_axes,
        level_settings=settings.read_level_settings(document, file.levels, all_levels),
        exclude=_exclude(document, file, crossed),
        include=included,
        seeds=file.seeds,
        layers=layers,
        command_line=_command_line(sets),
        plugins=plugins,
        contrasts=sections.read_contrasts(document, file.contrasts, all_levels),
    )
    allowed = MOST_CELLS if max_cells is None else max_cells
    grid.check_size(allowed)
    if file.search is not None:
        if len(grid.seeds) > 1:
            raise document.error(("seeds",), "a study has one seed, because each trial is one cell; give seeds: [0]")
        return replace(grid, search=file.search.search())
    if file.tune is not None:
        tune = sections.read_tune(document, file.tune, all_levels, grid.name, custom_axes, grid.level_settings)
        grid = replace(grid, tune=tune)
    if file.stop is not None:
        rule = sections.read_stop(document, file.stop, all_levels, grid.seeds)
        grid = replace(grid, stop=rule, contrasts=sections.with_contrast(grid.contrasts, rule, all_levels))
        grid.check_size(allowed)
    if file.design is not None:
        chosen_design = designs.read_design(document, file.design, grid.axes, grid.exclude, grid.contrasts)
        grid = replace(grid, chosen=chosen_design)
    return grid


def _validated(document: GridDocument) -> GridFile:
    """Return the file's keys as a checked GridFile.

    Raises GridError with the line of the first problem. Values of settings and names of axes are checked later.
    """
    try:
        return GridFile.model_validate(document.data)
    except ValidationError as error:
        raise document.as_grid_error(error) from error


def _layers(document: GridDocument, file: GridFile, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """Return the settings of the base chain, oldest first, then the file's own `set` and `resources` as one layer.

    Without a base, the list has one layer; each base adds one. Bases are read from disk.

    Args:
        document: The file.
        file: Its validated keys.
        seen: Resolved paths of the files that extend this one, to detect cycles.

    Raises:
        GridError: For a base that does not exist, extends itself, or has other keys than description, extends, set and
            resources; for an unknown setting, and one that is set twice in a file.
    """
    layers: list[Layer] = []
    if file.extends:
        path, this_path = find_file(file.extends, document.path.parent, "base"), document.path.resolve()
        if path is None:
            raise document.error(("extends",), f"no base {file.extends!r}", shipped("base"), file.extends)
        if path.resolve() in (*seen, this_path):
            raise document.error(("extends",), f"base {file.extends!r} extends itself")
        base = load(path)
        for key in base.data:
            if key not in BASE_KEYS:
                raise base.error((key,), "no such key", BASE_KEYS, key)
        layers = _layers(base, _validated(base), (*seen, this_path))
    own: Layer = {}
    for section, prefix, tree in (("set", "", file.set), ("resources", "resources.", file.resources)):
        for path_, value, line, written in settings.flatten(tree, document, (section,)):
            settings.add_setting(own, prefix + path_, Setting(value, document.path, line, f"{section}.{written}"))
    return [*layers, own]


def _check_axis(document: GridDocument, custom_axes: NamedLevels, name: str, *where: str | int) -> None:
    """Raise GridError for an axis that is neither built in, nor defined in the file, nor the path of a setting.

    The error is at the key path `where`.
    """
    if name in settings.AXES or name in custom_axes:
        return
    if "." not in name and name not in settings.COMPUTED and settings.path_problem(name):
        allowed = [*settings.AXES, *custom_axes, "or a config path such as train.muon_lr"]
        raise document.error(where, "no such axis", allowed, name)
    if wrong := settings.path_problem(name):
        raise document.error(where, *wrong)


def _check_level(
    document: GridDocument, custom_axes: NamedLevels, name: str, level: Any, where: KeyPath, *, below: KeyPath = ()
) -> None:
    """Raise GridError for a level that a built-in or custom axis does not have, at the key path `where` + `below`.

    Levels of setting paths are not checked here, but when their cells are made.
    """
    if name in settings.AXES or name in custom_axes:
        levels = custom_axes[name] if name in custom_axes else settings.AXES[name].levels()
        if level_text(name, level) not in levels:
            problem, allowed = settings.unknown_level(str(level), levels)
            raise document.error(where, problem, allowed, str(level), below=below)


def _axes(document: GridDocument, axes: Mapping[str, Any], custom_axes: NamedLevels) -> dict[str, list[Any]]:
    """Return axis -> levels as written, in the order of the file; of a custom axis the names of its levels.

    Raises GridError for an unknown axis, no levels, an unknown level, or one given twice in canonical form.
    """
    levels_by_axis: dict[str, list[Any]] = {}
    for name, levels in axes.items():
        if name in custom_axes:
            levels_by_axis[name] = [*custom_axes[name]]
            continue
        where = ("axes", name)
        _check_axis(document, custom_axes, name, *where)
        if not isinstance(levels, list):
            raise document.error(where, f"must be a list of levels, got {levels!r}")
        if not levels:
            raise document.error(where, "has no levels; give at least one, or remove the axis")
        seen: set[str] = set()
        for index, level in enumerate(levels):
            _check_level(document, custom_axes, name, level, where, below=(index,))
            word = level_text(name, level)
            if word in seen:
                raise document.error(where, f"level {word!r} given twice", below=(index,))
            seen.add(word)
        levels_by_axis[name] = levels
    return levels_by_axis


def _exclude(document: GridDocument, file: GridFile, crossed: Mapping[str, list[Any]]) -> list[dict[str, list[str]]]:
    """Return the `exclude` rules as axis -> level texts; of the key "seed", the seeds as text.

    Raises GridError for axes, levels or seeds that the grid does not have. Axes of `include` alone cannot be named.
    """
    rules = []
    texts = {name: dict.fromkeys(level_text(name, level) for level in levels) for name, levels in crossed.items()}
    for index, rule in enumerate(file.exclude):
        for name, levels in rule.items():
            where = ("exclude", index, name)
            if name == SEED:
                _check_seeds(document, where, levels, file.seeds)
                continue
            if name not in crossed:
                raise document.error(where, "not an axis of this grid", [*crossed, SEED], name)
            for level in levels:
                if level_text(name, level) not in texts[name]:
                    raise document.error(where, f"no level {level!r} in this grid", texts[name], str(level))
        rules.append({name: [level_text(name, level) for level in levels] for name, levels in rule.items()})
    return rules


def _check_seeds(document: GridDocument, where: KeyPath, named: Sequence[Any], seeds: Sequence[int]) -> None:
    """Raise GridError for seeds of an `exclude` rule that the grid lacks or cannot drop.

    With a design or a stopping rule none can be dropped, because all combinations have the same seeds.

    Args:
        document: The grid file, for the lines of errors.
        where: Key path of the rule's seeds.
        named: Seeds of the rule.
        seeds: Seeds of the grid.
    """
    for key in (designs.KEY, sections.STOP):
        if key in document.data:
            raise document.error(
                where, f"cannot be combined with {key}, which uses the same seeds for every cell; remove one of them"
            )
    for seed in named:
        if not isinstance(seed, int) or isinstance(seed, bool) or seed not in seeds:
            few = [str(number) for number in itertools.islice(seeds, 20)]
            raise document.error(where, f"no seed {seed!r} in this grid", few)


def _include(
    document: GridDocument, rules: Sequence[dict[str, list[Any]]], custom_axes: NamedLevels
) -> list[tuple[dict[str, list[Any]], int]]:
    """Return the `include` rules unchanged, each with its line. Raises GridError for an unknown axis or level."""
    for index, rule in enumerate(rules):
        for name, levels in rule.items():
            where = ("include", index, name)
            _check_axis(document, custom_axes, name, *where)
            for level in levels:
                _check_level(document, custom_axes, name, level, where)
    return [(rule, document.line("include", index)) for index, rule in enumerate(rules)]


def _plugins(document: GridDocument) -> Iterator[Plugin]:
    """Import the plugin files that a grid names, and yield each with its hash.

    Paths are relative to the grid's folder. A `plugins` value that is no list yields nothing; validation reports it
    later.

    Raises:
        GridError: For a file that is missing or whose import fails.
    """
    names = document.data.get("plugins", [])
    for index, name in enumerate(names if isinstance(names, list) else []):
        path = document.path.parent / str(name)
        if not os.path.isfile(path):
            near = sorted(p.name for p in document.path.parent.glob("*.py"))
            problem = f"no file {name!r} next to the grid"
            raise document.error(("plugins",), problem, near, str(name), below=(index,))
        try:
            yield load_plugin(path.resolve())
        except PluginExited as error:
            raise document.error(("plugins",), str(error), below=(index,)) from error
        except Exception as error:
            problem = f"{name} cannot be loaded: {cause_of(error)}"
            raise document.error(("plugins",), problem, below=(index,)) from error


def _mentioned_names(document: GridDocument, sets: Sequence[str]) -> set[str]:
    """Return every word of a grid file, of its bases and of `--set`, any of which may name an installed part."""
    texts, seen = [document.text, *sets], {document.path.resolve()}
    base = document.data.get("extends")
    folder = document.path.parent
    while isinstance(base, str) and (path := find_file(base, folder, "base")) and path.resolve() not in seen:
        seen.add(path.resolve())
        file = load(path)
        texts.append(file.text)
        base, folder = file.data.get("extends"), path.parent
    return {word for text in texts for word in re.findall(r"[\w-]+", text)}


def parse_value(text: str) -> Any:
    """Return a command-line value as YAML reads it, or the text itself if it is not valid YAML.

    Raises GridError if it has too many values or is not valid UTF-8.
    """
    if not is_utf8(text):
        raise GridError("command line", None, quoted_short(text), "is not valid UTF-8 and cannot be recorded")
    try:
        return value_of(text)
    except ValueLimitExceeded as error:
        raise GridError("command line", None, text[:40], str(error)) from error


def _command_line(sets: Sequence[str]) -> Layer:
    """Return the overrides of `--set` as one layer: dotted path -> setting, without a line.

    Raises GridError for text without "=", an unknown path, and a path that is set twice.
    """
    layer: Layer = {}
    for item in sets:
        path, equals, value = item.partition("=")
        if not equals:
            raise GridError("--set", None, item, "must read path=value, for example train.tokens=1e6")
        settings.add_setting(layer, path.strip(), Setting(parse_value(value), "--set", None, path.strip()))
    return layer
