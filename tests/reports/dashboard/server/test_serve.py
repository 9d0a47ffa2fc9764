"""`atma-sweep dashboard` as a process: it tells its address, answers, and ends with Ctrl-C without a word of Python's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from atma_sweep.reports.cell_filter import ReportError
from atma_sweep.reports.dashboard.server import connections
from atma_sweep.reports.dashboard.server import serve as module
from atma_sweep.results.store.store import open_store
from bench import COMMAND
from patience import PATIENCE_S
from synthetic import synthetic_sweep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(blank: Path, tmp_path: Path) -> Path:
    store = open_store(shutil.copy(blank, tmp_path / "atma.db"))
    synthetic_sweep(store, 2, 5)
    store.close()
    return tmp_path


def hear() -> None:
    """Restore the default signals of a terminal, even where the tests run below nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*COMMAND, "dashboard", "--no-open", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code", "last"),
    [
        pytest.param(signal.SIGINT, 0, "ended: the page is no longer served", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM", marks=pytest.mark.thorough),
        pytest.param(signal.SIGHUP, 129, "stopped by SIGHUP", marks=pytest.mark.thorough),
    ],
)
def test_serve_ends_on_signal(folder: Path, number: int, code: int, last: str) -> None:
    with started(folder) as (process, address):
        page = urllib.request.urlopen(address, timeout=PATIENCE_S)
        assert b"big, revision 1" in page.read()
        open_connection = socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])))
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
        open_connection.close()
    assert process.returncode == code
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith(last)


@pytest.mark.thorough
def test_two_have_two_ports_and_two_tokens(folder: Path) -> None:
    with started(folder) as (_, first), started(folder) as (_, second):
        ports, tokens = ({address.split("/")[part] for address in (first, second)} for part in (2, 3))
        assert len(ports) == len(tokens) == 2
        assert min(map(len, tokens)) >= 43  # 32 bytes


def test_serve_refuses_port_in_use_in_single_line(command_line: Run) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        code, out, err = command_line("dashboard", "--sweep", "printed-v2", "--port", str(port), "--no-open")
    assert (code, out) == (3, "")
    assert err == f"atma-sweep: port {port} of 127.0.0.1 is in use; choose another with --port, or omit it\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--db", "none.db"], 2, "there is no database"),
        (["--sweep", "quick"], 2, "there is no database"),
        (["--port", "70000"], 2, "'--port': Input should be less than or equal to 65535"),
        (["--port", "-1"], 2, "'--port': Input should be greater than or equal to 0"),
    ],
)
def test_serve_reports_bad_input_in_single_line(
    command_line: Run, arguments: list[str], code: int, message: str
) -> None:
    exit_code, out, err = command_line("dashboard", "--no-open", *arguments)
    assert (exit_code, out, len(err.splitlines())) == (code, "", 1)
    assert message in err


def test_serve_reports_database_without_sweep(command_line: Run, tmp_path: Path) -> None:
    open_store(tmp_path / "atma.db", create=True).close()
    code, out, err = command_line("dashboard", "--no-open")
    assert (code, out, err) == (2, "", "atma-sweep: the database holds no sweep yet; launch a grid first\n")


