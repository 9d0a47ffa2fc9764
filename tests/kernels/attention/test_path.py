"""PaTH attention: the formula against products of maps written out, and its identities."""

from __future__ import annotations

import warnings

import pytest
import torch
from atma_sweep.kernels.attention.path.op import choose_backend, path_attention
from graded import distance, double, run
from kernel_operations import path_inputs as inputs


def test_a_projected_direction_vanishes_from_earlier_keys() -> None:
    """With beta = 1 a second projection changes nothing, and the token itself is not projected."""
    q, k, v, w, beta = double(inputs(21, 2, 1))
    axis = torch.zeros_like(w)
    axis[..., 0] = 1
    ours = path_attention(q, k, v, axis, torch.ones_like(beta))
    scores = torch.einsum("bthx,bsx->bhts", q[..., 1:], k[:, :, 0, 1:])
    scores = scores + torch.diag_embed(torch.einsum("bth,bt->bht", q[..., 0], k[:, :, 0, 0]))
    seen = torch.ones(21, 21, dtype=torch.bool).tril()
    weights = (scores / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    # the query's own map counts for all keys but its own
    assert (ours - torch.einsum("bhts,bsx->bthx", weights, v[:, :, 0])).abs().max() <= 1e-12


def test_the_first_map_says_nothing() -> None:
    *_, dw, d_beta = run(path_attention, double(inputs(11, 4, 2)), chunk=4)
    for gradient in (dw, d_beta):
        assert gradient[:, 0].abs().max() <= 1e-14
        assert (gradient[:, 1:].abs().flatten(2).amax((0, 2)) > 1e-9).all()


@pytest.mark.thorough
def test_the_naive_formula_of_fla_agrees() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU it says that it has none
        module = pytest.importorskip(
            "fla.ops.path_attn.naive",
            reason="needs fla: pip install -e '.[train]', on Linux x86-64",
            exc_type=Exception,
        )
    q, k, v, w, beta = (x.detach() for x in inputs(70, 2, 2))
    theirs = module.naive_path_attn(q, k, v, w, beta, torch.zeros(1, 70, 2), 8**-0.5)
    assert (path_attention(q, k, v, w, beta) - theirs).abs().max() <= 1e-5


def test_choices() -> None:
    for case, reason in (((torch.bfloat16, 64, True), "not support a window"), ((torch.float32, 64, False), "16 bits"),
                       ((torch.bfloat16, 256, False), "head_dim of 16, 32, 64, 128, got 256")):  # fmt: skip
        dtype, size, windowed = case
        assert reason in choose_backend("cuda", dtype, size, windowed=windowed).reason
    assert choose_backend("cpu", torch.bfloat16, 64, windowed=False).reason == "fla needs CUDA, the device is cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_fla_in_bf16_is_near_float64(d: int) -> None:
    choice = choose_backend("cuda", torch.bfloat16, d, windowed=False)
    if choice.reason == "flash-linear-attention is not installed":
        pytest.skip(f"needs an NVIDIA GPU that takes fla: {choice.reason}")
    assert choice.backend == "fla", choice
    args = [x.detach().cuda() for x in inputs(397, 4, 2, b=2, d=d)]
    args = [x.bfloat16().requires_grad_() for x in args[:3]] + [x.requires_grad_() for x in args[3:]]
    ours = run(path_attention, args, backend="fla")
    exact = run(path_attention, double(args), backend="torch")
    for name, a, b in zip(("y", "q", "k", "v", "w", "beta"), ours, exact, strict=True):
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 3e-2, name
