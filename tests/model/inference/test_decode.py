"""Texts that are written token by token, against the whole text worked out at once."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from atma_sweep.kernels.conv_step import op as conv_step
from atma_sweep.kernels.delta_step import op as delta_step
from atma_sweep.kernels.dispatch import BackendChoice
from atma_sweep.kernels.paged import op as paged_attention
from atma_sweep.kernels.row_linear import op as row_linear
from atma_sweep.model import backbone
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.compilation import CompileError, compile_full_graph
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.inference import decode
from atma_sweep.model.inference.decode import PagedDecoder, RecomputeDecoder, cast_for_decoding, make_decoder
from atma_sweep.model.inference.generation import generate_tokens, sample_token
from atma_sweep.model.kv_cache import DUMMY, CacheFull
from atma_sweep.model.mixers.softmax import NoPE
from atma_sweep.model.registry import register_mixer
from graded import interpreted
from registries import PAIRS, scope
from tiers import every_nth
from torch import Tensor

Awake = Callable[..., Backbone]
STEPPED = [pair for pair in PAIRS if pair[0] != "path"]
TOKENS, PAGE = 23, 4


def texts(*lengths: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 37, (length,), generator=draw) for length in lengths]


def logits_at_once(model: Backbone, text_T: Tensor, *, full_context: bool = False) -> Tensor:
    """Logits [T, V]."""
    with torch.no_grad():
        return model.logits(model.features(text_T[None], full_context=full_context).hidden_BTD)[0]


near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def small_page(model: Backbone, **options: Any) -> PagedDecoder:
    return PagedDecoder(model, page=PAGE, **options)


def shuffled(paged: PagedDecoder) -> PagedDecoder:
    """With pages and slots handed out in any order, and with junk where nothing was written yet."""
    book, draw = paged.allocator, random.Random(1)
    slots = [book.allocate(1) for _ in range(book.capacity.slots)]
    for slot in draw.sample(slots * 3, 3 * len(slots)):
        book.extend([slot], PAGE)
    for slot in draw.sample(slots, len(slots)):
        book.free(slot)
    return paged


@pytest.mark.parametrize(
    ("pair", "window"), every_nth([(pair, window) for pair in STEPPED for window in (False, True)], 24)
)
def test_decoding_gives_the_logits_of_a_forward_pass(awake: Awake, pair: tuple[str, str], window: bool) -> None:
    """Three texts of other lengths side by side, one of a single token, in pages in any order."""
    model = awake(attn_type=pair[0], memory=pair[1], window=window, window_size=6).eval()
    three = texts(TOKENS, TOKENS, TOKENS)
    begun = (1, 9, 14)
    paged = shuffled(small_page(model, texts=3, tokens=TOKENS))
    wanted = [logits_at_once(model, text) for text in three]
    slots = []
    for text, at, rows in zip(three, begun, wanted, strict=True):
        slot, logits_V = paged.begin(text[:at])
        near(logits_V, rows[at - 1])
        slots.append(slot)
    for done in range(TOKENS - begun[0]):
        alive = [index for index, at in enumerate(begun) if at + done < TOKENS]
        new = torch.stack([three[index][begun[index] + done] for index in alive])
        logits = paged.step([slots[index] for index in alive], new)
        for row, index in zip(logits, alive, strict=True):
            near(row, wanted[index][begun[index] + done])


WALL = [
    {},
    {"tie": "kv", "rotary": "full"},
    {"g_max": "none"},
    {"gates": "scalar", "tie": "kv"},
    {"gate_source": "keys"},
    {"gate_source": "keys", "tie": "kv", "rotary": "full", "subdim": 3},
    {"gate_source": "keys", "gates": "scalar", "g_max": "none"},
]
"""Settings of wall: gates per query head, per KV head, of any steepness, per head, and from keys."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "window", "page"),
    [(s, window, page) for s in WALL for window, page in ((False, 256), (True, 24), (False, 24))],
)
def test_wall_decodes_over_several_chunks(awake: Awake, settings: dict[str, Any], window: bool, page: int) -> None:
    """Chunks of 64 tokens that begin before, at and after the end of the prompts; a text is one page or several.

    Prompts are read 40 tokens at a time, which the cache rounds up to pages: gates are summed over several such pieces.
    """
    mixers = {"wall": {"gate_std": 0.7, "gate_bias": -1.0} | settings}
    model = awake(attn_type="wall", mixers=mixers, window=window, window_size=70).eval()
    begun, tokens = (1, 64, 100), 145
    three = texts(tokens, tokens, tokens)
    paged = PagedDecoder(model, texts=3, tokens=tokens, page=page, chunk=40)
    wanted = [logits_at_once(model, text) for text in three]
    slots = [paged.begin(text[:at])[0] for text, at in zip(three, begun, strict=True)]
    for done in range(tokens - max(begun)):
        new = torch.stack([text[at + done] for text, at in zip(three, begun, strict=True)])
        for row, rows, at in zip(paged.step(slots, new), wanted, begun, strict=True):
            near(row, rows[at + done])


