"""Parts of installed packages: what a package on PyPI adds under the entry-point groups of this program.

    [project.entry-points."atma_sweep.mixers"]
    fade = "atma_fade.mixer:Fade"

Nothing is imported before a part is used, so that a package that fails breaks only what uses it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = (
    "mixers", "memories", "positions", "regularizers", "probes", "corpora", "tables", "figures", "executors",
)  # fmt: skip
"""Kinds of parts; the entry-point group of a kind is "atma_sweep." and its name."""

PACKAGE = "package:"
"""What the path of a plugin begins with that is a part of an installed package: package:NAME==VERSION:GROUP.PART."""

Spec = TypeVar("Spec")


class InstalledPartError(UserError):
    """An installed package cannot provide a part: it fails, has changed, or two packages have one name."""


@dataclass(frozen=True)
class InstalledPart:
    """A part that an installed package provides."""

    group: str
    """Kind of part, one of GROUPS."""
    name: str
    package: str
    """Name of the distribution, as `pip install` takes it."""
    version: str
    entry_point: EntryPoint

    def load(self) -> Any:
        """Import and return the object that the entry point names.

        Raises:
            InstalledPartError: The import fails.
        """
        try:
            return self.entry_point.load()
        except Exception as error:
            message = " ".join(str(error).split())
            raise InstalledPartError(
                f"{self.group} {self.name!r} of the installed package {self.package} {self.version} cannot be loaded: "
                f"{type(error).__name__}: {message}; upgrade or uninstall that package"
            ) from error

    @property
    def sha256(self) -> str:
        """SHA-256, in hex, over the names and contents of all Python files of the part's top-level module.

        Raises:
            InstalledPartError: The module cannot be found.
        """
        return _source_sha256(self.entry_point.module.partition(".")[0], self.package)


def load_target(package: str, target: str) -> Any:
    """Import and return what a specification names: a module, or an attribute of one. Errors of the import pass through.

    Args:
        package: Absolute package that the target is relative to.
        target: "module" or "module:attribute".
    """
    module, _, attribute = target.partition(":")
    imported = importlib.import_module(f".{module}", package)
    return getattr(imported, attribute) if attribute else imported


def import_target(package: str, target: str) -> Any:
    """Do as `load_target` for an installed package, whose errors are one line.

    Raises:
        InstalledPartError: The import fails, or there is no such attribute.
    """
    try:
        return load_target(package, target)
    except Exception as error:
        message = " ".join(str(error).split())
        raise InstalledPartError(
            f"{target} of the installed package {package} cannot be loaded: {type(error).__name__}: {message}; upgrade "
            "or uninstall that package"
        ) from error


@contextlib.contextmanager
def running_part(group: str, name: str, package: str) -> Iterator[None]:
    """Give an unexpected error of an installed package's part one line; errors for users pass through.

    Args:
        group: Kind of part, one of GROUPS.
        name: Name of the part.
        package: Absolute name of its package; empty for a part of this program, whose errors all pass through.

    Raises:
        InstalledPartError: The part raised an error that is no UserError; that error is its `__cause__`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not package:
            raise
        message = " ".join(str(error).split())
        raise InstalledPartError(
            f"{group} {name!r} of the installed package {package} failed: {type(error).__name__}: {message} "
            f"({_error_location(error, package)}); upgrade or uninstall that package"
        ) from error


def _error_location(error: Exception, package: str) -> str:
    """Return file:line of the innermost frame in a package's code, or of the innermost frame of all if it has none."""
    steps = list(traceback.walk_tb(error.__traceback__))
    top = package.partition(".")[0]
    own = [step for step in steps if str(step[0].f_globals.get("__name__")).partition(".")[0] == top]
    frame, line = (own or steps)[-1]
    return f"{frame.f_code.co_filename}:{line}"


