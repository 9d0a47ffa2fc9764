"""Tests of the choice of backends, and of the reason that a run records."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_operations
import pytest
import torch
from atma_sweep.kernels import dispatch
from atma_sweep.kernels.attention.forgetting import op as forgetting
from atma_sweep.kernels.attention.polar import op as polar
from atma_sweep.kernels.attention.softmax import op as softmax
from atma_sweep.kernels.attention.wall import op as wall
from atma_sweep.kernels.conv import op as conv
from atma_sweep.kernels.cross_entropy import op as cross_entropy
from atma_sweep.kernels.dispatch import (
    BackendChoice,
    attention_choice,
    compile_time_constant,
    is_torch_only,
    use_torch_backend,
    why_no_triton,
)
from atma_sweep.kernels.fla_configs import first_configs
from atma_sweep.kernels.gated_delta import op as gated_delta
from atma_sweep.kernels.wall_step import op as wall_step

CUDA, CPU, BF16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
CHOOSERS: dict[str, Callable[..., BackendChoice]] = {
    "polar": lambda device, dtype, d=128: polar.choose_backend(device, dtype, d),
    "softmax": lambda device, dtype, d=128: softmax.choose_backend(device, dtype, d, windowed=False),
    "windowed": lambda device, dtype, d=128: softmax.choose_backend(device, dtype, d, windowed=True),
    "gated_delta": lambda device, dtype, d=128: gated_delta.choose_backend(device, dtype, d),
    "conv": lambda device, dtype, d=128: conv.choose_backend(device, dtype, 3),
    "wall_step": lambda device, dtype, d=128: wall_step.choose_backend(device, dtype, d),
    "cross_entropy": lambda device, dtype, d=128: cross_entropy.choose_backend(device, dtype),
    "cross_entropy without a cap": lambda device, dtype, d=128: cross_entropy.choose_backend(device, dtype, False),
}
SELF_TESTS = (polar, softmax, gated_delta, conv, wall_step, cross_entropy)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    dispatch.self_test_failure.cache_clear()
    yield
    use_torch_backend(False)
    dispatch.self_test_failure.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0, as far as questions go, whose Gluon kernels are not asked."""
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(dispatch, "why_not_gluon", lambda *args: "not asked")


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    # the answer is kept for the process: not that of a GPU that does not exist
    monkeypatch.setattr(dispatch, "_why_no_triton", inspect.unwrap(dispatch._why_no_triton))


def answers(relative_error: float) -> Callable[..., float]:
    """A self-test with that result."""
    return lambda *args, seed: relative_error


def no_test(*args: Any, seed: int) -> float:
    raise AssertionError("a self-test ran")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CHOOSERS)
def test_plain_torch_is_torch_everywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SELF_TESTS:
        monkeypatch.setattr(module, "_error", no_test)
    assert not is_torch_only()
    use_torch_backend()
    assert is_torch_only()
    for device, dtype in ((CUDA, BF16), (CPU, torch.float32)):
        assert CHOOSERS[name](device, dtype) == ("torch", "train.kernels is torch")
    use_torch_backend(False)
    assert CHOOSERS[name](CPU, BF16).reason != "train.kernels is torch"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CHOOSERS)
def test_reasons_against_triton(name: str) -> None:
    """Strings are devices too, as torch has it."""
    assert CHOOSERS[name]("cpu", BF16) == ("torch", "Triton needs CUDA, the device is cpu")
    assert str(CHOOSERS[name](CPU, torch.float32)) == "torch (Triton needs CUDA, the device is cpu)"
    choice = CHOOSERS[name](CUDA, torch.float32)
    assert choice.backend == "torch"
    assert "the kernels compute in 16 bits, the activations are torch.float32" in choice.reason


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["polar", "softmax", "windowed", "gated_delta"])
@pytest.mark.parametrize("d", [8, 20, 96, 512])
def test_head_sizes_that_the_kernels_do_not_have(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "why_no_fla", lambda device, dtype: "no fla")
    choice = CHOOSERS[name](CUDA, BF16, d)
    assert choice.backend == "torch"
    assert f"a power of two from 16 to 256, got {d}" in choice.reason


