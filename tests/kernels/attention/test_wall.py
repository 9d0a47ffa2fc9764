"""Wall attention: the formula against a loop over pairs, its identities, and the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch
from atma_sweep.kernels.attention.forgetting.op import forgetting_attention
from atma_sweep.kernels.attention.softmax.op import softmax_attention_reference
from atma_sweep.kernels.attention.wall import op as wall
from atma_sweep.kernels.attention.wall import torch_op
from atma_sweep.kernels.attention.wall.op import choose_backend, wall_attention
from atma_sweep.kernels.custom_ops import load_kernels
from graded import check, distance, double, interpreted, normal, run, surrounded
from tiers import every_nth
from torch import Tensor

D = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
]


def inputs(t: int, h: int, j: int, p: int, *, b: int = 1, d: int = D) -> list[Tensor]:
    """q, k, v and gates between 0 and -0.86, of which some stay open for long and some close at once."""
    made = [normal(b, t, heads, d, seed=seed) for seed, heads in enumerate((h, j, j))]
    made.append(-0.86 * torch.sigmoid(3 * normal(b, t, p, d, seed=3) - 2))
    return [x.requires_grad_() for x in made]


def naive(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Pair by pair: every channel of a product keeps what the gates after the key's leave, up to the query's own."""
    t, h, d = q.shape[1:]
    k, v, f = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v, f))
    rows = []
    for i in range(t):
        keys = range(max(0, i + 1 - (window or t)), i + 1)
        kept = [(q[:, i] * k[:, j] * f[:, j + 1 : i + 1].sum(1).exp()).sum(-1) for j in keys]
        weights = (torch.stack(kept, 1) * (d**-0.5 if scale is None else scale)).softmax(1)
        rows.append(torch.einsum("bsh,bshx->bhx", weights, v[:, keys.start : i + 1]))
    return torch.stack(rows, 1)


CONSTANT = [(None, None, 1024, 4), (1, 0.4, 5, 2), (4, None, 5, 4), (32, 0.4, 3, 2)]


