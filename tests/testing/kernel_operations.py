"""Operations with kernels, as the contract suite (tests/kernels/test_contract.py) tries them: inputs, oracles, sizes, tolerances."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from atma_sweep.kernels.attention.contextual import op as contextual
from atma_sweep.kernels.attention.forgetting import op as forgetting
from atma_sweep.kernels.attention.path.op import path_attention
from atma_sweep.kernels.attention.polar import op as polar
from atma_sweep.kernels.attention.polar.reference import polar_attention_reference
from atma_sweep.kernels.attention.polysketch import op as polysketch
from atma_sweep.kernels.attention.relative import op as relative
from atma_sweep.kernels.attention.scored import scored_reference
from atma_sweep.kernels.attention.softmax import op as softmax_ops
from atma_sweep.kernels.attention.softmax.op import softmax_attention, softmax_attention_reference
from atma_sweep.kernels.attention.threshold import op as threshold
from atma_sweep.kernels.attention.wall import op as wall
from atma_sweep.kernels.channelwise_delta.op import channelwise_delta, channelwise_delta_reference
from atma_sweep.kernels.conv import op as conv
from atma_sweep.kernels.conv.op import canon, causal_conv, causal_conv_reference, gated_causal_conv
from atma_sweep.kernels.cross_entropy import op as cross_entropy
from atma_sweep.kernels.features import sketch_draws
from atma_sweep.kernels.gated_delta import torch_op as gated_delta_ops
from atma_sweep.kernels.gated_delta.op import choose_backend as choose_delta
from atma_sweep.kernels.gated_delta.op import gated_delta, gated_delta_reference
from atma_sweep.kernels.gates import squared_relu_gate, squared_relu_gate_reference, swish_gate, swish_gate_reference
from atma_sweep.kernels.norms import rms_norm, rms_norm_reference
from atma_sweep.kernels.rotary import apply_rotary_reference, rotate
from graded import NEAR, NEAR_GRADIENT, normal
from tiers import long_form
from tolerances import rounding_bound
from torch import Tensor
from torch.nn import functional

Case = tuple[dict[str, Any], dict[str, Any]]
"""What inputs are drawn of, and options of the operation."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation and what it promises."""

    function: Callable[..., Any]
    inputs: Callable[..., list[Tensor]]
    """Float32 leaves of a case."""
    exact: Callable[..., Any]
    """Naive oracle of the same arguments, in float64."""
    cases: Sequence[Case]
    """Odd sizes, compared with float64."""
    near: float = NEAR
    gradient: float = NEAR_GRADIENT
    steepness: Callable[[dict[str, Any]], float] = lambda sizes: 1.0
    """Factor of both tolerances, of what inputs are drawn of."""
    alone: float | None = None
    """As `gradient`, where a window of one key leaves nothing but rounding."""
    neighbours: Case
    """The case in which inputs lie between NaN, and in other strides."""
    strided: int = 3
    """Inputs that may come in other strides, the first of them all; 0 for none."""
    batched: int = 3
    """Inputs with a row for each text, around which NaN may lie."""
    ops: Callable[[], dict[str, tuple[Any, tuple[Any, ...]]]]
    """Custom ops with small arguments."""
    wrong: Sequence[tuple[Callable[[list[Tensor]], list[Tensor]], dict[str, Any], str]] = ()
    """Changed inputs, options, and what the ValueError says."""
    narrow: int = 3
    """Inputs that come in 16 bits where the kernels compute so; the others stay float32."""
    condition: float = 1.0
    """Factor by which gradients enlarge roundings to 16 bits: those of gates are sums of what cancels."""
    half: Case | None = None
    """The case that is tried in float16, if another than `neighbours`."""
    gpu: Sequence[Case] = ()
    gpu_near: float = 1e-2
    """Largest error there in bfloat16, in the norm."""
    gpu_result: float | None = None
    """The same of the first result, if it is another."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    """Types that the kernels take."""
    choose: Callable[..., Any] | None = None
    """(dtype, head size, options) -> the choice on a GPU."""


def detached(*tensors: Tensor) -> list[Tensor]:
    return [x.detach() for x in tensors]


def qkv(t: int, h: int, j: int, b: int, d: int) -> list[Tensor]:
    return [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j))]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operation's own path in torch, which another test compares with loops."""
    return lambda *args, **options: function(*args, backend="torch", **options)


def without_keys(args: list[Tensor]) -> list[Tensor]:
    return [args[0], args[1][:, 1:], args[2][:, 1:], *args[3:]]


def with_keys_in_bfloat16(args: list[Tensor]) -> list[Tensor]:
    return [args[0], args[1].bfloat16(), *args[2:]]


def replaced(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda args: [change(x) if i == index else x for i, x in enumerate(args)]


def of_attention(*more: tuple[Callable[[list[Tensor]], list[Tensor]], dict[str, Any], str]) -> list[Any]:
    """Inputs that every attention refuses, of inputs of 13 tokens, 4 heads on 2, size 16."""
    return [
        (without_keys, {}, r"\(1, 13, 4, 16\).*\(1, 12, 2, 16\)"),
        (with_keys_in_bfloat16, {}, r"float32.*bfloat16"),
        (lambda args: args, {"window": 0}, r"at least 1 .*got 0"),
        (lambda args: [args[0], *(x[:, :, [0, 0, 1]] for x in args[1:3]), *args[3:]], {}, "3 KV heads must divide 4"),
        (replaced(2, lambda x: x[..., :4]), {}, r"\(1, 13, 2, 16\).*\(1, 13, 2, 4\)"),
        *more,
    ]


# --- attention of q, k, v and more -----------------------------------------------------------------------------------


def softmax_inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 16) -> list[Tensor]:
    return leaves(qkv(t, h, j, b, d))


