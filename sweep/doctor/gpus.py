"""Looks at the driver, the GPUs and the kernels."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ...results.console.text import counted
from ..host.hardware import supported_precisions
from ..host.locks import GpuLocks
from ..units import size
from .context import Check, Context, LookFailed, State, absent, bad, number_in, ok, smi, smi_table, version_of, warn

ECC_FIELDS = ("uuid", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total")
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")


def look_at_driver(context: Context) -> Check:
    found = context.driver
    if isinstance(found, LookFailed):
        return bad(str(found), "load or reinstall the driver; after an update of it a reboot does")
    if found is None:
        loaded = Path("/proc/driver/nvidia/version").exists()
        if loaded:
            return warn("loaded, but nvidia-smi is not on the PATH", "put nvidia-smi on the PATH")
        return absent("no nvidia-smi on the PATH; grids with resources.gpus: 0 run on the CPU")
    if not found:
        return bad("nvidia-smi lists no GPU", "see dmesg for what the driver says of it")
    most = _driver_cuda()
    takes = f", CUDA {most} at most" if most else ""
    return ok(f"{found[0]['driver_version']}{takes}, {counted(len(found), 'GPU')}")


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver can run, as nvidia-smi's heading says it."""
    try:
        found = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", smi())
    except LookFailed:
        return None
    return found[1] if found else None