@pytest.mark.parametrize(("window", "scale", "block", "p"), CONSTANT)
def test_it_is_the_loop_over_pairs(
    window: int | None, scale: float | None, block: int, p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the block of queries, and the part of it that is worked out channel by channel."""
    monkeypatch.setattr(wall, "DIRECT", 4)
    args = double(inputs(13, 4, 2, p, b=2, d=5))
    ours = run(wall_attention, args, scale=scale, window=window, query_block=block)
    check(ours, run(naive, args, scale=scale, window=window), 1, near=1e-13, gradient=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    args = double(inputs(5, 2, 1, 1, d=2))
    assert torch.autograd.gradcheck(lambda *x: wall_attention(*x, window=4, query_block=2), args, fast_mode=True)


@pytest.mark.parametrize("window", [None, 9])
def test_open_gates_are_softmax(window: int | None) -> None:
    q, k, v, f = double(inputs(67, 4, 2, 2))
    ours = wall_attention(q, k, v, 0 * f, window=window)
    assert (ours - softmax_attention_reference(q, k, v, window=window)).abs().max() <= 1e-12


def test_gates_alike_in_all_channels_are_not_forgetting_attention() -> None:
    """One multiplies a score, the other is added to it."""
    q, k, v, _ = double(inputs(29, 4, 2, 4))
    f = torch.nn.functional.logsigmoid(normal(1, 29, 4, seed=5).double())
    ours = wall_attention(q, k, v, f[..., None].expand(-1, -1, -1, D))
    assert (ours - forgetting_attention(q, k, v, f)).abs().max() > 0.1
    # closed ones leave a mean of what lies before, not the token alone
    closed = wall_attention(q, k, v, torch.full((1, 29, 4, D), -1e3, dtype=torch.float64))
    last = torch.cat([torch.zeros(4, 28, dtype=torch.float64), (q[0, -1] * k[0, -1].repeat_interleave(2, 0)).sum(-1, keepdim=True) / 4], 1)  # fmt: skip
    wanted = torch.einsum("hs,shx->hx", last.softmax(1), v[0].repeat_interleave(2, 1))
    assert (closed[0, -1] - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("p", [4, 2])
def test_what_moves_all_sums_alike_moves_nothing(p: int) -> None:
    """The first gate has no gradient, and q dq and k dk of a channel add up to the same over all tokens."""
    q, k, v, f = double(inputs(37, 4, 2, p))
    _, dq, dk, _, df = run(wall_attention, [q, k, v, f], window=20)
    assert df[:, 0].abs().max() <= 1e-14
    assert (df[:, 1:].abs().amax((0, 2, 3)) > 1e-9).all()
    along_q = (q * dq).unflatten(2, (2, 2)).sum((0, 1, 3))
    assert (along_q - (k * dk).sum((0, 1))).abs().max() <= 1e-13
    assert along_q.abs().max() > 1e-2


def test_gates_of_kv_heads_are_those_of_query_heads_with_equal_rows() -> None:
    q, k, v, f = double(inputs(37, 4, 2, 2))
    tied = run(wall_attention, [q, k, v, f])
    apart = run(wall_attention, [q, k, v, f.detach().repeat_interleave(2, 2).requires_grad_()])
    assert all((a - b).abs().max() <= 1e-13 for a, b in zip(tied[:4], apart[:4], strict=True))
    assert (tied[4] - apart[4].unflatten(2, (2, 2)).sum(3)).abs().max() <= 1e-13


def test_channels_without_gates_are_as_if_theirs_were_open() -> None:
    """A score is then that of the gated channels and that of plain softmax, one beside the other."""
    q, k, v, f = double(inputs(29, 2, 1, 2))
    half = torch.cat([f[..., : D // 2], 0 * f[..., D // 2 :]], -1)
    ours = wall_attention(q, k, v, half)
    fall = (f.cumsum(1)[:, :, None] - f.cumsum(1)[:, None])[..., : D // 2].clamp(max=0).exp()
    low = torch.einsum("bihx,bjx,bijhx->bhij", q[..., : D // 2], k[:, :, 0, : D // 2], fall)
    high = torch.einsum("bihx,bjx->bhij", q[..., D // 2 :], k[:, :, 0, D // 2 :])
    seen = torch.ones(29, 29, dtype=torch.bool).tril()
    weights = ((low + high) / D**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    assert (ours - torch.einsum("bhij,bjx->bihx", weights, v[:, :, 0])).abs().max() <= 1e-12


@pytest.mark.thorough
def test_closing_gates_stay_finite_over_8192_tokens() -> None:
    """They sum up to -7,127, whose exponential no type holds; the last rows are worked out directly."""
    q, k, v, _ = inputs(8192, 2, 1, 1, d=4)
    f = torch.full((1, 8192, 1, 4), -0.87).requires_grad_()
    ours = run(wall_attention, [q, k, v, f])
    assert all(torch.isfinite(x).all() for x in ours)
    for i in (0, 31, 32, 1024, 8191):
        fade = torch.exp(-0.87 * (i - torch.arange(i + 1.0, dtype=torch.float64)))
        scores = torch.einsum("hx,sx,s->hs", q[0, i].double(), k[0, : i + 1, 0].double(), fade) / 2
        wanted = torch.einsum("hs,sx->hx", scores.softmax(-1), v[0, : i + 1, 0].double())
        assert (ours[0][0, i] - wanted).abs().max() <= 1e-5


# --- kernels ------------------------------------------------------------------------------------------------------

CASES = [
    (101, 4, 2, 2, 37),
    (1, 3, 1, 3, None),
    (130, 3, 1, 1, None),
    (150, 4, 1, 4, 100),
    (65, 2, 2, 2, 1),
    (193, 2, 1, 2, None),
]


@interpreted
@pytest.mark.parametrize(("t", "h", "j", "p", "window"), every_nth(CASES, 3))
def test_the_kernels_are_near_float64(t: int, h: int, j: int, p: int, window: int | None) -> None:
    args = inputs(t, h, j, p)
    ours = run(wall_attention, args, window=window, scale=0.4, backend="triton")
    check(ours, run(wall_attention, double(args), window=window, scale=0.4, backend="torch"), 1, gradient=1e-4)


@interpreted
def test_the_kernels_hold_the_steepest_gates() -> None:
    """64 of them, where the exponent is largest; and none, which is softmax."""
    for fall in (-1.19, 0.0):
        q, k, v, _ = inputs(130, 2, 1, 1)
        args = [q, k, v, torch.full((1, 130, 1, D), fall).requires_grad_()]
        ours = run(wall_attention, args, backend="triton")
        assert all(torch.isfinite(x).all() for x in ours)
        check(ours, run(wall_attention, double(args), backend="torch"), 1, gradient=1e-4)


@interpreted
@pytest.mark.parametrize(("block", "factor"), every_nth([(64, 2.43), (32, 1.56), (128, 5.90)], 3))
def test_the_block_of_the_kernels_changes_nothing(block: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block of gates at -0.02 in log 2 lets fall is the factor by which a diagonal tile is scaled again."""
    kernels = load_kernels(wall.__package__)
    monkeypatch.setattr(kernels, "BLOCK", block)
    monkeypatch.setattr(kernels, "CHANNELS", 8)  # of 16: two programs of each
    monkeypatch.setattr(kernels, "MANY", 2)  # of 2 to 5 blocks
    args = inputs(150, 2, 1, 1)
    ours = run(kernels_alone, args)
    check(ours, run(wall_attention, double(args), scale=1 / wall.LOG2E, backend="torch"), 1, gradient=1e-4)
    q, k, v, f = (x.detach() for x in args)
    edges = kernels.forward(q, k, v, torch.full_like(f, -0.02 / wall.LOG2E), factor=1.0, window=None)[4].sum(0)
    assert (edges[:, :, 0] - edges[:, :, 1]).exp2() == pytest.approx(factor, abs=0.005)


def kernels_alone(*args: Tensor) -> Tensor:
    """The kernels without the op around them, whose shapes are those of one size of blocks."""
    return _Alone.apply(*args)


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        made = load_kernels(wall.__package__).forward(q, k, v, f, factor=1.0, window=None)
        ctx.save_for_backward(v, f, *made)
        return made[0]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[Tensor, ...]:
        v, f, o, lse, q_, k_, edges = ctx.saved_tensors
        return load_kernels(wall.__package__).backward(g, q_, k_, v, f, o, lse, edges, factor=1.0, window=None)


@interpreted
def test_the_kernels_repeat_to_the_bit_and_use_nothing_beyond_their_inputs() -> None:
    args = inputs(70, 1, 1, 1)
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in args]
    found = [run(wall_attention, some, window=20, backend="triton")
             for some in (args, args, [surrounded(x) for x in args], apart)]  # fmt: skip
    assert all(torch.isfinite(x).all() for x in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("p", [1, 2])
def test_ops_keep_the_rules_of_torch(name: str, p: int) -> None:
    q, k, v, f = inputs(5, 2, 1, p)
    args: tuple[object, ...] = (q, k, v, f, 0.7, 3, "triton")
    if name == "backward":
        o, lse, q_, k_, edges = (x.detach() for x in torch_op.wall_forward(q, k, v, f, 0.7, 3, "triton"))
        args = (o, q_, k_, v.detach(), f.detach(), o, lse, edges, 0.7, 3)
    found = torch.library.opcheck(getattr(torch_op, f"wall_{name}"), args)
    assert set(found.values()) == {"SUCCESS"}, found


def test_errors_name_both_shapes() -> None:
    q, k, v, f = inputs(13, 4, 2, 4)
    for wrong in (f[:, 1:], f[:, :, :3], f[..., 1:], f[..., 0]):
        with pytest.raises(ValueError, match=r"\(1, 13, 4, 16\), but log_gate \(1, "):
            wall_attention(q, k, v, wrong)


@pytest.mark.parametrize(("steepest", "said"), [(None, "no limit"), (2.0, "the limit 2")])
def test_gates_that_the_kernels_do_not_hold_take_torch(steepest: float | None, said: str) -> None:
    choice = choose_backend("cuda", torch.bfloat16, 128, steepest)
    assert choice.backend == "torch"
    assert choice.reason.endswith(said)
    assert "by at most 1.19 a token" in choice.reason
    assert math.exp(-1.19 * 64) > 2.0**-110


# --- on a GPU -----------------------------------------------------------------------------------------------------


def on_cuda(args: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values in bfloat16, gates in float32."""
    args = [x.detach().cuda() for x in args]
    return [x.bfloat16().requires_grad_() for x in args[:3]] + [args[3].requires_grad_()]


def skip_without(backend: str, d: int, window: int | None) -> None:
    chosen = choose_backend("cuda", torch.bfloat16, d, 0.86, window)
    assert chosen.backend != "torch", chosen
    if backend == "gluon" != chosen.backend:
        pytest.skip(f"this GPU does not take gluon: {chosen}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("p", "window"), [(4, None), (2, 150), (2, None)])
def test_in_bf16_they_are_near_float64_and_repeat(d: int, p: int, window: int | None, backend: str) -> None:
    skip_without(backend, d, window)
    half = choose_backend("cuda", torch.float16, d, 0.86)
    assert (half.backend, half.reason[-20:]) == ("torch", "the range of float16")
    args = on_cuda(inputs(397, 4, 2, p, b=2, d=d))
    ours = run(wall_attention, args, window=window, backend=backend)
    again = run(wall_attention, args, window=window, backend=backend)
    exact = run(wall_attention, double(args), window=window, backend="torch")
    for name, a, same, b in zip(("y", "q", "k", "v", "gates"), ours, again, exact, strict=True):
        assert torch.equal(a, same), name
        print(f"{name}: {distance(a, b):.2e}")
        assert distance(a, b) <= 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "h", "j", "p"), [(64, 4, 1, 4), (128, 4, 1, 1), (128, 2, 2, 2)])
def test_on_hopper_sizes_windows_and_gates_of_every_kind_are_near_float64(d: int, h: int, j: int, p: int) -> None:
    """Gates times 1e-3 (nearly open) and 1, and the steepest that there may be."""
    for t, window in (
        (1, None),
        (64, None),
        (127, None),
        (129, 128),
        (300, 200),
        (1000, None),
        (1000, 128),
        (1000, 200),
    ):
        skip_without("gluon", d, window)
        for strength in (1e-3, 1.0, None):
            made = inputs(t, h, j, p, b=2, d=d)
            made[3] = torch.full_like(made[3], -1.19) if strength is None else made[3] * strength
            args = on_cuda(made)
            ours = run(wall_attention, args, window=window, backend="gluon")
            again = run(wall_attention, args, window=window, backend="gluon")
            exact = run(wall_attention, double(args), window=window, backend="torch")
            for name, a, same, b in zip(("y", "q", "k", "v", "gates"), ours, again, exact, strict=True):
                where = (name, t, window, strength, distance(a, b))
                assert torch.isfinite(a).all(), where
                assert torch.equal(a, same), where
                print(*where)
                # of one token alone only values have a gradient, and of keys that fade at once only the token's own
                if name == "y" or (t > 1 and strength is not None):
                    # gradients of gates are sums of what cancels
                    assert distance(a, b) <= (5e-2 if name == "gates" else 2e-2), where


@pytest.mark.gpu
def test_on_hopper_the_log_sums_are_those_of_plain_triton() -> None:
    """The backward reads them; far more tiles than multiprocessors among them."""
    skip_without("gluon", 128, None)
    for t, window in ((1300, 0), (1300, 200), (8200, 0)):
        q, k, v, f = (x.detach() for x in on_cuda(inputs(t, 8, 2, 8, d=128)))
        found = [torch_op.wall_forward(q, k, v, f, 0.1275, window, path) for path in ("gluon", "triton")]
        (o, lse, *rest), (their_o, their_lse, *theirs) = found
        assert all(torch.equal(a, b) for a, b in zip(rest, theirs, strict=True))
        # rates of 8 bits' mantissa in place of float32
        assert (lse - their_lse).abs().max() <= 3e-2
        assert distance(o, their_o) <= 8e-3
