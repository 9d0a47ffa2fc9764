"""Files that some tests compare with and that are no part of the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "ATMA_TEST_DATA"
FOLDER = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[3] / "shared")
"""Folder of optional data: that of ATMA_TEST_DATA, else `shared` beside the checkout.

- data/gpt2: gpt2.tiktoken (tiktoken's r50k_base), and encoder.json and vocab.bpe as OpenAI published them.
- paper: tables.json, the numbers of the paper's tables; logged-*.csv, the logs of its runs; rivals-missing.csv, printed
  numbers of other papers.
- RIVALS.md: notes on those papers.
"""


def optional_data(name: str) -> Path:
    """Return the file or folder of that name, a path below FOLDER; skip the test where it does not exist."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"set {VARIABLE} to a folder with {name} (not in {FOLDER})")
    return path
