"""What surrounds a mixer: projections, norms, Canon, gate, output, memory (docs/mechanisms.md, "Backbone").

B batch, T length, D model width, H query heads, J KV heads, X head size, R distractors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels.conv.op import choose_backend
from ..kernels.norms import rms_norm
from .config import ModelConfig
from .kv_cache import CacheCapacity, DecodeStep, KVView, Pools, has_step
from .layers import Canon, Linear, RMSNorm, fuse_weights, fused_rows, map_chunks
from .registry import MEMORIES, MIXERS
from .resolve import NO_MEMORY, memory_settings, mixer_settings

LayerTensors = tuple[dict[str, Tensor], list[Tensor] | None, Any]
"""What `LayerState` holds, as `step` takes it."""


@dataclass(frozen=True)
class LayerState:
    """Of a global layer, for texts that are written token by token."""

    pools: Pools
    conv_tails: list[Tensor] | None
    """Canon's."""
    memory: Any

    @property
    def as_tuple(self) -> LayerTensors:
        """As `step` takes them. The compiler keeps objects of a class until the next collection, and with them their tensors."""
        return self.pools.tensors, self.conv_tails, self.memory


class Attention(nn.Module):
    """out = W_o(y sigmoid(gate)) + the mixer's extra channel + memory, with y = mixer(q, k, v).

    Without `output_gate` out starts with W_o(y), without `qk_norm` q and k are what their projections give.
    """

    def __init__(self, model: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        mixer = MIXERS.load(model.attn_type)(model, mixer_settings(model))
        mixer.layer = layer
        has_memory = model.memory != NO_MEMORY
        memory = MEMORIES.load(model.memory)(model, memory_settings(model)) if has_memory else None
        self.heads, self.kv_heads, self.size = model.n_heads, model.n_kv_heads, model.head_dim
        inner, kv = self.heads * self.size, self.kv_heads * self.size
        self.normed, bias = model.qk_norm, model.bias and model.qkv_bias
        # channels from one query head to the next: with a gate, the second half is the head's
        self.query_stride = self.size * (2 if model.output_gate else 1)
        self.w_q = Linear(model.d_model, self.heads * self.query_stride, bias=bias)
        self.w_k = Linear(model.d_model, kv, bias=bias)
        self.w_v = Linear(model.d_model, kv, bias=bias)
        self.canon = (
            Canon(inner, kv, model.canon_taps, norm=self.normed) if model.canon and mixer.config.canon else None
        )
        self.mixer = mixer
        self.proj = Linear(inner, model.d_model, bias=model.bias, zero=True)
        self.memory = memory
        self.fused_weights: tuple[Tensor, Tensor | None] | None = None

    def forward(
        self, x_BTD: Tensor, *, window: int | None = None, distractors_BRD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(what to add to the residual stream [B, T, D], the distractor loss where there is one and it is asked for).

        `x_BTD` is the normed stream. A window bounds what is seen.
        """
        q_BTHX, k_BTJX, v_BTJX, *gate = self._project_and_norm(x_BTD)
        mixed = self.mixer(q_BTHX, k_BTJX, v_BTJX, window=window, **self._mixer_inputs(x_BTD))
        y_BTHX, extra_BTD = mixed if isinstance(mixed, tuple) else (mixed, None)
        (out_BTD,) = self._output(y_BTHX, *gate)
        if extra_BTD is not None:
            out_BTD = out_BTD + extra_BTD
        if self.memory is not None:
            out_BTD = out_BTD + self.memory(x_BTD, q_BTHX, k_BTJX, v_BTJX)
        if distractors_BRD is None:
            return out_BTD, None
        k_r, v_r = self._distractors(distractors_BRD)
        loss = self.mixer.distractor_loss(q_BTHX, k_BTJX, v_BTJX, k_r, v_r, y_BTHX, window=window)
        return out_BTD, loss

    def evaluate(self, x_BTD: Tensor, *, window: int | None, chunk: int) -> Tensor:
        """The first of what `forward` returns, worked out `chunk` tokens at a time."""
        out_BTD, *qkv = self._evaluate_mixer(x_BTD, window, chunk)
        if self.memory is not None:
            out_BTD = out_BTD + self.memory.evaluate(x_BTD, *qkv, chunk=chunk)
        return out_BTD

    def _evaluate_mixer(self, x_BTD: Tensor, window: int | None, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(what `evaluate` returns without the memory's part, q, k, v)."""
        halo = 0 if self.canon is None else self.canon.halo
        q_BTHX, k_BTJX, v_BTJX, *gate = map_chunks(self._project_and_norm, (x_BTD,), chunk, halo)
        mixed = self.mixer.evaluate(q_BTHX, k_BTJX, v_BTJX, window=window, chunk=chunk, **self._mixer_inputs(x_BTD))
        y_BTHX, extra_BTD = mixed if isinstance(mixed, tuple) else (mixed, None)
        (out_BTD,) = map_chunks(self._output, (y_BTHX, *gate), chunk)
        return out_BTD if extra_BTD is None else out_BTD + extra_BTD, q_BTHX, k_BTJX, v_BTJX

    def projections(self) -> list[Linear]:
        """Those between the stream and what mixes, whose products may be taken in 8 bits; never a mixer's own."""
        return [self.w_q, self.w_k, self.w_v, self.proj]

    def no_step_reason(self) -> str | None:
        """The part that has no form for one token at a time, in words; None when all have."""
        if not has_step(self.mixer):
            return f"mixer {type(self.mixer).__name__}"
        return None if self.memory is None or has_step(self.memory) else f"memory {type(self.memory).__name__}"

    def is_capturable(self) -> bool:
        """Whether `step` asks the device for no number, so that it can be captured as a CUDA graph."""
        # what somebody else wrote may ask for numbers
        ours = __name__.rpartition(".")[0]
        parts = (self.mixer,) if self.memory is None else (self.mixer, self.memory)
        return all(type(part).__module__.startswith(f"{ours}.") and part.is_capturable for part in parts)

    def open(self, capacity: CacheCapacity) -> LayerState:
        """Empty states of texts that `step` goes on with."""
        tails = None if self.canon is None else self.canon.open(capacity)
        return LayerState(Pools(capacity), tails, None if self.memory is None else self.memory.open(capacity))

    def begin(self, x_1TD: Tensor, states: LayerState, step: DecodeStep, *, chunk: int) -> Tensor:
        """`evaluate` of one text from its start, of which the states then hold what `step` needs."""
        out_1TD, q, k, v = self._evaluate_mixer(x_1TD, step.window, chunk)
        positions_1T = torch.arange(x_1TD.shape[1], device=x_1TD.device)[None]
        entries = self.mixer.keep(k, v, places_BT=positions_1T, before=None, **self._mixer_inputs(x_1TD))
        states.pools.fill(step.texts.tables_BP[0], {name: rows[0] for name, rows in entries.items()})
        if self.canon is not None and states.conv_tails is not None:
            last = self._project(x_1TD[:, -self.canon.halo :] if self.canon.halo else x_1TD[:, :0])
            self.canon.begin(states.conv_tails, step.slots_B, *last[:3])
        if self.memory is not None:
            slot = int(step.slots_B[0])
            out_1TD = out_1TD + self.memory.begin(x_1TD, q, k, v, states.memory, slot, chunk=chunk)
        return out_1TD

    def step(self, x_BD: Tensor, states: LayerTensors, step: DecodeStep) -> Tensor:
        """What `forward` gives at the next token of some texts, [B, D]; their states are changed in place."""
        y_BE, *terms = self._mix_step(self._fused_projections(x_BD), x_BD, states, step)
        out_BD: Tensor = self.proj(y_BE)
        for term_BD in terms:
            out_BD = out_BD + term_BD
        return out_BD

    def fused_step(
        self, x_BD: Tensor, norm: RMSNorm, residual_BD: Tensor, states: LayerTensors, step: DecodeStep
    ) -> Tensor:
        """under + what `step` gives at norm(x), for so few texts that a product costs what reading its matrix does.

        The matrices are in x's type and side by side (`Backbone.fuse_weights`).
        """
        assert self.fused_weights is not None
        if self.memory is not None or self.mixer.reads_input:
            x_BD = norm(x_BD)
            x_BE = fused_rows(x_BD, *self.fused_weights)
        else:
            x_BE = fused_rows(x_BD, *self.fused_weights, norm=norm)
        y_BE, *terms = self._mix_step(x_BE, x_BD, states, step)
        out_BD = self.proj.forward_fused(y_BE, residual_BE=residual_BD)
        for term_BD in terms:
            out_BD = out_BD + term_BD
        return out_BD

    def _mix_step(self, x_BE: Tensor, x_BD: Tensor, states: LayerTensors, step: DecodeStep) -> list[Tensor]:
        """What the last projection reads, [B, H X], then what is added behind it, from what the first ones give.

        `x_BD`, the block's normed input, is read where a mixer or a memory asks for it.
        """
        pools, tails, memory = states
        cache = KVView(pools, step)
        q_BE, k_BE, v_BE = x_BE.split([self.heads * self.query_stride, *[self.kv_heads * self.size] * 2], -1)
        q, *gate = q_BE.unflatten(-1, (self.heads, self.query_stride)).split(self.size, -1)
        k, v = (part.unflatten(-1, (self.kv_heads, self.size)) for part in (k_BE, v_BE))
        if self.canon is not None and tails is not None:
            y_BC = self.canon.step(tails, step.slots_B, x_BE, (self.heads, self.kv_heads, self.query_stride))
            head_counts = self.heads, self.kv_heads, self.kv_heads
            q, k, v = y_BC.unflatten(-1, (sum(head_counts), self.size)).split(head_counts, 1)
        elif self.normed:
            q, k = rms_norm(q), rms_norm(k)
        entries = self.mixer.keep(
            k[:, None],
            v[:, None],
            places_BT=step.positions[:, None],
            before=cache.before,
            **self._mixer_inputs(x_BD[:, None]),
        )
        cache.write({name: rows[:, 0] for name, rows in entries.items()})
        assert self.mixer.step is not None
        inputs = {"x_BD": x_BD} if self.mixer.reads_input else {}
        mixed = self.mixer.step(q, cache, **inputs)
        y_BHX, *terms = mixed if isinstance(mixed, tuple) else (mixed,)
        if gate:
            y_BHX = y_BHX * gate[0].sigmoid()
        if self.memory is not None:
            assert self.memory.step is not None
            # not appended: torch 2.11's compiler takes `terms` for a tuple
            terms = [*terms, self.memory.step(x_BD, q, k, v, memory, step.slots_B)]
        return [y_BHX.flatten(1), *terms]

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        paths = {} if self.canon is None else {"canon": str(choose_backend(device, dtype, self.canon.taps))}
        paths |= self.mixer.kernel_paths(device, dtype)
        return paths if self.memory is None else paths | self.memory.kernel_paths(device, dtype)

    def _project_and_norm(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """q [B, T, H, X], k and v [B, T, J, X], as the mixer and the memory read them, and the gate [B, T, H, X] if any."""
        q_BTHX, k_BTJX, v_BTJX, *gate = self._project(x_BTD)
        if self.canon is not None:
            q_BTHX, k_BTJX, v_BTJX = self.canon(q_BTHX, k_BTJX, v_BTJX)
        elif self.normed:
            q_BTHX, k_BTJX = rms_norm(q_BTHX), rms_norm(k_BTJX)
        return q_BTHX, k_BTJX, v_BTJX, *gate

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """The same before Canon and norms."""
        # every size in full: Canon of one tap asks for no tokens, and torch infers no size of an empty tensor
        q_BTHX, *gate = self.w_q(x_BTD).view(*x_BTD.shape[:2], self.heads, self.query_stride).split(self.size, -1)
        return q_BTHX, self._keys(x_BTD), self._values(x_BTD), *gate

    def _mixer_inputs(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """What the mixer gets beside q, k and v."""
        return {"x_BTD": x_BTD} if self.mixer.reads_input else {}

    def join(self) -> None:
        """Lays the matrices of q, k and v one below the other, for `step`: one product instead of three, of the same numbers."""
        self.fused_weights = fuse_weights([self.w_q, self.w_k, self.w_v])
        if self.canon is not None:
            self.canon.join()
        if self.memory is not None:
            self.memory.join()

    def _fused_projections(self, x_BD: Tensor) -> Tensor:
        """What the projections of q (and gate), k and v give, one behind the other."""
        if self.fused_weights is not None:
            return functional.linear(x_BD, *self.fused_weights)
        return torch.cat([self.w_q(x_BD), self.w_k(x_BD), self.w_v(x_BD)], -1)

    def _output(self, y_BTHX: Tensor, gate_BTHX: Tensor | None = None) -> tuple[Tensor]:
        if gate_BTHX is not None:
            y_BTHX = y_BTHX * gate_BTHX.sigmoid()
        return (self.proj(y_BTHX.flatten(2)),)

    def _keys(self, x_BSD: Tensor) -> Tensor:
        return self.w_k(x_BSD).view(*x_BSD.shape[:2], self.kv_heads, self.size)

    def _values(self, x_BSD: Tensor) -> Tensor:
        return self.w_v(x_BSD).view(*x_BSD.shape[:2], self.kv_heads, self.size)

    def _distractors(self, x_BRD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of random inputs: no Canon, and no gradient into the projections."""
        k, v = self._keys(x_BRD).detach(), self._values(x_BRD).detach()
        return (rms_norm(k) if self.normed and self.mixer.norm_distractor_keys else k), v
