"""Registration of kernels as torch ops, so that torch.compile keeps one graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def load_kernels(package: str | None, module: str = "triton") -> Any:
    """Return the module of kernels in a package, imported when they first run: Triton is not installed everywhere."""
    return importlib.import_module(f".{module}", package)


def torch_op(
    name: str, fake: Callable[..., Any], mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as the op atma::NAME; `fake` makes empty results of the same arguments."""

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"atma::{name}", function, mutates_args=mutates_args)
        op.register_fake(fake)
        return op

    return register


def empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous empty tensors of the same shapes and types, as a kernel allocates them."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def differentiate(forward: Any, backward: Any, tensors: int, results: int = 1) -> None:
    """Give an op the gradient that `backward` works out.

    Args:
        forward: Op whose first `tensors` arguments are tensors with gradients, and the others options.
        backward: Op of the gradients of the results, those tensors, everything that `forward` gave, and the options.
        tensors: Arguments of `forward` that are tensors.
        results: Results of `forward` that have a gradient; those behind them have none.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.options = inputs[tensors:]
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(True)

    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grads_in = backward(*grads[:results], *ctx.saved_tensors, *ctx.options)
        return *grads_in, *(None for _ in ctx.options)

    forward.register_autograd(gradients, setup_context=save)
