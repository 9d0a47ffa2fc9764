"""The chunked gated delta rule against its step form."""

from __future__ import annotations

import pytest
import torch
from atma_sweep.kernels.gated_delta.op import (
    choose_backend,
    fla_is_right,
    gated_delta,
    gated_delta_reference,
    sum_by_ones,
    why_no_fla,
)
from graded import double, in_type, run
from kernel_operations import delta_inputs, delta_rule
from torch import Tensor
from torch.nn import functional

J, D = 2, 5


def inputs() -> list[Tensor]:
    return double(delta_inputs(83))


def test_fast_decay_neither_overflows_nor_gives_nan() -> None:
    q, k, v, gamma, beta = (x.detach() for x in inputs())
    gamma = (gamma * 0 - 60.0).requires_grad_()
    r = gated_delta(q, k, v, gamma, beta, chunk=64)
    assert (r - gated_delta_reference(q, k, v, gamma, beta)[0]).abs().max() <= 1e-12
    assert torch.isfinite(torch.autograd.grad(r.sum(), gamma)[0]).all()


def test_reading_back_what_was_just_written() -> None:
    _, k, v, gamma, beta = inputs()
    ones = torch.ones_like(beta)
    r = gated_delta(k, k, v, torch.zeros_like(gamma)[:, :, :J], ones[:, :, :J], chunk=16)
    assert (r - v).abs().max() <= 1e-12


def test_orthonormal_keys_are_all_recalled() -> None:
    k = torch.eye(D, dtype=torch.float64).view(1, D, 1, D)
    v = torch.randn(1, D, 1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gates = torch.zeros(1, D, 1, dtype=torch.float64), torch.ones(1, D, 1, dtype=torch.float64)
    _, state = gated_delta(k, k, v, *gates, chunk=2, return_state=True)
    for i in range(D):
        assert torch.allclose(state[0, 0] @ k[0, i, 0], v[0, i, 0], atol=1e-14)


@pytest.mark.parametrize("cut", [1, 30, 64])
def test_a_carried_state_continues_the_sequence(cut: int) -> None:
    args = inputs()
    full_readout, last = gated_delta(*args, return_state=True)
    first, state = gated_delta(*(x[:, :cut] for x in args), return_state=True)
    second, end = gated_delta(*(x[:, cut:] for x in args), initial_state=state, return_state=True)
    assert (torch.cat([first, second], 1) - full_readout).abs().max() <= 1e-12
    assert (end - last).abs().max() <= 1e-12


def test_zero_keys_write_nothing() -> None:
    q, k, v, gamma, beta = inputs()
    r, state = gated_delta(q, torch.zeros_like(k), v, gamma, beta, return_state=True)
    assert r.abs().max() == 0
    assert state.abs().max() == 0


def test_unnormalised_keys_diverge() -> None:
    """D9: with RMS-normed keys (||k||^2 = D) the transition's eigenvalue gamma (1 - beta D) leaves the unit circle."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 64, 1, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    k = functional.normalize(k, dim=-1) * 4
    gates = torch.full((1, 64, 1), -0.02, dtype=torch.float64), torch.full((1, 64, 1), 0.5, dtype=torch.float64)
    normal = gated_delta_reference(k, k, v, *gates)[1].norm()
    assert normal < 20
    assert gated_delta_reference(k, k, v, *gates, normalize=False)[1].norm() > 1e6 * normal


def hebbian(k: Tensor, v: Tensor, gamma: float, beta: Tensor) -> Tensor:
    k = functional.normalize(k, dim=-1)
    age = torch.arange(k.shape[1] - 1, -1, -1, dtype=torch.float64)
    return torch.einsum("bthv,bthk->bhvk", v * (beta * (gamma**age)[None, :, None]).unsqueeze(-1), k)


@pytest.mark.parametrize(("n", "delta_98", "delta_1", "hebb_98", "hebb_1"), [
    (256, 11.7, 19.0, 14.3, 45.9), (4096, 11.2, 18.5, 14.0, 178.0),
])  # fmt: skip
def test_state_norms_of_section_p(n: int, delta_98: float, delta_1: float, hebb_98: float, hebb_1: float) -> None:
    """docs/reference/mechanisms.md, "Diagnostics": the delta rule's state stays bounded, the Hebbian one grows as sqrt(N). Random data, so 8%."""
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, n, 4, 32, generator=draw, dtype=torch.float64) for _ in range(2))
    noise = 0.3 * torch.randn(1, n, 4, generator=draw, dtype=torch.float64)
    beta = torch.sigmoid(0.3 * torch.randn(1, n, 4, generator=draw, dtype=torch.float64))
    gamma_98 = functional.logsigmoid(torch.logit(torch.tensor(0.98, dtype=torch.float64)) + noise)
    for gamma, expected in ((gamma_98, delta_98), (torch.zeros_like(noise), delta_1)):
        state = gated_delta(k, k, v, gamma, beta, chunk=64, return_state=True)[1]
        assert torch.linalg.matrix_norm(state).mean().item() == pytest.approx(expected, rel=0.08)
    for gamma, expected in ((0.98, hebb_98), (1.0, hebb_1)):
        assert torch.linalg.matrix_norm(hebbian(k, v, gamma, beta)).mean().item() == pytest.approx(expected, rel=0.08)


def test_backend_choice() -> None:
    backend, reason = choose_backend("cpu", torch.float32, 16)
    assert backend == "torch"
    assert "cpu" in reason
    versions = {"3.3.1": True, "3.4.0": False, "3.6.0": False, "3.7.0+git": False, "3.7.1": True}
    assert {x: fla_is_right((9, 0), x) for x in versions} == versions
    assert fla_is_right((8, 9), "3.6.0")


def test_deterministic_runs_never_choose_fla() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        reason = why_no_fla(torch.device("cuda"), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert reason is not None
    assert "differ between processes" in reason


def test_running_sum_is_cumsum() -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    weight = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    grads = []
    for result in (sum_by_ones(x), x.cumsum(-1)):
        assert (result - x.cumsum(-1)).abs().max() <= 1e-14
        grads.append(torch.autograd.grad((result * weight).sum(), x)[0])
    assert (grads[0] - grads[1]).abs().max() <= 1e-14


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "dtype", "kind"), [
    (64, torch.bfloat16, "fast"), (32, torch.bfloat16, "kept"), (16, torch.bfloat16, "zeros"), (64, torch.float16, "zeros"),
    (128, torch.float32, "plain"),
])  # fmt: skip
def test_sizes_dtypes_and_gates_on_a_gpu(d: int, dtype: torch.dtype, kind: str) -> None:
    args = in_type(delta_inputs(130, d=d, kind=kind, first=True), dtype, 3, "cuda")
    bound = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    for actual, wanted in zip(run(delta_rule, args, backend="triton"), run(delta_rule, double(args)), strict=True):
        if dtype == torch.float16 and not wanted.abs().max() < 6e4:
            # a zero key's gradient is 1e12 times that of its direction, beyond float16
            actual, wanted = actual[wanted.abs() < 6e4].nan_to_num(), wanted[wanted.abs() < 6e4]
        assert (actual.double() - wanted).norm() <= bound * wanted.norm()
