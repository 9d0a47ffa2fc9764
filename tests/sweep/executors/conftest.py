"""What tests of executors share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: Ray's sockets lie below it, and a socket's path may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="atma-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
