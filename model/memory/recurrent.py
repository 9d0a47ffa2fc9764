"""Base class of memories with a state: gated, normed readout, and evaluation in chunks of tokens.

Source: docs/reference/mechanisms.md, "Gated delta memory".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.norms import rms_norm
from ..bases import Memory
from ..config import ModelConfig
from ..kv_cache import CacheCapacity, ChunkedStates
from ..layers import Linear, chunk_bounds


class Recurrent(Memory):
    """Memory with a state that is carried from token to token: out = proj(rmsnorm(readout) sigmoid(gate(x))).

    The RMS norm is per head and without weight. A subclass defines `add_rates`, `read_rates` and `write`.
    """

    def __init__(self, model: ModelConfig, config: Any) -> None:
        """Create the rate projections (`add_rates`), the readout gate (D to H X) and the output projection (H X to D).

        Values come from `Backbone.init_weights`; the output projection is marked to start at zero.
        """
        super().__init__(model, config)
        self.heads, self.head_dim = model.n_heads, model.head_dim
        self.add_rates(model)
        inner = model.n_heads * model.head_dim
        self.gate = Linear(model.d_model, inner, bias=model.bias)
        self.proj = Linear(inner, model.d_model, bias=model.bias, zero=True)

    def add_rates(self, model: ModelConfig) -> None:
        """Create the projections of the update rates, which read the block's input; called by `__init__`."""
        raise NotImplementedError(f"{type(self).__name__} defines no add_rates")

    def read_rates(self, x_BTD: Tensor) -> Any:
        """Return the update rates of each token, computed from the block's input, as a named tuple.

        Its fields are tensors [B, T, H] or [B, T, H, X], or None for a missing rate. The first is the natural logarithm
        of the fraction of the state that is kept.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no read_rates")

    def write(self, rates: Any, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Update the state with a sequence and read it with the queries, token by token.

        Args:
            rates: from `read_rates`.
            q_BTHX: queries.
            k_BTJX: keys; J divides H.
            v_BTJX: values.
            state: state before the first token; None at a sequence's start.

        Returns:
            (readout [B, T, H, X], the state after the last token).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no write")

    def norm(self, state: Any) -> Tensor:
        """Return the Frobenius norm of a state, [B, H]; for probes."""
        raise NotImplementedError(f"{type(self).__name__} defines no norm")

    def answer(self, state: Any, q_BTHX: Tensor) -> Tensor:
        """Return a state's readouts for queries, [B, T, H, X] in the state's type, without writing; for probes."""
        raise NotImplementedError(f"{type(self).__name__} defines no answer")

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return a number of tokens: sequences split at multiples of it give the same result up to rounding.

        The default is 1.
        """
        return 1

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        """Return the memory's output [B, T, D] for sequences that start from an empty state.

        proj(rmsnorm(readout) sigmoid(gate(x))), where `write` gives the readouts.

        Args:
            x_BTD: the block's normed input, from which rates and gate are projected.
            q_BTHX: the mixer's queries, not rotated.
            k_BTJX: the mixer's keys, not rotated.
            v_BTJX: the mixer's values.
        """
        return self._gate_and_project(x_BTD, self.write(self.read_rates(x_BTD), q_BTHX, k_BTJX, v_BTJX, None)[0])

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """Return the output of `forward`, computed about `chunk` tokens at a time with the state carried along.

        `chunk` counts the tokens of all rows and is rounded up to a multiple of `together`. For use without gradients.
        """
        return self._run_chunks(x_BTD, q_BTHX, k_BTJX, v_BTJX, state=None, chunk=chunk)[0]

    def _run_chunks(
        self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, state: Any, chunk: int
    ) -> tuple[Tensor, Any]:
        """Process sequences about `chunk` tokens at a time, with the state carried along.

        Args:
            x_BTD: the block's normed input.
            q_BTHX: the mixer's queries.
            k_BTJX: the mixer's keys.
            v_BTJX: the mixer's values.
            state: state before the first token; None at a sequence's start.
            chunk: tokens to process at a time, over all rows; chunks end at multiples of `together`.

        Returns:
            (output [B, T, D], the state after the last token). With T = 0 the given state.
        """
        b, t, _ = x_BTD.shape
        out_BTD = torch.empty_like(x_BTD)
        for start, stop in chunk_bounds(b, t, chunk, self.together(x_BTD.device, x_BTD.dtype)):
            x, q, k, v = (part[:, start:stop] for part in (x_BTD, q_BTHX, k_BTJX, v_BTJX))
            r_BTHX, state = self.write(self.read_rates(x), q, k, v, state)
            out_BTD[:, start:stop] = self._gate_and_project(x, r_BTHX)
        return out_BTD, state

    def chunk_tokens(self) -> int:
        """Return the length of chunks whose start changes the result; 1 if the start does not matter."""
        return 1

    def open(self, capacity: CacheCapacity) -> Any:
        """Return empty per-slot states for step-by-step decoding; nothing is allocated, and `capacity` is ignored."""
        return ChunkedStates()

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Any, slot: int, *, chunk: int
    ) -> Tensor:
        """Prefill of a recurrent memory: return the output [1, T, D] for one new sequence; store its state in `states`.

        Stored are the state after the last complete chunk of `chunk_tokens` tokens and the inputs of the tokens after
        it, because `step` recomputes them.

        Args:
            x_1TD: the block's normed input, from the first token on.
            q_1THX: the mixer's queries.
            k_1TJX: the mixer's keys.
            v_1TJX: the mixer's values.
            states: `ChunkedStates` from `open`; what they hold for the slot is replaced.
            slot: slot of the sequence.
            chunk: tokens processed at a time; memory only.
        """
        inputs = x_1TD, q_1THX, k_1TJX, v_1TJX
        cut = x_1TD.shape[1] // self.chunk_tokens() * self.chunk_tokens()
        out_1TD, state = self._run_chunks(*(part[:, :cut] for part in inputs), state=None, chunk=chunk)
        tail = tuple(part[:, cut:] for part in inputs)
        states.states[slot], states.since_chunk[slot] = state, tail
        if cut == x_1TD.shape[1]:
            return out_1TD
        return torch.cat([out_1TD, self._run_chunks(*tail, state=state, chunk=chunk)[0]], 1)

    def step(self, x_BD: Tensor, q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, states: Any, slots_B: Tensor) -> Tensor:
        """Return the memory's output [B, D] for one new token per sequence; sequences are processed one by one.

        Tokens since the last complete chunk of `chunk_tokens` are recomputed; when a chunk is complete, its state is
        stored and its inputs are dropped. Rows of slots without a sequence (padding) give 0. Updates `states` in place.
        Waits for the device, because it copies the slots to the host.

        Args:
            x_BD: the block's normed input.
            q_BHX: the mixer's queries.
            k_BJX: the mixer's keys.
            v_BJX: the mixer's values.
            states: `ChunkedStates` from `open`, for all slots.
            slots_B: slot of each sequence.
        """
        out_BD = torch.zeros_like(x_BD)
        for row, slot in enumerate(slots_B.tolist()):
            if slot not in states.since_chunk:
                continue  # padding row
            new = (part[row : row + 1, None] for part in (x_BD, q_BHX, k_BJX, v_BJX))
            since = tuple(torch.cat(pair, 1) for pair in zip(states.since_chunk[slot], new, strict=True))
            tokens = since[0].shape[1]
            out_1TD, state = self._run_chunks(*since, state=states.states[slot], chunk=tokens)
            out_BD[row] = out_1TD[0, -1]
            if tokens == self.chunk_tokens():
                states.states[slot], since = state, tuple(part[:, :0] for part in since)
            states.since_chunk[slot] = since
        return out_BD

    def _gate_and_project(self, x_BTD: Tensor, r_BTHX: Tensor) -> Tensor:
        return self.gated(r_BTHX, self.gate(x_BTD))

    def gated(self, r_THX: Tensor, gate_TC: Tensor) -> Tensor:
        """Return the term to add to the stream, [..., D]: proj(rmsnorm(readout) sigmoid(gate logits)).

        The norm is per head, over X, without weight.

        Args:
            r_THX: readouts [..., H, X].
            gate_TC: logits of the readout gate, [..., H X].
        """
        out_TD: Tensor = self.proj(rms_norm(r_THX).flatten(-2) * torch.sigmoid(gate_TC))
        return out_TD
