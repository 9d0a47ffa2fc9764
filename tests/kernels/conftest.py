"""Fixtures of tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """For tests of kernels: torch.empty gives NaN, so an output that a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
