"""Transactions on a database that may be locked or away for a while: how they are tried, waited for and given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from .database import file_of, make_engine, place, remedy_for, shown
from .errors import StoreBusy

Result = TypeVar("Result")
Work = Callable[[Session], Result]
PATIENCE_S = 300.0


class Transactions:
    """A database and the connections to it; pickles as its address."""

    def __init__(self, url_or_path: str | Path | None = None, *, patience: float = PATIENCE_S) -> None:
        self.url = place(url_or_path)
        self.path = file_of(self.url)
        self.patience = patience
        self._engine = make_engine(self.url)
        self._reader = self._engine.execution_options(begin="BEGIN")
        self._durable = self._engine.execution_options(durable=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.url.render_as_string(hide_password=False), patience=self.patience), ()

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def runs(self) -> Path:
        """Where artifacts go unless told otherwise: `<db name>-runs` beside the file, or in the working folder."""
        if self.path is not None:
            return self.path.with_name(f"{self.path.stem}-runs")
        return Path.cwd() / f"{self.url.database or 'atma'}-runs"

    def close(self) -> None:
        """Closes the connections; new ones are opened when it is used again."""
        self._engine.dispose()

    @contextmanager
    def transaction(self, *, write: bool = True, durable: bool = False) -> Iterator[Session]:
        """A session in a transaction: committed at the end, rolled back when anything is raised, always closed."""
        engine = self._reader if not write else self._durable if durable else self._engine
        session = Session(engine, expire_on_commit=False)
        try:
            yield session
            session.commit()
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()

    def write(self, work: Work[Result], *, patience: float | None = None, durable: bool = False) -> Result:
        """Runs `work` in a write transaction, again and again with growing pauses while the database cannot take it.

        That is while it is locked, its disk is full, or its server is away. `work` may run more than once, so it must do
        nothing but use the session. `durable`: when this returns, a power cut loses neither this write nor any before
        it, whoever made them; for what must last before a file goes. Raises StoreBusy after `patience`.
        """
        return self._patiently(work, patience, write=True, durable=durable)

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """The same in a transaction that only reads; `work` gets the arguments after the session."""
        return self._patiently(lambda session: work(session, *args, **options), write=False)

    def _patiently(self, work: Work[Result], patience: float | None = None, **how: bool) -> Result:
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        pause = 0.05
        while True:
            try:
                with self.transaction(**how) as session:
                    return work(session)
            except OperationalError as error:
                remedy = remedy_for(error)
                if remedy is None:
                    raise
                if time.monotonic() >= deadline:
                    raise StoreBusy(f"{self} {remedy} and launch again") from error
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