@functools.cache
def _source_sha256(module: str, package: str) -> str:
    """Return the hash of a top-level module's Python files, in the order of their names.

    Raises:
        InstalledPartError: There is no such module, or it is not made of files.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        raise InstalledPartError(f"the installed package {package} has no module {module}; install it again")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [(file.relative_to(folder).as_posix(), file) for folder in folders for file in sorted(folder.rglob("*.py"))]
    digest = hashlib.sha256()
    for name, file in files or [(Path(str(spec.origin)).name, Path(str(spec.origin)))]:
        content = file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def describe_plugins(plugins: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line per plugin file or installed package: name, version, SHA-256 (12 digits), and parts of a package.

    Args:
        plugins: Entries of `plugins` in configs of cells, with path and sha256; equal ones count once.
    """
    parts: dict[tuple[str, str], list[str]] = {}
    for plugin in plugins:
        path, digest = str(plugin["path"]), str(plugin["sha256"])[:12]
        package, _, part = path.removeprefix(PACKAGE).rpartition(":") if path.startswith(PACKAGE) else ("", "", "")
        owner = package.replace("==", " ") or Path(path).name
        names = parts.setdefault((owner, digest), [])
        if part and part not in names:
            names.append(part)
    return [
        f"{owner} (SHA-256 {digest})" + (f": {', '.join(names)}" if names else "")
        for (owner, digest), names in parts.items()
    ]


@functools.cache
def _entries() -> Mapping[tuple[str, str], tuple[InstalledPart, ...]]:
    """Return the parts of all installed packages by (group, name); several packages may have one name."""
    from importlib import metadata  # takes a fifth of the time of `status`

    entries: dict[tuple[str, str], tuple[InstalledPart, ...]] = {}
    every = metadata.entry_points()  # once, as it reads the metadata of every package
    for group in GROUPS:
        for entry in every.select(group=f"atma_sweep.{group}"):
            owner = entry.dist
            part = InstalledPart(
                group, entry.name, owner.name if owner else "unknown", owner.version if owner else "unknown", entry
            )
            same = entries.get((group, entry.name), ())
            entries[group, entry.name] = same if part in same else (*same, part)
    return entries


def installed_names(group: str) -> list[str]:
    """Return the names of the parts of one kind that installed packages provide, sorted."""
    return sorted(name for kind, name in _entries() if kind == group)


def installed_part(group: str, name: str) -> InstalledPart | None:
    """Return the part of that kind and name; None if no installed package provides it.

    Raises:
        InstalledPartError: Two packages provide it.
    """
    parts = _entries().get((group, name), ())
    if len(parts) > 1:
        owners = " and ".join(f"{part.package} {part.version}" for part in parts)
        raise InstalledPartError(
            f"the installed packages {owners} both provide {group} {name!r}; uninstall one of them"
        )
    return parts[0] if parts else None


class SpecRegistry(Mapping[str, Spec], Generic[Spec]):
    """Mapping from name to the specification of a table, figure or executor: this program's, then installed ones."""

    def __init__(self, group: str, own: Mapping[str, Spec], check: Callable[[str, Any], Spec]) -> None:
        """Create a registry.

        Args:
            group: Kind of part, one of GROUPS.
            own: This program's specifications by name; an installed part of the same name is not used.
            check: Function of a name and a loaded object that returns the specification, or raises TypeError.
        """
        self.group, self.own, self._check = group, own, check

    def __getitem__(self, name: str) -> Spec:
        """Return a specification. Raises KeyError, and InstalledPartError for an installed one that cannot be used."""
        if name in self.own:
            return self.own[name]
        part = installed_part(self.group, name)
        if part is None:
            raise KeyError(name)
        try:
            return self._check(name, part.load())
        except TypeError as error:
            raise InstalledPartError(
                f"{self.group} {name!r} of the installed package {part.package}: {error}"
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self.own or (isinstance(name, str) and (self.group, name) in _entries())

    def __iter__(self) -> Iterator[str]:
        """Iterate over this program's names, then over those of installed packages that can be loaded."""
        yield from self.own
        for name in installed_names(self.group):
            if name not in self.own and self._is_usable(name):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _is_usable(self, name: str) -> bool:
        """Return True if an installed specification can be loaded."""
        try:
            self[name]
        except InstalledPartError:
            return False
        return True
