"""Output head, soft cap and cross-entropy in one op that never stores all logits (docs/reference/mechanisms.md, "Backbone").

N tokens, D width, V vocabulary. Losses are in nats. A token whose target is negative does not count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..custom_ops import load_kernels, torch_op
from ..dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    max_relative_error,
    self_test_failure,
    triton_or_torch,
    why_no_triton,
)
from ..norms import statistics_dtype

CHUNK = 8192
"""Tokens whose logits exist at a time by default."""


def softcap(z: Tensor, cap: float) -> Tensor:
    """Return cap z / sqrt(z^2 + cap^2): odd, slope 1 at 0, absolute value at most cap; no tanh.

    In float32 (float64 stays float64). A cap of infinity, here and below, is no cap: z itself in that dtype.
    """
    wide = z.to(statistics_dtype(z.dtype))
    if cap == math.inf:
        return wide
    return wide * (cap * torch.rsqrt(wide.square() + cap * cap))


def linear_cross_entropy(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, targets_N: Tensor, *, cap: float, chunk: int = CHUNK
) -> Tensor:
    """Return each token's cross-entropy of softmax(softcap(h wᵀ + b)) in nats, float32 [N] (float64 for float64).

    softcap(z) = cap z / sqrt(z^2 + cap^2). The product runs in h's dtype, cap and log-sum-exp in float32. More than
    `chunk` tokens are done in chunks, whose logits the backward computes again instead of saving them. Differentiable
    in h, w and b. With gradients enabled the losses come from torch; without, `choose_backend` decides.

    Args:
        h_ND: Hidden states.
        w_VD: Weight of the output head, of any float dtype.
        b_V: Bias of the output head, or None.
        targets_N: int64 below V, which is not checked; a negative target gives a loss of 0 and no gradient.
        cap: Soft cap of the logits, above 0; infinity for none.
        chunk: Tokens whose logits exist at a time.

    Raises:
        ValueError: Shapes disagree or `chunk` is below 1.
    """
    _check(h_ND, w_VD, b_V, targets_N)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    pieces = zip(h_ND.split(chunk), targets_N.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        w, b = w_VD.to(h_ND.dtype), _cast(b_V, h_ND.dtype)
        backend = choose_backend(h_ND.device, h_ND.dtype, cap < math.inf).backend
        losses = [
            _losses_overwriting_logits(functional.linear(h, w, b), targets, cap, False, backend)
            for h, targets in pieces
        ]
        return torch.cat(losses)
    if h_ND.shape[0] <= chunk:
        return _losses(h_ND, w_VD, b_V, targets_N, cap)
    return torch.cat([checkpoint(_losses, h, w_VD, b_V, targets, cap, use_reentrant=False) for h, targets in pieces])


def linear_cross_entropy_sum(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, targets_N: Tensor, *, cap: float, chunk: int = CHUNK,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of `linear_cross_entropy` over the tokens, in nats, scalar float32 (float64 for float64).

    Logits are soft-capped: z -> cap z / sqrt(z^2 + cap^2). The gradient is computed in the forward, where gradients are
    enabled and needed: the logits of `chunk` tokens are overwritten by their gradient, which is multiplied into those
    of h, w and b at once. So no logit outlives its chunk and none is computed twice. The backward only multiplies the
    saved gradients of h, w and b by that of the sum. 6 N D V FLOPs in all. Products run in h's dtype, the gradient of w
    is summed in float32.

    Args:
        h_ND: Hidden states.
        w_VD: Weight of the output head, of any float dtype.
        b_V: Bias of the output head, or None.
        targets_N: int64 below V, which is not checked; a token with a negative target adds 0.
        cap: Soft cap of the logits, above 0; infinity for none.
        chunk: Tokens whose logits exist at a time.
        backend: "triton" or "torch", for the losses of rows of logits; None: `choose_backend`.

    Raises:
        ValueError: Shapes disagree or `chunk` is below 1.
    """
    _check(h_ND, w_VD, b_V, targets_N)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    backend = checked_backend(backend, "triton") or choose_backend(h_ND.device, h_ND.dtype, cap < math.inf).backend
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in (h_ND, w_VD, b_V) if x is not None)
    # the op imports the compiler at its first call, which costs a second that an eager run does not need
    call = cross_entropy_sum if torch.compiler.is_compiling() else _EagerSum.apply
    return call(h_ND, w_VD, b_V, targets_N, float(cap), chunk, needs, backend)[0]


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, capped: bool = True) -> BackendChoice:
    """Return the backend of the losses of rows of logits, "triton" or "torch", with the reason.

    "triton" needs CUDA with compute capability 8.0 or higher and 16-bit logits. The kernel must pass a self-test on a
    few rows, which the first call for a case runs.

    Args:
        device: Device of the logits.
        dtype: Dtype of the logits.
        capped: True for soft-capped logits.
    """
    device = torch.device(device)
    return triton_or_torch(
        why_no_triton(device, dtype) or self_test_failure("cross-entropy", _error, device, dtype, capped)
    )


