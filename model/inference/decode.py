"""Decoders: texts that a network continues token by token, from a cache or anew (docs/decoding.md).

B texts of a step, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..attention import LayerState
from ..backbone import EAGER, Backbone, StepFunctions
from ..compilation import CompileError, compile_full_graph
from ..kv_cache import PAGE, CacheCapacity, CacheFull, ChunkedStates, PageAllocator
from ..layers import CausalConv, Linear, TiedHead

CHUNK = 8192
"""Tokens of a prompt that are worked through at a time."""


class Decoder(Protocol):
    """Texts under way, by slot."""

    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        """(slot, logits [V] behind the text) of a new text, int64 [T] of one token or more. Raises CacheFull."""

    def step(self, slots: Sequence[int], tokens_B: Tensor) -> Tensor:
        """Logits [B, V] behind the next token of these texts, int64 [B]. Raises CacheFull, with nothing changed."""

    def close(self, slot: int) -> None:
        """Forgets a text."""


class PagedDecoder:
    """Keys and values in pages, a state for each memory: a token costs one step, and what attention reads."""

    def __init__(
        self, model: Backbone, *, texts: int = 1, tokens: int, page: int = PAGE, pages: int | None = None,
        full_context: bool = False, chunk: int = CHUNK, graphs: bool | None = None, compiled: bool = False,
    ) -> None:  # fmt: skip
        """For so many `texts` at a time of at most `tokens` tokens. `pages` None is enough for all of them at full length.

        Without `full_context` the network keeps its window, if it has one, and no more pages than the window needs. With
        `graphs`, None: on a GPU where every part can, steps are replayed as CUDA graphs, of 1, 2, 4, 8, ... texts. With
        `compiled` torch.compile fuses what lies between the products of a step, once for each such number of texts; where it
        cannot, `not_compiled` says why and steps go on as they come. Raises ValueError for a network of which a part has no
        form for one token at a time (`Backbone.why_no_step`).
        """
        reason = model.why_no_step()
        if reason is not None:
            raise ValueError(f"{reason} has no form for one token at a time")
        self.window = model.config.window_size if model.config.window and not full_context else None
        pages_per_text = -(-tokens // page)
        capacity = CacheCapacity(
            texts, 1 + (texts * pages_per_text if pages is None else pages), page, model.device, model.dtype
        )
        self.model, self.book, self._chunk = as_used(model), PageAllocator(capacity, pages_per_text), chunk
        self.states = model.open(capacity)
        is_capturable = model.is_capturable()
        can_capture = model.device.type == "cuda" and is_capturable
        self._graphs = can_capture if graphs is None else graphs
        self._compiled = compiled
        self.not_compiled: str | None = None
        """Why steps go on without the compiler although it was asked for."""
        if compiled and not is_capturable:
            self.not_compiled = "a part of the network works its texts out one by one"
        self._prepared_steps: dict[tuple[int, bool], PreparedStep] = {}

    @torch.inference_mode()
    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        slot = self.book.open(len(tokens_T), self.window)
        step = self.book.prefill_step([slot], self.window)
        return slot, self.model.begin(tokens_T.to(self.model.device), self.states, step, chunk=self._chunk)

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """Another text that is the same so far. Raises CacheFull."""
        copy_slot = self.book.open(self.book.length(slot), self.window)
        pages = self.book.pages(slot), self.book.pages(copy_slot)
        for state in self.states:
            _copy_state(state, slot, copy_slot, *pages)
        return copy_slot

    def kept_bytes(self, slot: int) -> int:
        """Bytes that are kept of a text."""
        tokens = self.book.length(slot)
        seen = tokens if self.window is None else min(tokens, self.window)
        return sum(_state_bytes(state, slot, seen) for state in self.states)

    @torch.inference_mode()
    def step(
        self, slots: Sequence[int], tokens_B: Tensor, *, graphs: bool = True, compiled: bool = True, own: bool = True
    ) -> Tensor:
        """As the protocol says, without waiting for the device.

        `graphs` False works this step out as it comes, `compiled` False without the compiler. Without `clone` the logits may
        be those of the next step once that is asked for: no copy is made of them.
        """
        graphs = graphs and self._graphs
        compiled = compiled and self._compiled and self.not_compiled is None
        if not graphs and not compiled:
            self.book.extend(slots, window=self.window)
            rows_B = self.book.rows(slots, len(slots))
            return self._run_step(tokens_B.to(self.model.device, non_blocking=True), rows_B, EAGER)
        count = padded_batch(len(slots))
        if (count, compiled) not in self._prepared_steps:
            self._prepared_steps[count, compiled] = self._prepare_step(count, compiled)
        self.book.extend(slots, window=self.window)
        functions, tokens, replay = self._prepared_steps[count, compiled]
        rows_B = self.book.rows(slots, count)
        tokens[: len(slots)].copy_(tokens_B, non_blocking=True)
        if replay is None or not graphs:
            return self._run_step(tokens, rows_B, functions)[: len(slots)]
        graph, logits_BV = replay
        graph.replay()
        return logits_BV[: len(slots)].clone() if own else logits_BV[: len(slots)]

    def _prepare_step(self, count: int, compiled: bool) -> PreparedStep:
        """Compiles and captures a step of so many rows; they are nobody's, so that trying it out changes no text."""
        tokens_B = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        rows_B = self.book.rows([], count)
        # kernels are chosen, and what is made once is made, before the compiler looks
        self._run_step(tokens_B, rows_B, EAGER)
        functions = EAGER
        if compiled:
            try:
                functions = compile_step_functions()
                self._run_step(tokens_B, rows_B, functions)
            except CompileError as error:
                functions, self.not_compiled = EAGER, error.why
        if not self._graphs or tokens_B.device.type != "cuda":
            return PreparedStep(functions, tokens_B, None)
        return PreparedStep(functions, tokens_B, capture_graph(lambda: self._run_step(tokens_B, rows_B, functions)))

    def _run_step(self, tokens_B: Tensor, rows_B: Tensor, functions: StepFunctions) -> Tensor:
        return self.model.step(tokens_B, self.states, self.book.page_tables, rows_B, self.window, functions)

    def step_bytes(self, texts: int, tokens: int) -> int:
        """Bytes that a step of so many texts of so many tokens cannot but move: weights and what is kept of each token are read,
        states and tails read and written. A memory that is worked out text by text is left out."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        table = self.model.embedding.weight
        if not isinstance(self.model.head, TiedHead):
            weights -= table.numel() * table.element_size()  # of which a token reads one row
        return weights + texts * sum(block_bytes(state, tokens, self.window) for state in self.states)

    def close(self, slot: int) -> None:
        self.book.free(slot)


def as_used(model: Backbone) -> Backbone:
    """The network with every matrix in the type that it is used in, so that no step casts it again, and with those of q, k and v in
    one piece; itself where the types are so already."""
    kinds = (Linear, CausalConv, TiedHead)
    if model.dtype == model.blocks[0].get_parameter("mlp.fc.weight").dtype:
        return model
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(module, kinds):
            module.to(model.dtype)
    if isinstance(found.head, TiedHead) and found.positions is None:
        found.embedding.to(model.dtype)
    found.join()
    return found


def block_bytes(state: Any, tokens: int, window: int | None) -> int:
    """Bytes that a step moves for one text of one block, whose states are these."""
    if isinstance(state, Tensor):
        return 2 * state[0].numel() * state.element_size()
    visible = tokens if window is None else min(tokens, window)
    tables = [*(state.tails or []), *([state.memory] if isinstance(state.memory, Tensor) else [])]
    return visible * state.pools.token_bytes + sum(block_bytes(table, tokens, window) for table in tables)


def _copy_state(state: Any, slot: int, target: int, pages_P: Tensor, targets_P: Tensor) -> None:
    """What is kept of one text to another one."""
    if isinstance(state, Tensor):
        state[target] = state[slot]
    elif isinstance(state, ChunkedStates):
        state.states[target], state.since_chunk[target] = state.states[slot], state.since_chunk[slot]
    elif isinstance(state, LayerState):
        state.pools.copy(pages_P, targets_P)
        for part in (*(state.conv_tails or ()), *(() if state.memory is None else (state.memory,))):
            _copy_state(part, slot, target, pages_P, targets_P)


def _state_bytes(state: Any, slot: int, tokens: int) -> int:
    """Bytes that are kept of one text, of whose tokens so many are seen."""
    if isinstance(state, LayerState):
        parts = (*(state.conv_tails or ()), *(() if state.memory is None else (state.memory,)))
        return tokens * state.pools.token_bytes + sum(_state_bytes(part, slot, tokens) for part in parts)
    tensors = state[slot] if isinstance(state, Tensor) else [state.states[slot], state.since[slot]]
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


class PreparedStep(NamedTuple):
    """A step of a number of rows, ready to be taken. It knows nothing of what it belongs to, so that both go together."""

    functions: StepFunctions
    tokens_B: Tensor
    """Where a step reads its tokens."""
    replay: tuple[torch.cuda.CUDAGraph, Tensor] | None
    """A graph and the logits that it writes; None where each step is worked out as it comes."""


def capture_graph(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of a step, and what it returns: the same tensor, each time it is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = step()
    return graph, logits_BV


def compile_step_functions() -> StepFunctions:
    """The parts of a step, compiled for one number of texts: a graph for each kind of block, one for what comes before, one for after."""
    return StepFunctions(*(compile_full_graph(clone_function(part)) for part in EAGER))


def clone_function(part: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own: the compiler keeps what it made with the code, and so no longer than this."""
    assert isinstance(part, types.FunctionType)
    return types.FunctionType(part.__code__.replace(), part.__globals__, part.__name__, part.__defaults__)


