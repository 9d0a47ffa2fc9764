"""PaTH attention: a Householder map per token transforms the query on its way back to each key.

See docs/reference/mechanisms.md, "PaTH attention". B batch, T length, H query heads, J KV heads, X head size, N chunks of C
tokens, M queries of a block, S the keys in its reach.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...custom_ops import differentiate, empty_like, keep_inputs, torch_op
from ...dispatch import (
    BackendChoice,
    checked_backend,
    compile_time_constant,
    is_torch_only,
    self_test,
    self_test_failure,
    version,
    why_no_fla,
)
from ...fla_configs import path_configs, pin_configs
from ...norms import statistics_dtype
from ...shapes import check_qkv, check_window
from ..scored import QueryBlock, scored_attention

CHUNK = 64
"""Tokens whose maps are combined into one."""
SIZES = (16, 32, 64, 128)
"""Head sizes that fla has kernels for."""


def path_attention(
    q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, w_BTJX: Tensor, beta_BTJ: Tensor, *, scale: float | None = None,
    window: int | None = None, query_block: int | None = None, chunk: int = CHUNK, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax of scale q_iᵀ A_i ... A_{j+1} k_j over the visible keys, times v: [B, T, H, X] of q's dtype.

    A_t = I - beta_t w_t w_tᵀ is the map of token t; a key's own map is not applied to it. Causal and differentiable.

    Args:
        q_BTHX: Queries; head h uses KV head h // (H / J).
        k_BTJX: Keys, of q's dtype.
        v_BTJX: Values, of q's dtype.
        w_BTJX: Directions of unit length, which is not checked, of any float dtype.
        beta_BTJ: Strengths in (0, 2), of any float dtype.
        scale: Factor of the products; None is 1/sqrt(X).
        window: Number of keys that a query sees, its own included; None for all earlier keys.
        query_block: Queries that "torch" scores at a time; None: 1024.
        chunk: Tokens whose maps "torch" combines.
        backend: "fla" (CUDA, 16 bits, no window shorter than T) or "torch"; None: `choose_backend`.

    Raises:
        ValueError: Shapes or dtypes disagree, the window is below 1, or "fla" is given a window shorter than T.
    """
    b, t, h, j, d = check_qkv(q_BTHX, k_BTJX, v_BTJX)
    check_window(window)
    if w_BTJX.shape != k_BTJX.shape or beta_BTJ.shape != (b, t, j):
        raise ValueError(
            f"k has shape {tuple(k_BTJX.shape)}, but w {tuple(w_BTJX.shape)}, beta {tuple(beta_BTJ.shape)}"
        )
    scale = d**-0.5 if scale is None else scale
    if window is not None and window >= t:
        window = None
    backend = (
        checked_backend(backend, "fla")
        or choose_backend(q_BTHX.device, q_BTHX.dtype, d, windowed=window is not None).backend
    )
    if backend == "fla":
        if window is not None:
            raise ValueError("backend fla does not support a window; use backend torch")
        return fla_forward(q_BTHX, k_BTJX, v_BTJX, w_BTJX.float(), beta_BTJ.float(), scale)
    maps = _HouseholderMaps(k_BTJX, w_BTJX, beta_BTJ, min(chunk, t), statistics_dtype(q_BTHX.dtype))

    def logits(span: QueryBlock) -> Tensor:
        return maps.scores(q_BTHX[:, span.queries], span) * scale

    return scored_attention(v_BTJX, h, logits, window=window, query_block=query_block)


