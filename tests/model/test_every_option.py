"""Every option of the network that can change a shape, at its smallest, an odd and its default value: decoding gives the forward pass.

Options come from the fields of the configs, so that a new one is tried without being named here; one of a type that
`option_values` does not know fails.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.model.config import ModelConfig, ModelConfigError
from atma_sweep.model.inference.decode import Decoder, PagedDecoder, RecomputeDecoder
from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS, SETTINGS
from atma_sweep.model.resolve import longest_text
from pydantic.fields import FieldInfo

Awake = Callable[..., Backbone]
PART_FIELDS: Mapping[str, str] = {"mixers": "attn_type", "memories": "memory", "position_settings": "positions"}
"""Field with the settings of parts -> field that names the part."""
PART_NAMES: Mapping[str, list[str]] = {
    "attn_type": list(MIXERS),
    "memory": ["none", *MEMORIES],
    "positions": ["none", *POSITIONS],
}
PROVENANCE = {"mixer_source", "memory_source", "position_source"}
"""Fields that say where a part's code came from."""
TINY: Mapping[str, Any] = {"n_layers": 2, "attn_every": 2, "attn_offset": 1, "mlp_ratio": 1}
"""A gated convolution and a global layer."""
COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "n_heads": {"n_kv_heads": 1},
    "qk_norm_weight": {"canon": False},
    "n_kv_heads": {"n_heads": 6},
    "attn_every": {"attn_offset": 0},
    "attn_offset": {"attn_every": 4, "n_layers": 4},
    "window_size": {"window": True},
    "memories.sketch": {"features": "sketch"},
    "memories.degree": {"features": "sketch"},
    "hidden": {"memory": "mlp2"},
}
"""Option -> other options of the same section without which it has no effect, or its values contradict the small network."""
REFUSED: Mapping[str, str] = {
    "memories.omega.degree=3": "degree (3) must be even",
    "memories.atlas.degree=3": "degree (3) must be even",
    "mixers.polysketch.degree=3": "degree (3) must be even",
}
"""Values that no network has, and the end of the message that says so."""
NETWORKS = [("polar", "gated_delta"), ("nope", "none"), ("wall", "omega")]
"""(mixer, memory) around which options of the network itself are tried; the daily tests take the first."""
PROMPT, TOKENS = 2, 6
"""Fewer tokens than a convolution has taps, then more."""


class Option(NamedTuple):
    """A field of the model's config, or of a part's settings."""

    section: str | None
    part: str | None
    name: str
    field: FieldInfo

    def __str__(self) -> str:
        return ".".join(word for word in (self.section, self.part, self.name) if word is not None)

    def changes(self, value: Any) -> dict[str, Any]:
        """Return the changes of the small network's config that give the option this value and an effect."""
        companions = COMPANIONS.get(f"{self.section}.{self.name}", COMPANIONS.get(self.name, {}))
        own = {**companions, self.name: value}
        if self.section is None or self.part is None:
            return own
        return {PART_FIELDS[self.section]: self.part, self.section: {self.part: own}}


def every_option() -> Iterator[Option]:
    for name, field in ModelConfig.model_fields.items():
        if name not in SETTINGS:
            yield Option(None, None, name, field)
    for section, registry in SETTINGS.items():
        for part in registry:
            for name, field in registry.load(part).Config.model_fields.items():
                yield Option(section, part, name, field)


def option_values(option: Option) -> list[Any]:
    """Return the smallest, an odd and the default value of a count, every value of a word, and none of a float, which changes no shape."""
    kind, default = option.field.annotation, option.field.get_default(call_default_factory=True)
    if option.name in PROVENANCE:
        return []
    if option.section is None and option.name in PART_NAMES:
        return PART_NAMES[option.name]
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    values = [default]
    for member in members:
        if get_origin(member) is not Literal and hasattr(member, "__metadata__"):
            member = get_args(member)[0]
        if get_origin(member) is Literal:
            values += get_args(member)
        elif member is bool:
            values += [False, True]
        elif member is int:
            least = next(int(bound.ge) for bound in option.field.metadata if hasattr(bound, "ge"))
            values += [least, least + 1 + least % 2]
        elif member not in (float, types.NoneType):  # a scale that is left to the head's size is None
            raise TypeError(f"{option} has type {kind}, for which this test knows no values; add a rule")
    every = list(dict.fromkeys(values))
    return every if len(every) > 1 else []


OPTIONS = [option for option in every_option() if option_values(option)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "network"),
    [
        pytest.param(option, network, id=f"{option}-{network[0]}")
        for option in OPTIONS
        for network in (NETWORKS if option.section is None else NETWORKS[:1])
    ],
)
def test_every_option_decodes_as_the_forward_pass(awake: Awake, option: Option, network: tuple[str, str]) -> None:
    for value in option_values(option):
        changes = {"attn_type": network[0], "memory": network[1], **TINY, **option.changes(value)}
        refusal = REFUSED.get(f"{option}={value}")
        if refusal is None:
            check_decoding(awake(**changes))
        else:
            with pytest.raises(ModelConfigError, match=f"{re.escape(refusal)}$"):
                awake(**changes)


def check_decoding(model: Backbone) -> None:
    """By both decoders, in pages of three tokens, with the forward pass of the whole text as the oracle.

    In float64: some hundred roundings of 1e-16, of logits to 15, are 1e-12 where nothing enlarges them.
    """
    model.eval()
    tokens = min(TOKENS, longest_text(model.config) or TOKENS)
    text = torch.randint(0, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(5))
    begun = min(PROMPT, tokens)
    with torch.no_grad():
        if model.row_decoder is None and (model.positions is None or model.positions.steady):
            wanted = model(text[None])[0, begun - 1 :]
        else:  # other positions, or another last token, for each length of text
            wanted = torch.stack([model(text[None, :stop])[0, -1] for stop in range(begun, tokens + 1)])
    decoders: list[Decoder] = [RecomputeDecoder(model, tokens=tokens)]
    if model.no_step_reason() is None:
        decoders.append(PagedDecoder(model, tokens=tokens, page=3))
    for decoder in decoders:
        slot, logits_V = decoder.begin(text[:begun])
        rows = [logits_V, *(decoder.step([slot], token[None])[0] for token in text[begun:])]
        torch.testing.assert_close(torch.stack(rows), wanted, rtol=0, atol=1e-10)
