"""Storage locations: atomic writes, detected failures, and the same behaviour of every backend."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.checkpoints.checkpoint import CheckpointError
from atma_sweep.sweep.checkpoints.storage import StorageAddressError, StorageError
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from refusals import refused
from torch import nn

KINDS = ("folder", "file", "memory")
serial = itertools.count()


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A location that does not exist yet, as a path, as a file:// URL, and behind fsspec."""
    local = tmp_path / "place" / "cell" / "1"
    return {"folder": str(local), "file": f"file://{local}", "memory": f"memory://{next(serial)}/cell/1"}[request.param]


@pytest.fixture
def memory() -> str:
    return f"memory://{next(serial)}/cell/1"


@pytest.fixture(autouse=True)
def _no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send temporary files of the test to a folder of its own, which must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def put(address: str, step: int, value: float = 0.0) -> str:
    state = {"x": torch.tensor([value])}
    return checkpoint.save(address, linear(value), state, step=step, tokens=10 * step, wall_s=0.5 * step)


def newest(address: str) -> tuple[int, float] | None:
    loaded = checkpoint.load_newest(address)
    return None if loaded is None else (loaded.step, loaded.optimizers["x"].item())


def edit(address: str, change: Any) -> None:
    """Replace the bytes of a file by `change` of them, without the program's own code."""
    with fsspec.open(address, "rb") as file:
        raw = file.read()
    with fsspec.open(address, "wb") as file:
        file.write(change(raw))


# --- every backend ------------------------------------------------------------------------------------------------


def test_storage_checkpoint_round_trip(address: str) -> None:
    assert checkpoint.load_newest(address) is None
    assert put(address, 7, 3.0) == "checkpoint-00000007"
    loaded = checkpoint.load_newest(address)
    assert loaded is not None
    assert (loaded.step, loaded.tokens, loaded.wall_s) == (7, 70, 3.5)
    assert torch.equal(loaded.model["weight"], torch.full((2, 3), 3.0))
    assert loaded.optimizers["x"].item() == 3.0


def test_storage_keeps_two_newest_and_replaces_same_step(address: str) -> None:
    for step, value in ((5, 1.0), (10, 2.0), (100, 3.0), (100, 4.0)):
        put(address, step, value)
    assert checkpoint.list_checkpoints(address) == ["checkpoint-00000100", "checkpoint-00000010"]
    assert newest(address) == (100, 4.0)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizers.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_newest_is_passed_over(address: str, name: str, damage: str) -> None:
    put(address, 5)
    put(address, 10)

    def change(raw: bytes) -> bytes:
        half = len(raw) // 2
        return {"cut": raw[:half], "flip": raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :], "empty": b""}[damage]

    edit(storage.join(address, "checkpoint-00000010", name), change)
    assert newest(address) == (5, 0.0)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizers.pt", "state.json"])
def test_storage_ignores_incomplete_checkpoint(address: str, name: str) -> None:
    put(address, 5)
    put(address, 10)
    files, path = fsspec.core.url_to_fs(storage.join(address, "checkpoint-00000010", name))
    files.rm_file(path)
    assert newest(address) == (5, 0.0)


def test_storage_clear_leaves_foreign_files(address: str) -> None:
    for step in (5, 10):
        put(address, step)
    checkpoint.save_weights(storage.join(address, "weights.safetensors"), linear(1.0))
    checkpoint.remove_checkpoints(address, keep="checkpoint-00000005")
    assert storage.open_storage(address).names() == ["checkpoint-00000005", "weights.safetensors"]
    checkpoint.remove_checkpoints(address)
    assert storage.open_storage(address).names() == ["weights.safetensors"]
    checkpoint.remove_checkpoints(address + "/nowhere")


