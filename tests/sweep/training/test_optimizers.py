"""Muon against torch's own and against the SVD; the split of the parameters; rates and state (docs/reference/mechanisms.md, "Training")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.training.optimizers import COEFFICIENTS, Muon, Optimizers, orthogonalise
from registries import PAIRS
from tolerances import rounding_bound
from torch import Tensor, nn

Network = Callable[..., Backbone]
CPU = torch.device("cpu")


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def polar_factor(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition, float64."""
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vh


# --- the iteration ------------------------------------------------------------------------------------------------


def scalar_map(s: float, times: int) -> float:
    a, b, c = COEFFICIENTS
    for _ in range(times):
        s = a * s + b * s**3 + c * s**5
    return s


def test_scalar_map_has_a_flat_unit_fixed_point() -> None:
    a, b, c = COEFFICIENTS
    assert a + b + c == 1
    assert a + 3 * b + 5 * c == 0


def test_scalar_map_overshoots_by_less_than_two_thousandths() -> None:
    grid = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    top = (2 * grid - 1.5 * grid**3 + 0.5 * grid**5).max().item()
    # the slope 2 - 4.5 s^2 + 2.5 s^4 is zero at s^2 = 0.8 besides 1
    assert top == pytest.approx(0.8**0.5 * 1.12, abs=1e-9)
    assert top <= 1.0018


def test_scalar_map_after_twelve_iterations() -> None:
    assert scalar_map(1e-3, 12) == pytest.approx(1, abs=2e-3)
    assert scalar_map(1e-4, 12) == pytest.approx(0.39, abs=5e-3)
    assert scalar_map(0.0, 12) == 0


@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (7, 3), (3, 7), (1, 6), (6, 1), (33, 17)])
def test_iteration_reaches_the_polar_factor_if_well_conditioned(rows: int, cols: int) -> None:
    small = min(rows, cols)
    u, v = (torch.linalg.qr(gaussian(n, small, seed=n, dtype=torch.float64))[0] for n in (rows, cols))
    matrix = u @ torch.diag(torch.linspace(1, 3, small, dtype=torch.float64)) @ v.T
    result = orthogonalise(matrix[None].float(), 12, torch.float32)[0]
    assert (result.double() - polar_factor(matrix)).abs().max() < 2e-6
    exact = orthogonalise(matrix[None], 12, torch.float64)[0]
    assert (exact - polar_factor(matrix)).abs().max() < 1e-6


def test_iteration_maps_each_singular_value() -> None:
    """On diag(s) / |s| the matrix iteration is the scalar map."""
    s = torch.tensor([3.0, 1.0, 0.01, 1e-4], dtype=torch.float64)
    result = orthogonalise(torch.diag(s)[None], 12, torch.float64)[0]
    expected = [scalar_map(float(x), 12) for x in s / (s.norm() + 1e-7)]
    assert result.diagonal().tolist() == pytest.approx(expected, abs=1e-9)
    assert (result - torch.diag(result.diagonal())).abs().max() < 1e-12


@pytest.mark.parametrize(("rows", "cols", "dtype"), [
    (128, 512, torch.float32), (128, 512, torch.bfloat16), (512, 128, torch.bfloat16),
    pytest.param(1024, 4096, torch.float32, marks=pytest.mark.thorough),
])  # fmt: skip
def test_singular_values_of_wide_matrices_become_unit(rows: int, cols: int, dtype: torch.dtype) -> None:
    result = orthogonalise(gaussian(1, rows, cols), 12, dtype)[0].float()
    values = torch.linalg.svdvals(result)
    assert (values - 1).abs().max() < 0.02


def test_matrices_of_a_batch_do_not_mix() -> None:
    batch = torch.stack(
        [gaussian(5, 3, seed=1), torch.zeros(5, 3), 1e-20 * gaussian(5, 3, seed=2), 1e6 * gaussian(5, 3)]
    )
    together = orthogonalise(batch, 12, torch.float32)
    alone = torch.cat([orthogonalise(matrix[None], 12, torch.float32) for matrix in batch])
    assert torch.equal(together[1], torch.zeros(5, 3))
    assert (together - alone).abs().max() < 1e-6