def padded_batch(texts: int) -> int:
    """The next power of two: so many rows a graph has."""
    return 1 << (texts - 1).bit_length()


class RecomputeDecoder:
    """Every token works its whole text out anew: for networks that have no other way, and as what others are tested against."""

    def __init__(
        self, model: Backbone, *, texts: int = 1, tokens: int, full_context: bool = False, chunk: int = CHUNK
    ) -> None:
        """As for `PagedDecoder`."""
        self.model, self._tokens, self._full, self._chunk = model, tokens, full_context, chunk
        self._free = list(range(texts - 1, -1, -1))
        self._texts: dict[int, Tensor] = {}

    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        if not self._free:
            raise CacheFull(f"all {len(self._texts)} texts are under way; close one first")
        slot = self._free.pop()
        self._texts[slot] = tokens_T.new_empty(0)
        try:
            return slot, self._append_and_score(slot, tokens_T)
        except CacheFull:
            self.close(slot)
            raise

    def step(self, slots: Sequence[int], tokens_B: Tensor) -> Tensor:
        for slot in slots:
            self._check(len(self._texts[slot]) + 1)
        return torch.stack(
            [self._append_and_score(slot, token[None]) for slot, token in zip(slots, tokens_B, strict=True)]
        )

    def close(self, slot: int) -> None:
        del self._texts[slot]
        self._free.append(slot)

    @torch.inference_mode()
    def _append_and_score(self, slot: int, tokens: Tensor) -> Tensor:
        text_T = torch.cat([self._texts[slot], tokens])
        self._check(len(text_T))
        self._texts[slot] = text_T
        tokens_1T = text_T[None].to(self.model.device)
        hidden_1TD = self.model.features(tokens_1T, full_context=self._full, chunk=self._chunk).hidden_BTD
        return self.model.logits(hidden_1TD[0, -1])

    def _check(self, length: int) -> None:
        if length > self._tokens:
            raise CacheFull(f"a text may have {self._tokens} tokens here, got {length}")


def make_decoder(model: Backbone, *, texts: int = 1, tokens: int, full_context: bool = False) -> Decoder:
    """The fastest of the two that the network has."""
    kind = PagedDecoder if model.why_no_step() is None else RecomputeDecoder
    return kind(model, texts=texts, tokens=tokens, full_context=full_context)