def look_at_torch(context: Context) -> Check:
    try:
        said = context.torch()
    except LookFailed as error:
        return bad(f"cannot be used: {error}", "install it again: pip install -c constraints.txt -e .")
    there = context.gpus()
    built = f"{said['torch']}, " + (f"CUDA {said['cuda']}" if said["cuda"] else "built for the CPU")
    if not said["cuda"]:
        if there:
            what = f"{built}, but the driver has {counted(len(there), 'GPU')}"
            return bad(what, "install a build for CUDA, as https://pytorch.org/get-started says")
        return ok(built)
    if said["error"] and not there:
        return ok(f"{built}; no GPU to use it on")
    if said["error"]:
        most = _driver_cuda()
        old = f"; the driver runs CUDA {most} at most" if most and _older(most, said["cuda"]) else ""
        remedy = (
            "update the NVIDIA driver, or install torch for that CUDA"
            if old
            else "mend the driver, or set resources.gpus to 0"
        )
        return bad(f"{built}, cannot use a GPU: {said['error']}{old}", remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(said["gpus"]) < len(there):
        what = f"{built}; sees {len(said['gpus'])} of {counted(len(there), 'GPU')}"
        return warn(f"{what} (CUDA_VISIBLE_DEVICES={hidden})", "unset CUDA_VISIBLE_DEVICES to use all of them")
    return ok(f"{built}; sees {counted(len(said['gpus']), 'GPU')}")


def _older(one: str, other: str) -> bool:
    return [int(part) for part in one.split(".")] < [int(part) for part in other.split(".")]


def look_at_gpus(context: Context) -> Check | list[Check]:
    there = context.gpus()
    asked = (context.pool.submit(_faults, context.pool), context.pool.submit(_users)) if there else None
    usable = {_bare(gpu["uuid"]): gpu for gpu in context.usable()}
    if asked is None:
        # a container may have the devices without the program
        return [
            Check(f"GPU {index}", "ok", f"{gpu['name']}, {_capability(gpu)}, {size(gpu['total'])}")
            for index, gpu in enumerate(usable.values())
        ]
    faults, users = asked[0].result(), asked[1].result()
    return [_gpu(row, usable.get(_bare(row["uuid"])), faults, users) for row in there]


def _gpu(
    row: dict[str, str], torchs: dict[str, Any] | None, faults: dict[str, dict[str, str]], users: dict[str, list[str]]
) -> Check:
    uuid = _bare(row["uuid"])
    parts, remedies = [row["name"]], []
    state: State = "ok"
    if torchs is not None:
        parts.append(_capability(torchs))
        if not float(torchs["capability"]) >= 8:
            state = "warn"
            remedies.append("below 8.0 torch's own operations are taken, which are slower")
    total, free = (number_in(row[name]) for name in ("memory.total", "memory.free"))
    if total is not None and free is not None:
        parts.append(f"{size(free * 2**20)} of {size(total * 2**20)} free")
    text_, broken = _fault(faults.get(uuid, {}))
    parts += [text_] if text_ else []
    holder = held_by(uuid)
    if holder or users.get(uuid):
        state = "warn"
        parts += [f"held by a sweep ({holder})"] if holder else []
        parts += [f"in use by {', '.join(users[uuid])}"] if users.get(uuid) else []
        remedies.append("wait for it, or stop it; a GPU belongs to one sweep at a time")
    if broken:
        state = "bad"
        remedies.insert(
            0, f"take this GPU out of CUDA_VISIBLE_DEVICES; then reset it: nvidia-smi -r -i {row['index']}, or reboot"
        )
    return Check(f"GPU {row['index']}", state, ", ".join(parts), "; ".join(remedies))


def _capability(torchs: dict[str, Any]) -> str:
    """With what it can take as `train.precision`."""
    major, _, minor = str(torchs["capability"]).partition(".")
    return f"compute capability {major}.{minor} ({', '.join(supported_precisions((int(major), int(minor))))})"


def _faults(pool: ThreadPoolExecutor) -> dict[str, dict[str, str]]:
    """By uuid: error counters, those that nvidia-smi knows. Remapped rows are a query of their own."""
    found: dict[str, dict[str, str]] = {}
    queries = (("gpu", ECC_FIELDS), ("remapped-rows", ROW_FIELDS))
    asked = [pool.submit(smi_table, f"--query-{query}={','.join(names)}", names) for query, names in queries]
    for (_, names), rows in zip(queries, asked, strict=True):
        with contextlib.suppress(LookFailed):
            for row in rows.result():
                found.setdefault(_bare(row[names[0]]), {}).update(row)
    return found


def _fault(row: dict[str, str]) -> tuple[str, bool]:
    """(what the error counters say, whether the GPU is to be left alone)."""
    corrected, uncorrected = (number_in(row.get(name, "")) for name in ECC_FIELDS[1:])
    said, broken = [], bool(uncorrected)
    if corrected or uncorrected:
        said.append(f"{uncorrected} uncorrected and {corrected} corrected ECC errors since the driver was loaded")
    elif ECC_FIELDS[1] in row:
        said.append("no ECC" if corrected is None else "no ECC errors")
    for name, words in zip(ROW_FIELDS[1:], ("rows wait to be remapped", "rows could not be remapped"), strict=True):
        # a count in some drivers, a word in others
        if row.get(name, "").lower() not in ("", "0", "no") and not row[name].startswith("["):
            said.append(words)
            broken = True
    return ", ".join(said), broken


def _users() -> dict[str, list[str]]:
    """By uuid: the processes that hold its memory."""
    names = ("gpu_uuid", "pid", "used_memory")
    try:
        rows = smi_table("--query-compute-apps=" + ",".join(names), names)
    except LookFailed:
        return {}
    found: dict[str, list[str]] = {}
    for row in rows:
        pid, held = number_in(row["pid"]), number_in(row["used_memory"])
        who = process_name(pid) if pid is not None else "an unknown process"
        amount = f", {size(held * 2**20)}" if held is not None else ""
        found.setdefault(_bare(row["gpu_uuid"]), []).append(who + amount)
    return found


def process_name(pid: int) -> str:
    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        words = process.cmdline()
        if "--spare" in words:  # an attempt that was told later which it is, and stands in its folder
            words[words.index("--spare")] = "--folder " + "/".join(Path(process.cwd()).parts[-2:])
        if "--runs" in words:  # what follows says more
            del words[words.index("--runs") : words.index("--runs") + 2]
    said = " ".join(" ".join(Path(word).name if word.startswith("/") else word for word in words).split())
    return f"pid {pid} {said[:60]}".rstrip()


def held_by(uuid: str) -> str | None:
    """The process that holds the host lock of that GPU for a sweep; None when nobody does. Takes no lock itself."""
    pid = GpuLocks().holder_pid(uuid)
    return process_name(pid) if pid is not None else None


def _bare(uuid: str) -> str:
    """torch leaves the prefix out that nvidia-smi writes."""
    return uuid.removeprefix("GPU-")


# --- kernels --------------------------------------------------------------------------------------------------------


def look_at_triton(context: Context) -> Check:
    triton, fla = version_of("triton"), version_of("fla-core") or version_of("flash-linear-attention")
    found = f"Triton {triton or 'not installed'}, fla {fla or 'not installed'}"
    gpus = context.usable()
    if not gpus:
        if triton is None or fla is None:
            return absent(f"{found}; only a GPU needs them")
        return ok(f"{found}; no GPU to use them on")
    if triton is None or fla is None:
        gone = "triton" if triton is None else "flash-linear-attention"
        return warn(found, f"without it slower operations are taken: pip install {gone}")
    wrong = sorted({gpu["capability"] for gpu in gpus if not gpu["fla_is_right"]})
    if wrong:
        what = (
            f"{found}: fla's gradients are wrong on compute capability {', '.join(wrong)}, so our own kernels are taken"
        )
        return warn(what, "no number suffers; Triton 3.7.1 or newer makes fla right")
    return ok(f"{found}; fla's gradients are right here")


def look_at_kernels(context: Context) -> Check | list[Check]:
    if not context.usable():
        return absent("no GPU: torch's own operations on the CPU")
    try:
        chosen = context.kernels()
    except LookFailed as error:
        return bad(f"the self-tests gave no answer: {error}", "train.kernels: torch does without them")
    return [
        Check(f"kernel {op}", "ok", f"{backend} ({why})")
        if backend != "torch"
        else Check(f"kernel {op}", "warn", f"{backend} ({why})", "right, but slower; the reason stands before")
        for op, (backend, why) in chosen.items()
    ]