@pytest.mark.parametrize("settings", WALL[-3:])
def test_key_gated_wall_decodes_in_float32_within_1e_5(
    small: Callable[..., ModelConfig], wake: Callable[[Backbone], None], settings: dict[str, Any]
) -> None:
    """The logits of a step from plain keys differ from those of the forward pass by float32's roundings alone."""
    model = build(small(attn_type="wall", mixers={"wall": {"gate_std": 0.7} | settings}), seed=0, dtype=torch.float32)
    wake(model)
    (text,) = texts(145)
    wanted = logits_at_once(model.eval(), text)
    paged = PagedDecoder(model, tokens=145, page=24)
    slot, _ = paged.begin(text[:100])
    for at in range(100, 145):
        torch.testing.assert_close(paged.step([slot], text[at : at + 1])[0], wanted[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tie", ["kv", "head"])
@pytest.mark.parametrize("source", ["input", "keys"])
def test_wall_caches_little_more_than_its_keys(small: Callable[..., ModelConfig], tie: str, source: str) -> None:
    """With gates per KV head at most 1.1 times nope's bytes, from keys exactly as many; else keys of every query head."""
    keys_per_value = 2 if tie == "head" else 1
    x, j, tokens = 128, 2, 512
    sizes = {"n_heads": 4, "n_kv_heads": j, "head_dim": x, "n_layers": 1, "attn_every": 1, "attn_offset": 0}
    bytes_of: dict[str, int] = {}
    for name, mixers in (("nope", {}), ("wall", {"wall": {"tie": tie, "gate_source": source}})):
        model = build(small(attn_type=name, mixers=mixers, canon=False, **sizes), seed=0, dtype=torch.bfloat16).eval()
        paged = PagedDecoder(model, tokens=tokens)
        bytes_of[name] = paged.cache_bytes(paged.begin(torch.zeros(tokens, dtype=torch.int64))[0])
    heads = j * keys_per_value
    anchors, newest = 8 * heads * x * tokens // 64, 8 * heads * x
    assert bytes_of["nope"] == 2 * 2 * j * x * tokens
    if source == "keys":
        assert bytes_of["wall"] == bytes_of["nope"]
        return
    assert bytes_of["wall"] == 2 * (heads + j) * x * tokens + anchors + newest
    if tie == "kv":
        assert bytes_of["wall"] <= 1.1 * bytes_of["nope"]


@pytest.mark.parametrize("tie", ["kv", "head"])
def test_fp8_wall_cache_is_small_and_near(
    small: Callable[..., ModelConfig], wake: Callable[[Backbone], None], tie: str
) -> None:
    """Bytes as the page on decoding counts them, in every page; logits with an error as three bits of mantissa give.

    Powers of two are shared by tokens on both sides of the prompt's end: a prompt that ends elsewhere changes nothing.
    """
    x, tokens = 128, 512
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": x, "n_layers": 1, "attn_every": 1, "attn_offset": 0}
    mixers = {"wall": {"tie": tie, "gate_std": 0.2, "gate_bias": 1.0}}
    model = build(small(attn_type="wall", mixers=mixers, **sizes), seed=0, dtype=torch.float64).eval()
    wake(model)
    (text,) = texts(tokens)
    wanted = logits_at_once(model, text)[-1]
    results = []
    for begun in (tokens - 7, tokens - 2):
        paged = PagedDecoder(model, tokens=tokens, chunk=begun // 2, fp8=True)
        slot, logits = paged.begin(text[:begun])
        for at in range(begun, tokens):
            logits = paged.step([slot], text[at : at + 1])[0]
        results.append(logits)
    heads = 4 if tie == "head" else 2
    per_token = heads * x + 2 * x + heads * x // 4 + 2 + 8 * heads * x // 64
    assert paged.states[0].pools.token_bytes == per_token
    near(results[0], results[1])
    error = (results[0] - wanted).norm() / (wanted - wanted.mean()).norm()
    assert 1e-5 < error < 1 / 16


@pytest.mark.parametrize(("settings", "reason"), [
    ({"attn_type": "nope"}, "mixer NoPE has no 8-bit cache: its keys"),
    ({"attn_type": "wall", "mixers": {"wall": {"gate_source": "keys"}}}, "gate_source: keys"),
    ({"attn_type": "wall", "mixers": {"wall": {"g_max": "none"}}}, "g_max: none"),
    ({"attn_type": "none", "memory": "deltanet"}, "caches no keys"),
])  # fmt: skip
def test_parts_without_fp8_cache_are_refused(
    small: Callable[..., ModelConfig], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PagedDecoder(build(small(**settings), seed=0), tokens=4, fp8=True)


@pytest.mark.thorough
def test_a_window_keeps_the_pages_that_it_needs_and_no_more(awake: Awake) -> None:
    model = awake(attn_type="polar", window=True, window_size=5).eval()
    (text,) = texts(60)
    paged = small_page(model, tokens=60, pages=3)
    rows = logits_at_once(model, text)
    slot, _ = paged.begin(text[:30])
    for position in range(30, 60):
        logits = paged.step([slot], text[position][None])
        near(logits[0], rows[position])
        assert paged.allocator.num_used_pages <= 3
    paged.close(slot)
    assert paged.allocator.num_used_pages == 0
    full = small_page(model, tokens=60, full_context=True)
    slot, logits_V = full.begin(text)
    near(logits_V, logits_at_once(model, text, full_context=True)[-1])
    assert full.allocator.num_used_pages == 15


def test_rows_that_only_fill_a_batch_up_change_no_text(awake: Awake) -> None:
    """The dummy's page, tail and state are poisoned: nobody reads them, and nobody's are written with them."""
    model = awake(attn_type="polar", memory="gated_delta").eval()
    first, second = texts(9, 12)
    paged = small_page(model, texts=2, tokens=20)
    plain = small_page(model, texts=2, tokens=20)
    slots = [paged.begin(text)[0] for text in (first, second)]
    for text in (first, second):
        plain.begin(text)
    dummy = paged.allocator.capacity.slots
    with torch.inference_mode():
        for state in paged.states:
            of_texts = [state] if isinstance(state, Tensor) else [*state.conv_tails, state.memory]
            for table in of_texts:
                table[dummy] = torch.nan
            if not isinstance(state, Tensor):
                for name in ("k", "v"):
                    state.pools[name][DUMMY] = torch.nan
    # one batch of four either way: a product of two rows rounds otherwise
    batch = [slots[0], dummy, slots[1], dummy], torch.tensor([5, 1, 7, 2])
    assert torch.equal(paged.step(*batch)[[0, 2]], plain.step(*batch)[[0, 2]])
    again = paged.step(slots, torch.tensor([3, 4]))
    assert torch.equal(again, plain.step(slots, torch.tensor([3, 4])))
    assert not again.isnan().any()


@pytest.mark.thorough
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("pair", "window"), [(("polar", "gated_delta"), False), (("fox", "none"), True)])
def test_texts_come_go_fork_and_take_turns(awake: Awake, pair: tuple[str, str], window: bool, graphs: bool) -> None:
    """Any texts in any order at any time, often the same ones again; pages of four tokens are crossed and given back."""
    model = awake(attn_type=pair[0], memory=pair[1], window=window, window_size=6).eval()
    draw = random.Random(7)
    paged = shuffled(small_page(model, texts=4, tokens=40, graphs=graphs))
    texts_: dict[int, list[int]] = {}
    last: list[int] = []
    for turn in range(60):
        kind = draw.choice(["begin", "fork", "close", *["step"] * 4, *["again"] * 6])
        if kind == "begin" and len(texts_) < 4:
            new = [draw.randrange(37) for _ in range(draw.randrange(1, 12))]
            texts_[paged.begin(torch.tensor(new))[0]] = new
        elif kind == "fork" and 0 < len(texts_) < 4:
            slot = draw.choice(sorted(texts_))
            texts_[paged.fork(slot)] = list(texts_[slot])
        elif kind == "close" and len(texts_) > 1:
            slot = draw.choice(sorted(texts_))
            paged.close(slot)
            del texts_[slot]
        elif texts_:
            again = [slot for slot in last if slot in texts_]
            step_slots = draw.sample(sorted(texts_), draw.randrange(1, len(texts_) + 1))
            last = again if kind == "again" and again else step_slots
            last = [slot for slot in last if len(texts_[slot]) < 40]
            if not last:
                continue
            tokens = [draw.randrange(37) for _ in last]
            logits = paged.step(last, torch.tensor(tokens))
            for slot, token, row in zip(last, tokens, logits, strict=True):
                texts_[slot].append(token)
                if turn % 3 == 0:
                    wanted = logits_at_once(model, torch.tensor(texts_[slot]))[-1]
                    near(row, wanted)
        assert {slot: paged.allocator.length(slot) for slot in texts_} == {s: len(t) for s, t in texts_.items()}
        lengths = paged.allocator.page_tables.lengths_R.tolist()
        assert [lengths[slot] for slot in texts_] == [len(text) for text in texts_.values()], "as the device counts"
        assert sum(lengths) == sum(map(len, texts_.values()))
    assert max(map(len, texts_.values())) > 20


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"attn_type": "polar", "memory": "gated_delta"},
        {"attn_type": "nope", "memory": "kda", "bias": False},
        {"attn_type": "wall", "memory": "deltanet", "residual": "normed"},
        {"attn_type": "rope", "memory": "none", "bias": False, "mlp": "swiglu", "tie_head": True},
        {"attn_type": "nope", "memory": "omega", "canon": False, "output_gate": False, "qk_norm": False},
    ],
)
def test_joined_matrices_and_norms_in_products_change_nothing(
    awake: Awake, monkeypatch: pytest.MonkeyPatch, few: bool, changes: dict[str, Any]
) -> None:
    """In float64; a few texts take their norms, gates and sums in their products, others one product for q, k and v."""
    model = awake(**changes).eval()
    two = texts(12, 7)
    wanted = [logits_at_once(model, text) for text in two]
    model.join()
    monkeypatch.setattr(Backbone, "uses_fused_rows", lambda self, rows: few)
    paged = small_page(model, texts=2, tokens=20)
    slots = [paged.begin(text[:5])[0] for text in two]
    for position in (5, 6):
        logits = paged.step(slots, torch.stack([text[position] for text in two]))
        for row, rows in zip(logits, wanted, strict=True):
            near(row, rows[position])