def test_storage_weights_round_trip(address: str) -> None:
    where = storage.join(address, "weights.safetensors")
    assert not storage.exists(where)
    checkpoint.save_weights(where, linear(2.0))
    assert storage.exists(where)
    assert not storage.exists(address), "a folder is no file"
    model = linear(0.0)
    checkpoint.load_weights(where, model)
    assert torch.equal(model.weight, torch.full((2, 3), 2.0))
    assert storage.open_storage(address).names() == ["weights.safetensors"]


@pytest.mark.parametrize("damage", ["gone", "cut", "text", "other-model"])
def test_load_weights_error_gives_advice(address: str, damage: str) -> None:
    where = storage.join(address, "weights.safetensors")
    checkpoint.save_weights(where, nn.Linear(4, 2) if damage == "other-model" else linear(1.0))
    if damage == "gone":
        storage.open_storage(address).remove("weights.safetensors")
    elif damage == "cut":
        edit(where, lambda raw: raw[:-7])
    elif damage == "text":
        edit(where, lambda raw: b"not safetensors")
    message = refused(lambda: checkpoint.load_weights(where, linear(0.0)), CheckpointError)
    assert message.startswith(f"{where}: the weights cannot be read: ")
    assert message.endswith("; train the cell again with --retrain")


def test_claim_checks_writable_and_leaves_nothing(address: str) -> None:
    checkpoint.check_unclaimed(address)
    assert storage.open_storage(address).names() == []
    put(address, 5)
    with pytest.raises(StorageError, match="already holds a training that is not in this database; remove it"):
        checkpoint.check_unclaimed(address)
    assert newest(address) == (5, 0.0)
    checkpoint.remove_checkpoints(address)
    checkpoint.save_weights(storage.join(address, "weights.safetensors"), linear(1.0))
    with pytest.raises(StorageError, match="already holds"):
        checkpoint.check_unclaimed(address)


# --- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "home", "full"), [
    (None, "abc/1", "/r/abc/1"),
    ("/data/x", "/data/x/abc/1", "/data/x/abc/1"),
    ("/data/x/", "/data/x/abc/1", "/data/x/abc/1"),
    ("file:///data/x", "/data/x/abc/1", "/data/x/abc/1"),
    ("local:///data/x", "/data/x/abc/1", "/data/x/abc/1"),
    ("s3://bucket/x/", "s3://bucket/x/abc/1", "s3://bucket/x/abc/1"),
    ("gs://bucket", "gs://bucket/abc/1", "gs://bucket/abc/1"),
])  # fmt: skip
def test_attempt_address_by_checkpoint_path(path: str | None, home: str, full: str) -> None:
    assert storage.attempt_address(path, "abc/1") == home
    assert storage.resolve(Path("/r"), home) == full
    assert storage.split(storage.join(full, "checkpoint-00000007")) == (full, "checkpoint-00000007")


def test_free_bytes_of_local_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    for address in (str(tmp_path), str(tmp_path / "not" / "yet"), f"file://{tmp_path}/no"):
        reported = storage.free_bytes(address)
        assert reported is not None
        assert abs(reported - free) < 2**30, "others write to this disk meanwhile"
    assert storage.free_bytes("s3://bucket/x") is None


@pytest.mark.parametrize(("address", "message"), [
    ("file://data/x", "file://data/x: needs an absolute path, as in file:///data/checkpoints"),
    ("reference::file:///x", "reference::file:///x: chained addresses (::) are not supported; name a folder or one fsspec URL such as s3://..."),
    ("s3://bucket/x::file:///y", "s3://bucket/x::file:///y: chained addresses (::) are not supported; name a folder or one fsspec URL such as s3://..."),
    ("reference://x", "reference://x: unknown protocol reference; name a folder or an fsspec URL such as s3://..."),
    ("nosuch://bucket/x", "nosuch://bucket/x: unknown protocol nosuch; name a folder or an fsspec URL such as s3://..."),
])  # fmt: skip
def test_storage_rejects_invalid_address(address: str, message: str) -> None:
    assert refused(lambda: storage.open_storage(address), StorageAddressError) == message
    assert StorageAddressError("x").exit_code == 2


