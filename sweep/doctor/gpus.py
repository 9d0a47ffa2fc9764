"""Checks of the NVIDIA driver, the GPUs, torch and the kernels."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.errors import install_hint
from ..host.hardware import supported_precisions
from ..host.locks import GpuLocks
from .context import (
    Check,
    Context,
    LookFailed,
    State,
    absent,
    bad,
    nvidia_smi,
    nvidia_smi_table,
    ok,
    parse_count,
    version_of,
    warn,
)

ECC_FIELDS = ("uuid", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total")
"""Fields of nvidia-smi's query for ECC errors."""
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
"""Fields of nvidia-smi's query for remapped memory rows."""


def check_driver(context: Context) -> Check:
    """Check that the NVIDIA driver answers and lists GPUs; report its version and newest CUDA.

    Bad if nvidia-smi fails or lists none, a warning if only nvidia-smi is missing, absent without a driver.
    """
    driver_gpus = context.driver_gpus
    if isinstance(driver_gpus, LookFailed):
        return bad(str(driver_gpus), "load or reinstall the driver; after an update of the driver, reboot")
    if driver_gpus is None:
        is_loaded = Path("/proc/driver/nvidia/version").exists()
        if is_loaded:
            return warn("loaded, but nvidia-smi is not on the PATH", "put nvidia-smi on the PATH")
        return absent("no nvidia-smi on the PATH; grids with resources.gpus: 0 run on the CPU")
    if not driver_gpus:
        return bad("nvidia-smi lists no GPU", "see the messages of the driver in dmesg")
    max_cuda = _driver_cuda()
    cuda_text = f", up to CUDA {max_cuda}" if max_cuda else ""
    return ok(f"{driver_gpus[0]['driver_version']}{cuda_text}, {counted(len(driver_gpus), 'GPU')}")


