"""Checks of `doctor` for system, GPUs and Ray: real processes, locks and files; a stand-in driver."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep import doctor
from atma_sweep.sweep.attempt import device
from atma_sweep.sweep.doctor import Check, LookFailed, gpus, worker
from examined import LINKED, PLAIN, TWO, cuda, gpu, level_and_text
from patience import PATIENCE_S, until

GIB = 2**30


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_doctor_runs_on_this_machine(tmp_path: Path) -> None:
    code = (
        "import json, sys; from atma_sweep.sweep import doctor; found = doctor.examine(); "
        "print(json.dumps([doctor.as_json(found), sorted({'torch', 'ray', 'numpy', 'pandas'} & set(sys.modules)), "
        "doctor.exit_code(found), [name for name, _ in doctor.CHECKS]]))"
    )
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "nvidia-smi").exists())
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S,
                         env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    checks, heavy, exit_code, looks = json.loads(run.stdout)
    assert heavy == [], "the main process stays light"
    by_name = {check["name"]: check for check in checks}
    assert {check["state"] for check in checks} <= {"ok", "warn", "bad", "absent"}
    assert exit_code == (3 if any(check["state"] == "bad" for check in checks) else 0)
    assert set(looks) - set(by_name) <= {"GPUs"}
    assert by_name["python"]["found"] == platform.python_version()
    assert by_name["torch"]["state"] == "ok"
    assert by_name["Ray"]["state"] == "ok"
    assert by_name["NVIDIA driver"]["state"] in ("absent", "warn")
    assert by_name["database"]["state"] == "absent"
    assert list((tmp_path / "work").iterdir()) == [], "nothing is left behind, least of all a database"


def test_check_that_raises_is_a_bad_check(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    def broken(case: Any) -> Check:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", (("first", broken), *doctor.CHECKS))
    checks = look()
    assert checks["first"] == Check("first", "bad", "ZeroDivisionError: two lines")
    assert checks["python"].state == "ok"
    assert doctor.exit_code(list(checks.values())) == 3


def test_text_and_exit_code() -> None:
    checks = [Check("a", "ok", "x"), Check("long", "warn", "y", "mend it"), Check("b", "absent", "z")]
    assert doctor.exit_code(checks) == doctor.exit_code([]) == 0
    assert doctor.describe([*checks, Check("c", "bad", "w")]) == [
        "ok      a     x",
        "warn    long  y",
        "              -> mend it",
        "absent  b     z",
        "bad     c     w",
        "1 ok, 1 warn, 1 bad, 1 absent",
    ]
    assert doctor.as_json(checks)[1] == {"name": "long", "state": "warn", "found": "y", "remedy": "mend it"}


def test_doctor_reports_an_invalid_database_address(look: Any) -> None:
    checks = look(db="mysql://x/y")
    assert level_and_text(checks["database"]) == ("bad", "mysql databases are not supported")
    assert checks["database"].remedy == "use sqlite:///FILE or postgresql://..."
    assert checks["writing"].state == "ok"


@pytest.mark.parametrize(
    ("system", "release", "cpu", "state"),
    [
        ("Linux", "6.1.0", "x86_64", "ok"),
        ("Linux", "6.6.87.2-microsoft-standard-WSL2", "x86_64", "ok"),
        ("Linux", "4.4.0-19041-Microsoft", "x86_64", "bad"),
        ("Linux", "6.1.0", "aarch64", "warn"),
        ("Darwin", "24.0", "arm64", "ok"),
        ("Windows", "11", "AMD64", "bad"),
    ],
)
def test_platforms(monkeypatch: pytest.MonkeyPatch, system: str, release: str, cpu: str, state: str) -> None:
    for name, word in (("system", system), ("release", release), ("machine", cpu)):
        monkeypatch.setattr(platform, name, lambda word=word: word)
    check = doctor.system.check_platform(None)  # type: ignore[arg-type]
    assert check.state == state
    assert bool(check.remedy) == (state == "bad")


@pytest.mark.parametrize(("version", "state"), [((3, 10, 9), "bad"), ((3, 14, 0), "ok"), ((3, 15, 0), "warn")])
def test_pythons(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], state: str) -> None:
    monkeypatch.setattr(doctor.system, "sys", SimpleNamespace(version_info=version))
    assert doctor.system.check_python(None).state == state  # type: ignore[arg-type]


def test_limits(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    ram = SimpleNamespace(available=3 * GIB // 2, total=16 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=0, total=GIB))
    monkeypatch.setattr(doctor.system, "SHARED_MEMORY", 2**70)
    checks = look()
    assert level_and_text(checks["open files"]) == ("warn", "at most 1024 of 4096")
    assert checks["memory"].state == "warn"
    assert checks["memory"].found.startswith("1.5 GiB of 16 GiB available, swap 0 B of 1.0 GiB used")
    assert checks["shared memory"].state == ("warn" if Path("/dev/shm").exists() else "absent")
    ram.available = 8 * GIB
    assert look()["memory"].state == "ok"
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=GIB * 3 // 4, total=GIB))
    assert look()["memory"].remedy.startswith("more than half of the swap")


# --- side by side ---------------------------------------------------------------------------------------------------


def test_slow_queries_run_in_parallel(tmp_path: Path, driver: Any, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, kernels and disk answer only once all three are queried; so do four calls of nvidia-smi."""
    db = tmp_path / "work" / "atma.db"
    with contextlib.closing(open_store(db, create=True)) as store:
        store.record_revision("g", grid_text="x", grid_file="x", cells=[])
    meet, marks = threading.Barrier(3, timeout=PATIENCE_S), tmp_path / "marks"
    marks.mkdir()
    driver_answers = {
        "gpus": TWO,
        "plain": PLAIN,
        "faults": "GPU-aaaa, 0, 0\n",
        "rows": "GPU-aaaa, No, 0\n",
        "apps": "",
    }
    for name in ("plain", "faults", "rows", "apps"):
        driver_answers[f"{name}_sh"] = (
            f"touch {marks}/{name}; i=0; while [ $(ls {marks} | wc -l) -lt 4 ] && [ $i -lt 400 ]; do sleep 0.05; "
            f"i=$((i + 1)); done; [ $i -lt 400 ] || exit 9; cat {name}"
        )
    driver(**driver_answers)

    def answer(question: str, *arguments: str, **options: Any) -> dict[str, Any]:
        if question == "links":  # asked once torch has listed two GPUs
            return LINKED
        meet.wait()
        room = {"sweep": "g", "cells": 0, "place": "/runs"}
        return {"torch": cuda(gpu("aaaa"), gpu("bbbb")), "kernels": {"polar": ["gluon", "x"]}, "disk": room}[question]

    monkeypatch.setattr(doctor.context, "answer", answer)
    by_name = {check.name: check for check in doctor.examine()}
    assert not meet.broken
    assert level_and_text(by_name["torch"]) == ("ok", "2.11.0, CUDA 13.0; sees 2 GPUs")
    assert level_and_text(by_name["kernel polar"]) == ("ok", "gluon (x)")
    assert by_name["disk space"].state == "ok"
    assert "up to CUDA 13.0" in by_name["NVIDIA driver"].found
    assert by_name["GPU 0"].found.endswith("no ECC errors")


