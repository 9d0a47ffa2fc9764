"""What memories with a state have in common: a gated, normed readout, and evaluation in pieces (docs/mechanisms.md, "Gated delta memory").

B batch, T length, D model width, H query heads, J KV heads, X head size.
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
    """out = proj(rmsnorm(readout) sigmoid(gate(x))), the readout from a state that is carried from token to token."""

    def __init__(self, model: ModelConfig, config: Any) -> None:
        super().__init__(model, config)
        self.heads, self.head_dim = model.n_heads, model.head_dim
        self.add_rates(model)
        inner = model.n_heads * model.head_dim
        self.gate = Linear(model.d_model, inner, bias=model.bias)
        self.proj = Linear(inner, model.d_model, bias=model.bias, zero=True)

    def add_rates(self, model: ModelConfig) -> None:
        """Gives the memory the projections of the rates that it reads from the block's input."""
        raise NotImplementedError(f"{type(self).__name__} defines no rates")

    def read_rates(self, x_BTD: Tensor) -> Any:
        """What each token says of the update at it: a named tuple of tensors [B, T, H] or [B, T, H, X], or None for what it does
        not say. The first is ln of how much of the state stays."""
        raise NotImplementedError(f"{type(self).__name__} reads no rates")

    def write(self, rates: Any, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(readout [B, T, H, X], the state after the last token) from the state before the first, None at the start."""
        raise NotImplementedError(f"{type(self).__name__} defines no write")

    def norm(self, state: Any) -> Tensor:
        """Frobenius norm of a state, [B, H]. For probes."""
        raise NotImplementedError(f"{type(self).__name__} defines no norm")

    def answer(self, state: Any, q_BTHX: Tensor) -> Tensor:
        """What a state says to queries, [B, T, H, X] in the state's type, nothing being written. For probes."""
        raise NotImplementedError(f"{type(self).__name__} defines no answer")

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        """Tokens after which a sequence may be divided without another result."""
        return 1

    def forward(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor) -> Tensor:
        return self._gate_and_project(x_BTD, self.write(self.read_rates(x_BTD), q_BTHX, k_BTJX, v_BTJX, None)[0])

    def evaluate(self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, chunk: int) -> Tensor:
        """The state is carried from piece to piece."""
        return self._run_chunks(x_BTD, q_BTHX, k_BTJX, v_BTJX, state=None, chunk=chunk)[0]

    def _run_chunks(
        self, x_BTD: Tensor, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, state: Any, chunk: int
    ) -> tuple[Tensor, Any]:
        """(what `evaluate` returns, the state after the last token)."""
        b, t, _ = x_BTD.shape
        out_BTD = torch.empty_like(x_BTD)
        for start, stop in chunk_bounds(b, t, chunk, self.together(x_BTD.device, x_BTD.dtype)):
            x, q, k, v = (part[:, start:stop] for part in (x_BTD, q_BTHX, k_BTJX, v_BTJX))
            r_BTHX, state = self.write(self.read_rates(x), q, k, v, state)
            out_BTD[:, start:stop] = self._gate_and_project(x, r_BTHX)
        return out_BTD, state

    def chunk_tokens(self) -> int:
        """Tokens of a chunk whose tokens depend on where it starts, rounding aside; 1 where they do not."""
        return 1

    def open(self, capacity: CacheCapacity) -> Any:
        return ChunkedStates()

    def begin(
        self, x_1TD: Tensor, q_1THX: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: Any, slot: int, *, chunk: int
    ) -> Tensor:
        inputs = x_1TD, q_1THX, k_1TJX, v_1TJX
        cut = x_1TD.shape[1] // self.chunk_tokens() * self.chunk_tokens()
        out_1TD, state = self._run_chunks(*(part[:, :cut] for part in inputs), state=None, chunk=chunk)
        tail = tuple(part[:, cut:] for part in inputs)
        states.states[slot], states.since[slot] = state, tail
        if cut == x_1TD.shape[1]:
            return out_1TD
        return torch.cat([out_1TD, self._run_chunks(*tail, state=state, chunk=chunk)[0]], 1)

    def step(self, x_BD: Tensor, q_BHX: Tensor, k_BJX: Tensor, v_BJX: Tensor, states: Any, slots_B: Tensor) -> Tensor:
        """Text by text, the tokens since its last whole chunk once more."""
        out_BD = torch.zeros_like(x_BD)
        for row, slot in enumerate(slots_B.tolist()):
            if slot not in states.since:
                continue  # a row that only fills the batch up
            new = (part[row : row + 1, None] for part in (x_BD, q_BHX, k_BJX, v_BJX))
            since = tuple(torch.cat(pair, 1) for pair in zip(states.since[slot], new, strict=True))
            tokens = since[0].shape[1]
            out_1TD, state = self._run_chunks(*since, state=states.states[slot], chunk=tokens)
            out_BD[row] = out_1TD[0, -1]
            if tokens == self.chunk_tokens():
                states.states[slot], since = state, tuple(part[:, :0] for part in since)
            states.since[slot] = since
        return out_BD

    def _gate_and_project(self, x_BTD: Tensor, r_BTHX: Tensor) -> Tensor:
        return self.gated(r_BTHX, self.gate(x_BTD))

    def gated(self, r_THX: Tensor, gate_TC: Tensor) -> Tensor:
        """What is added to the stream, [..., D], of readouts [..., H, X] and the gates' logits [..., H X]."""
        out_TD: Tensor = self.proj(rms_norm(r_THX).flatten(-2) * torch.sigmoid(gate_TC))
        return out_TD
