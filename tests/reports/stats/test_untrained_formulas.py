"""The mechanisms before training: against token by token simulation, and against what the model really starts with."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.kernels.gated_delta.op import gated_delta
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.memory import gated_delta as memory_file
from atma_sweep.model.mixers.polar import Polar
from atma_sweep.reports.stats import untrained_formulas

NORMAL = [NormalDist().inv_cdf((index + 0.5) / 2000) for index in range(2000)]
WAYS = [(erases, keeps) for erases in (True, False) for keeps in (True, False)]


def simulated_norm(size: int, tokens: int, *, erases: bool, keeps: bool, heads: int = 48) -> float:
    """Return the root mean square norm of the state over heads, simulated token by token."""
    chance = np.random.default_rng(7)
    state = np.zeros((heads, size, size))
    for _ in range(tokens):
        key = chance.normal(size=(heads, size))
        key /= np.linalg.norm(key, axis=1, keepdims=True)
        value = chance.normal(size=(heads, size))
        logits = chance.normal(size=(2, heads)) / math.sqrt(3)
        gamma = np.ones(heads) if keeps else 1 / (1 + np.exp(-logits[0] - 3.9))
        beta = 1 / (1 + np.exp(-logits[1]))
        state *= gamma[:, None, None]
        if erases:
            value = value - np.einsum("hvk,hk->hv", state, key)
        state += beta[:, None, None] * value[:, :, None] * key[:, None, :]
    return float(np.sqrt((state**2).sum((1, 2)).mean()))


@pytest.mark.parametrize(("erases", "keeps"), WAYS)
def test_state_norms_equal_a_simulation(erases: bool, keeps: bool) -> None:
    for tokens in (1, 20, 300):
        closed = untrained_formulas.state_norms([tokens], erases=erases, keeps=keeps, size=16)[0]
        assert closed == pytest.approx(simulated_norm(16, tokens, erases=erases, keeps=keeps), rel=0.05)


def test_state_norms_without_decay_grow_as_a_root() -> None:
    lengths = [2**power for power in range(17)]
    norms = untrained_formulas.state_norms(lengths, erases=False, keeps=True)
    assert norms / norms[0] == pytest.approx([math.sqrt(length) for length in lengths])
    for erases, keeps in ((True, True), (True, False), (False, False)):
        bounded = untrained_formulas.state_norms([2048, 65536], erases=erases, keeps=keeps)
        assert bounded[1] == pytest.approx(bounded[0], rel=1e-4)


def test_state_norms_equal_the_kernel() -> None:
    chance = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 512, 8, 32, generator=chance) for _ in range(3))
    gates = torch.randn(2, 2, 512, 8, generator=chance) / math.sqrt(3)
    log_gamma = torch.nn.functional.logsigmoid(gates[0] + memory_file.GAMMA_OFFSET)
    state_and_output = gated_delta(q, k, v, log_gamma, torch.sigmoid(gates[1]), return_state=True, backend="torch")
    norm = float(state_and_output[1].square().sum((2, 3)).mean().sqrt())
    assert untrained_formulas.state_norms([512], size=32)[0] == pytest.approx(norm, rel=0.05)


@pytest.fixture(scope="module")
def started() -> Backbone:
    """Return a narrow untrained network of the published kind: eight layers of 16 polar heads with a memory."""
    sizes: dict[str, Any] = {"d_model": 256, "n_layers": 8, "n_heads": 16, "n_kv_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 64, "attn_every": 1, "attn_offset": 0}
    return build(ModelConfig(**sizes, memory="gated_delta", init="zero-ends-and-conv-in"), seed=0)


def test_constants_equal_those_of_the_model(started: Backbone) -> None:
    slopes = [module.mag_beta for module in started.modules() if isinstance(module, Polar)]
    assert len(slopes) == 8
    assert torch.nn.functional.softplus(torch.cat(slopes)).tolist() == pytest.approx([untrained_formulas.BETA] * 128)
    assert memory_file.GAMMA_OFFSET == untrained_formulas.GAMMA_OFFSET
    assert ModelConfig().head_dim == untrained_formulas.HEAD_SIZE


def test_gate_spread_equals_that_of_the_model(started: Backbone) -> None:
    x = torch.nn.functional.rms_norm(torch.randn(1, 512, 256, generator=torch.Generator().manual_seed(5)), (256,))
    memories = [module for module in started.modules() if isinstance(module, memory_file.GatedDelta)]
    with torch.no_grad():
        gates = [memory.read_rates(x) for memory in memories]
    log_gamma, beta = (torch.cat(parts) for parts in zip(*gates, strict=True))
    logits = torch.logit(beta.double())
    assert logits.numel() == 8 * 512 * 16
    assert float(logits.std()) == pytest.approx(untrained_formulas.GATE_SPREAD, rel=0.03)
    gamma = torch.exp(log_gamma.double())
    assert float(torch.logit(gamma).mean()) == pytest.approx(untrained_formulas.GAMMA_OFFSET, abs=0.02)
    assert float(gamma.square().mean()) == pytest.approx(
        np.mean([math.exp(-2 * math.log1p(math.exp(-3.9 - z / math.sqrt(3)))) for z in NORMAL]), rel=1e-3
    )


def test_count_map_by_hand() -> None:
    # docs/reference/mechanisms.md, "Polar attention"
    assert np.round(untrained_formulas.count_map(np.array([0, 1, 37, 1000])), 4).tolist() == [
        0.0,
        0.1387,
        0.6247,
        0.8835,
    ]