@pytest.mark.thorough
@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_by_kernels_alone_in_the_interpreter(
    small: Callable[..., ModelConfig], wake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a step as a GPU puts them together, in float32, pages of 16 tokens and heads of 16."""
    model = build(small(attn_type="polar", memory="gated_delta", head_dim=16), seed=0)
    wake(model)
    two = texts(35, 20)
    wanted = [logits_at_once(model, text) for text in two]
    model.eval().join()
    kernels, several = BackendChoice("triton", "interpreted"), BackendChoice("torch", "several rows")
    for module in (paged_attention, conv_step, delta_step):
        monkeypatch.setattr(module, "choose_backend", lambda *args, **named: kernels)
    for module in (backbone, row_linear):
        monkeypatch.setattr(module, "choose_backend", lambda _d, _t, rows: kernels if rows == 1 else several)
    paged = PagedDecoder(model, texts=2, tokens=48, page=16)
    slots = [paged.begin(text[:at])[0] for text, at in zip(two, (30, 15), strict=True)]
    for turn in range(5):
        tokens_B = torch.stack([two[0][30 + turn], two[1][15 + turn]])
        # each text alone, then both together
        groups = [[0], [1]] if turn % 2 == 0 else [[0, 1]]
        logits = torch.cat([paged.step([slots[at] for at in group], tokens_B[group]) for group in groups])
        for row, rows, at in zip(logits, wanted, (30, 15), strict=True):
            near(row, rows[at + turn], atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_dropped_decoder_is_gone_at_once(awake: Awake, graphs: bool) -> None:
    model = awake(attn_type="polar", memory="gated_delta").eval()
    assert count_survivors(lambda: small_page(model, texts=2, tokens=12, graphs=graphs)) == 0


def count_survivors(make: Callable[[], PagedDecoder]) -> int:
    """Return how many objects of a used and dropped decoder survive without a garbage collection.

    Pools take most of a GPU's memory, so a dropped decoder must free them at once.


    """

    def used() -> list[weakref.ref[Any]]:
        paged = make()
        slot, _ = paged.begin(texts(5)[0])
        for token in (1, 2, 3):
            paged.step([slot], torch.tensor([token]))
        states = [state for state in paged.states if isinstance(state, Tensor)]
        states += [state.pools["k"] for state in paged.states if not isinstance(state, Tensor)]
        assert len(states) == len(paged.states)
        return [
            weakref.ref(target) for target in (*states, paged, paged.allocator, paged.allocator.page_tables.tables_RP)
        ]

    gc.collect()
    gc.disable()
    try:
        return sum(reference() is not None for reference in used())
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("pair", [("polar", "gated_delta"), ("nope", "none")])
def test_compiled_step_equals_eager_step(awake: Awake, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, texts of any lengths; one compilation for a number of texts; and nothing of it holds the pools.

    Code for a CPU, which nobody decodes with, is not generated; the tests of a GPU do.
    """
    compiled_parts: list[Any] = []

    def counted(part: Any) -> Any:
        compiled_parts.append(part)
        return compile_full_graph(part, backend="aot_eager")

    monkeypatch.setattr(decode, "compile_full_graph", counted)
    model = awake(attn_type=pair[0], memory=pair[1], n_layers=2, attn_every=2, attn_offset=1).eval()
    three = texts(9, 4, 12)
    logits_by_mode = {}
    for compiled in (False, True):
        paged = small_page(model, texts=3, tokens=30, compiled=compiled)
        slots = [paged.begin(text)[0] for text in three]
        rows = []
        for turn in range(8):
            step_slots = [slots, slots[::-1], slots[1:], slots[:2]][turn % 4]
            rows.append(paged.step(step_slots, torch.arange(len(step_slots)) + turn))
        logits_by_mode[compiled] = torch.cat(rows)
        assert paged.not_compiled is None
        assert len(compiled_parts) == (2 * 3 if compiled else 0), "the parts of a step of four texts, and of two"
    near(logits_by_mode[True], logits_by_mode[False])
    assert count_survivors(lambda: small_page(model, tokens=12, compiled=True)) == 0


@pytest.mark.thorough
def test_step_runs_eagerly_if_compilation_fails(awake: Awake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; the texts know nothing of the attempt."""
    (text,) = texts(9)

    def after(paged: PagedDecoder) -> Tensor:
        slot, _ = paged.begin(text)
        return torch.stack([paged.step([slot], torch.tensor([token]))[0] for token in (1, 2, 3)])

    model = awake(attn_type="wall", memory="omega").eval()
    paged = small_page(model, tokens=12, compiled=True)
    assert paged.not_compiled == "a part of the network processes its sequences one by one"
    assert torch.equal(after(paged), after(small_page(model, tokens=12)))

    def refuses(part: Any) -> Any:
        def run(*args: Any) -> Any:
            raise CompileError(RuntimeError("no\nnot this"))

        return run

    monkeypatch.setattr(decode, "compile_full_graph", refuses)
    model = awake(attn_type="polar", memory="gated_delta").eval()
    paged = small_page(model, tokens=12, compiled=True)
    assert paged.not_compiled is None
    assert torch.equal(after(paged), after(small_page(model, tokens=12)))
    assert paged.not_compiled == "no"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pair", [("polar", "gated_delta"), ("nope", "kda"), ("rope", "none"), ("alibi", "none"), ("wall", "none")]
)
def test_a_replayed_graph_gives_the_eager_step_bit_for_bit(pair: tuple[str, str]) -> None:
    """For other texts of other lengths than those it was captured with."""
    model = on_the_gpu(pair)
    three = [text.cuda() for text in texts(40, 7, 19)]
    logits_by_mode = {}
    for graphs in (False, True):
        paged = PagedDecoder(model, texts=4, tokens=64, page=16, graphs=graphs)
        slots = [paged.begin(text)[0] for text in three]
        rows = []
        for turn in range(20):
            # four rows either way: a product of three may round otherwise
            batch = (
                [*slots, paged.allocator.padding_slot]
                if turn % 2
                else [slots[1], slots[2], slots[0], paged.allocator.padding_slot]
            )
            rows.append(paged.step(batch, torch.arange(4, device="cuda") + turn)[:3])
        logits_by_mode[graphs] = torch.stack(rows)
    assert torch.equal(logits_by_mode[True], logits_by_mode[False])


def on_the_gpu(pair: tuple[str, str]) -> Backbone:
    config = ModelConfig(
        d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=37, attn_type=pair[0], memory=pair[1]
    )
    model = build(config, seed=0, device="cuda", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            parameter.add_((0.05 * noise).to(parameter))
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [("polar", "gated_delta"), ("nope", "kda"), ("rope", "none"), ("diff", "none")])
def test_a_compiled_step_on_a_gpu_is_near_float64(pair: tuple[str, str]) -> None:
    """The same weights on the CPU; replayed and as it comes, with and without the compiler."""
    model = on_the_gpu(pair)
    exact = build(model.config, seed=0, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    three = texts(40, 7, 19)
    paged = PagedDecoder(model, texts=3, tokens=64, page=16, compiled=True)
    ways = [(True, True), (True, False), (False, True), (False, False)]
    slots = [paged.begin(text)[0] for text in three]
    for turn in range(20):
        graphs, compiled = ways[turn % 4]
        new = torch.arange(3) + turn
        logits = paged.step(slots, new.cuda(), graphs=graphs, compiled=compiled)
        three = [torch.cat([text, token[None]]) for text, token in zip(three, new, strict=True)]
        wanted = torch.stack([logits_at_once(exact, text)[-1] for text in three])
        assert float((logits.double().cpu() - wanted).norm() / wanted.norm()) < 0.03
    assert paged.not_compiled is None


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_step_never_synchronises_and_frees_its_memory(compiled: bool) -> None:
    model = cast_for_decoding(on_the_gpu(("polar", "gated_delta")))
    paged = PagedDecoder(model, texts=3, tokens=256, page=16, compiled=compiled)
    slots = [paged.begin(text)[0] for text in texts(40, 7, 19)]
    tokens_B = torch.zeros(3, dtype=torch.int64, device="cuda")
    paged.step(slots, tokens_B)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            tokens_B = paged.step(slots, tokens_B, copy_logits=False).argmax(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pools = sum(s.pools["k"].numel() * 4 for s in paged.states if not isinstance(s, Tensor))
    held = torch.cuda.memory_allocated()
    gc.disable()
    try:
        del paged
        assert torch.cuda.memory_allocated() <= held - pools
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_that_are_cast_once_give_the_same_bits(
    small: Callable[..., ModelConfig], wake: Any, tied: bool
) -> None:
    """In bfloat16, where a step would else cast every matrix again."""
    model = build(small(memory="gated_delta", attn_type="wall", tie_head=tied), seed=0, dtype=torch.bfloat16)
    wake(model)
    used = cast_for_decoding(model.eval())
    assert used.blocks[0].get_parameter("mlp.fc.weight").dtype == torch.bfloat16
    assert model.blocks[0].get_parameter("mlp.fc.weight").dtype == torch.float32
    assert {name for name, p in used.named_parameters() if p.dtype == torch.float32} > {"norm.weight"}
    (text,) = texts(9)
    assert torch.equal(logits_at_once(used, text), logits_at_once(model, text))


@pytest.mark.thorough
@pytest.mark.parametrize("pair", [("polar", "gated_delta"), ("wall", "atlas")])
def test_forked_sequence_is_independent(awake: Awake, pair: tuple[str, str]) -> None:
    model = awake(attn_type=pair[0], memory=pair[1], window=True, window_size=6).eval()
    (text,) = texts(11)
    paged = shuffled(small_page(model, texts=3, tokens=16))
    first, _ = paged.begin(text)
    num_bytes = paged.cache_bytes(first)
    copy_slot = paged.fork(first)
    assert paged.cache_bytes(copy_slot) == num_bytes
    ends = {first: torch.tensor([1, 2, 3]), copy_slot: torch.tensor([4, 5, 6])}
    for position in range(3):
        rows = paged.step([copy_slot, first], torch.stack([ends[copy_slot][position], ends[first][position]]))
    for slot, row in zip((copy_slot, first), rows, strict=True):
        near(row, logits_at_once(model, torch.cat([text, ends[slot]]))[-1])
    paged.fork(copy_slot)
    with pytest.raises(CacheFull):
        paged.fork(copy_slot)
    # a slot that was used before remembers nothing
    paged.close(copy_slot)
    assert paged.begin(text[:3])[0] == copy_slot
    new = torch.tensor([8])
    near(paged.step([copy_slot], new)[0], logits_at_once(model, torch.cat([text[:3], new]))[-1])


@pytest.mark.thorough
def test_without_room_a_token_is_refused_and_nothing_is_lost(awake: Awake) -> None:
    model = awake(attn_type="nope").eval()
    first, second = texts(8, 8)
    paged = small_page(model, texts=2, tokens=12, pages=5)
    slots = [paged.begin(text)[0] for text in (first, second)]
    with pytest.raises(CacheFull, match="all 2 sequence slots are in use"):
        paged.begin(first)
    with pytest.raises(
        CacheFull, match="all 5 cache pages of 4 tokens are in use, 1 more are needed; close a sequence first"
    ):
        paged.step(slots, torch.tensor([1, 2]))
    assert [paged.allocator.length(slot) for slot in slots] == [8, 8]
    paged.close(slots[1])
    for token in (1, 2, 3, 4):
        logits = paged.step(slots[:1], torch.tensor([token]))
    text = torch.cat([first, torch.tensor([1, 2, 3, 4])])
    near(logits[0], logits_at_once(model, text)[-1])
    with pytest.raises(CacheFull, match="a sequence may have at most 12 tokens, got 13"):
        paged.step(slots[:1], torch.tensor([5]))


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [
    {"attn_type": "path"}, {"positions": "label", "position_settings": {"label": {"length": 64}}},
])  # fmt: skip
def test_network_without_step_recomputes_sequences(awake: Awake, changes: dict[str, Any]) -> None:
    model = awake(**changes).eval()
    assert model.no_step_reason() in ("mixer PaTH", "positions label")
    with pytest.raises(ValueError, match="cannot decode token by token"):
        PagedDecoder(model, tokens=4)
    assert isinstance(make_decoder(model, tokens=TOKENS), RecomputeDecoder)


@pytest.mark.thorough
def test_step_is_not_inherited_by_a_class_with_another_forward(awake: Awake) -> None:
    with scope():

        @register_mixer("louder")
        class Louder(NoPE):
            def forward(self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, **more: Any) -> Tensor:
                return 2 * super().forward(q_BTHX, k_BTJX, v_BTJX, **more)

        @register_mixer("turned")
        class Turned(NoPE):
            def apply_positions(self, x_BTHX: Tensor, positions_BT: Tensor | None = None) -> Tensor:
                positions = torch.arange(x_BTHX.shape[1])[None] if positions_BT is None else positions_BT
                return x_BTHX * (1 + positions[..., None, None] / 8)

        assert awake(attn_type="louder").no_step_reason() == "mixer Louder"
        model = awake(attn_type="turned").eval()
        (text,) = texts(9)
        paged = small_page(model, tokens=9)
        slot, _ = paged.begin(text[:8])
        near(paged.step([slot], text[8:])[0], logits_at_once(model, text)[-1])


def test_generation_is_repeatable_and_stops_at_stop_token(awake: Awake) -> None:
    model = awake(attn_type="rope", memory="gated_delta").eval()
    (prompt,) = texts(6)
    greedy = list(generate_tokens(model, prompt, tokens=12, temperature=0))
    assert greedy == list(generate_tokens(model, prompt, tokens=12, temperature=0))
    by_hand = prompt
    for token in greedy:
        assert token == int(logits_at_once(model, by_hand)[-1].argmax())
        by_hand = torch.cat([by_hand, torch.tensor([token])])
    drawn = list(generate_tokens(model, prompt, tokens=12, seed=4))
    assert drawn == list(generate_tokens(model, prompt, tokens=12, seed=4))
    assert drawn != list(generate_tokens(model, prompt, tokens=12, seed=5))
    assert drawn[:5] == list(generate_tokens(model, prompt, tokens=5, seed=4)), (
        "a longer text begins as the shorter one"
    )
    stop = drawn[3]
    assert list(generate_tokens(model, prompt, tokens=12, seed=4, stop=stop)) == drawn[: drawn.index(stop) + 1]
    assert max(generate_tokens(model, prompt, tokens=40, temperature=5.0, vocabulary=7)) < 7
    assert list(generate_tokens(model, prompt, tokens=0)) == []
    with pytest.raises(ValueError, match="temperature must be 0 or more"):
        next(generate_tokens(model, prompt, tokens=1, temperature=-1))
    with pytest.raises(ValueError, match="top_p must be above 0"):
        next(generate_tokens(model, prompt, tokens=1, top_p=0))
    with pytest.raises(ValueError, match="top_k must be 0 or more, got -1"):
        next(generate_tokens(model, prompt, tokens=1, top_k=-1))
    with pytest.raises(ValueError, match="seed must be a number of 64 bits"):
        next(generate_tokens(model, prompt, tokens=1, seed=2**64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_p", "count"), [(1e-9, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.937, 3), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, count: int, temperature: float) -> None:
    """Shares are 8, 4, 3, 1 and 0 of 16: of those that stay, the first to come in a race of exponential clocks is drawn."""
    ranked, shares = [2, 0, 4, 3], [8 / 16, 4 / 16, 3 / 16, 1 / 16]
    logits_V = torch.full((5,), -torch.inf, dtype=torch.float64)
    logits_V[ranked] = temperature * torch.tensor(shares, dtype=torch.float64).log()
    for seed in range(50):
        waits = torch.empty(5).exponential_(generator=torch.Generator().manual_seed(seed)).tolist()
        first = min(range(count), key=lambda rank: waits[ranked[rank]] / shares[rank])
        draw = torch.Generator().manual_seed(seed)
        assert sample_token(logits_V, temperature, 0, top_p, draw) == ranked[first]
        draw.manual_seed(seed)
        assert sample_token(logits_V, temperature, count, 1.0, draw) == ranked[first]


@pytest.mark.parametrize("logits", [[0.5, -1.0, 2.0], [-5.0, -9.0, -1.0], [3e38, 0.0, 3.1e38]])
def test_low_temperatures_take_the_most_probable_token(logits: list[float]) -> None:
    for temperature in (0.0, 5e-324, 1e-60, 1e-39, 1e-7):
        assert sample_token(torch.tensor(logits), temperature, 0, 0.9, torch.Generator().manual_seed(0)) == 2
        assert sample_token(torch.tensor(logits), temperature, 0, 1.0, torch.Generator(), vocabulary=2) == 0


def test_begin_frees_slot_after_any_error(awake: Awake, monkeypatch: pytest.MonkeyPatch) -> None:
    model = awake(attn_type="nope").eval()
    paged = small_page(model, texts=2, tokens=12, pages=5)
    monkeypatch.setattr(model, "begin", lambda *arguments, **options: 1 / 0)
    for _ in range(3):  # more often than there are slots
        with pytest.raises(ZeroDivisionError):
            paged.begin(texts(8)[0])
    assert paged.allocator.num_used_pages == 0
