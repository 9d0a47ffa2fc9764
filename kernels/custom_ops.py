"""Registration of kernels as torch custom ops, so that torch.compile keeps one graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def load_kernels(package: str | None, module: str = "triton") -> Any:
    """Import and return a package's module of kernels; cached by Python's imports.

    Called when a kernel first runs and not at import, because Triton is not installed everywhere.

    Args:
        package: `__package__` of the caller, such as "atma_sweep.kernels.conv".
        module: Module in that package: "triton" or "gluon".

    Raises:
        ImportError: Triton is not installed, or the package has no such module.
    """
    return importlib.import_module(f".{module}", package)


def torch_op(
    name: str, fake: Callable[..., Any], mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as the torch custom op atma::NAME and returns the op.

    The op has no gradient until `differentiate` or `register_autograd` gives it one. Its results must not be its inputs
    or views of them.

    Args:
        name: Name of the op without its namespace; a name can be registered once per process.
        fake: Function of the same arguments that allocates results of the right shapes and dtypes and computes nothing,
            for torch.compile.
        mutates_args: Names of the function's parameters whose tensors it writes in place.
    """

    def register(function: Callable[..., Any]) -> Any:
        """Register `function` and `fake` as the op atma::NAME, and return the op in place of the function."""
        op = torch.library.custom_op(f"atma::{name}", function, mutates_args=mutates_args)
        op.register_fake(fake)
        return op

    return register


def empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return contiguous, uninitialised tensors of the shapes, dtypes and devices of the given ones."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def rows_like(q: Tensor) -> Tensor:
    """Return an uninitialised float32 tensor [B, H, T], one number per query and head of q [B, T, H, X]."""
    b, t, h = q.shape[:3]
    return q.new_empty(b, h, t, dtype=torch.float32)


Saved = Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Sequence[Tensor | None], Sequence[Any]]]
"""Function (inputs, results) of an op -> (tensors that its backward reads, other inputs that it takes as options)."""


def keep_inputs(count: int, results_from: int = 0) -> Saved:
    """Return a `Saved` function that saves the first inputs and the last results of an op.

    Args:
        count: Number of leading inputs, all tensors or None, that are saved; the inputs after them become options.
        results_from: Index of the first result that is saved; the results after it are saved too.
    """
    return lambda inputs, results: ((*inputs[:count], *results[results_from:]), inputs[count:])


def differentiate(
    forward: Any, backward: Callable[..., Any], saved: Saved, *, results: int = 1, zeros_like: int | None = None
) -> None:
    """Register a gradient for an op.

    Args:
        forward: Custom op, changed in place, whose first inputs may be tensors with gradients.
        backward: Function of the gradients of the leading `results` results, then the saved tensors, then the options.
            It returns the gradients of the first inputs in order. Those of inputs that need none are ignored and may be
            anything; inputs beyond its results get None.
        saved: Function (inputs, results) -> (tensors saved for `backward`, options passed to it as they are).
        results: Number of leading results of `forward` that have a gradient; the later ones are marked as not
            differentiable.
        zeros_like: None: autograd passes zeros for a result that is no part of the loss. An index into the saved
            tensors: autograd passes None instead, which saves a pass over zeros; only the first result's gradient is
            then replaced by zeros, of the shape and dtype of that saved tensor; `backward` gets the others as None.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """Save tensors and options of a call of `forward` in the autograd context."""
        values = output if isinstance(output, tuple) else (output,)
        tensors, ctx.options = saved(inputs, values)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*values[results:])
        ctx.set_materialize_grads(zeros_like is None)

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return one gradient per input of `forward`, None for inputs that need none.

        Args:
            ctx: Context of autograd.
            *grads: Gradients of all results; those after the leading `results` are ignored.
        """
        tensors, first, *rest = ctx.saved_tensors, *grads[:results]
        if first is None:
            first = torch.zeros_like(tensors[zeros_like])
        grads_in = backward(first, *rest, *tensors, *ctx.options)
        needed = ctx.needs_input_grad
        return tuple(g if wanted else None for g, wanted in zip(grads_in, needed, strict=False)) + (None,) * (
            len(needed) - len(grads_in)
        )

    forward.register_autograd(gradients, setup_context=save)
