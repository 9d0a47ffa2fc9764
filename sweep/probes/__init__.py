"""Evaluations of a trained model: a file per probe, and a line in PROBES or a plugin's `register_probe`.

May import sweep.data, sweep.config, model and results; no file but subject.py, harness.py and
diagnostics/memory_state.py imports torch at its top, directly or not. Start reading in base.py, then needle.py; the diagnostics folder holds the probes that look inside a
network.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from ...model.registry import Registry
from ...results.metrics import SAMPLES, TEXT_SEPARATOR, TRAINING_SOURCES, Metric
from ..config import CellConfig, EvalConfig
from .base import Probe, ProbeConfig

__all__ = ["PROBES", "Metric", "Probe", "ProbeConfig", "bound", "register_probe", "requested", "with_settings"]


class ProbeRegistry(Registry[type[Probe]]):
    """Registry of probes, which loads `clean:code`, a probe on a further text, by the name of the probe."""

    def load(self, name: str) -> type[Probe]:
        """Import and return the class of a probe; KeyError if there is none."""
        return super().load(name.partition(TEXT_SEPARATOR)[0])

    def owner(self, name: str) -> str | None:
        """Return the name of the module that registered the probe; None for the package's own and unknown names."""
        return super().owner(name.partition(TEXT_SEPARATOR)[0])


PROBES = ProbeRegistry("probe", __name__, {
    "val": "perplexity:Validation",
    "clean": "perplexity:Clean",
    "junk": "perplexity:Junk",
    "needle": "needle:Needle",
    "same_tail": "perplexity:SameTail",
    "state_norm": "diagnostics.state_norm:StateNorm",
    "count_map": "diagnostics.count_map:CountMap",
    "position_nll": "position_nll:PositionNll",
    "flipflop": "flipflop:FlipFlopProbe",
    "mqar": "mqar:MqarProbe",
    "mad": "mad:MadProbe",
    "gates": "diagnostics.gates:Gates",
    "gate_dynamics": "diagnostics.gate_dynamics:GateDynamics",
    "attention_map": "diagnostics.attention_map:AttentionMap",
    "extrapolation": "extrapolation:Extrapolation",
    "passkey": "passkey:Passkey",
    "memory_recall": "diagnostics.memory_recall:MemoryRecall",
    "decode": "decode:Decode",
    "downstream": "downstream:Downstream",
}, reserved=(*TRAINING_SOURCES, SAMPLES))  # fmt: skip

Registered = TypeVar("Registered", bound=type[Probe])
_NAME = re.compile("[a-z][a-z0-9_]*")


def register_probe(name: str) -> Callable[[Registered], Registered]:
    """Return a class decorator for plugins that registers a subclass of `Probe` and returns it unchanged.

    Args:
        name: Small letters, digits and _, a letter first; it must not be that of another probe or of a source of
            training numbers.

    Raises:
        ValueError: The name is reserved, not allowed in a grid, or (on decoration) in use.
        TypeError: The class (on decoration) declares no metrics, an entry that is no `Metric`, or a name twice, or an
            abstract method is missing.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"invalid probe name {name!r}; use lower-case letters, digits and _, starting with a letter")
    register = PROBES.register(name)

    def register_checked(probe: Registered) -> Registered:
        """Register the class after checking its metrics and methods, and return it."""
        metrics = getattr(probe, "metrics", ())
        names = [metric.name for metric in metrics if isinstance(metric, Metric)]
        if not names or len(names) < len(metrics) or len(set(names)) < len(names):
            raise TypeError(f"probe {name!r} must have `metrics`, a tuple of at least one Metric with distinct names")
        if missing := sorted(getattr(probe, "__abstractmethods__", ())):
            raise TypeError(f"probe {name!r} must define {' and '.join(missing)}")
        return register(probe)

    return register_checked


def bound(name: str, config: CellConfig) -> Probe:
    """Return the probe `name` with the settings of a cell.

    Raises:
        KeyError: No probe has that name.
        ValidationError: A setting of the probe is invalid (pydantic).
    """
    return PROBES.load(name)(name, config)


def requested(config: EvalConfig) -> list[tuple[str, int]]:
    """Return every (probe, length) that a cell is evaluated on, by `eval.probes`, then by `eval.lengths`.

    Length is 0 for probes without lengths, which have one entry. A probe that reads texts follows under the name of each
    of `eval.texts`, such as `clean:code`. A cell is done when each pair has a value or a reason for its absence.

    Raises:
        KeyError: No probe has a name of the section.
    """
    return [pair for probe in config.probes for pair in requested_of(probe, config)]


def requested_of(probe: str, config: EvalConfig) -> list[tuple[str, int]]:
    """Return the part of `requested` that is of one probe. Raises KeyError if there is none of that name."""
    part = PROBES.load(probe)
    texts = config.text_paths if part.reads_texts else ()
    names = [probe, *(f"{probe}{TEXT_SEPARATOR}{text}" for text in texts)]
    return [(name, length) for name in names for length in (config.lengths if part.by_length else (0,))]


def with_settings(config: EvalConfig) -> EvalConfig:
    """Return a copy of the section with the settings of its probes completed.

    Every setting of a probe is written out, defaults included. So are those of probes that `settings` names but
    `probes` does not, which must be valid, too. Probes without settings get no entry.

    Raises:
        KeyError: No probe has a name of the section.
        ValidationError: A setting is invalid (pydantic); its title is the probe's name.
    """
    sections = dict(config.settings)
    for name in dict.fromkeys((*config.probes, *config.settings)):
        probe = PROBES.load(name)
        settings = probe.settled(probe.Config.model_validate(sections.get(name, {})), config).model_dump(mode="json")
        if settings:
            sections[name] = settings
    return config.model_copy(update={"settings": sections})
