"""Ops of one new token a text, against those of whole texts; their kernels in Triton's interpreter, on a GPU in bf16."""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal

import pytest
import torch
from atma_sweep.kernels.attention.polar.reference import polar_attention_reference
from atma_sweep.kernels.channelwise_delta.op import channelwise_delta_reference
from atma_sweep.kernels.conv.op import causal_conv_reference
from atma_sweep.kernels.conv_step import op as conv
from atma_sweep.kernels.conv_step.op import canon_step, conv_step, gated_conv_step, last_inputs
from atma_sweep.kernels.delta_step import op as delta
from atma_sweep.kernels.delta_step.op import delta_step
from atma_sweep.kernels.gated_delta.op import gated_delta_reference
from atma_sweep.kernels.key_gated_step import op as key_gated
from atma_sweep.kernels.norms import rms_norm_reference
from atma_sweep.kernels.paged import op as backends
from atma_sweep.kernels.paged.op import paged_polar, paged_softmax, write_pages
from atma_sweep.kernels.paged.page_tables import Texts
from atma_sweep.kernels.rotary import Kind, apply_rotary_reference, frequencies
from atma_sweep.kernels.wall_step import fp8
from atma_sweep.kernels.wall_step import op as wall_step
from graded import interpreted
from tolerances import rounding_bound
from torch import Tensor
from torch.nn import functional

NEAR = 10 * rounding_bound(torch.float32, 16)
"""Absolute: sums of a few products in float32, which are up to ten in size."""


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