def _error(device: torch.device, dtype: torch.dtype, capped: bool, *, seed: int) -> float:
    """Return the largest relative error of "triton", losses and gradient of the logits, against "torch" in float32.

    The case is five rows of 4099 logits, capped at 15 when `capped`; one row's target is ignored.
    """
    draw = torch.Generator().manual_seed(seed)
    z_NV = (5 * torch.randn(5, 4099, generator=draw)).to(device, dtype)
    targets_N = torch.randint(4099, (5,), generator=draw).to(device)
    targets_N[2] = -1
    results = []
    for backend, z in (("triton", z_NV.clone()), ("torch", z_NV.float())):
        results.append((_losses_overwriting_logits(z, targets_N, 15.0 if capped else math.inf, True, backend), z))
    return max_relative_error(*results)


def _sum(
    h_ND: Tensor,
    w_VD: Tensor,
    b_V: Tensor | None,
    targets_N: Tensor,
    cap: float,
    chunk: int,
    gradient: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (sum of the losses, its gradients by h, w and b), a chunk of tokens at a time.

    The sum is a scalar of the statistics' dtype; each gradient has its input's dtype. Without a bias the last is empty.

    Args:
        h_ND: Hidden states.
        w_VD: Weight of the output head.
        b_V: Bias, or None.
        targets_N: int64 targets; negative ones do not count.
        cap: Soft cap, z -> cap z / sqrt(z^2 + cap^2); infinity for none.
        chunk: Tokens of a chunk.
        gradient: False skips the gradients and returns three empty tensors for them.
        backend: Backend of the losses, "triton" or "torch".
    """
    dtype, wide = h_ND.dtype, statistics_dtype(h_ND.dtype)
    w, b = w_VD.to(dtype), _cast(b_V, dtype)
    total = torch.zeros((), dtype=wide, device=h_ND.device)
    if not gradient:
        for h, targets in zip(h_ND.split(chunk), targets_N.split(chunk), strict=True):
            total += _losses_overwriting_logits(functional.linear(h, w, b), targets, cap, False, backend).sum()
        return total, h_ND.new_empty(0), w_VD.new_empty(0), w_VD.new_empty(0)
    d_h, d_b = torch.empty_like(h_ND), torch.zeros(_bias_shape(b_V), dtype=wide, device=h_ND.device)
    d_w = torch.zeros(w_VD.shape, dtype=wide, device=h_ND.device)
    for start in range(0, len(h_ND), chunk):
        part = slice(start, start + chunk)
        z_NV = functional.linear(h_ND[part], w, b)
        total += _losses_overwriting_logits(z_NV, targets_N[part], cap, True, backend).sum()
        torch.mm(z_NV, w, out=d_h[part])
        if b_V is not None:
            d_b += z_NV.sum(0, dtype=wide)
        _add_product(d_w, z_NV.t(), h_ND[part])
    return total, d_h, d_w.to(w_VD.dtype), d_b.to(w_VD.dtype if b_V is None else b_V.dtype)


def _cast(b_V: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if b_V is None else b_V.to(dtype)


def _bias_shape(b_V: Tensor | None) -> tuple[int, ...]:
    return (0,) if b_V is None else tuple(b_V.shape)


def _empty_sum(
    h_ND: Tensor,
    w_VD: Tensor,
    b_V: Tensor | None,
    targets_N: Tensor,
    cap: float,
    chunk: int,
    gradient: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    """Return uninitialised results of `cross_entropy_sum`, for torch.compile; nothing is computed.

    They are the sum, a scalar of the statistics' dtype, and tensors like h, w and b (empty without a bias), which are
    empty without `gradient`.
    """
    total = h_ND.new_empty((), dtype=statistics_dtype(h_ND.dtype))
    d_h, d_w = (x.new_empty(x.shape if gradient else (0,)) for x in (h_ND, w_VD))
    like = w_VD if b_V is None or not gradient else b_V
    return total, d_h, d_w, like.new_empty(_bias_shape(b_V) if gradient else (0,))


cross_entropy_sum = torch_op("cross_entropy_sum", _empty_sum)(_sum)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.biased = inputs[2] is not None
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """Return the saved gradients times that of the sum, for h, w and b; None for the other five inputs."""
    saved = ctx.saved_tensors if ctx.biased else ctx.saved_tensors[:2]
    d_h, d_w, *d_b = ((g * x).to(x.dtype) for x in saved)
    return d_h, d_w, d_b[0] if d_b else None, None, None, None, None, None


cross_entropy_sum.register_autograd(_gradients, setup_context=_save)


class _EagerSum(torch.autograd.Function):
    """Autograd function of `cross_entropy_sum` outside of compiled graphs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _sum(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product a b to `total` in place, in total's dtype.

    On CUDA 16-bit factors are multiplied straight into a float32 total; otherwise the product is rounded to the
    factors' dtype before it is added.
    """
    if total.is_cuda and total.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += (a @ b).to(total.dtype)


def _losses_overwriting_logits(z_NV: Tensor, targets_N: Tensor, cap: float, gradient: bool, backend: str) -> Tensor:
    """Return the losses [N] in nats in the statistics' dtype; with `gradient` also overwrite the logits by it.

    Args:
        z_NV: Contiguous raw logits, before the cap; the gradient is that of the summed losses by these, in their dtype.
        targets_N: int64 targets; a negative one gives loss 0 and a gradient of 0.
        cap: Soft cap, z -> cap z / sqrt(z^2 + cap^2); infinity for none.
        gradient: True to overwrite `z_NV` by the gradient.
        backend: "triton" or "torch".
    """
    if backend == "triton":
        return load_kernels(__package__).rows(z_NV, targets_N, cap, gradient)
    lse_N, losses_N = _torch_losses(z_NV, targets_N, cap)
    if gradient:
        z_NV.copy_(_capped_gradient(z_NV, targets_N, lse_N, cap))
    return losses_N


def _torch_losses(z_NV: Tensor, targets_N: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return (log-sum-exp [N], losses [N]) of raw logits in nats, in the statistics' dtype.

    Both are those of the capped logits cap z / sqrt(z^2 + cap^2). For an ignored (negative) target they are infinity
    and 0.
    """
    capped_NV = softcap(z_NV, cap)
    counts_N = targets_N >= 0
    lse_N = torch.logsumexp(capped_NV, 1)
    losses_N = lse_N - capped_NV.gather(1, targets_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    # with an infinite log-sum-exp all exponentials of the gradient are zero
    return lse_N.masked_fill(~counts_N, math.inf), losses_N.masked_fill(~counts_N, 0.0)


def _capped_gradient(z_NV: Tensor, targets_N: Tensor, lse_N: Tensor, cap: float) -> Tensor:
    """Return the gradient of the summed losses by the raw logits, a new tensor [N, V] in the statistics' dtype.

    Args:
        z_NV: Raw logits, before the cap; left unchanged.
        targets_N: int64 targets; the row of a negative one is 0.
        lse_N: Log-sum-exp of the capped logits in nats, infinite for ignored targets.
        cap: Soft cap, z -> cap z / sqrt(z^2 + cap^2); infinity for none.
    """
    wide_NV = z_NV.to(lse_N.dtype)
    own_N1, less_N1 = targets_N.clamp(min=0).unsqueeze(1), (targets_N >= 0).to(lse_N.dtype).neg_().unsqueeze(1)
    if cap == math.inf:
        d_NV = wide_NV.sub(lse_N.unsqueeze(1)).exp_()
        return d_NV.scatter_add_(1, own_N1, less_N1)
    # softcap(z) = z slope and softcap'(z) = slope^3
    slope_NV = wide_NV.square().add_(cap**2).rsqrt_().mul_(cap)
    d_NV = (wide_NV * slope_NV).sub_(lse_N.unsqueeze(1)).exp_()
    d_NV.scatter_add_(1, own_N1, less_N1)
    return d_NV.mul_(slope_NV.square().mul_(slope_NV))


def linear_cross_entropy_reference(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, targets_N: Tensor, *, cap: float
) -> Tensor:
    """Return `linear_cross_entropy` computed from one matrix [N, V] of all logits; differentiable by autograd.

    These are each token's cross-entropy of softmax(softcap(h wᵀ + b)) in nats, [N], float32 (float64 for float64); a
    negative target gives 0. softcap(z) = cap z / sqrt(z^2 + cap^2); a cap of infinity is none.
    """
    _check(h_ND, w_VD, b_V, targets_N)
    z_NV = h_ND @ w_VD.to(h_ND.dtype).t()
    if b_V is not None:
        z_NV = z_NV + b_V.to(h_ND.dtype)
    z_NV = z_NV.to(statistics_dtype(h_ND.dtype))
    if cap != math.inf:
        z_NV = cap * z_NV / torch.sqrt(z_NV * z_NV + cap * cap)
    losses_N = torch.logsumexp(z_NV, 1) - z_NV.gather(1, targets_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(targets_N < 0, 0.0, losses_N)


def _losses(h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, targets_N: Tensor, cap: float) -> Tensor:
    """Return the losses [N] of one chunk of hidden states, differentiable."""
    z_NV = functional.linear(h_ND, w_VD.to(h_ND.dtype), _cast(b_V, h_ND.dtype))
    return _CappedLosses.apply(z_NV, targets_N, cap)


class _CappedLosses(torch.autograd.Function):
    """Autograd function of the cross-entropy of softcap(z); it saves the raw logits and one number per token."""

    @staticmethod
    def forward(ctx: Any, z_NV: Tensor, targets_N: Tensor, cap: float) -> Tensor:
        lse_N, losses_N = _torch_losses(z_NV, targets_N, cap)
        ctx.save_for_backward(z_NV, targets_N, lse_N)
        ctx.cap = cap
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z_NV, targets_N, lse_N = ctx.saved_tensors
        d_NV = _capped_gradient(z_NV, targets_N, lse_N, ctx.cap)
        return d_NV.mul_(grads[0].unsqueeze(1)).to(z_NV.dtype), None, None


def _check(h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, targets_N: Tensor) -> None:
    """Raise ValueError when hidden states, weight, bias and targets do not fit each other.

    They need h [N, D], w [V, D], b [V] or None, and targets [N]. Dtypes and the range of the targets are not checked.
    """
    n, d = h_ND.shape
    if w_VD.shape[1] != d or (b_V is not None and b_V.shape != w_VD.shape[:1]):
        b = "none" if b_V is None else tuple(b_V.shape)
        raise ValueError(f"h is {tuple(h_ND.shape)}, but w is {tuple(w_VD.shape)} and b {b}")
    if targets_N.shape != (n,):
        raise ValueError(f"h has {n} rows, but targets have shape {tuple(targets_N.shape)}")
