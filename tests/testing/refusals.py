"""Calls that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from atma_sweep.sweep.errors import SweepError


def refused(call: Callable[[], object], error: type[Exception] = SweepError) -> str:
    """The one line with which a call ends."""
    with pytest.raises(error) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)