# --- matrices of one row or column, in numbers --------------------------------------------------------------------


def general(matrices_NRC: Tensor, iterations: int) -> Tensor:
    """X <- X / (|X| + 1e-7), then X <- a X + (b A + c A A) X with A = X X^T, whatever the shape (docs/reference/mechanisms.md, "Training")."""
    a, b, c = COEFFICIENTS
    results = []
    for matrix in matrices_NRC:
        X = matrix / (matrix.square().sum().sqrt() + 1e-7)
        for _ in range(iterations):
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
        results.append(X)
    return torch.stack(results)


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e-9, 1e-7, 1e-4, 1.0, 1e9, 1e100])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3), (1, 129), (3, 1), (129, 1)])
def test_single_row_equals_the_matrix_iteration(rows: int, cols: int, scale: float) -> None:
    """Far below 1e-7 the norm's floor keeps a matrix small, and the iteration only doubles it."""
    matrices = gaussian(5, rows, cols, dtype=torch.float64) * scale
    for iterations in (0, 1, 5, 12):
        result = orthogonalise(matrices, iterations, torch.float64)
        expected = general(matrices, iterations)
        assert result.shape == matrices.shape
        assert ((result - expected).abs() <= 1e-12 * expected.abs().amax((1, 2), keepdim=True)).all()


@pytest.mark.parametrize(("dtype", "near"), [
    (torch.float32, rounding_bound(torch.float32, 257)), (torch.bfloat16, rounding_bound(torch.bfloat16, 2)),
])  # fmt: skip
@pytest.mark.parametrize(("rows", "cols"), [(1, 3), (4, 1), (1, 257)])
def test_single_row_in_low_precision_is_a_unit_vector(rows: int, cols: int, dtype: torch.dtype, near: float) -> None:
    """bfloat16 has two digits; its Frobenius norm is one all the same."""
    for scale in (1e-3, 1.0, 1e4, 1e15):
        matrices = gaussian(7, rows, cols, dtype=torch.float64) * scale
        result = orthogonalise(matrices, 12, dtype)
        assert result.dtype == dtype
        unit = matrices / matrices.square().sum((1, 2), keepdim=True).sqrt()
        assert (result.double() - unit).abs().max() <= near


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_single_row_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    matrices = torch.stack([torch.zeros(1, 4), torch.ones(1, 4)]).double()
    result = orthogonalise(matrices, 12, dtype)
    assert result[0].tolist() == [[0.0] * 4]
    assert result[1].double().flatten().tolist() == pytest.approx([0.5] * 4, rel=1e-2)
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 1), 12, dtype), torch.zeros(2, 3, 1, dtype=dtype))


# --- Muon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols"), [(24, 24), (40, 16), (16, 40), (7, 31)])
def test_muon_is_torchs_muon(rows: int, cols: int) -> None:
    ours, theirs = (nn.Parameter(gaussian(rows, cols, seed=9)) for _ in range(2))
    mine = Muon([ours], lr=0.02, momentum=0.95, weight_decay=0.01, iterations=12, dtype=torch.bfloat16)
    reference = torch.optim.Muon(
        [theirs],
        lr=0.02,
        weight_decay=0.01,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=(2, -1.5, 0.5),
        eps=1e-7,
        ns_steps=12,
    )
    for step in range(6):
        ours.grad = gaussian(rows, cols, seed=step)
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone()
        mine.step()
        reference.step()
        moved = (ours - before).norm()
        # torch fuses its bfloat16 products differently, so the two round apart
        assert (ours - theirs).norm() / moved < 0.02
    assert (mine.state[ours]["momentum_buffer"] - reference.state[theirs]["momentum_buffer"]).abs().max() < 1e-6


