"""Self-tests of kernels take right ones and refuse those with one small fault; the kernels run in the interpreter, on float16 numbers."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from atma_sweep.kernels import dispatch
from atma_sweep.kernels.attention import device
from atma_sweep.kernels.attention.softmax import op as softmax
from atma_sweep.kernels.custom_ops import load_kernels
from graded import interpreted

CASE = (torch.device("cpu"), torch.float16, 16, "triton")
FAULTS = {
    "the window is one key too long": ("n_S[None, :] > p_M[:, None] - window", "n_S[None, :] >= p_M[:, None] - window"),
    "no query sees its own key": ("n_S[None, :] <= tl.minimum", "n_S[None, :] < tl.minimum"),
    "a sum of weights is not scaled again": ("row_sum = row_sum * shrink + ", "row_sum = row_sum + "),
    "results are 4 % too large": ("out = acc / row_sum[:, None]", "out = 1.04 * acc / row_sum[:, None]"),
    "gradients of keys lack ln 2": ("(dk * (_LN2 * FACTOR))", "(dk * FACTOR)"),
    "gradients of queries lack a term": ("tl.broadcast_to(add[:, None], ", "tl.broadcast_to(0.0 * add[:, None], "),
}
"""Fault -> the source text of a kernel and what stands in its place."""


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    """Self-tests run anew, and the next test finds none tried."""
    dispatch.self_test_failure.cache_clear()
    yield
    dispatch.self_test_failure.cache_clear()


def loaded(name: str, path: Path, source: str) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def changed_kernels(folder: Path, right: str, wrong: str) -> ModuleType:
    """Return the module of the attention kernels with one text of its source, or of what it shares with others, changed."""
    kernels = load_kernels(softmax.__package__)
    sources = [Path(str(module.__file__)).read_text() for module in (device, kernels)]
    assert any(right in source for source in sources)
    shared, own = (source.replace(right, wrong) for source in sources)
    loaded(f"{device.__package__}.changed_device", folder / "changed_device.py", shared)
    return loaded(
        f"{kernels.__package__}.changed", folder / "changed.py", own.replace("from ..device", "from ..changed_device")
    )


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_self_test_passes_right_kernels() -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[train]', on Linux x86-64")
    assert dispatch.self_test_failure("softmax", softmax._error, *CASE) is None


@pytest.mark.thorough
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_self_test_refuses_a_small_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[train]', on Linux x86-64")
    module = changed_kernels(tmp_path, *FAULTS[fault])
    monkeypatch.setattr(softmax, "load_kernels", lambda *_: module)
    why = dispatch.self_test_failure("softmax", softmax._error, *CASE)
    assert why is not None
    assert why.startswith("the self-test of softmax found a relative error of 0.")


@pytest.mark.parametrize(
    ("errors", "passes"),
    [
        ([0.002, 0.002, 0.002], True),
        ([0.01, 0.05, 0.02], True),  # one draw near a singular matrix
        ([0.05, 0.01, 0.05], False),
        ([0.002, 0.2, 0.002], False),  # beyond chance
        ([0.002, 0.002, math.nan], False),
        ([math.inf, 0.002, 0.002], False),
    ],
)
def test_three_draws_decide_by_their_median(errors: list[float], passes: bool) -> None:
    why = dispatch.self_test_failure("op", lambda *, seed: errors[seed])
    assert (why is None) == passes


def test_the_bound_is_that_of_bfloat16() -> None:
    """With u = 2^-8, sixteen independent roundings in a row give 4 u, and a condition of 2 gives 8 u."""
    assert dispatch.SELF_TEST == 8 * 2.0**-8
