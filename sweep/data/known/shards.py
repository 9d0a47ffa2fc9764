"""Token shards of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config import DataConfig
from ..corpus_kind import CorpusKind, Told
from ..shard_files import key_of, shard_files
from ..sources import CorpusError


class OwnShards(CorpusKind):
    """Shards under `data.path`."""

    description = (
        "token shards of your own under data.path: *train*.bin and *val*.bin with the 256-int32 header; "
        "*.marks.bin beside each says with 0 and 1 which tokens count for train.loss_on: marked"
    )
    ready = True
    may_mark = True

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """The state of the files."""
        if not data.path:
            raise CorpusError("data.corpus: shards needs data.path, the folder or file that holds the text")
        return key_of(Path(data.path))

    @classmethod
    def shards(cls, data: DataConfig, made: Path, told: Told) -> tuple[list[Path], list[Path]]:
        """Those of the folder."""
        return shard_files(Path(str(data.path)))