def paged(rows: list[Tensor], page: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(pool, tables) of texts [n, ...] in pages in any order, with junk everywhere else; page 0 is nobody's."""
    wanted = [-(-len(text) // page) for text in rows]
    order = torch.randperm(sum(wanted), generator=torch.Generator().manual_seed(seed)) + 1
    pool = torch.full((1 + sum(wanted), page, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    tables = torch.zeros(len(rows), max(wanted) + 1, dtype=torch.int32)
    start = 0
    for index, (text, pages) in enumerate(zip(rows, wanted, strict=True)):
        for page_index in range(pages):
            number = int(order[start + page_index])
            piece = text[page_index * page : (page_index + 1) * page]
            pool[number, : len(piece)] = piece
            tables[index, page_index] = number
        start += pages
    return pool, tables


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_attention_of_the_last_token_in_pages_in_any_order(window: int | None, seed: int) -> None:
    lengths, h, j, x, page = [13, 1, 0, 8], 4, 2, 6, 4
    keys = [drawn((n, j, x), (n, j, x)) for n in lengths]
    k_pool, tables = paged([k for k, _ in keys], page, seed=seed)
    v_pool, _ = paged([v for _, v in keys], page, seed=seed)
    q_BHX, base, slope, gain, beta, v_null = drawn((4, h, x), (h,), (h,), (h,), (h,), (h, x))
    texts = Texts(tables, torch.tensor(lengths, dtype=torch.int32), page)
    y = paged_softmax(q_BHX, k_pool, v_pool, texts, window=window)
    c, mag = paged_polar(q_BHX, k_pool, v_pool, base, slope, gain, beta, v_null, texts, window=window)
    for row, n in enumerate(lengths):
        if n == 0:
            assert torch.equal(y[row], torch.zeros(h, x, dtype=torch.float64))
            torch.testing.assert_close(c[row], functional.normalize(v_null, dim=-1))
            assert torch.equal(mag[row], torch.zeros(h, dtype=torch.float64))
            continue
        k, v = (part[None] for part in keys[row])
        q = drawn((1, n, h, x))[0]
        q[0, -1] = q_BHX[row]
        seen = slice(0 if window is None else max(0, n - window), n)
        scores = torch.einsum("hx,shx->hs", q_BHX[row], k[0, seen].repeat_interleave(2, 1)) * x**-0.5
        expected = torch.einsum("hs,shx->hx", scores.softmax(-1), v[0, seen].repeat_interleave(2, 1))
        torch.testing.assert_close(y[row], expected)
        c_all, mag_all = polar_attention_reference(q, k, v, base, slope, gain, beta, v_null, window=window)
        torch.testing.assert_close(c[row], c_all[0, -1])
        torch.testing.assert_close(mag[row], mag_all[0, -1])


def wall_case(
    lengths: list[int], h: int, p: int, j: int, x: int, page: int, chunk: int, steepest: float, dtype: torch.dtype,
    window: int | None = None,
) -> tuple[list[Any], Tensor, Tensor]:  # fmt: skip
    """Return inputs of `paged_wall`, its result by the formula in float64, and a bound of a score's size [B, H].

    Gates of a channel fall by between 0 and `steepest` per token; those of every third channel always by the most.
    """
    draw = torch.Generator().manual_seed(len(lengths))
    q = torch.randn(len(lengths), h, x, generator=draw).to(dtype)
    cached, outputs, sizes = [], [], []
    for row, n in enumerate(lengths):
        k, v = (torch.randn(n, j, x, generator=draw).to(dtype) for _ in range(2))
        log_gate = torch.rand(n, p, x, generator=draw, dtype=torch.float64)
        log_gate[..., ::3] = 1
        fall = -steepest * log_gate.cumsum(0)
        anchor = fall[::chunk].repeat_interleave(chunk, 0)[:n]
        absorbed = wall_step.absorb_decay(k[None], fall[None], anchor[None])[0]
        cached.append((absorbed, v, fall[::chunk], fall[-1] if n else torch.zeros(p, x, dtype=torch.float64)))
        seen = slice(0 if window is None else max(0, n - window), n)
        decay = torch.stack([-steepest * log_gate[at + 1 :].sum(0) for at in range(n)][seen] or [fall.sum(0)]).exp()
        terms = q[row].double() * k[seen].double().repeat_interleave(h // j, 1)
        terms = terms * decay[: len(terms)].repeat_interleave(h // p, 1) * x**-0.5
        outputs.append(
            torch.einsum("sh,shx->hx", terms.sum(-1).softmax(0), v[seen].double().repeat_interleave(h // j, 1))
        )
        sizes.append(terms.abs().sum(-1).amax(0) if n else torch.zeros(h, dtype=torch.float64))
    k_pool, tables = paged([part[0] for part in cached], page)
    v_pool, _ = paged([part[1] for part in cached], page)
    # a page of anchors is found at the page's number, which the same order of pages gives
    anchors = torch.full((len(k_pool), page // chunk, p, x), torch.nan, dtype=torch.float64)
    for (_, _, rows, _), table in zip(cached, tables, strict=True):
        for at, row in enumerate(rows):
            anchors[table[at * chunk // page].long(), at * chunk % page // chunk] = row
    texts = Texts(tables, torch.tensor(lengths, dtype=torch.int32), page)
    return (
        [q, k_pool, v_pool, anchors, torch.stack([part[3] for part in cached]), texts],
        torch.stack(outputs),
        torch.stack(sizes),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_heads", [2, 4])
@pytest.mark.parametrize(("window", "page", "chunk"), [(None, 64, 64), (7, 8, 4), (70, 24, 8), (1, 4, 1)])
def test_wall_step_is_the_formula(
    window: int | None, page: int, chunk: int, gate_heads: int, dtype: torch.dtype
) -> None:
    """Steepest gates over several chunks; the only roundings to bf16 are those of cached keys and of the result.

    Relative errors e of a score's terms change it by at most d = e sum |terms|, so a weight by a factor of exp(+-2d).
    """
    args, expected, size = wall_case([133, 1, 0, 64], 4, gate_heads, 2, 6, page, chunk, 0.86, dtype, window)
    y = wall_step.paged_wall(*args, window=window)
    assert y.dtype == dtype
    if dtype == torch.bfloat16:
        u = torch.finfo(dtype).eps / 2
        bound = torch.expm1(2 * 1.01 * u * size)[..., None] * 4.5 + u * expected.abs() + 1e-5
        assert ((y.double() - expected).abs() <= bound).all()
    else:
        assert (y.double() - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-5)


def test_tokens_per_anchor_follow_from_the_steepest_gate() -> None:
    """The factor of the last key of a chunk stays below 2^80, in float16 below 2^10."""
    for dtype, limit in ((torch.bfloat16, 80), (torch.float32, 80), (torch.float16, 10)):
        for steepest in (0.001, 0.1, 0.86, 1.19, 5.0, 90.0):
            chunk = wall_step.chunk_tokens(dtype, steepest)
            assert (chunk - 1) * steepest <= limit * math.log(2)
            assert chunk == 64 or (2 * chunk - 1) * steepest > limit * math.log(2)
    assert wall_step.chunk_tokens(torch.bfloat16, 0.86) == 64
    assert wall_step.chunk_tokens(torch.float16, 0.86) == 8
    assert wall_step.chunk_tokens(torch.bfloat16, None) == 1


@pytest.mark.thorough
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("gate_heads", "splits", "window", "page", "chunk"), [
    (2, 4, None, 64, 64), (6, 1, 37, 32, 16), (2, 16, 1, 32, 32), (6, 4, 70, 256, 64)
])  # fmt: skip
def test_the_wall_kernel_merges_ranges(gate_heads: int, splits: int, window: int | None, page: int, chunk: int) -> None:
    """In float32, with gates at their steepest: the kernel errs by no more than the torch implementation may."""
    args, expected, _ = wall_case([200, 0, 1, 64], 6, gate_heads, 2, 16, page, chunk, 0.86, torch.float32, window)
    kernels = importlib.import_module("atma_sweep.kernels.wall_step.triton")
    *tensors, texts = args
    options: Any = {"scale": 0.25, "window": window or 0, "splits": splits}
    y = kernels.attend(*tensors, [], texts.tables_BP, texts.lengths_B, **options)
    assert (y.double() - expected).abs().max() <= 1e-5


def fp8_wall_case(gate_heads: int, x: int, steepest: float) -> tuple[list[Any], list[Tensor], Tensor, list[Tensor]]:
    """Return inputs of `paged_wall` with an 8-bit cache, its powers of two, the result, and (original, stored) numbers.

    A text of 200 tokens in pages of 64, six query heads and two KV heads. The result is the formula in float64, of the
    keys and values as they were stored; these have no decay.
    """
    n, page, chunk, shared = 200, 64, wall_step.chunk_tokens(torch.float32, steepest), fp8.shift_tokens(steepest)
    q, k, v = drawn((1, 6, x), (1, n, 2, x), (1, n, 2, x), dtype=torch.float32)
    log_gate = torch.rand(1, n, gate_heads, x, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_gate[..., ::3] = 1
    fall = -steepest * log_gate.cumsum(1)
    anchor = fall[:, ::chunk].repeat_interleave(chunk, 1)[:, :n]
    k_shift, v_shift = fp8.key_shifts(fall, anchor)[:, ::shared], fp8.value_shifts(v)
    every_shift = k_shift.repeat_interleave(shared, 1)[:, :n]
    packed = fp8.quantize(wall_step.absorb_decay(k, fall, anchor), every_shift), fp8.quantize(v, v_shift[..., None])
    stored = (
        fp8.dequantize(packed[0], every_shift, torch.float64) * torch.exp(fall - anchor),
        fp8.dequantize(packed[1], v_shift[..., None], torch.float64),
    )
    terms = q.double()[:, None] * stored[0].repeat_interleave(6 // gate_heads, 2)
    terms = terms * torch.exp(fall[:, -1:] - fall).repeat_interleave(6 // gate_heads, 2) * x**-0.5
    expected = torch.einsum("bsh,bshx->bhx", terms.sum(-1).softmax(1), stored[1].repeat_interleave(3, 2))

    def pool(rows: Tensor, per_page: int) -> Tensor:
        """Return rows [1, tokens, ...] in the pages 1 to 4 of five pages."""
        pages = torch.zeros(5 * per_page, *rows.shape[2:], dtype=rows.dtype)
        pages[per_page : per_page + rows.shape[1]] = rows[0]
        return pages.unflatten(0, (5, per_page))

    texts = Texts(torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([n], dtype=torch.int32), page)
    inputs = [q, *(pool(part, page) for part in packed), pool(anchor[:, ::chunk], page // chunk), fall[:, -1], texts]
    original = k.repeat_interleave(gate_heads // 2, 2).double(), v.double()
    return inputs, [pool(k_shift, page // shared), pool(v_shift, page)], expected, [*original, *stored]


@pytest.mark.parametrize(("gate_heads", "steepest"), [(2, 0.86), (6, 0.86), (2, 0.01)])
def test_fp8_cache_errs_as_little_as_its_mantissa(gate_heads: int, steepest: float) -> None:
    """Half a unit of three bits, or of the smallest numbers; what a step makes of the stored numbers is exact."""
    inputs, shifts, expected, (k, v, k_stored, v_stored) = fp8_wall_case(gate_heads, 16, steepest)
    assert ((k_stored - k).abs() <= 1.001 * (k.abs() / 16).clamp(min=2**-8)).all()
    least = 2**-17 * v.abs().amax(-1, keepdim=True)
    assert ((v_stored - v).abs() <= torch.maximum(v.abs() / 16, least)).all()
    assert (wall_step.paged_wall(*inputs, shifts=shifts).double() - expected).abs().max() <= 1e-5


def test_fp8_powers_of_two_follow_from_the_steepest_gate() -> None:
    for steepest in (0.001, 0.1, 0.86, 3.0, 90.0):
        shared = fp8.shift_tokens(steepest)
        assert (shared - 1) * steepest <= 4 * math.log(2)
        assert shared == 64 or (2 * shared - 1) * steepest > 4 * math.log(2)
    assert fp8.shift_tokens(0.86) == 4
    zeros, large = torch.zeros(1, 1, 1, 4), torch.tensor([[[[1e30, -2.0, 0.0, 1e-30]]]])
    assert not fp8.quantize(zeros, fp8.value_shifts(zeros)[..., None]).any()
    shift, none = fp8.value_shifts(large)[..., None], torch.zeros(1, dtype=torch.int8)
    restored, cut_off = (fp8.dequantize(fp8.quantize(large, by), by, torch.float64) for by in (shift, none))
    assert restored[..., 0] == pytest.approx(1e30, rel=1 / 16)
    assert cut_off[..., 0] == 448


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("gate_heads", "splits"), [(2, 1), (6, 4)])
def test_the_wall_kernel_reads_8_bits(gate_heads: int, splits: int) -> None:
    (*tensors, texts), shifts, expected, _ = fp8_wall_case(gate_heads, 16, 0.86)
    tensors[1:3] = [part.view(torch.float8_e4m3fn) for part in tensors[1:3]]
    y = importlib.import_module("atma_sweep.kernels.wall_step.triton").attend(
        *tensors, shifts, texts.tables_BP, texts.lengths_B, scale=0.25, window=0, splits=splits
    )
    assert (y.double() - expected).abs().max() <= 1e-5


def key_gated_case(
    lengths: list[int], h: int, p: int, j: int, x: int, page: int, g_max: float | None, rotary: Kind | Literal["none"],
    dtype: torch.dtype, window: int | None = None,
) -> tuple[list[Any], Tensor, Tensor]:  # fmt: skip
    """Return inputs of `paged_wall_from_keys`, its result by the formula in float64, and a bound of scores [B, H].

    Keys and gates' matrices are multiples of 1/4 and 1/16, so that no dtype rounds their products. Every third channel
    has no gate.
    """
    draw = torch.Generator().manual_seed(len(lengths))
    q = torch.randn(len(lengths), h, x, generator=draw).to(dtype)
    weight = torch.randint(-2, 3, (p, x, x), generator=draw).double() / 16
    offset = 3 * torch.randn(p, x, generator=draw, dtype=torch.float64)
    weight[:, ::3], offset[:, ::3] = 0, torch.inf
    cached, outputs, sizes = [], [], []
    for row, n in enumerate(lengths):
        k = torch.randint(-4, 5, (n, j, x), generator=draw) / 4.0
        v = torch.randn(n, j, x, generator=draw).to(dtype)
        cached.append((k.to(dtype), v))
        first = 0 if window is None else max(0, n - window)
        output, size = torch.zeros(h, x, dtype=torch.float64), torch.zeros(h, dtype=torch.float64)
        turned = k.double() if rotary == "none" else apply_rotary_reference(k[None].double(), rotary, 50.0)[0]
        for head in range(h if n else 0):
            kv, gate = head * j // h, head * p // h
            log_gate = torch.log(torch.sigmoid(k[first:, kv].double() @ weight[gate].T + offset[gate]))
            if g_max is not None:
                log_gate = g_max * (torch.exp(log_gate / g_max) - 1)
            decay = torch.stack([log_gate[at + 1 :].sum(0) for at in range(n - first)]).exp()
            terms = q[row, head].double() * turned[first:, kv] * decay * x**-0.5
            output[head] = terms.sum(-1).softmax(0) @ v[first:, kv].double()
            size[head] = terms.abs().sum(-1).max()
        outputs.append(output)
        sizes.append(size)
    k_pool, tables = paged([k for k, _ in cached], page)
    v_pool, _ = paged([v for _, v in cached], page)
    gates = key_gated.KeyGates(weight, offset, g_max, rotary, 50.0)
    texts = Texts(tables, torch.tensor(lengths, dtype=torch.int32), page)
    return [q, k_pool, v_pool, gates, texts], torch.stack(outputs), torch.stack(sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("gate_heads", "window", "page", "g_max", "rotary"), [
    (2, None, 64, 0.86, "none"), (4, 7, 8, None, "none"), (4, 70, 24, 0.86, "full"), (2, 1, 4, None, "none")
])  # fmt: skip
def test_key_gated_step_is_the_formula(
    gate_heads: int,
    window: int | None,
    page: int,
    g_max: float | None,
    rotary: Kind | Literal["none"],
    dtype: torch.dtype,
) -> None:
    """In bf16 the roundings are those of rotated keys and of the result: see `test_wall_step_is_the_formula`."""
    args, expected, size = key_gated_case([133, 1, 0, 64], 4, gate_heads, 2, 6, page, g_max, rotary, dtype, window)
    y = key_gated.paged_wall_from_keys(*args, window=window)
    assert y.dtype == dtype
    if dtype == torch.bfloat16:
        u = torch.finfo(dtype).eps / 2
        bound = (
            torch.expm1(2 * 1.01 * (0 if rotary == "none" else u) * size)[..., None] * 4.5 + u * expected.abs() + 1e-5
        )
        assert ((y.double() - expected).abs() <= bound).all()
    else:
        assert (y.double() - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.thorough
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("gate_heads", "splits", "window", "page", "g_max", "rotary"), [
    (2, 4, None, 64, 0.86, "none"), (6, 1, 37, 32, None, "full"), (2, 16, 1, 32, 0.86, "none"), (6, 4, 70, 256, None, "none"),
    (2, 2, None, 64, 0.86, "half-truncated"),
])  # fmt: skip
def test_the_key_gated_kernel_sums_later_ranges(
    gate_heads: int, splits: int, window: int | None, page: int, g_max: float | None, rotary: Kind | Literal["none"]
) -> None:
    """In float32, against the formula: the kernel errs by no more than the torch implementation may."""
    args, expected, _ = key_gated_case(
        [200, 0, 1, 64], 6, gate_heads, 2, 16, page, g_max, rotary, torch.float32, window
    )
    q, k_pool, v_pool, gates, texts = args
    turns = [] if rotary == "none" else [frequencies(rotary, 16, 50.0).float()]
    y = importlib.import_module("atma_sweep.kernels.key_gated_step.triton").attend(
        q, k_pool, v_pool, gates.weight_PNX.float(), gates.offset_PN.float(), turns, texts.tables_BP, texts.lengths_B,
        g_max=g_max or 0.0, scale=0.25, window=window or 0, splits=splits,
    )  # fmt: skip
    assert (y.double() - expected).abs().max() <= 1e-5


@pytest.mark.thorough
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gates_of_the_kernel_lose_no_digits() -> None:
    """Equal gates of 3,000 tokens, from closed to wide open: the weight of the first key shows the decay of a channel.

    Its logarithm is 20 exp(S), with S the sum of log gates; a relative error of 1e-6 of S changes it by 8e-6 at most.
    """
    n, x, channels = 3000, 16, [0, 12, 14, 15]
    offset = torch.linspace(-6, 12, x, dtype=torch.float64)[None]
    tables, lengths = torch.arange(1, 13, dtype=torch.int32)[None], torch.tensor([n], dtype=torch.int32)
    pages, q = torch.zeros(13, 256, 1, x), torch.zeros(1, 4, x)
    pages[1, 0], q[0, range(4), channels] = 1, 20.0
    kernels = importlib.import_module("atma_sweep.kernels.key_gated_step.triton")
    for g_max in (0.86, None):
        y = kernels.attend(
            q, pages, pages, torch.zeros(1, x, x), offset.float(), [], tables, lengths, g_max=g_max or 0.0, scale=1.0,
            window=0, splits=4,
        )  # fmt: skip
        log_gate = functional.logsigmoid(offset[0, channels])
        log_gate = log_gate if g_max is None else g_max * torch.expm1(log_gate / g_max)
        weight = torch.exp(20 * torch.exp((n - 1) * log_gate))
        torch.testing.assert_close(y[0, :, 0].double(), weight / (weight + n - 1), rtol=2e-5, atol=0)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_a_convolution_token_by_token(taps: int, residual: bool) -> None:
    x_BTC, w_CW = drawn((2, 9, 5), (5, taps))
    expected = causal_conv_reference(x_BTC, w_CW, residual)
    tails = torch.zeros(4, taps - 1, 5, dtype=torch.float64)
    slots = torch.tensor([3, 1])
    for row, slot in enumerate(slots):
        tails[slot] = last_inputs(x_BTC[row, :2], taps)
    for t in range(2, 9):
        torch.testing.assert_close(conv_step(x_BTC[:, t], tails, slots, w_CW, residual), expected[:, t])
    assert torch.equal(tails[[0, 2]], torch.zeros(2, taps - 1, 5, dtype=torch.float64))


@pytest.mark.thorough
@pytest.mark.parametrize("channelwise", [False, True])
def test_a_thousand_delta_steps_equal_the_scan(channelwise: bool) -> None:
    t, h, j, x = 1000, 4, 2, 8
    q, k, v, gate, step = drawn((2, t, h, x), (2, t, j, x), (2, t, j, x), (2, t, h, x), (2, t, h), dtype=torch.float32)
    log_gamma = functional.logsigmoid(gate + 3 if channelwise else gate[..., 0] + 3)
    beta = step.sigmoid()
    reference = channelwise_delta_reference if channelwise else gated_delta_reference
    expected, last = reference(*(part.double() for part in (q, k, v, log_gamma, beta)))
    states, slots = torch.zeros(5, h, x, x), torch.tensor([4, 2])
    for i in range(t):
        r = delta_step(q[:, i], k[:, i], v[:, i], log_gamma[:, i], beta[:, i], states, slots)
        torch.testing.assert_close(r.double(), expected[:, i], rtol=0, atol=1e-5)
    torch.testing.assert_close(states[slots].double(), last, rtol=0, atol=1e-5)
    assert not states[[0, 1, 3]].any()


def kernels_of_attention(
    lengths: list[int], h: int, j: int, x: int, page: int, window: int | None, splits: int, dtype: torch.dtype, device: str
) -> None:  # fmt: skip
    near: Any = {"rtol": 0, "atol": NEAR if dtype == torch.float32 else 2e-2}
    keys = [drawn((n, j, x), (n, j, x), dtype=torch.float32) for n in lengths]
    k_pool, tables = paged([k for k, _ in keys], page)
    v_pool, _ = paged([v for _, v in keys], page)
    q, base, slope, gain, beta, v_null = drawn(
        (len(lengths), h, x), (h,), (h,), (h,), (h,), (h, x), dtype=torch.float32
    )
    q, k_pool, v_pool = (part.to(device, dtype) for part in (q, k_pool, v_pool))
    raw = [part.to(device) for part in (base, slope, gain, beta, v_null)]
    texts = Texts(tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), page)
    wide = (q.double(), k_pool.double(), v_pool.double())
    wanted = paged_softmax(*wide, texts, window=window, backend="torch")
    kernels = importlib.import_module("atma_sweep.kernels.paged.triton")
    options: Any = {"scale": x**-0.5, "window": window or 0, "splits": splits}
    args = q, k_pool, v_pool, texts.tables_BP, texts.lengths_B
    y, _ = kernels.attend(*args, [], **options)
    torch.testing.assert_close(y.double(), wanted, **near)
    for floor in (1e-30, 0.5):
        c_wanted, mag_wanted = paged_polar(
            *wide, *(part.double() for part in raw), texts, window=window, n_eff_floor=floor, backend="torch"
        )  # type: ignore[misc]
        c, mag = kernels.attend(*args, raw, **options, floor=floor)
        torch.testing.assert_close(c.double(), c_wanted, **near)
        torch.testing.assert_close(mag.double(), mag_wanted, **near)


@interpreted
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: infinities that a mask takes out
@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (16, 1), (4, 37)])
def test_the_kernels_merge_any_number_of_ranges(splits: int, window: int | None) -> None:
    kernels_of_attention([100, 0, 1, 33, 64], 6, 2, 16, 32, window, splits, torch.float32, "cpu")


def kernel_as_float64(
    function: Any, *args: Any, table: int | None = None, table_near: float = NEAR, **options: Any
) -> Tensor:
    """Return the kernel's result, near that of torch in float64, and so is the table that both change in place."""
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    wanted, actual = function(*wide, backend="torch", **options), function(*args, backend="triton", **options)
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=NEAR)
    if table is not None:
        torch.testing.assert_close(args[table].double(), wide[table], rtol=0, atol=table_near)
    return actual  # type: ignore[no-any-return]


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("channelwise", [False, True])
def test_the_delta_kernel_changes_its_own_states_alone(channelwise: bool) -> None:
    b, h, j, x = 3, 4, 2, 16
    q, k, v, gate, step, states = drawn(
        (b, h, x), (b, j, x), (b, j, x), (b, h, x), (b, h), (6, h, x, x), dtype=torch.float32
    )
    before, gamma = states.clone(), functional.logsigmoid(gate if channelwise else gate[..., 0])
    kernel_as_float64(delta_step, q, k, v, gamma, step.sigmoid(), states, torch.tensor([5, 0, 3]), table=5)
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])


@interpreted
@pytest.mark.parametrize(("function", "taps", "residual"), [
    *((conv_step, taps, (residual,)) for taps in (1, 2, 4) for residual in (False, True)),
    (gated_conv_step, 1, ()), (gated_conv_step, 3, ()),
])  # fmt: skip
def test_the_convolution_kernels_shift_their_tails(function: Any, taps: int, residual: tuple[bool, ...]) -> None:
    gated = function is gated_conv_step
    x, w, tails = drawn((3, 900 if gated else 300), (300, taps), (5, taps - 1, 300), dtype=torch.float32)
    args = x, tails, torch.tensor([4, 0, 2]), w, *residual
    kernel_as_float64(function, *args, table=1, table_near=NEAR if gated else 0.0)


@interpreted
@pytest.mark.parametrize(("size", "apart", "norm"), [(12, 24, True), (16, 16, True), (5, 7, False)])
def test_the_kernel_of_canon_reads_heads_that_stand_apart(size: int, apart: int, norm: bool) -> None:
    """Gates stand between query heads, and something else behind the values."""
    h, j, taps = 4, 2, 4
    channels = (h + 2 * j) * size
    x, w, tails = drawn(
        (3, h * apart + 2 * j * size + 9), (channels, taps), (5, taps - 1, channels), dtype=torch.float32
    )
    slots, by_hand = torch.tensor([4, 0, 2]), tails.double()
    y = kernel_as_float64(canon_step, x, tails, slots, w, (h, j, apart), norm=norm, table=1)
    for head in range(h + 2 * j):
        start = head * apart if head < h else h * apart + (head - h) * size
        part = x.double()[:, start : start + size]
        if norm and head < h + j:
            part = rms_norm_reference(part, eps=2**-23)
        of = slice(head * size, (head + 1) * size)
        seen = torch.cat([by_hand[slots][:, :, of], part[:, None]], 1)
        expected = part + torch.einsum("bwc,cw->bc", seen, w.double()[of])
        torch.testing.assert_close(y.double()[:, of], expected, rtol=0, atol=NEAR)


@interpreted
def test_the_kernel_writes_keys_and_values_into_their_pages() -> None:
    lengths, j, x, page = [9, 0, 4, 5], 2, 6, 4
    rows, k_pool, v_pool = drawn((4, 3 * j, x), (12, page, j, x), (12, page, j, x), dtype=torch.float32)
    tables = torch.tensor([[3, 5, 7], [0, 0, 0], [2, 0, 0], [9, 11, 0]], dtype=torch.int32)
    texts = Texts(tables, torch.tensor(lengths, dtype=torch.int32), page)
    wanted = k_pool.clone(), v_pool.clone()
    for text, number, offset in ((0, 7, 0), (2, 2, 3), (3, 11, 0)):
        wanted[0][number, offset], wanted[1][number, offset] = rows[text, 1 : 1 + j], rows[text, 4 : 4 + j]
    plain = k_pool.clone(), v_pool.clone()
    write_pages(rows[:, 1 : 1 + j], rows[:, 4 : 4 + j], *plain, texts, backend="torch")
    write_pages(rows[:, 1 : 1 + j], rows[:, 4 : 4 + j], k_pool, v_pool, texts, backend="triton")
    for actual, plain_pool, expected in zip((k_pool, v_pool), plain, wanted, strict=True):
        assert torch.equal(actual, expected)
        assert torch.equal(plain_pool[1:], expected[1:]), "nobody's row goes into nobody's page there"


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_read_strided_heads_of_a_pool() -> None:
    """Differential attention reads every second head of its pools."""
    q, k_pool, v_pool = drawn((2, 8, 16), (7, 16, 4, 16), (7, 16, 4, 16), dtype=torch.float32)
    texts = Texts(torch.tensor([[3, 5], [6, 0]], dtype=torch.int32), torch.tensor([19, 4], dtype=torch.int32), 16)
    kernel_as_float64(paged_softmax, q[:, 1::2], k_pool[:, :, 1::2], v_pool[:, :, ::2], texts)


@interpreted
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_ops_say_truly_what_they_return_and_change() -> None:
    """The compiler relies on these declarations; the kernels' outputs are not compared here."""
    x, w, tails, states = drawn((2, 96), (32, 4), (4, 3, 32), (4, 4, 16, 16), dtype=torch.float32)
    q, k, v, k_pool, v_pool = drawn(
        (2, 4, 16), (2, 2, 16), (2, 2, 16), (5, 16, 2, 16), (5, 16, 2, 16), dtype=torch.float32
    )
    gamma, base, v_null = drawn((2, 4), (4,), (4, 16), dtype=torch.float32)
    slots, tables = torch.tensor([2, 0]), torch.tensor([[3, 4], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    where = k_pool, v_pool, tables, lengths
    packed = torch.zeros(k_pool.shape, dtype=torch.uint8)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (conv.plain_step, (x[:, :32], tails, slots, w, True)),
        (conv.gated_step, (x, tails, slots, w)),
        (conv.heads_step, (x, tails, slots, w, 2, 1, 8, True)),
        (delta.step, (q, k, v, -gamma.abs(), gamma.sigmoid(), states, slots)),
        (backends.put, (k, v, *where)),
        (backends.attend, (q, *where, [], 0.25, 0, 0.0)),
        (backends.attend, (q, *where, [base, base, base, base, v_null], 0.25, 7, 1e-30)),
        *((key_gated.attend, (q, k_pool, v_pool, torch.zeros(2, 16, 16), torch.zeros(2, 16), turns, tables, lengths, 0.86, 0.25, 0))
          for turns in ([], [torch.ones(8)])),
        *((wall_step.attend, (q, *pools, torch.zeros(5, 1, 2, 16).double(), torch.zeros(2, 2, 16).double(), shifts, tables, lengths, 0.25, 0))
          for pools, shifts in (((k_pool, v_pool), []), ((packed, packed), [packed[:, ::4].to(torch.int8), packed[..., 0].to(torch.int8)]))),
    ]  # fmt: skip
    for op, args in cases:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("splits", [1, 8, 32, 256])
def test_the_compiled_kernels_of_attention(window: int | None, splits: int) -> None:
    kernels_of_attention([2000, 1, 513, 0, 256], 8, 2, 128, 256, window, splits, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gate_heads", [2, 8])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (16, None), (8, 700)])
def test_the_compiled_wall_kernel(gate_heads: int, splits: int, window: int | None) -> None:
    args, expected, _ = wall_case([2000, 1, 513, 0], 8, gate_heads, 2, 128, 256, 64, 0.86, torch.bfloat16, window)
    kernels = importlib.import_module("atma_sweep.kernels.wall_step.triton")
    *tensors, texts = args
    where = texts.tables_BP.cuda(), texts.lengths_B.cuda()
    y = kernels.attend(
        *[part.cuda() for part in tensors], [], *where, scale=128**-0.5, window=window or 0, splits=splits
    )
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("gate_heads", "splits"), [(2, 1), (6, 4)])
def test_the_compiled_wall_kernel_reads_8_bits(gate_heads: int, splits: int) -> None:
    (*tensors, texts), shifts, expected, _ = fp8_wall_case(gate_heads, 128, 0.86)
    tensors[:3] = [tensors[0].bfloat16(), *(part.view(torch.float8_e4m3fn) for part in tensors[1:3])]
    parts = [part.cuda() for part in (*tensors, *shifts, texts.tables_BP, texts.lengths_B)]
    y = importlib.import_module("atma_sweep.kernels.wall_step.triton").attend(
        *parts[:5], parts[5:7], *parts[7:], scale=128**-0.5, window=0, splits=splits
    )
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("gate_heads", "rotary"), [(2, "none"), (8, "full")])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (16, None), (8, 700)])
def test_the_compiled_key_gated_kernel(
    gate_heads: int, rotary: Kind | Literal["none"], splits: int, window: int | None
) -> None:
    args, expected, _ = key_gated_case(
        [2000, 1, 513, 0], 8, gate_heads, 2, 128, 256, 0.86, rotary, torch.bfloat16, window
    )
    *pools, gates, texts = args
    weight, offset = gates.weight_PNX.to(torch.bfloat16), gates.offset_PN.float()
    turns = [] if rotary == "none" else [frequencies(rotary, 128, 50.0).float().cuda()]
    y = importlib.import_module("atma_sweep.kernels.key_gated_step.triton").attend(
        *[part.cuda() for part in (*pools, weight, offset)], turns, texts.tables_BP.cuda(), texts.lengths_B.cuda(),
        g_max=0.86, scale=128**-0.5, window=window or 0, splits=splits,
    )  # fmt: skip
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=4e-2)


@pytest.mark.gpu
def test_a_gpu_takes_the_kernels() -> None:
    cuda = torch.device("cuda")
    assert backends.choose_backend(cuda, torch.bfloat16, 128).backend == "triton"
    assert delta.choose_backend(cuda, torch.bfloat16, 128).backend == "triton"
    assert wall_step.choose_backend(cuda, torch.bfloat16, 128).backend == "triton"
    assert key_gated.choose_backend(cuda, torch.bfloat16, 128).backend == "triton"
    assert key_gated.choose_backend(cuda, torch.bfloat16, 256).backend == "torch"
    assert wall_step.choose_backend(cuda, torch.bfloat16, 128, chunk=8).backend == "torch"
    if torch.cuda.get_device_capability() >= (8, 9):
        assert wall_step.choose_backend(cuda, torch.bfloat16, 128, fp8=True).backend == "triton"
    assert conv.choose_backend(cuda, torch.bfloat16).backend == "triton"
    assert backends.choose_backend(cuda, torch.bfloat16, 128, page=24).backend == "torch"
