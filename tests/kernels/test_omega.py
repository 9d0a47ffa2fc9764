"""The omega memory against a loop whose gradients are autograd's, and what its formulas promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from atma_sweep.kernels import features
from atma_sweep.kernels.gated_delta.op import gated_delta_reference
from atma_sweep.kernels.omega import scan as scanned
from atma_sweep.kernels.omega.newton_schulz import NewtonSchulzTape, newton_schulz
from atma_sweep.kernels.omega.op import Rates, answer, first_state, omega, unit
from atma_sweep.kernels.omega.reference import omega_reference
from torch import Tensor

B, H, F, X = 2, 3, 5, 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(t: int, *, slow: bool, seed: int = 0, columns: int = F) -> tuple[Tensor, Tensor, Tensor, Rates]:
    q, k = (unit(normal(B, t, H, columns, seed=seed + i)) for i in (0, 1))
    keep, step, weight, theta = (torch.sigmoid(normal(B, t, H, seed=seed + i)) for i in (3, 4, 5, 6))
    return q, k, normal(B, t, H, X, seed=seed + 2), Rates(keep.log(), step, weight, theta.log() if slow else None)


def memory(kind: str, columns: int = F) -> list[Tensor]:
    if kind == "matrix":
        return [torch.zeros(X, columns, dtype=torch.float64)]
    return [normal(7, columns, seed=20), normal(X, 7, seed=21)]


def naive(
    q: Tensor, k: Tensor, v: Tensor, rates: Rates, layers: list[Tensor], **options: Any
) -> tuple[Tensor, list[Tensor]]:
    reads, ends = torch.empty_like(v), []
    for b in range(B):
        for h in range(H):
            at = (b, slice(None), h)
            slow = None if rates.log_momentum_BTH is None else rates.log_momentum_BTH[at].exp()
            args = q[at], k[at], v[at], rates.log_keep_BTH[at].exp(), rates.step_BTH[at], rates.weight_BTH[at], slow
            reads[at], end = omega_reference(*args, layers, **options)
            ends.append(end)
    return reads, [torch.stack(matrices).unflatten(0, (B, H)) for matrices in zip(*ends, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("orthogonal", ["none", "chunk", "token"])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "network"])
@pytest.mark.parametrize(("t", "window", "chunk"), [(13, 3, 5), (9, 1, 1), (7, 20, 4), (6, 2, 9)])
def test_it_is_the_loop_of_gradients(kind: str, slow: bool, orthogonal: str, t: int, window: int, chunk: int) -> None:
    q, k, v, rates = drawn(t, slow=slow)
    options: dict[str, Any] = {"window": window, "chunk": chunk, "orthogonal": orthogonal}
    state = first_state(memory(kind), B, H, F, X, window)
    ours, end = omega(q, k, v, rates, state, **options)
    theirs, layers = naive(q, k, v, rates, memory(kind), **options)
    assert (ours - theirs).abs().max() <= 1e-11
    for a, b in zip(end.layers, layers, strict=True):
        assert (a - b).abs().max() <= 1e-11


@pytest.mark.parametrize("orthogonal", ["none", "chunk", "token"])
def test_a_sequence_in_pieces_equals_a_single_call(orthogonal: Any) -> None:
    q, k, v, rates = drawn(23, slow=True)
    start = first_state(memory("network"), B, H, F, X, 4)
    full_readout, last = omega(q, k, v, rates, start, window=4, chunk=5, orthogonal=orthogonal)
    state, readouts = start, []
    for part in (slice(0, 5), slice(5, 20), slice(20, 23)):
        piece = Rates(*(None if rate is None else rate[:, part] for rate in rates))  # type: ignore[arg-type]
        y, state = omega(q[:, part], k[:, part], v[:, part], piece, state, window=4, chunk=5, orthogonal=orthogonal)
        readouts.append(y)
    assert (torch.cat(readouts, 1) - full_readout).abs().max() <= 1e-13
    for a, b in zip([*state.layers, *state.momenta, *state[2:]], [*last.layers, *last.momenta, *last[2:]], strict=True):
        assert (a - b).abs().max() <= 1e-13


@pytest.mark.thorough
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    ("kind", "orthogonal"), [("matrix", "token"), *(("network", mode) for mode in ("none", "chunk", "token"))]
)
def test_the_compiler_sees_a_single_op_for_all_chunks(kind: str, orthogonal: Any, slow: bool) -> None:
    """The same numbers and gradients, of rates, first state and last state too, with a last chunk that is not whole."""
    q, k, v, rates = drawn(23, slow=slow)
    leaves = [x.requires_grad_() for x in (q, k, v, *(rate for rate in rates if rate is not None), *memory(kind))]
    nodes: list[str] = []

    def both() -> list[Tensor]:
        q, k, v, *rest = leaves
        state = first_state(rest[3 + slow :], B, H, F, X, 4)
        y, end = omega(q, k, v, Rates(*rest[: 3 + slow]), state, window=4, chunk=5, orthogonal=orthogonal)
        return [y, *end.layers, *end.momenta]

    def seen(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch._dynamo.reset()
    try:
        actual, wanted = torch.compile(both, fullgraph=True, backend=seen)(), both()
        assert [name for name in nodes if "omega_rounds" in name] == ["atma.omega_rounds.default"]
        assert len(nodes) < 60
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")()
    finally:
        torch._dynamo.reset()
    weights = [normal(*x.shape, seed=40 + i) for i, x in enumerate(wanted)]
    expected = torch.autograd.grad(sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)), leaves)
    for ours in (actual, compiled):
        for a, b in zip(ours, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-12
        grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(ours, weights, strict=True)), leaves)
        for a, b in zip(grads, expected, strict=True):
            assert (a - b).abs().max() <= 1e-10 * (1 + b.abs().max())


def test_a_window_of_a_single_pair_is_the_gated_delta_rule() -> None:
    """The relation to Titans: gamma = 1 - a, beta = theta/gamma, and v times gamma."""
    q, k, v, rates = drawn(17, slow=False)
    q, k = unit(q[..., :X]), unit(k[..., :X])
    start = first_state([torch.zeros(X, X, dtype=torch.float64)], B, H, X, X, 1)
    ours, end = omega(q, k, v, rates, start, window=1, chunk=1)
    keep = rates.log_keep_BTH.exp()
    beta = rates.step_BTH * rates.weight_BTH / keep
    theirs, state = gated_delta_reference(q, k, v * keep[..., None], rates.log_keep_BTH, beta)
    assert (ours - theirs).abs().max() <= 1e-10
    assert (end.layers[0] - state).abs().max() <= 1e-10


def test_a_window_of_all_is_the_loss_of_all_pairs_before() -> None:
    """With the first memory kept and weights of one: M_t = M_0 - Σ_s eta_s Σ_{i<=s} gradient_i."""
    q, k, v, rates = drawn(9, slow=False)
    ones = torch.ones_like(rates.weight_BTH)
    start = first_state([normal(X, F, seed=9)], B, H, F, X, 9)
    ours, _ = omega(q, k, v, Rates(torch.zeros_like(ones), rates.step_BTH, ones), start, window=9, chunk=9)
    m = start.layers[0]
    wrong = torch.einsum("bhxf,bthf->bthx", m, k) - v
    gradient = torch.einsum("bthx,bthf->bthxf", wrong, k).cumsum(1)
    memories = m[:, None] - (rates.step_BTH[..., None, None] * gradient).cumsum(1)
    assert (ours - torch.einsum("bthxf,bthf->bthx", memories, q)).abs().max() <= 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("orthogonal", ["none", "chunk", "token"])
@pytest.mark.parametrize("kind", ["matrix", "network"])
def test_a_step_lessens_the_loss(kind: str, orthogonal: Any) -> None:
    """100 draws of a window: the memory moves down the gradient, not up."""
    for seed in range(100):
        q, k, v, _ = drawn(4, slow=False, seed=100 + 10 * seed)
        start = first_state([0.3 * normal(*x.shape, seed=seed) for x in memory(kind)], B, H, F, X, 4)
        ones = torch.ones(B, 4, H, dtype=torch.float64)
        step = torch.zeros_like(ones)
        step[:, -1] = 1e-3
        rates = Rates(torch.zeros_like(ones), step, ones)
        _, end = omega(q, k, v, rates, start, window=4, chunk=4, orthogonal=orthogonal)
        before, after = ((answer(state, k) - v).square().sum((1, 3)) for state in (start, end))
        assert (after < before).all(), seed


@pytest.mark.parametrize("orthogonal", ["none", "chunk", "token"])
def test_what_is_to_come_changes_nothing(orthogonal: Any) -> None:
    q, k, v, rates = drawn(11, slow=True)
    start = first_state(memory("matrix"), B, H, F, X, 3)
    readout, _ = omega(q, k, v, rates, start, window=3, chunk=4, orthogonal=orthogonal)
    later = drawn(11, slow=True, seed=50)
    q2, k2, v2 = (torch.cat([a[:, :6], b[:, 6:]], 1) for a, b in zip((q, k, v), later[:3], strict=True))
    rates2 = Rates(*(torch.cat([a[:, :6], b[:, 6:]], 1) for a, b in zip(rates, later[3], strict=True)))  # type: ignore[arg-type, type-var]
    two, _ = omega(q2, k2, v2, rates2, start, window=3, chunk=4, orthogonal=orthogonal)
    assert (readout[:, :6] - two[:, :6]).abs().max() <= 1e-14
    assert (readout[:, 6:] - two[:, 6:]).abs().max() > 1e-2


@pytest.mark.parametrize(("kind", "orthogonal", "slow", "chunk"), [
    ("network", "none", True, 3), ("matrix", "none", False, 2), ("matrix", "none", True, 2), ("matrix", "chunk", True, 2),
    ("matrix", "chunk", False, 2),
])  # fmt: skip
def test_gradients_are_those_of_differences(
    kind: str, orthogonal: Any, slow: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks whose steps the backward makes together, and one beyond; a rest; a memory and a momentum that are not zero."""
    monkeypatch.setattr(scanned, "CHUNKS_PER_GROUP", 2)
    q, k, v, rates = drawn(7, slow=slow)
    empty = first_state(memory(kind), 1, 1, F, X, 2)
    count = len(empty.layers)
    args = [x[:1, :, :1].clone() for x in (q, k, v, *rates) if x is not None]
    args += [normal(*x.shape, seed=30 + i) for i, x in enumerate((*empty.layers, *empty.momenta))]

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        inputs, state = args[: -2 * count], empty._replace(layers=args[-2 * count : -count], momenta=args[-count:])
        y, end = omega(*inputs[:3], Rates(*inputs[3:]), state, window=2, chunk=chunk, orthogonal=orthogonal)
        return y, *end.layers, *(end.momenta if slow else ())

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in args], fast_mode=True)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_gradients_of_orthogonal_steps_are_those_of_differences(shape: tuple[int, int]) -> None:
    x = normal(3, 2, *shape, seed=40).requires_grad_()
    g = normal(3, 2, *shape, seed=41)
    (wanted,) = torch.autograd.grad(newton_schulz(x), x, g)
    ours = NewtonSchulzTape(x.detach())
    assert (ours.result - newton_schulz(x.detach())).abs().max() <= 1e-14
    for i in range(3):
        assert (ours.gradient(i, g[i]) - wanted[i]).abs().max() <= 1e-12
    zero = NewtonSchulzTape(torch.zeros(1, 2, 3, 3, dtype=torch.float64)).gradient(0, normal(2, 3, 3, seed=42))
    assert zero.isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("orthogonal", ["none", "chunk"])
