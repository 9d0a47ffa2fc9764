"""Device of an attempt: choice, determinism, caches of compiled code, and the network built on it.

Run as a program, it tries the block parts of the model sections on its standard input on the GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ...kernels.dispatch import cache_self_tests, sources, version
from ...model.backbone import Backbone, build
from ...model.bases import BlockPart
from ...model.config import ModelConfig
from ...model.registry import MIXERS
from ...model.resolve import mixer_settings
from ..config import CellConfig
from ..errors import PartRefused, SweepError
from ..host.hardware import no_gpu_error
from .compile_lock import CompileLock, graph_key
from .provenance import driver_version

PACKAGE = Path(__file__).parents[2]
CUSTOM_AUTOGRAD_FLAG = "autograd_cache_allow_custom_autograd_functions"
"""Setting of torch's compile cache: also cache graphs that contain custom autograd functions."""
CUBLAS_WORKSPACE = ":4096:8"
"""Setting of cuBLAS that makes its results deterministic."""


RECOMPUTED_EVERY = {"block": 1, "selective": 2}
"""Recomputed blocks by value of `train.recompute`: every block, or every second one."""


def choose_device(gpus: float, rank: int | None = None) -> torch.device:
    """Return the CPU for 0 GPUs, else the current CUDA device; a fraction limits torch to that part of its memory.

    Starts CUDA in this process.

    Args:
        gpus: GPUs of the attempt.
        rank: Rank of this process in an attempt of several; its device, of that index among the visible ones, becomes
            the current one. None keeps the current one.

    Raises:
        MachineError: CUDA was requested and cannot be used; it names the cause.
    """
    if gpus == 0:
        return torch.device("cpu")
    try:
        torch.cuda.init()
        if rank is not None:
            torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        raise no_gpu_error(str(error).splitlines()[0]) from error
    if gpus < 1:
        # so that a process that exceeds its part fails itself instead of its neighbour
        torch.cuda.set_per_process_memory_fraction(gpus)
    return torch.device("cuda", torch.cuda.current_device())


def build_network(config: CellConfig, device: torch.device, *, training: bool = False) -> Backbone:
    """Return the cell's initialised network on `device`, in the types of `train.activations` and `train.precision`.

    Weights follow from the cell's seed; the network is in training mode. The CPU computes in float32 for every
    precision. On a GPU without 8-bit products, fp8 is emulated in float32.

    Args:
        config: cell.
        device: device of the network.
        training: refuse the fp8 emulation, which would take many times as long to train.

    Raises:
        SweepError: fp8 training on such a GPU.
        PartRefused: the block part cannot run on the device.
        ModelConfigError: the network cannot be built.
    """
    train, cuda = config.train, device.type == "cuda"
    dtype: torch.dtype = getattr(torch, train.activations_on(cuda=cuda))
    model = build(config.model, seed=config.seed, device=device, dtype=dtype)
    for reason in (block.refusal(device) for block in model.blocks[: config.model.attn_every]):
        if reason is not None:
            raise PartRefused(reason)
    if training and train.recompute != "none":
        model.recompute_blocks(RECOMPUTED_EVERY[train.recompute])
    if train.precision == "fp8" and cuda:
        chosen = model.use_fp8()
        if training and chosen.backend == "torch":
            raise SweepError(f"train.precision: fp8 cannot be trained here: {chosen.reason}; set it to bf16")
    return model


def enable_determinism() -> None:
    """Restrict torch to deterministic operations for the rest of this process; call it before CUDA is used.

    Operations that have no deterministic form then raise. On the CPU all of ours are deterministic anyway. torch then
    also fills uninitialised memory with NaN, which costs a little. Sets the environment variable
    CUBLAS_WORKSPACE_CONFIG to ":4096:8".
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def use_shared_compile_cache(device: torch.device, *extra_hashes: str) -> None:
    """Share compiled code of torch.compile and Triton with later processes; call it before compiling.

    Code lies in the user's cache folder, by versions and GPU; folders set in the environment take precedence. A cached
    graph is reused only with the same sources of this package and the same `extra_hashes`. The compiler needs them,
    because it identifies our operations by name alone. Sets environment variables and options of torch's compiler for
    the whole process.

    Args:
        device: CUDA device.
        *extra_hashes: hashes of further sources, such as plugins.
    """
    folder = _cache_folder(device)
    compiler: Any = importlib.import_module("torch.compiler.config")
    cache: Any = importlib.import_module("torch._functorch.config")
    source_hashes = [sources(PACKAGE / name) for name in ("kernels", "model")]
    environment_tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    compiler.cache_key_tag = (
        environment_tag + hashlib.sha256(repr((source_hashes, extra_hashes)).encode()).hexdigest()[:16]
    )
    if hasattr(cache, CUSTOM_AUTOGRAD_FLAG):
        # otherwise graphs with a custom autograd function, as in each of our blocks, are compiled in every process
        setattr(cache, CUSTOM_AUTOGRAD_FLAG, True)
    if "torch._dynamo" in sys.modules:
        # importing torch's compiler sets its default folder if none is set; ours replaces it
        inductor: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == inductor.default_cache_dir():
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def compile_lock_for(config: CellConfig) -> CompileLock:
    """Return the lock, not acquired, that lets one process at a time compile this cell's network.

    It lies in the compile cache, so call `use_shared_compile_cache` first. Cells share it if their networks compile to
    the same code on this GPU and with these versions (`graph_key`).
    """
    compiler: Any = importlib.import_module("torch.compiler.config")
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "turns"
    return CompileLock(
        folder,
        graph_key(config, compiler.cache_key_tag, torch.__version__, version("triton"), torch.cuda.get_device_name()),
    )


def use_shared_self_tests(device: torch.device) -> None:
    """Remember in a folder which kernels passed their self-tests, so that later processes skip these.

    One folder per driver, next to the compile cache; it is used for the rest of this process. Does nothing without an
    NVIDIA driver. `device` is a CUDA device.
    """
    driver = driver_version()
    if driver is not None:
        cache_self_tests(_cache_folder(device) / f"passed-{driver}")


def _cache_folder(device: torch.device) -> Path:
    """Return the cache folder of this combination of torch, Triton and GPU, below XDG_CACHE_HOME or ~/.cache.

    It is not created.
    """
    name = f"torch-{torch.__version__}-{version('triton')}-{torch.cuda.get_device_name(device)}".replace(" ", "-")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atma-sweep" / "compiled" / name


def _print_refusals() -> None:
    """Read model sections from standard input, try their parts on the GPU, and print the distinct reasons as JSON."""
    device = choose_device(1)
    use_shared_compile_cache(device)
    use_shared_self_tests(device)
    reasons: dict[str, None] = {}
    for section in json.load(sys.stdin):
        model = ModelConfig.model_validate(section)
        part = MIXERS.load(model.attn_type)(model, mixer_settings(model))
        assert isinstance(part, BlockPart)
        reason = part.refusal(device)
        if reason is not None:
            reasons[reason] = None
    print(json.dumps(list(reasons)))


if __name__ == "__main__":
    _print_refusals()
