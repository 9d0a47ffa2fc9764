"""torch.compile, as the network uses it: one graph or an error, never a part of it in silence."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


class CompileError(RuntimeError):
    """torch.compile could not turn the network into one graph."""

    def __init__(self, refused: Exception) -> None:
        lines = [line.strip() for line in str(refused).splitlines() if line.strip()]
        # the first line may be no more than a heading
        contexts = [line.partition(": ")[2] for line in lines if line.startswith("Developer debug context: ")]
        self.why = ": ".join([*lines[:1], *contexts[:1]]) or type(refused).__name__
        super().__init__(
            f"the network cannot be compiled: {self.why}; train.compile: off trains it without the compiler"
        )


MIX_ORDER_FLAG = "triton.mix_order_reduction"
"""Setting of torch's compiler: sums over rows and over columns of the same tensor in one kernel."""


def compile_full_graph(
    part: Callable[..., Any], backend: str = "inductor", *, allow_mixed_reductions: bool = True
) -> Callable[..., Any]:
    """`part`, compiled at its first call for each shape. Raises CompileError where it does not become one graph.

    `allow_mixed_reductions` False: no kernel sums over rows and columns at once, which torch 2.11 gets wrong where 8-bit casts are among them: it
    queues such a kernel before what it reads is there.
    """
    if torch.are_deterministic_algorithms_enabled():
        # else the compiler picks the tiles of its sums by the clock
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
        try:
            return graph(*args, **kwargs)
        except refusals as refused:
            raise CompileError(refused) from refused

    return run
