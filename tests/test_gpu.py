"""Checks that need a GPU: bf16 against float32 and float64, fla against the reference, a complete launch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.kernels.fp8 import op as fp8_linear
from atma_sweep.kernels.gated_delta.op import choose_backend, gated_delta, gated_delta_reference, why_no_fla
from atma_sweep.model.backbone import AuxiliaryTerms, build
from atma_sweep.model.config import ModelConfig
from graded import distance, double, in_type, run
from kernel_operations import delta_inputs
from patience import PATIENCE_S
from registries import PAIRS

pytestmark = pytest.mark.gpu
SMALL = {"d_model": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 264, "window_size": 16}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def run_in(folder: Path, *command: str) -> str:
    """Standard output of a command of ours that ends well."""
    full = [sys.executable, "-m", "atma_sweep.cli", *command]
    done = subprocess.run(full, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched(folder: Path, text: str, *more: str, executor: str = "local") -> str:
    """Standard output of the launch of a grid called gpu that extends tiny."""
    (folder / "gpu.yaml").write_text(f"name: gpu\nextends: tiny\n{text}")
    return run_in(folder, "launch", "gpu.yaml", "--executor", executor, *more)


@pytest.mark.parametrize("backend", ["torch", "fla", "triton"])
@pytest.mark.parametrize(("length", "size"), [(1, 64), (127, 128), (1000, 128), (130, 20)])
def test_gated_delta_in_bf16_is_near_float64(backend: str, length: int, size: int) -> None:
    why = why_no_fla(torch.device("cuda"), torch.bfloat16)
    if backend == "fla" and why is not None:
        assert "wrong gradients" in why or "not installed" in why
        pytest.skip(f"needs an NVIDIA GPU that takes fla: {why}")
    if backend == "triton" and size == 20:
        assert "power of two" in choose_backend("cuda", torch.bfloat16, size).reason
        return
    args = in_type(delta_inputs(length, d=size), torch.bfloat16, 3, "cuda")
    ours, exact = run(gated_delta, args, backend=backend), run(lambda *a: gated_delta_reference(*a)[0], double(args))
    for index, (actual, wanted) in enumerate(zip(ours, exact, strict=True)):
        assert distance(actual, wanted) < (2e-2 if index else 1e-2) or float(wanted.norm()) < 1e-6


@pytest.mark.parametrize(("attn_type", "memory"), PAIRS)
@pytest.mark.parametrize("window", [False, True])
def test_cuda_bf16_loss_and_gradients_are_near_the_cpu(attn_type: str, memory: str, window: bool) -> None:
    """Float64 on the CPU; a gradient may err twice as much as plain torch does there in bfloat16."""
    config = ModelConfig(**SMALL, head_dim=64, attn_type=attn_type, memory=memory, window=window)
    tokens = torch.randint(0, 264, (3, 101), generator=torch.Generator().manual_seed(0))
    grads, losses = [], []
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)):
        model = build(config, seed=0, device=torch.device(device), dtype=dtype)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.add_((0.05 * noise).to(parameter))
        auxiliary = AuxiliaryTerms("weak", 16, False, None, 0, 0, 0)
        batch = tokens.to(device)
        features = model.features(batch[:, :-1], auxiliary=auxiliary)
        loss = model.token_losses(features.hidden_BTD, batch[:, 1:]).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert losses[2] == pytest.approx(losses[0], rel=5e-3)
    assert grads[0].keys() == grads[2].keys()
    for name in ("blocks.0.mix.conv.weight", "blocks.2.mix.w_q.weight", "head.weight"):
        exact, plain, ours = (gradients[name] for gradients in grads)
        assert relative(ours, exact) <= 2 * max(relative(plain, exact), 0.01), name


def test_launch_on_a_gpu_records_speed_and_memory(tmp_path: Path) -> None:
    lines = launched(
        tmp_path,
        "axes: {attn_type: [polar], memory: [off, on]}\nresources: {gpus: 1, cpus: 2}\n"
        "set: {model.head_dim: 64, train.tokens: 40960, eval.lengths: [128, 1024]}\n", "--json",
    )  # fmt: skip
    assert json.loads(lines)["counts"] == {"done": 2}
    database = sqlite3.connect(tmp_path / "atma.db")
    query = "SELECT gpu_name, device, dtype, driver IS NOT NULL FROM provenance"
    assert database.execute(query).fetchall() == [(torch.cuda.get_device_name(), "cuda", "bfloat16", 1)] * 2
    ((low, high),) = database.execute(
        "SELECT min(peak_memory), max(peak_memory) FROM measurement WHERE probe = 'clean'"
    )
    assert 1e6 < low <= high < torch.cuda.get_device_properties(0).total_memory
    mfu = database.execute("SELECT value FROM results WHERE metric = 'mfu'").fetchall()
    assert len(mfu) == 2
    assert all(0 < value < 1 for (value,) in mfu)


def test_two_halves_of_a_gpu_run_at_once_and_say_so(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    launched(
        tmp_path,
        "axes: {attn_type: [nope, polar]}\nresources: {gpus: 0.5, cpus: 2, gpu_type: NVIDIA}\n"
        "set: {model.head_dim: 64, train.tokens: 40960, train.compile: off, eval.lengths: [128]}\n", executor="ray",
    )  # fmt: skip
    database = sqlite3.connect(tmp_path / "atma.db")
    rows = database.execute("SELECT gpu_uuid, co_tenants FROM provenance").fetchall()
    assert rows == [(str(torch.cuda.get_device_properties(0).uuid), 1)] * 2
    ((overlap,),) = database.execute("SELECT max(started_at) < min(finished_at) FROM attempt").fetchall()
    assert overlap == 1
    shown = run_in(tmp_path, "report", "--table", "6")
    assert "shared GPUs: 2 cells shared a GPU with up to 1 other attempt" in " ".join(shown.split())


def trained(folder: Path, *how: str, stop: int = 0, exactly: bool) -> Any:
    """Return the JSON that tests/testing/repeat.py prints in a process of its own, as every attempt runs in one."""
    script = Path(__file__).parent / "testing" / "repeat.py"
    command = [sys.executable, str(script), str(folder), str(stop), str(int(exactly)), "cuda", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("exactly", [True, False])
def test_resumed_runs_on_cuda_equal_uninterrupted_ones(
    tmp_path: Path, exactly: bool, record_property: Callable[[str, object], None]
) -> None:
    """Bit for bit with train.deterministic; without it the difference is printed, and small."""
    uninterrupted = trained(tmp_path / "whole", exactly=exactly)
    first = trained(tmp_path / "parts", stop=5, exactly=exactly)
    second = trained(tmp_path / "parts", exactly=exactly)
    for name, expected in uninterrupted.items():
        curve = [*first[name]["curve"], *second[name]["curve"]]
        assert [point[0] for point in curve] == list(range(1, 13))
        assert (len(first[name]["curve"]), len(second[name]["curve"])) == (5, 7)
        pairs = zip(curve, expected["curve"], strict=True)
        gap = max(abs(a - b) / abs(b) for got, want in pairs for a, b in zip(got[1:3], want[1:3], strict=True))
        print(
            f"{name}, deterministic {exactly}: largest relative difference of a loss {gap:.3g}; {expected['kernels']}"
        )
        record_property(f"{name}, deterministic {exactly}", gap)
        assert gap < 1e-2
        if exactly:
            assert curve == expected["curve"], name
            assert second[name]["weights"] == expected["weights"], name
            assert "fla" not in expected["kernels"].get("memory", "").split()[:1]


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize(
    "how", [(), ("marked",), ("compiled",), ("blocks",)], ids=["eager", "marked", "compiled", "blocks"]
)
def test_steps_as_cuda_graphs_are_steps_as_they_come(
    tmp_path: Path, how: tuple[str, ...], exactly: bool, record_property: Callable[[str, object], None]
) -> None:
    """Bit for bit with train.deterministic, else within what two runs differ by; resumed each way from the other."""
    ways = {"from graphs": (("graphs",), ()), "to graphs": ((), ("graphs",))}
    with ThreadPoolExecutor() as together:
        run = functools.partial(together.submit, trained, exactly=exactly)
        uninterrupted = [run(tmp_path / "plain", *how)]
        if {"compiled", "blocks"} & set(how):
            uninterrupted[0].result()  # what it compiles all others find
        uninterrupted.append(run(tmp_path / "graphs", *how, "graphs"))
        begun = {name: run(tmp_path / name, *how, *before, stop=5) for name, (before, _) in ways.items()}
        firsts = {name: part.result() for name, part in begun.items()}
        ended = {name: run(tmp_path / name, *how, *after) for name, (_, after) in ways.items()}
        plain, graphs = (part.result() for part in uninterrupted)
        seconds = {name: part.result() for name, part in ended.items()}
    runs = {"graphs": graphs}
    for name, second in seconds.items():
        runs[name] = {
            cell: {**resumed, "curve": [*firsts[name][cell]["curve"], *resumed["curve"]]}
            for cell, resumed in second.items()
        }
    for name, cells in runs.items():
        for cell, expected in plain.items():
            assert cells[cell]["told"] == [], "captured"
            pairs = zip(cells[cell]["curve"], expected["curve"], strict=True)
            gap = max(abs(a - b) / abs(b) for got, want in pairs for a, b in zip(got[1:3], want[1:3], strict=True))
            print(f"{cell}, {name}, {how}, deterministic {exactly}: largest relative difference of a loss {gap:.3g}")
            record_property(f"{cell}, {name}, {how}, deterministic {exactly}", gap)
            assert gap < 1e-2
            if exactly:
                assert cells[cell]["curve"] == expected["curve"], (cell, name)
                assert cells[cell]["weights"] == expected["weights"], (cell, name)


def test_uncapturable_step_warns_once_and_runs_eagerly(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", "asking", exactly=True)
    run = trained(tmp_path / "graphs", "asking", "graphs", exactly=True)
    for cell, expected in plain.items():
        assert len(run[cell]["told"]) == 1
        assert "captur" in run[cell]["told"][0]
        assert run[cell]["curve"] == expected["curve"]
        assert run[cell]["weights"] == expected["weights"]


IMPORTED = """
import importlib
from atma_sweep.sweep.attempt import spare
for name in spare.IMPORTS:
    importlib.import_module(name)
import torch
print(torch.cuda.is_initialized(), flush=True)
input()
"""


def devices(pid: int | str) -> list[str]:
    """Those of NVIDIA's GPUs that a process has open."""
    opened = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            opened.append(os.readlink(link))
    return [name for name in opened if re.fullmatch(r"/dev/nvidia\d+", name)]


def test_a_spare_holds_nothing_of_the_gpu() -> None:
    """Importing the module must not create a CUDA context, for which a process opens the devices."""
    torch.zeros(1, device="cuda")
    assert devices("self")
    command = [sys.executable, "-c", IMPORTED]
    spare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert spare.stdout is not None
        assert spare.stdout.readline() == "False\n"
        assert devices(spare.pid) == []
    finally:
        spare.kill()
        spare.communicate()


def test_two_deterministic_launches_agree_to_the_last_bit(tmp_path: Path) -> None:
    """Training and every probe, each in another process."""
    grid = (
        "axes: {attn_type: [polar]}\nresources: {gpus: 1, cpus: 2}\n"
        "include:\n  - {attn_type: polar, memory: on}\n  - {attn_type: nope, window: on, distractor: on}\n"
        "set: {model.head_dim: 64, train.tokens: 18432, train.deterministic: on, eval.validate_every: 1, "
        "eval.validation_tokens: 4096, eval.lengths: [128, 1024]}\n"
    )
    numbers = []
    for database in ("a.db", "b.db"):
        launched(tmp_path, grid, "--db", database)
        connection = sqlite3.connect(tmp_path / database)
        numbers.append([
            connection.execute("SELECT attempt_id, step, train_loss, val_loss, grad_norm FROM curve_point").fetchall(),
            connection.execute(
                "SELECT attempt_id, probe, metric, length, value FROM measurement WHERE probe <> 'throughput' "
                "AND metric <> 'peak_memory' ORDER BY 1, 2, 3, 4"
            ).fetchall(),
        ])  # fmt: skip
    assert len(numbers[0][0]) == 3 * 12
    assert numbers[0] == numbers[1]


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_fp8(), reason="needs an NVIDIA GPU of compute capability 8.9")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 48), (257, 1024, 8192), (1000, 4096, 1024), (96, 80, 640)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_products_are_those_of_the_same_numbers_in_float32(
    rows: int, inputs: int, outputs: int, compiled: bool
) -> None:
    assert fp8_linear.choose_backend("cuda").backend == "scaled_mm"
    draw = torch.Generator().manual_seed(rows)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, w, b, g = (torch.randn(shape, generator=draw).cuda() for shape in shapes)
    x, g = x.to(torch.bfloat16), g.to(torch.bfloat16)
    results = []
    for backend in ("scaled_mm", "torch"):
        args = [tensor.detach().clone().requires_grad_() for tensor in (x, w, b)]
        function = (
            torch.compile(fp8_linear.fp8_linear, fullgraph=True, dynamic=False) if compiled else fp8_linear.fp8_linear
        )
        y = function(*args, backend=backend)
        results.append([y, *torch.autograd.grad(y, args, g)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert relative(actual, expected) < 2e-2  # tensor cores keep about 14 bits of a sum
    assert relative(results[0][0], fp8_linear.fp8_linear_reference(x.cpu(), w.cpu(), b.cpu())) < 2e-2


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_launch_in_lower_precision_records_it_and_learns(tmp_path: Path, precision: str) -> None:
    if precision == "fp8" and not has_fp8():
        pytest.skip("needs an NVIDIA GPU of compute capability 8.9")
    launched(
        tmp_path,
        f"axes: {{train.precision: [bf16, {precision}]}}\nresources: {{gpus: 1, cpus: 2}}\n"
        "set: {attn_type: polar, memory: on, model.head_dim: 64, train.tokens: 40960, train.compile: off, eval.lengths: [128]}\n",
    )
    database = sqlite3.connect(tmp_path / "atma.db")
    dtypes = {dtype for (dtype,) in database.execute("SELECT dtype FROM provenance")}
    assert dtypes == {"bfloat16", "float16" if precision == "fp16" else "bfloat16, fp8 projections"}
    losses = [value for (value,) in database.execute("SELECT value FROM results WHERE metric = 'val_loss'")]
    assert len(losses) == 2
    assert abs(losses[0] - losses[1]) < 0.05
