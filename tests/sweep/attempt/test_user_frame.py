"""An exception of a user's own part is told with the user's file and line, whoever raised it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from atma_sweep.kernels.attention.scored import scored_attention
from atma_sweep.sweep.attempt.failures import user_frame

PART = """import json
import torch
from atma_sweep.kernels.attention.scored import scored_attention

def divides():
    return 1 / 0

def calls_torch():
    return torch.ones(2) @ torch.ones(3)

def calls_the_library():
    return json.loads("{")

def calls_the_package():
    return scored_attention(None, 1, None, window=None, query_block=None)

def raises_from():
    try:
        divides()
    except ZeroDivisionError as error:
        raise ValueError("so") from error

def cannot_be_traced(x):
    torch._dynamo.graph_break()
    return x

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no gradient")
"""


@pytest.fixture
def part(tmp_path: Path) -> ModuleType:
    """A plugin as a launch copies it."""
    path = tmp_path / "plugins" / "0123456789ab_fade.py"
    path.parent.mkdir()
    path.write_text(PART)
    spec = importlib.util.spec_from_file_location("fade_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(text: str) -> str:
    (number,) = [at for at, line in enumerate(PART.splitlines(), start=1) if line.strip() == text]
    return f"fade.py:{number}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("divides", "return 1 / 0"),
        ("calls_torch", "return torch.ones(2) @ torch.ones(3)"),
        ("calls_the_library", 'return json.loads("{")'),
        ("calls_the_package", "return scored_attention(None, 1, None, window=None, query_block=None)"),
        ("raises_from", 'raise ValueError("so") from error'),
    ],
)
def test_user_frame_is_the_innermost_of_the_user(part: ModuleType, name: str, text: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        getattr(part, name)()
    assert user_frame(hide(caught.value)) == line_of(text)


def test_user_frame_of_compiled_code(part: ModuleType) -> None:
    """Torch raises far from the user's code, and quotes it in its message."""
    compiled = torch.compile(part.cannot_be_traced, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(torch.ones(2))
    assert user_frame(hide(caught.value)) == line_of("torch._dynamo.graph_break()")


def test_user_frame_of_a_backward_pass(part: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no gradient") as caught:
        part.Backward.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert user_frame(hide(caught.value)) == line_of('raise RuntimeError("no gradient")')


def test_user_frame_is_none_without_user_code() -> None:
    for call in (lambda: json.loads("{"), lambda: scored_attention(None, 1, None, window=None, query_block=None)):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()  # type: ignore[no-untyped-call]
        assert user_frame(hide(caught.value)) is None


def hide(error: BaseException) -> BaseException:
    """The exception without the frames of this file, which no user wrote."""
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    return error
