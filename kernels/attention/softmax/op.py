"""Causal softmax attention, with an optional sliding window, and its distractor loss.

B batch, T length, H query heads, J KV heads (J divides H), X head size, R distractors. See docs/reference/mechanisms.md, "Softmax
attention".
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...custom_ops import differentiate, empty_like, keep_inputs, load_kernels, rows_like, torch_op
from ...dispatch import (
    BackendChoice,
    attention_choice,
    checked_backend,
    compile_time_constant,
    is_torch_only,
    max_relative_error,
    result_and_gradients,
    self_test_failure,
)
from ...norms import statistics_dtype
from ...shapes import QUERY_BLOCK, check_qkv, check_window, cut, expand_kv, visible_mask

LOG2E = math.log2(math.e)


def softmax_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, scale: float | None = None, window: int | None = None,
    query_block: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale q kᵀ) v over the visible keys, [B, T, H, X] of q's dtype.

    Causal: a query sees its own key and earlier ones. Differentiable. "torch" reads, with a window shorter than T, only
    the keys that a block of queries can see. A given `query_block` also bounds full attention where torch has no kernel
    for it without T x T scores.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time with a window; None: 1024.
        backend: "cudnn" (full attention; torch with a window), "triton" or "torch"; None:
            `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is below 1.
    """
    _, t, h, j, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    full = window is None or window >= t
    backend = (
        checked_backend(backend, "cudnn", "triton")
        or choose_backend(q_BTHX.device, q_BTHX.dtype, d, windowed=not full).backend
    )
    if backend == "triton":
        q = in_log2(q_BTHX, scale)
        return softmax_forward(q, k_BTJX, v_BTJX, cut(window, t), 0)[0]
    q_BHTX = q_BTHX.transpose(1, 2)
    if backend == "cudnn" and full:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = functional.scaled_dot_product_attention(
                q_BHTX, k_BTJX.transpose(1, 2), v_BTJX.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=j != h
            )
        return y.transpose(1, 2)
    if full and (query_block is None or query_block >= t or _is_fused(q_BTHX, k_BTJX)):
        k_BJTX, v_BJTX = k_BTJX.transpose(1, 2), v_BTJX.transpose(1, 2)
        y = functional.scaled_dot_product_attention(
            q_BHTX, k_BJTX, v_BJTX, is_causal=True, scale=scale, enable_gqa=j != h
        )
        return y.transpose(1, 2)
    # Masked attention has no fast grouped kernel, so the KV heads are expanded here.
    k_BHTX, v_BHTX = expand_kv(k_BTJX, h).transpose(1, 2), expand_kv(v_BTJX, h).transpose(1, 2)
    blocks = []
    for start in range(0, t, query_block or QUERY_BLOCK):
        stop = min(start + (query_block or QUERY_BLOCK), t)
        first = 0 if window is None else max(0, start - window + 1)
        mask = visible_mask(start, stop, first, window, q_BTHX.device)
        k, v = k_BHTX[:, :, first:stop], v_BHTX[:, :, first:stop]
        blocks.append(
            functional.scaled_dot_product_attention(q_BHTX[:, :, start:stop], k, v, attn_mask=mask, scale=scale)
        )
    return torch.cat(blocks, 2).transpose(1, 2)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, *, windowed: bool) -> BackendChoice:
    """Return the backend of `softmax_attention`: "cudnn", "triton" or "torch", with the reason.

    With a window it is that of `attention_choice`. Full attention on a GPU takes cuDNN on Hopper and later, "triton"
    there in deterministic runs, and "torch" before Hopper. Where our kernels cannot run, as in float32 or with heads
    other than 16, 32, 64, 128 and 256, it is "torch" in every case. The first call for a case runs self-tests.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        windowed: True for a window shorter than T.
    """
    device = torch.device(device)
    ours = attention_choice("softmax", device, dtype, head_dim, _error)
    if windowed or device.type != "cuda" or is_torch_only() or ours.backend == "torch":
        return ours
    return _full_choice(device, dtype, head_dim, ours)


