"""Machine on which `doctor` finds only what a test puts there."""

import pytest
from examined import driver, elsewhere, look

__all__ = ["driver", "elsewhere", "look"]


@pytest.fixture(autouse=True)
def away(elsewhere: None) -> None:
    """Run every test of doctor with the fixture `elsewhere`."""
