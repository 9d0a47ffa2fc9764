"""Facts of the package's own mixers and memories that are measured on a network: decoding and bytes of state.

`python -m atma_sweep.sweep.reference.part_facts` prints own_parts.csv, from which `atma-sweep parts` reads them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

FIELDS = ("name", "kind", "decodes", "state_bytes", "token_bytes")
"""Columns of own_parts.csv; booleans are yes and no, and bytes are empty where the part has no decoding state."""
SHAPE = {"n_layers": 1, "attn_every": 1, "attn_offset": 0, "vocab_size": 8, "mlp_ratio": 1}
"""One global layer of the 370M network, whose other settings are the defaults."""
TOKENS = 128
"""Length of the text whose state is measured, a multiple of every memory's chunk."""


def part_row(kind: str, name: str, **settings: Any) -> dict[str, str]:
    """Return the row of a mixer or memory, from decoding one layer on the CPU in bfloat16. Imports torch.

    Args:
        kind: "mixer" or "memory"; a memory is measured beside mixer nope, whose bytes are subtracted.
        name: name of the part.
        **settings: further settings of the network.
    """
    from ...model.registry import MIXERS

    row = dict.fromkeys(FIELDS, "") | {"name": name, "kind": kind, "decodes": "no"}
    if kind == "memory":
        measured, base = _cache_bytes(memory=name, attn_type="nope", **settings), _cache_bytes(attn_type="nope")
    else:
        measured, base = _cache_bytes(attn_type=name, **settings), (0, 0)
        row["kind"] = "block part" if MIXERS.load(name).is_block else kind
    if measured is not None and base is not None:
        growth = 0 if kind == "memory" else measured[1]
        fixed = measured[0] - base[0] - growth * TOKENS + (base[1] * TOKENS if growth else 0)
        row |= {"decodes": "yes", "state_bytes": str(fixed), "token_bytes": str(growth)}
    return row


def _cache_bytes(**settings: Any) -> tuple[int, int] | None:
    """Return (bytes after TOKENS tokens, bytes of the next token) of one layer; None if it cannot decode."""
    import torch

    from ...model.backbone import build
    from ...model.config import ModelConfig
    from ...model.inference.decode import PagedDecoder

    model = build(ModelConfig(**SHAPE | settings), seed=0, dtype=torch.bfloat16).eval()
    text_T = torch.zeros(TOKENS, dtype=torch.int64)
    with torch.no_grad():
        model(text_T[None])  # a part that cannot take 16 bits fails here
    if model.no_step_reason() is not None:
        return None
    decoder = PagedDecoder(model, tokens=TOKENS + 1, graphs=False)
    slot, _ = decoder.begin(text_T)
    before = decoder.cache_bytes(slot)
    decoder.step([slot], torch.zeros(1, dtype=torch.int64))
    return before, decoder.cache_bytes(slot) - before


def contract_problem(kind: str, name: str) -> str | None:
    """Return how a mixer or memory breaks its contract in one layer in float64; None if it does not. Imports torch.

    Checked are that no output depends on later tokens, and that decoding gives the logits of the forward pass, within
    1e-3 of them, since states may be float32.

    Args:
        kind: "mixer" or "memory".
        name: name of the part.
    """
    import torch

    from ...model.backbone import build
    from ...model.config import ModelConfig
    from ...model.inference.decode import PagedDecoder

    own = {"attn_type": name} if kind == "mixer" else {"attn_type": "nope", "memory": name}
    model = build(ModelConfig(**SHAPE | own), seed=0, dtype=torch.float64).eval()
    draw, half = torch.Generator().manual_seed(0), TOKENS // 2
    text_T, late_T = torch.randint(0, SHAPE["vocab_size"], (2, TOKENS), generator=draw)
    with torch.no_grad():
        for parameter in model.parameters():  # the last projection may be zero
            if not parameter.any():
                parameter.normal_(std=0.02, generator=draw)
        logits_TV = model(text_T[None])[0]
        changed_TV = model(torch.cat([text_T[:half], late_T[half:]])[None])[0]
        if not (changed_TV - logits_TV)[:half].norm() <= 1e-6 * logits_TV.norm():
            return "its output at a token depends on later tokens"
        if model.no_step_reason() is not None:
            return None
        decoder = PagedDecoder(model, tokens=TOKENS, graphs=False)
        slot, first_V = decoder.begin(text_T[:half])
        rows = [first_V, *(decoder.step([slot], token[None])[0] for token in text_T[half:])]
    if not (torch.stack(rows) - logits_TV[half - 1 :]).norm() <= 1e-3 * logits_TV[half - 1 :].norm():
        return "decoding token by token gives other outputs than forward"
    return None


def own_rows() -> Iterator[dict[str, str]]:
    """Yield the row of every mixer and memory of the package, in the order of the registries."""
    from ...model.registry import MEMORIES, MIXERS

    for kind, parts in (("mixer", MIXERS), ("memory", MEMORIES)):
        for name in parts:
            if parts.owner(name) is None:
                yield part_row(kind, name)


def as_csv() -> str:
    """Return own_parts.csv as text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(own_rows())
    return text.getvalue()


if __name__ == "__main__":
    print(as_csv(), end="")