def test_self_tests_run_side_by_side_and_none_is_lost(tmp_path: Path) -> None:
    """Each runs in a process of its own and waits for the others; one that fails or dies is reported."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def meets(part: tuple[str, ...]) -> dict[str, Any]:
        (marks / part[0]).touch()
        until(lambda: len(list(marks.iterdir())) == 3, "the others", pause=0.01)
        return dict.fromkeys(part, (len(list(marks.iterdir())), os.getpid()))

    merged = worker.run_in_forks(meets, [("a", "b"), ("c",), ("d",)])
    assert {count for count, _ in merged.values()} == {3}
    assert merged["a"] == merged["b"]
    assert len({pid for _, pid in merged.values()} - {os.getpid()}) == 3

    def dies(part: tuple[str, ...]) -> dict[str, Any]:
        if part == ("c",):
            os._exit(7)
        return {}

    with pytest.raises(RuntimeError, match=r"^self-test of c: its process ended with exit code 7$"):
        worker.run_in_forks(dies, [("a", "b"), ("c",)])

    def fails(part: tuple[str, ...]) -> dict[str, Any]:
        raise ValueError("two\nlines")

    with pytest.raises(RuntimeError, match=r"^self-test of a, b: ValueError: two lines$"):
        worker.run_in_forks(fails, [("a", "b")])


def test_kernel_backends_cover_every_op_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queried on the CPU, where every op uses torch; the answers are in the order of the report."""
    import torch

    monkeypatch.setattr(worker, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(device, "use_shared_compile_cache", lambda _: None)
    backends = worker.kernel_backends()
    ops = [op for part in worker.FORK_GROUPS for op in part]
    assert sorted(backends) == sorted(ops)
    assert {backend for backend, _ in backends.values()} == {"torch"}


# --- GPUs -----------------------------------------------------------------------------------------------------------


def test_gpu_checks_show_errors_and_users(driver: Any, look: Any) -> None:
    user = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "something"])
    try:
        driver(gpus=TWO, plain=PLAIN, faults="GPU-aaaa, 0, 0\nGPU-bbbb, 7, 2\n", rows="GPU-aaaa, No, 0\nGPU-bbbb, Yes, No\n",
               apps=f"GPU-bbbb, {user.pid}, 72000\n")  # fmt: skip
        checks = look(torch=cuda(gpu("aaaa"), gpu("bbbb")))
    finally:
        user.kill()
        user.wait()
    assert level_and_text(checks["NVIDIA driver"]) == ("ok", "580.159.04, up to CUDA 13.0, 2 GPUs")
    assert level_and_text(checks["torch"]) == ("ok", "2.11.0, CUDA 13.0; sees 2 GPUs")
    assert level_and_text(checks["GPU 0"]) == (
        "ok", "NVIDIA H200, compute capability 9.0 (fp16, bf16, fp8), 140 GiB of 140 GiB free, no ECC errors",
    )  # fmt: skip
    second = checks["GPU 1"]
    assert second.state == "bad"
    assert "69 GiB of 140 GiB free, 2 uncorrected and 7 corrected ECC errors" in second.found
    assert "rows wait to be remapped" in second.found
    assert f"in use by pid {user.pid}" in second.found
    assert second.found.endswith(", 70 GiB")
    assert "nvidia-smi -r -i 1" in second.remedy


