"""Provenance of results: code, packages, machine."""

from __future__ import annotations

import platform
import socket
from importlib import metadata
from pathlib import Path

import torch

from ...results.store.records import Provenance
from .job import Job

PACKAGES = (
    "atma-sweep torch triton fla-core flash-linear-attention numpy ray sqlalchemy pydantic safetensors lm_eval".split()
)


def package_versions() -> dict[str, str]:
    """Return package -> installed version, of the packages that can change a result; missing ones are left out.

    They are PACKAGES, in this order: this one, torch, triton, fla, numpy, ray, sqlalchemy, pydantic, safetensors,
    and lm_eval, which measures downstream tasks.
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, such as "550.54.15"; None without a driver (Linux only)."""
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    fields = path.read_text().split()
    return next((field for field in fields if field[:1].isdigit() and field.count(".") >= 1), None)


def collect_provenance(
    job: Job, *, device: torch.device, precision: str, kernels: dict[str, str], tokenizer: str, corpus: str,
    extra: dict[str, object],
) -> Provenance:  # fmt: skip
    """Return the provenance record of a running attempt: its config and seed, code, packages, machine and GPU.

    Nothing is written. Git commit comes from the job; the other facts are read from this process.

    Args:
        job: the attempt's job.
        device: device it runs on; GPU fields are None on the CPU.
        precision: number types in words.
        kernels: op -> implementation.
        tokenizer: name of the tokenizer.
        corpus: name of the corpus.
        extra: further facts, JSON-able.
    """
    config = job.config
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Provenance(
        config=config, seed=config["seed"], git_commit=job.commit, git_dirty=job.dirty, packages=package_versions(),
        python=platform.python_version(), platform=platform.platform(), host=socket.gethostname(), device=device.type,
        gpu_name=gpu, gpu_uuid=str(torch.cuda.get_device_properties(device).uuid) if gpu else None,
        gpu_count=max(1, int(config.get("resources", {}).get("gpus", 1))) if gpu else 0, driver=driver_version() if gpu else None, dtype=precision, kernels=kernels,
        tokenizer=tokenizer, corpus=corpus, corpus_fingerprint=config["data"]["fingerprint"],
        threads=torch.get_num_threads(), extra=extra,
    )  # fmt: skip