@pytest.mark.parametrize(("rows", "cols"), [(6, 6), (12, 3), (3, 12)])
def test_muon_step_by_hand(rows: int, cols: int) -> None:
    p = nn.Parameter(gaussian(rows, cols, dtype=torch.float64))
    muon = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.5, iterations=40, dtype=torch.float64)
    weight, buffer = p.detach().clone(), torch.zeros(rows, cols, dtype=torch.float64)
    for step in range(3):
        g = gaussian(rows, cols, seed=20 + step, dtype=torch.float64)
        p.grad = g.clone()
        muon.step()
        buffer = 0.9 * buffer + 0.1 * g
        update = polar_factor(0.1 * g + 0.9 * buffer) * max(1, rows / cols) ** 0.5
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * update
        assert (p - weight).abs().max() < 1e-9


def test_each_conv_filter_moves_by_the_learning_rate() -> None:
    p = nn.Parameter(gaussian(11, 1, 3))
    before = p.detach().clone()
    p.grad = gaussian(11, 1, 3, seed=1) * torch.logspace(-6, 3, 11)[:, None, None]
    Muon([p], lr=0.02, weight_decay=0.0, dtype=torch.float32).step()
    moved = (before - p.detach()).squeeze(1)
    assert moved.norm(dim=1).tolist() == pytest.approx([0.02] * 11, rel=1e-3)
    # a 1 x k matrix is its own direction
    direction = torch.nn.functional.normalize(p.grad.squeeze(1), dim=1)
    assert (moved / 0.02 - direction).abs().max() < 2e-3


def test_zero_gradient_only_decays() -> None:
    for shape in ((5, 4), (6, 1, 3)):
        p = nn.Parameter(gaussian(*shape))
        before = p.detach().clone()
        p.grad = torch.zeros(shape)
        Muon([p], lr=0.02, weight_decay=0.0).step()
        assert torch.equal(p, before)
        Muon([p], lr=0.02, weight_decay=0.01).step()
        assert torch.equal(p, before * (1 - 0.02 * 0.01))


def test_a_parameter_without_gradient_stays() -> None:
    p = nn.Parameter(gaussian(3, 4))
    before = p.detach().clone()
    Muon([p]).step()
    assert torch.equal(p, before)


def test_batching_matrices_of_a_shape_changes_nothing() -> None:
    grads = [gaussian(6, 4, seed=i) for i in range(3)]
    together = [nn.Parameter(torch.zeros(6, 4)) for _ in grads]
    alone = [nn.Parameter(torch.zeros(6, 4)) for _ in grads]
    for p, g in zip([*together, *alone], grads * 2, strict=True):
        p.grad = g.clone()
    Muon(together, dtype=torch.float32).step()
    for p in alone:
        Muon([p], dtype=torch.float32).step()
    assert max(float((a - b).detach().abs().max()) for a, b in zip(together, alone, strict=True)) < 1e-7


def test_muon_refuses_vectors_and_closures() -> None:
    with pytest.raises(ValueError, match=r"2 or more dimensions, got shape \(3,\)"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="does not support a closure"):
        Muon([nn.Parameter(torch.zeros(3, 3))]).step(lambda: 0.0)