@pytest.mark.usefixtures("hopper")
def test_filters_that_the_kernels_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_error", answers(0.002))
    assert conv.choose_backend(CUDA, BF16, 4).backend == "triton"
    assert conv.choose_backend(CUDA, BF16, 5) == ("torch", "the kernels take at most 4 taps, got 5")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_old_gpus_and_machines_without_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 9), (10, 0)):
        pretend(monkeypatch, capability)
        assert why_no_triton(CUDA, dtype) is None
    pretend(monkeypatch, (7, 5))
    assert why_no_triton(CUDA, dtype) == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_no_triton(CUDA, dtype) == "Triton is not installed"


@pytest.mark.usefixtures("hopper")
def test_a_self_test_decides() -> None:
    """Not a number is not believed either, and draws are asked for once, for the tensors in question."""
    calls = []

    def error(*args: Any, seed: int) -> float:
        calls.append((args, seed))
        return 0.004

    assert attention_choice("op", CUDA, BF16, 64, error) == ("triton", f"Triton {dispatch.version('triton')}")
    assert calls == [((CUDA, BF16, 64, "triton"), seed) for seed in range(3)]
    assert attention_choice("op", CUDA, BF16, 64, answers(dispatch.SELF_TEST)).backend == "triton"
    for wrong, error_text in ((0.5, "0.5"), (float("nan"), "nan"), (float("inf"), "inf")):
        choice = attention_choice("op", CUDA, BF16, 64, answers(wrong))
        assert choice == ("torch", f"the self-test of op found a relative error of {error_text}")


@pytest.mark.usefixtures("hopper")
def test_a_self_test_that_cannot_run_says_why() -> None:
    """A kernel that does not compile here is not taken, and the last line of what was said is the reason."""
    for raised, error_text in (
        (RuntimeError("In file k.py\nout of resource: shared memory"), "RuntimeError: out of resource: shared memory"),
        (NotImplementedError(), "NotImplementedError: no message"),
    ):

        def error(*args: Any, seed: int, raised: Exception = raised) -> float:
            raise raised

        choice = attention_choice("op", CUDA, BF16, 64, error)
        assert choice == ("torch", f"the self-test of op stopped with {error_text}")
    with pytest.raises(KeyboardInterrupt):
        dispatch.self_test_failure("op", interrupted)


def interrupted(*, seed: int) -> float:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_kernels_that_fail_their_self_test_are_not_chosen(
    name: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "why_no_fla", lambda device, dtype: "no fla")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for module in SELF_TESTS:
        monkeypatch.setattr(module, "_error", answers(wrong))
    choice = CHOOSERS[name](CUDA, BF16)
    assert choice.backend == "torch"
    assert f"found a relative error of {wrong:.2g}" in choice.reason
    for module in SELF_TESTS:
        monkeypatch.setattr(module, "_error", answers(0.002))
    assert CHOOSERS[name](CUDA, BF16).backend == ("cudnn" if name == "softmax" else "triton")


