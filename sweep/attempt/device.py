"""The device of an attempt, and what makes its numbers repeat."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ...kernels.dispatch import cache_self_tests, sources, version
from ...model.backbone import Backbone, build
from ..config import CellConfig
from ..errors import SweepError
from ..host.hardware import no_gpu
from .compile_lock import CompileLock, graph_key
from .provenance import driver_version

PACKAGE = Path(__file__).parents[2]
CUSTOM_AUTOGRAD_FLAG = "autograd_cache_allow_custom_autograd_functions"
WORKSPACE = ":4096:8"
"""What cuBLAS needs to give the same bits each time."""


def choose_device(gpus: float) -> torch.device:
    """The CPU for 0, else CUDA; with a part of a GPU, torch gets no more than that part of its memory.

    Raises MachineError with the cause when CUDA was asked for and cannot be used.
    """
    if gpus == 0:
        return torch.device("cpu")
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        raise no_gpu(str(error).splitlines()[0]) from error
    if gpus < 1:
        # one that takes more fails itself, rather than its neighbour
        torch.cuda.set_per_process_memory_fraction(gpus)
    return torch.device("cuda", torch.cuda.current_device())


def network(config: CellConfig, device: torch.device, *, training: bool = False) -> Backbone:
    """The cell's network with its first weights, in the types that `train.activations` and `precision` mean there.

    The CPU computes in float32 whatever the precision. A GPU without 8-bit products rounds to the same numbers and multiplies
    those in float32; with `training`, which would take many times as long, it raises SweepError instead.
    """
    train, cuda = config.train, device.type == "cuda"
    dtype: torch.dtype = getattr(torch, train.activations_on(cuda=cuda))
    model = build(config.model, seed=config.seed, device=device, dtype=dtype)
    if train.precision == "fp8" and cuda:
        chosen = model.use_fp8()
        if training and chosen.backend == "torch":
            raise SweepError(f"train.precision: fp8 cannot be trained here: {chosen.reason}; set it to bf16")
    return model


def enable_determinism() -> None:
    """Only operations that give the same bits each time, for the rest of this process. Call it before CUDA is used.

    On the CPU all of ours do so anyway. Memory that was not written is filled with NaN, which costs a little.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def use_shared_compile_cache(device: torch.device, *extra_hashes: str) -> None:
    """Keeps what torch.compile and Triton make, for every later process on such a machine with such software.

    In the user's cache folder, by versions and GPU; a folder set in the environment stays. Call it before compiling. What is made of a
    graph is found again only by the same sources of ours, and with the same `extra_hashes`, hashes of sources such as plugins: the compiler
    sees operations like ours by their names alone, and keeps what their backward was.
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
        # else every process differentiates anew what holds an autograd function, which is each of our blocks
        setattr(cache, CUSTOM_AUTOGRAD_FLAG, True)
    if "torch._dynamo" in sys.modules:
        # importing torch's compiler sets its own folder where none is set
        inductor: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == inductor.default_cache_dir():
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def compile_lock_for(config: CellConfig) -> CompileLock:
    """Whose turn it is to compile that cell's network, among the processes that share what is compiled; see `use_shared_compile_cache`."""
    compiler: Any = importlib.import_module("torch.compiler.config")
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "turns"
    return CompileLock(
        folder,
        graph_key(config, compiler.cache_key_tag, torch.__version__, version("triton"), torch.cuda.get_device_name()),
    )


def share_self_tests(device: torch.device) -> None:
    """Notes beside what is compiled, by the driver, which kernels have passed their self-tests: no later process repeats those."""
    driver = driver_version()
    if driver is not None:
        cache_self_tests(_cache_folder(device) / f"passed-{driver}")


def _cache_folder(device: torch.device) -> Path:
    name = f"torch-{torch.__version__}-{version('triton')}-{torch.cuda.get_device_name(device)}".replace(" ", "-")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atma-sweep" / "compiled" / name