def test_the_scan_keeps_the_rules_of_torch(orthogonal: str) -> None:
    keys, values = normal(3, 2, 4, F, seed=1).requires_grad_(), normal(3, 2, 4, X, seed=2).requires_grad_()
    felt, share = (normal(3, 2, 4, seed=seed).requires_grad_() for seed in (3, 4))
    numbers = [normal(3, 2, seed=seed).sigmoid().requires_grad_() for seed in (5, 6, 7)]
    start = [normal(2, X, F, seed=seed).requires_grad_() for seed in (8, 9)]
    outcome = torch.library.opcheck(
        scanned.scan, (keys, values, felt if orthogonal == "none" else None, share, *numbers, *start)
    )
    assert set(outcome.values()) == {"SUCCESS"}, outcome


# --- Newton-Schulz ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowest", "low", "high"), [(1e-2, 0.68, 1.14), (1e-3, 0.47, 1.21)])
def test_newton_schulz_brings_singular_values_near_1(lowest: float, low: float, high: float) -> None:
    """The matrices have norm 1, most of it in a single singular value, and the others below it."""
    u, _ = torch.linalg.qr(normal(40, 40, seed=1))
    w, _ = torch.linalg.qr(normal(40, 40, seed=2))
    for value in torch.logspace(math.log10(lowest), 0, 40, dtype=torch.float64):
        sizes = torch.zeros(40, dtype=torch.float64)
        sizes[0], sizes[1] = value, (1 - value**2).sqrt()
        singular_values = torch.linalg.svdvals(newton_schulz(u @ torch.diag(sizes) @ w.mT))[:2]
        large_values = singular_values[sizes[:2] > lowest / 2]
        assert low <= large_values.min()
        assert singular_values.max() <= high