@pytest.mark.usefixtures("hopper")
def test_full_softmax_attention_prefers_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is cuDNN where it passes and need not repeat, our kernels where it refuses or fails, with both reasons."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    results: dict[str, Any] = {"triton": 0.002}

    def error(device: torch.device, dtype: torch.dtype, d: int, backend: str, *, seed: int) -> float:
        if isinstance(results[backend], Exception):
            raise results[backend]
        return float(results[backend])

    def full(cudnn: float | Exception) -> BackendChoice:
        results["cudnn"] = cudnn
        dispatch.self_test_failure.cache_clear()
        return CHOOSERS["softmax"](CUDA, BF16)

    monkeypatch.setattr(softmax, "_error", error)
    assert full(0.002) == ("cudnn", "cuDNN 91900")
    assert CHOOSERS["windowed"](CUDA, BF16).backend == "triton"
    for wrong, error_text in (
        (0.4, "found a relative error of 0.4"),
        (RuntimeError("No kernel."), "stopped with RuntimeError: No kernel."),
    ):
        assert full(wrong).backend == "triton"
        assert full(wrong).reason.endswith(f"cuDNN attention {error_text}")
    torch.use_deterministic_algorithms(True)
    try:
        assert full(0.002).backend == "triton"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("op", "name", "more"), [
    (polar, "polar", ()), (forgetting, "forgetting", ()), (wall, "wall", (0.86,)),
])  # fmt: skip
def test_attention_on_hopper(op: Any, name: str, more: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon for windows that leave the diagonal's tile whole, if it passes the self-test, else Triton with both reasons."""
    results: dict[str, Any] = {"triton": 0.002, "gluon": 0.002}
    calls: list[Any] = []

    def why_not(*args: Any) -> str | None:
        calls.append(args)
        return "no room" if args[3] == 9 else None

    def available(*window: int) -> list[str]:
        """Return the backends that give right results, the chosen one first."""
        dispatch.self_test_failure.cache_clear()
        backends: list[str] = op.available(CUDA, BF16, 64, *window) if op is polar else []
        return backends

    monkeypatch.setattr(dispatch, "why_not_gluon", why_not)
    monkeypatch.setattr(op, "_error", lambda device, dtype, d, backend, *, seed: results[backend])
    ours = f"Triton {dispatch.version('triton')}"
    assert op.choose_backend("cuda", BF16, 64, *more) == ("gluon", ours)
    assert calls == [(CUDA, BF16, 64, None)]
    assert op.choose_backend(CUDA, BF16, 64, *more, 300).backend == "gluon"
    assert op.choose_backend(CUDA, BF16, 64, *more, 9) == ("triton", f"{ours}; Gluon not used: no room")
    assert [available(), available(9)] == (
        [["gluon", "triton", "torch"], ["triton", "torch"]] if op is polar else [[], []]
    )
    for wrong, error_text in ((math.nan, "nan"), (0.5, "0.5")):
        results["gluon"] = wrong
        dispatch.self_test_failure.cache_clear()
        choice = op.choose_backend(CUDA, BF16, 64, *more)
        assert choice.backend == "triton"
        assert choice.reason.endswith(f"the self-test of Gluon {name} attention found a relative error of {error_text}")
    results["triton"] = 1.0
    assert available() == (["torch"] if op is polar else [])
    assert op.choose_backend("cpu", BF16, 64, *more).backend == "torch"


def test_version_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its metadata, or from the module where none came along."""
    assert dispatch.version("torch") == importlib.metadata.version("torch")
    monkeypatch.setitem(sys.modules, "atma_made_up", SimpleNamespace(__version__="3.1.4"))
    assert dispatch.version("atma_made_up") == "3.1.4"
    with pytest.raises(ModuleNotFoundError):
        dispatch.version("atma_nowhere")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOOSERS)
def test_kernels_are_chosen_on_this_gpu(name: str) -> None:
    """From Ampere on nothing is left to torch, polar attention takes Gluon where it can, and every self-test passes."""
    if torch.cuda.get_device_capability() >= (8, 0) and not (
        name == "softmax" and torch.cuda.get_device_capability() < (9, 0)
    ):
        choice = CHOOSERS[name](CUDA, BF16)
        takes_gluon = name == "polar" and dispatch.why_not_gluon(CUDA, BF16, 128, None) is None
        assert choice.backend == "gluon" if takes_gluon else choice.backend != "torch", choice


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    assert vars(compile_time_constant(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
    assert compile_time_constant(ours) is ours


# --- what has passed before -----------------------------------------------------------------------------------------


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    dispatch.cache_self_tests(tmp_path / "passed")
    yield tmp_path / "passed"
    dispatch.cache_self_tests(None)
    dispatch.self_test_failure.cache_clear()


def test_a_self_test_that_passed_is_not_run_by_the_next_process(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process is one that has forgotten what it tried; other cases, tests and sources are other notes."""
    ran: list[tuple[Any, ...]] = []

    def error(*case: Any, seed: int) -> float:
        if seed == 0:
            ran.append(case)
        return 0.01

    def second_error(*case: Any, seed: int) -> float:
        return error("other", *case, seed=seed)

    def run_in_new_process(op: str, test: Callable[..., float], *case: Any) -> int:
        dispatch.self_test_failure.cache_clear()
        assert dispatch.self_test_failure(op, test, *case) is None
        return len(ran)

    first = ("op", error, CUDA, BF16, 64)
    assert (run_in_new_process(*first), run_in_new_process(*first)) == (1, 1)
    assert [note.read_text() for note in notes.iterdir()] == [f"op, {(CUDA, BF16, 64)}: relative error 0.01\n"]
    for count, changed in enumerate(
        [("op", error, CUDA, BF16, 128), ("op 2", *first[1:]), ("op", second_error, *first[2:])], 2
    ):
        assert (run_in_new_process(*changed), run_in_new_process(*changed)) == (count, count)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: -1)
    assert (run_in_new_process(*first), run_in_new_process(*first)) == (5, 5)
    dispatch.cache_self_tests(None)
    assert (run_in_new_process(*first), run_in_new_process(*first)) == (6, 7)