def polar_inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 16, scale: float = 1.0) -> list[Tensor]:
    """q, k, v and raw parameters of heads."""
    drawn = [*qkv(t, h, j, b, d), *(normal(h, seed=seed) for seed in (3, 4, 5, 6)), normal(h, d, seed=7)]
    drawn[0] *= scale
    return leaves(drawn)


def forgetting_inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 16) -> list[Tensor]:
    """q, k, v and gates of which some nearly close."""
    return leaves([*qkv(t, h, j, b, d), functional.logsigmoid(2 * normal(b, t, h, seed=3))])


def wall_inputs(t: int, h: int, j: int, p: int, *, b: int = 1, d: int = 16) -> list[Tensor]:
    """q, k, v and gates between 0 and -0.86, of which some stay open for long and some close at once."""
    return leaves([*qkv(t, h, j, b, d), -0.86 * torch.sigmoid(3 * normal(b, t, p, d, seed=3) - 2)])


def relative_inputs(t: int, h: int, j: int, reach: int, *, b: int = 1, d: int = 16) -> list[Tensor]:
    """q, k, v and a number for each head and distance."""
    return leaves([*qkv(t, h, j, b, d), normal(h, reach + 1, seed=3)])


def contextual_inputs(t: int, h: int, j: int, positions: int, *, b: int = 1, d: int = 16, shut: float = 0.0
) -> list[Tensor]:  # fmt: skip
    """q, k, v and vectors; `shut` takes so much off every score, so that gates close and positions lie farther back."""
    drawn = qkv(t, h, j, b, d)
    if shut:
        drawn[0][..., 0], drawn[1][..., 0] = shut, -shut
    return leaves([*drawn, 0.3 * normal(positions, d, seed=3)])


def drawn_threshold(t: int, h: int, j: int, *, b: int = 1, d: int = 8) -> list[Tensor]:
    """q, k, v and the log decay, float32 numbers in float64."""
    drawn = [*qkv(t, h, j, b, d), functional.logsigmoid(normal(b, t, h, seed=3))]
    return [x.double().requires_grad_() for x in drawn]


MARGIN = 1e-2
"""No score of `threshold_inputs` is nearer to 0: survival is a sign, which roundings must not change."""