# --- both together ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attn_type", "memory"), PAIRS)
def test_parameters_are_grouped_by_kind(network: Network, attn_type: str, memory: str) -> None:
    model = network(attn_type=attn_type, memory=memory)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), CPU)
    held = [id(p) for p in optimizers.parameters]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert len(set(held)) == len(held)
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: g["lr"] for g in optimizers.by_name["adam"].param_groups for p in g["params"]}
    muon = {names[id(p)] for g in optimizers.by_name["muon"].param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        if p.ndim < 2:
            assert rates[name] == 0.01
        elif name == "embedding.weight":
            assert rates[name] == 0.3
        elif name == "head.weight":
            assert rates[name] == 1 / 320
        else:
            assert name in muon
            assert name not in rates
    assert {g["weight_decay"] for g in optimizers.by_name["adam"].param_groups} == {0.0}
    assert {(g["betas"], g["eps"]) for g in optimizers.by_name["adam"].param_groups} == {((0.8, 0.95), 1e-10)}
    assert {
        (g["lr"], g["momentum"], g["weight_decay"], g["iterations"]) for g in optimizers.by_name["muon"].param_groups
    } == {(0.02, 0.95, 0.01, 12)}


def test_muon_for_square_gives_long_matrices_to_adamw(network: Network) -> None:
    """The first update of AdamW is the rate times the gradient's sign, that of Muon the orthogonalised gradient's."""
    model = network(awake=True, output_gate=False)
    config = TrainConfig(muon_for="square", matrix_lr=3e-4, muon_lr=1e-3, muon_weight_decay=0, adam_eps=1e-30)
    optimizers = Optimizers(model.parameter_groups(), config, CPU)
    matrices = dict(model.parameter_groups()["muon"])
    square = {name for name, p in matrices.items() if p.shape[-2] == p.shape[-1]}
    assert 0 < len(square) < len(matrices)
    before = {name: p.detach().clone() for name, p in matrices.items()}
    backward(model, 0)
    gradients = {name: p.grad.clone() for name, p in matrices.items() if p.grad is not None}
    moving = {name for name, gradient in gradients.items() if gradient.abs().min() > 1e-20}
    optimizers.step(1.0)
    for name in moving:
        change = (matrices[name] - before[name]).detach()
        if name in square:
            expected = -1e-3 * orthogonalise(gradients[name][None], dtype=torch.float32)[0]
        else:
            expected = -3e-4 * gradients[name].sign()
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-6)
    assert moving & square
    assert moving - square


def backward(model: Backbone, seed: int) -> None:
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed))
    model.token_losses(model.features(tokens[:, :-1]).hidden_BTD, tokens[:, 1:]).mean().backward()


def test_the_factor_scales_every_rate_and_decay(network: Network) -> None:
    """At factor 0 nothing moves, decay included; a half factor is a half rate."""
    model = network(awake=True)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), CPU)
    before = [p.detach().clone() for p in optimizers.parameters]
    backward(model, 0)
    optimizers.step(0.0)
    assert all(torch.equal(p, b) for p, b in zip(optimizers.parameters, before, strict=True))
    assert all(p.grad is None for p in optimizers.parameters)
    for factor in (0.5, 1.0, 0.25):
        backward(model, 1)
        optimizers.step(factor)
        assert [g["lr"] for g in optimizers.by_name["adam"].param_groups] == [0.3 * factor, factor / 320, 0.01 * factor]
        assert [g["lr"] for g in optimizers.by_name["muon"].param_groups] == [0.02 * factor]


def test_adam_is_the_textbook_update(network: Network) -> None:
    model = network(awake=True, dtype=torch.float64)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), CPU)
    p = model.embedding.weight
    weight, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    for t in range(1, 4):
        backward(model, t)
        g = p.grad.clone()
        optimizers.step(1.0)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        weight = weight - 0.3 * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-10)
        assert (p - weight).abs().max() < 1e-10


def test_adamw_alone_is_torchs_adamw(network: Network) -> None:
    """Every parameter, with one rate for all, against one plain AdamW over the whole network."""
    rate, betas = 1e-3, (0.9, 0.999)
    config = TrainConfig(
        optimizer="adamw", matrix_lr=rate, embedding_lr=rate, head_lr=rate, scalar_lr=rate, adam_beta1=betas[0],
        adam_beta2=betas[1], adam_eps=1e-8, adam_weight_decay=0.01,
    )  # fmt: skip
    ours, theirs = (network(awake=True, dtype=torch.float64) for _ in range(2))
    optimizers = Optimizers(ours.parameter_groups(), config, CPU)
    plain_adamw = torch.optim.AdamW(theirs.parameters(), lr=rate, betas=betas, eps=1e-8, weight_decay=0.01)
    for step in range(4):
        backward(ours, step)
        backward(theirs, step)
        optimizers.step(0.5)
        plain_adamw.param_groups[0]["lr"] = 0.5 * rate
        plain_adamw.step()
        plain_adamw.zero_grad()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12, name