def _driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver can run, as "MAJOR.MINOR"; None if unknown.

    It is read from the heading of nvidia-smi.
    """
    try:
        match = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", nvidia_smi())
    except LookFailed:
        return None
    return match[1] if match else None


def check_torch(context: Context) -> Check:
    """Check that torch imports, has a CUDA build where there are GPUs, and sees all of them.

    Bad if it cannot be imported or cannot use a GPU that the driver lists; a warning if it sees only some GPUs. Ok
    without a GPU.
    """
    try:
        facts = context.torch_facts()
    except LookFailed as error:
        return bad(f"cannot be used: {error}", f"install it again: {install_hint('torch')}")
    driver_gpus = context.listed_gpus()
    build_text = f"{facts['torch']}, " + (f"CUDA {facts['cuda']}" if facts["cuda"] else "built for the CPU")
    if not facts["cuda"]:
        if driver_gpus:
            finding = f"{build_text}, but the driver lists {counted(len(driver_gpus), 'GPU')}"
            return bad(finding, "install a build for CUDA, as https://pytorch.org/get-started says")
        return ok(build_text)
    if facts["error"] and not driver_gpus:
        return ok(f"{build_text}; no GPU on this machine")
    if facts["error"]:
        max_cuda = _driver_cuda()
        driver_text = (
            f"; the driver supports up to CUDA {max_cuda}" if max_cuda and _is_older(max_cuda, facts["cuda"]) else ""
        )
        remedy = (
            "update the NVIDIA driver, or install torch for that CUDA"
            if driver_text
            else "repair the driver, or set resources.gpus to 0"
        )
        return bad(f"{build_text}, cannot use a GPU: {facts['error']}{driver_text}", remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(facts["gpus"]) < len(driver_gpus):
        finding = f"{build_text}; sees {len(facts['gpus'])} of {counted(len(driver_gpus), 'GPU')}"
        return warn(f"{finding} (CUDA_VISIBLE_DEVICES={hidden})", "unset CUDA_VISIBLE_DEVICES to use all of them")
    return ok(f"{build_text}; sees {counted(len(facts['gpus']), 'GPU')}")


def _is_older(version: str, reference: str) -> bool:
    return [int(part) for part in version.split(".")] < [int(part) for part in reference.split(".")]


def check_gpus(context: Context) -> Check | list[Check]:
    """Return a check per GPU that the driver lists: capability, memory, hardware errors and current users.

    Without nvidia-smi there is an ok check per GPU that torch can use, with its capability and memory; without any GPU
    the list is empty.
    """
    driver_gpus = context.listed_gpus()
    queries = (
        (context.pool.submit(_error_counters, context.pool), context.pool.submit(_gpu_users)) if driver_gpus else None
    )
    usable = {_strip_gpu_prefix(gpu["uuid"]): gpu for gpu in context.usable_gpus()}
    if queries is None:
        # a container may have the devices without nvidia-smi
        return [
            Check(f"GPU {index}", "ok", f"{gpu['name']}, {_capability_text(gpu)}, {format_bytes(gpu['total'])}")
            for index, gpu in enumerate(usable.values())
        ]
    faults, users = queries[0].result(), queries[1].result()
    return [_check_gpu(row, usable.get(_strip_gpu_prefix(row["uuid"])), faults, users) for row in driver_gpus]


def _check_gpu(
    row: dict[str, str],
    torch_facts: dict[str, Any] | None,
    faults: dict[str, dict[str, str]],
    users: dict[str, list[str]],
) -> Check:
    """Check one GPU that the driver lists.

    Args:
        row: Fields of nvidia-smi, as in `Context.driver_gpus`.
        torch_facts: Facts from torch about the GPU, as in `Context.usable_gpus`; None if torch does not see it.
        faults: nvidia-smi's error counters by uuid without the prefix GPU-.
        users: Descriptions of processes by uuid without the prefix.

    Returns:
        Check named "GPU INDEX". It is bad if `_describe_faults` says that the GPU must not be used. It is a warning if
        a sweep or a process uses the GPU, or if its compute capability is below 8.0.
    """
    uuid = _strip_gpu_prefix(row["uuid"])
    parts, remedies = [row["name"]], []
    state: State = "ok"
    if torch_facts is not None:
        parts.append(_capability_text(torch_facts))
        if not float(torch_facts["capability"]) >= 8:
            state = "warn"
            remedies.append("below 8.0 the slower operations of torch are used")
    total, free = (parse_count(row[name]) for name in ("memory.total", "memory.free"))
    if total is not None and free is not None:
        parts.append(f"{format_bytes(free * 2**20)} of {format_bytes(total * 2**20)} free")
    fault_text, is_broken = _describe_faults(faults.get(uuid, {}))
    parts += [fault_text] if fault_text else []
    holder = gpu_holder(uuid)
    if holder or users.get(uuid):
        state = "warn"
        parts += [f"in use by a sweep ({holder})"] if holder else []
        parts += [f"in use by {', '.join(users[uuid])}"] if users.get(uuid) else []
        remedies.append("wait for it, or stop it; a GPU serves one sweep at a time")
    if is_broken:
        state = "bad"
        remedies.insert(
            0, f"remove this GPU from CUDA_VISIBLE_DEVICES; then reset it: nvidia-smi -r -i {row['index']}, or reboot"
        )
    return Check(f"GPU {row['index']}", state, ", ".join(parts), "; ".join(remedies))


def _capability_text(torch_facts: dict[str, Any]) -> str:
    """Return the compute capability with the values of `train.precision` that it supports."""
    major, _, minor = str(torch_facts["capability"]).partition(".")
    return f"compute capability {major}.{minor} ({', '.join(supported_precisions((int(major), int(minor))))})"


def _error_counters(pool: ThreadPoolExecutor) -> dict[str, dict[str, str]]:
    """Return nvidia-smi's ECC and row-remapping counters, as texts by field name, by uuid without GPU-.

    A query that this driver does not support is left out. Runs both queries in `pool` and waits for them.
    """
    counters: dict[str, dict[str, str]] = {}
    queries = (("gpu", ECC_FIELDS), ("remapped-rows", ROW_FIELDS))
    tables = [pool.submit(nvidia_smi_table, f"--query-{query}={','.join(names)}", names) for query, names in queries]
    for (_, names), rows in zip(queries, tables, strict=True):
        with contextlib.suppress(LookFailed):
            for row in rows.result():
                counters.setdefault(_strip_gpu_prefix(row[names[0]]), {}).update(row)
    return counters


def _describe_faults(row: dict[str, str]) -> tuple[str, bool]:
    """Return (text about the error counters, True if the GPU must not be used).

    It must not with uncorrected ECC errors, or with memory rows that wait to be remapped or could not be. Corrected
    errors alone are harmless. The text is "" if no counter is known.

    Args:
        row: Counters of one GPU by the names in ECC_FIELDS and ROW_FIELDS; may be empty.
    """
    corrected, uncorrected = (parse_count(row.get(name, "")) for name in ECC_FIELDS[1:])
    parts, is_broken = [], bool(uncorrected)
    if corrected or uncorrected:
        parts.append(f"{uncorrected} uncorrected and {corrected} corrected ECC errors since the driver was loaded")
    elif ECC_FIELDS[1] in row:
        parts.append("no ECC" if corrected is None else "no ECC errors")
    for name, problem in zip(ROW_FIELDS[1:], ("rows wait to be remapped", "rows could not be remapped"), strict=True):
        # some drivers report a count, others a word
        if row.get(name, "").lower() not in ("", "0", "no") and not row[name].startswith("["):
            parts.append(problem)
            is_broken = True
    return ", ".join(parts), is_broken


def _gpu_users() -> dict[str, list[str]]:
    """Return descriptions of the processes that hold memory of a GPU, by uuid without the prefix GPU-.

    Each is "pid N COMMAND", followed by the memory used where known. Free GPUs are absent; empty if nvidia-smi fails.
    """
    names = ("gpu_uuid", "pid", "used_memory")
    try:
        rows = nvidia_smi_table("--query-compute-apps=" + ",".join(names), names)
    except LookFailed:
        return {}
    users: dict[str, list[str]] = {}
    for row in rows:
        pid, used_mib = parse_count(row["pid"]), parse_count(row["used_memory"])
        user = describe_process(pid) if pid is not None else "an unknown process"
        amount = f", {format_bytes(used_mib * 2**20)}" if used_mib is not None else ""
        users.setdefault(_strip_gpu_prefix(row["gpu_uuid"]), []).append(user + amount)
    return users


def describe_process(pid: int) -> str:
    """Return "pid N COMMAND" with 60 characters of the command line at most; for an attempt its folder is included.

    Absolute paths are shortened to their last part. Only "pid N" for a process that is gone or cannot be read.
    """
    arguments: list[str] = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        arguments = process.cmdline()
        if "--spare" in arguments:  # a warm process that became an attempt; its working folder is the attempt's
            arguments[arguments.index("--spare")] = "--folder " + "/".join(Path(process.cwd()).parts[-2:])
        if "--runs" in arguments:  # the folder is more informative
            del arguments[arguments.index("--runs") : arguments.index("--runs") + 2]
    command_line = " ".join(" ".join(Path(word).name if word.startswith("/") else word for word in arguments).split())
    return f"pid {pid} {command_line[:60]}".rstrip()


def gpu_holder(uuid: str) -> str | None:
    """Return a description of the process that holds the host-wide lock of that GPU; None if it is free.

    Acquires no lock.

    Args:
        uuid: Uuid of the GPU without the prefix GPU-.
    """
    pid = GpuLocks().holder_pid(uuid)
    return describe_process(pid) if pid is not None else None


def _strip_gpu_prefix(uuid: str) -> str:
    """Return a uuid without the prefix GPU-, which nvidia-smi writes and torch omits."""
    return uuid.removeprefix("GPU-")


# --- kernels --------------------------------------------------------------------------------------------------------


def check_triton(context: Context) -> Check:
    """Check that Triton and fla are installed where a GPU can use them, and that fla's gradients are right on it.

    A warning otherwise. Without a usable GPU it is ok with both installed, else absent.
    """
    triton, fla = version_of("triton"), version_of("fla-core") or version_of("flash-linear-attention")
    finding = f"Triton {triton or 'not installed'}, fla {fla or 'not installed'}"
    gpus = context.usable_gpus()
    if not gpus:
        if triton is None or fla is None:
            return absent(f"{finding}; needed on GPUs only")
        return ok(f"{finding}; no GPU on this machine")
    if triton is None or fla is None:
        missing = "triton" if triton is None else "fla"
        return warn(finding, f"slower operations are used without it; {install_hint(missing)}")
    wrong_capabilities = sorted({gpu["capability"] for gpu in gpus if not gpu["fla_is_right"]})
    if wrong_capabilities:
        problem = f"{finding}: fla's gradients are wrong on compute capability {', '.join(wrong_capabilities)}, so the kernels of atma-sweep are used"
        return warn(problem, "results are not affected; Triton 3.7.1 or newer corrects fla")
    return ok(f"{finding}; fla's gradients are correct on these GPUs")


def check_kernels(context: Context) -> Check | list[Check]:
    """Return a check "kernel OP" per op with the backend chosen on this GPU; the backend torch is a warning.

    A single bad check if the self-tests fail; absent without a usable GPU.
    """
    if not context.usable_gpus():
        return absent("no GPU: torch operations on the CPU")
    try:
        backends = context.kernel_backends()
    except LookFailed as error:
        return bad(f"the self-tests did not finish: {error}", "set train.kernels: torch to run without these kernels")
    return [
        Check(f"kernel {op}", "ok", f"{backend} ({reason})")
        if backend != "torch"
        else Check(f"kernel {op}", "warn", f"{backend} ({reason})", "correct, but slower; the reason is in parentheses")
        for op, (backend, reason) in backends.items()
    ]
