"""Databases to test on: SQLite, and PostgreSQL where there is one (see testing/postgres.py)."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import postgres
import pytest
from atma_sweep.results.store.records import CellRecord, Owner
from atma_sweep.results.store.store import Store, open_store
from databases import OWNER, cell_records
from histories import halves
from sqlalchemy.engine import make_url


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server; one for each process that runs tests."""
    reason = postgres.missing()
    if reason:
        pytest.skip(reason)
    with postgres.server() as url:
        yield url


@pytest.fixture(scope="session")
def template_database(server: str) -> Iterator[str]:
    """Yield the name of a PostgreSQL database with the tables, as a template: creating them takes much longer."""
    with postgres.database(server) as url:
        open_store(url, create=True).close()
        yield str(make_url(url).database)


@pytest.fixture
def postgres_url(server: str) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres.database(server) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def backend(request: pytest.FixtureRequest) -> str:
    """The kinds of database that a test runs on; in the first tier a server is asked by the tests that are about servers."""
    return str(request.param)


@pytest.fixture
def url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of that kind; with our tables where `store` is asked for as well, else empty."""
    if backend == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    template = request.getfixturevalue("template_database") if "store" in request.fixturenames else None
    with postgres.database(request.getfixturevalue("server"), template=template) as database_url:
        yield database_url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url, create=True)
    yield opened
    opened.close()


@pytest.fixture
def make(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Return a function that opens a new empty database of that kind; its runs folder is in the test's folder NAME."""
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> Store:
            (tmp_path / name).mkdir(exist_ok=True)
            where: str | Path = tmp_path / name / "atma.db"
            if backend == "postgresql":
                server, template = request.getfixturevalue("server"), request.getfixturevalue("template_database")
                where = stack.enter_context(postgres.database(server, template=template))
            store = open_store(where, create=True)
            stack.callback(store.close)
            return store

        yield opened


@pytest.fixture
def owner() -> Owner:
    return OWNER


@pytest.fixture(scope="session")
def cells() -> Callable[..., list[CellRecord]]:
    return cell_records


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts of a PostgreSQL database go into the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def laptops(make: Callable[[str], Store], cells: Callable[..., list[CellRecord]]) -> tuple[Store, Store]:
    """Two databases that know one grid of four cells and have each done a part of it (see histories.halves)."""
    return halves(make("a"), make("b"), cells)