@pytest.mark.parametrize("gate", [True, False])
def test_muon_split_orthogonalizes_each_head_alone(network: Network, gate: bool) -> None:
    """First update of q, k, v and output projection against U V^T of every head's block, cut out by hand, in float64."""
    config = TrainConfig(muon_split="head", muon_iterations=40, muon_lr=0.1, muon_weight_decay=0)
    model = network(awake=True, dtype=torch.float64, output_gate=gate, n_heads=4, n_kv_heads=2, head_dim=6)
    optimizers = Optimizers(model.parameter_groups(), config, CPU, head_blocks=model.head_blocks())
    layer = next(block.mix for block in model.blocks if hasattr(block.mix, "w_q"))
    projections, names = (layer.w_q, layer.w_k, layer.w_v, layer.proj), ("q", "k", "v", "o")
    backward(model, 0)
    before = [p.weight.detach().clone() for p in projections]
    gradients = [p.weight.grad.clone() for p in projections]
    optimizers.step(1.0)
    for name, projection, old, gradient in zip(names, projections, before, gradients, strict=True):
        moved, axis = (old - projection.weight.detach()) / 0.1, 1 if name == "o" else 0
        heads = gradient.split(6, axis)
        assert len(heads) == {"q": 8 if gate else 4, "k": 2, "v": 2, "o": 4}[name]
        expected = torch.cat([polar_factor(head) for head in heads], axis)
        # rows of a block over columns of the matrix: above 1 for the output projection alone
        assert (moved - expected * max(1, (old.shape[0] / 24) if name == "o" else 0) ** 0.5).abs().max() < 1e-9, name
        assert (expected - polar_factor(gradient)).abs().max() > 0.01, name


def test_muon_split_none_ignores_the_heads(network: Network) -> None:
    ours, plain = (network(awake=True, dtype=torch.float64) for _ in range(2))
    for model, blocks in ((ours, ours.head_blocks()), (plain, None)):
        optimizers = Optimizers(model.parameter_groups(), TrainConfig(), CPU, head_blocks=blocks)
        backward(model, 0)
        optimizers.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    with pytest.raises(ValueError, match="head_blocks"):
        Optimizers(ours.parameter_groups(), TrainConfig(muon_split="head"), CPU)
    with pytest.raises(ValueError, match="equal blocks"):
        Muon([ours.head.weight], blocks={ours.head.weight: (7, 1)})


def test_adamw_alone_has_a_rate_for_each_kind(network: Network) -> None:
    model = network(memory="gated_delta")
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(optimizer="adamw", matrix_lr=0.007), CPU)
    assert sorted(map(id, optimizers.parameters)) == sorted(map(id, model.parameters()))
    rates = {id(p): g["lr"] for g in optimizers.by_name["adam"].param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        kind = 0.01 if p.ndim < 2 else {"embedding": 0.3, "head": 1 / 320}.get(name.split(".")[0], 0.007)
        assert rates[id(p)] == kind, name
    assert set(optimizers.state_dict()) == {"adam"}


def test_restored_state_continues_identically(network: Network) -> None:
    def run(model: Backbone, optimizers: Optimizers, steps: range) -> None:
        for step in steps:
            backward(model, step)
            optimizers.step(1.0 - 0.1 * step)

    straight = network()
    run(straight, Optimizers(straight.parameter_groups(), TrainConfig(), CPU), range(6))
    first = network()
    optimizers = Optimizers(first.parameter_groups(), TrainConfig(), CPU)
    run(first, optimizers, range(3))
    second = network(seed=5)
    second.load_state_dict(first.state_dict())
    restored = Optimizers(second.parameter_groups(), TrainConfig(), CPU)
    restored.load_state_dict(plain(optimizers.state_dict()))
    run(second, restored, range(3, 6))
    for (name, a), (_, b) in zip(straight.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def plain(state: Any) -> Any:
    """A copy that shares nothing, as if read from a file."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(plain(value) for value in state)
    return state.clone() if isinstance(state, Tensor) else state
