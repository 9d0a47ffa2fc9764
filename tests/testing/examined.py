"""Shared by the tests of doctor: canned answers of torch and of a driver that is a script."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep import doctor
from atma_sweep.sweep.doctor import Check, LookFailed

CPU = {"torch": "2.13.0+cpu", "cuda": None, "error": "no CUDA in this build", "gpus": []}
LINKED = {"error": None, "bytes_per_s": 380e9, "is_right": True, "nccl": "2.27.5", "without_peer_access": []}
DRIVER = r"""#!/bin/sh
cd "$(dirname "$0")"
case "$1" in
  --query-gpu=index*) name=gpus ;;
  --query-gpu=uuid*) name=faults ;;
  --query-remapped-rows*) name=rows ;;
  --query-compute-apps*) name=apps ;;
  *) name=plain ;;
esac
[ -f $name.sh ] && exec sh $name.sh
[ -f $name ] || { echo "Field is not a valid field to query."; exit 2; }
cat $name
"""
TWO = """0, GPU-aaaa, NVIDIA H200, 580.159.04, 143771, 143000
1, GPU-bbbb, NVIDIA H200, 580.159.04, 143771, 71000
"""
PLAIN = "| NVIDIA-SMI 580.159.04    Driver Version: 580.159.04    CUDA Version: 13.0     |\n"


def gpu(uuid: str, capability: str = "9.0", right: bool = True) -> dict[str, Any]:
    return {"uuid": uuid, "name": "H", "capability": capability, "total": 143771 * 2**20, "fla_is_right": right}


def cuda(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"torch": "2.11.0", "cuda": "13.0", "error": None, "gpus": list(gpus)} | more


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home and temporary folder, a working folder without a database, and no word from the environment."""
    for name in ("home", "tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("ATMA_DB", "RAY_TMPDIR", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "CC",
                 "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """install(gpus=..., faults=..., apps=..., plain=...): what nvidia-smi prints; *_sh is a script that does."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(**texts: str) -> None:
        program = folder / "nvidia-smi"
        program.write_text(DRIVER)
        program.chmod(0o755)
        for name, text in texts.items():
            (folder / name.replace("_sh", ".sh")).write_text(text)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """Return a function that examines the machine with the canned answers that it is given.

    It returns the checks by name.
    """

    def examine(runs: Path | None = None, db: str | None = None, **answers: Any) -> dict[str, Check]:
        def answer(question: str, *arguments: str, **options: Any) -> Any:
            answer_or_error = ({"torch": CPU, "kernels": {}, "links": LINKED} | answers).get(
                question, LookFailed("nothing was planned")
            )
            if isinstance(answer_or_error, Exception):
                raise answer_or_error
            return answer_or_error

        monkeypatch.setattr(doctor.context, "answer", answer)
        monkeypatch.setattr(doctor.database, "CLOCK_S", 0.001)
        checks = doctor.examine(db, runs)
        assert len({check.name for check in checks}) == len(checks)
        assert all("\n" not in check.found + check.remedy and check.found for check in checks)
        return {check.name: check for check in checks}

    return examine


def level_and_text(check: Check) -> tuple[str, str]:
    return check.state, check.found
