"""Which implementation of an op a machine takes. Decided before anything runs, and told to the record of a run.

Nothing here falls back after a failure: a choice has a reason, and the reason is a column of the attempt.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class BackendChoice(NamedTuple):
    """A backend and why it is the one."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


Function = TypeVar("Function", bound=Callable[..., Any])


def compile_time_constant(function: Function) -> Function:
    """torch.compiler.assume_constant_result without importing the compiler, a second that a CPU attempt has no use for."""
    # private: torch is pinned below 3 for it (pyproject.toml)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _DispatchState:
    torch_only = False
    self_test_folder: Path | None = None


def use_torch_backend(torch_only: bool = True) -> None:
    """For the rest of this process: torch's own operations everywhere (`train.kernels: torch`), or the best there is."""
    _DispatchState.torch_only = torch_only


def is_torch_only() -> bool:
    """Whether only torch's own operations may be used."""
    return _DispatchState.torch_only


def cache_self_tests(folder: Path | None) -> None:
    """For the rest of this process: self-tests that pass are noted in that folder, and those noted there are not run.

    The folder is for one type of GPU, one driver, and one version each of torch and Triton; a note is for the sources of all
    kernels as they are, and the versions of cuDNN and flash-linear-attention. What fails is tried again by the next process.
    """
    _DispatchState.self_test_folder = folder


