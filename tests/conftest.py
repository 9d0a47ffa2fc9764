"""What tests of every folder may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout: published tables and tokenizer files that are not part of it."""
    folder = CHECKOUT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared")
    return folder
