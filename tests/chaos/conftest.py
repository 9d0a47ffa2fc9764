"""How long the storms are: a short form for every change, a long one by command."""

import pytest


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """Kills in each storm: `--kills`, else a few."""
    return int(request.config.getoption("--kills"))