class _HouseholderMaps:
    """Products of the maps of each chunk, A_last ... A_first = I - Wᵀ U, and of those after each key of the chunk.

    The last chunk is padded by tokens without a map.
    """

    def __init__(self, k_BTJX: Tensor, w_BTJX: Tensor, beta_BTJ: Tensor, chunk: int, dtype: torch.dtype) -> None:
        """Compute the products of maps of all chunks by one triangular solve, in `dtype`.

        Args:
            k_BTJX: Keys.
            w_BTJX: Directions of unit length.
            beta_BTJ: Strengths.
            chunk: Tokens of a chunk, at least 1.
            dtype: float32 or float64.
        """
        self.chunk = chunk
        self.w, self.k, beta = (self._chunks(x.to(dtype)) for x in (w_BTJX, k_BTJX, beta_BTJ.unsqueeze(-1)))
        scaled = beta * self.w
        # behind[t, j] = beta_t w_t . k_j for t > j: a key's own map is not applied to it
        behind = (scaled @ self.k.mT).tril(-1)
        solved = torch.linalg.solve_triangular(
            (scaled @ self.w.mT).tril(-1), torch.cat([scaled, behind], -1), upper=False, unitriangular=True
        )
        self.u, self.moved_keys = solved.split([self.w.shape[-1], chunk], -1)

    def _chunks(self, x_BTJX: Tensor) -> Tensor:
        """[B, J, N, C, X]; the tokens added at the end have no map."""
        missing = -x_BTJX.shape[1] % self.chunk
        return functional.pad(x_BTJX, (0, 0, 0, 0, 0, missing)).transpose(1, 2).unflatten(2, (-1, self.chunk))

    def scores(self, q_BMHX: Tensor, span: QueryBlock) -> Tensor:
        """Return the products of queries and keys through the maps, [B, H, M, S], unscaled, in the maps' dtype.

        Runs from the last chunk back to the first; q is transformed by each chunk that it passes. Keys after the query
        get arbitrary finite numbers.

        Args:
            q_BMHX: Queries of the block.
            span: The block of M queries and its S keys.
        """
        kv_heads, queries = self.w.shape[1], span.stop - span.start
        q = q_BMHX.to(self.w.dtype).transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)
        chunk_scores = []
        position = torch.arange(span.start, span.stop, device=q.device).repeat(q.shape[2] // queries)
        for n in range((span.stop - 1) // self.chunk, span.first // self.chunk - 1, -1):
            first = n * self.chunk
            token = torch.arange(first, first + self.chunk, device=q.device)
            along = (q @ self.w[:, :, n].mT).masked_fill(token > position[:, None], 0.0)
            scores = q @ self.k[:, :, n].mT - along @ self.moved_keys[:, :, n]
            q = q - along @ self.u[:, :, n]
            chunk_scores.append(scores[..., max(0, span.first - first) : span.stop - first])
        return torch.cat(chunk_scores[::-1], -1).unflatten(2, (-1, queries)).flatten(1, 2)


@compile_time_constant
def choose_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int, *, windowed: bool) -> BackendChoice:
    """Return the backend of `path_attention`, "fla" or "torch", with the reason.

    "fla" must pass a self-test, forward and backward, which the first call for a case runs.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations; "fla" takes 16 bits.
        head_dim: Head size; "fla" takes 16, 32, 64 and 128.
        windowed: True for a window shorter than T, which gives "torch".
    """
    device = torch.device(device)
    why = _why_no_fla(device, dtype, head_dim, windowed)
    why = why or self_test_failure("path attention", _error, device, dtype, head_dim, "fla")
    return BackendChoice("fla", f"fla {version('fla-core')}") if why is None else BackendChoice("torch", why)


def _why_no_fla(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> str | None:
    """Return the reason why fla's kernels cannot run on such tensors, or None when they can; runs no self-test.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the activations.
        head_dim: Head size.
        windowed: True for a window shorter than T, which fla does not take.
    """
    if is_torch_only():
        return "train.kernels is torch"
    why = why_no_fla(device, dtype)
    if why is None and windowed:
        why = "fla does not support a window"
    if why is None and head_dim not in SIZES:
        why = f"fla needs a head_dim of {', '.join(map(str, SIZES))}, got {head_dim}"
    return why


def _drawn_maps(head_dim: int, draw: torch.Generator) -> list[Tensor]:
    w = functional.normalize(torch.randn(1, 131, 1, head_dim, generator=draw), dim=-1)
    return [w, 2 * torch.rand(1, 131, 1, generator=draw)]


_error = self_test(path_attention, 131, _drawn_maps)


@torch_op("path_fla_forward", lambda q, *_: q.new_empty(q.shape))
def fla_forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Return the output of flash-linear-attention's kernels, [B, T, H, X] in q's dtype.

    They compile at their first call. Differentiable in the five tensors.

    Args:
        q: Queries [B, T, H, X] in 16 bits.
        k: Keys [B, T, J, X].
        v: Values [B, T, J, X].
        w: Directions, float32 [B, T, J, X].
        beta: Strengths, float32 [B, T, J].
        scale: Factor of the products, in natural units.
    """
    with torch.no_grad():
        return _fla([q, k, v, w, beta], scale)


@torch_op("path_fla_backward", lambda g_o, *tensors: empty_like(*tensors[:5]))
def fla_backward(
    g_o: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, w and beta, in their dtypes, from g_o, that of the output.

    The forward runs again, so that only fla's public function is called. q, k, v, w, beta and scale are the inputs of
    `fla_forward`.
    """
    args = [x.detach().requires_grad_() for x in (q, k, v, w, beta)]
    with torch.enable_grad():
        grads = torch.autograd.grad(_fla(args, scale), args, g_o.contiguous())
    dq, dk, dv, dw, d_beta = (g.to(x.dtype).contiguous() for g, x in zip(grads, args, strict=True))
    return dq, dk, dv, dw, d_beta


def _fla(tensors: list[Tensor], scale: float) -> Tensor:
    """Return the output of fla's PaTH attention of [q, k, v, w, beta], contiguous and in q's dtype.

    Restricts fla's autotuners (`pin_configs`). Differentiable where gradients are enabled.

    Args:
        tensors: [q [B, T, H, X], k and v [B, T, J, X] in 16 bits, w [B, T, J, X] and beta [B, T, J] in float32].
        scale: Factor of the products.
    """
    from fla.ops.path_attn import parallel_path_attn

    pin_configs(path_configs, tensors[0].size(-1))
    o: Tensor = parallel_path_attn(*(x.contiguous() for x in tensors), scale=scale)[0]
    return o.to(tensors[0].dtype).contiguous()


differentiate(fla_forward, fla_backward, keep_inputs(5, 1))
