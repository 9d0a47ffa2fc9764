"""Obstacles between a launch and a cluster: each is one line with a remedy, before Ray is involved."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.executors import source_snapshot
from bench import Bench

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[train]'")
from atma_sweep.sweep.executors import node_info as look
from atma_sweep.sweep.executors import ray_connection
from atma_sweep.sweep.executors.ray_connection import ClusterAddressError, NodeFacts

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path for a private token."""
    path = tmp_path / "token"
    path.write_text("0" * 64)
    path.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    return path


@pytest.fixture
def free_address() -> Iterator[str]:
    """Address of this machine where nothing answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("address", ["", "auto", "head", "ray://head:10001", "head:", "head:port", ":6379"])
def test_parse_address_requires_host_and_port(address: str) -> None:
    with pytest.raises(ClusterAddressError, match="is not HOST:PORT"):
        ray_connection.parse_address(address)


def test_addresses_that_are_right() -> None:
    assert ray_connection.parse_address("head.example:6379") == ("head.example", 6379)
    assert ray_connection.parse_address("[fe80::1]:6379") == ("fe80::1", 6379)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_token_readable_by_all_users_is_refused(token: Path, free_address: str, mode: int) -> None:
    token.chmod(mode)
    with pytest.raises(MachineError, match=rf"other users can read the token in .*; chmod 600 {token}"):
        ray_connection.connect_driver(free_address)


def test_missing_token_is_refused(token: Path, free_address: str) -> None:
    token.unlink()
    with pytest.raises(MachineError, match=r"no token in .*; copy the head's file there and chmod 600 it"):
        ray_connection.connect_driver(free_address)


def test_token_in_the_environment_needs_no_file(
    token: Path, free_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(MachineError, match="no cluster answers at"):
        ray_connection.connect_driver(free_address)


def test_launch_to_a_dead_address_changes_nothing(run: Run, tmp_path: Path, free_address: str) -> None:
    """The error is a single line with exit code 3, and the sweep is not recorded."""
    Bench(tmp_path)
    code, _, error_text = run("launch", "micro.yaml", "--address", free_address)
    assert code == 3
    assert error_text.startswith(f"atma-sweep: no cluster answers at {free_address} (Connection refused)")
    assert error_text.count("\n") == 1
    assert run("launch", "micro.yaml", "--address", free_address, "--detach")[0] == 3
    code, _, error_text = run("status", "--sweep", "micro")
    assert code == 2
    assert "no sweep" in error_text


def test_options_that_do_not_go_together(run: Run) -> None:
    code, _, error_text = run("launch", "quick", "--detach")
    assert (code, error_text.count("\n")) == (2, 1)
    assert "pass its --address" in error_text
    code, _, error_text = run("launch", "quick", "--address", "head:6379", "--executor", "local")
    assert (code, error_text.count("\n")) == (2, 1)
    assert "--executor local" in error_text


def facts(host: str, **versions: str) -> NodeFacts:
    return NodeFacts(
        id=host, address=host, host=host, cpus=1, gpus=0, python=versions.pop("python", "3.12.1"), executable="python",
        import_path=None, versions=versions, sees_runs=True, clock_ahead=0.0, clock_slack=0.0,
    )  # fmt: skip


def test_version_differences_between_nodes() -> None:
    same = [facts("a", torch="2.13", numpy="2"), facts("b", torch="2.13", numpy="2")]
    assert ray_connection.version_differences(same) == {}
    newer = facts("c", torch="2.12", python="3.12.2")
    assert ray_connection.version_differences([*same, newer]) == {
        "python": {"3.12.1": ["a", "b"], "3.12.2": ["c"]},
        "torch": {"2.13": ["a", "b"], "2.12": ["c"]},
        "numpy": {"2": ["a", "b"], "none": ["c"]},
    }


@pytest.mark.thorough
def test_try_import_returns_the_import_error(tmp_path: Path) -> None:
    source = source_snapshot.snapshot_folder(tmp_path / "runs")
    assert look.try_import(ray_connection.AGENT_MODULE, source_snapshot.import_path(source, None)) is None
    (tmp_path / "sqlalchemy.py").write_text("raise ImportError('no such luck')")
    path = source_snapshot.import_path(source, str(tmp_path))
    assert look.try_import(ray_connection.AGENT_MODULE, path) == "ImportError: no such luck"
