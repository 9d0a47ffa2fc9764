"""Check results, the context that checks share, and helpers that query external programs."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ...results.errors import StoreError
from ...results.store.store import Store, default_runs, open_store

State = Literal["ok", "warn", "bad", "absent"]

SMI_SECONDS = 30.0
"""Seconds that nvidia-smi gets to answer; a hanging driver blocks it for ever."""
TORCH_SECONDS = 300.0
"""Seconds that a process which imports torch gets."""
KERNEL_SECONDS = 600.0
"""Seconds that the self-tests of the kernels get; they compile the kernels unless an earlier run cached them."""
LINK_SECONDS = 180.0
"""Seconds that the sum over all GPUs gets, with the start of a process per GPU and of NCCL."""
LOCK_SECONDS = 5.0
"""Seconds to wait for a lock on the database."""
GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")
"""Fields of nvidia-smi's GPU query."""


@dataclass(frozen=True)
class Check:
    """Result of one check; `asdict` of it is the command's JSON output."""

    name: str
    """Name in the report."""
    state: State
    """ok; warn: works with limitations; bad: would stop a sweep; absent: does not exist and is not required."""
    found: str
    """Finding, in one line."""
    remedy: str = ""
    """Action that solves the problem; "" without one."""


ok, warn, bad, absent = (functools.partial(Check, "", state) for state in get_args(State))
"""Findings in each state, with a remedy or without, that take the name of their look."""


class LookFailed(Exception):
    """Error of a program that gave no usable answer; the message is one line."""


