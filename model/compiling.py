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
        seen = [line.partition(": ")[2] for line in lines if line.startswith("Developer debug context: ")]
        self.why = ": ".join([*lines[:1], *seen[:1]]) or type(refused).__name__
        super().__init__(
            f"the network cannot be compiled: {self.why}; train.compile: off trains it without the compiler"
        )


def one_graph(part: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """`part`, compiled at its first call for each shape. Raises CompileError where it does not become one graph."""
    if torch.are_deterministic_algorithms_enabled():
        # else the compiler picks the tiles of its sums by the clock
        compiler: Any = importlib.import_module("torch._inductor.config")
        compiler.deterministic = True
    known: Any = importlib.import_module("torch._dynamo.exc")
    refusals = (known.TorchDynamoException, known.FailOnRecompileLimitHit)
    graph = torch.compile(part, fullgraph=True, dynamic=False, backend=backend)

    def run(*args: Any, **named: Any) -> Any:
        try:
            return graph(*args, **named)
        except refusals as refused:
            raise CompileError(refused) from refused

    return run
