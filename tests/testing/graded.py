"""Tensors to try an attention with, its results and gradients, how near two such lists are, and losses of small networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone
from tolerances import rounding_bound
from torch import Tensor

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are compiled, see below")


NEAR = rounding_bound(torch.float32, 128)
"""Of a result in float32: a weighted mean of some hundred values, which their weights, all positive, do not cancel."""
NEAR_GRADIENT = rounding_bound(torch.float32, 128, condition=8)
"""Of a gradient: weights times differences from their mean, a tenth of what is subtracted."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Float32 numbers, so that float64 starts from the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(args: list[Tensor]) -> list[Tensor]:
    """The same numbers in float64."""
    return [x.detach().double().requires_grad_() for x in args]


def run(function: Callable[..., Any], args: list[Tensor], **options: Any) -> list[Tensor]:
    """Results, then the gradients of a fixed random weighting of them."""
    values = function(*args, **options)
    results = list(values) if isinstance(values, tuple) else [values]
    # weights that bf16 holds exactly, so that what is compared has the same gradient coming in
    weights = [normal(*x.shape, seed=90 + i).bfloat16().to(x) for i, x in enumerate(results)]
    return [x.detach() for x in results] + list(torch.autograd.grad(results, args, weights))


def check(
    ours: list[Tensor], theirs: list[Tensor], results: int, *, near: float = NEAR, gradient: float = NEAR_GRADIENT
) -> None:
    """Results absolutely, or relative to their largest above 1; gradients relative to their largest, at least 0.2."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        off, top = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert a.shape == b.shape
        assert off <= (near * max(1.0, top) if index < results else gradient * max(0.2, top)), (index, off, top)


def distance(a: Tensor, b: Tensor) -> float:
    """In the norm, relative to b's; absolute where b is zero."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / (b.norm() if b.norm() > 1e-9 else 1.0))


def surrounded(x: Tensor) -> Tensor:
    """The same contiguous numbers with NaN before and behind."""
    buffer = torch.full((x.shape[0] + 2, *x.shape[1:]), torch.nan)
    buffer[1:-1] = x.detach()
    return buffer[1:-1].requires_grad_()


def in_type(args: list[Tensor], dtype: torch.dtype, narrow: int, device: str = "cpu") -> list[Tensor]:
    """The first inputs in 16 bits, as the kernels take them, and the others in float32."""
    return [
        x.detach().to(device, dtype if index < narrow else x.dtype).requires_grad_() for index, x in enumerate(args)
    ]


def loss_of(model: Backbone, tokens: Tensor, terms: AuxiliaryTerms | None = None, **options: Any) -> Tensor:
    """The sum of the losses of every token but the first, with 0.01 of each auxiliary term that is asked for."""
    features = model.features(tokens[:, :-1], auxiliary=terms, **options)
    loss = model.total_loss(features.hidden_BTD, tokens[:, 1:])
    for term in (features.regularizer, features.distractor):
        loss = loss if term is None else loss + 0.01 * term
    return loss


def check_pieces_and_gradients(model: Backbone, tokens: Tensor, terms: AuxiliaryTerms, chunks: Iterable[int]) -> None:
    """An evaluation in pieces is the forward pass, and every parameter learns."""
    with torch.no_grad():
        at_once = model.features(tokens).hidden_BTD
        for chunk in chunks:
            assert (model.features(tokens, chunk=chunk).hidden_BTD - at_once).abs().max() <= 1e-12
    loss_of(model, tokens, terms).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []
