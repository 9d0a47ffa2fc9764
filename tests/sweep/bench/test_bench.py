"""`atma-sweep bench`: selection of cells, tables, and errors without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.polar.op import polar_attention
from atma_sweep.kernels.key_gated_step.op import KeyGates
from atma_sweep.kernels.paged.page_tables import PAGE
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.inference.decode import PagedDecoder
from atma_sweep.model.mixers.biased import CoPE, CoPEConfig, Rel, RelConfig
from atma_sweep.model.mixers.tra import TRA, TRAConfig
from atma_sweep.model.mixers.wall import Wall, WallConfig
from atma_sweep.model.registry import MEMORIES, MIXERS
from atma_sweep.sweep.attempt.device import build_network
from atma_sweep.sweep.bench import decode, kernel_variants, kernels, report, single_token, train
from atma_sweep.sweep.bench.ceilings import Ceilings
from atma_sweep.sweep.bench.kernel_variants import polar_attention_eager
from atma_sweep.sweep.errors import GridError, PartRefused
from atma_sweep.sweep.grid.cell import cell_id
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.training.flops import training_flops
from patience import PATIENCE_S
from torch.nn.attention import SDPBackend

Command = Callable[..., tuple[int, str, str]]
LIMITS = Ceilings(flops=712.4e12, bytes_per_s=4.123e12)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU: CUDA_VISIBLE_DEVICES= hides it")


def cells_of(markdown: str, header: str) -> list[list[str]]:
    """Return the rows below a table's header by cell; every line must have the header's columns."""
    lines = markdown.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(header))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        assert line.endswith("|")
        table.append([cell.strip() for cell in line[1:-1].split("|")])
    assert {len(row) for row in table} == {len(table[0])}
    assert set("".join(table[1])) == {"-"}
    return table[2:]


# --- which cells --------------------------------------------------------------------------------------------------


def test_default_cells_are_in_the_full_grid() -> None:
    """The timed cells equal those that a launch trains."""
    selected = train.select_cells("full", [], [])
    assert [cell.slug for cell in selected] == [
        "nope-baseline-d0-m0-w0-s0", "rope-baseline-d0-m0-w0-s0", "polar-baseline-d0-m0-w0-s0",
        "polar-baseline-d0-m1-w0-s0", "polar-baseline-d1-m1-w0-s0",
    ]  # fmt: skip
    shipped = {cell.slug: cell.config for cell in load_grid("full").expand(lambda data: "random tokens")}
    assert all(cell.config == shipped[cell.slug] for cell in selected)
    assert train.setting_changes("full", selected, []) == {}


@pytest.mark.parametrize(("grid", "part", "slugs"), [
    ("rivals", "attn_type", {name: f"{name}-baseline-d0-m0-w0" for name in MIXERS}),
    ("memories", "memory", {name: f"polar-baseline-d0-m{'1' if name == 'gated_delta' else name}-w0" for name in MEMORIES}),
])  # fmt: skip
def test_bench_accepts_every_part_of_the_370m_network(grid: str, part: str, slugs: dict[str, str]) -> None:
    selected = train.select_cells(grid, [*slugs.values()], [])
    assert [getattr(cell.config.model, part) for cell in selected] == [*slugs]
    assert all(training_flops(cell.config.model, 2048) for cell in selected)
    assert {cell.config.train.compile for cell in selected} == {True}


@pytest.mark.parametrize("op", kernel_variants.MEMORY_OPS)
def test_memory_variant_equals_the_trained_memory(op: str) -> None:
    """The rates come from the logits of the memory's own projections; every backend of this machine must match it."""
    torch.manual_seed(0)
    model = ModelConfig(d_model=16, n_heads=4, n_kv_heads=2, head_dim=8, memory=op, memories={})
    built = MEMORIES.load(op)(model, MEMORIES.load(op).Config()).double()
    for weight in built.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(2, 150, 16, dtype=torch.float64)
    q, k, v = (torch.randn(2, 150, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    with torch.no_grad():
        expected, _ = built.write(built.read_rates(x), q, k, v, None)
        if op == "deltanet":
            logits = [built.w_beta(x)]
        elif op == "kda":
            logits = [built.w_gamma(built.w_down(x)).unflatten(-1, (4, 8)), built.w_beta(x)]
        else:
            logits = [rate(x) for rate in built.rates.values()]
        assert [tuple(logit.shape[2:]) for logit in logits] == kernel_variants.memory_rates(op, 4, 8)
        variants = kernel_variants.memory_variants(op, torch.device("cpu"), 8)
        assert set(variants) <= {"torch", "torch, compiled"}
        for call in variants.values():
            assert (call(q, k, v, *logits) - expected).abs().max() <= 1e-5  # the logits are read as float32


@pytest.mark.parametrize("tokens", [256, 700])
def test_paged_and_dense_decoding_steps_agree(tokens: int) -> None:
    """They must agree whatever the pages hold after a text's last token."""
    q, k, v = torch.randn(3, 4, 16), *(torch.randn(3 * -(-tokens // 256), 256, 2, 16) for _ in range(2))
    expected = single_token.paged(3, tokens, torch.device("cpu"))(q, k, v)
    output = single_token.dense(3, tokens, SDPBackend.MATH)(q, k, v)
    assert output.shape == (3, 4, 16)
    assert (output - expected).abs().max() < 1e-5
    per_head = [torch.zeros(4) for _ in range(4)]
    c, _ = single_token.paged(3, tokens, torch.device("cpu"), [*per_head, torch.zeros(4, 16)])(q, k, v)
    assert c.norm(dim=-1).allclose(torch.ones(3, 4), atol=1e-5)


@pytest.mark.parametrize("op", ["omega", "atlas"])
def test_memory_flops_equal_those_of_the_model(op: str) -> None:
    model = ModelConfig(d_model=8, n_heads=1, n_kv_heads=1, head_dim=32, memory=op)
    part, surround = MEMORIES.load(op), 2 * 8 * (len(kernel_variants.memory_rates(op, 1, 32)) + 2 * 32)
    settings = part.Config(orthogonal="none") if op == "atlas" else part.Config()
    assert kernel_variants.memory_flops(op, 32) == part.forward_flops(model, settings) - surround


@pytest.mark.thorough
@pytest.mark.parametrize("op", ["omega", "atlas"])
def test_memory_variant_compiles_without_graph_breaks(op: str) -> None:
    variants = kernel_variants.memory_variants(op, torch.device("cpu"), 16)
    assert set(variants) == {"torch", "torch, compiled"}
    args = [torch.randn(1, 70, heads, 16) for heads in (2, 1, 1)]
    args += [torch.randn(1, 70, *shape) for shape in kernel_variants.memory_rates(op, 2, 16)]
    compiled = torch.compile(variants["torch, compiled"], fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(compiled(*args), variants["torch"](*args))


def test_setting_changes_are_reported() -> None:
    """Changes are listed by cell with the grid's values; a setting without effect is no change."""
    slug = "rope-weak-d0-m1-w1"
    (own,) = train.select_cells("full", [slug], [])
    sets = ["train.micro_batch=16", f"train.clip={own.config.train.clip}", "eval.lengths=[64]"]
    selected = train.select_cells("full", [slug], sets)
    assert own.config.train.micro_batch == 4
    assert train.setting_changes("full", selected, sets) == {
        f"{slug}-s0": f"train.micro_batch 4 -> 16, eval.lengths {own.config.eval.lengths} -> [64]".replace(
            "(", "["
        ).replace(")", "]")
    }
    same = train.select_cells("full", [slug], ["train.micro_batch=4"])
    assert train.setting_changes("full", same, ["train.micro_batch=4"]) == {}


def test_select_cells_by_slug_with_or_without_seed() -> None:
    slugs = ["rope-weak-d0-m1-w1", "rope-weak-d0-m1-w1-s0", "polar-zipfian-d1-m0-w1"]
    selected = train.select_cells("full", slugs, ["train.micro_batch=8", "train.deterministic=on"])
    assert [cell.slug for cell in selected] == ["rope-weak-d0-m1-w1-s0"] * 2 + ["polar-zipfian-d1-m0-w1-s0"]
    assert {cell.config.train.micro_batch for cell in selected} == {8}
    assert all(cell.config.train.deterministic for cell in selected)


def test_select_cells_without_seed_uses_the_first(write: Callable[..., Path]) -> None:
    path = write("name: g\nextends: micro\naxes: {attn_type: [polar, rope]}\nseeds: [4, 2]\n")
    sets = ["train.micro_batch=4"]
    cells = load_grid(path).expand(lambda data: "random tokens")
    assert [cell.config.seed for cell in cells if cell.config.model.attn_type == "rope"] == [4, 2]
    slug = next(cell.slug for cell in cells if cell.config.model.attn_type == "rope").removesuffix("-s4")
    selected = train.select_cells(str(path), [slug, f"{slug}-s2"], sets)
    assert [(cell.config.seed, cell.config.train.micro_batch) for cell in selected] == [(4, 4), (2, 4)]


def test_select_cells_unknown_slug_names_the_nearest(command: Command) -> None:
    with pytest.raises(GridError):
        train.select_cells("full", ["polar-baseline-d0-m2-w0"], [])
    code, out, err = command("bench", "train", "polar-baseline-d0-m2-w0")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "polar-baseline-d0-m2-w0: no such cell" in err
    assert "polar-baseline-d0-m1-w0" in err.split("no such cell")[1]


def test_an_unknown_grid_or_setting(command: Command) -> None:
    assert command("bench", "train", "--grid", "ful")[0] == 2
    code, out, err = command("bench", "train", "--set", "train.micro_bath=16")
    assert (code, out) == (2, "")
    assert "micro_batch" in err


def test_bench_kernels_refuses_an_unknown_op(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = command("bench", "kernels", "polar", "treshold")
    assert (code, out) == (2, "")
    assert "no operation 'treshold'" in err
    assert err.strip().endswith("did you mean threshold?")
    # the names are those of the cases
    monkeypatch.setattr(kernel_variants, "gated_available", lambda *_, **__: {})
    for module in (kernels.polar, kernels.gated_delta):
        monkeypatch.setattr(module, "available", lambda *_: [])
    assert {case.op for case in kernels.cases([], torch.device("meta"))} == set(kernels.OPS)


# --- without a GPU ------------------------------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("arguments", [
    ("train",), ("train", "rope-baseline-d0-m0-w0", "--rounds", "1", "--json"), ("train", "--profile"),
    ("kernels",), ("kernels", "polar", "--json"),
])  # fmt: skip
def test_bench_without_a_gpu_exits_with_3(arguments: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    code, out, err = command("bench", *arguments, "--out", "numbers.json")
    assert (code, out) == (3, "")
    assert err.strip() == (
        "atma-sweep: no usable CUDA GPU: torch sees none; run benchmarks on a machine with an NVIDIA GPU"
    )
    assert not (tmp_path / "numbers.json").exists()


# --- tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "kind"), [
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64>", "matrix products"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matrix products"),
    ("_forward", "attention"), ("_dq", "attention"), ("_dkv", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
    ("chunk_gated_delta_rule_fwd_kernel_h", "memory"),
    ("triton_poi_fused__to_copy_add_mul_3", "compiled elementwise"), ("triton_red_fused_rms_7", "compiled elementwise"),
    ("Memcpy HtoD (Pinned -> Device)", "copies"), ("Memset (Device)", "copies"),
    ("void at::native::vectorized_elementwise_kernel<4>", "other"),
])  # fmt: skip
def test_kind_of_a_kernel(kernel: str, kind: str) -> None:
    assert train.kind_of(kernel) == kind


def make_row(**changes: object) -> train.TrainRow:
    values: dict[str, object] = {
        "cell": "polar-baseline-d0-m1-w0-s0", "tokens_per_s": 301_234.4, "low": 299_000.6, "high": 302_111.0,
        "first_step": 41.26, "peak_memory": 50 * 2**30 + 2**29, "optimizer": 0.0213, "mfu": 0.4567,
        "mfu_paper": None, "kernels": {"polar": "gluon (Triton 3.7.1)"}, "micro_batch": 4,
    }  # fmt: skip
    return train.TrainRow(**(values | changes))  # type: ignore[arg-type]


def test_train_table() -> None:
    shares = {"matrix products": 0.613, "attention": 0.2, "other": 0.004}
    changed = make_row(
        cell="nope", tokens_per_s=1234.0, profile=shares, micro_batch=16, changed="train.micro_batch 4 -> 16"
    )
    text = train.table(LIMITS, [make_row(), changed])
    assert text.startswith("Ceilings in this run: matrix product 712 TFLOP/s, copy 4.12 TB/s.\n\n|")
    first, two = cells_of(text, "| cell |")
    assert first == [
        "polar-baseline-d0-m1-w0-s0",
        "4",
        "301,234",
        "299,001 to 302,111",
        "45.7%",
        "50.5",
        "21",
        "41.3",
        "n/a",
    ]
    assert two[:3] == ["nope", "16", "1,234"]
    assert text.splitlines()[-5:-2] == [
        "Settings of the grid: polar-baseline-d0-m1-w0-s0", "", "Changed: train.micro_batch 4 -> 16 (nope)",
    ]  # fmt: skip
    # what is less than half a percent is left out; a cell without a profile has no line
    assert text.splitlines()[-1] == "nope: matrix products 61%, attention 20%"
    assert text.count("matrix products") == 1


def test_train_profile_shares_and_json() -> None:
    lines = [
        train.Kernel("nvjet_tst_128x256", "matrix products", 40, 6.0),
        train.Kernel("triton_red_fused_add_3", "compiled elementwise", 12, 3.0),
        train.Kernel("triton_poi_fused_mul_1", "compiled elementwise", 12, 1.0),
    ]
    assert [line.kind for line in lines] == [train.kind_of(line.name) for line in lines]
    shares = train.shares(lines)
    assert shares == pytest.approx({"matrix products": 0.6, "compiled elementwise": 0.4})
    assert list(shares) == ["matrix products", "compiled elementwise"]
    assert train.shares([]) == {}
    (row,) = json.loads(json.dumps(report.as_dict(LIMITS, [make_row(profile=shares, lines=lines)])))["rows"]
    assert row["lines"][1] == {
        "name": "triton_red_fused_add_3", "kind": "compiled elementwise", "launches": 12, "ms": 3.0,
    }  # fmt: skip


def test_train_table_states_the_graph_modes() -> None:
    graphs_text, queued_text = "CUDA graphs: train.graphs: on", "eager: train.graphs: off"
    text = train.table(
        LIMITS, [make_row(steps=graphs_text), make_row(cell="nope", steps=graphs_text), make_row(steps=queued_text)]
    )
    assert [row[8] for row in cells_of(text, "| cell |")] == ["CUDA graphs", "CUDA graphs", "eager"]
    assert f"Steps {graphs_text} (polar-baseline-d0-m1-w0-s0, nope)" in text.splitlines()
    assert f"Steps {queued_text} (polar-baseline-d0-m1-w0-s0)" in text.splitlines()


def test_with_graph_modes_repeats_each_cell() -> None:
    cells = train.select_cells("full", [], [])[:2]
    assert train.with_graph_modes(cells, []) == cells
    variants = train.with_graph_modes(cells, ["off", "on"])
    assert [(cell.slug, cell.config.train.graphs) for cell in variants] == [
        (cell.slug, way) for cell in cells for way in ("off", "on")
    ]
    assert {cell_id(cell.config) for cell in variants} == {cell_id(cell.config) for cell in cells}


def test_train_table_gives_a_reason_for_unknown_mfu() -> None:
    why = "mixer 'mine' does not define its FLOPs (forward_flops)"
    text = train.table(LIMITS, [make_row(), make_row(cell="mine", mfu=None, unknown=why)])
    assert [row[4] for row in cells_of(text, "| cell |")] == ["45.7%", "n/a"]
    assert f"\n\nn/a: {why}\n\n" in text


def test_gated_attention_cases_contain_usable_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates are those of the mixer, per query head or per KV head, and every variant must run."""
    monkeypatch.setattr(kernel_variants, "gated_available", lambda *_, **__: {"torch": None, "fla": "it is wrong"})
    monkeypatch.setattr(kernels.polar, "available", lambda *_: [])
    cases = list(kernels.cases(["wall_head", "wall_kv", "forgetting"], torch.device("meta")))
    assert [case.op for case in cases] == ["forgetting", "wall_head", "wall_kv"] * 2
    assert {case.size for case in cases} == {
        "B16 T2048, without fla: it is wrong",
        "B1 T16384, without fla: it is wrong",
    }
    for case in cases[:3]:
        assert list(case.variants) == [case.rival, "torch"]
        assert case.variants["torch"](*(x[:, :65] for x in case.inputs())).shape == (16, 65, 8, 128)
    assert [case.inputs()[3].shape[2:] for case in cases[:3]] == [(8,), (8, 128), (2, 128)]
    q, k, v, x = (torch.randn(1, 9, heads, 8) for heads in (2, 1, 1, 2))
    mixer = Wall(ModelConfig(d_model=16, n_heads=2, n_kv_heads=1, head_dim=8), WallConfig())
    with torch.no_grad():
        mixer.gate.weight.copy_(torch.eye(16))
        ours = kernel_variants.wall(q, k, v, x, backend="torch")
        assert (mixer(q, k, v, window=None, x_BTD=x.flatten(2)) - ours).abs().max() <= 1e-6


@pytest.mark.parametrize(("op", "tied"), [("forgetting", False), ("wall", False), ("wall", True)])
def test_gated_error_is_small_for_the_reference(op: str, tied: bool) -> None:
    error = kernel_variants.gated_error(getattr(kernel_variants, op), torch.device("cpu"), 16, tied, "torch")
    assert 1e-4 < error < 5e-3, "bf16 beside float32, results and gradients"


@pytest.mark.parametrize("window", [None, 5])
def test_eager_polar_attention_matches_blocked_kernel(window: int | None) -> None:
    """The reference goes through blocks of queries and has a hand-written backward pass; in float64."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, 33, 4, 8), (2, 33, 2, 8), (2, 33, 2, 8), (4,), (4,), (4,), (4,), (4, 8)]
    args = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    eager = polar_attention_eager(*args, window=window)
    blocks = polar_attention(*args, window=window, query_block=7, backend="torch")
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in eager]
    pairs = [*zip(eager, blocks, strict=True)]
    pairs += zip(torch.autograd.grad(eager, args, weights), torch.autograd.grad(blocks, args, weights), strict=True)
    # sums of 33 x 8 terms in float64, through a condition number below 1e3: 300 eps x 1e3 = 7e-11
    assert all(((x - y).abs().max() / y.abs().max()).item() < 1e-10 for x, y in pairs)


def test_polar_attention_has_an_eager_variant() -> None:
    """The paper compares its kernel with PyTorch's operations; meta tensors show which cases include which."""
    cases = list(kernels.cases(["polar"], torch.device("meta")))
    assert (cases[0].size, list(cases[0].variants)) == ("B16 T2048", ["torch", "eager"])
    assert kernel_variants.peak_bytes(16, 8, 2048) == 7 * 4 * 16 * 8 * 2048**2
    # never compiled, never recorded as a graph, which would keep its matrices
    assert all(set(case.eager) == {"torch", "eager"} for case in cases)


def test_foreign_ops_are_timed_again_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a child that finishes are used; missing cases are timed here, with the reason in their size."""
    row = kernels.KernelRow("wall_kv", "B16 T2048", "fla", 1.0, 2.0, 1.9, 2.1, 0.5, 0.5, 1.0, 7)
    commands: list[Sequence[str]] = []

    def child(module: Sequence[str], limit_s: float) -> tuple[list[list[dict[str, Any]]], str | None]:
        commands.append(module[1:])
        return ([[asdict(row)]], "no result after 240 s")

    def timed(case: kernels.Case, *_: Any) -> list[kernels.KernelRow]:
        return [replace(row, size=case.size, variant=name) for name in case.variants]

    monkeypatch.setattr(kernels, "ceilings", lambda device: LIMITS)
    monkeypatch.setattr(kernels, "rows_of_child", child)
    monkeypatch.setattr(kernels, "timed_case", timed)
    monkeypatch.setattr(kernel_variants, "self_test_failure", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    lines: list[str] = []
    _, rows = kernels.run(["wall_kv"], torch.device("meta"), rounds=3, tell=lines.append)
    assert commands == [["wall_kv", "meta", "3", str(LIMITS.flops), str(LIMITS.bytes_per_s)]]
    assert rows[0] == row
    sizes = {row.size for row in rows[1:]}
    assert all(size.startswith("B1 T16384,") and size.endswith("fla: no result after 240 s") for size in sizes)
    assert "fla" not in {row.variant for row in rows[1:]}
    assert lines == ["wall_kv: timed again without fla: no result after 240 s"]


@no_gpu
def test_threshold_attention_is_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call equals the mixer's; where its kernels cannot run, the table states the reason."""
    monkeypatch.setattr(kernels.polar, "available", lambda *_: [])
    cases = list(kernels.cases(["threshold"], torch.device("meta")))
    why = "Triton needs CUDA, the device is meta"
    assert [case.size for case in cases] == [f"{size}, without triton: {why}" for size in ("B16 T2048", "B1 T16384")]
    assert [list(case.variants) for case in cases] == [["softmax, cuDNN", "torch"]] * 2
    assert cases[0].variants["torch"](*(x[:, :65] for x in cases[0].inputs())).shape == (16, 65, 8, 128)
    # nothing is compiled there that no one would compile
    assert cases[0].compiled()["torch"] is cases[0].variants["torch"]
    right = kernels.threshold.BackendChoice("triton", "Triton 9")
    monkeypatch.setattr(kernels.threshold, "choose_backend", lambda *_: right)
    (small, _) = kernels.cases(["threshold"], torch.device("meta"))
    assert (small.size, small.rival) == ("B16 T2048", "softmax, cuDNN")
    assert list(small.variants) == ["softmax, cuDNN", "triton", "torch"]
    q, k, v, x = (torch.randn(1, 9, heads, 8) for heads in (2, 1, 1, 8))
    mixer = TRA(ModelConfig(d_model=64, n_heads=2, n_kv_heads=1, head_dim=8), TRAConfig())
    with torch.no_grad():
        logit = x.flatten(2) @ mixer.gate.weight.T + mixer.gate.offset
        ours = small.variants["torch"](q, k, v, logit)
        assert (mixer(q, k, v, window=None, x_BTD=x.flatten(2)) - ours).abs().max() <= 1e-6


@no_gpu
@pytest.mark.parametrize(("op", "learned"), [("contextual", "vectors"), ("relative", "table")])
def test_position_attention_is_compared_with_torch(op: str, learned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.polar, "available", lambda *_: [])
    right = kernels.BackendChoice("triton", "Triton 9")
    monkeypatch.setattr(getattr(kernels, op), "choose_backend", lambda *_: right)
    (small, long) = kernels.cases([op], torch.device("meta"))
    assert (small.size, long.size, small.rival) == ("B16 T2048", "B1 T16384", "softmax, cuDNN")
    assert list(small.variants) == ["softmax, cuDNN", "triton", "torch"]
    model, shapes = (
        ModelConfig(d_model=64, n_heads=2, n_kv_heads=1, head_dim=8),
        ((1, 9, 2, 8), (1, 9, 1, 8), (1, 9, 1, 8)),
    )
    q, k, v = (torch.randn(shape) for shape in shapes)
    mixer = CoPE(model, CoPEConfig(positions=5)) if op == "contextual" else Rel(model, RelConfig(reach=5))
    fourth = torch.randn(5, 8) if op == "contextual" else torch.randn(2, 6)
    assert [x.ndim for x in small.inputs()] == [4, 4, 4, 2]
    with torch.no_grad():
        getattr(mixer, learned).copy_(fourth / 8 if op == "contextual" else fourth.flatten())
        assert (mixer(q, k, v, window=None) - small.variants["torch"](q, k, v, fourth)).abs().max() <= 1e-6


def test_kernel_table() -> None:
    timed = kernels.KernelRow("polar", "B16 T2048", "gluon", 1.23456, 4.5, 4.41, 4.6, 0.512, 0.4989, 1.0123, 3 * 2**20)
    forward = kernels.KernelRow("polar", "B1 T65536", "triton", 20.0, None, None, None, 0.25, None, None, 0)
    text = kernels.table(LIMITS, [timed, forward])
    assert text.startswith("Ceilings in this run: matrix product 712 TFLOP/s, copy 4.12 TB/s.\n\n|")
    first, two = cells_of(text, "| op |")
    assert first == ["polar", "B16 T2048", "gluon", "1.235", "4.500", "4.410 to 4.600", "51%", "50%", "1.01", "3"]
    assert two == ["polar", "B1 T65536", "triton", "20.000", "", "", "25%", "", "", "0"]


def test_kernel_json_contains_every_number() -> None:
    row = make_row(profile={"attention": 0.2})
    payload = json.loads(json.dumps(report.as_dict(LIMITS, [row])))
    assert payload["ceilings"] == {"flops": 712.4e12, "bytes_per_s": 4.123e12}
    assert payload["rows"] == [row.__dict__]
    timed = kernels.KernelRow("conv", "B16", "triton", 1.0, 2.0, 1.9, 2.1, 0.5, 0.5, None, 7)
    assert json.loads(json.dumps(report.as_dict(LIMITS, [timed])))["rows"] == [timed.__dict__]


def test_report_heading_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table follows the heading; JSON is printed on request and written to a file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(report, "git_state", lambda: ("abc123", True))

    def run(device: torch.device, tell: Callable[[str], None]) -> tuple[Ceilings, list[train.TrainRow]]:
        tell("half-way")
        return LIMITS, [make_row()]

    for as_json in (False, True):
        report.run_and_report(train, run, tmp_path / "numbers.json", as_json)
        out, err = capsys.readouterr()
        written = json.loads((tmp_path / "numbers.json").read_text())
        assert err == "half-way\n"
        assert (written["gpu"], written["commit"], written["dirty"]) == ("NVIDIA H200", "abc123", True)
        assert written["rows"][0]["tokens_per_s"] == 301_234.4
        if as_json:
            assert json.loads(out)["rows"] == written["rows"]
        else:
            heading = out.splitlines()[0]
            assert "NVIDIA H200, torch " in heading
            assert heading.endswith("commit abc123 (uncommitted changes)")
            assert cells_of(out, "| cell |")[0][0] == "polar-baseline-d0-m1-w0-s0"


# --- on a GPU -----------------------------------------------------------------------------------------------------


def bench(folder: Path, *arguments: str) -> tuple[str, dict[str, object]]:
    """Run the command and return its output and the JSON that it wrote."""
    command = [sys.executable, "-m", "atma_sweep.cli", "bench", *arguments, "--out", "numbers.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "numbers.json").read_text())


@pytest.mark.gpu
def test_bench_train_on_a_gpu(tmp_path: Path, write: Callable[..., Path]) -> None:
    grid = write(
        "name: g\nextends: micro\naxes: {attn_type: [polar], memory: [on]}\n"
        "set: {model.d_model: 128, model.n_heads: 2, model.n_kv_heads: 1, model.head_dim: 64, "
        "model.vocab_size: 50304, train.seq_len: 256, train.batch_tokens: 8192, train.tokens: 819200}\n"
    )
    (cell,) = load_grid(grid).expand(lambda data: "random tokens")
    ways = ("--graphs", "off", "--graphs", "on")
    out, payload = bench(tmp_path, "train", cell.slug, "--grid", "g.yaml", "--rounds", "2", "--profile", *ways)
    assert [(row[0], row[8]) for row in cells_of(out, "| cell |")] == [
        (cell.slug, "eager"), (cell.slug, "CUDA graphs"),
    ]  # fmt: skip
    assert payload["gpu"] == torch.cuda.get_device_name()
    numbers = payload["rows"][1]  # type: ignore[index]
    assert 0 < numbers["low"] <= numbers["tokens_per_s"] <= numbers["high"]
    assert 0 < numbers["mfu"] < 1
    assert sum(numbers["profile"].values()) == pytest.approx(1)
    assert all(line["ms"] > 0 and line["launches"] >= 1 for line in numbers["lines"])
    assert numbers["peak_memory"] > 2 * 50304 * 128 * 4
    assert numbers["kernels"]["blocks"].startswith("inductor")


@pytest.mark.gpu
def test_bench_kernels_on_a_gpu(tmp_path: Path) -> None:
    out, payload = bench(tmp_path, "kernels", "canon", "--rounds", "2")
    rows = cells_of(out, "| op |")
    assert {row[0] for row in rows} == {"canon"}
    assert "triton" in {row[2] for row in rows}
    numbers = payload["rows"]
    assert isinstance(numbers, list)
    assert len(numbers) == len(rows)
    assert all(0 < row["forward"] < row["both"] for row in numbers)


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_decode_reports_the_bandwidth_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = train.select_cells("quick", ["polar-baseline-d0-m1-w0"], [])
    model = cell.config.model
    behind, step = [], PagedDecoder.step

    def seen(self: PagedDecoder, slots: Sequence[int], *args: Any, **options: Any) -> torch.Tensor:
        behind.append({self.allocator.length(slot) for slot in slots})
        return step(self, slots, *args, **options)

    monkeypatch.setattr(PagedDecoder, "step", seen)
    limits, rows = decode.run([cell], torch.device("cpu"), (1, 3), (5, 9), rounds=1, steps=2, tell=lambda line: None)
    assert [(row.texts, row.context) for row in rows] == [(1, 5), (3, 5), (1, 9), (3, 9)]
    # three ways, a warm one and a round of each, two steps: every time from the same tokens on
    assert behind == [{n + at} for n in (5, 9) for _ in range(2 * 3 * 2) for at in (0, 1)]
    layers = [model.is_global(layer) for layer in range(model.n_layers)]
    inner, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    # float32 here: keys and values read; a memory and three tails of Canon read and written; a tail of each convolution
    fixed = 2 * (inner * model.head_dim + (model.canon_taps - 1) * (inner + 2 * kv))
    conv = 2 * (model.conv_taps - 1) * model.d_model
    states = {n: 4 * sum(2 * kv * n + fixed if is_attention else conv for is_attention in layers) for n in (5, 9)}
    by_size = {(row.texts, row.context): row.step_bytes for row in rows}
    weights = by_size[1, 5] - states[5]
    assert by_size == {(b, n): weights + b * states[n] for b in (1, 3) for n in (5, 9)}
    for row in rows:
        assert row.tokens_per_s is not None
        assert row.low <= row.tokens_per_s <= row.high
        assert row.roof == row.texts * limits.bytes_per_s / row.step_bytes
        assert row.uncompiled is None, "the CPU compiles nothing here"
        assert row.eager is not None
        assert 0 < row.host_ms <= row.step_ms
    rows[0].uncompiled, rows[1].not_compiled = 1234.0, "too odd"
    unfit = decode.DecodeRow("polar-m1", 512, 65_536, None, unfit="out of GPU memory")
    table = cells_of(decode.table(LIMITS, [*rows, unfit]), "| cell | attention |")
    assert table[0][:4] == [cell.slug, "pages", "1", "5"]
    assert [row[7] for row in table[:2]] == ["1,234", "n/a"]
    assert table[-1][4] == "n/a (out of GPU memory)"
    assert f"Not compiled, {cell.slug}: too odd." in decode.table(LIMITS, rows)
    assert json.loads(json.dumps(report.as_dict(LIMITS, rows)))["rows"][1]["texts"] == 3


def test_wall_decode_variants_are_the_formula() -> None:
    """Constant gates fade a key by their distance times the rate; every kind of gates, and the sizes, have a case."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(4, PAGE, 2, 16), torch.randn(4, PAGE, 2, 16)
    tokens = 2 * PAGE
    inputs = single_token.wall_inputs(q, k, v, (2, 4), tokens)
    k, v = (pool.view(2, tokens, 2, 16).double().repeat_interleave(2, 2) for pool in (k, v))
    for case, heads in enumerate((2, 4)):
        rate = (-inputs[7 * case + 5][0] / tokens).repeat_interleave(4 // heads, 0)
        fade = torch.exp(-torch.arange(tokens - 1, -1, -1)[:, None, None] * rate)
        weights = (torch.einsum("bhx,bshx->bhs", q.double(), k * fade) / 4).softmax(-1)
        expected = torch.einsum("bhs,bshx->bhx", weights, v)
        gates = KeyGates(torch.zeros(heads, 16, 16), torch.logit(torch.exp(inputs[7 * case + 5][0] / tokens)), None)
        for step in (
            single_token.wall(2, tokens, torch.device("cpu"), case),
            single_token.wall_from_keys(2, tokens, torch.device("cpu"), gates),
        ):
            assert (step(*inputs) - expected).abs().max() < 1e-5
        eight_bits = single_token.wall(2, tokens, torch.device("cpu"), case, eight_bits=True)(*inputs)
        assert 1e-4 < (eight_bits - expected).norm() / expected.norm() < 1 / 16
    cases = list(kernels.cases(["wall_decode"], torch.device("meta")))
    assert len(cases) == 12
    assert cases[0].size == "8/2 heads, B1 T4096, without fla: fla needs CUDA, the device is meta"
    assert [len(case.variants) for case in cases] == [7] * 6 + [4] * 6


@pytest.mark.thorough
def test_decode_times_dense_attention_as_well() -> None:
    cells = train.select_cells("quick", ["nope-baseline-d0-m1-w0", "polar-baseline-d0-m1-w0"], [])
    backends = {"math": SDPBackend.MATH, "flash": SDPBackend.CUDNN_ATTENTION}
    _, rows = decode.run(cells, torch.device("cpu"), (2,), (300,), rounds=1, steps=2, dense=backends, tell=print)
    assert [(row.cell[:5], row.attention) for row in rows] == [
        ("nope-", "pages"), ("nope-", "math"), ("nope-", "flash"), ("polar", "pages")
    ]  # fmt: skip
    assert rows[1].tokens_per_s is not None
    assert rows[1].eager is None
    assert rows[1].step_bytes == rows[0].step_bytes
    assert rows[2].tokens_per_s is None, "no cuDNN on a CPU"
    assert rows[2].unfit
    assert "Attention without paging" in decode.table(LIMITS, rows)
    assert "Attention without paging" not in decode.table(LIMITS, rows[:1])


@pytest.mark.thorough
def test_decode_times_an_8_bit_cache_as_well() -> None:
    small = ["model.d_model=128", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=64", "model.n_layers=4"]
    cells = train.select_cells("rivals", ["wall-baseline-d0-m0-w0", "nope-baseline-d0-m0-w0"], small)
    _, rows = decode.run(cells, torch.device("cpu"), (2,), (9,), rounds=1, steps=2, fp8=True, tell=print)
    assert [(row.cell[:4], row.attention) for row in rows] == [
        (name, way) for name in ("wall", "nope") for way in ("pages", "pages, 8-bit cache")
    ]
    assert rows[1].eager is not None, "timed in all ways, as without"
    assert 0 < rows[1].step_bytes < rows[0].step_bytes
    assert rows[3].unfit is not None
    assert rows[3].unfit.startswith("mixer NoPE has no 8-bit cache")


def test_dense_network_gives_the_logits_of_a_step() -> None:
    """Inside `dense_network` a step reads the pages text by text; afterwards the network is unchanged."""
    (cell,) = train.select_cells("quick", ["nope-baseline-d0-m1-w0"], [])
    model = build_network(cell.config, torch.device("cpu")).eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # those of a network that has not learned give no logits
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    assert single_token.takes_dense(model)
    logits = []
    for is_dense in (False, True):
        paged = PagedDecoder(model, texts=3, tokens=600, full_context=True)
        draw = torch.Generator().manual_seed(3)
        slots = [paged.begin(torch.randint(0, 64, (299,), generator=draw))[0] for _ in range(3)]
        context = single_token.dense_network(300, SDPBackend.MATH) if is_dense else nullcontext()
        with context:
            logits.append(paged.step(slots, torch.tensor([5, 6, 7])))
    assert torch.allclose(*logits, atol=1e-5)
    with single_token.dense_network(200, SDPBackend.MATH):
        assert not torch.allclose(logits[0], paged.step(slots, torch.tensor([5, 6, 7])), atol=1e-3), "the swap is seen"
    polar = build_network(train.select_cells("quick", ["polar-baseline-d0-m1-w0"], [])[0].config, torch.device("cpu"))
    assert not single_token.takes_dense(polar)


def test_bench_parts_leaves_out_refused_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that the machine refuses costs its row and no other, and says why."""
    assert train.part_cell("path").config.model.attn_type == "path"
    assert train.part_cell("nope", ["model.n_layers=4"]).config.model.n_layers == 4
    with pytest.raises(GridError, match="attn_type"):
        train.part_cell("poler")
    limits, messages = object(), []
    monkeypatch.setattr(train, "ceilings", lambda device: limits)

    def run(cells: Any, device: Any, **options: Any) -> Any:
        if cells[0].slug == "path":
            raise PartRefused("path does not run here")
        assert options["limits"] is limits
        return limits, [cells[0].slug]

    monkeypatch.setattr(train, "run", run)
    done = train.run_parts(["path", "nope"], [], torch.device("cpu"), tell=messages.append)
    assert done == (limits, ["nope"])
    assert messages == ["path: left out: path does not run here"]
