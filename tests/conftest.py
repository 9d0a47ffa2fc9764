"""Fixtures and hooks for the tests of every folder."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pytest
import registries as known
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from torch import nn

if not torch.cuda.is_available():
    # read when Triton is first imported: its kernels then run on CPU tensors, in float32 alone
    os.environ["TRITON_INTERPRET"] = "1"

# small tensors: one thread is fastest; OMP_NUM_THREADS=2 adds numbers up in another order
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# a slow machine is no fault of a test
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

CHECKOUT = Path(__file__).resolve().parent.parent
CHAOS = CHECKOUT / "tests" / "chaos"


NAMED = pytest.StashKey[set[Path]]()
"""Files and folders that the command line names."""


def pytest_configure(config: pytest.Config) -> None:
    # ten thousand tests are collected: what is imported and built until they run is never garbage
    gc.disable()
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    config.stash[NAMED] = set(named)
    # each process of a fresh clone begins elsewhere, and then finds what the others compiled, instead of all compiling all
    worker = getattr(config, "workerinput", None)
    if worker is not None and named == [CHECKOUT / "tests"]:
        folders = [str(path) for path in sorted(named[0].iterdir()) if path.is_dir() and path.name[0] not in "._"]
        start = len(folders) * int(worker["workerid"][2:]) // worker["workercount"]
        config.args = [*folders[start:], *map(str, sorted(named[0].glob("test_*.py"))), *folders[:start]]
    # a shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int | None:
    """Use one worker more than cores on a small machine: tests wait a quarter of their time for child processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1 if cores <= 4 and "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ else None


def _is_named(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether a thorough test runs: the command line names its mark, its file or the folder of storms."""
    named = config.stash[NAMED]
    is_named = item.path in named or (item.path.parent == CHAOS and CHAOS in named)
    return is_named or "thorough" in config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test of this tier unread: their imports take longer than a search for the mark.

    It stands in a file itself, in fixtures of its folders, or in tests/testing/tiers.py. `.ci/run` counts the tests of both tiers.
    """
    if config.option.markexpr not in ("", "thorough") or not collection_path.match("test_*.py"):
        return None
    if not config.option.markexpr:
        is_thorough = "\npytestmark = pytest.mark.thorough\n" in collection_path.read_text(encoding="utf-8")
        return True if is_thorough and CHAOS not in config.stash[NAMED] else None
    folders = [folder for folder in collection_path.parents if CHECKOUT / "tests" in folder.parents]
    files = [collection_path, *(folder / "conftest.py" for folder in folders)]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return None if "mark.thorough" in text or "tiers import" in text else True


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if "thorough" in config.option.markexpr else "the first tier; -m thorough runs the second"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselected = [item for item in items if item.get_closest_marker("thorough") and not _is_named(config, item)]
    config.hook.pytest_deselected(items=deselected)
    apart = set(deselected)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    # what takes long starts first, so that no process is left with it at the end; short tests fill the gaps
    items[:] = sorted(
        (item for item in items if item not in apart),
        key=lambda item: (item.get_closest_marker("slow") is None, item.path.as_posix()),
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the process of a test that broke its CUDA context, in which every later test would fail.

    Under xdist, another process takes the other tests, and this test counts as crashed.
    """
    report = yield
    if call.excinfo is not None and "illegal memory access" in str(call.excinfo.value):
        sys.__stderr__.write(f"\n{item.nodeid} broke its CUDA context\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        os._exit(1)
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="kills in each storm of tests/chaos; 200 is the long form")


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget every plugin that a test registered."""
    with known.scope():
        yield


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The command line puts garbage collection off, which suits a process of one command and not one of a thousand tests."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in an empty folder; returns (exit code, standard output, standard error)."""
    from atma_sweep import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATMA_DB", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["atma-sweep", *arguments])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def no_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without open databases: those of earlier tests, damaged on purpose, do not explain a bug of this one."""
    monkeypatch.setattr("atma_sweep.results.store.database.engines_in_use", WeakKeyDictionary())


@pytest.fixture
def run(command_line: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """The same under its short name, which tests of reports give to something else."""
    return command_line


@pytest.fixture
def wake() -> Callable[[nn.Module], None]:
    """Adds seeded noise to every parameter of a network, so that no branch ends in a zero projection."""
    from atma_sweep.model.rng import rng_stream

    def add_noise(model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=rng_stream(1, "test", name))
                parameter.add_(0.2 * noise.to(parameter.dtype))

    return add_noise
