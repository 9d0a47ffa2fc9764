"""A machine on which `doctor` finds nothing but what a test puts there."""

import pytest
from examined import driver, elsewhere, look

__all__ = ["driver", "elsewhere", "look"]


@pytest.fixture(autouse=True)
def away(elsewhere: None) -> None:
    """Every test of doctor stands `elsewhere`."""
