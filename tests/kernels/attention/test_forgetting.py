"""Forgetting attention: the formula against a loop over pairs, its identities, and the Triton kernels."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from atma_sweep.kernels.attention import forgetting, softmax
from atma_sweep.kernels.attention.forgetting import torch_op
from atma_sweep.kernels.attention.forgetting.op import choose_backend, forgetting_attention
from atma_sweep.kernels.attention.scored import sum_by_products
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from atma_sweep.kernels.custom_ops import load_kernels
from graded import check, distance, double, interpreted, normal, run, surrounded
from tiers import every_nth
from torch import Tensor

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def inputs(t: int, h: int, j: int, *, b: int = 1, d: int = D) -> list[Tensor]:
    """q, k, v and gates of which some nearly close."""
    made = [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j))]
    made.append(torch.nn.functional.logsigmoid(2 * normal(b, t, h, seed=3)))
    return [x.requires_grad_() for x in made]


def naive(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Pair by pair: every gate after the key's, up to the query's own, is added to their score."""
    t, h, d = q.shape[1:]
    k, v = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    rows = []
    for i in range(t):
        keys = range(max(0, i + 1 - (window or t)), i + 1)
        scores = [
            (q[:, i] * k[:, j]).sum(-1) * (d**-0.5 if scale is None else scale) + f[:, j + 1 : i + 1].sum(1)
            for j in keys
        ]
        weights = torch.stack(scores, 1).softmax(1)
        rows.append(torch.einsum("bsh,bshx->bhx", weights, v[:, keys.start : i + 1]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("window", "scale", "block"), [(None, None, 1024), (1, 0.4, 5), (4, None, 5), (32, 0.4, 3)])
def test_it_is_the_loop_over_pairs(window: int | None, scale: float | None, block: int) -> None:
    args = double(inputs(13, 4, 2, b=2, d=5))
    ours = run(forgetting_attention, args, scale=scale, window=window, query_block=block)
    check(ours, run(naive, args, scale=scale, window=window), 1, near=1e-13, gradient=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    args = double(inputs(5, 2, 1, d=2))
    assert torch.autograd.gradcheck(lambda *x: forgetting_attention(*x, window=4, query_block=2), args, fast_mode=True)


def test_open_gates_are_softmax() -> None:
    q, k, v, f = double(inputs(29, 4, 2))
    ours = forgetting_attention(q, k, v, 0 * f, window=9)
    assert (ours - softmax_attention_reference(q, k, v, window=9)).abs().max() <= 1e-12


def test_constant_gates_are_a_slope_over_the_distance() -> None:
    q, k, v, _ = double(inputs(29, 4, 2))
    gate_H = torch.tensor([0.9, 0.5, 0.2, 0.99], dtype=torch.float64)
    ours = forgetting_attention(q, k, v, gate_H.log().expand(1, 29, 4))
    distance_TT = torch.arange(29.0, dtype=torch.float64)[:, None] - torch.arange(29.0, dtype=torch.float64)
    scores = torch.einsum("bthx,bshx->bhts", q, k.repeat_interleave(2, 2)) / D**0.5
    scores = scores - (-gate_H.log())[:, None, None] * distance_TT
    weights = scores.masked_fill(distance_TT < 0, -torch.inf).softmax(-1)
    assert (ours - torch.einsum("bhts,bshx->bthx", weights, v.repeat_interleave(2, 2))).abs().max() <= 1e-12


@pytest.mark.parametrize("t", [1, 3, 4, 5, 77])
def test_sums_by_products_are_sums(t: int) -> None:
    """As they are made where a GPU must repeat to the bit; pieces of four tokens, of sixteen, of all."""
    x = normal(2, t, 3, seed=t).double().requires_grad_()
    ours, theirs = sum_by_products(x, 4), x.cumsum(1)
    weight = torch.cos(ours.detach())
    assert (ours - theirs).abs().max() <= 1e-12
    slopes = [torch.autograd.grad(one, x, weight)[0] for one in (ours, theirs)]
    assert (slopes[0] - slopes[1]).abs().max() <= 1e-12


def test_closed_gates_leave_the_token_itself() -> None:
    q, k, v, f = double(inputs(9, 4, 2))
    ours = forgetting_attention(q, k, v, 0 * f - 1e3)
    assert (ours - v.repeat_interleave(2, 2)).abs().max() <= 1e-12


def test_the_first_gate_says_nothing() -> None:
    """Nothing lies before it: its gradient is 0, and so is the sum of a row's gradients by its scores."""
    args = double(inputs(11, 4, 2))
    *_, df = run(forgetting_attention, args)
    assert df[:, 0].abs().max() <= 1e-14
    assert (df[:, 1:].abs().amax((0, 2)) > 1e-6).all()
    # F of all tokens together shifts nothing
    free = args[3].detach().requires_grad_()
    shifted = torch.cat([free[:, :1] - 1e4, free[:, 1:]], 1)
    assert torch.allclose(forgetting_attention(*args[:3], shifted), forgetting_attention(*args), atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 6])
def test_the_naive_formula_of_fla_agrees(window: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU it says that it has none
        module = pytest.importorskip("fla.ops.forgetting_attn.naive", reason="fla is not installed", exc_type=Exception)
    args = [x.detach() for x in inputs(33, 4, 2, b=2)]
    theirs = module.naive_forgetting_attn(*args, window_size=window)
    assert (forgetting_attention(*args, window=window) - theirs).abs().max() <= 5e-6


# --- kernels ------------------------------------------------------------------------------------------------------

CASES = [(67, 4, 2, 29), (1, 3, 1, None), (33, 3, 1, None), (101, 4, 1, None), (127, 2, 2, 100), (45, 8, 2, 1)]


@interpreted
@pytest.mark.parametrize(("t", "h", "j", "window"), every_nth(CASES, 3))
def test_the_kernels_are_near_float64(t: int, h: int, j: int, window: int | None) -> None:
    args = inputs(t, h, j, b=2 if t < 50 else 1)
    ours = run(forgetting_attention, args, window=window, scale=0.4, backend="triton")
    # a window of one key has no gradient by the gates but rounding
    theirs = run(forgetting_attention, double(args), window=window, scale=0.4, backend="torch")
    check(ours, theirs, 1, gradient=2e-5 if window != 1 else 1e-4)


@interpreted
def test_the_kernels_lose_nothing_where_the_sums_are_large() -> None:
    """64K tokens of gates at a half sum up to -45,000, where float32 tells no two neighbours apart."""
    args = inputs(45, 2, 1)
    with torch.no_grad():
        args[3][:, 0] = -45_000.0
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
def test_the_kernels_repeat_to_the_bit_and_use_nothing_beyond_their_inputs() -> None:
    args = inputs(45, 1, 1)
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in args]
    found = [run(forgetting_attention, some, window=20, backend="triton")
             for some in (args, args, [surrounded(x) for x in args], apart)]  # fmt: skip
    assert all(torch.isfinite(x).all() for x in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@interpreted
def test_the_kernels_take_scores_that_count_for_nothing() -> None:
    args = inputs(9, 2, 1)
    ours = run(forgetting_attention, args, scale=0.0, backend="triton")
    check(ours, run(forgetting_attention, double(args), scale=0.0, backend="torch"), 1)


@interpreted
def test_sums_of_gates_go_on_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels(forgetting.__package__)
    monkeypatch.setattr(kernels, "BLOCK", 16)
    args = inputs(45, 2, 1)
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
@pytest.mark.parametrize("t", [1, 3, 127, 130, 1300])
def test_sums_in_tiles_say_what_a_key_lies_behind_its_tile(t: int) -> None:
    """Over two blocks of 1,024, one sum far below the others; each float32 is the float64 difference, rounded once."""
    gate = torch.nn.functional.logsigmoid(3 * normal(2, t, 3, seed=t))
    gate[:, t // 2] = -45_000.0
    exact = (gate.double() * math.log2(math.e)).cumsum(1).transpose(1, 2)
    hi, lo, fade = load_kernels(forgetting.__package__).sums_in_tiles(gate, 128)
    assert fade.shape == (2, 3, t + -t % 4)
    assert torch.isfinite(fade).all(), "what follows the last key is read too"
    assert (hi.double() + lo - exact).abs().max() <= 1e-9
    found = (exact[..., torch.arange(t) // 128 * 128] - exact).float()
    assert ((fade[..., :t] - found).abs() <= 1e-9 + 1.2e-7 * found.abs()).all()
    assert (fade[..., :t:128] == 0).all(), "the first key of the diagonal's tile is where its rows count from"


@interpreted
def test_the_forward_on_hopper_counts_rows_from_where_the_backward_does() -> None:
    """Its tile is the one that the backward of plain Triton adds to the log-sums; narrower windows are refused."""
    tile = load_kernels(forgetting.__package__, "gluon").TILE
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for keys in (1, 2048, 8192, 65536):
                assert load_kernels(softmax.__package__).tiles_for("forward", keys, d, dtype, True).rows == tile
    args = [x.detach().bfloat16() for x in inputs(200, 2, 1, d=64)]
    with pytest.raises(ValueError, match="window 127 is below 128"):
        forgetting_attention(*args, window=127, backend="gluon")


@interpreted
@pytest.mark.parametrize(("forward", "dq", "dkv"), every_nth([(64, 32, 16), (16, 64, 16)], 2))
def test_tiles_of_any_size_agree_on_what_a_row_counts_from(
    forward: int, dq: int, dkv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of keys takes rows from within one tile of the forward; a tile of queries may hold several, or be part of one."""
    rows, kernels = {"forward": forward, "dq": dq, "dkv": dkv}, load_kernels(softmax.__package__)
    monkeypatch.setattr(kernels, "tiles_for", lambda kernel, *_: kernels.Tiles(rows[kernel], 32, 4, 1))
    args = inputs(75, 2, 1)
    check(run(forgetting_attention, args, backend="triton"), run(forgetting_attention, double(args)), 1)


@interpreted
def test_one_row_of_gates_serves_a_batch() -> None:
    q, k, v, f = inputs(21, 2, 1, b=3)
    one = f.detach()[:1].requires_grad_()
    ours = run(forgetting_attention, [q, k, v, one], backend="triton")
    check(ours, run(forgetting_attention, double([q, k, v, one]), backend="torch"), 1)


@interpreted
def test_an_output_in_sixteen_bits_does_not_blur_the_gradients_of_gates() -> None:
    args = [x.detach() for x in inputs(197, 2, 1)]
    args = [(x.half() if x.ndim == 4 else x).requires_grad_() for x in args]
    ours = run(forgetting_attention, args, backend="triton")[-1]
    exact = run(forgetting_attention, double(args), backend="torch")[-1]
    # what a row of gradients sums to, were it left as it is: 4e-3
    assert distance(ours, exact) <= 5e-4


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["forgetting_forward", "forgetting_backward"])
def test_ops_keep_the_rules_of_torch(name: str) -> None:
    q, k, v = (normal(1, 5, heads, D, seed=heads).requires_grad_() for heads in (4, 2, 2))
    f = -normal(1, 5, 4, seed=9).abs()
    found = [x.detach() for x in torch_op.forgetting_forward(q, k, v, f, 0.7, 3, "triton")]
    args: tuple[object, ...] = (q, k, v, f.requires_grad_(), 0.7, 3, "triton")
    if name == "forgetting_backward":
        args = (found[0], *(x.detach() for x in (q, k, v)), *found, 0.7, 3)
    said = torch.library.opcheck(getattr(torch_op, name), args)
    assert set(said.values()) == {"SUCCESS"}, said


def test_errors_name_both_shapes() -> None:
    q, k, v, f = inputs(13, 4, 2)
    with pytest.raises(ValueError, match=r"\(1, 13, 4, 16\).*\(1, 12, 4\)"):
        forgetting_attention(q, k, v, f[:, 1:])
    with pytest.raises(ValueError, match="window must be at least 1"):
        forgetting_attention(q, k, v, f, window=0)


# --- on a GPU -----------------------------------------------------------------------------------------------------


def on_cuda(args: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values in 16 bits, gates in float32."""
    args = [x.detach().cuda() for x in args]
    return [(x.to(dtype) if x.ndim == 4 else x).requires_grad_() for x in args]


def skip_without(backend: str, dtype: torch.dtype, d: int, window: int | None) -> None:
    chosen = choose_backend("cuda", dtype, d, window)
    assert chosen.backend != "torch", chosen
    if backend == "gluon" != chosen.backend:
        pytest.skip(f"this GPU does not take gluon: {chosen}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [None, 150])
def test_in_bf16_they_are_near_float64_and_repeat(d: int, window: int | None, backend: str) -> None:
    skip_without(backend, torch.bfloat16, d, window)
    args = on_cuda(inputs(397, 4, 2, b=2, d=d), torch.bfloat16)
    ours = run(forgetting_attention, args, window=window, backend=backend)
    again = run(forgetting_attention, args, window=window, backend=backend)
    exact = run(forgetting_attention, double(args), window=window, backend="torch")
    for name, a, same, b in zip(("y", "q", "k", "v", "gates"), ours, again, exact, strict=True):
        assert torch.equal(a, same), name
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "h", "j", "dtype"), [(64, 4, 1, torch.bfloat16), (128, 4, 1, torch.bfloat16), (128, 2, 2, torch.float16)]
)
def test_on_hopper_sizes_windows_and_gates_of_every_kind_are_near_float64(
    d: int, h: int, j: int, dtype: torch.dtype
) -> None:
    """Gates times 1e-4 (nearly open), 1 and 1,000 (what closes lies 1e5 behind); the last has no gradient but its rounding."""
    for t, window in ((1, None), (127, None), (129, 128), (300, 200), (1000, None), (1000, 128), (1000, 200)):
        skip_without("gluon", dtype, d, window)
        for strength in (1e-4, 1.0, 1e3):
            made = inputs(t, h, j, b=2, d=d)
            made[3] = made[3] * strength
            args = on_cuda(made, dtype)
            ours = run(forgetting_attention, args, window=window, backend="gluon")
            again = run(forgetting_attention, args, window=window, backend="gluon")
            exact = run(forgetting_attention, double(args), window=window, backend="torch")
            for name, a, same, b in zip(("y", "q", "k", "v", "gates"), ours, again, exact, strict=True):
                where = (name, t, window, strength, distance(a, b))
                assert torch.isfinite(a).all(), where
                assert torch.equal(a, same), where
                if name == "y" or strength <= 1:
                    print(*where)
                    # gradients of gates are sums of what cancels
                    assert distance(a, b) <= (5e-2 if name == "gates" else 2e-2), where


@pytest.mark.gpu
def test_on_hopper_the_log_sums_are_those_of_plain_triton() -> None:
    """The backward reads them; sums of gates at -45,000 and far more tiles than multiprocessors among them."""
    skip_without("gluon", torch.bfloat16, 128, None)
    for t, window in ((1300, 0), (1300, 200), (8200, 0)):
        q, k, v, gate = (x.detach() for x in on_cuda(inputs(t, 8, 2, d=128), torch.bfloat16))
        gate[:, 0] = -45_000.0
        found = [torch_op.forgetting_forward(q, k, v, gate, 0.1275, window, path) for path in ("gluon", "triton")]
        for (o, lse, hi, lo), (their_o, their_lse, their_hi, their_lo) in [found]:
            assert torch.equal(hi, their_hi)
            assert torch.equal(lo, their_lo)
            assert (lse - their_lse).abs().max() <= 1e-3
            assert distance(o, their_o) <= 5e-3
