"""What one look finds, what several looks share, and the programs that are asked."""

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
"""A driver that hangs keeps nvidia-smi for ever."""
TORCH_SECONDS = 300.0
KERNEL_SECONDS = 600.0
"""The self-tests of the kernels compile them, where no earlier run left them in the cache."""
LOCK_SECONDS = 5.0
GPU_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    """ok; warn: works, but not as it could; bad: stops a sweep; absent: is not there and need not be."""
    found: str
    """One line."""
    remedy: str = ""


ok, warn, bad, absent = (functools.partial(Check, "", state) for state in get_args(State))
"""Findings in each state, with a remedy or without, that take the name of their look."""


class LookFailed(Exception):
    """Somebody who was asked did not answer, or not as expected; the message is one line."""


class Context:
    """What several looks share, each part asked for once; whatever takes long is asked for at once, in `pool`."""

    def __init__(self, db: str | None, runs: Path | None, pool: ThreadPoolExecutor, address: str | None = None) -> None:
        self.db, self.address, self.pool = db, address, pool
        try:
            self.runs = (runs or default_runs(db)).absolute()
        except StoreError:  # the look at the database tells
            self.runs = Path.cwd()
        self._torch = pool.submit(answer, "torch", seconds=TORCH_SECONDS)
        self._driver = pool.submit(_ask_driver)
        # before torch has said whether it can use a GPU: its own import takes as long as that of the self-tests
        self._kernels = pool.submit(answer, "kernels", seconds=KERNEL_SECONDS) if _may_have_gpu() else None
        self._disk: Future[dict[str, Any]] | None = None
        with contextlib.suppress(Exception), self.store() as store:
            store.default_sweep()
            url = store.url.render_as_string(hide_password=False)
            self._disk = pool.submit(answer, "disk", str(self.runs), seconds=TORCH_SECONDS, db=url)

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """The database, closed afterwards. Raises StoreError."""
        store = open_store(self.db, patience=LOCK_SECONDS)
        try:
            yield store
        finally:
            store.close()

    @functools.cached_property
    def file(self) -> Path | None:
        """The file of a SQLite database."""
        return Store(self.db).path

    @property
    def driver(self) -> list[dict[str, str]] | LookFailed | None:
        """The GPUs that the driver has, or why it does not say; None without nvidia-smi. Asked once: it may hang."""
        return self._driver.result()

    def gpus(self) -> list[dict[str, str]]:
        """The GPUs that the driver has, none where it fails."""
        return self.driver if isinstance(self.driver, list) else []

    def torch(self) -> dict[str, Any]:
        """What torch says of itself and its GPUs. Raises LookFailed."""
        return self._torch.result()

    def usable(self) -> list[dict[str, Any]]:
        """The GPUs that torch can use, none where it cannot be asked."""
        try:
            return list(self.torch()["gpus"])
        except LookFailed:
            return []

    def kernels(self) -> dict[str, Any]:
        """What each op takes on a GPU. Raises LookFailed."""
        if self._kernels is None:
            self._kernels = self.pool.submit(answer, "kernels", seconds=KERNEL_SECONDS)
        return self._kernels.result()

    def disk(self) -> dict[str, Any] | None:
        """What the default sweep still needs, None without one. Raises LookFailed."""
        return None if self._disk is None else self._disk.result()


def _ask_driver() -> list[dict[str, str]] | LookFailed | None:
    if not shutil.which("nvidia-smi"):
        return None
    try:
        return smi_table("--query-gpu=" + ",".join(GPU_FIELDS), GPU_FIELDS)
    except LookFailed as error:
        return error


def _may_have_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


CheckFunction = Callable[[Context], Check | list[Check]]


# --- programs that are asked ----------------------------------------------------------------------------------------


def answer(question: str, *arguments: str, seconds: float, db: str | None = None) -> dict[str, Any]:
    """Asks a process that may import torch. Raises LookFailed with its last line when it gives no answer.

    `seconds`: how long it may take; `db`: handed on in the environment, since it may hold a password.
    """
    env = os.environ | ({"ATMA_DB": db} if db is not None else {})
    try:
        run = subprocess.run(
            [sys.executable, "-m", "atma_sweep.sweep.doctor", question, *arguments],
            capture_output=True, text=True, timeout=seconds, env=env, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LookFailed(f"no answer from torch within {seconds:.0f} s") from None
    try:
        return dict(json.loads(run.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        said = run.stderr.strip().splitlines()
        raise LookFailed(said[-1].strip() if said else f"it ended with exit code {run.returncode}") from None


def smi(*arguments: str) -> str:
    """What nvidia-smi says. Raises LookFailed."""
    try:
        run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise LookFailed(f"nvidia-smi does not answer within {SMI_SECONDS:g} s") from None
    except OSError as error:
        raise LookFailed(f"nvidia-smi cannot be started: {error}") from None
    if run.returncode:
        said = [line.strip() for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        raise LookFailed(f"nvidia-smi: {said[0] if said else f'exit code {run.returncode}'}")
    return run.stdout


def smi_table(query: str, names: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a query of nvidia-smi, by the names of its fields. Raises LookFailed."""
    rows = (line.split(", ") for line in smi(query, "--format=csv,noheader,nounits").splitlines())
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows if len(row) == len(names)]


def number_in(word: str) -> int | None:
    """None for a word that is no number, such as [N/A]."""
    return int(word) if word.isdigit() else None


def version_of(package: str) -> str | None:
    """Of an installed package; None for one that is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
