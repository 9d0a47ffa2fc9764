"""Retention of a mixer's gates over positions, channels and tokens (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....model.bounds import MAX_COUNT, MAX_LENGTH
from ....model.config import Int, knob
from ....results import metrics
from ....results.store.records import Example
from ..base import LengthwiseProbe, ProbeConfig, Result
from .gates import observe_log_gates, readable_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ..subject import CellSubject

ALWAYS_ON_MEAN, ALWAYS_ON_SPREAD = 0.99, 0.01
"""A gate whose mean is above the first and whose standard deviation is below the second counts as always on."""
THRESHOLDS = (1e-2, 1e-3, 1e-4)
"""A cached key can be evicted when less than this of it is left; of the second there is a metric."""
SHORTEST_TEXT = 64
"""Smallest length at which evictable keys are counted, if the rows are longer; then twice that, and so on."""


class GateDynamicsConfig(ProbeConfig):
    """Settings of the probe gate_dynamics."""

    rows: Int = knob(
        8, "Rows of the validation split, of the training length, whose gates are read.", ge=1, le=MAX_COUNT
    )
    bins: Int = knob(64, "Points of the curve over positions, at most.", ge=1, le=MAX_LENGTH)
    trace: Int = knob(256, "Tokens of the first row whose gates are stored one by one.", ge=1, le=MAX_LENGTH)


@dataclass
class _LayerGates:
    """Sums of one layer's gates over the rows that were read, float64 on the CPU."""

    tokens: int = 0
    sums_PX: Any = 0.0
    squares_PX: Any = 0.0
    by_position_T: Any = 0.0
    evictable: dict[tuple[int, float], float] = field(default_factory=dict)
    """(Length, threshold) -> sum over rows of the share of evictable keys."""
    rows: int = 0
    trace_TPX: list[Tensor] = field(default_factory=list)
    """Gates of the first tokens of the first row; one tensor."""

    def add(self, log_gate: Tensor, trace: int) -> None:
        """Add the gates of some rows, [B, T, P] or [B, T, P, X] natural logs; keep the first `trace` tokens of the first."""
        log_gate_BTPX = (log_gate if log_gate.ndim == 4 else log_gate[..., None]).double().cpu()
        gate_BTPX = log_gate_BTPX.exp()
        for key, share in evictable_shares(log_gate_BTPX).items():
            self.evictable[key] = self.evictable.get(key, 0.0) + share * len(gate_BTPX)
        self.rows += len(gate_BTPX)
        self.tokens += gate_BTPX.shape[0] * gate_BTPX.shape[1]
        self.sums_PX = self.sums_PX + gate_BTPX.sum((0, 1))
        self.squares_PX = self.squares_PX + gate_BTPX.square().sum((0, 1))
        self.by_position_T = self.by_position_T + gate_BTPX.mean((2, 3)).sum(0)
        if not self.trace_TPX:
            self.trace_TPX.append(gate_BTPX[0, :trace].clone())

    def means(self) -> Tensor:
        """Return the mean of each gate over all tokens, [P, X]."""
        mean: Tensor = self.sums_PX / self.tokens
        return mean

    def spreads(self) -> Tensor:
        """Return the standard deviation of each gate over all tokens, [P, X]."""
        spread: Tensor = (self.squares_PX / self.tokens - self.means().square()).clamp(min=0).sqrt()
        return spread


def evictable_shares(log_gate_BTPX: Tensor) -> dict[tuple[int, float], float]:
    """Return (length n, threshold) -> share of keys of which a query at token n has less than the threshold left.

    What is left of a key's channel is the product of its gates of the tokens after the key, up to the query's own. A
    key can be evicted when that is below the threshold in every channel; later queries have even less of it. The share
    is a mean over rows, heads with gates and the first n keys. Lengths are 64, 128, ..., and that of the rows.

    Args:
        log_gate_BTPX: natural log gates <= 0, float64.
    """
    fall_BTPX, tokens = log_gate_BTPX.cumsum(1), log_gate_BTPX.shape[1]
    doubled = [SHORTEST_TEXT << power for power in range(tokens.bit_length()) if SHORTEST_TEXT << power < tokens]
    shares = {}
    for length in (*doubled, tokens):
        slowest_BSP = (fall_BTPX[:, length - 1 : length] - fall_BTPX[:, :length]).amax(-1)
        for threshold in THRESHOLDS:
            shares[length, threshold] = float((slowest_BSP < math.log(threshold)).double().mean())
    return shares


