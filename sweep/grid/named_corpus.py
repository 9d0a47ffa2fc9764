"""What a corpus that was prepared under a name brings into a config: its tokenizer, that tokenizer's file, its vocabulary.

A grid need not say them again. What a base says of the tokenizer and the vocabulary goes with the base's own corpus, so
whoever names another one over it means that one's; what is said beside the name or over it has to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..config import DataConfig
from ..data import tokenizer
from ..data.corpora import Prepared
from .settings import Layer, Setting
from .validate import Invalid, Problem

Lookup = Callable[[str], Prepared | None]
"""The corpus that was prepared under a name; None for a name that nothing has."""
SAID = ("tokenizer", "tokenizer_file", "end_of_text")


class Chain:
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


def with_tokenizer(data: DataConfig, layer: Layer, known: Prepared) -> DataConfig:
    """The section with the tokenizer that made the corpus; raises Invalid when the layer says another."""
    said = {name: layer[f"data.{name}"].value for name in SAID if f"data.{name}" in layer}
    if "tokenizer" in said and data.tokenizer != known.kind:
        raise Invalid(Problem(("data.tokenizer",), _differs(known, data.tokenizer)))
    file, end = data.tokenizer_file, data.end_of_text
    if known.kind == "json" and (file is not None or end is not None):
        path = "data.tokenizer_file" if file is not None else "data.end_of_text"
        try:
            asked = tokenizer.load_tokenizer(
                "json", file or known.file, end or (known.end_of_text if file is None else None)
            )
        except tokenizer.TokenizerError as error:
            raise Invalid(Problem((path,), str(error))) from error
        if asked.name != known.tokenizer:
            raise Invalid(Problem((path,), _differs(known, asked.name)))
    update = {"tokenizer": known.kind, "tokenizer_file": file or known.file, "end_of_text": end or known.end_of_text}
    return data.model_copy(update=update)


def _differs(known: Prepared, asked: str) -> str:
    return f"corpus {known.name!r} was prepared with tokenizer {known.tokenizer}, but the grid asks for {asked}"
