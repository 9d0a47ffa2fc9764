"""Decoders: continue sequences token by token, from a paged cache or by recomputing them.

Source: docs/explanation/decoding.md. Letters of shapes: B sequences of a step, T tokens, V vocabulary, P pages.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..attention import LayerState
from ..backbone import EAGER, Backbone, StepFunctions
from ..compilation import CompileError, compile_full_graph
from ..kv_cache import PAGE, CacheCapacity, CacheFull, ChunkedStates, PageAllocator
from ..layers import CausalConv, Linear, TiedHead

CHUNK = 8192
"""Tokens of a prompt that are processed at a time."""


class Decoder(Protocol):
    """Decoder of several sequences at a time, each identified by its slot."""

    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        """Start a new sequence from int64 tokens [T], one or more.

        Returns:
            (slot, logits [V] after the last token), logits soft-capped, float32 (float64 in a float64 network).

        Raises:
            CacheFull: no slot or memory is free, or the sequence is too long.
        """

    def step(self, slots: Sequence[int], tokens_B: Tensor) -> Tensor:
        """Append one token to each of these sequences and return the logits [B, V] after it, in their order.

        Args:
            slots: slots of the sequences, each once.
            tokens_B: int64 [B], the token of each.

        Raises:
            CacheFull: a sequence gets too long or no page is free; nothing has changed.
        """

    def close(self, slot: int) -> None:
        """Drop a sequence and free its slot."""


class PagedDecoder:
    """Decoder with a paged KV cache and recurrent states: a token costs one step of the network."""

    def __init__(
        self, model: Backbone, *, texts: int = 1, tokens: int, page: int = PAGE, pages: int | None = None,
        full_context: bool = False, chunk: int = CHUNK, graphs: bool | None = None, compiled: bool = False,
        fp8: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the page tables and states; pools of pages follow at the first `begin`.

        Args:
            model: network; its weights are copied if they must be cast (`cast_for_decoding`), and then later changes of
                it have no effect here.
            texts: sequences that may be decoded at a time.
            tokens: most tokens of one sequence, prompt included.
            page: tokens per page.
            pages: pages of the cache that sequences share; None: enough for all sequences at full length.
            full_context: ignore the network's attention window. Otherwise pages outside the window are freed.
            chunk: tokens of a prompt that are processed at a time.
            graphs: replay steps as CUDA graphs of 1, 2, 4, 8, ... sequences; None: on a GPU if every part can be
                captured. True on the CPU only pads batches to these sizes; True on a GPU with a part that cannot be
                captured fails at the first step.
            compiled: fuse the steps with torch.compile, once per such number of sequences. Where it fails,
                `not_compiled` holds the reason and steps run without it.
            fp8: cache keys and values in 8 bits; approximate (docs/explanation/decoding.md).

        Raises:
            ValueError: a part of the network cannot decode token by token (`Backbone.no_step_reason`), or has no 8-bit
                cache although `fp8` is set (`Backbone.no_fp8_reason`).
        """
        reason = model.no_step_reason()
        if reason is not None:
            raise ValueError(f"{reason} cannot decode token by token")
        if fp8 and (reason := model.no_fp8_reason()) is not None:
            raise ValueError(f"{reason}; decode without fp8")
        self.window = model.config.window_size if model.config.window and not full_context else None
        pages_per_text = -(-tokens // page)
        capacity = CacheCapacity(
            texts, 1 + (texts * pages_per_text if pages is None else pages), page, model.device, model.dtype, fp8
        )
        self.model, self.allocator, self._chunk = (
            cast_for_decoding(model),
            PageAllocator(capacity, pages_per_text),
            chunk,
        )
        self.states = model.open(capacity)
        is_capturable = model.is_capturable()
        can_capture = model.device.type == "cuda" and is_capturable
        self._graphs = can_capture if graphs is None else graphs
        self._compiled = compiled
        self.not_compiled: str | None = None
        """Reason why steps run without the compiler although `compiled` was set; None otherwise."""
        if compiled and not is_capturable:
            self.not_compiled = "a part of the network processes its sequences one by one"
        self._prepared_steps: dict[tuple[int, bool], PreparedStep] = {}

    @torch.inference_mode()
    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        """Prefill a new sequence from int64 tokens [T], one or more; return (slot, logits [V] after the last token).

        Tokens may be on any device. Logits are soft-capped, on the network's device, float32 (float64 in a float64
        network). Runs eagerly, in chunks, and waits for the device.

        Slot and pages are free again after any error.

        Raises:
            CacheFull: no slot or too few pages are free, or the sequence is too long; nothing has changed.
        """
        slot = self.allocator.allocate(len(tokens_T), self.window)
        try:
            step = self.allocator.prefill_step([slot], self.window)
            return slot, self.model.begin(tokens_T.to(self.model.device), self.states, step, chunk=self._chunk)
        except BaseException:
            self.allocator.free(slot)
            raise

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """Copy a sequence with its whole cache and states to a new slot; return that slot.

        Both sequences go on independently.

        Raises:
            CacheFull: no slot or too few pages are free.
        """
        copy_slot = self.allocator.allocate(self.allocator.length(slot), self.window)
        pages = self.allocator.pages(slot), self.allocator.pages(copy_slot)
        for state in self.states:
            _copy_state(state, slot, copy_slot, *pages)
        return copy_slot

    def cache_bytes(self, slot: int) -> int:
        """Return the bytes of cache and states that the slot's sequence needs.

        Tokens outside the window do not count, nor does the unused rest of a page. Convolution tails and memory states
        count in full.
        """
        tokens = self.allocator.length(slot)
        seen = tokens if self.window is None else min(tokens, self.window)
        return sum(_state_bytes(state, slot, seen) for state in self.states)

    @torch.inference_mode()
    def step(
        self,
        slots: Sequence[int],
        tokens_B: Tensor,
        *,
        graphs: bool = True,
        compiled: bool = True,
        copy_logits: bool = True,
    ) -> Tensor:
        """Append one token, int64 [B], to each of these sequences; return the logits [B, V] after it.

        Does not wait for the device (except where a memory decodes sequence by sequence). With CUDA graphs or compiled
        functions, rows are padded to 1, 2, 4, 8, ..., and the first call for each such size compiles and captures,
        which takes long. Logits are soft-capped, on the network's device, float32 (float64 in a float64 network).

        - `slots`: slots of the sequences, each once.
        - `tokens_B`: the token of each, on any device.
        - `graphs`: False runs this step without a CUDA graph; True has no effect if the decoder has none.
        - `compiled`: False runs this step without compiled functions; True has no effect if the decoder has none.
        - `copy_logits`: False may return a buffer that the next call overwrites, instead of a copy.

        Raises:
            CacheFull: a sequence gets too long or no page is free; nothing has changed.
        """
        graphs = graphs and self._graphs
        compiled = compiled and self._compiled and self.not_compiled is None
        if not graphs and not compiled:
            self.allocator.extend(slots, window=self.window)
            rows_B = self.allocator.slot_tensor(slots, len(slots))
            return self._run_step(tokens_B.to(self.model.device, non_blocking=True), rows_B, EAGER)
        count = padded_batch(len(slots))
        if (count, compiled) not in self._prepared_steps:
            self._prepared_steps[count, compiled] = self._prepare_step(count, compiled)
        self.allocator.extend(slots, window=self.window)
        functions, tokens, replay = self._prepared_steps[count, compiled]
        rows_B = self.allocator.slot_tensor(slots, count)
        tokens[: len(slots)].copy_(tokens_B, non_blocking=True)
        if replay is None or not graphs:
            return self._run_step(tokens, rows_B, functions)[: len(slots)]
        graph, logits_BV = replay
        graph.replay()
        return logits_BV[: len(slots)].clone() if copy_logits else logits_BV[: len(slots)]

    def _prepare_step(self, count: int, compiled: bool) -> PreparedStep:
        """Compile and capture a step of `count` rows, as far as requested and possible.

        The result is (functions, input buffer int64 [count], (CUDA graph, logits [count, V]) or None without a graph).
        Trial runs use padding rows only, so no sequence changes. A failed compilation sets `not_compiled` and leaves
        the eager functions; a failed capture raises torch's error. `compiled` False skips the compilation.
        """
        tokens_B = torch.zeros(count, dtype=torch.int64, device=self.model.device)
        rows_B = self.allocator.slot_tensor([], count)
        # an eager run first: it chooses kernels and fills caches, which the compiler must not trace
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
        return self.model.step(tokens_B, self.states, self.allocator.page_tables, rows_B, self.window, functions)

    def step_bytes(self, texts: int, tokens: int) -> int:
        """Return the bytes that a step of `texts` sequences of `tokens` tokens must move at least.

        Weights (of an untied embedding nothing, since a token reads one row) and cached entries within the window are
        read once; recurrent states and convolution tails are read and written. Memories that decode sequence by
        sequence are left out. Before the first `begin` cached entries count as 0, because pools have no shape yet.
        """
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        table = self.model.embedding.weight
        if not isinstance(self.model.head, TiedHead):
            weights -= table.numel() * table.element_size()  # a token reads only one row of it
        return weights + texts * sum(block_bytes(state, tokens, self.window) for state in self.states)

    def close(self, slot: int) -> None:
        """Drop a sequence and free its slot and pages."""
        self.allocator.free(slot)


def decoding_state_bytes(model: Backbone, tokens: int) -> int:
    """Return the bytes that decoding stores for one sequence of `tokens` tokens, with the window of training.

    Keys and values inside the window, memories and tails of convolutions count, in their own types. The sequence is
    read once, because some parts allocate their state only then.

    Raises:
        ValueError: a part of the network cannot decode token by token (`Backbone.no_step_reason`).
    """
    decoder = PagedDecoder(model, tokens=tokens)
    slot, _ = decoder.begin(torch.zeros(tokens, dtype=torch.int64))
    return decoder.cache_bytes(slot)


def cast_for_decoding(model: Backbone) -> Backbone:
    """Return a copy of the network with weights in the activations' type and fused projections, for decoding.

    Returns the network itself, unfused, if its weights have that type already. Cast are `Linear`, conv filters and the
    tied head's bias, and a tied embedding unless there is a position scheme. Norm weights and a mixer's own scalars
    stay float32. With 8-bit products nothing is fused. The copy is in the network's training or evaluation mode. The
    parameters of fused projections need no gradient any more, so the copy is not for training; all others keep
    `requires_grad`.
    """
    kinds = (Linear, CausalConv, TiedHead)
    if model.dtype == model.blocks[0].get_parameter("mlp.fc.weight").dtype:
        return model
    converted = copy.deepcopy(model)
    for module in converted.modules():
        if isinstance(module, kinds):
            module.to(model.dtype)
    if isinstance(converted.head, TiedHead) and converted.positions is None:
        converted.embedding.to(model.dtype)
    converted.join()
    return converted


def block_bytes(state: Any, tokens: int, window: int | None) -> int:
    """Return the bytes that a step moves for one sequence in one block.

    Entries of visible tokens are read; a state that is a tensor (convolution tails, memory) is read and written, so it
    counts twice. Memory states of another form count as 0.

    Args:
        state: states of the block, for all slots, as `Backbone.open` returns them, or one part of them.
        tokens: length of the sequence.
        window: number of most recent keys that a query sees; None: all.
    """
    if isinstance(state, Tensor):
        return 2 * state[0].numel() * state.element_size()
    if isinstance(state, dict):
        return sum(block_bytes(table, tokens, window) for table in state.values())
    if isinstance(state, ChunkedStates):
        return 0
    visible = tokens if window is None else min(tokens, window)
    tables = [part for part in state.by_slot if isinstance(part, Tensor)]
    return visible * state.pools.token_bytes + sum(block_bytes(table, tokens, window) for table in tables)


def _copy_state(state: Any, slot: int, target: int, pages_P: Tensor, targets_P: Tensor) -> None:
    """Copy one sequence's cached entries and states of a block from a slot to another slot.

    States of any other type are silently left alone.

    Args:
        state: states of the block, or one part of them; changed in place.
        slot: slot to copy from.
        target: slot to copy to.
        pages_P: pages of `slot`.
        targets_P: pages of `target`, as many.
    """
    if isinstance(state, Tensor):
        state[target] = state[slot]
    elif isinstance(state, dict):
        for table in state.values():
            _copy_state(table, slot, target, pages_P, targets_P)
    elif isinstance(state, ChunkedStates):
        state.states[target] = copy.deepcopy(state.states[slot])
        if slot in state.since_chunk:
            state.since_chunk[target] = state.since_chunk[slot]
    elif isinstance(state, LayerState):
        state.pools.copy(pages_P, targets_P)
        for part in state.by_slot:
            _copy_state(part, slot, target, pages_P, targets_P)


def _state_bytes(state: Any, slot: int, tokens: int) -> int:
    """Return the bytes of one sequence's cache and states in a block.

    Args:
        state: states of the block, or one part of them.
        slot: slot of the sequence.
        tokens: number of its tokens whose entries are still needed; scales the paged entries alone.
    """
    if isinstance(state, LayerState):
        return tokens * state.pools.token_bytes + sum(_state_bytes(part, slot, tokens) for part in state.by_slot)
    if isinstance(state, dict):
        return sum(_state_bytes(table, slot, tokens) for table in state.values())
    tensors = state[slot] if isinstance(state, Tensor) else [state.states[slot], state.since_chunk.get(slot)]
    return sum(leaf.numel() * leaf.element_size() for leaf in _nested_tensors(tensors))


def _nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested sequences and dictionaries; other values are skipped."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _nested_tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _nested_tensors(item)


class PreparedStep(NamedTuple):
    """Step for a fixed number of rows, compiled and captured as far as possible.

    It holds no reference to the decoder, so that both are freed together.
    """

    functions: StepFunctions
    tokens_B: Tensor
    """Static input buffer of the step's tokens."""
    replay: tuple[torch.cuda.CUDAGraph, Tensor] | None
    """(CUDA graph, logits that it overwrites); None: the step runs without a graph."""


def capture_graph(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step as a CUDA graph after two warm-up runs on a side stream.

    The step is run three times in Python, so its side effects there happen three times. It must read its inputs from
    memory that stays in place, and raises torch's error if it waits for the device.

    Returns:
        (graph, the step's result: a tensor that each replay overwrites).
    """
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
    """Return new step functions wrapped for compilation for one number of sequences.

    They compile at their first call: one graph per kind of block, one for what precedes the blocks and one for what
    follows them.
    """
    return StepFunctions(*(compile_full_graph(clone_function(part)) for part in EAGER))


def clone_function(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with a code object of its own.

    The compiler stores its results with the code object, so they are freed with the copy. Globals and defaults are
    shared; closures and keyword-only defaults are not copied.
    """
    assert isinstance(part, types.FunctionType)
    return types.FunctionType(part.__code__.replace(), part.__globals__, part.__name__, part.__defaults__)


def padded_batch(texts: int) -> int:
    """Return the next power of two at or above `texts` (1 or more), the number of rows of a captured graph."""
    return 1 << (texts - 1).bit_length()


class RecomputeDecoder:
    """Decoder that recomputes the whole sequence for every token.

    For networks that cannot decode token by token, and as the reference in tests.
    """

    def __init__(
        self, model: Backbone, *, texts: int = 1, tokens: int, full_context: bool = False, chunk: int = CHUNK
    ) -> None:
        """Create a decoder without sequences; nothing is allocated.

        Args:
            model: network, used as it is.
            texts: sequences that may be decoded at a time.
            tokens: most tokens of one sequence, prompt included.
            full_context: ignore the network's attention window.
            chunk: tokens that are processed at a time.
        """
        self.model, self._tokens, self._full, self._chunk = model, tokens, full_context, chunk
        self._free = list(range(texts - 1, -1, -1))
        self._texts: dict[int, Tensor] = {}

    def begin(self, tokens_T: Tensor) -> tuple[int, Tensor]:
        """Start a sequence from int64 tokens [T], one or more; return (slot, logits [V] after the last).

        Logits are soft-capped, on the network's device, float32 (float64 in a float64 network).

        Raises:
            CacheFull: no slot is free, or the sequence is too long; nothing has changed.
        """
        if not self._free:
            raise CacheFull(f"all {len(self._texts)} sequence slots are in use; close a sequence first")
        slot = self._free.pop()
        self._texts[slot] = tokens_T.new_empty(0)
        try:
            return slot, self._append_and_score(slot, tokens_T)
        except CacheFull:
            self.close(slot)
            raise

    def step(self, slots: Sequence[int], tokens_B: Tensor) -> Tensor:
        """Append one token to each of these sequences, int64 [B], and return the logits [B, V] after it.

        Sequences are computed one after the other, each as a whole. A slot may come only once. Logits are soft-capped,
        in float32 (float64 in a float64 network), as `begin` returns them. Tokens must be on the device of those passed
        to `begin`.

        Raises:
            CacheFull: a sequence gets too long; nothing has changed.
        """
        for slot in slots:
            self._check(len(self._texts[slot]) + 1)
        return torch.stack(
            [self._append_and_score(slot, token[None]) for slot, token in zip(slots, tokens_B, strict=True)]
        )

    def close(self, slot: int) -> None:
        """Drop a sequence and free its slot."""
        del self._texts[slot]
        self._free.append(slot)

    @torch.inference_mode()
    def _append_and_score(self, slot: int, tokens: Tensor) -> Tensor:
        """Append tokens to a sequence and recompute it; return the logits [V] after the last.

        Raises:
            CacheFull: the sequence gets too long; nothing has changed.
        """
        text_T = torch.cat([self._texts[slot], tokens])
        self._check(len(text_T))
        self._texts[slot] = text_T
        tokens_1T = text_T[None].to(self.model.device)
        hidden_1TD = self.model.features(tokens_1T, full_context=self._full, chunk=self._chunk).hidden_BTD
        return self.model.logits(hidden_1TD[0, -1])

    def _check(self, length: int) -> None:
        """Raise CacheFull if a sequence of `length` tokens is too long."""
        if length > self._tokens:
            raise CacheFull(f"a sequence may have at most {self._tokens} tokens, got {length}")


def make_decoder(model: Backbone, *, texts: int = 1, tokens: int, full_context: bool = False) -> Decoder:
    """Return a `PagedDecoder` if the network can decode token by token, else a `RecomputeDecoder`.

    The former has pages for all sequences at full length, and uses CUDA graphs on a GPU where every part can be
    captured; neither is compiled.

    Args:
        model: network.
        texts: sequences that may be decoded at a time.
        tokens: most tokens of one sequence, prompt included.
        full_context: ignore the network's attention window.
    """
    kind = PagedDecoder if model.no_step_reason() is None else RecomputeDecoder
    return kind(model, texts=texts, tokens=tokens, full_context=full_context)