def test_browser_is_opened_by_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its arguments, which everybody on the machine can read."""
    seen: list[str] = []
    monkeypatch.setenv("DISPLAY", ":7")
    monkeypatch.setattr(module.webbrowser, "open", lambda url: seen.append(url) is None)
    with module.opened_in_browser("http://127.0.0.1:1/secret/") as note:
        assert note is None
        (url,) = seen
        assert url.startswith("file://")
        assert "secret" not in url
        file = Path(url.removeprefix("file://"))
        assert "url=http://127.0.0.1:1/secret/" in file.read_text()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.parent.stat().st_uid == os.getuid()
    assert not file.parent.exists()


def test_without_a_screen_no_open_takes_over_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.webbrowser, "open", lambda url: pytest.fail("a browser was opened"))
    with module.opened_in_browser("http://127.0.0.1:1/secret/") as note:
        assert note == "no browser available; open the address yourself"


def test_serve_prints_address_before_building_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing takes seconds; here it waits for the address, so that the other order would wait forever."""
    addresses: list[str] = []
    printed = threading.Event()
    prepare = module._prepare

    def wait_and_prepare(*arguments: Any) -> Any:
        assert printed.wait(PATIENCE_S)
        return prepare(*arguments)

    monkeypatch.setattr(module, "_prepare", wait_and_prepare)
    answers: list[bytes] = []
    servers: list[connections.Server] = []
    run = connections.Server.run

    def run_and_remember(server: connections.Server, **options: Any) -> None:
        servers.append(server)
        run(server, **options)

    monkeypatch.setattr(connections.Server, "run", run_and_remember)

    def read() -> None:
        printed.wait(PATIENCE_S)
        answers.append(urllib.request.urlopen(addresses[0], timeout=PATIENCE_S).read())
        servers[0].should_exit = True

    def tell(address: str) -> None:
        addresses.append(address)
        printed.set()

    reader = threading.Thread(target=read)
    reader.start()
    module.serve(None, str(folder / "atma.db"), browser=False, tell=tell)
    reader.join(PATIENCE_S)
    assert b"big, revision 1" in answers[0]


def test_a_page_that_cannot_be_prepared_ends_the_server(folder: Path) -> None:
    addresses: list[str] = []
    with pytest.raises(ReportError, match="this is the sweep of the page itself"):
        module.serve("big", str(folder / "atma.db"), compare="big", browser=False, tell=addresses.append)
    assert len(addresses) == 1


def test_the_server_starts_without_what_makes_the_page() -> None:
    """NumPy, pandas and SciPy take most of the time before the first page."""
    heavy = "{'numpy', 'pandas', 'scipy', 'uvicorn'}"
    code = f"import sys, atma_sweep.reports.dashboard.server.serve; print(sorted(sys.modules.keys() & {heavy}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.thorough
def test_serve_runs_off_main_thread_with_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the main thread, where no signal is heard: for whoever starts it from a notebook; with the paper's numbers beside."""
    address_printed = threading.Event()
    addresses: list[str] = []
    servers: list[connections.Server] = []
    make = connections.Server

    def remembered_server(config: uvicorn.Config) -> connections.Server:
        servers.append(make(config))
        return servers[-1]

    monkeypatch.setattr(connections, "Server", remembered_server)

    def tell(address: str) -> None:
        addresses.append(address)
        address_printed.set()

    thread = threading.Thread(
        target=module.serve,
        args=(None, str(folder / "atma.db")),
        kwargs={"compare": "printed-v2", "browser": False, "tell": tell},
    )
    thread.start()
    assert address_printed.wait(PATIENCE_S)
    page = urllib.request.urlopen(addresses[0], timeout=PATIENCE_S).read()
    assert b"big, revision 1" in page
    assert b'id="beside"' in page
    servers[0].should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_address_is_printed_before_slow_imports(folder: Path) -> None:
    """Counted in modules, since no test measures seconds: those that take long come after the address."""
    slow = ("numpy", "pandas", "scipy", "uvicorn", "starlette", "plotly", "torch", "ray")
    text = (
        "import os, sys\n"
        "from atma_sweep.reports.dashboard.server.serve import serve\n"
        "def tell(address):\n"
        f"    print(address, [name for name in {slow!r} if name in sys.modules], flush=True)\n"
        "    os._exit(0)\n"
        "serve(None, 'atma.db', browser=False, tell=tell)\n"
    )
    printed = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=True)
    assert printed.stdout.startswith("http://127.0.0.1:")
    assert printed.stdout.endswith("/ []\n")


@pytest.mark.thorough
def test_page_is_built_without_pandas(folder: Path) -> None:
    """Pandas would take 60 MiB and half a second of every page."""
    text = (
        "import sys\n"
        "from pathlib import Path\n"
        "from atma_sweep.reports.dashboard.page import write_dashboard\n"
        "from atma_sweep.results.store.store import open_store\n"
        "write_dashboard(open_store('atma.db'), Path('page.html'))\n"
        "print([name for name in ('pandas', 'matplotlib', 'scipy.stats', 'scipy.optimize') if name in sys.modules])\n"
    )
    printed = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=True)
    assert printed.stdout == "[]\n"
