"""Plugins: Python files that a grid names, and installed packages, that provide mixers, memories, corpora and more."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...model.registry import MEMORIES, MIXERS, POSITIONS, REGULARIZERS, Registry, registering_for
from ...model.resolve import NO_MEMORY, NO_MIXER, NO_POSITIONS, NO_REGULARIZER
from ...results.exchange.installed_parts import PACKAGE, InstalledPartError, installed_names, installed_part
from ..config import Plugin
from ..data.registry import CORPORA
from ..errors import GridError, SweepError
from ..host.signals import StopRequested
from ..probes import PROBES, register_probe


class Pluggable(NamedTuple):
    """A part of a cell that a plugin may define, and the config fields that name it."""

    registry: Registry[Any]
    section: str
    name: str
    """Field of the section that holds the part's name."""
    source: str
    """Field of the SHA-256 of the plugin file that defines the part; the value is None for a built-in part."""
    none_name: str | None = None
    """Name that means the part is switched off, such as "none"."""
    allows_unregistered: bool = False
    """True if names outside the registry are valid too, as those of prepared corpora are."""


PLUGGABLE = (
    Pluggable(MIXERS, "model", "attn_type", "mixer_source", none_name=NO_MIXER),
    Pluggable(MEMORIES, "model", "memory", "memory_source", none_name=NO_MEMORY),
    Pluggable(POSITIONS, "model", "positions", "position_source", none_name=NO_POSITIONS),
    Pluggable(CORPORA, "data", "corpus", "corpus_source", allows_unregistered=True),
    Pluggable(REGULARIZERS, "train", "regularizer", "regularizer_source", none_name=NO_REGULARIZER),
)


REGISTRIES: dict[str, Registry[Any]] = {
    "mixers": MIXERS, "memories": MEMORIES, "positions": POSITIONS, "regularizers": REGULARIZERS, "corpora": CORPORA,
    "probes": PROBES,
}  # fmt: skip
"""Registry of the parts of a cell by their group of entry points."""


class PluginChanged(SweepError):
    """Raised when a plugin file differs from the one that the cell's id was computed with."""


class PluginExited(SweepError):
    """Raised when a plugin exits the importing process, or raises something that is not an Exception."""


def cause_of(error: BaseException) -> str:
    """Return "TYPE: MESSAGE" of an error in one line; never raises, even if the error's `__str__` does."""
    try:
        message = " ".join(str(error).split())
    except BaseException as second:  # noqa: BLE001 - the `__str__` of a plug-in may raise anything
        message = f"its message cannot be read ({type(second).__name__})"
    return f"{type(error).__name__}: {message}"


def load_plugin(path: Path, sha256: str | None = None) -> Plugin:
    """Import a plugin file or a part of an installed package, once per process and content; return path and SHA-256.

    The registrations that it makes are recorded under its hash. A failed import leaves no module behind.

    Args:
        path: The Python file, or "package:NAME==VERSION:GROUP.PART"; returned as given.
        sha256: Expected hash of the file's bytes, or of the package's Python files; None accepts any.

    Raises:
        PluginChanged: If the hash differs from `sha256`.
        InstalledPartError: If the package is not installed, or its import fails.
        PluginExited: If the file calls sys.exit or raises something that is not an Exception.
        OSError: If the file cannot be read.
        ImportError: If its name does not end as that of a Python file.
        Exception: Any exception of the file itself; KeyboardInterrupt and StopRequested pass through too.
    """
    if is_installed(path):
        return _load_installed(str(path), sha256)
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    if sha256 is not None and digest != sha256:
        raise PluginChanged(
            f"{path} has changed since its cell was planned (sha256 {digest[:12]}, planned {sha256[:12]}); launch the grid again"
        )
    name = _module(digest)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            # run the bytes that were hashed, never a cached .pyc file
            with registering_for(name):
                exec(compile(source, str(path), "exec"), module.__dict__)
        except SystemExit as error:
            del sys.modules[name]
            code = error.code if isinstance(error.code, int | str | None) else type(error.code).__name__
            raise PluginExited(
                f"{path}: ends the process with exit code {code} when it is imported; a plugin must not call sys.exit"
            ) from error
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, Exception | StopRequested) or type(error) is KeyboardInterrupt:
                raise
            raise PluginExited(
                f"{path}: raises {cause_of(error)} when it is imported; a plugin may raise only an Exception"
            ) from error
    return Plugin(path=str(path), sha256=digest)


