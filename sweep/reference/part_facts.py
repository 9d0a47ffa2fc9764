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
    if model.no_step_reason() is not None:
        return None
    decoder = PagedDecoder(model, tokens=TOKENS + 1, graphs=False)
    slot, _ = decoder.begin(torch.zeros(TOKENS, dtype=torch.int64))
    before = decoder.cache_bytes(slot)
    decoder.step([slot], torch.zeros(1, dtype=torch.int64))
    return before, decoder.cache_bytes(slot) - before


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
