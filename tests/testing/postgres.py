"""A PostgreSQL server of our own: a new cluster in a temporary folder, on a Unix socket only, gone afterwards.

`ATMA_TEST_POSTGRES` names the URL of another server to use instead; its user must be allowed to make databases.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patience import PATIENCE_S, end_with_parent, until
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

SERVER_URL = os.environ.get("ATMA_TEST_POSTGRES")
FAST = ("fsync=off", "full_page_writes=off", "max_connections=100", "shared_buffers=32MB")


def programs() -> Path | None:
    """The folder with initdb and postgres, the newest where there are several; None when there is none."""
    initdb = shutil.which("initdb")
    folders = [Path(initdb).resolve().parent] if initdb else []
    for root in (Path("/usr/lib/postgresql"), Path("/opt/homebrew/opt"), Path("/usr/local/opt")):
        folders += sorted(root.glob("*/bin"), key=lambda path: path.parent.name.zfill(20), reverse=True)
    folders += [Path("/usr/pgsql/bin"), Path("/usr/local/pgsql/bin")]
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


def missing() -> str | None:
    """Return the reason why there is no PostgreSQL to test on, None when there is one."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"needs psycopg: pip install 'atma-sweep[postgres]' ({error})"
    if SERVER_URL is None and programs() is None:
        return "needs PostgreSQL: apt-get install postgresql, or name a server with ATMA_TEST_POSTGRES"
    return None


def not_ours() -> str | None:
    """Return the reason why there is no PostgreSQL that a test may stop, None when there is one."""
    if SERVER_URL is not None:
        return "needs PostgreSQL of its own, to stop it: unset ATMA_TEST_POSTGRES"
    return missing()


def _account() -> pwd.struct_passwd | None:
    """Whom the server runs as: PostgreSQL refuses root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


class Cluster:
    """A cluster in a folder of its own. `url` is that of its first database."""

    def __init__(self) -> None:
        folder = programs()
        assert folder is not None
        self.folder, account = folder, _account()
        # not pytest's folder: a socket's path may have 107 bytes, and another user must be able to enter
        self.home = Path(tempfile.mkdtemp(prefix="atma-pg-", dir="/tmp"))
        self.who: dict[str, Any] = {}
        if account is not None:
            os.chown(self.home, account.pw_uid, account.pw_gid)
            self.who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self.url = f"postgresql+psycopg://atma@/postgres?host={self.home}"
        self.env = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "HOME": str(self.home)}
        self._process: subprocess.Popen[bytes] | None = None
        making = ["--username=atma", "--auth=trust", "--encoding=UTF8", "--no-sync", "--pgdata", self.home / "data"]
        self._run([folder / "initdb", *making])

    def _run(self, command: list[Any]) -> None:
        done = subprocess.run(command, env=self.env, cwd=self.home, capture_output=True, timeout=PATIENCE_S, **self.who)
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr.decode()[-2000:]}")

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        # a zone with an odd offset, so that a time that is not said in UTC shows
        settings = [*FAST, "listen_addresses=", f"unix_socket_directories={self.home}", "timezone=Asia/Kathmandu"]
        options = [word for setting in settings for word in ("-c", setting)]
        with (self.home / "log.txt").open("ab") as out:
            self._process = subprocess.Popen(
                [self.folder / "postgres", "-D", self.home / "data", *options],
                env=self.env, cwd=self.home, stdout=out, stderr=out, preexec_fn=end_with_parent(signal.SIGQUIT), **self.who,
            )  # fmt: skip
        engine = create_engine(self.url)

        def answers() -> bool:
            assert self._process is not None
            try:
                engine.connect().close()
            except OperationalError as error:
                if self._process.poll() is not None:
                    raise RuntimeError(f"PostgreSQL did not start: {log()}") from error
                return False
            return True

        def log() -> str:
            return (self.home / "log.txt").read_text()[-2000:]

        until(answers, log, pause=0.05)
        engine.dispose()

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ends the server: SIGINT in good order, SIGQUIT at once."""
        if self._process is not None:
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A new cluster, not started; stopped and removed afterwards. Raises RuntimeError when it cannot be made."""
    server = Cluster()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.home, ignore_errors=True)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a running server, for as long as the context lasts."""
    if SERVER_URL is not None:
        yield make_url(SERVER_URL).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
        return
    with cluster() as running:
        running.start()
        yield running.url


@contextlib.contextmanager
def database(server_url: str, *, template: str | None = None, locale: str | None = None) -> Iterator[str]:
    """The URL of a new database on the server, dropped afterwards; a copy of `template`, or with an ICU `locale`."""
    name = f"atma_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    options = f" TEMPLATE {template}" if template else ""
    options += f" TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE '{locale}' LOCALE 'C.UTF-8'" if locale else ""
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}{options}"))
        yield make_url(server_url).set(drivername="postgresql", database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()