def test_error_counters_that_nvidia_smi_does_not_have(driver: Any, look: Any) -> None:
    driver(gpus=TWO, plain=PLAIN)
    checks = look(torch=cuda(gpu("aaaa"), gpu("bbbb")))
    assert level_and_text(checks["GPU 0"]) == (
        "ok",
        "NVIDIA H200, compute capability 9.0 (fp16, bf16, fp8), 140 GiB of 140 GiB free",
    )
    driver(
        faults="GPU-aaaa, [N/A], [N/A]\nGPU-bbbb, 3, 0\n",
        rows="GPU-aaaa, [N/A], [N/A]\n",
        apps="GPU-aaaa, [N/A], [N/A]\n",
    )
    checks = look(torch=cuda(gpu("aaaa"), gpu("bbbb")))
    assert level_and_text(checks["GPU 0"]) == (
        "warn", "NVIDIA H200, compute capability 9.0 (fp16, bf16, fp8), 140 GiB of 140 GiB free, no ECC, in use by an unknown process",
    )  # fmt: skip
    assert checks["GPU 1"].state == "ok", "corrected errors do no harm"
    assert "0 uncorrected and 3 corrected" in checks["GPU 1"].found
    driver(rows="GPU-bbbb, 0, 1\n")
    checks = look(torch=cuda(gpu("aaaa"), gpu("bbbb")))
    assert (checks["GPU 1"].state, checks["GPU 1"].found.endswith(", rows could not be remapped")) == ("bad", True)


