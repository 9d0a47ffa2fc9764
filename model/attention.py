"""Global attention layer around a mixer: projections, norms, Canon convolution, output gate and memory branch.

Source: docs/reference/mechanisms.md, "Backbone".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, R distractors, E channels
of concatenated projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.conv.op import choose_backend
from ..kernels.norms import rms_norm
from .bases import Mixer
from .config import ModelConfig
from .kv_cache import CacheCapacity, DecodeStep, KVView, Pools, can_capture, has_step
from .layers import Canon, Linear, RMSNorm, fuse_weights, fused_rows, map_chunks
from .registry import MEMORIES, MIXERS
from .resolve import NO_MEMORY, NO_MIXER, memory_settings, mixer_settings

LayerTensors = tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor] | None, Any]
"""Contents of `LayerState` as plain containers: (pools and tables by name, Canon's convolution tails, memory states)."""


@dataclass(frozen=True)
class LayerState:
    """Decoding state of one global layer, for all sequence slots of a cache."""

    pools: Pools
    """Paged cache of what the mixer stores per token."""
    tables: dict[str, Tensor]
    """State that the mixer keeps per sequence, name -> table [slots + 1, ...]."""
    conv_tails: list[Tensor] | None
    """Last inputs of Canon's convolutions, a list of one tensor [slots + 1, taps - 1, C]; None without Canon.

    Channels C are those of q, k and v, concatenated.
    """
    memory: Any
    """State of the recurrent memory, in the memory's own format; None without a memory."""

    @property
    def as_tuple(self) -> LayerTensors:
        """State as a plain tuple (pools and tables by name, Canon's tails, memory state), as `Attention.step` takes it.

        Tensors are shared, not copied. The compiler keeps class instances, and with them their tensors, until the next
        garbage collection; tuples avoid that.
        """
        return self.pools.tensors, self.tables, self.conv_tails, self.memory

    @property
    def by_slot(self) -> list[Any]:
        """Everything but the pools, which belongs to slots: tables, Canon's tails and the state of the memory."""
        return [*self.tables.values(), *(self.conv_tails or ()), *(() if self.memory is None else (self.memory,))]


class Attention(nn.Module):
    """Global layer: out = W_o(y sigmoid(gate)) + the mixer's extra term + the memory's output; y = mixer(q, k, v).

    q, k, v and gate are projections of the layer's input. q and k are RMS-normed per head without weight (`qk_norm`),
    then q, k and v convolved by Canon, if both the network and the mixer's settings say `canon`. Without `output_gate`,
    W_o is applied to y alone. Without `qk_norm`, q and k are not normed; with `qk_norm_weight`, the norms have weights.
    Without a mixer (`attn_type: none`) there is neither gate nor W_o: the memory's output is the layer's.
    """

    def __init__(self, model: ModelConfig, layer: int = 0) -> None:
        """Build the layer of block `layer` (0-based) with the mixer, Canon and memory that `model` names.

        Values of projections and filters are undefined until `Backbone.init_weights`; the mixer's own parameters get
        theirs here. Raises ModelConfigError for invalid settings of mixer or memory.
        """
        super().__init__()
        mixer: Mixer | None = None
        if model.attn_type != NO_MIXER:
            part = MIXERS.load(model.attn_type)(model, mixer_settings(model))
            assert isinstance(part, Mixer)
            part.layer, mixer = layer, part
        has_memory = model.memory != NO_MEMORY
        memory = MEMORIES.load(model.memory)(model, memory_settings(model)) if has_memory else None
        self.heads, self.kv_heads, self.size = model.n_heads, model.n_kv_heads, model.head_dim
        inner, kv = self.heads * self.size, self.kv_heads * self.size
        self.normed, bias = model.qk_norm, model.bias and model.qkv_bias
        self.q_norm: Callable[[Tensor], Tensor] = rms_norm
        self.k_norm: Callable[[Tensor], Tensor] = rms_norm
        if model.qk_norm_weight:
            self.q_norm, self.k_norm = (RMSNorm(model.head_dim, model.norm_eps) for _ in range(2))
        # channels from one query head to the next in w_q's output: q, then (with a gate) the gate's logits
        self.query_stride = self.size * (2 if model.output_gate and mixer is not None else 1)
        self.w_q = Linear(model.d_model, self.heads * self.query_stride, bias=bias)
        self.w_k = Linear(model.d_model, kv, bias=bias)
        self.w_v = Linear(model.d_model, kv, bias=bias)
        has_canon = model.canon and (mixer is None or mixer.config.canon)
        self.canon = Canon(inner, kv, model.canon_taps, norm=self.normed) if has_canon else None
        self.mixer = mixer
        self.proj = None if mixer is None else Linear(inner, model.d_model, bias=model.bias, zero=True)
        self.memory = memory
        self.fused_weights: tuple[Tensor, Tensor | None] | None = None

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the branch's output for whole sequences, and the distractor loss if distractors are passed.

        out = W_o(y sigmoid(gate)) + the mixer's extra term + the memory's output, with y = mixer(q, k, v). q, k, v and
        gate are projected from the input; q and k are normed, then q, k, v convolved by Canon, as the config says.

        Args:
            x_BTD: the normed residual stream, [B, T, D].
            window: number of most recent keys that a query sees, its own included; None: all earlier keys. The memory
                has no window.
            distractors_BRD: random inputs [B, R, D] that are projected to keys and values without gradient; None: no
                loss. They change the loss only, not the output.

        Returns:
            (output [B, T, D] to be added to the residual stream, scalar distractor loss or None).

        Raises:
            NotImplementedError: distractors for a mixer without `distractor_loss`.
        """
        q_BTHX, k_BTJX, v_BTJX, *gate = self._project_and_norm(x_BTD)
        y_BTHX: Tensor | None = None
        terms: list[Tensor] = []
        if self.mixer is not None:
            mixed = self.mixer(q_BTHX, k_BTJX, v_BTJX, window=window, **self._mixer_inputs(x_BTD))
            y_BTHX, *terms = mixed if isinstance(mixed, tuple) else (mixed,)
            terms = [*self._output(y_BTHX, *gate), *terms]
        if self.memory is not None:
            terms = [*terms, self.memory(x_BTD, q_BTHX, k_BTJX, v_BTJX)]
        out_BTD = _sum(terms)
        if distractors_BRD is None:
            return out_BTD, None
        if self.mixer is None or y_BTHX is None:
            raise NotImplementedError("a layer without a mixer has no distractor loss")
        k_r, v_r = self._distractors(distractors_BRD)
        loss = self.mixer.distractor_loss(q_BTHX, k_BTJX, v_BTJX, k_r, v_r, y_BTHX, window=window)
        return out_BTD, loss

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """Return the output [B, T, D] of `forward`, computed about `chunk` tokens at a time; without distractors.

        Meant for use without gradients. Differs from `forward` by rounding only.

        Args:
            x_BTD: the normed residual stream of whole sequences.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            chunk: tokens to process at a time, over all rows.
        """
        terms, *qkv = self._evaluate_mixer(x_BTD, window, chunk)
        if self.memory is not None:
            terms = [*terms, self.memory.evaluate(x_BTD, *qkv, chunk=chunk)]
        return _sum(terms)

    def _evaluate_mixer(
        self, x_BTD: Tensor, window: int | None, chunk: int
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Compute the terms of the layer's output without that of its memory, about `chunk` tokens at a time.

        Args:
            x_BTD: the normed residual stream.
            window: number of most recent keys that a query sees, its own included; None: all earlier keys.
            chunk: tokens to process at a time, over all rows.

        Returns:
            (list of up to two terms [B, T, D], none without a mixer; q [B, T, H, X], k [B, T, J, X], v [B, T, J, X]).
            q, k, v are those that the mixer and the memory read: after norm and Canon, before any rotation.
        """
        halo = 0 if self.canon is None else self.canon.halo
        q_BTHX, k_BTJX, v_BTJX, *gate = map_chunks(self._project_and_norm, (x_BTD,), chunk, halo)
        if self.mixer is None:
            return [], q_BTHX, k_BTJX, v_BTJX
        mixed = self.mixer.evaluate(q_BTHX, k_BTJX, v_BTJX, window=window, chunk=chunk, **self._mixer_inputs(x_BTD))
        y_BTHX, *terms = mixed if isinstance(mixed, tuple) else (mixed,)
        return [*map_chunks(self._output, (y_BTHX, *gate), chunk), *terms], q_BTHX, k_BTJX, v_BTJX

    def projections(self) -> list[Linear]:
        """Return the q, k, v and output projections, which may multiply in 8 bits; not those of mixer and memory."""
        return [self.w_q, self.w_k, self.w_v, *([] if self.proj is None else [self.proj])]

    def head_blocks(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Return q, k, v and output projection -> (number of blocks of its rows, of its columns), by head.

        A block has as many rows (of the output projection: columns) as a head has channels.
        """
        cut_rows = {matrix.weight: (len(matrix.weight) // self.size, 1) for matrix in (self.w_q, self.w_k, self.w_v)}
        return cut_rows if self.proj is None else {**cut_rows, self.proj.weight: (1, self.heads)}

    def no_step_reason(self) -> str | None:
        """Return the part that cannot decode token by token; None if there is none.

        The text is "mixer CLASS" (such as "mixer PaTH") or, if the mixer can, "memory CLASS".
        """
        if self.mixer is not None and not has_step(self.mixer):
            return f"mixer {type(self.mixer).__name__}"
        return None if self.memory is None or has_step(self.memory) else f"memory {type(self.memory).__name__}"

    def is_capturable(self) -> bool:
        """Return True if a CUDA graph can capture `step`, because it can that of mixer and memory (`can_capture`)."""
        return all(can_capture(part) for part in (self.mixer, self.memory) if part is not None)

    def open(self, capacity: CacheCapacity) -> LayerState:
        """Allocate empty decoding states for every sequence slot of a cache of that capacity.

        The mixer's page pools are allocated later, by the first `begin`.
        """
        tails = None if self.canon is None else self.canon.open(capacity)
        tables = {} if self.mixer is None else self.mixer.open(capacity)
        spans = {} if self.mixer is None else self.mixer.entry_spans(capacity.dtype)
        memory = None if self.memory is None else self.memory.open(capacity)
        return LayerState(Pools(capacity, spans), tables, tails, memory)

    def begin(self, x_1TD: Tensor, states: LayerState, step: DecodeStep, *, chunk: int) -> Tensor:
        """Prefill: compute the output of one new sequence and store in `states` what `step` needs to continue it.

        Copies page numbers and slot to the host.

        Args:
            x_1TD: the normed residual stream of the sequence from its first token on, [1, T, D].
            states: the layer's states; the pages and rows of the sequence's slot are overwritten.
            step: slot, page table and window of this one sequence.
            chunk: tokens processed at a time.

        Returns:
            Output [1, T, D], to be added to the residual stream.
        """
        terms, q, k, v = self._evaluate_mixer(x_1TD, step.window, chunk)
        if self.mixer is not None:
            newest = self._cache_sequence(self.mixer, x_1TD, k, v, states, step, chunk)
            KVView({}, step, states.tables).set_rows(newest | self.mixer.begin(k, v))
        if self.canon is not None and states.conv_tails is not None:
            last = self._project(x_1TD[:, -self.canon.halo :] if self.canon.halo else x_1TD[:, :0])
            self.canon.begin(states.conv_tails, step.slots_B, *last[:3])
        if self.memory is not None:
            slot = int(step.slots_B[0])
            terms = [*terms, self.memory.begin(x_1TD, q, k, v, states.memory, slot, chunk=chunk)]
        return _sum(terms)

    def _cache_sequence(
        self, mixer: Mixer, x_1TD: Tensor, k_1TJX: Tensor, v_1TJX: Tensor, states: LayerState, step: DecodeStep, chunk: int
    ) -> dict[str, Tensor]:  # fmt: skip
        """Store the mixer's entries of a new sequence in its pages; return the last token's of those with a table.

        Works in pieces of `chunk` tokens, rounded up to whole pages, because running sums are float64.

        Args:
            mixer: the layer's mixer.
            x_1TD: the normed residual stream.
            k_1TJX: keys.
            v_1TJX: values.
            states: the layer's states.
            step: slot and page table of this one sequence.
            chunk: tokens processed at a time.
        """
        page, tokens, newest = states.pools.page_size, x_1TD.shape[1], dict[str, Tensor]()
        for first in range(0, tokens, length := -(-chunk // page) * page):
            piece, before = slice(first, first + length), newest.__getitem__ if first else None
            positions_1T = torch.arange(tokens, device=x_1TD.device)[None, piece]
            inputs = self._mixer_inputs(x_1TD[:, piece])
            entries = mixer.keep(k_1TJX[:, piece], v_1TJX[:, piece], places_BT=positions_1T, before=before, **inputs)
            if states.pools.fp8:
                entries = mixer.quantize(entries, positions_BT=positions_1T, before=before)
            newest = {name: rows[:, -1].clone() for name, rows in entries.items()}
            paged = {name: rows[0] for name, rows in entries.items() if name not in states.tables}
            states.pools.fill(step.texts.tables_BP[0, first // page :], paged)
        return {name: row for name, row in newest.items() if name in states.tables}

    def step(self, x_BD: Tensor, states: LayerTensors, step: DecodeStep) -> Tensor:
        """Compute the output [B, D] for one new token of each of B sequences; updates their states in place.

        Fails for a mixer or memory without `step` (`no_step_reason`).

        Args:
            x_BD: the normed residual stream of the new tokens.
            states: the layer's states as `LayerState.as_tuple` returns them, with pools allocated by a `begin` before.
            step: slots, page tables and lengths of the sequences, the new token included.
        """
        y_BE, terms = self._mix_step(self._fused_projections(x_BD), x_BD, states, step)
        if self.proj is not None and y_BE is not None:
            terms = [self.proj(y_BE), *terms]
        return _sum(terms)

    def fused_step(
        self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: LayerTensors, step: DecodeStep
    ) -> Tensor:
        """Return residual + the output of `step` at norm(x), [B, D], with norm and sum fused into the matrix products.

        Meant for batches so small that a product costs as much as reading its matrix. Needs `join` to have been called
        and matrices in x's type (`Backbone.join`). The norm runs separately if the mixer or a memory reads the normed
        input. Updates the states in place.

        Args:
            x_BD: residual stream of the new tokens, before the norm.
            norm: the block's first norm.
            residual_BD: tensor that the output is added to.
            states: the layer's states as a tuple (pools, tables, Canon's tails, memory state); updated in place.
            step: slots, page tables and lengths of the sequences, the new token included.
        """
        assert self.fused_weights is not None
        if self.mixer is None or self.memory is not None or self.mixer.reads_input:
            x_BD = norm(x_BD)
            x_BE = fused_rows(x_BD, *self.fused_weights)
        else:
            x_BE = fused_rows(x_BD, *self.fused_weights, norm=norm)
        y_BE, terms = self._mix_step(x_BE, x_BD, states, step)
        if self.proj is not None and y_BE is not None:
            residual_BD = self.proj.forward_fused(y_BE, residual_BE=residual_BD)
        return _sum([residual_BD, *terms])

    def _mix_step(
        self, x_BE: Tensor, x_BD: Tensor, states: LayerTensors, step: DecodeStep
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Run Canon, mixer, output gate and memory for one new token per sequence, from its concatenated projections.

        Args:
            x_BE: outputs of the q, k and v projections, concatenated. With an output gate, each query head is followed
                by its gate's logits.
            x_BD: normed input of the block; read only by mixers with `reads_input` and by the memory.
            states: the layer's states as a tuple (pools, tables, Canon's tails, memory state); updated in place: the new
                token's entries, Canon's tails, memory.
            step: slots, page tables and lengths of the sequences, the new token included.

        Returns:
            (gated mixer output [B, H X], which the output projection reads, or None without a mixer; 0 to 2 terms
            [B, D] to be added after that projection: the mixer's extra term, the memory's output).
        """
        pools, tables, tails, memory = states
        q_BE, k_BE, v_BE = x_BE.split([self.heads * self.query_stride, *[self.kv_heads * self.size] * 2], -1)
        q, *gate = q_BE.unflatten(-1, (self.heads, self.query_stride)).split(self.size, -1)
        k, v = (part.unflatten(-1, (self.kv_heads, self.size)) for part in (k_BE, v_BE))
        if self.canon is not None and tails is not None:
            y_BC = self.canon.step(tails, step.slots_B, x_BE, (self.heads, self.kv_heads, self.query_stride))
            head_counts = self.heads, self.kv_heads, self.kv_heads
            q, k, v = y_BC.unflatten(-1, (sum(head_counts), self.size)).split(head_counts, 1)
        elif self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        y_BE: Tensor | None = None
        terms: list[Tensor] = []
        if self.mixer is not None:
            cache = KVView(pools, step, tables, {"k": k, "v": v})
            positions_B1 = step.positions[:, None]
            entries = self.mixer.keep(
                k[:, None],
                v[:, None],
                places_BT=positions_B1,
                before=cache.before,
                **self._mixer_inputs(x_BD[:, None]),
            )
            if "k_shift" in pools:
                entries = self.mixer.quantize(entries, positions_BT=positions_B1, before=cache.before)
            cache.write({name: rows[:, 0] for name, rows in entries.items()})
            assert self.mixer.step is not None
            inputs = {"x_BD": x_BD} if self.mixer.reads_input else {}
            mixed = self.mixer.step(q, cache, **inputs)
            y_BHX, *terms = mixed if isinstance(mixed, tuple) else (mixed,)
            y_BE = (y_BHX * gate[0].sigmoid() if gate else y_BHX).flatten(1)
        if self.memory is not None:
            assert self.memory.step is not None
            # a new list, because torch 2.11's compiler treats `terms` as a tuple, which has no append
            terms = [*terms, self.memory.step(x_BD, q, k, v, memory, step.slots_B)]
        return y_BE, terms

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return op name -> description of the implementation that `forward` uses on that device and dtype.

        Keys: "canon" with a Canon convolution, those of the mixer (such as "polar" and "polar_window"), and "memory"
        with a memory. Most texts read "backend (reason)", with "gluon", "triton", "fla", "cudnn" or "torch".
        """
        paths = {} if self.canon is None else {"canon": str(choose_backend(device, dtype, self.canon.taps))}
        if self.mixer is not None:
            paths |= self.mixer.kernel_paths(device, dtype)
        return paths if self.memory is None else paths | self.memory.kernel_paths(device, dtype)

    def _project_and_norm(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v as the mixer reads them, and the output gate's logits if there is a gate.

        q and k are RMS-normed (`qk_norm`), then q, k, v convolved (with Canon); no rotation.

        Returns:
            (q [B, T, H, X], k [B, T, J, X], v [B, T, J, X]), with a gate followed by its logits [B, T, H, X].
        """
        q_BTHX, k_BTJX, v_BTJX, *gate = self._project(x_BTD)
        if self.canon is not None:
            q_BTHX, k_BTJX, v_BTJX = self.canon(q_BTHX, k_BTJX, v_BTJX)
        elif self.normed:
            q_BTHX, k_BTJX = self.q_norm(q_BTHX), self.k_norm(k_BTJX)
        return q_BTHX, k_BTJX, v_BTJX, *gate

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return plain projections q, k, v, before norms and Canon, and the output gate's logits if there is a gate.

        Returns:
            (q [B, T, H, X], k [B, T, J, X], v [B, T, J, X]), with a gate followed by its logits [B, T, H, X].
        """
        # explicit sizes: Canon with one tap passes no tokens, and torch cannot infer a size of an empty tensor
        q_BTHX, *gate = self.w_q(x_BTD).view(*x_BTD.shape[:2], self.heads, self.query_stride).split(self.size, -1)
        return q_BTHX, self._keys(x_BTD), self._values(x_BTD), *gate

    def _mixer_inputs(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """Return the mixer's keyword arguments besides q, k and v: `x_BTD` if it reads the block's input."""
        return {"x_BTD": x_BTD} if self.mixer is not None and self.mixer.reads_input else {}

    def join(self) -> None:
        """Concatenate the q, k and v weights into one matrix: a decoding step then needs one product instead of three.

        Values stay the same; the projections' parameters are replaced by views of the new matrix, without gradients.
        Does the same for Canon's filters and calls `join` of the memory.
        """
        self.fused_weights = fuse_weights([self.w_q, self.w_k, self.w_v])
        if self.canon is not None:
            self.canon.join()
        if self.memory is not None:
            self.memory.join()

    def _fused_projections(self, x_BD: Tensor) -> Tensor:
        """Return the outputs of the q (with gate), k and v projections, concatenated: [B, E]."""
        if self.fused_weights is not None:
            return functional.linear(x_BD, *self.fused_weights)
        return torch.cat([self.w_q(x_BD), self.w_k(x_BD), self.w_v(x_BD)], -1)

    def _output(self, y_BTHX: Tensor, gate_BTHX: Tensor | None = None) -> tuple[Tensor]:
        """Return (output projection [B, T, D] of y times the sigmoid of the gate's logits,), a tuple of one."""
        if gate_BTHX is not None:
            y_BTHX = y_BTHX * gate_BTHX.sigmoid()
        assert self.proj is not None
        return (self.proj(y_BTHX.flatten(2)),)

    def _keys(self, x_BSD: Tensor) -> Tensor:
        return self.w_k(x_BSD).view(*x_BSD.shape[:2], self.kv_heads, self.size)

    def _values(self, x_BSD: Tensor) -> Tensor:
        return self.w_v(x_BSD).view(*x_BSD.shape[:2], self.kv_heads, self.size)

    def _distractors(self, x_BRD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, R, J, X] of random inputs: without Canon, and detached from the projections.

        Keys are RMS-normed if real keys are (`qk_norm`) and the mixer wants it (`norm_distractor_keys`); values never
        are.
        """
        assert self.mixer is not None
        k, v = self._keys(x_BRD).detach(), self._values(x_BRD).detach()
        return (self.k_norm(k) if self.normed and self.mixer.norm_distractor_keys else k), v


def _sum(terms: list[Tensor]) -> Tensor:
    """Return the sum of one or more tensors of one shape, added from the first to the last."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
