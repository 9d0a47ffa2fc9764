"""Which cells take equally long for a token: the same network, losses and batch, on the same share of a machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ...results.console.text import counted
from ..config import CellConfig
from ..grid.cell import canonical, model_identity, train_identity

SHAPE = (
    "seq_len", "batch_tokens", "micro_batch", "loss_on", "optimizer", "muon_iterations", "regularizer", "regularizer_source",
    "regularizer_sketch", "distractor", "distractor_count", "deterministic", "compile", "kernels", "activations",
    "precision",
)  # fmt: skip
"""Of the train section, what the time of a step depends on: no learning rate, no schedule, no number of steps."""


class Likeness:
    """Tells cells that are alike. It remembers the sections that it has seen, which most cells of a grid share."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[object, str]] = {}
        self._numbers: dict[tuple[str, ...], str] = {}

    def of(self, config: CellConfig) -> str:
        """The same 16 hex digits for cells that are alike."""
        model = self._section(config.model, lambda: canonical(model_identity(config.model)))
        train = self._section(config.train, lambda: _shape(config))
        resources = config.resources
        # of a GPU the share counts; cores do where there is none
        share = f"{resources.gpus:g} of a GPU" if resources.gpus else counted(resources.cpus, "core")
        # graphs make a small network several times as fast, and there are none without a GPU
        key = (model, train, f"{share}, graphs {config.train.graphs}" if resources.gpus else share)
        if key not in self._numbers:
            self._numbers[key] = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        return self._numbers[key]

    def _section(self, section: object, tell: Callable[[], str]) -> str:
        # by identity, and kept, so that no other section can get the same one
        known = self._told.get(id(section))
        if known is None:
            known = self._told[id(section)] = section, tell()
        return known[1]


def _shape(config: CellConfig) -> str:
    told = train_identity(config.train)
    return canonical({name: told[name] for name in SHAPE if name in told})
