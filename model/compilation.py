"""torch.compile as the network uses it: a single graph or an error, never a silent partial compilation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


class CompileError(RuntimeError):
    """torch.compile could not turn the network into one graph."""

    def __init__(self, refused: Exception) -> None:
        """Build the message from the compiler's exception.

        `why` is the exception's first line, followed by ": " and its first debug context if it has one; the exception's
        class name if its text is empty.
        """
        lines = [line.strip() for line in str(refused).splitlines() if line.strip()]
        # the first line may be only a heading
        contexts = [line.partition(": ")[2] for line in lines if line.startswith("Developer debug context: ")]
        self.why = ": ".join([*lines[:1], *contexts[:1]]) or type(refused).__name__
        super().__init__(
            f"the network cannot be compiled: {self.why}; set train.compile: off to train without the compiler"
        )


MIX_ORDER_FLAG = "triton.mix_order_reduction"
"""Setting of torch's compiler: sums over rows and over columns of the same tensor in one kernel."""


def compile_full_graph(
    part: Callable[..., Any], backend: str = "inductor", *, allow_mixed_reductions: bool = True
) -> Callable[..., Any]:
    """Return `part` compiled as a single graph; compilation happens at its first call for each input shape.

    The returned function raises CompileError where `part` does not become one graph, or is compiled for too many
    shapes; other errors of a call pass through. With deterministic algorithms enabled, the compiler is set to choose
    its tiles deterministically, for the whole process.

    Args:
        part: function or module to compile.
        backend: backend of torch.compile.
        allow_mixed_reductions: False forbids kernels that sum over rows and columns at once; it concerns "inductor"
            alone. torch 2.11 gets these wrong among 8-bit casts: it queues such a kernel before its inputs are ready.
    """
    if torch.are_deterministic_algorithms_enabled():
        # otherwise the compiler picks the tiles of its reductions by measured time
        compiler: Any = importlib.import_module("torch._inductor.config")
        compiler.deterministic = True
    dynamo_errors: Any = importlib.import_module("torch._dynamo.exc")
    refusals = (dynamo_errors.TorchDynamoException, dynamo_errors.FailOnRecompileLimitHit)
    options: dict[str, Any] | None = None
    inductor: Any = importlib.import_module("torch._inductor")
    if not allow_mixed_reductions and backend == "inductor" and MIX_ORDER_FLAG in inductor.list_options():
        options = {MIX_ORDER_FLAG: False}
    graph = torch.compile(part, fullgraph=True, dynamic=False, backend=backend, options=options)

    def run(*args: Any, **kwargs: Any) -> Any:
        """Call the compiled graph, compiling it for new shapes; turn the compiler's refusals into CompileError.

        Refusals are exceptions of torch._dynamo; others pass through.
        """
        try:
            return graph(*args, **kwargs)
        except refusals as refused:
            raise CompileError(refused) from refused

    return run
