"""FLOPs, peaks and MFU against the published arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model import Memory, Mixer, register_memory, register_mixer, registry
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.memory.gated_delta import GatedDelta
from atma_sweep.model.mixers.polar import Polar
from atma_sweep.model.resolve import check_model_config, mixer_settings
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning.ordering import predicted_costs
from atma_sweep.sweep.planning.planner import Task
from atma_sweep.sweep.training.flops import (
    PEAK_BF16,
    estimated_flops,
    forward_flops,
    mfu,
    paper_flops,
    peak_flops,
    training_flops,
    unknown_reason,
)
from registries import PAIRS
from torch.utils.flop_counter import FlopCounterMode

POLAR, POLAR_MEMORY = 369_758_464, 378_220_864
SIZE = {"d_model": 16, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 64}
BIG = ModelConfig(attn_type="polar", memory="gated_delta")


def test_the_papers_mfu_from_its_logged_step_time() -> None:
    flops = paper_flops(ModelConfig(), POLAR, 2048)
    assert flops == 6 * POLAR + 12 * 16 * 1024 * 2048
    share = mfu(flops, 524_288 / 28.338, peak_flops("NVIDIA L4"))
    assert share == pytest.approx(0.401, abs=5e-4)


def test_forward_flops_of_the_published_model() -> None:
    assert forward_flops(BIG, 2048) == pytest.approx(673e6, rel=0.01)


def test_honest_training_flops_are_three_quarters_of_the_papers() -> None:
    assert training_flops(BIG, 2048) == pytest.approx(2020e6, rel=0.01)
    assert paper_flops(BIG, POLAR_MEMORY, 2048) == pytest.approx(2672e6, rel=0.001)
    assert training_flops(BIG, 2048) / paper_flops(BIG, POLAR_MEMORY, 2048) == pytest.approx(0.756, abs=0.006)


def test_forward_flops_by_hand() -> None:
    """Two blocks by an independent count of multiply-adds: a gated convolution, then a global layer."""
    config = ModelConfig(
        d_model=10,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=4,
        vocab_size=11,
        attn_every=2,
        attn_offset=1,
        mlp_ratio=3,
    )
    mlp = 10 * 60 + 30 * 10
    conv = 10 * 30 + 10 * 10 + 3 * 10
    projections = 10 * 16 + 10 * 4 + 10 * 4 + 8 * 10
    keys = (1 + 2 + 3 + 4 + 5) / 5
    scores_and_values = 2 * (2 * 4) * keys
    assert forward_flops(config, 5) == 2 * (2 * mlp + conv + projections + scores_and_values + 10 * 11)


def test_without_its_gate_a_query_projection_is_half_as_wide() -> None:
    gated = ModelConfig(**SIZE)
    # one of the four blocks is global
    saved = forward_flops(gated, 9) - forward_flops(gated.model_copy(update={"output_gate": False}), 9)  # type: ignore[operator]
    assert saved == 2 * 16 * 4 * 8
    for switch in ("qk_norm", "bias"):
        assert forward_flops(gated.model_copy(update={switch: False}), 9) == forward_flops(gated, 9)


def test_a_window_caps_the_keys() -> None:
    base = {
        "d_model": 16,
        "n_layers": 4,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 64,
        "window_size": 3,
    }
    off, on = ModelConfig(**base), ModelConfig(**base, window=True)
    keys = {"off": (1 + 2 + 3 + 4 + 5 + 6 + 7) / 7, "on": (1 + 2 + 3 * 5) / 7}
    assert forward_flops(off, 7) - forward_flops(on, 7) == pytest.approx(4 * 2 * 8 * (keys["off"] - keys["on"]))
    assert forward_flops(on, 3) == forward_flops(off, 3)


def test_the_surround_changes_no_product_but_the_heads() -> None:
    """The head works on the targets that count alone; everything else that can be switched is elementwise or a look-up."""
    size = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "vocab_size": 64}
    plain = ModelConfig(**size)
    all_targets = forward_flops(plain, 9)
    assert all_targets is not None
    for switch in (
        {"mlp": "swiglu"}, {"residual": "normed"}, {"dropout": 0.1}, {"logit_cap": None}, {"tie_head": True},
        {"positions": "ape", "position_settings": {"ape": {"length": 9}}},
    ):  # fmt: skip
        assert forward_flops(ModelConfig(**size, **switch), 9) == all_targets
    assert all_targets - forward_flops(plain, 9, counted=0.25) == 0.75 * 2 * 16 * 64  # type: ignore[operator]
    assert training_flops(plain, 9, counted=0.25) == 3 * forward_flops(plain, 9, counted=0.25)  # type: ignore[operator]
    assert forward_flops(ModelConfig(**size, mlp_ratio=2), 9) == all_targets - 2 * 2 * (3 * 16 * 2 * 16)


# --- every part says its own --------------------------------------------------------------------------------------

SHIPPED = {
    # (memory, window): of the 370M network at 2048 tokens, of the quick one at 128, whatever the mixer
    ("none", False): (652_558_336, 883_520), ("none", True): (648_359_936, 878_320),
    ("gated_delta", False): (673_136_640, 921_600), ("gated_delta", True): (668_938_240, 916_400),
}  # fmt: skip
"""As they were before a part was asked for its own."""


@pytest.mark.parametrize("grid", ["full", "h200-check", "paper-v1", "paper-v2", "quick"])
def test_shipped_networks_have_the_flops_they_always_had(grid: str) -> None:
    cells = load_grid(grid).expand(lambda _: "f" * 64)
    for model, length in {(cell.config.model.model_dump_json(), cell.config.train.seq_len) for cell in cells}:
        config = ModelConfig.model_validate_json(model)
        large, small = SHIPPED[config.memory, config.window]
        assert forward_flops(config, length) == {(1024, 2048): large, (80, 128): small}[config.d_model, length]


@pytest.mark.parametrize(("mixer", "memory"), PAIRS)
def test_every_part_of_the_package_says_its_flops(mixer: str, memory: str) -> None:
    config = ModelConfig(**SIZE, attn_type=mixer, memory=memory)
    assert (unknown_reason(config), forward_flops(config, 9)) == (None, estimated_flops(config, 9) / 3)
    assert forward_flops(config, 18) > forward_flops(config, 9) > 0  # type: ignore[operator]


OF_A_HEAD = {
    # of a pair of query and key, and of a query whatever it sees: multiply-adds a head of size 8
    "alibi": (8 + 8, 0), "rel": (8 + 8, 0), "ssmax": (8 + 8, 0),
    # each query times each of 64 vectors, once
    "cope": (8 + 8, 64 * 8),
    # a head's map reads the values of both heads of its pair
    "diff": (8 + 16, 0),
}  # fmt: skip


@pytest.mark.parametrize("mixer", OF_A_HEAD)
@pytest.mark.parametrize("window", [False, True])
def test_mixers_by_hand(mixer: str, window: bool) -> None:
    config = ModelConfig(**SIZE, window=window, window_size=3, attn_type=mixer)
    without = config.model_copy(update={"attn_type": "nope"})
    keys = (1 + 2 + 3 * 5) / 7 if window else (1 + 2 + 3 + 4 + 5 + 6 + 7) / 7
    of_pair, of_query = OF_A_HEAD[mixer]
    ours, nope = forward_flops(config, 7), forward_flops(without, 7)
    assert ours is not None
    assert nope is not None
    # one of the four blocks is global
    assert ours - nope == pytest.approx(2 * 4 * (of_pair * keys + of_query) - 2 * 4 * 16 * keys, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("mixer", ["alibi", "rel", "cope"])
def test_counted_flops_equal_measured_flops_of_mixers(mixer: str, block: int | None) -> None:
    """Torch's own count of products. Queries in one block meet all keys, in blocks of 4 all up to the block's end."""
    t, keys = 12, 12 if block is None else (4 + 8 + 12) / 3
    config = check_model_config(ModelConfig(**SIZE, attn_type=mixer, mixers={"cope": {"positions": 5}}))
    core = registry.MIXERS.load(mixer)(config, mixer_settings(config))
    q, k = torch.randn(3, t, 4, 8), torch.randn(3, t, 2, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        core(q, k, k, window=None, block=block)
    reported = registry.MIXERS.load(mixer).forward_flops(config, core.config, keys)
    assert counter.get_total_flops() == 3 * t * reported


@pytest.mark.usefixtures("registries")
def test_part_flops_are_those_it_reports() -> None:
    calls = []

    class Linear(Mixer):
        @classmethod
        def forward_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
            calls.append(keys)
            return 1000.0 * model.n_heads

    class Cheap(Memory):
        @classmethod
        def forward_flops(cls, model: ModelConfig, config: Any) -> float:
            return 7.0 * model.head_dim

    register_mixer("linear")(Linear)
    register_memory("cheap")(Cheap)
    nope, linear, both = (
        forward_flops(ModelConfig(**SIZE, attn_type=mixer, memory=memory), 5)
        for mixer, memory in (("nope", "none"), ("linear", "none"), ("linear", "cheap"))
    )
    # one of the four blocks is global; a query sees 3 of 5 keys on average
    assert linear - nope == 4000 - 4 * 4 * 8 * 3
    assert both - linear == 7 * 8
    assert calls == [3.0, 3.0]


@pytest.mark.usefixtures("registries")
def test_no_part_is_counted_as_another(cells: Callable[..., list[Cell]]) -> None:
    """A subclass does more than the class above it knows of: it says its own, or nothing is known."""
    register_mixer("mine")(type("Mine", (Polar,), {}))
    register_memory("old")(type("Old", (GatedDelta,), {}))
    plain = ModelConfig(**SIZE, attn_type="nope")
    base = forward_flops(plain, 9)
    assert base is not None
    for mixer, memory, why in (
        ("mine", "none", "mixer 'mine' does not define its FLOPs (forward_flops)"),
        ("nope", "old", "memory 'old' does not define its FLOPs (forward_flops)"),
        ("mine", "old", "mixer 'mine' and memory 'old' do not define their FLOPs (forward_flops)"),
    ):
        config = ModelConfig(**SIZE, attn_type=mixer, memory=memory)
        assert unknown_reason(config) == why
        assert (forward_flops(config, 9), training_flops(config, 9)) == (None, None)
        assert mfu(training_flops(config, 9), 1e3, 4e12) is None
        # cells are still put in an order, by all that is known
        attention = 4 * 4 * 8 * 5 if mixer == "mine" else 0
        assert estimated_flops(config, 9) == 3 * (base - attention)
        assert unknown_reason(config.model_copy(update={"attn_every": 9, "attn_offset": 8})) is None, "no layer has it"
    with_memory, without = cells("axes: {attn_type: [mine], memory: [old, gated_delta]}\n")
    order = predicted_costs(
        [Task(cell, "train", [], "new") for cell in (with_memory, without)], [with_memory, without], {}
    )
    assert 0 < order[with_memory.id] < order[without.id]


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12),
    ("NVIDIA A100 80GB PCIe", 312e12), ("A100-SXM4-40GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12),
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA H200", 989e12),
    ("NVIDIA H200 NVL", 835e12), ("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12), ("NVIDIA GeForce RTX 4090", 165.2e12),
])  # fmt: skip
def test_peaks_by_the_drivers_name(name: str, peak: float) -> None:
    assert peak_flops(name) == peak


@pytest.mark.parametrize("name", [
    "NVIDIA L40", "NVIDIA L40S-48Q", "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA B300 SXM6 AC",
    "NVIDIA A10", "NVIDIA A100X", "NVIDIA A100-SXM-64GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce GTX 1080", "Tesla T4", "NVIDIA", "", None,
])  # fmt: skip
def test_a_gpu_that_is_not_in_the_table_has_no_peak(name: str | None) -> None:
    assert peak_flops(name) is None
    assert mfu(1e9, 1e3, peak_flops(name)) is None


def test_every_peak_has_a_source_and_every_name_stands_once() -> None:
    names = [name for peak in PEAK_BF16 for name in peak.names]
    assert len(names) == len(set(names)) == 14
    for peak in PEAK_BF16:
        assert re.search(r"(datasheet|white paper), https://\S+: ", peak.source), peak.names
        # the figure in the source is the peak in TFLOP/s, or twice it with sparsity, rounded down
        stated = [
            float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*\d", peak.source.rsplit(": ", 1)[1])
        ]
        half = 2 if "sparsity" in peak.source else 1
        assert any(peak.flops / 1e12 in (value / half, value // half) for value in stated), peak.names


def test_no_peak_no_mfu() -> None:
    assert mfu(1e9, 1e3, None) is None
    assert mfu(2e9, 1e3, 4e12) == 0.5