class GateDynamics(LengthwiseProbe):
    """Distribution of a mixer's retention per token: by position, by channel, and token by token.

    Examples of `mean` and `spread` are the mean and the standard deviation of every gate over tokens, by layer (`item`)
    and by head times `channels` plus channel (`position`). Those of `bin` are the mean over all gates of a layer in each
    bin of positions. Those of `trace` are single gates of the first tokens of the first row, of the least and the most
    variable gate of the first, the middle and the last layer with gates; the detail names head, channel and token.
    Those of `evictable` are shares of keys by layer; the detail names length and threshold (`evictable_shares`).
    """

    Config = GateDynamicsConfig
    metrics = metrics.metrics_of_probe("gate_dynamics")
    names_every_missing = True

    def tokens(self, length: int) -> int:
        """Return the tokens of the rows, at the training length."""
        return int(self.settings.rows) * self.config.train.seq_len

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `mean`, `spread`, `always_on` and others, and the gates as examples, or a reason.

        The first two are means over all gates of all layers, `always_on` is the share of gates that hardly ever close.
        `evictable` is the share of keys of which less than a thousandth is left at the end of a row, mean over layers.
        `bin` and `trace` are numbers of tokens. The reason is that the mixer has no gates, that the split is too short
        or that the network cannot read the training length.

        Args:
            subject: Network to be measured.
            length: Ignored; numbers are recorded with length 0.
        """
        import torch

        inputs_BT = readable_rows(subject, int(self.settings.rows))
        if isinstance(inputs_BT, str):
            return inputs_BT
        trace, layers = int(self.settings.trace), dict[int, _LayerGates]()
        observe_log_gates(
            subject, inputs_BT, lambda layer, log_gate: layers.setdefault(layer, _LayerGates()).add(log_gate, trace)
        )
        if not layers:
            return f"n/a: mixer {self.config.model.attn_type} has no gates"
        means = torch.cat([gates.means().flatten() for gates in layers.values()])
        spreads = torch.cat([gates.spreads().flatten() for gates in layers.values()])
        n, n_tokens = inputs_BT.numel(), inputs_BT.shape[1]
        always_on = (means > ALWAYS_ON_MEAN) & (spreads < ALWAYS_ON_SPREAD)
        bin_size, last = -(-n_tokens // int(self.settings.bins)), (n_tokens, THRESHOLDS[1])
        measured = [
            self.value("mean", float(means.mean()), n=n),
            self.value("spread", float(spreads.mean()), n=n),
            self.value("always_on", float(always_on.double().mean()), n=len(means)),
            self.value("bin", float(bin_size)),
            self.value("trace", float(min(trace, n_tokens))),
            self.value("channels", float(next(iter(layers.values())).means().shape[1])),
            self.value("evictable", sum(g.evictable[last] / g.rows for g in layers.values()) / len(layers), n=n),
        ]
        examples = []
        for layer, gates in layers.items():
            curve = [float(part.mean()) / inputs_BT.shape[0] for part in gates.by_position_T.split(bin_size)]
            values: dict[str, Iterable[Any]] = {
                "mean": gates.means().flatten(),
                "spread": gates.spreads().flatten(),
                "bin": curve,
            }
            for metric, numbers in values.items():
                examples += [
                    self.example(metric, float(number), item=layer, position=position)
                    for position, number in enumerate(numbers)
                ]
            for position, ((length, threshold), total) in enumerate(gates.evictable.items()):
                example = self.example("evictable", total / gates.rows, item=layer, position=position)
                examples.append(replace(example, detail={"length": length, "threshold": threshold}))
        names = list(layers)
        for layer in dict.fromkeys((names[0], names[len(names) // 2], names[-1])):
            examples += self._traces(layer, layers[layer])
        return measured, examples

    def _traces(self, layer: int, gates: _LayerGates) -> list[Example]:
        """Return the traced gates of a layer's least and most variable channel, in order of tokens."""
        spread = gates.spreads().flatten()
        channels, trace_TC = gates.means().shape[1], gates.trace_TPX[0].flatten(1)
        examples: list[Example] = []
        for index in dict.fromkeys((int(spread.argmin()), int(spread.argmax()))):
            for token, gate in enumerate(trace_TC[:, index].tolist()):
                example = self.example("trace", gate, item=layer, position=len(examples))
                detail = {"head": index // channels, "channel": index % channels, "token": token}
                examples.append(replace(example, detail=detail))
        return examples