def test_driver_check_handles_failure_hang_and_no_gpu(
    driver: Any, look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    driver(gpus_sh=f'echo "{failed}"; exit 9')
    checks = look(torch=cuda(error="No CUDA GPUs are available"))
    assert level_and_text(checks["NVIDIA driver"]) == ("bad", f"nvidia-smi: {failed}")
    assert checks["torch"].state == "ok", "the driver's trouble is told once"
    monkeypatch.setattr(doctor.context, "SMI_SECONDS", 0.2)
    driver(gpus_sh=f"echo asked >>{tmp_path}/asked; exec sleep 600")
    (tmp_path / "asked").touch()
    assert look()["NVIDIA driver"].found == "no answer from nvidia-smi within 0.2 s"
    assert (tmp_path / "asked").read_text() in ("", "asked\n"), "once at most"
    monkeypatch.setattr(doctor.context, "SMI_SECONDS", PATIENCE_S)
    driver(gpus_sh="exit 0")
    assert level_and_text(look()["NVIDIA driver"]) == ("bad", "nvidia-smi lists no GPU")


def test_torch_that_does_not_fit_the_driver(driver: Any, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(gpus=TWO, plain=PLAIN.replace("13.0", "12.4"))
    checks = look()
    assert level_and_text(checks["torch"]) == ("bad", "2.13.0+cpu, built for the CPU, but the driver lists 2 GPUs")
    checks = look(torch=cuda(error="The NVIDIA driver on your system is too old"))
    assert checks["torch"].state == "bad"
    assert checks["torch"].found.endswith("too old; the driver supports up to CUDA 12.4")
    assert checks["torch"].remedy.startswith("update the NVIDIA driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    checks = look(torch=cuda(gpu("bbbb")))
    assert level_and_text(checks["torch"]) == ("warn", "2.11.0, CUDA 13.0; sees 1 of 2 GPUs (CUDA_VISIBLE_DEVICES=1)")
    assert "compute capability" not in checks["GPU 0"].found
    checks = look(torch=LookFailed("ImportError: libcudart.so.13"))
    assert level_and_text(checks["torch"]) == ("bad", "cannot be used: ImportError: libcudart.so.13")
    assert checks["kernels"].state == "absent"


def test_devices_without_the_program(look: Any) -> None:
    checks = look(torch=cuda(gpu("aaaa", "7.5")))
    assert level_and_text(checks["GPU 0"]) == ("ok", "H, compute capability 7.5 (fp16), 140 GiB")


def test_triton_and_fla(driver: Any, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0", "fla-core": "0.6.0"}
    monkeypatch.setattr(doctor.gpus, "version_of", versions.get)
    checks = look()
    assert level_and_text(checks["Triton and fla"]) == ("ok", "Triton 3.6.0, fla 0.6.0; no GPU on this machine")
    driver(gpus=TWO, plain=PLAIN)
    chosen = {
        "memory": ["triton", "Triton 3.6.0"],
        "softmax": ["cudnn", "cuDNN 91000"],
        "polar": ["torch", "the self-test"],
    }
    checks = look(torch=cuda(gpu("aaaa", right=False), gpu("bbbb", right=False)), kernels=chosen)
    assert level_and_text(checks["Triton and fla"]) == (
        "warn",
        "Triton 3.6.0, fla 0.6.0: fla's gradients are wrong on compute capability 9.0, so the kernels of atma-sweep are used",
    )
    assert level_and_text(checks["kernel memory"]) == ("ok", "triton (Triton 3.6.0)")
    assert level_and_text(checks["kernel softmax"]) == ("ok", "cudnn (cuDNN 91000)")
    assert level_and_text(checks["kernel polar"]) == ("warn", "torch (the self-test)")
    checks = look(torch=cuda(gpu("aaaa"), gpu("bbbb")), kernels=LookFailed("killed"))
    assert level_and_text(checks["Triton and fla"]) == (
        "ok",
        "Triton 3.6.0, fla 0.6.0; fla's gradients are correct on these GPUs",
    )
    assert level_and_text(checks["kernels"]) == ("bad", "the self-tests did not finish: killed")
    del versions["triton"]
    assert look(torch=cuda(gpu("aaaa"), gpu("bbbb")))["Triton and fla"].remedy.endswith(
        "pip install 'atma-sweep[train]'"
    )


def test_fla_verdict_is_that_of_the_kernels() -> None:
    from atma_sweep.kernels.gated_delta.op import fla_is_right

    verdicts = [fla_is_right((9, 0), version) for version in ("3.3.1", "3.4.0", "3.7.0", "3.7.1")]
    assert verdicts == [True, False, False, True], "what the docstring and the texts of doctor say"


HOLDER = """
import sys, time
from atma_sweep.sweep.host.locks import GpuLocks
from atma_sweep.sweep.host.hardware import Gpu
locks = GpuLocks()
locks.acquire([Gpu("0", sys.argv[1], "first")])
print(1, flush=True)
time.sleep(600)
"""


def test_warm_attempt_is_described_by_its_folder(tmp_path: Path) -> None:
    """Its command line does not name the attempt; its working folder does."""
    folder = tmp_path / "a1b2" / "3"
    folder.mkdir(parents=True)
    command = ["-c", "input()", "--runs", "/a/long/way/to/where/the/runs/of/a/sweep/lie", "--spare", "--parent", "12"]
    process = subprocess.Popen([sys.executable, *command], cwd=folder, stdin=subprocess.PIPE)
    try:
        until(lambda: "--spare" in psutil.Process(process.pid).cmdline(), "the process")
        assert gpus.describe_process(process.pid).endswith("-c input() --folder a1b2/3 --parent 12")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux: reads /proc/locks")
def test_gpu_check_names_the_sweep_that_locked_it(driver: Any, look: Any) -> None:
    driver(gpus=TWO, plain=PLAIN)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, "aaaa"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "1\n"
    torch_facts = cuda(gpu("aaaa"), gpu("bbbb"))
    checks = look(torch=torch_facts)
    assert checks["GPU 0"].state == "warn"
    assert f"in use by a sweep (pid {holder.pid} python" in checks["GPU 0"].found
    assert checks["GPU 1"].state == "ok"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert look(torch=torch_facts)["GPU 0"].state == "ok", "its file stays, its lock is gone"


def test_compiler_check_requires_compiler_and_headers(
    tmp_path: Path, driver: Any, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(gpus=TWO, plain=PLAIN)
    torch_facts = cuda(gpu("aaaa"), gpu("bbbb"))
    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(headers))
    monkeypatch.setenv("CC", sys.executable)
    assert look(torch=torch_facts)["C compiler"].state == "bad", "no Python.h"
    (headers / "Python.h").touch()
    assert level_and_text(look(torch=torch_facts)["C compiler"]) == (
        "ok",
        f"{sys.executable}; Triton compiles its launcher with it",
    )
    monkeypatch.setenv("CC", "no-such-compiler")
    check = look(torch=torch_facts)["C compiler"]
    assert level_and_text(check) == ("bad", "CC=no-such-compiler does not exist; Triton compiles its launcher with it")
    monkeypatch.delenv("CC")
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert level_and_text(look()["C compiler"]) == (
        "absent",
        "no gcc, clang or cc on the PATH; needed by Triton on a GPU only",
    )


def test_compile_cache_check_reports_size_or_absence(
    tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from atma_sweep.sweep.attempt.device import use_shared_compile_cache

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    (folder,) = doctor.compile_cache_folders()
    assert level_and_text(look()["compiled kernels"]) == (
        "absent",
        f"none yet in {folder}; the first attempt on a GPU creates it",
    )
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "x")  # so that the patch takes back what is set now
        monkeypatch.delenv(name)
    with torch.compiler.config.patch(cache_key_tag=""):
        use_shared_compile_cache(torch.device("cuda", 0))
    triton = Path(os.environ["TRITON_CACHE_DIR"])
    assert triton.is_relative_to(folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    triton.mkdir(parents=True)
    (triton / "a").write_bytes(bytes(3000))
    (triton / "b").write_bytes(bytes(2000))
    assert level_and_text(look()["compiled kernels"]) == ("ok", f"4.9 KiB in 2 files in {folder}")


# --- Ray ------------------------------------------------------------------------------------------------------------


def test_stale_cluster_file_is_a_warning(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tmp" / "ray" / "ray_current_cluster"
    if sys.platform == "darwin":
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    assert level_and_text(look()["Ray cluster file"]) == ("ok", f"no {file}")
    file.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(address)
        assert look()["Ray cluster file"].state == "ok"
    check = look()["Ray cluster file"]
    assert level_and_text(check) == ("warn", f"{file} names {address}, but no cluster answers there")
    assert check.remedy.endswith(f"rm {file}")
    file.write_text("")
    assert look()["Ray cluster file"].state == "warn"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "work"))
    assert look()["Ray cluster file"].state == "ok"


def test_addresses_and_tokens(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = look()
    assert (checks["RAY_ADDRESS"].state, checks["Ray token"].state) == ("ok", "absent")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert look()["Ray token"].remedy.startswith("ray get-auth-token --generate")
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    checks = look()
    assert level_and_text(checks["Ray token"]) == (
        "warn", f"{token}, mode 0644, RAY_AUTH_MODE token: other users of this machine can read it",
    )  # fmt: skip
    assert checks["Ray token"].remedy == f"chmod 600 {token}"
    assert not any("secret" in check.found for check in checks.values())
    token.chmod(0o600)
    assert look()["Ray token"].state == "ok"
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    checks = look()
    assert (checks["RAY_ADDRESS"].state, checks["Ray token"].remedy) == ("warn", "export RAY_AUTH_MODE=token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert level_and_text(look()["Ray token"]) == ("ok", "in RAY_AUTH_TOKEN, RAY_AUTH_MODE not set")


def test_incomplete_ray_installation_is_bad(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    check = look()["Ray"]
    assert check.state == "bad"
    assert check.found.endswith("missing or cannot be run: gcs/gcs_server, raylet/raylet")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert look()["Ray"].state == "warn"


def test_timeout_names_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    for question in ("torch", "kernels", "disk", "cluster"):
        with pytest.raises(doctor.context.LookFailed, match=f"the check of {question} gave no answer within 3 s"):
            doctor.context.answer(question, seconds=3)
