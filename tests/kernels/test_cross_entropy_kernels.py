"""The sum of capped cross-entropies whose gradient is worked out beside it, plain and with the Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.cross_entropy import op as cross_entropy
from atma_sweep.kernels.cross_entropy.op import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_sum,
)
from atma_sweep.kernels.dispatch import BackendChoice
from graded import distance, double, interpreted, normal
from kernel_operations import losses_inputs, targets_of
from tolerances import rounding_bound
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # of lanes that are masked away
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]
BACKENDS = ["torch", pytest.param("triton", marks=interpreted)]


NEAR = rounding_bound(torch.float32, 4099)
"""Of a loss, absolute, and of a gradient: the logarithm of a sum over the vocabulary."""


def inputs(n: int, d: int, v: int, *, scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """h, w, b and the targets, among them the first and the last word."""
    return losses_inputs(n, d, v, scale=scale), targets_of(n, v)


def run(function: Callable[..., Tensor], args: list[Tensor], targets: Tensor, **options: Any) -> list[Tensor]:
    total = function(*args, targets, **options).sum()
    return [total.detach(), *torch.autograd.grad(total, args)]


def check(ours: list[Tensor], theirs: list[Tensor], near: float) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        off = (a.double() - b).abs().max().item()
        assert off <= near * max(1.0, b.abs().max().item()), (index, off)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "d", "v", "cap", "scale", "chunk"), [
    (1, 3, 5, 15.0, 1.0, 8192), (7, 5, 37, 15.0, 1.0, 3), (7, 5, 37, 15.0, 1.0, 1), (9, 4, 4099, 15.0, 1.0, 4),
    (5, 6, 8192, 60.0, 20.0, 5), (5, 6, 12301, 100.0, 60.0, 2), (3, 4, 4096, 500.0, 200.0, 100), (4, 3, 2, 100.0, 60.0, 3),
    (7, 5, 37, math.inf, 1.0, 3), (9, 4, 4099, math.inf, 1.0, 4), (5, 6, 8192, math.inf, 10.0, 5),
])  # fmt: skip
def test_sum_and_gradients_are_near_float64(
    backend: str, n: int, d: int, v: int, cap: float, scale: float, chunk: int
) -> None:
    """Vocabularies around the kernel's 4096 lanes, chunks that do not divide, caps that need a running maximum."""
    args, targets = inputs(n, d, v, scale=scale)
    ours = run(linear_cross_entropy_sum, args, targets, cap=cap, chunk=chunk, backend=backend)
    assert ours[0].dtype == torch.float32
    theirs = run(linear_cross_entropy_reference, double(args), targets, cap=cap)
    # a sum over the vocabulary, and what makes a logit and its gradient; a capped logit of 500 has a last digit of 3e-5, and exp makes an absolute error of it relative
    largest = cap if cap < math.inf else (args[0] @ args[1].T + args[2]).abs().max().item()
    check(ours, theirs, rounding_bound(torch.float32, v + 200, condition=max(1.0, largest / 50)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("v", "cap"), [(37, 15.0), (4099, 100.0), (37, math.inf)])
def test_a_negative_target_counts_for_nothing(backend: str, v: int, cap: float) -> None:
    """Loss and gradients are those of the other tokens alone; the token's own gradient is zero, and with it alone all are."""
    args, targets = inputs(7, 5, v, scale=3.0)
    counts = torch.tensor([True, False, True, True, False, False, True])
    masked_targets = targets.where(counts, -1)
    ours = run(linear_cross_entropy_sum, args, masked_targets, cap=cap, chunk=3, backend=backend)
    h, w, b = double(args)
    theirs = run(lambda h, w, b, targets, **kw: linear_cross_entropy_reference(h[counts], w, b, targets, **kw),
                 [h, w, b], targets[counts], cap=cap)  # fmt: skip
    check(ours, theirs, 1e-5)
    assert torch.equal(ours[1][~counts], torch.zeros(3, 5))
    assert all(
        not gradient.any()
        for gradient in run(linear_cross_entropy_sum, args, torch.full((7,), -1), cap=cap, chunk=3, backend=backend)
    )
    for losses in (
        linear_cross_entropy(*args, masked_targets, cap=cap, chunk=3),
        linear_cross_entropy_reference(*args, masked_targets, cap=cap),
        linear_cross_entropy(*(x.detach() for x in args), masked_targets, cap=cap, chunk=3),
    ):
        assert torch.equal(losses == 0, ~counts)
        assert abs(losses.sum().item() - theirs[0].item()) <= 1e-5 * abs(theirs[0].item())
    check(run(linear_cross_entropy, args, masked_targets, cap=cap, chunk=3), theirs, 1e-5)


@interpreted
@pytest.mark.parametrize(("cap", "level"), [(60.0, 1e4), (60.0, -1e4), (100.0, 1e4), (100.0, -1e4), (80.0, -1e4)])
def test_saturated_logits_have_exact_losses(cap: float, level: float) -> None:
    """exp(60) fits into float32 times any vocabulary, exp(100) alone does not; exp(-100) is zero."""
    n, v = 2, 5003
    h, w = torch.ones(n, 1), torch.full((v, 1), level) + normal(v, 1)
    loss = linear_cross_entropy_sum(h, w, torch.zeros(v), torch.tensor([0, 4999]), cap=cap, backend="triton")
    expected = linear_cross_entropy_reference(
        h.double(), w.double(), torch.zeros(v).double(), torch.tensor([0, 4999]), cap=cap
    )
    assert loss.item() == pytest.approx(expected.sum().item(), abs=n * rounding_bound(torch.float32, v))
    assert loss.item() == pytest.approx(n * 8.5178, abs=1e-2)  # ln 5003


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_cap_it_is_torchs_cross_entropy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum and gradients, and single losses with and without gradients."""
    monkeypatch.setattr(cross_entropy, "choose_backend", lambda *args: BackendChoice(backend, "asked for"))
    args, targets = inputs(13, 5, 4099)

    def plain(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(h @ w.T + b, y, reduction="none")

    exact = run(plain, double(args), targets)
    check(run(linear_cross_entropy_sum, args, targets, cap=math.inf, chunk=5), exact, NEAR)
    check(run(linear_cross_entropy, args, targets, cap=math.inf, chunk=5), exact, NEAR)
    with torch.no_grad():
        losses = linear_cross_entropy(*args, targets, cap=math.inf, chunk=5)
        assert (losses.double() - plain(*double(args), targets)).abs().max() <= NEAR


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cap", [15.0, math.inf])
def test_without_a_bias(backend: str, cap: float) -> None:
    (h, w, _), targets = inputs(9, 4, 4099)
    z = h.double() @ w.double().T
    capped = z if cap == math.inf else cap * z / torch.sqrt(z * z + cap * cap)
    expected = torch.nn.functional.cross_entropy(capped, targets, reduction="sum")
    wanted = [expected.detach(), *torch.autograd.grad(expected, (h, w))]
    loss = linear_cross_entropy_sum(h, w, None, targets, cap=cap, chunk=4, backend=backend)
    check([loss.detach(), *torch.autograd.grad(loss, (h, w))], wanted, 2e-5)
    for chunk in (4, 100):
        losses = linear_cross_entropy(h, w, None, targets, cap=cap, chunk=chunk)
        check([losses.sum().detach(), *torch.autograd.grad(losses.sum(), (h, w))], wanted, 2e-5)
        with torch.no_grad():
            bare = linear_cross_entropy(h, w, None, targets, cap=cap, chunk=chunk)
        assert (bare - losses).abs().max() <= 2e-5
    with torch.no_grad():
        bare = linear_cross_entropy_sum(h, w, None, targets, cap=cap, backend=backend)
    assert (bare - loss).abs() <= 2e-5 * loss


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_scale_with_what_comes_from_above(backend: str) -> None:
    args, targets = inputs(6, 4, 29)
    plain = run(linear_cross_entropy_sum, args, targets, cap=15.0, backend=backend)
    # powers of two, so that scaling is exact
    total = linear_cross_entropy_sum(*args, targets, cap=15.0, backend=backend)
    scaled = torch.autograd.grad(total * -0.125 + 3, args)
    assert all(torch.equal(a, -0.125 * b) for a, b in zip(scaled, plain[1:], strict=True))
    total = linear_cross_entropy_sum(*args, targets, cap=15.0, backend=backend)
    (total / 8).backward(retain_graph=True)
    (total / 8).backward()
    assert all(x.grad is not None and torch.equal(x.grad, 0.25 * g) for x, g in zip(args, plain[1:], strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_sums_and_losses_of_single_tokens_without_gradients(
    backend: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation takes the kernel too."""
    monkeypatch.setattr(cross_entropy, "choose_backend", lambda *args: BackendChoice(backend, "asked for"))
    args, targets = inputs(13, 5, 4099)
    total = linear_cross_entropy_sum(*args, targets, cap=15.0, chunk=chunk, backend=backend)
    with torch.no_grad():
        without = linear_cross_entropy_sum(*args, targets, cap=15.0, chunk=chunk, backend=backend)
        losses = linear_cross_entropy(*args, targets, cap=15.0, chunk=chunk)
        expected = linear_cross_entropy_reference(*double(args), targets, cap=15.0)
    frozen = linear_cross_entropy_sum(*(x.detach() for x in args), targets, cap=15.0, chunk=chunk, backend=backend)
    assert not without.requires_grad
    assert torch.equal(without, total.detach())
    assert torch.equal(frozen, without)
    assert losses.dtype == torch.float32
    assert (losses.double() - expected).abs().max() <= NEAR


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learns", [0, 1, 2])
def test_a_single_input_that_learns_is_enough(backend: str, learns: int) -> None:
    args, targets = inputs(6, 4, 29)
    all_gradients = run(linear_cross_entropy_sum, args, targets, cap=15.0, backend=backend)
    leaves = [x.detach().requires_grad_(index == learns) for index, x in enumerate(args)]
    (grad,) = torch.autograd.grad(linear_cross_entropy_sum(*leaves, targets, cap=15.0, backend=backend), leaves[learns])
    assert torch.equal(grad, all_gradients[1 + learns])


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "v", "cap", "chunk"), [
    (1, 64, 5, 15.0, 8192), (37, 64, 4099, 15.0, 10), (300, 128, 50304, 15.0, 128), (129, 64, 12301, 100.0, 100),
    (300, 128, 50304, math.inf, 128),
])  # fmt: skip
def test_in_bf16_errs_at_most_twice_the_plain_formula(n: int, d: int, v: int, cap: float, chunk: int) -> None:
    args, targets = inputs(n, d, v, scale=cap / 15 if cap < math.inf else 1.0)
    h = args[0].detach().cuda().bfloat16().requires_grad_()
    # as in training: activations in bf16, weights in float32
    leaves = [h, *(x.detach().cuda().requires_grad_() for x in args[1:])]
    targets = targets.cuda()
    ours, again = (
        run(linear_cross_entropy_sum, leaves, targets, cap=cap, chunk=chunk, backend="triton") for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    exact = run(linear_cross_entropy_reference, double(leaves), targets, cap=cap)
    plain = run(linear_cross_entropy_reference, leaves, targets, cap=cap)

    for a, b, c in zip(ours, exact, plain, strict=True):
        assert distance(a, b) <= 2 * max(distance(c, b), 1e-3)
