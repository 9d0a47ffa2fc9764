"""Attention maps of any mixer: its outputs for values that form the identity (docs/reference/mechanisms.md, "Diagnostics")."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from ....model.bounds import MAX_HEADS, MAX_LAYERS
from ....model.config import Int, knob
from ....results import metrics
from ..base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..subject import CellSubject

LARGE_VALUE = 2.0**40
"""Scale of values at which terms outside the text's values, such as a null key's, become negligible."""
LINEARITY_TOLERANCE = 0.1
"""Maximum deviation of the log ratio of outputs for a mixer that is linear in its values."""
MAX_MAP_ERROR = 0.02
"""Maximum error, relative to the largest output, of outputs that are recomputed from a map."""
DIGITS = 5
"""Decimal places of the stored weights."""


class AttentionMapConfig(ProbeConfig):
    """Settings of the probe attention_map."""

    tokens: Int = knob(64, "Tokens of the text, the first of the validation split.", ge=2, le=512)
    layers: tuple[Annotated[Int, Field(ge=0, lt=MAX_LAYERS)], ...] = knob(
        (), "Layers whose maps are stored, counted from 0 over the network; empty: all with attention."
    )
    heads: Int = knob(8, "Heads per layer whose maps are stored, from the first on.", ge=1, le=MAX_HEADS)


class AttentionMap(LengthwiseProbe):
    """Attention maps, and the effective number of keys per query as a mean over queries and maps.

    The effective number of keys is (sum |w|)^2 / sum w^2 over the weights w of a query.

    An example is a row of a map: `item` counts maps, `position` is the query, and the detail has layer, head, the
    weights of keys up to the query, and the query's token as text.
    """

    Config = AttentionMapConfig
    metrics = metrics.metrics_of_probe("attention_map")
    names_every_missing = True

    def tokens(self, length: int) -> int:
        """Return the tokens of the text, twice: once for the network, and about as much for the identity."""
        return 2 * int(self.settings.tokens)

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `keys` (effective keys per query) and `row_sum` (sum of a query's weights), and the maps, or a reason.

        Both are means over queries and maps; a query with weights of 0 has 0 keys. An example is a row of a map with
        the metric `keys`; its weights are rounded to 5 decimals (`DIGITS`). The reason is that of `_maps`.

        Args:
            subject: Network to be measured.
            length: Ignored; numbers are recorded with length 0.
        """
        maps = self._maps(subject)
        if isinstance(maps, str):
            return maps
        letters = [
            subject.tokenizer.token_bytes(int(token)).decode(errors="replace")
            for token in subject.corpus.validation[: self.settings.tokens]
        ]
        weights_MTS = np.stack(list(maps.values()))
        squares = (weights_MTS**2).sum(-1)
        keys = np.divide(np.abs(weights_MTS).sum(-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)
        numbers = {"keys": keys, "row_sum": weights_MTS.sum(-1)}
        return [self.value(name, float(per_query.mean()), n=per_query.size) for name, per_query in numbers.items()], [
            replace(
                self.example("keys", float(keys[item, query]), item=item, position=query),
                detail={
                    "layer": layer, "head": head, "token": letters[query],
                    "weights": [round(w, DIGITS) for w in map_TS[query, : query + 1].tolist()],
                },
            )
            for item, ((layer, head), map_TS) in enumerate(maps.items())
            for query in range(len(map_TS))
        ]  # fmt: skip

    def _maps(self, subject: CellSubject) -> dict[tuple[int, int], np.ndarray] | str:
        """Return the weights [T, T] (query, key) by (layer, head), or the reason why there are none.

        They are of the first `settings.heads` heads of each requested layer, for the first `settings.tokens` tokens of
        the validation split. The reason is that a requested layer has no attention, that the split is too short, that
        the network cannot read so many tokens, that it has no attention, or that a mixer has no map.
        """
        from ....model.attention import Attention
        from ...data.batches import stream_rows

        count, requested = int(self.settings.tokens), self.settings.layers
        attention_layers = [
            layer
            for layer, block in enumerate(subject.model.blocks)
            if isinstance(block.mix, Attention) and block.mix.mixer is not None
        ]
        if unknown := [layer for layer in requested if layer not in attention_layers]:
            return f"n/a: layer {unknown[0]} has no attention; layers with attention: {', '.join(map(str, attention_layers)) or 'none'}"
        available = len(subject.corpus.validation)
        if available <= count:
            return f"too-short: the validation split has {available} of {count + 1} tokens"
        if (beyond := subject.beyond(count)) is not None:
            return beyond
        if not attention_layers:
            return "n/a: the network has no attention"
        tokens_BT, _ = stream_rows(subject.corpus.validation, count, 1)
        layers = [layer for layer in attention_layers if not requested or layer in requested]
        maps = attention_maps(subject, tokens_BT, layers)
        if isinstance(maps, str):
            return maps
        return {
            (layer, head): maps[layer][head]
            for layer in layers
            for head in range(min(len(maps[layer]), self.settings.heads))
        }


def attention_maps(subject: CellSubject, tokens_BT: Tensor, layers: list[int]) -> dict[int, np.ndarray] | str:
    """Return the map [heads, T, T] (query, key) of each layer for a row of tokens, or a reason as text.

    Values are float64; weights can be negative. The reason is that a mixer has no map; other layers are then not
    returned either. The network reads the tokens once, at full context.

    Args:
        subject: Network to be measured.
        tokens_BT: A single row of tokens, int64 [1, T].
        layers: Layers with attention.
    """
    from ..subject import observe_evaluations

    mixes: list[Any] = [block.mix for block in subject.model.blocks]
    mixers = [mixes[layer].mixer for layer in layers]
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record_call(index: int, *args: Any, **options: Any) -> None:
        calls[index] = args, options

    with observe_evaluations(mixers, record_call):
        subject.features(tokens_BT)
    maps = {}
    for index, layer in enumerate(layers):
        args, options = calls[index]
        map_HTS = _attention_map(mixers[index], *args, **options)
        if map_HTS is None:
            return f"n/a: mixer {subject.config.model.attn_type} is not linear in its values, even up to a scale factor"
        maps[layer] = map_HTS
    return maps


def _attention_map(mixer: Any, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, **options: Any) -> np.ndarray | None:
    """Return the map [H, T, T] (query, key) of a mixer, float64, or None if it has none.

    The mixer is evaluated with values that are the columns of the identity, X - 1 of them at a time. The output grows
    with the values if 2^40 times as large values (LARGE_VALUE) give it that factor, up to 0.1 in its natural logarithm.
    If it does not grow with the values, as after a norm, a last channel that is the same for all keys shows the
    divisor, and rows then add up to 1. A mixer whose output grows in another way has no map, and neither has one with a
    map that is not finite. A map of a linear mixer must reproduce its output.

    Args:
        mixer: The mixer.
        q_BTHX: Queries of one row, B = 1.
        k_BTJX: Keys.
        v_BTJX: Values, to check the map.
        options: Further arguments of the mixer's call.
    """
    import torch

    def run_mixer(v: Tensor) -> Tensor:
        mixed = mixer.evaluate(q_BTHX, k_BTJX, v.to(v_BTJX.dtype), **options)
        return (mixed[0] if isinstance(mixed, tuple) else mixed)[0].double().cpu()

    _, t, heads, size = k_BTJX.shape
    unit_output, large_output = (run_mixer(torch.full_like(v_BTJX, scale)) for scale in (1.0, LARGE_VALUE))
    norms = float(unit_output.norm()), float(large_output.norm())
    # with an output of zero any factor is right
    log_ratio = math.log(norms[1] / norms[0]) if min(norms) > 0 else math.log(LARGE_VALUE)
    is_linear = abs(log_ratio - math.log(LARGE_VALUE)) < LINEARITY_TOLERANCE
    if not is_linear and abs(log_ratio) > 1:
        return None
    scale = 1.0 if is_linear else LARGE_VALUE
    # after a norm each output channel may have its own weight, which constant values reveal
    channel_THX = torch.ones_like(large_output) if is_linear else large_output
    parts = []
    for first in range(0, t, size - 1):
        keys = range(first, min(first + size - 1, t))
        values = torch.zeros(1, t, heads, size, dtype=torch.float64, device=v_BTJX.device)
        values[..., -1] = scale
        for channel, key in enumerate(keys):
            values[:, key, :, channel] = scale
        outputs = run_mixer(values) / channel_THX
        of_keys = outputs[..., : len(keys)]
        parts.append(of_keys if is_linear else of_keys / outputs[..., -1:])
    map_HTS = torch.cat(parts, -1).transpose(0, 1)
    if not bool(torch.isfinite(map_HTS).all()):
        return None
    return map_HTS.numpy() if not is_linear or _reproduces_output(map_HTS, v_BTJX[0], run_mixer(v_BTJX)) else None


def _reproduces_output(map_HTS: Tensor, v_TJX: Tensor, y_THX: Tensor) -> bool:
    """Return True if the map times the text's own values is the output of the mixer.

    The largest absolute error may be 0.02 (MAX_MAP_ERROR) times the largest absolute output.

    Args:
        map_HTS: The map.
        v_TJX: Values of the text.
        y_THX: Output of the mixer for these values.
    """
    import torch

    v_SHX = v_TJX.double().cpu().repeat_interleave(y_THX.size(1) // v_TJX.size(1), 1)
    error_THX = torch.einsum("hts,shx->thx", map_HTS, v_SHX) - y_THX
    return float(error_THX.abs().max()) <= MAX_MAP_ERROR * float(y_THX.abs().max())
