"""What a corpus is, before it is prepared. One of your own is a subclass, registered under a name:

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
"""Of a download from the hub: FineWeb-Edu has 2.8 bytes of compressed Parquet per GPT-2 token."""
LogFn = Callable[[str], None]
"""Called with the phase that a preparation is in, now and then."""


class CorpusConfig(Config):
    """Settings of a corpus; add fields with `knob`. They are written under data.settings.NAME."""


class CorpusKind:
    """Text by a name: documents that `source` gives, token shards that `shards` gives, or rows that `streams` works out.

    `data` is what a grid says.
    """

    Config: ClassVar[type[Config]] = CorpusConfig
    """Settings of its own, for one whose rows are worked out."""

    description: ClassVar[str]
    """One line for `data list --known`."""
    preset: ClassVar[Mapping[str, Any]] = {}
    """Settings of the data section that `data prepare NAME` takes unless told otherwise."""
    ready: ClassVar[bool] = False
    """Whether it consists of token shards."""
    may_mark: ClassVar[bool] = False
    """Whether its shards may say which of their tokens count for `train.loss_on: marked` (NAME.marks.bin beside NAME.bin)."""
    tokenizer: ClassVar[str | None] = None
    """That of a corpus whose rows are worked out (`streams`), so that no text is tokenised; None for every other."""
    by_tokens: ClassVar[bool] = True
    """Documents without a split of their own are divided by tokens; else each by the hash of its name, as all were before."""
    at_hand: ClassVar[bool] = False
    """Whether it is prepared in seconds, so that even a dry run may."""

    @classmethod
    def texts(cls, data: DataConfig) -> Iterator[Text]:
        """Its documents, in a fixed order. Those that name no split are divided by tokens, in the order of their names' hashes."""
        raise NotImplementedError(f"corpus {data.corpus} defines neither texts nor source")

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """JSON that changes whenever its text may have changed, besides with the plugin file that defines it.

        Raises CorpusError for what `data` lacks.
        """
        return None

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Its documents as something that a stopped preparation goes on with. Raises CorpusError for what `data` lacks."""
        return KindSource(cls, data)

    @classmethod
    def lent(cls) -> DocumentSource | None:
        """The long documents that it gives to probes of other corpora, which name it as data.heldout; None: it gives none."""
        return None

    @classmethod
    def shards(cls, data: DataConfig, work_folder: Path, log: LogFn) -> tuple[list[Path], list[Path]]:
        """Training and validation shards; `tokenizer` is a folder for what has to be made or fetched."""
        raise NotImplementedError(f"corpus {data.corpus} defines no shards")

    @classmethod
    def streams(cls, settings: Any) -> Streams:
        """Its splits, for one with a `tokenizer` of its own; nothing of them is kept on a disk. `settings` are its `Config`."""
        raise NotImplementedError(f"corpus kind {cls.__name__} defines no streams")

    @classmethod
    def row_length(cls, settings: Any) -> int | None:
        """Tokens that a row of training must have; None, the default: any number."""
        return None

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Whether preparing it would download, which has to be asked for."""
        return False

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Estimate the bytes that preparing downloads; None where that is unknown."""
        return None


@dataclass
class KindSource(CountingSource):
    """The texts that a kind gives."""

    kind: type[CorpusKind]
    data: DataConfig

    def _texts(self) -> Iterator[Text]:
        yield from self.kind.texts(self.data)

    def key(self) -> Any:
        """That of the kind."""
        return self.kind.key(self.data)


class HubCorpus(CorpusKind):
    """A dataset of the Hugging Face hub, or of a local copy under `data.path`."""

    spec: ClassVar[HubSpec]
    by_tokens = False

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Its rows, streamed."""
        return HubSource(cls.spec, Path(data.path) if data.path else None)

    @classmethod
    def lent(cls) -> DocumentSource:
        """The same from the hub."""
        return HubSource(cls.spec, setting="data.heldout")

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Unless there is a copy."""
        return data.path is None

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Estimate the bytes from the tokens that are read, all of them where `data` sets no limit."""
        return int(BYTES_PER_TOKEN * min(cls.spec.tokens, data.train_tokens or cls.spec.tokens))
