"""Databases to test on: SQLite always, PostgreSQL too when ATMA_TEST_POSTGRES names a server's URL."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from atma_sweep.results.records import CellRecord, Owner
from atma_sweep.results.store import Store, open_store
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

SERVER = os.environ.get("ATMA_TEST_POSTGRES")


@pytest.fixture(params=["sqlite", *(["postgresql"] if SERVER else [])])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    name = f"atma_test_{uuid.uuid4().hex[:12]}"
    server = create_engine(make_url(str(SERVER)).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(str(SERVER)).set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url, create=True)
    yield opened
    opened.close()


@pytest.fixture
def owner() -> Owner:
    return Owner(name="ada", host="here", pid=101, started=1.5)


@pytest.fixture
def cells() -> Callable[..., list[CellRecord]]:
    """cells(3, seed=0) -> three cells c00..., c01..., c02... that differ in the first axis."""

    def make(count: int, *, seed: int = 0, prefix: str = "c") -> list[CellRecord]:
        return [
            CellRecord(
                id=f"{prefix}{index:02d}{'0' * (9 - len(prefix))}{seed}",
                slug=f"polar{index}-baseline-{prefix}-s{seed}",
                seed=seed,
                levels={
                    "attn_type": f"polar{index}",
                    "reg_mode": "baseline",
                    "distractor": "off",
                    "memory": "on" if index % 2 else "off",
                    "window": "off",
                },
                config={"model": {"d_model": 8 + index}, "seed": seed},
                axes={"attn_type": f"polar{index}", "memory": "on" if index % 2 else "off"},
                tokens=10**9 * (index + 1),
            )
            for index in range(count)
        ]

    return make