@pytest.mark.parametrize("wrong", [0.5, math.nan, RuntimeError("out of resource")])
def test_what_fails_is_tried_again_by_the_next_process(notes: Path, wrong: float | Exception) -> None:
    results = [wrong, 0.001]

    def error(*, seed: int) -> float:
        choice = results[0]
        if seed == dispatch.DRAWS - 1 or isinstance(choice, Exception):
            results.pop(0)
        if isinstance(choice, Exception):
            raise choice
        return choice

    assert dispatch.self_test_failure("op", error) is not None
    assert not notes.exists()
    dispatch.self_test_failure.cache_clear()
    assert dispatch.self_test_failure("op", error) is None
    assert len(list(notes.iterdir())) == 1


def test_worst_is_the_largest_error_and_nan_exceeds_all() -> None:
    wanted = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert dispatch.max_relative_error([torch.tensor([3.0, 4.5]), torch.tensor([1.02])], wanted) == pytest.approx(0.1)
    for bad in range(2):
        actual = [x.clone() for x in wanted]
        actual[bad][0] = math.nan
        assert math.isnan(dispatch.max_relative_error(actual, wanted))


def test_a_note_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dispatch.cache_self_tests(tmp_path / "file" / "passed")
    try:
        assert dispatch.self_test_failure("op", answers(0.01)) is None
    finally:
        dispatch.cache_self_tests(None)
        dispatch.self_test_failure.cache_clear()


def test_a_note_is_for_the_sources_of_all_kernels(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), real(path))[1])
    dispatch.sources.cache_clear()
    assert dispatch.self_test_failure("op", answers(0.01)) is None
    assert {path.name for path in read} >= {"dispatch.py", "op.py", "fla_configs.py", "chunk_loop.py"}


def test_the_hash_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    digests = []
    for text, name in (("a = 1", "a.py"), ("a = 1", "b.py"), ("a = 2", "b.py"), ("a = 2", "within/b.py")):
        (tmp_path / "within").mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / "other.txt").write_text(text)
        dispatch.sources.cache_clear()
        digests.append(dispatch.sources(tmp_path))
        (tmp_path / name).unlink()
    assert len(set(digests)) == 4


@pytest.mark.parametrize(("attention", "inputs"), [
    (softmax.softmax_attention, kernel_operations.softmax_inputs), (polar.polar_attention, kernel_operations.polar_inputs),
    (forgetting.forgetting_attention, kernel_operations.forgetting_inputs),
])  # fmt: skip
def test_unknown_backend_is_an_error(attention: Any, inputs: Any) -> None:
    """A misspelt name must not run torch silently."""
    tensors = inputs(8, 2, 1)
    assert attention(*tensors, backend="torch") is not None
    for name in ("tritn", "scaled_mm"):  # the second is a backend of other ops
        with pytest.raises(ValueError, match=rf"unknown backend '{name}'; backends: .*triton, torch"):
            attention(*tensors, backend=name)


def test_every_op_checks_the_name_of_a_backend() -> None:
    ops = 0
    for path in Path(dispatch.__file__).parent.rglob("op.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "backend" in {a.arg for a in function.args.kwonlyargs}:
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if "choose_backend" in calls:
                    assert "checked_backend" in calls, (path, function.name)
                    ops += 1
    assert ops >= 20


def test_a_trial_takes_the_first_configuration_that_runs() -> None:
    """Too much shared memory leads to the next one. Nothing is stored, and tuning is back afterwards."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.runtime.autotuner import Autotuner, OutOfResources

    tried = []

    def launch(x: float, size: int, **options: object) -> float:
        tried.append(size)
        if size < 8:
            raise OutOfResources(size, 4, "shared memory")
        return x * size

    def tuner(*sizes: int) -> Autotuner:
        new = object.__new__(Autotuner)
        new.__dict__ |= {
            "arg_names": ["x"], "configs": [triton.Config({"size": size}) for size in sizes], "cache": {},
            "fn": SimpleNamespace(run=launch), "early_config_prune": None, "perf_model": None,
        }  # fmt: skip
        return new

    before, chosen = Autotuner.run, tuner(4, 8, 16)
    with first_configs():
        assert chosen.run(3.0) == 24.0
        with pytest.raises(OutOfResources):
            tuner(2, 4).run(3.0)
    assert (tried, chosen.cache) == ([4, 8, 2, 4], {})
    assert Autotuner.run is before
