"""PaTH attention: the formula against products of maps written out, and its identities."""

from __future__ import annotations

import warnings

import pytest
import torch
from atma_sweep.kernels.attention.path.op import choose_backend, path_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from graded import check, distance, double, normal, run
from torch import Tensor
from torch.nn import functional


def inputs(t: int, h: int, j: int, *, b: int = 1, d: int = 8) -> list[Tensor]:
    """q, k, v, directions of unit length, and betas of which some reflect and some do nothing."""
    made = [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j, j))]
    made[3] = functional.normalize(made[3], dim=-1)
    made.append(2 * torch.sigmoid(3 * normal(b, t, j, seed=4)))
    return [x.requires_grad_() for x in made]


def naive(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """The product of whole matrices between every key and every query."""
    t, h, d = q.shape[1:]
    k, v, w, beta = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v, w, beta))
    rows = []
    for i in range(t):
        turned, scores, first = q[:, i], [], max(0, i + 1 - (window or t))
        for j in range(i, first - 1, -1):
            scores.append((turned * k[:, j]).sum(-1) * (d**-0.5 if scale is None else scale))
            maps = torch.eye(d, dtype=q.dtype) - beta[:, j, :, None, None] * w[:, j, :, :, None] * w[:, j, :, None]
            turned = torch.einsum("bhx,bhxy->bhy", turned, maps)
        weights = torch.stack(scores[::-1], 1).softmax(1)
        rows.append(torch.einsum("bsh,bshx->bhx", weights, v[:, first : i + 1]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("window", "scale", "block", "chunk"), [(None, None, 1024, 64), (None, 0.4, 5, 4), (4, None, 5, 3), (32, 0.4, 3, 1)]
)
def test_it_is_the_product_of_maps(window: int | None, scale: float | None, block: int, chunk: int) -> None:
    args = double(inputs(13, 4, 2, b=2, d=5))
    ours = run(path_attention, args, scale=scale, window=window, query_block=block, chunk=chunk)
    check(ours, run(naive, args, scale=scale, window=window), 1, near=1e-13, gradient=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    args = double(inputs(5, 2, 1, d=3))
    assert torch.autograd.gradcheck(
        lambda *x: path_attention(*x, window=4, query_block=3, chunk=2), args, fast_mode=True
    )


def test_maps_that_do_nothing_are_softmax() -> None:
    q, k, v, w, beta = double(inputs(21, 4, 2))
    ours = path_attention(q, k, v, w, 0 * beta, chunk=5)
    assert (ours - softmax_attention_reference(q, k, v)).abs().max() <= 1e-12


def test_one_direction_that_is_projected_away_is_gone_from_all_that_lies_before() -> None:
    """beta = 1: the second time does nothing more, and the token itself is not touched."""
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
        module = pytest.importorskip("fla.ops.path_attn.naive", reason="fla is not installed", exc_type=Exception)
    q, k, v, w, beta = (x.detach() for x in inputs(70, 2, 2))
    theirs = module.naive_path_attn(q, k, v, w, beta, torch.zeros(1, 70, 2), 8**-0.5)
    assert (path_attention(q, k, v, w, beta) - theirs).abs().max() <= 1e-5


def test_errors_and_choices() -> None:
    q, k, v, w, beta = inputs(13, 4, 2)
    with pytest.raises(ValueError, match=r"\(1, 13, 2, 8\), but w \(1, 12, 2, 8\), beta \(1, 13, 2\)"):
        path_attention(q, k, v, w[:, 1:], beta)
    with pytest.raises(ValueError, match="backend fla has no window"):
        path_attention(q, k, v, w, beta, window=3, backend="fla")
    for case, said in (((torch.bfloat16, 64, True), "no window"), ((torch.float32, 64, False), "16 bits"),
                       ((torch.bfloat16, 256, False), "head_dim of 16, 32, 64, 128, got 256")):  # fmt: skip
        dtype, size, windowed = case
        assert said in choose_backend("cuda", dtype, size, windowed=windowed).reason
    assert choose_backend("cpu", torch.bfloat16, 64, windowed=False).reason == "fla needs CUDA, the device is cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_fla_in_bf16_is_near_float64(d: int) -> None:
    choice = choose_backend("cuda", torch.bfloat16, d, windowed=False)
    if choice.backend != "fla":
        pytest.skip(choice.reason)
    args = [x.detach().cuda() for x in inputs(397, 4, 2, b=2, d=d)]
    args = [x.bfloat16().requires_grad_() for x in args[:3]] + [x.requires_grad_() for x in args[3:]]
    ours = run(path_attention, args, backend="fla")
    exact = run(path_attention, double(args), backend="torch")
    for name, a, b in zip(("y", "q", "k", "v", "w", "beta"), ours, exact, strict=True):
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 3e-2, name
