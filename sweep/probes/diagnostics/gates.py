"""Retention of the gates of mixers and memories, by layer, head and channel (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....model.bounds import MAX_COUNT
from ....model.config import Int, knob
from ....results import metrics
from ..base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..subject import CellSubject


class GatesConfig(ProbeConfig):
    """Settings of the probe gates."""

    rows: Int = knob(
        8,
        "Rows of the validation split, of the training length, over whose tokens gates are averaged.",
        ge=1,
        le=MAX_COUNT,
    )


class Gates(LengthwiseProbe):
    """Retention of each gate: its geometric mean over tokens; after n tokens about the n-th power of it remains.

    Examples of `retention` hold every gate of a mixer, by layer of the network (`item`) and by head times `channels`
    plus channel (`position`), those of `memory` every head of a memory.
    """

    Config = GatesConfig
    metrics = metrics.metrics_of_probe("gates")
    names_every_missing = True

    def tokens(self, length: int) -> int:
        """Return the tokens of the rows, at the training length."""
        return int(self.settings.rows) * self.config.train.seq_len

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `retention`, `lowest`, `highest`, `channels` and `memory`, and the gates as examples, or a reason.

        The gates are those for the first `settings.rows` rows of the validation split. The first four are of mixers,
        the last is the geometric mean over the gates of all memories. Without gates of either kind its metrics have a
        reason each. The reason instead of all is that the split is too short or that the network cannot read the
        training length.

        Args:
            subject: Network to be measured.
            length: Ignored; numbers are recorded with length 0.
        """
        inputs_BT = readable_rows(subject, int(self.settings.rows))
        if isinstance(inputs_BT, str):
            return inputs_BT
        mixers, memories = log_gates(subject, inputs_BT)
        measured, examples = self._mixer_result(mixers, inputs_BT.numel())
        if memories:
            mean_log = sum(log_P.mean().item() for log_P in memories.values()) / len(memories)
            measured.append(self.value("memory", math.exp(mean_log), n=inputs_BT.numel()))
        else:
            measured.append(self.missing("n/a: the network has no memory with gates", metric="memory"))
        return measured, examples + self._examples("memory", memories)

    def _mixer_result(self, logs: dict[int, Tensor], tokens: int) -> Result:
        """Return geometric mean, minimum and maximum of the mixers' gates, the channels of a head, and examples.

        The metrics are `retention`, `lowest`, `highest` and `channels` (that of the first layer). Every gate is an
        example of `retention`. Without gates each of the four has a reason, and there are no examples.

        Args:
            logs: Mean log gates [heads, channels] by layer.
            tokens: Number of tokens that they are averaged over.
        """
        import torch

        if not logs:
            reason = f"n/a: mixer {self.config.model.attn_type} has no gates"
            return [self.missing(reason, metric=metric.name) for metric in self.metrics[:-1]], []
        all_logs = torch.cat([log.flatten() for log in logs.values()])
        numbers = {"retention": all_logs.mean(), "lowest": all_logs.min(), "highest": all_logs.max()}
        measured = [self.value(name, math.exp(float(log)), n=tokens) for name, log in numbers.items()]
        measured.append(self.value("channels", float(next(iter(logs.values())).size(1))))
        return measured, self._examples("retention", logs)

    def _examples(self, metric: str, logs: dict[int, Tensor]) -> list[Any]:
        """Return every gate as an example (not as a log), with the layer as `item` and its flat index as `position`.

        Args:
            metric: Name of the metric.
            logs: Mean log gates [heads, channels] by layer.
        """
        return [
            self.example(metric, math.exp(log), item=layer, position=position)
            for layer, log_PX in logs.items()
            for position, log in enumerate(log_PX.flatten().tolist())
        ]


def log_gates(subject: CellSubject, inputs_BT: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return (log gates of mixers, log gates of memories), each by layer: [heads, channels], float64 on the CPU.

    They are natural logs, as means over all tokens. There is one channel if a head has one gate. Layers without gates
    are left out, so either can be empty. The network reads at full context.

    Args:
        subject: Network to be measured.
        inputs_BT: Tokens that it reads, int64.
    """
    sums: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def add(totals: dict[int, Tensor], layer: int, log: Tensor) -> None:
        """Add the sum over tokens of a call's log gates, divided by the number of all tokens, to a layer's total."""
        total_PX = (log if log.ndim == 4 else log[..., None]).double().sum((0, 1)).cpu() / inputs_BT.numel()
        totals[layer] = totals[layer] + total_PX if layer in totals else total_PX

    observe_log_gates(
        subject, inputs_BT, lambda layer, log: add(sums[0], layer, log), lambda layer, log: add(sums[1], layer, log)
    )
    return sums


Observer = Callable[[int, "Tensor"], None]
"""Function of a layer's index and its log gates, [B, T, P] or [B, T, P, X]."""


def readable_rows(subject: CellSubject, rows: int) -> Tensor | str:
    """Return that many first rows of the validation split, int64 [rows, seq_len], or the reason why there are none.

    The split is too short, or the network cannot read the training length.
    """
    inputs_BT = subject.validation_rows(rows)
    return inputs_BT if isinstance(inputs_BT, str) else subject.beyond(subject.config.train.seq_len) or inputs_BT


def observe_log_gates(
    subject: CellSubject, inputs_BT: Tensor, on_mixer: Observer, on_memory: Observer | None = None
) -> None:
    """Run the network over the rows at full context, and pass on the log gates of each layer and batch of rows.

    Args:
        subject: Network to be measured.
        inputs_BT: Tokens that it reads, int64.
        on_mixer: Called with the gates of a mixer; layers without gates are left out.
        on_memory: Called with the gates of a memory; None: memories are not observed.
    """
    from ....model.attention import Attention
    from ..subject import observe_evaluations

    mixes = {layer: block.mix for layer, block in enumerate(subject.model.blocks) if isinstance(block.mix, Attention)}
    mixers = {layer: mix.mixer for layer, mix in mixes.items() if mix.mixer is not None}
    memories = {layer: mix.memory for layer, mix in mixes.items() if mix.memory is not None and on_memory is not None}

    def read_mixer(index: int, q: Tensor, k_BTJX: Tensor, v: Tensor, *, x_BTD: Tensor | None = None, **_: Any) -> None:
        """Pass on the log gates of a call of the mixer with that index."""
        layer, read = list(mixers)[index], {} if x_BTD is None else {"x_BTD": x_BTD}
        log = mixers[layer].log_gates(k_BTJX=k_BTJX, **read)
        if log is not None:
            on_mixer(layer, log)

    def read_memory(index: int, x_BTD: Tensor, *_: Any, **__: Any) -> None:
        """Pass on the log gates of a call of the memory with that index."""
        layer = list(memories)[index]
        log = memories[layer].log_gates(x_BTD=x_BTD)
        if log is not None and on_memory is not None:
            on_memory(layer, log)

    with (
        observe_evaluations(list(mixers.values()), read_mixer),
        observe_evaluations(list(memories.values()), read_memory),
    ):
        for rows in subject.batches(*inputs_BT.shape):
            subject.features(inputs_BT[rows], full_context=True)