def threshold_inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 16) -> list[Tensor]:
    """Float32 inputs whose scores are odd numbers of steps from 0, give or take less than one."""
    q, k, v, decay = (x.detach().float() for x in drawn_threshold(t, h, j, b=b, d=d))
    for x in (q, k):
        x[..., :7] = x[..., :7].sign() * 0.3 * d**0.25
        x[..., 7:] = x[..., 7:].clamp(-2, 2) * (0.15 * d**0.25 / (d - 7) ** 0.5)
    scores = torch.einsum("bthx,bshx->bhts", q, k.repeat_interleave(h // j, 2)) * d**-0.5
    assert scores.abs().min() > MARGIN
    return leaves([q, k, v, decay])


def path_inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 8) -> list[Tensor]:
    """q, k, v, directions of unit length, and betas of which some reflect and some do nothing."""
    directions = functional.normalize(normal(b, t, j, d, seed=3), dim=-1)
    return leaves([*qkv(t, h, j, b, d), directions, 2 * torch.sigmoid(3 * normal(b, t, j, seed=4))])


Pair = Callable[[int, int], Tensor]


def forgetting_pair(q: Tensor, k: Tensor, scale: float, gate: Tensor) -> Pair:
    """Every gate after the key's, up to the query's own, is added to their score."""
    return lambda i, j: scale * (q[:, i] * k[:, j]).sum(-1) + gate[:, j + 1 : i + 1].sum(1)


def wall_pair(q: Tensor, k: Tensor, scale: float, gate: Tensor) -> Pair:
    """Every channel of a product keeps what the gates after the key's leave, up to the query's own."""
    gate = gate.repeat_interleave(q.shape[2] // gate.shape[2], 2)
    return lambda i, j: scale * (q[:, i] * k[:, j] * gate[:, j + 1 : i + 1].sum(1).exp()).sum(-1)


def relative_pair(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Pair:
    return lambda i, j: scale * (q[:, i] * k[:, j]).sum(-1) + bias[:, min(i - j, bias.shape[1] - 1)]


def path_pair(q: Tensor, k: Tensor, scale: float, w: Tensor, beta: Tensor) -> Pair:
    """Between every key and every query the product of whole matrices."""
    w, beta = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (w, beta))
    maps = torch.eye(w.shape[-1], dtype=q.dtype) - beta[..., None, None] * w[..., :, None] * w[..., None, :]

    def pair(i: int, j: int) -> Tensor:
        turned = q[:, i]
        for u in range(i, j, -1):
            turned = torch.einsum("bhx,bhxy->bhy", turned, maps[:, u])
        return scale * (turned * k[:, j]).sum(-1)

    return pair


def loop(pair: Callable[..., Pair]) -> Callable[..., Tensor]:
    """An attention one query and one key at a time."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, scale: float | None = None, window: int | None = None
    ) -> Tensor:  # fmt: skip
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        return scored_reference(q, k, v, pair(q, keys, scale, *more), window=window)

    return attention


def contextual_pair(q: Tensor, k: Tensor, scale: float, vectors: Tensor) -> Pair:
    """Gates of all keys from the key to the query are added up, then the vectors of the two whole positions are mixed."""

    def pair(i: int, j: int) -> Tensor:
        score_BUH = scale * (q[:, i, None] * k[:, j : i + 1]).sum(-1)
        position = score_BUH.sigmoid().sum(1).clamp(max=len(vectors) - 1)
        low, high = (vectors[position.long()] for position in (position.detach().floor(), position.detach().ceil()))
        mixed = low + (position - position.detach().floor())[..., None] * (high - low)
        return score_BUH[:, 0] + (q[:, i] * mixed).sum(-1)

    return pair


def threshold_pair(q: Tensor, k: Tensor, scale: float, decay: Tensor) -> Pair:
    """Keys with a positive score survive; the survivors from the key to the query, both included, are counted."""

    def pair(i: int, j: int) -> Tensor:
        score_BUH = scale * (q[:, i, None] * k[:, j : i + 1]).sum(-1)
        met_BH = (score_BUH > 0).sum(1)
        return torch.where(score_BUH[:, 0] > 0, score_BUH[:, 0] + met_BH * decay[:, i], -torch.inf)

    return pair


def threshold_loop(*args: Tensor, scale: float | None = None, window: int | None = None, empty: str = "zero") -> Tensor:
    """Rows without a survivor read 0, or the mean of the values that they see."""
    q, k, v, _ = args
    y = loop(threshold_pair)(*args, scale=scale, window=window)
    if empty == "zero":
        return y
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    rows = []
    for i in range(q.shape[1]):
        seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
        score_BSH = (1.0 if scale is None else scale) * (q[:, i, None] * keys[:, seen]).sum(-1)
        rows.append(torch.where((score_BSH > 0).any(1)[..., None], y[:, i], values[:, seen].mean(1)))
    return torch.stack(rows, 1)


def sketched(
    q: Tensor, k: Tensor, v: Tensor, *, degree: int = 4, columns: int = 3, block: int = 20, scale: float | None = None,
    window: int | None = None, backend: str = "torch",
) -> Tensor:  # fmt: skip
    """PolySketch attention with fixed directions of its own."""
    draws = sketch_draws(k.shape[2], k.shape[3], columns, degree, torch.Generator().manual_seed(9)).to(k.device)
    return polysketch.polysketch_attention(
        q, k, v, draws if k.dtype != torch.float64 else draws.double(), block=block, scale=scale, window=window,
        backend=backend,
    )  # fmt: skip


def sketched_by_pairs(
    q: Tensor, k: Tensor, v: Tensor, *, degree: int = 4, columns: int = 3, block: int = 20, scale: float | None = None
) -> Tensor:
    """The same from a matrix of the weights of all pairs."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    draws = sketch_draws(k.shape[2], k.shape[3], columns, degree, torch.Generator().manual_seed(9)).to(k)
    k, v, draws = (x.repeat_interleave(q.shape[2] // x.shape[axis], axis) for x, axis in ((k, 2), (v, 2), (draws, 1)))
    exact = (scale * torch.einsum("bthx,bshx->bhts", q, k)) ** degree
    products = (torch.einsum("bthx,khxr->kbthr", x, draws).prod(0) for x in (q, k))
    rough = (abs(scale) ** (degree / 2) / columns * torch.einsum("bthr,bshr->bhts", *products)) ** 2
    blocks = torch.arange(q.shape[1], device=q.device) // block
    weights = torch.where(blocks[:, None] == blocks, exact, rough).tril()
    return torch.einsum("bhts,bshx->bthx", weights / (1 + weights.sum(-1, keepdim=True)), v)


# --- operations in torch, in float64 ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """An operation in torch, and a naive oracle of the same inputs and of those options that it has."""

    function: Callable[..., Any]
    exact: Callable[..., Any]
    inputs: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    near: float = 1e-13
    gradient: float = 1e-12


def delta_inputs(
    t: int, h: int = 4, j: int = 2, *, b: int = 2, d: int = 5, channels: bool = False, kind: str = "plain", first: bool = False
) -> list[Tensor]:  # fmt: skip
    """q, k, v, log gamma a head (or a channel of each), beta, and with `first` a state.

    `kind` "fast": half of the gates close for long, "kept": none does, "zeros": some keys and queries are zero.
    """
    q, k, v = qkv(t, h, j, b, d)
    gate, beta = normal(b, t, h, *([d] if channels else []), seed=3), normal(b, t, h, seed=4).sigmoid()
    gamma = functional.logsigmoid(gate + 3.9) * (1e-7 if kind == "kept" else 1.0)
    if kind == "fast":
        gamma = torch.where(gate > 0, -60.0, gamma)
    if kind == "zeros":
        k[:, 3:9], q[:, 5], k[:, -1] = 0, 0, 0
    return leaves([q, k, v, gamma, beta, *([normal(b, h, d, d, seed=5)] if first else [])])


def losses_inputs(n: int, d: int, v: int, *, scale: float = 1.0) -> list[Tensor]:
    """Hidden states, the head's matrix and its bias."""
    return leaves([normal(n, d, seed=1) * scale, normal(v, d, seed=2), normal(v, seed=3)])


def targets_of(n: int, v: int) -> Tensor:
    """A token for each of n, among them the first and the last word."""
    targets = torch.randint(v, (n,), generator=torch.Generator().manual_seed(4))
    targets[0], targets[-1] = 0, v - 1
    return targets


def of_targets(function: Callable[..., Tensor], *, summed: bool = False) -> Callable[..., Tensor]:
    """A cross-entropy as a function of what learns; `summed` adds single losses up."""

    @functools.wraps(function)
    def losses(h: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
        loss = function(h, w, b, targets_of(len(h), len(w)).to(h.device), **options)
        return loss.sum() if summed else loss

    return losses


def turned(x: Tensor, *, kind: Any, offset: int) -> Tensor:
    positions = torch.arange(offset, offset + x.shape[1]).expand(len(x), -1) if offset else None
    return rotate(x, kind, 1024.0, positions)


def turned_exactly(x: Tensor, *, kind: Any, offset: int) -> Tensor:
    return apply_rotary_reference(x, kind, 1024.0, offset)


SMALL = {"b": 2, "d": 5}
FORMULAS = [
    Formula(function, exact, inputs(13, 4, 2, *more, **SMALL), options, *near)
    for function, exact, inputs, near, tried in (
        (softmax_attention, softmax_attention_reference, softmax_inputs, (), [
            ((), {"window": window, "scale": scale, "query_block": block})
            for window in (None, 1, 4, 7, 13, 32) for scale, block in ((None, 5), (0.12, 1024), (0.12, 5))
        ]),
        (polar.polar_attention, polar_attention_reference, polar_inputs, (1e-12, 1e-10), [
            ((), {"window": window, "query_block": block}) for window in (None, 4, 7, 13, 32) for block in (5, 1024)
        ] + [((), {"n_eff_floor": 0.3})]),
        (forgetting.forgetting_attention, loop(forgetting_pair), forgetting_inputs, (), [
            ((), {}), ((), {"window": 1, "scale": 0.4, "query_block": 5}), ((), {"window": 4, "query_block": 5}),
            ((), {"window": 32, "scale": 0.4, "query_block": 3}),
        ]),
        (wall.wall_attention, loop(wall_pair), wall_inputs, (), [
            ((4,), {}), ((2,), {"window": 1, "scale": 0.4, "query_block": 5}), ((4,), {"window": 4, "query_block": 5}),
            ((2,), {"window": 32, "scale": 0.4, "query_block": 3}),
        ]),
        (relative.relative_attention, loop(relative_pair), relative_inputs, (), [
            ((4,), {}), ((30,), {"window": 5, "scale": 0.4, "query_block": 5}), ((1,), {"window": 1, "query_block": 3}),
        ]),
        (contextual.contextual_attention, loop(contextual_pair), contextual_inputs, (1e-13, 1e-11), [
            ((4,), {"window": window, "scale": scale, "query_block": block})
            for window, scale, block in ((None, None, 1), (1, 0.9, 4), (4, None, 4), (4, 0.9, None), (32, 0.9, 4))
        ]),
        (threshold.threshold_attention, threshold_loop, lambda *sizes, **more: drawn_threshold(*sizes, **more | {"d": 8}), (), [
            ((), {}), ((), {"window": 4, "scale": 0.7, "empty": "uniform", "query_block": 5}),
            ((), {"window": 1, "empty": "uniform", "query_block": 1}), ((), {"window": 40, "scale": -0.3, "query_block": 12}),
        ]),
        (path_attention, loop(path_pair), path_inputs, (), [
            ((), {}), ((), {"scale": 0.4, "query_block": 5, "chunk": 4}), ((), {"window": 4, "query_block": 5, "chunk": 3}),
            ((), {"window": 32, "scale": 0.4, "query_block": 3, "chunk": 1}),
        ]),
    )
    for more, options in tried
]  # fmt: skip
FORMULAS += [
    *(Formula(gated_delta, gated_delta_reference, delta_inputs(83), {"chunk": chunk, "return_state": True}, 1e-12, 1e-10)
      for chunk in (1, 16, 64, 200)),
    *(Formula(channelwise_delta, channelwise_delta_reference, delta_inputs(t, d=8, channels=True), {"chunk": chunk}, 1e-12, 1e-10)
      for t, chunk in ((1, 16), (23, 5), (16, 16), (9, 64))),
    *(Formula(causal_conv, causal_conv_reference, leaves([normal(2, t, 7), normal(7, taps, seed=1)]), {"residual": residual})
      for t in (1, 2, 3, 17) for taps in (1, 3, 4, 5) for residual in (False, True)),
    Formula(gated_causal_conv, lambda x, w: gated_conv_exact(x, w), leaves([normal(2, 9, 12), normal(4, 5, seed=1)])),
    Formula(canon, lambda x, w: canon_exact(x, w, norm=False), leaves([normal(2, 9, 2, 2), normal(4, 5, seed=1)]), {"norm": False}),
    *(Formula(turned, turned_exactly, [normal(2, 9, 3, 16)], {"kind": kind, "offset": offset}, 1e-12)
      for kind in ("full", "half-truncated") for offset in (0, 5)),
    *(Formula(rms_norm, rms_norm_reference, [normal(3, 4, 7), *weight]) for weight in ([], [normal(7, seed=1)])),
    Formula(squared_relu_gate, squared_relu_gate_reference, [normal(3, 5, 14)]),
    Formula(swish_gate, swish_gate_reference, [normal(3, 5, 14)]),
    *(Formula(of_targets(function), of_targets(cross_entropy.linear_cross_entropy_reference, summed=summed),
              losses_inputs(23, 6, 37, scale=3), {"cap": cap, "chunk": chunk}, 1e-12, 1e-12)
      for function, summed in ((cross_entropy.linear_cross_entropy, False), (cross_entropy.linear_cross_entropy_sum, True))
      for cap in (15.0, math.inf) for chunk in (1, 7, 8192)),
]  # fmt: skip


DIFFERENCES: list[tuple[Callable[..., Any], list[Tensor], dict[str, Any]]] = [
    *((polar.polar_attention, polar_inputs(9, 4, 2, d=5), {"window": window, "query_block": 6}) for window in (None, 4)),
    (polar.polar_attention, polar_inputs(7, 4, 2, d=5), {"n_eff_floor": 0.3}),
    (forgetting.forgetting_attention, forgetting_inputs(5, 2, 1, d=2), {"window": 4, "query_block": 2}),
    (wall.wall_attention, wall_inputs(5, 2, 1, 1, d=2), {"window": 4, "query_block": 2}),
    (path_attention, path_inputs(5, 2, 1, d=3), {"window": 4, "query_block": 3, "chunk": 2}),
    # rows with and without survivors; no difference carries a score over 0
    (threshold.threshold_attention, threshold_inputs(5, 2, 1, d=8), {"window": 3, "empty": "uniform"}),
    (threshold.threshold_attention, threshold_inputs(5, 2, 1, d=8), {"window": None, "empty": "zero"}),
    (gated_delta, delta_inputs(7), {"chunk": 4, "return_state": True}),
    (channelwise_delta, delta_inputs(5, 2, 1, b=1, d=8, channels=True), {"chunk": 3}),
    (of_targets(cross_entropy.linear_cross_entropy_sum), losses_inputs(11, 5, 37), {"cap": 3.0, "chunk": 4}),
    (of_targets(cross_entropy.linear_cross_entropy_sum), losses_inputs(11, 5, 37), {"cap": math.inf, "chunk": 4}),
    (squared_relu_gate, [normal(3, 6)], {}),
    (swish_gate, [normal(3, 6)], {}),
]  # fmt: skip
"""Operations in torch whose gradients are compared with finite differences."""


def polar_exact(*args: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Compute one query at a time, which for long texts would take minutes."""
    if args[0].shape[1] <= 127:
        return polar_attention_reference(*args, window=window)
    return polar.polar_attention(*args, window=window, backend="torch")


def softmax_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    q, k, v = softmax_inputs(5, 4, 2)
    o, lse = detached(*softmax_ops.softmax_forward(q, k, v, 3, 0))
    return {
        "forward": (softmax_ops.softmax_forward, (q, k, v, 3, 0)),
        "backward": (softmax_ops.softmax_backward, (o, lse, *detached(q, k, v), o, lse, 3, 0)),
        "log_sum": (softmax_ops.log_sum, (q, k.detach())),
    }


def polar_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    parameters = [normal(5, 4), normal(4).exp(), normal(4, 16)]
    args = [*softmax_inputs(5, 4, 2), *leaves(parameters)]
    c, mag, *rows = detached(*polar.polar_forward(*args, 3, 1e-6, True, "triton"))
    return {
        "forward": (polar.polar_forward, (*args, 3, 1e-6, True, "triton")),
        "backward": (polar.polar_backward, (c, mag, *detached(*args), c, *rows, 3, "triton")),
    }


def forgetting_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    args = forgetting_inputs(5, 4, 2)
    results = detached(*forgetting.forgetting_forward(*args, 0.7, 3, "triton"))
    return {
        "forward": (forgetting.forgetting_forward, (*args, 0.7, 3, "triton")),
        "backward": (forgetting.forgetting_backward, (results[0], *detached(*args), *results, 0.7, 3, "triton")),
    }


def wall_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    cases = {}
    for p in (1, 2):
        args = wall_inputs(5, 2, 1, p)
        o, lse, q_, k_, edges = detached(*wall.wall_forward(*args, 0.7, 3, "triton"))
        rest = (o, q_, k_, *detached(*args[2:]), o, lse, edges, 0.7, 3)
        cases |= {
            f"forward {p}": (wall.wall_forward, (*args, 0.7, 3, "triton")),
            f"backward {p}": (wall.wall_backward, rest),
        }
    return cases


def extra_input_op_cases(
    forward: Any, backward: Any, args: list[Tensor]
) -> Callable[[], dict[str, tuple[Any, tuple[Any, ...]]]]:
    """Custom ops of an attention with a fourth input."""

    def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
        o, lse = detached(*forward(*args, 0.3, 3))
        return {
            "forward": (forward, (*args, 0.3, 3)),
            "backward": (backward, (o, *detached(*args), o, lse, 0.3, 3)),
        }

    return cases


def polysketch_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    args, draws = softmax_inputs(5, 4, 2), normal(2, 2, 16, 3, seed=3)
    o, inverse = detached(*polysketch.polysketch_forward(*args, draws, 2, 0.7))
    return {
        "forward": (polysketch.polysketch_forward, (*args, draws, 2, 0.7)),
        "backward": (polysketch.polysketch_backward, (o, *detached(*args), draws, o, inverse, 2, 0.7)),
    }


# --- convolutions ---------------------------------------------------------------------------


def gated_conv_inputs(b: int, t: int, c: int, k: int) -> list[Tensor]:
    return leaves([normal(b, t, 3 * c, seed=1), normal(c, k, seed=2)])


def canon_inputs(b: int, t: int, h: int, d: int, k: int) -> list[Tensor]:
    return leaves([normal(b, t, h, d, seed=1), normal(h * d, k, seed=2)])


def gated_conv_exact(x_BTE: Tensor, w_CK: Tensor) -> Tensor:
    b, c, u = x_BTE.chunk(3, -1)
    return c * causal_conv_reference(b * u, w_CK)


def canon_exact(x_BTHD: Tensor, w_CK: Tensor, *, norm: bool) -> Tensor:
    # the weightless norm's epsilon is float32's in float32
    n = x_BTHD / torch.sqrt(x_BTHD.square().mean(-1, keepdim=True) + 1.1920928955078125e-07) if norm else x_BTHD
    return causal_conv_reference(n.flatten(2), w_CK, residual=True).view_as(x_BTHD)


def conv_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, w, heads = normal(2, 5, 12), normal(4, 3, seed=1), normal(2, 5, 2, 2, seed=2)
    convolved, filters, rows = leaves([x.clone(), w.clone(), heads.clone()])
    return {
        "gated forward": (conv.gated_conv_forward, (convolved, filters)),
        "gated backward": (conv.gated_conv_backward, (normal(2, 5, 4), x, w)),
        "canon forward": (conv.canon_forward, (rows, filters, True)),
        "canon backward": (conv.canon_backward, (heads, heads, w, True)),
    }


def sized(cases: Sequence[tuple[Any, ...]], *names: str, **options: Any) -> list[Case]:
    """Cases of a table whose last column is the window."""
    return [
        (dict(zip(names, sizes, strict=True)), {"window": window} | options) for *sizes, window in cases
    ]  # fmt: skip


SIZES = ("t", "h", "j")
POLAR_SIZES = [
    (1, 8, 2, None), (1, 4, 4, 4), (1, 3, 1, 1),
    (17, 8, 2, 67), (17, 4, 4, 4), (17, 4, 4, 67), (17, 3, 1, 17), (17, 4, 4, 1),
    (127, 8, 2, 100), (127, 8, 2, 1), (127, 8, 2, 127), (127, 4, 4, 100), (127, 3, 1, 4), (127, 3, 1, None),
    (257, 8, 2, 4), (257, 4, 4, None), (257, 3, 1, 1), (257, 3, 1, 100), (257, 4, 4, 257), (257, 3, 1, 307),
    (1000, 1, 1, None),
]  # fmt: skip
"""T, H, J and the window: every pair of heads with a length and with a window, and of T with a window shorter than T."""

ATTENTIONS = {
    "polar": Operation(
        function=polar.polar_attention, inputs=polar_inputs, exact=polar_exact,
        cases=[({"t": t, "h": h, "j": j, "b": 2 if t <= 127 and h < 8 else 1}, {"window": window})
               for t, h, j, window in (*POLAR_SIZES[::2], *long_form(*POLAR_SIZES[1::2]))], narrow=3, condition=4.0,
        neighbours=({"t": 45, "h": 2, "j": 1, "b": 2}, {"window": 20}),
        ops=polar_op_cases,
        wrong=of_attention((replaced(3, lambda x: x[:3]), {}, r"4 heads.*\(3,\)")),
    ),
    "softmax": Operation(
        function=softmax_attention, inputs=softmax_inputs, exact=softmax_attention_reference,
        cases=[({"t": t, "h": h, "j": j, "b": 2 if h < 8 else 1}, {"window": window, "scale": scale})
               for t, h, j, window in ((1, 3, 1, None), (17, 8, 2, 4), (17, 4, 4, 67), (127, 3, 1, None), (127, 8, 2, 100),
                                       (127, 4, 4, 1), (93, 3, 1, 93)) for scale in (None, 0.4)],
        neighbours=({"t": 45, "h": 2, "j": 1, "b": 2}, {"window": 20}),
        ops=softmax_op_cases, wrong=of_attention(),
    ),
    "forgetting": Operation(
        function=forgetting.forgetting_attention, inputs=forgetting_inputs, exact=by_torch(forgetting.forgetting_attention),
        cases=sized([(67, 4, 2, 29), (33, 3, 1, None), (1, 3, 1, None), (101, 4, 1, None), (127, 2, 2, 100)], *SIZES, scale=0.4)
        + sized([(45, 8, 2, 1)], *SIZES, scale=0.4),
        gradient=2e-5, alone=1e-4,
        strided=4, batched=4, condition=4.0,
        neighbours=({"t": 45, "h": 2, "j": 1}, {"window": 20}),
        ops=forgetting_op_cases,
        wrong=of_attention((replaced(3, lambda x: x[:, 1:]), {}, r"\(1, 13, 4, 16\).*\(1, 12, 4\)")),
        gpu=[({"t": 397, "h": 4, "j": 2, "b": 2}, {"window": window}) for window in (None, 150)], gpu_near=2e-2,
        choose=lambda dtype, d, options: forgetting.choose_backend("cuda", dtype, d, options["window"]),
    ),
    "wall": Operation(
        function=wall.wall_attention, inputs=wall_inputs, exact=by_torch(wall.wall_attention),
        cases=sized([(101, 4, 2, 2, 37), (1, 3, 1, 3, None), (130, 3, 1, 1, None), (150, 4, 1, 4, 100), (65, 2, 2, 2, 1),
                     (193, 2, 1, 2, None)], *SIZES, "p", scale=0.4),
        gradient=1e-4, strided=4, batched=4, narrow=4, dtypes=(torch.bfloat16,),
        neighbours=({"t": 70, "h": 2, "j": 1, "p": 1}, {"window": 20}),
        ops=wall_op_cases,
        wrong=of_attention(*(
            (replaced(3, change), {}, r"\(1, 13, 4, 16\), but log_gate \(1, ")
            for change in (lambda x: x[:, 1:], lambda x: x[:, :, :3], lambda x: x[..., 1:], lambda x: x[..., 0])
        )),
        gpu=[({"t": 397, "h": 4, "j": 2, "p": p, "b": 2}, {"window": window}) for p, window in ((4, None), (2, 150), (2, None))],
        gpu_near=2e-2, choose=lambda dtype, d, options: wall.choose_backend("cuda", dtype, d, 0.86, options["window"]),
    ),
    "threshold": Operation(
        function=threshold.threshold_attention, inputs=threshold_inputs, exact=by_torch(threshold.threshold_attention),
        cases=[({"t": t, "h": h, "j": j, "b": 2 if t < 70 else 1}, {"window": window, "empty": empty}) for t, h, j, window, empty in (
            (67, 2, 2, 34, "uniform"), (70, 2, 1, None, "zero"), (1, 3, 1, None, "zero"), (33, 4, 4, 1, "zero"),
            (97, 3, 1, 97, "uniform"), (97, 8, 2, 33, "zero"), (150, 2, 1, 100, "zero"), (259, 1, 1, None, "zero"),
            (64, 2, 2, 64, "uniform"), (96, 2, 1, 31, "zero"))],
        strided=4, batched=4, condition=4.0,
        neighbours=({"t": 37, "h": 2, "j": 1}, {"window": 20}),
        ops=extra_input_op_cases(threshold._forward, threshold._backward, [
            *threshold_inputs(5, 4, 2)[:3], normal(1, 4, 5, seed=3).abs().neg().requires_grad_()]),
        wrong=of_attention((replaced(3, lambda x: x[..., :2]), {}, r"\(1, 13, 4, 16\).*log_decay \(1, 13, 2\)")),
        gpu=[({"t": 397, "h": 4, "j": 2, "b": 2}, {"window": window}) for window in (None, 150)]
        + [({"t": 4500, "h": 4, "j": 2}, {"window": None})],  # more than one stretch of keys
        gpu_near=3e-2, choose=lambda dtype, d, options: threshold.choose_backend("cuda", dtype, d),
    ),
    "contextual": Operation(
        function=contextual.contextual_attention, inputs=contextual_inputs, exact=by_torch(contextual.contextual_attention),
        cases=[({"t": t, "h": h, "j": j, "positions": p, "shut": shut, "b": 2 if t < 90 else 1}, {"window": window, "scale": 0.3})
               for t, h, j, p, window, shut in (
            (101, 4, 2, 12, 37, 0.0),  # the window ends before the positions do, for some rows
            (1, 3, 1, 4, None, 0.0),
            (130, 3, 1, 20, None, 0.0),  # the last position comes up within two tiles
            (150, 2, 1, 7, 100, 0.0),
            (65, 2, 2, 64, 1, 0.0),
            (193, 2, 1, 64, None, 2.0),  # gates of about 0.27: the last position is six tiles away
            (97, 1, 1, 128, None, 3.0),  # and here farther than the row is long
            (70, 2, 1, 1, 20, 0.0),
            (96, 4, 4, 2, 96, 0.0),
        )],
        near=1e-5, gradient=1e-4, strided=4, condition=8.0,
        neighbours=({"t": 70, "h": 2, "j": 1, "positions": 24}, {"window": 50}),
        ops=extra_input_op_cases(contextual._forward, contextual._backward, [
            *softmax_inputs(5, 4, 2), normal(1, 4, 5, 3, seed=7).requires_grad_()]),
        wrong=of_attention(),
        gpu=[({"t": t, "h": 4, "j": 2, "positions": 64, "shut": shut, "b": 2 if t < 1000 else 1}, {"window": window})
             for t, window, shut in ((397, None, 0.0), (397, 150, 2.0), (4500, None, 2.0))],
        choose=lambda dtype, d, options: contextual.choose_backend("cuda", dtype, d, 64),
    ),
    "relative": Operation(
        function=relative.relative_attention, inputs=relative_inputs, exact=by_torch(relative.relative_attention),
        cases=[({"t": t, "h": h, "j": j, "reach": reach, "b": 2 if t < 120 else 1}, {"window": window, "scale": 0.4})
               for t, h, j, reach, window in (
            (101, 4, 2, 40, 37),  # the window ends before the reach
            (1, 3, 1, 4, None),
            (130, 3, 1, 33, None),  # the reach ends in the second tile behind a tile's own
            (150, 2, 1, 64, 100),
            (65, 2, 2, 1, 1),
            (193, 2, 1, 1, None),
            (97, 1, 1, 500, None),  # longer than any row
            (133, 4, 4, 31, 96),
            (96, 2, 1, 32, None),
        )],
        near=4e-6, gradient=5e-5, batched=4, condition=4.0,
        neighbours=({"t": 70, "h": 2, "j": 1, "reach": 24}, {"window": 50}),
        ops=extra_input_op_cases(relative._forward, relative._backward, relative_inputs(5, 4, 2, 3)),
        wrong=of_attention(*(
            (replaced(3, change), {}, r"\(1, 13, 4, 16\), but bias \(") for change in (lambda x: x[:3], lambda x: x[0])
        )),
        gpu=[({"t": t, "h": 4, "j": 2, "reach": reach, "b": 2}, {"window": window})
             for t, window, reach in ((397, None, 100), (397, 150, 512), (1300, None, 512))],
        choose=lambda dtype, d, options: relative.choose_backend("cuda", dtype, d),
    ),
    "polysketch": Operation(
        function=sketched, inputs=softmax_inputs, exact=sketched_by_pairs,
        cases=[({"t": t, "h": h, "j": j, "b": b}, {"degree": degree, "columns": columns, "block": block, "scale": scale})
               for t, h, j, b, degree, columns, block, scale in (
            (45, 2, 1, 2, 4, 3, 20, None),  # three blocks, each of two tiles, the last ones short
            (1, 3, 1, 1, 4, 4, 256, None),
            (70, 4, 2, 1, 2, 16, 64, 0.4),
            (33, 3, 1, 1, 6, 17, 32, None),  # a last block of one token
            (37, 2, 2, 1, 4, 2, 100, -0.4),  # a single block
            (23, 1, 1, 2, 8, 1, 5, None),
        )],
        neighbours=({"t": 45, "h": 2, "j": 1}, {}), condition=2.0,
        ops=polysketch_op_cases,
        wrong=of_attention(
            (lambda args: args, {"block": 0}, "block must be at least 1 token, got 0"),
            (lambda args: args, {"degree": 0}, r"\(0, 2, 16, 3\).*\[degree / 2, 2, 16, r\]"),
        ),
        gpu=[({"t": t, "h": 4, "j": 2, "b": b}, {"degree": degree, "columns": columns, "block": block})
             for t, b, degree, columns, block in ((397, 2, 4, 32, 100), (1500, 1, 4, 32, 256), (397, 2, 2, 20, 512), (700, 1, 6, 64, 64))],
        choose=lambda dtype, d, options: polysketch.choose_backend(
            "cuda", dtype, d, options["degree"], options["columns"], options["block"]),
    ),
}  # fmt: skip

NEAR_FILTER = rounding_bound(torch.float32, 262)
"""A filter's gradient sums over all tokens."""
NEAR_NORMED = rounding_bound(torch.float32, 262, condition=4)
"""A gradient through a norm is the part of it that is orthogonal to the token, over a length that may be small."""

CONVOLUTIONS = {
    "gated convolution": Operation(
        function=gated_causal_conv, inputs=gated_conv_inputs, exact=gated_conv_exact,
        cases=[(dict(zip("btck", sizes, strict=True)), {}) for sizes in (
            (1, 1, 1, 1), (2, 1, 5, 3), (2, 2, 7, 4), (3, 15, 129, 2), (1, 16, 128, 4), (2, 17, 257, 3), (1, 64, 300, 4),
            (2, 65, 33, 1), (2, 66, 7, 4), (2, 131, 40, 3), (1, 129, 3, 2))],
        near=NEAR_FILTER, gradient=NEAR_FILTER, strided=2, batched=2, narrow=2, condition=2.0,
        neighbours=({"b": 2, "t": 21, "c": 13, "k": 4}, {}),
        ops=conv_op_cases,
        wrong=[(lambda args: [torch.zeros(2, 5, 13), torch.zeros(4, 3)], {}, r"\(2, 5, 13\).*\(4, 3\)"),
               (lambda args: [torch.zeros(2, 5, 12), torch.zeros(4, 3).double()], {}, r"float32.*float64")],
    ),
    "canon": Operation(
        function=canon, inputs=canon_inputs, exact=canon_exact,
        # lengths around the 64 rows that a warp of the backward walks down, with taps that reach into the next ones
        cases=[(dict(zip("bthdk", sizes, strict=True)), {"norm": norm}) for sizes in (
            (1, 1, 1, 1, 1), (2, 1, 3, 5, 4), (2, 3, 2, 8, 4), (1, 32, 1, 20, 2), (2, 17, 2, 16, 3), (1, 33, 2, 24, 4),
            (1, 64, 1, 33, 1), (1, 67, 2, 5, 4), (2, 131, 1, 6, 3), (1, 129, 1, 3, 2)) for norm in (True, False)],
        near=NEAR_NORMED, gradient=NEAR_NORMED, strided=2, batched=2, narrow=2, condition=2.0,
        neighbours=({"b": 2, "t": 21, "h": 3, "d": 5, "k": 4}, {"norm": True}),
        ops=dict,
        wrong=[(lambda args: [torch.zeros(2, 5, 3, 4), torch.zeros(13, 3)], {"norm": True}, r"\(2, 5, 3, 4\).*\(13, 3\)"),
               (lambda args: [torch.zeros(2, 5, 3, 4).bfloat16(), torch.zeros(12, 3)], {"norm": False}, r"bfloat16.*float32")],
    ),
}  # fmt: skip


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, beta: Tensor, first: Tensor | None = None, *, last: bool = True,
    backend: str = "torch",
) -> Any:  # fmt: skip
    """Compute the readout and, with `last`, the last state."""
    results = gated_delta(q, k, v, gamma, beta, initial_state=first, return_state=True, backend=backend)
    return results if last else results[0]


def delta_exact(*args: Tensor, last: bool = True) -> Any:
    """Compute token by token, which for long texts would take minutes."""
    if args[0].shape[1] > 200:
        return delta_rule(*args, last=last)
    results = gated_delta_reference(*args[:5], initial_state=args[5] if len(args) == 6 else None)
    return results if last else results[0]


def delta_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    args = delta_inputs(5, d=16, first=True)
    r, last, *saved = detached(*gated_delta_ops.forward(*args))
    return {
        "forward": (gated_delta_ops.forward, tuple(args)),
        "backward": (gated_delta_ops.backward, (r, last, *detached(*args), *saved)),
    }


MEMORIES = {
    "gated delta": Operation(
        function=delta_rule, inputs=delta_inputs, exact=delta_exact,
        cases=[({"t": t, "h": h, "j": j, "d": 16, "b": 2 if t < 100 else 1, "kind": kind, "first": first}, {"last": last})
               for t, h, j, first, last, kind in (
            (1, 4, 2, True, True, "plain"), (17, 3, 1, False, True, "plain"), (64, 2, 2, True, False, "plain"),
            (65, 4, 2, False, False, "plain"), (127, 3, 1, True, True, "plain"), (200, 2, 2, True, True, "plain"),
            (130, 2, 1, True, True, "fast"), (100, 2, 1, True, True, "kept"), (70, 2, 1, True, True, "zeros"))],
        near=rounding_bound(torch.float32, 200, condition=1), gradient=rounding_bound(torch.float32, 200, condition=4),
        # running sums of -60 reach -2000, and exp makes an absolute error of them a relative one
        steepness=lambda sizes: 24.0 if sizes["kind"] == "fast" else 1.0,
        strided=5, batched=5, neighbours=({"t": 70, "h": 2, "j": 1, "d": 16, "first": True}, {}),
        half=({"t": 21, "h": 2, "j": 1, "d": 16, "first": True}, {}), ops=delta_op_cases,
        gpu=[({"t": t, "h": h, "j": j, "b": 2, "first": first}, {"last": last}) for t, h, j, first, last in (
            (1, 8, 2, True, True), (17, 3, 1, False, False), (127, 4, 4, False, True), (257, 8, 2, True, False),
            (1000, 3, 1, True, True), (1000, 8, 2, False, True))],
        gpu_result=4e-3, choose=lambda dtype, d, options: choose_delta("cuda", dtype, d),
    ),
}  # fmt: skip


def losses_op_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    cases = {}
    for path in ("torch", "triton"):
        for cap, biased, gradient in itertools.product((15.0, math.inf), (True, False), (True, False)):
            tensors = [x.requires_grad_(gradient) for x in losses_inputs(5, 4, 7)[: 3 if biased else 2]]
            args = (*tensors, *([] if biased else [None]), targets_of(5, 7), cap, 2, gradient, path)
            cases[f"{path} {cap} {biased} {gradient}"] = (cross_entropy.cross_entropy_sum, args)
    return cases


LOSSES = {
    "cross-entropy": Operation(
        function=of_targets(cross_entropy.linear_cross_entropy_sum), inputs=losses_inputs,
        exact=of_targets(cross_entropy.linear_cross_entropy_reference, summed=True), cases=(), strided=0, dtypes=(),
        neighbours=({"n": 5, "d": 4, "v": 29}, {"cap": 15.0, "chunk": 2}), ops=losses_op_cases,
    ),
}  # fmt: skip

OPERATIONS = ATTENTIONS | CONVOLUTIONS | MEMORIES | LOSSES