def _full_choice(device: torch.device, dtype: torch.dtype, head_dim: int, ours: BackendChoice) -> BackendChoice:
    """Return the backend of full attention on a GPU: cuDNN on Hopper and later, unless runs must repeat bit for bit.

    Before Hopper it is "torch". cuDNN must pass a self-test.

    Args:
        device: CUDA device.
        dtype: Dtype of the activations.
        head_dim: Head size.
        ours: Choice of our kernels, taken in deterministic runs and where cuDNN fails its self-test.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return BackendChoice("torch", f"torch chooses its own kernel on compute capability {major}.{minor}")
    if torch.are_deterministic_algorithms_enabled():
        return ours
    why = self_test_failure("cuDNN attention", _error, device, dtype, head_dim, "cudnn")
    if why is not None:
        return BackendChoice(ours.backend, f"{ours.reason}; cuDNN not used: {why}")
    return BackendChoice("cudnn", f"cuDNN {torch.backends.cudnn.version()}")


def _error(device: torch.device, dtype: torch.dtype, head_dim: int, backend: str, *, seed: int) -> float:
    """Return the largest relative error of the result and of its gradients, against "torch" in float32.

    The case is one row of 131 tokens, with a window of 70 except for "cudnn".
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, 131, heads, head_dim, generator=draw).to(device, dtype) for heads in (2, 1, 1)]
    attention = functools.partial(softmax_attention, window=None if backend == "cudnn" else 70)
    return max_relative_error(*result_and_gradients(attention, backend, dtype, tensors))


def in_log2(q_BTHX: Tensor, scale: float | None) -> Tensor:
    """Return q scaled by `factor_in_log2`, for the kernels, rounded once to q's dtype."""
    return (q_BTHX.to(statistics_dtype(q_BTHX.dtype)) * factor_in_log2(q_BTHX.shape[-1], scale)).to(q_BTHX.dtype)


def factor_in_log2(head_dim: int, scale: float | None) -> float:
    """Return the factor of q·k that gives logits in units of log 2; `scale` None is 1/sqrt(X)."""
    return LOG2E * (head_dim**-0.5 if scale is None else scale)


def _is_fused(q_BTHX: Tensor, k_BTJX: Tensor) -> bool:
    """Return True when torch computes full causal attention of grouped heads in memory that grows linearly with T.

    On the CPU it does for every float dtype. On CUDA only its flash kernel does, which needs 16 bits and capability
    8.0. False on other devices.
    """
    if q_BTHX.device.type != "cuda":
        return q_BTHX.device.type == "cpu"
    q, k = q_BTHX.transpose(1, 2), k_BTJX.transpose(1, 2)
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, q.shape[1] != k.shape[1])
    return bool(torch.backends.cuda.can_use_flash_attention(params))


