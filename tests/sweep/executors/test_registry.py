"""Executors by name: values of the command line, and the class of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from atma_sweep import cli
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.errors import GridError, SweepError
from atma_sweep.sweep.executors import registry
from atma_sweep.sweep.executors.executor import ExecutorContext, LocalExecutor
from atma_sweep.sweep.executors.registry import (
    DEFAULT_EXECUTOR,
    EXECUTORS,
    ExecutorSpec,
    open_executor,
    resolve_executor_name,
)
from typer.testing import CliRunner


def test_registry_entry_makes_an_executor_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.EXECUTORS.own, "mine", ExecutorSpec("executor:LocalExecutor", "somewhere"))
    assert resolve_executor_name("mine") == "mine"
    opening = ExecutorContext(open_store(tmp_path / "atma.db", create=True), tmp_path, print)
    assert isinstance(open_executor("mine", opening), LocalExecutor)
    error = CliRunner().invoke(cli.app, ["launch", "quick", "--executor", "mime"]).exception
    assert str(error) == (f"--executor: mime: no such executor; allowed: {', '.join(EXECUTORS)}; did you mean 'mine'?")


def test_address_selects_the_cluster_executor() -> None:
    assert [resolve_executor_name(name, "head:6379") for name in (DEFAULT_EXECUTOR, "cluster")] == [
        "cluster",
        "cluster",
    ]
    assert [resolve_executor_name(name) for name in (DEFAULT_EXECUTOR, "local")] == ["ray", "local"]
    with pytest.raises(
        SweepError, match="--executor cluster: attempts run on the Ray cluster at --address; pass --address"
    ):
        resolve_executor_name("cluster")
    with pytest.raises(SweepError, match="--executor local runs on this machine only"):
        resolve_executor_name("local", "head:6379")
    with pytest.raises(GridError, match="no such executor"):
        resolve_executor_name("slurm")