class Context:
    """Facts that several checks share, each queried once. Slow queries start at once in the thread pool."""

    def __init__(self, db: str | None, runs: Path | None, pool: ThreadPoolExecutor, address: str | None = None) -> None:
        """Start the slow queries: torch, the NVIDIA driver, kernels and disk.

        Kernels are queried at once only if there may be a GPU, disk only if the database opens and has a sweep. The
        limits are 300 s for torch and disk, 30 s for the driver, and 600 s for kernels. Nothing is raised: without a
        usable database the runs folder is the working folder.

        Args:
            db: Database, as for --db.
            runs: Runs folder; None for the database's own.
            pool: Thread pool for the queries.
            address: HOST:PORT of the cluster to check; None for none.
        """
        self.db, self.address, self.pool = db, address, pool
        try:
            self.runs = (runs or default_runs(db)).absolute()
        except StoreError:  # check_database reports it
            self.runs = Path.cwd()
        self._torch = pool.submit(answer, "torch", seconds=TORCH_SECONDS)
        self._driver = pool.submit(_query_driver)
        # started before torch reports its GPUs, since importing torch takes as long as the self-tests' imports
        self._kernels = pool.submit(answer, "kernels", seconds=KERNEL_SECONDS) if _may_have_gpu() else None
        self._disk: Future[dict[str, Any]] | None = None
        with contextlib.suppress(Exception), self.open_store() as store:
            store.default_sweep()
            url = store.url.render_as_string(hide_password=False)
            self._disk = pool.submit(answer, "disk", str(self.runs), seconds=TORCH_SECONDS, db=url)

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """Open the database for a `with` block and close it afterwards. Waits 5 s (LOCK_SECONDS) for locks at most.

        Raises:
            StoreError: There is no database, or it cannot be opened.
        """
        store = open_store(self.db, patience=LOCK_SECONDS)
        try:
            yield store
        finally:
            store.close()

    @functools.cached_property
    def database_file(self) -> Path | None:
        """File of a SQLite database, which need not exist; None for a server."""
        return Store(self.db).path

    @property
    def driver_gpus(self) -> list[dict[str, str]] | LookFailed | None:
        """GPUs listed by the driver, or the error of nvidia-smi; None without nvidia-smi.

        Each GPU is a dict of texts: index, uuid, name, driver_version, memory.total and memory.free (MiB). Blocks until
        nvidia-smi has answered, 30 s (SMI_SECONDS) at most.
        """
        return self._driver.result()

    def listed_gpus(self) -> list[dict[str, str]]:
        """Return the GPUs listed by the driver; empty if it fails."""
        return self.driver_gpus if isinstance(self.driver_gpus, list) else []

    def torch_facts(self) -> dict[str, Any]:
        """Return facts about torch: torch (version), cuda (version of the build or None), error (or None), and gpus.

        Blocks until the worker has answered. `error` is the reason why CUDA cannot be used; `gpus` is then empty. For
        the keys of a GPU see `usable_gpus`.

        Raises:
            LookFailed: torch cannot be imported, or gave no answer in time.
        """
        return self._torch.result()

    def usable_gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs that torch can use, in torch's order; empty if torch fails or can use none.

        Each is a dict: uuid, name, capability ("MAJOR.MINOR"), total (bytes), and fla_is_right (True if fla computes
        right gradients there).
        """
        try:
            return list(self.torch_facts()["gpus"])
        except LookFailed:
            return []

    def kernel_backends(self) -> dict[str, Any]:
        """Return op -> [backend, reason] on this GPU, after the self-tests. Blocks until they have ended.

        Starts the query if that was not done yet.

        Raises:
            LookFailed: A self-test failed or gave no answer in time.
        """
        if self._kernels is None:
            self._kernels = self.pool.submit(answer, "kernels", seconds=KERNEL_SECONDS)
        return self._kernels.result()

    def link_facts(self) -> dict[str, Any]:
        """Return facts about the connections of several GPUs, as `links.link_facts`. Blocks for the measurement.

        Raises:
            LookFailed: A process failed or gave no answer in time.
        """
        return answer("links", seconds=LINK_SECONDS)

    def disk_needs(self) -> dict[str, Any] | None:
        """Return the disk that the default sweep's untrained cells need; None without a sweep. Blocks for the answer.

        The keys are those of `worker._disk_needs`: sweep, cells (number), place, and disk sizes in bytes.

        Raises:
            LookFailed: The query failed.
        """
        return None if self._disk is None else self._disk.result()


def _query_driver() -> list[dict[str, str]] | LookFailed | None:
    """Return the driver's GPUs as dicts of GPU_FIELDS, or the error of nvidia-smi; None without nvidia-smi.

    The fields are index, uuid, name, driver_version, memory.total and memory.free. Values are nvidia-smi's texts;
    memory is in MiB.
    """
    if not shutil.which("nvidia-smi"):
        return None
    try:
        return nvidia_smi_table("--query-gpu=" + ",".join(GPU_FIELDS), GPU_FIELDS)
    except LookFailed as error:
        return error


def _may_have_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


CheckFunction = Callable[[Context], Check | list[Check]]
"""Function that carries out one or more checks."""


# --- external programs -----------------------------------------------------------------------------------------


def answer(question: str, *arguments: str, seconds: float, db: str | None = None) -> dict[str, Any]:
    """Run a query in a new process, which may import torch, and return the JSON object that it prints last.

    Blocks until the process ends; after `seconds` it is killed. Its exit code is not checked if there is an object.

    Args:
        question: torch, kernels, links, disk or cluster.
        arguments: Arguments of the query.
        seconds: Timeout.
        db: Database URL, passed in the environment since it may hold a password; None for that of the environment.

    Raises:
        LookFailed: There is no JSON object in time. The message is the last line of the process's error output, or its
            exit code.
    """
    env = os.environ | ({"ATMA_DB": db} if db is not None else {})
    try:
        process = subprocess.run(
            [sys.executable, "-m", "atma_sweep.sweep.doctor", question, *arguments],
            capture_output=True, text=True, timeout=seconds, env=env, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LookFailed(f"the check of {question} gave no answer within {seconds:.0f} s") from None
    try:
        return dict(json.loads(process.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        error_lines = process.stderr.strip().splitlines()
        raise LookFailed(
            error_lines[-1].strip() if error_lines else f"it ended with exit code {process.returncode}"
        ) from None


def nvidia_smi(*arguments: str) -> str:
    """Return the standard output of nvidia-smi.

    Raises:
        LookFailed: It cannot be started, fails, or does not answer within 30 s (SMI_SECONDS); the message has its first
            line.
    """
    try:
        process = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise LookFailed(f"no answer from nvidia-smi within {SMI_SECONDS:g} s") from None
    except OSError as error:
        raise LookFailed(f"nvidia-smi cannot be started: {error}") from None
    if process.returncode:
        output_lines = [line.strip() for line in (process.stdout + process.stderr).splitlines() if line.strip()]
        raise LookFailed(f"nvidia-smi: {output_lines[0] if output_lines else f'exit code {process.returncode}'}")
    return process.stdout


def nvidia_smi_table(query: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a query of nvidia-smi as dicts of texts by field name, without units.

    Rows with another number of fields than `names` are left out.

    Args:
        query: Option of nvidia-smi, such as "--query-gpu=index,uuid".
        names: Keys of the dicts, in the order of the query's fields.

    Raises:
        LookFailed: nvidia-smi fails or hangs.
    """
    rows = (line.split(", ") for line in nvidia_smi(query, "--format=csv,noheader,nounits").splitlines())
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows if len(row) == len(names)]


def parse_count(word: str) -> int | None:
    """Return a text of digits as a number; None for any other, such as [N/A]."""
    return int(word) if word.isdigit() else None


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
