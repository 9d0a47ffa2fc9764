"""Registration of kernels as torch ops, so that torch.compile keeps one graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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


def rows_like(q: Tensor) -> Tensor:
    """A number for each query of each head of q [B, T, H, X]: [B, H, T] float32."""
    b, t, h = q.shape[:3]
    return q.new_empty(b, h, t, dtype=torch.float32)


Saved = Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Sequence[Tensor | None], Sequence[Any]]]
"""(inputs, results) of an op -> the tensors that its backward reads, and its options."""


def keep_inputs(count: int, results_from: int = 0) -> Saved:
    """The first inputs, and the results from one of them on; the other inputs are options."""
    return lambda inputs, results: ((*inputs[:count], *results[results_from:]), inputs[count:])


def differentiate(
    forward: Any, backward: Callable[..., Any], saved: Saved, *, results: int = 1, zeros_like: int | None = None
) -> None:
    """Give an op the gradient that `backward` works out.

    Args:
        forward: Op whose first inputs may be tensors with gradients.
        backward: Function of the gradients of the results, of the tensors saved and of the options. It returns the gradients of
            the first inputs, of which those that are None or want none are not looked at.
        saved: See `Saved`.
        results: Results of `forward` that have a gradient; those behind them have none.
        zeros_like: A result that is no part of the loss has None as its gradient, not zeros, which would cost a pass over
            them; only the first has, of the shape and type of the saved tensor of that number.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        values = output if isinstance(output, tuple) else (output,)
        tensors, ctx.options = saved(inputs, values)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*values[results:])
        ctx.set_materialize_grads(zeros_like is None)

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, first, *rest = ctx.saved_tensors, *grads[:results]
        if first is None:
            first = torch.zeros_like(tensors[zeros_like])
        grads_in = backward(first, *rest, *tensors, *ctx.options)
        needed = ctx.needs_input_grad
        return tuple(g if wanted else None for g, wanted in zip(grads_in, needed, strict=False)) + (None,) * (
            len(needed) - len(grads_in)
        )

    forward.register_autograd(gradients, setup_context=save)
