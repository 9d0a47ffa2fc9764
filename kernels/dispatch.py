"""Choice of the backend of each op (Triton, Gluon, fla, torch), with the reason that a run records.

Backends are chosen before anything runs. Nothing here falls back after a failure: a choice has a reason, and the reason
is a column of the attempt.
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
    """Name of the chosen backend ("gluon", "triton", "fla", "cudnn", "scaled_mm" or "torch"), and the reason for it.

    The reason is a text for people: a version for the backend wanted most, else why it was refused. As a string the
    choice reads "backend (reason)".
    """

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def checked_backend(name: str | None, *backends: str) -> str | None:
    """Return the name of a backend that a caller demands, None for none.

    Args:
        name: Name that the caller gave, or None.
        backends: Backends of the op besides "torch", which every op has.

    Raises:
        ValueError: The op has no backend of this name.
    """
    if name is not None and name not in (*backends, "torch"):
        raise ValueError(f"unknown backend {name!r}; backends: {', '.join([*backends, 'torch'])}")
    return name


Function = TypeVar("Function", bound=Callable[..., Any])


def compile_time_constant(function: Function) -> Function:
    """Mark a function so that torch.compile runs it while tracing and takes its result as a constant.

    Returns the same function object with a private attribute set; outside of torch.compile it behaves as before. The
    effect is that of torch.compiler.assume_constant_result without importing the compiler, which takes a second that an
    attempt on a CPU does not need.
    """
    # private: torch is pinned below 3 for it (pyproject.toml)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _DispatchState:
    """Settings of this process: whether only torch may be used, and the folder of passed self-tests."""

    torch_only = False
    self_test_folder: Path | None = None


def use_torch_backend(torch_only: bool = True) -> None:
    """Set for the rest of this process whether every op uses torch's own operations (`train.kernels: torch`).

    The setting is read at every choice of a backend; a graph that torch.compile traced before keeps its choice.

    Args:
        torch_only: True rules out our own kernels in every later choice; False restores the default, the fastest
            backend that is available.
    """
    _DispatchState.torch_only = torch_only


def is_torch_only() -> bool:
    """Return True when only torch's own operations may be used."""
    return _DispatchState.torch_only


def cache_self_tests(folder: Path | None) -> None:
    """Cache passed self-tests in a folder for the rest of this process, and skip those that are cached there.

    An entry holds for the present sources of all kernels and the versions of cuDNN and flash-linear-attention. A
    self-test that failed is not cached: the next process runs it again.

    Args:
        folder: Folder for one type of GPU, one driver and one version each of torch and Triton; created when the first
            test passes. None switches the cache off.
    """
    _DispatchState.self_test_folder = folder


@functools.cache
def sources(folder: Path) -> str:
    """Return a SHA-256 hex digest of the relative paths and contents of all .py files in and below a folder.

    Cached per folder for the life of the process, so later changes of the files are not seen. A folder that does not
    exist counts as one without files.
    """
    digest = hashlib.sha256()
    # not rglob, which fails when another process deletes compiled modules meanwhile
    for path in sorted(Path(top, name) for top, _, names in os.walk(folder) for name in names if name.endswith(".py")):
        digest.update(repr(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _self_test_versions() -> tuple[object, ...]:
    """Return the facts that a cached self-test depends on, as a tuple.

    In order: digest of this package's sources (`sources`), version of cuDNN (None without it), True in torch's
    deterministic mode, then the versions of fla-core and flash-linear-attention, each left out where it is not
    installed.
    """
    # deterministic mode fills unwritten memory, so a self-test passed in one mode says nothing about the other
    versions: list[object] = [torch.backends.cudnn.version(), torch.are_deterministic_algorithms_enabled()]
    for name in ("fla-core", "flash-linear-attention"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(name))
    return sources(Path(__file__).parent), *versions


def _pass_marker(*case: object) -> Path | None:
    """Return the path of the cache entry of a self-test, whether or not it exists, or None without a cache folder.

    The file name is 32 hex digits of a hash of `_self_test_versions` and of the repr of `case`. Nothing is created.

    Args:
        *case: Facts that name the self-test and its arguments; each must have a repr that is the same in every process.
    """
    if _DispatchState.self_test_folder is None:
        return None
    return (
        _DispatchState.self_test_folder / hashlib.sha256(repr((_self_test_versions(), case)).encode()).hexdigest()[:32]
    )


def why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why our Triton kernels cannot run on such tensors, or None when they can.

    Checks, in order: the setting of `use_torch_backend`, the device, the dtype, an installed Triton, the compute
    capability. It runs no kernel and does not look at sizes.

    Args:
        device: Device of the tensors; only CUDA with compute capability 8.0 or higher has kernels.
        dtype: Dtype of the activations; only bfloat16 and float16 have kernels.
    """
    if _DispatchState.torch_only:
        return "train.kernels is torch"
    if device.type != "cuda":
        return f"Triton needs CUDA, the device is {device.type}"
    if dtype not in SIXTEEN_BITS:
        return f"the kernels compute in 16 bits, the activations are {dtype}"
    return _why_no_triton(device)


@functools.cache
def _why_no_triton(device: torch.device) -> str | None:
    """Return the reason why Triton does not run on a CUDA device, or None; cached per device.

    It must be installed, and the compute capability at least 8.0.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"


DRAWS = 3
"""Number of random inputs per self-test.

Their median error decides, so that a single draw near a singular matrix does not.
"""
ROUNDINGS, CONDITION = 16, 2.0
"""Largest number of successive roundings from an op's inputs to a gradient; amplification of a change of its inputs."""
SELF_TEST = CONDITION * math.sqrt(ROUNDINGS) * torch.finfo(torch.bfloat16).eps / 2
"""Largest accepted relative error, in the norm, of an implementation in 16 bits: 0.031.

A kernel sums in float32 and rounds what stands between its products, each time by a relative error of at most u = eps /
2, which is 2^-8 in bfloat16. These errors are independent, so R successive roundings give u sqrt(R), which the op
amplifies by its condition number.
"""
OUTLIER = 4 * SELF_TEST
"""Largest accepted relative error of a single draw.

Rounding makes no larger one, so a larger error in one draw of three is a fault.
"""


def _deciding(errors: Sequence[float]) -> float:
    """Return the relative error that decides about a kernel, from the errors of its random draws.

    It is the first error that is NaN or above `OUTLIER` (0.125), if there is one, else the median.
    """
    refused = [error for error in errors if not error <= OUTLIER]
    return refused[0] if refused else statistics.median(errors)


def attention_choice(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, error: Callable[..., float]
) -> BackendChoice:
    """Return the choice of "triton" where it can run and passes its self-test, else of "torch" with the reason.

    It can run on CUDA with compute capability 8.0 or higher, on bfloat16 or float16 (`why_no_triton`). The reason of
    "triton" is the version of Triton. The first call for a case compiles and runs the kernels, which takes seconds;
    results are cached (`self_test_failure`).

    Args:
        op: Name of the op; it appears in the reason and is part of the key of the cache.
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size; the kernels take 16, 32, 64, 128 and 256, any other size gives "torch".
        error: Self-test, called as `error(device, dtype, head_dim, "triton", seed=seed)`; returns a relative error.
    """
    why = why_no_triton(device, dtype)
    if why is None and (head_dim not in (16, 32, 64, 128, 256)):
        why = f"the kernels need a head_dim that is a power of two from 16 to 256, got {head_dim}"
    return triton_or_torch(why or self_test_failure(op, error, device, dtype, head_dim, "triton"))


def why_not_gluon(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
    """Return the reason why the Gluon attention kernels cannot run on such tensors, or None when they can.

    They need a Triton with Hopper's Gluon, compute capability 9.0, bfloat16 or float16, heads of 64 or 128, and no
    window below 128. Runs no self-test, and does not look at `use_torch_backend`.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        window: Attention window in keys, the query's own included; None for full attention.
    """
    host = importlib.import_module(".attention.gluon.host", __package__)
    return host.why_not(device, dtype, head_dim, window)


def gluon_choice(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, error: Callable[..., float]
) -> BackendChoice:
    """Return the choice of "gluon" where it can run and passes its self-test, else that of `attention_choice`.

    The latter is "triton" or "torch". Gluon needs compute capability 9.0, heads of 64 or 128, and no window below 128
    (`why_not_gluon`). Both backends have to pass: "gluon" is tried only where "triton" was chosen. Where Gluon is
    refused, the reason of the returned "triton" also says why. The reason of "gluon" is the version of Triton.

    Args:
        op: Name of the op; it appears in the reason and is part of the key of the cache.
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        window: Attention window in keys, the query's own included; None for full attention. Below 128 it rules Gluon
            out; the self-tests do not depend on it.
        error: Self-test, called as `error(device, dtype, head_dim, backend, seed=seed)`; returns a relative error.
    """
    ours = attention_choice(op, device, dtype, head_dim, error)
    if ours.backend != "triton":
        return ours
    why = why_not_gluon(device, dtype, head_dim, window)
    why = why or self_test_failure(f"Gluon {op}", error, device, dtype, head_dim, "gluon")
    return (
        BackendChoice("gluon", ours.reason)
        if why is None
        else BackendChoice("triton", f"{ours.reason}; Gluon not used: {why}")
    )


def triton_or_torch(why: str | None) -> BackendChoice:
    """Return the choice of "triton", or of "torch" for a reason `why` that rules Triton out."""
    return BackendChoice("triton", f"Triton {version('triton')}") if why is None else BackendChoice("torch", why)


def why_no_fla(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why no kernel of flash-linear-attention (fla) can run on such tensors, or None when one can.

    It needs CUDA, 16-bit activations, installed fla and Triton, and torch outside of its deterministic mode. The
    setting of `use_torch_backend` is not considered, and nothing is run.
    """
    if device.type != "cuda":
        return f"fla needs CUDA, the device is {device.type}"
    if dtype not in SIXTEEN_BITS:
        return f"fla computes in 16 bits, the activations are {dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "fla chooses its tile sizes by timing, so results may differ between processes"
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        return "flash-linear-attention is not installed"
    return None


@functools.cache
def self_test_failure(op: str, error: Callable[..., float], *case: Hashable) -> str | None:
    """Run the self-test of an op and return a text that says why it failed, or None when it passed.

    It runs with the seeds 0, 1 and 2. It passes when the median error is at most `SELF_TEST` (0.031) and no error is
    NaN or above `OUTLIER` (0.125). RuntimeError, ValueError, AssertionError and Triton's own errors count as a failure,
    whose text ends with the last line of the message; other exceptions pass through. All draws have one shape, so
    kernels are compiled once. Results are cached per process, failures too. Passes are also cached as files across
    processes (`cache_self_tests`): such a pass is returned without a run. An OSError of that cache is ignored.

    Args:
        op: Name of the op, for the text and the key of the cache.
        error: Self-test that returns a relative error, called as `error(*case, seed=seed)`.
        *case: Hashable arguments of `error`, such as device, dtype and head size.
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
        with contextlib.suppress(OSError):  # the next process then runs the test again
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(f"{op}, {case}: relative error {relative_error:.2g}\n")
    return None


def result_and_gradients(
    attention: Callable[..., Tensor], backend: str, dtype: torch.dtype, narrow: Sequence[Tensor], wide: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Run an attention by `backend` in `dtype` and by "torch" in float32; return both with their gradients.

    Args:
        attention: Function called as `attention(*narrow, *wide, backend=)` that returns one tensor of the shape of
            narrow[0].
        backend: Backend under test.
        dtype: Dtype under test, in which the tensors of `narrow` are passed to it; the run by "torch" gets them in
            float32.
        narrow: Activations, rounded to `dtype` already, queries first; the loss is the sum of the result times the
            queries.
        wide: Further float inputs, which keep their own dtype in both runs.

    Returns:
        (tested, expected): two lists of the result, then the gradients of `narrow` and `wide` in order.
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
    """Return the self-test of an attention, a function (device, dtype, head_dim, backend, *, seed) -> error.

    The test draws one row of q with two heads, and k and v with one head, standard normal. The error is the largest of
    `max_relative_error` over the result and the gradients of all inputs, against "torch" in float32.

    Args:
        attention: Function (q, k, v, *more, backend=, **options) of q, k and v [1, T, heads, X].
        tokens: Tokens T of the row.
        more: Function (head_dim, generator) that draws the further float32 inputs on the CPU, such as gates and biases.
        **options: Keyword arguments of every call of `attention`, such as `window`.
    """

    def error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
        """Return the largest relative error of `attention`'s result and gradients, against "torch" in float32.

        One row of `tokens` tokens with two query heads and one KV head, drawn from `seed`.
        """
        draw = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(1, tokens, heads, head_dim, generator=draw).to(device, dtype) for heads in (2, 1, 1)]
        wide = [x.to(device) for x in more(head_dim, draw)]
        return max_relative_error(
            *result_and_gradients(functools.partial(attention, **options), backend, dtype, tensors, wide)
        )

    return error


def max_relative_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative error ||actual - expected|| / ||expected|| among pairs of tensors.

    Norms are Euclidean over all elements of a tensor. The result is NaN when the error of any pair is NaN, as for two
    tensors of zeros.

    Args:
        actual: Tensors under test, of any dtype; converted to float32.
        expected: As many float32 tensors of the same shapes.

    Raises:
        ValueError: The numbers of tensors differ.
    """
    pairs = [(a.detach().float(), b.detach()) for a, b in zip(actual, expected, strict=True)]
    # Python's max may skip NaN
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())


@functools.cache
def _launch_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that a kernel raises that does not compile, launch or fit on this machine.

    These are RuntimeError (also out of GPU memory), ValueError, AssertionError and, where Triton is installed,
    TritonError; cached.
    """
    error_types = (RuntimeError, ValueError, AssertionError)
    if importlib.util.find_spec("triton") is None:
        return error_types
    return (*error_types, importlib.import_module("triton.errors").TritonError)


@functools.cache
def version(package: str) -> str:
    """Return the version of an installed package, or its `__version__` attribute where it has no package metadata.

    Cached per process. Without metadata the package is imported.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module(package).__version__)