def softmax_distractor_loss(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_clean_BTHX: Tensor, *,
    scale: float | None = None, window: int | None = None, query_block: int = 1024, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean squared difference between `y_clean` and the output when queries also see all R distractors.

    The mean runs over all B T H X numbers: scalar float32 (float64 for float64); R = 0 gives 0. Every query sees every
    distractor, whatever the window. Nothing is detached here. The kernels attend to real keys and distractors apart:
    with their log-sums l_c and l_r and a = sigmoid(l_r - l_c), the output with distractors is y_clean + a (o_r -
    y_clean), so no [B, H, T, R] tensor exists.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        k_r_BRJX: Distractor keys.
        v_r_BRJX: Distractor values.
        y_clean_BTHX: Output of `softmax_attention` without distractors, for the same scale and window.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Attention window of the real keys, or None.
        query_block: Queries that "torch" scores at a time.
        backend: "triton" or "torch"; None: that of `softmax_attention` with a window.

    Raises:
        ValueError: Shapes or dtypes disagree, or the window is below 1.
    """
    b, t, h, j, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    r = k_r_BRJX.shape[1]
    if k_r_BRJX.shape != (b, r, j, d) or v_r_BRJX.shape != (b, r, j, d):
        raise ValueError(
            f"k is {tuple(k_BTJX.shape)}, but the distractors are {tuple(k_r_BRJX.shape)}, {tuple(v_r_BRJX.shape)}"
        )
    dtype = statistics_dtype(q_BTHX.dtype)
    if r == 0:
        return torch.zeros((), dtype=dtype, device=q_BTHX.device)
    if (
        checked_backend(backend, "triton") or choose_backend(q_BTHX.device, q_BTHX.dtype, d, windowed=True).backend
    ) == "triton":
        q = in_log2(q_BTHX, scale)
        _, clean_BHT = softmax_forward(q, k_BTJX, v_BTJX, cut(window, t), 0)
        drawn_BTHX, drawn_BHT = softmax_forward(q, k_r_BRJX, v_r_BRJX, 0, r)
        share_BTH1 = torch.sigmoid((drawn_BHT - clean_BHT) / LOG2E).transpose(1, 2).unsqueeze(-1)
        return (share_BTH1 * (drawn_BTHX.to(dtype) - y_clean_BTHX.to(dtype))).square().mean()
    q_BHTX = q_BTHX.transpose(1, 2)
    k_BHTX, v_BHTX = expand_kv(k_BTJX, h).transpose(1, 2), expand_kv(v_BTJX, h).transpose(1, 2)
    k_r, v_r = expand_kv(k_r_BRJX, h).transpose(1, 2), expand_kv(v_r_BRJX, h).transpose(1, 2)
    total = torch.zeros((), dtype=dtype, device=q_BTHX.device)
    for start in range(0, t, query_block):
        stop = min(start + query_block, t)
        first = 0 if window is None else max(0, start - window + 1)
        real = visible_mask(start, stop, first, window, q_BTHX.device)
        mask = torch.cat([real.new_ones(stop - start, r), real], 1)
        k = torch.cat([k_r, k_BHTX[:, :, first:stop]], 2)
        v = torch.cat([v_r, v_BHTX[:, :, first:stop]], 2)
        y = functional.scaled_dot_product_attention(q_BHTX[:, :, start:stop], k, v, attn_mask=mask, scale=scale)
        total = total + (y.transpose(1, 2).to(dtype) - y_clean_BTHX[:, start:stop].to(dtype)).square().sum()
    return total / y_clean_BTHX.numel()


def softmax_attention_reference(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return `softmax_attention` computed one query at a time, in the inputs' dtype; differentiable by autograd.

    Args:
        q_BTHX: Queries.
        k_BTJX: Keys.
        v_BTJX: Values.
        scale: Factor of q·k; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
    """
    _, t, h, _, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    k_BTHX, v_BTHX = expand_kv(k_BTJX, h), expand_kv(v_BTJX, h)
    scale = d**-0.5 if scale is None else scale
    rows = []
    for i in range(t):
        first = 0 if window is None else max(0, i + 1 - window)
        score_BSH = (q_BTHX[:, i : i + 1] * k_BTHX[:, first : i + 1]).sum(-1) * scale
        weight_BSH = torch.exp(score_BSH - score_BSH.amax(1, keepdim=True))
        weight_BSH = weight_BSH / weight_BSH.sum(1, keepdim=True)
        rows.append((weight_BSH.unsqueeze(-1) * v_BTHX[:, first : i + 1]).sum(1))
    return torch.stack(rows, 1)


# --- as torch ops ---------------------------------------------------------------------------------------------------


@torch_op("softmax_forward", lambda q, *_: (q.new_empty(q.shape), rows_like(q)))
def softmax_forward(q: Tensor, k: Tensor, v: Tensor, window: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return (o [B, T, H, X], lse [B, H, T] float32 in units of log 2) by the Triton kernels; both have gradients.

    Query i stands at position offset + i among the keys and sees those up to it.

    Args:
        q: Queries [B, T, H, X], scaled so that weights are 2^(q·k - lse) (`in_log2`).
        k: Keys [B, TK, J, X].
        v: Values, of k's shape.
        window: Attention window in keys, 0 for none.
        offset: Position of the first query among the keys; the number of keys or more shows every key to every query.
    """
    args = (q.contiguous(), k.contiguous(), v.contiguous())
    return load_kernels(__package__).softmax_forward(*args, window=window or None, offset=offset)


@torch_op("softmax_backward", lambda g_o, g_lse, q, k, v, *_: empty_like(q, k, v))
def softmax_backward(
    g_o: Tensor, g_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scaled q, k and v from those of o and lse, by the Triton kernels.

    o and lse are the results of `softmax_forward`, the other arguments its inputs.
    """
    args = (x.contiguous() for x in (g_o, g_lse, q, k, v, o, lse))
    return load_kernels(__package__).softmax_backward(*args, window=window or None, offset=offset)


differentiate(softmax_forward, softmax_backward, keep_inputs(3), results=2)


@torch_op("log_sum", lambda q, *_: (rows_like(q), q.new_empty(q.shape)))
def log_sum(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return (lse [B, H, T] of every query over every key, weighted mean key [B, T, H, X]).

    lse is float32 in units of log 2; there is no causal mask. The mean, sum_j 2^(q·k_j - lse) k_j in q's dtype, is the
    gradient of lse by q, so the backward needs no product at all. Only lse has a gradient, and only by q.

    Args:
        q: Queries [B, T, H, X], scaled so that weights are 2^(q·k - lse).
        k: Keys [B, R, J, X].

    Raises:
        ValueError: k requires a gradient.
    """
    k = k.contiguous()
    o, lse = load_kernels(__package__).softmax_forward(q.contiguous(), k, k, window=None, offset=k.shape[1])
    return lse, o


def _save_log_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[1]:
        raise ValueError("log_sum is not differentiable in k; pass k.detach()")
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _log_sum_gradients(ctx: Any, g_lse: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (mean,) = ctx.saved_tensors
    return (g_lse.transpose(1, 2).unsqueeze(-1) * mean).to(mean.dtype), None


log_sum.register_autograd(_log_sum_gradients, setup_context=_save_log_sum)