def is_installed(path: Path | str) -> bool:
    """Return True if a plugin's path names a part of an installed package, not a file."""
    return str(path).startswith(PACKAGE)


def _load_installed(path: str, sha256: str | None) -> Plugin:
    """Import a part of an installed package and register it under the package's hash.

    Raises:
        PluginChanged: If the hash differs from `sha256`.
        InstalledPartError: If the package is not installed, or its import fails.
    """
    package, _, part_name = path.removeprefix(PACKAGE).rpartition(":")
    group, _, name = part_name.partition(".")
    part = installed_part(group, name)
    if part is None:
        raise InstalledPartError(f"{group} {name!r} is not installed here; pip install {package}")
    if sha256 is not None and part.sha256 != sha256:
        raise PluginChanged(
            f"the code of the installed package {part.package} {part.version} differs from that of {package}, which the "
            f"cell was planned with; pip install {package}, or launch the grid again"
        )
    registry = REGISTRIES[group]
    with registering_for(_module(part.sha256)):
        provided = part.load()
        if registry.owner(name) is None:
            register = register_probe if group == "probes" else registry.register
            try:
                register(name)(provided)
            except (TypeError, ValueError) as error:
                raise InstalledPartError(
                    f"{group} {name!r} of the installed package {part.package} {part.version}: {error}"
                ) from error
    return Plugin(path=path, sha256=part.sha256)


def installed_plugins(mentioned: Callable[[], Container[str]]) -> list[Plugin]:
    """Import the parts of installed packages that a grid mentions, and return them as plugins.

    This program's own parts, and those that plugin files have registered, are preferred to installed ones.

    Args:
        mentioned: Function that returns the names of parts that may be meant; called only if packages provide any.

    Raises:
        InstalledPartError: If two packages provide a part, or its import fails.
    """
    available = {group: installed_names(group) for group in REGISTRIES}
    if not any(available.values()):
        return []
    names, plugins = mentioned(), []
    for group, registry in REGISTRIES.items():
        for name in available[group]:
            if name not in names or (name in registry and registry.owner(name) is None):
                continue
            part = installed_part(group, name)
            assert part is not None
            if name not in registry or registry.owner(name) == _module(part.sha256):
                plugins.append(load_plugin(Path(f"{PACKAGE}{part.package}=={part.version}:{group}.{name}")))
    return plugins


def load_plugins(files: Iterable[Path]) -> tuple[Plugin, ...]:
    """Import the plugin files of the option `--plugin`, and return each with its absolute path and hash, in order.

    Raises:
        GridError: For a missing file, and for one whose import raises an Exception.
        PluginExited: If a file calls sys.exit or raises something that is not an Exception.
    """
    plugins = []
    for file in files:
        if not file.is_file():
            raise GridError("--plugin", None, str(file), "no such file")
        try:
            plugins.append(load_plugin(file.resolve()))
        except PluginExited:
            raise
        except Exception as error:
            raise GridError("--plugin", None, str(file), f"cannot be loaded: {cause_of(error)}") from error
    return tuple(plugins)


def plugin_of(registry: Registry[Any], name: str, plugins: tuple[Plugin, ...]) -> str | None:
    """Return the SHA-256 of the plugin among `plugins` that registered `name`.

    None for a built-in part, an unknown name, and a part of a plugin that is not among them.
    """
    owner = registry.owner(name)
    return next((plugin.sha256 for plugin in plugins if owner == _module(plugin.sha256)), None)


def source_of(part: Pluggable, name: str, plugins: tuple[Plugin, ...]) -> str | None:
    """Return the SHA-256 of the plugin that defines the part `name`; None for a built-in part."""
    return plugin_of(part.registry, name, plugins)


def with_sources(section: str, config: Any, plugins: tuple[Plugin, ...]) -> Any:
    """Return a copy of the section with the plugin hash of each of its parts filled in (None for built-in parts).

    A section without such parts is returned itself.

    Args:
        section: Name of the section, such as "model".
        config: The section.
        plugins: Plugins that the grid has loaded.
    """
    sources = {
        part.source: source_of(part, getattr(config, part.name), plugins)
        for part in PLUGGABLE
        if part.section == section
    }
    return config.model_copy(update=sources) if sources else config


def _module(digest: str) -> str:
    """Return the module name under which the plugin file with that hash is imported."""
    return f"atma_sweep_plugin_{digest[:12]}"
