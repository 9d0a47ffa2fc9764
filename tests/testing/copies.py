"""Copies of public datasets with text of our own, laid out as their repositories are, and shards as others write them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

VOCABULARY = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
FINEWEB_EDU = """---
license: odc-by
language:
- en
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: sample-100BT
  data_files:
  - split: train
    path: sample/100BT/*
---
# FineWeb-Edu
"""


def prose(count: int, seed: int = 0, *, longest: int = 60) -> list[str]:
    """Texts of 1 to `longest` words, no two the same."""
    draw = random.Random(seed)
    return [
        f"{number} " + " ".join(draw.choice(VOCABULARY) for _ in range(draw.randint(1, longest)))
        for number in range(count)
    ]


def table(path: Path, texts: Sequence[str], *, group: int = 7) -> Path:
    """A Parquet file with the columns of FineWeb-Edu that matter here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "text": list(texts),
        "id": [f"<urn:uuid:{number}>" for number in range(len(texts))],
        "token_count": [len(text) // 4 for text in texts],
        "score": [2.5] * len(texts),
    }
    parquet.write_table(pa.table(columns), path, row_group_size=group)
    return path


def fineweb_edu(root: Path, texts: Sequence[str]) -> Path:
    """The sample in two files, and beside it other text that a reader of the sample must not see."""
    half = len(texts) // 2
    table(root / "sample" / "10BT" / "000_00000.parquet", texts[:half])
    table(root / "sample" / "10BT" / "001_00000.parquet", texts[half:], group=1000)
    table(root / "data" / "CC-MAIN-2013-20" / "train-00000-of-00014.parquet", ["not of the sample"] * 5)
    (root / "README.md").write_text(FINEWEB_EDU)
    return root


def finepdfs(root: Path, texts: Sequence[str]) -> Path:
    """Return the files of a hub data set with one file per config."""
    table(root / "data" / "train-00000-of-00001.parquet", texts)
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n---\n"
    )
    return root


def wikitext(root: Path, splits: Mapping[str, Sequence[str]]) -> Path:
    """Rows are lines; WikiText-2 lies beside WikiText-103."""
    card = ["---", "configs:"]
    for config in ("wikitext-103-raw-v1", "wikitext-2-raw-v1"):
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = root / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = list(rows) if "103" in config else [" = Other = \n"]
            parquet.write_table(pa.table({"text": lines}), path, row_group_size=5)
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (root / "README.md").write_text("\n".join([*card, "---", ""]))
    return root


def article(title: str, *lines: str) -> list[str]:
    """Rows of one article as WikiText has them: blank lines are empty rows."""
    return ["", f" = {title} = \n", "", *lines]


def published_shard(path: Path, tokens: Sequence[int] | np.ndarray, *, wide: bool = False) -> Path:
    """Write shards as modded-nanogpt does for GPT-2 or, when `wide`, as llm.c does for larger vocabularies."""
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = (20240801, 7, len(tokens)) if wide else (20240520, 1, len(tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.array(tokens, dtype=np.uint32 if wide else np.uint16).tobytes())
    return path
