"""Location of compiled kernels that processes share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from atma_sweep.kernels.dispatch import version
from atma_sweep.sweep.attempt import device
from atma_sweep.sweep.attempt.device import use_shared_compile_cache, use_shared_self_tests
from patience import PATIENCE_S
from tiers import only_long

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, a GPU with a name, and neither variable set; all as it was afterwards."""
    for name in NAMES:
        # setting first makes the patch put back what share_compiled sets
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200 NVL")
    with torch.compiler.config.patch(cache_key_tag=""), functorch.patch(**{device.CUSTOM_AUTOGRAD_FLAG: False}):
        yield tmp_path


def test_in_the_users_cache_by_versions_and_gpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_shared_compile_cache(DEVICE)
    inductor, triton = (Path(os.environ[name]) for name in NAMES)
    versions = f"torch-{torch.__version__}-{version('triton')}-NVIDIA-H200-NVL"
    assert inductor == home / ".cache" / "atma-sweep" / "compiled" / versions / "inductor"
    assert triton == inductor.with_name("triton")
    assert " " not in str(inductor.relative_to(home))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    for name in NAMES:
        monkeypatch.delenv(name)
    use_shared_compile_cache(DEVICE)
    assert os.environ[NAMES[0]] != str(inductor)


def test_torchs_default_cache_folder_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler does so when it is imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    use_shared_compile_cache(DEVICE)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(home)


@pytest.mark.parametrize(("cache", "folder"), [("{home}/elsewhere", "elsewhere"), ("", ".cache")])
def test_under_the_cache_home_that_is_set(home: Path, monkeypatch: pytest.MonkeyPatch, cache: str, folder: str) -> None:
    """An empty one is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache.format(home=home))
    use_shared_compile_cache(DEVICE)
    assert all(Path(os.environ[name]).is_relative_to(home / folder / "atma-sweep" / "compiled") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_set_stays(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/mine")
    use_shared_compile_cache(DEVICE)
    assert os.environ[name] == "/mine"
    (unset_name,) = set(NAMES) - {name}
    assert Path(os.environ[unset_name]).is_relative_to(home)


def test_nothing_is_written_before_something_is_compiled(home: Path) -> None:
    use_shared_compile_cache(DEVICE)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("driver", ["580.159.04", None])
def test_self_tests_are_noted_by_the_driver(home: Path, driver: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-tests run each time if the driver is unknown."""
    monkeypatch.setattr(device, "driver_version", lambda: driver)
    noted: list[Path | None] = []
    monkeypatch.setattr(device, "cache_self_tests", noted.append)
    use_shared_self_tests(DEVICE)
    versions = f"torch-{torch.__version__}-{version('triton')}-NVIDIA-H200-NVL"
    folder = home / ".cache" / "atma-sweep" / "compiled" / versions / f"passed-{driver}"
    assert noted == ([] if driver is None else [folder])
    assert list(home.iterdir()) == []


def test_compiled_code_is_reused_for_equal_sources(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, a plugin's, and what the user marks; the compiler has them in the key of every graph."""
    real, edited = device.sources, [""]
    monkeypatch.setattr(device, "sources", lambda folder: real(folder) + (edited[0] if folder.name == "model" else ""))

    def tag(*hashes: str) -> str:
        use_shared_compile_cache(DEVICE, *hashes)
        return str(torch.compiler.config.cache_key_tag)

    assert tag() == tag()
    assert getattr(functorch, device.CUSTOM_AUTOGRAD_FLAG) is True
    tags = [tag(), tag("a plugin"), tag("another")]
    edited[0] = "edited"
    tags.append(tag())
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")
    tags.append(tag())
    assert len(set(tags)) == 5
    assert tags[4] == f"mine{tags[3]}"
    assert {path.name for path in device.PACKAGE.iterdir()} >= {"kernels", "model"}


@only_long
@pytest.mark.thorough
@pytest.mark.parametrize("how", ["whole", "regional"])
def test_a_later_process_traces_no_backward_again(tmp_path: Path, how: str) -> None:
    """To the same bits; after an edit of the sources it does."""
    script = Path(__file__).parents[2] / "testing" / "compiled_again.py"
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def compile_report(*hashes: str) -> Any:
        command = [sys.executable, str(script), how, *hashes]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, again, edited = compile_report(), compile_report(), compile_report("edited")
    assert first["gradients"] == again["gradients"] == edited["gradients"]
    graphs = first["asked"]["miss"]
    assert graphs == first["asked"]["saved"] == (3 if how == "regional" else 1)
    assert again["asked"].get("hit") == graphs
    assert "miss" not in again["asked"]
    assert edited["asked"]["miss"] == graphs
    assert not any("bypass" in report["asked"] for report in (first, again, edited))
