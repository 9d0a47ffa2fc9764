"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from atma_sweep.kernels.choice import version
from atma_sweep.sweep.attempt.device import share_compiled

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, a GPU with a name, and neither variable set; all as it was afterwards."""
    for name in NAMES:
        # setting first makes the patch put back what share_compiled sets
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200 NVL")
    return tmp_path


def test_in_the_users_cache_by_versions_and_gpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_compiled(DEVICE)
    inductor, triton = (Path(os.environ[name]) for name in NAMES)
    made_for = f"torch-{torch.__version__}-{version('triton')}-NVIDIA-H200-NVL"
    assert inductor == home / ".cache" / "atma-sweep" / "compiled" / made_for / "inductor"
    assert triton == inductor.with_name("triton")
    assert " " not in str(inductor.relative_to(home))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    for name in NAMES:
        monkeypatch.delenv(name)
    share_compiled(DEVICE)
    assert os.environ[NAMES[0]] != str(inductor)


def test_under_the_cache_home_that_is_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    share_compiled(DEVICE)
    assert all(Path(os.environ[name]).is_relative_to(home / "elsewhere" / "atma-sweep" / "compiled") for name in NAMES)


def test_an_empty_cache_home_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    share_compiled(DEVICE)
    assert all(Path(os.environ[name]).is_relative_to(home / ".cache") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_set_stays(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/mine")
    share_compiled(DEVICE)
    assert os.environ[name] == "/mine"
    (other,) = set(NAMES) - {name}
    assert Path(os.environ[other]).is_relative_to(home)


def test_nothing_is_written_before_something_is_compiled(home: Path) -> None:
    share_compiled(DEVICE)
    assert list(home.iterdir()) == []
