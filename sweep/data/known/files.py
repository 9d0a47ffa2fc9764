"""Text of one's own."""

from __future__ import annotations

from pathlib import Path

from ...config import DataConfig
from ..corpus_kind import CorpusKind
from ..sources import CorpusError, Files, Source


class OwnFiles(CorpusKind):
    """Files under `data.path`."""

    description = (
        "text of your own under data.path: .txt, .md, .rst, .py, .jsonl (.xz, .gz) or .parquet, a file or a folder"
    )

    @classmethod
    def source(cls, data: DataConfig) -> Source:
        """Each file, or each of its records, a document."""
        if not data.path:
            raise CorpusError("data.corpus: files needs data.path, the folder or file that holds the text")
        return Files(Path(data.path))
