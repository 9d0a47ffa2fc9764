"""Base classes of corpora before preparation.

A plugin defines a subclass and registers it under a name:

    @register_corpus("pairs")
    class Pairs(CorpusKind):
        description = "letters, each with its number, and questions for them"

        @classmethod
        def texts(cls, data):
            for number in range(1000):
                yield Text(f"pairs/{number}", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...model.config import Config
from ..config import DataConfig
from .computed_rows import Streams
from .sources import CountingSource, DocumentSource, HubSource, HubSpec, Text

BYTES_PER_TOKEN = 3
"""Estimated bytes of a download from the hub per GPT-2 token; FineWeb-Edu has 2.8 bytes of compressed Parquet."""
LogFn = Callable[[str], None]
"""Callback that receives the current phase of a preparation."""


class CorpusConfig(Config):
    """Settings of a corpus; add fields with `knob`. They are written under data.settings.NAME."""


class CorpusKind:
    """A corpus by name.

    A subclass defines documents (`texts` or `source`), token shards (`shards`) or computed rows (`streams`).

    The parameter `data` of its methods is the data section of a grid.
    """

    Config: ClassVar[type[Config]] = CorpusConfig
    """Class of the settings under data.settings.NAME."""

    description: ClassVar[str]
    """One line for `data list --known`."""
    preset: ClassVar[Mapping[str, Any]] = {}
    """Defaults of the data section for `data prepare NAME`."""
    ready: ClassVar[bool] = False
    """True for a corpus of ready-made token shards."""
    may_mark: ClassVar[bool] = False
    """True if its shards may mark tokens, which `train.loss_on` can select, with NAME.marks.bin next to NAME.bin."""
    tokenizer: ClassVar[str | None] = None
    """Name of the tokenizer of a corpus of computed rows (`streams`), which tokenises no text; else None."""
    by_tokens: ClassVar[bool] = True
    """Divide documents without a split of their own by tokens.

    False divides by the hashes of their names, as older releases did for every corpus.
    """
    at_hand: ClassVar[bool] = False
    """True if preparation takes seconds at most, so that a dry run may do it."""

    @classmethod
    def texts(cls, data: DataConfig) -> Iterator[Text]:
        """Yield the documents in a fixed order.

        Documents that name no split are divided by tokens, in the order of the hashes of their names, or by those
        hashes alone (`by_tokens`). Names must be unique.

        Raises:
            NotImplementedError: The class defines neither this method nor `source`.
        """
        raise NotImplementedError(f"corpus {data.corpus} defines neither texts nor source")

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """Return JSON that changes whenever the text may have changed for another reason than a new plugin file.

        It enters the request of a corpus. The default is None, for text that never changes.

        Raises:
            CorpusError: `data` lacks a setting that the corpus needs.
        """
        return None

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Return the documents as a source from which a stopped preparation can resume.

        Raises:
            CorpusError: `data` lacks a setting that the corpus needs.
        """
        return KindSource(cls, data)

    @classmethod
    def lent(cls) -> DocumentSource | None:
        """Return the long documents for corpora that name this one as data.heldout, or None if it provides none."""
        return None

    @classmethod
    def shards(cls, data: DataConfig, work_folder: Path, log: LogFn) -> tuple[list[Path], list[Path]]:
        """Return (training shards, validation shards), each in reading order, without the shards of marks.

        Args:
            data: Data section of the grid.
            work_folder: Existing folder for shards that have to be created.
            log: Callback for the name of the current phase, such as "downloading".

        Raises:
            NotImplementedError: The class is not one of token shards.
        """
        raise NotImplementedError(f"corpus {data.corpus} defines no shards")

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Return the computed splits of a corpus that has a `tokenizer`; nothing of them is written to a disk.

        Args:
            settings: An instance of the class's `Config`.

        Raises:
            NotImplementedError: The class is not one of computed rows.
        """
        raise NotImplementedError(
            f"corpus kind {cls.__name__} does not implement streams(), which returns its computed splits"
        )

    @classmethod
    def row_length(cls, settings: Any) -> int | None:
        """Return the required number of tokens of a training row; None, the default, allows any."""
        return None

    @classmethod
    def vocabulary(cls, settings: Any) -> int | None:
        """Return the number of token ids of computed rows; None, the default: all of the tokenizer's."""
        return None

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Return True if preparation would download data, which needs the user's consent."""
        return False

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Return an estimate of the bytes that preparation downloads; None if unknown."""
        return None


@dataclass
class KindSource(CountingSource):
    """Source of the documents that `CorpusKind.texts` yields."""

    kind: type[CorpusKind]
    data: DataConfig

    def _texts(self) -> Iterator[Text]:
        yield from self.kind.texts(self.data)

    def key(self) -> Any:
        """Return the key of the corpus kind."""
        return self.kind.key(self.data)


class HubCorpus(CorpusKind):
    """A dataset of the Hugging Face hub, or a local copy of it under `data.path`."""

    spec: ClassVar[HubSpec]
    """Repository, config and splits of the dataset."""
    by_tokens = False

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Return the streamed rows of the dataset, from the local copy if `data.path` names one."""
        return HubSource(cls.spec, Path(data.path) if data.path else None)

    @classmethod
    def lent(cls) -> DocumentSource:
        """Return the streamed rows of the dataset from the hub, for use as held-out documents."""
        return HubSource(cls.spec, setting="data.heldout")

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Return True unless `data.path` names a local copy."""
        return data.path is None

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Return an estimate: 3 bytes (BYTES_PER_TOKEN) per token to read.

        Without a limit in `data` it counts the complete dataset.
        """
        return int(BYTES_PER_TOKEN * min(cls.spec.tokens, data.train_tokens or cls.spec.tokens))