@functools.cache
def sources(folder: Path) -> str:
    """A hash of the Python files in a folder."""
    digest = hashlib.sha256()
    # not rglob, which fails when compiled modules of another process go while it looks
    for path in sorted(Path(top, name) for top, _, names in os.walk(folder) for name in names if name.endswith(".py")):
        digest.update(repr(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _self_test_versions() -> tuple[object, ...]:
    """What a self-test is of: this package's sources, and others' kernels by their versions."""
    # whether operations have to repeat exactly, which fills unwritten memory, is part of how they are tested
    versions: list[object] = [torch.backends.cudnn.version(), torch.are_deterministic_algorithms_enabled()]
    for name in ("fla-core", "flash-linear-attention"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(name))
    return sources(Path(__file__).parent), *versions


def _pass_marker(*case: object) -> Path | None:
    if _DispatchState.self_test_folder is None:
        return None
    return (
        _DispatchState.self_test_folder / hashlib.sha256(repr((_self_test_versions(), case)).encode()).hexdigest()[:32]
    )


def why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our Triton kernels cannot take tensors of that type on that device; None when they can."""
    if _DispatchState.torch_only:
        return "asked for by train.kernels"
    if device.type != "cuda":
        return f"Triton needs CUDA, the device is {device.type}"
    if dtype not in SIXTEEN_BITS:
        return f"the kernels compute in 16 bits, the activations are {dtype}"
    return _why_no_triton(device)


@functools.cache
def _why_no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"


DRAWS = 3
"""Random inputs that a self-test is tried on. Their median decides, so that no single draw near a singular matrix does."""
ROUNDINGS, CONDITION = 16, 2.0
"""Most roundings in a row from an op's inputs to a gradient, and the factor by which the op enlarges a change of what it reads."""
SELF_TEST = CONDITION * math.sqrt(ROUNDINGS) * torch.finfo(torch.bfloat16).eps / 2
"""Largest relative error, in the norm, of an implementation in 16 bits that is believed: 0.031.

A kernel sums in float32 and rounds what stands between its products, each time by a relative error of at most u = eps / 2, which is
2^-8 in bfloat16. These errors are independent, so R of them in a row make u sqrt(R), which the op enlarges by its condition.
"""
OUTLIER = 4 * SELF_TEST
"""Largest error of a single draw: chance makes no larger one, and a fault that shows in one draw of three is a fault."""


def _deciding(errors: Sequence[float]) -> float:
    """Return the error that decides about a kernel: the median of the draws, unless one of them is no number or an outlier."""
    refused = [error for error in errors if not error <= OUTLIER]
    return refused[0] if refused else statistics.median(errors)


def attention_choice(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, error: Callable[..., float]
) -> BackendChoice:
    """ "triton" where it can run and passes its self-test, else "torch". `error` gives the self-test's relative error."""
    why = why_no_triton(device, dtype)
    if why is None and (head_dim not in (16, 32, 64, 128, 256)):
        why = f"the kernels need a head_dim that is a power of two from 16 to 256, got {head_dim}"
    return triton_or_torch(why or failure(op, error, device, dtype, head_dim, "triton"))


def why_not_gluon(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """Return why the attention kernels for Hopper cannot take such tensors; None when they can."""
    host = importlib.import_module(".attention.gluon.host", __package__)
    return host.why_not(device, dtype, head_dim, window)


def gluon_choice(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, error: Callable[..., float]
) -> BackendChoice:
    """As `attention_choice`, but "gluon" in place of "triton" where it can run and passes the same self-test."""
    ours = attention_choice(op, device, dtype, head_dim, error)
    if ours.backend != "triton":
        return ours
    why = why_not_gluon(device, dtype, head_dim, window)
    why = why or failure(f"Gluon {op}", error, device, dtype, head_dim, "gluon")
    return (
        BackendChoice("gluon", ours.reason)
        if why is None
        else BackendChoice("triton", f"{ours.reason}; not Gluon: {why}")
    )


def triton_or_torch(why: str | None) -> BackendChoice:
    """Our kernels, unless there is a reason why not."""
    return BackendChoice("triton", f"Triton {version('triton')}") if why is None else BackendChoice("torch", why)


def why_no_fla(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel of flash-linear-attention can be taken for such tensors; None when one may."""
    if device.type != "cuda":
        return f"fla needs CUDA, the device is {device.type}"
    if dtype not in SIXTEEN_BITS:
        return f"fla computes in 16 bits, the activations are {dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "fla tunes its tiles by the clock, so another process may round otherwise"
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return "flash-linear-attention is not installed"
    return None


@functools.cache
def failure(op: str, error: Callable[..., float], *case: Hashable) -> str | None:
    """What the self-test `error(*case, seed=)` of an op found wrong; None if nothing. Tried once in a process, also in vain.

    Wrong is too large a relative error, the median of `DRAWS` seeds, and whatever compiler and GPU raise. The draws have one
    shape, so kernels are compiled once. See `cache_self_tests`.
    """
    marker = _pass_marker(op, error.__module__, error.__qualname__, case)
    with contextlib.suppress(OSError):
        if marker is not None and marker.exists():
            return None
    try:
        errors = [error(*case, seed=seed) for seed in range(DRAWS)]
    except _launch_errors() as refused:
        message_lines = str(refused).strip().splitlines()
        return f"the self-test of {op} stopped with {type(refused).__name__}: {message_lines[-1] if message_lines else 'no message'}"
    relative_error = _deciding(errors)
    if not relative_error <= SELF_TEST:
        return f"the self-test of {op} found a relative error of {relative_error:.2g}"
    if marker is not None:
        with contextlib.suppress(OSError):  # it is then tried again
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(f"{op}, {case}: relative error {relative_error:.2g}\n")
    return None


def result_and_gradients(
    attention: Callable[..., Tensor], backend: str, dtype: torch.dtype, narrow: Sequence[Tensor], wide: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Result and gradients by `backend` in `dtype`, and by "torch" in float32, as `max_relative_error` compares them.

    `narrow` come in `dtype`, queries first, which also weigh the result; `wide` stay as they are.
    """
    results = []
    for name, kind in ((backend, dtype), ("torch", torch.float32)):
        args = [x.detach().to(kind).requires_grad_() for x in narrow] + [x.detach().requires_grad_() for x in wide]
        with torch.enable_grad():
            y = attention(*args, backend=name)
            results.append([y, *torch.autograd.grad((y.float() * narrow[0].float()).sum(), args)])
    return results[0], results[1]


def self_test(
    attention: Callable[..., Tensor], tokens: int, more: Callable[[int, torch.Generator], list[Tensor]], **options: Any
) -> Callable[..., float]:
    """Return the self-test of an attention of q, k, v and `more`, drawn in float32 for a head size: two heads on one.

    It gives the largest relative error of the result and of its gradients, against "torch" in float32.
    """

    def error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
        draw = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(1, tokens, heads, head_dim, generator=draw).to(device, dtype) for heads in (2, 1, 1)]
        wide = [x.to(device) for x in more(head_dim, draw)]
        return worst(*result_and_gradients(functools.partial(attention, **options), backend, dtype, tensors, wide))

    return error


def worst(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Largest error among pairs of tensors, in the norm, relative to the wanted one; NaN if one of them is."""
    pairs = [(a.detach().float(), b.detach()) for a, b in zip(actual, expected, strict=True)]
    # Python's max passes over what is not a number
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())


@functools.cache
def _launch_errors() -> tuple[type[Exception], ...]:
    """What a kernel raises that does not compile, start or fit: it is not for this machine."""
    error_types = (RuntimeError, ValueError, AssertionError)
    if importlib.util.find_spec("triton") is None:
        return error_types
    return (*error_types, importlib.import_module("triton.errors").TritonError)


@functools.cache
def version(package: str) -> str:
    """Version of an installed package; as the module says it where no metadata came along."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module(package).__version__)