def test_zero_stays_zero_and_tall_is_wide_turned() -> None:
    assert torch.equal(newton_schulz(torch.zeros(3, 5)), torch.zeros(3, 5))
    m = normal(2, 6, 3, seed=4)
    assert (newton_schulz(m) - newton_schulz(m.mT).mT).abs().max() <= 1e-14


# --- features ---------------------------------------------------------------------------------------------------------


def test_poly2_products_are_the_first_terms_of_exp() -> None:
    q, k = normal(3, 7, seed=1), normal(3, 7, seed=2)
    s = (q * k).sum(-1)
    assert ((features.poly2(q) * features.poly2(k)).sum(-1) - (1 + s + s**2 / 2)).abs().max() <= 1e-12
    assert features.poly2(normal(64, seed=1)).shape == (2145,)
    assert features.columns("poly2", 64, 0) == 2145


@pytest.mark.parametrize("degree", [2, 4])
def test_half_sketch_is_unbiased_and_sketch_never_negative(degree: int) -> None:
    q, k = unit(normal(1, 1, 1, 6, seed=1)), unit(normal(1, 1, 1, 6, seed=2))
    draw = torch.Generator().manual_seed(0)
    halves, squares = [], []
    for _ in range(1000):
        draws = features.sketch_draws(1, 6, 4, degree, draw).double()
        halves.append((features.half_sketch(q, draws) * features.half_sketch(k, draws)).sum())
        squares.append((features.sketch(q, draws) * features.sketch(k, draws)).sum())
    products = torch.stack(halves)
    right = (q * k).sum() ** (degree // 2)
    assert (products.mean() - right).abs() <= 3 * products.std() / math.sqrt(1000)
    assert (torch.stack(squares) - products.square()).abs().max() <= 1e-12
    assert torch.stack(squares).min() >= 0


# --- capacity ---------------------------------------------------------------------------------------------------------


def recalled(keys_NX: Tensor, feature: Any, *, passes: int) -> float:
    """Share of random signs that are nearest to their own after some passes of single steps over the pairs."""
    n = len(keys_NX)
    values = normal(n, 32, seed=8).sign()
    k = unit(feature(keys_NX))[None, :, None].repeat(1, passes, 1, 1)
    v = values[None, :, None].repeat(1, passes, 1, 1)
    ones = torch.ones(1, k.shape[1], 1, dtype=torch.float64)
    start = first_state([torch.zeros(32, k.shape[-1], dtype=torch.float64)], 1, 1, k.shape[-1], 32, 1)
    _, end = omega(k, k, v, Rates(torch.zeros_like(ones), ones, ones), start, window=1, chunk=1)
    recalled = unit(feature(keys_NX)) @ end.layers[0][0, 0].mT
    return ((recalled @ values.mT).argmax(-1) == torch.arange(n)).double().mean().item()


def test_a_matrix_recalls_a_pair_per_channel() -> None:
    keys = torch.linalg.qr(normal(64, 64, seed=1))[0]
    assert recalled(keys, lambda x: x, passes=1) == 1.0


@pytest.mark.thorough
def test_products_of_channels_hold_what_channels_cannot() -> None:
    keys = unit(normal(64, 12, seed=3))
    plain, second = (recalled(keys, feature, passes=20) for feature in (lambda x: x, features.poly2))
    assert second == 1.0
    assert plain < 0.5


def test_256_pairs_of_32_channels_fit_into_products_alone() -> None:
    """By least squares, which is what steps on the loss come to: 561 columns for 256 pairs, 32 for as many."""
    keys, values = unit(normal(256, 32, seed=3)), normal(256, 32, seed=8).sign()
    for feature, share in ((features.poly2, 1.0), (lambda x: x, 0.7)):
        columns = unit(feature(keys))
        recalled = columns @ torch.linalg.lstsq(columns, values, driver="gelsd").solution
        right = ((recalled > 0) == (values > 0)).double().mean().item()
        assert right == 1.0 if share == 1.0 else right < share