def test_storage_names_package_of_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = {"class": "no_such_package.Tape", "err": "Install tapefs to access tape"}
    monkeypatch.setitem(known_implementations, "tape", tape)
    monkeypatch.setattr(storage, "SCHEMES", storage.SCHEMES | {"tape"})
    assert StorageError("x").exit_code == 3
    assert refused(lambda: storage.open_storage("tape://drive/x"), StorageError) == (
        "tape://drive/x: Install tapefs to access tape; install that package in the environment of atma-sweep, "
        "or name a folder with checkpoint.path"
    )


# --- failures -----------------------------------------------------------------------------------------------------


def test_storage_reports_unwritable_folder_briefly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = refused(lambda: storage.open_storage(tmp_path / "file" / "inside").check(), StorageError)
    assert message.startswith(f"{tmp_path}/file/inside cannot be written: ")
    assert message.endswith("free space there or set checkpoint.path to another location, then launch again")


def test_storage_uploads_seal_last(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash at any write leaves the previous checkpoint as the newest."""
    put(memory, 5, 1.0)
    real = MemoryFileSystem.put_file
    for survived in range(2):
        outcomes = iter([True] * survived)

        def die(self: Any, local: str, remote: str, outcomes: Iterator[bool] = outcomes, **options: Any) -> None:
            if not next(outcomes, False):
                raise KeyboardInterrupt
            real(self, local, remote, **options)

        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "put_file", die)
            with pytest.raises(KeyboardInterrupt):
                put(memory, 10, 2.0)
        assert newest(memory) == (5, 1.0)
        assert "state.json" not in storage.open_storage(storage.join(memory, "checkpoint-00000010")).names()
    put(memory, 10, 2.0)
    assert newest(memory) == (10, 2.0)


def test_storage_removes_seal_before_overwriting(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, 5, 1.0)
    put(memory, 10, 2.0)

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", die)
        with pytest.raises(KeyboardInterrupt):
            put(memory, 10, 3.0)
    assert newest(memory) == (5, 1.0)


def test_storage_detects_failed_read_back(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, 5, 1.0)
    real = MemoryFileSystem.put_file

    def garble(self: Any, local: str, remote: str, **options: Any) -> None:
        real(self, local, remote, **options)
        if remote.endswith("optimizers.pt"):
            with self.open(remote, "ab") as file:
                file.write(b"!")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", garble)
        with pytest.raises(StorageError, match=r"memory://.*: a file that was read back differs from what was written"):
            put(memory, 10, 2.0)
    assert newest(memory) == (5, 1.0)


USES: dict[str, Callable[[str], Any]] = {
    "ls": checkpoint.load_newest,
    "get_file": checkpoint.load_newest,
    "info": lambda address: storage.exists(storage.join(address, "weights.safetensors")),
    "put_file": lambda address: storage.open_storage(address).check(),
}


@pytest.mark.parametrize("call", USES)
def test_storage_reports_unreachable_location(memory: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Otherwise a network failure would restart a training, or weights would count as missing."""
    put(memory, 5)

    class Lost(Exception):
        """Exception of a backend that is no OSError."""

    def fail(*_: Any, **__: Any) -> None:
        raise Lost("connection reset\nby peer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, call, fail)
        assert refused(lambda: USES[call](memory), StorageError) == (
            f"{memory} cannot be used: connection reset; check the address, the credentials and the network, or set "
            "checkpoint.path to another location, then launch again"
        )
    assert newest(memory) == (5, 0.0)


def test_seal_rejects_names_with_paths(memory: str, tmp_path: Path) -> None:
    """A seal is untrusted data: a name that contains a path counts as damage, whatever it points to."""
    put(memory, 5)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()

    def point(raw: bytes) -> bytes:
        return json.dumps({**json.loads(raw), "sha256": {str(secret): digest}}).encode()

    edit(storage.join(memory, "checkpoint-00000005", "state.json"), point)
    assert checkpoint.load_newest(memory) is None
