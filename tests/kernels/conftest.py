"""Fixtures of tests of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch


class _Language:
    """A function's globals as Triton's interpreter searches them for modules to patch: both that kernels and its library use."""

    __globals__: ClassVar[dict[str, Any]] = {}


def _patch_once_per_launch() -> None:
    """Have Triton's interpreter patch its language when a kernel starts, and not at every call of a function within it.

    Calls inside a kernel are a hundred times as many as kernels, and each looks at all names of the language again: more
    than a quarter of the time of these tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    _Language.__globals__.update(tl=tl, core=tl.core)
    patch = interpreter._patch_lang

    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda _: patch(_Language)
    interpreter.InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once_per_launch()


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """For tests of kernels: torch.empty gives NaN, so an output that a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
