"""Text that a trained model writes (docs/decoding.md)."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import torch

from ...model.backbone import Backbone
from ...model.decode import check_sampling, write
from ...model.outline import longest_text
from ..data.tokenizer import Tokenizer
from ..errors import SweepError


class SamplingError(SweepError):
    """What is asked for cannot be written."""


def pieces(
    model: Backbone,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    full_context: bool,
) -> Iterator[str]:
    """What `Trained.generate` returns; its errors come at once, not with the first piece."""
    try:
        check_sampling(temperature, top_p)
        known = tokenizer.encode(prompt)
    except (ValueError, SweepError) as error:
        raise SamplingError(str(error)) from error
    if tokens < 0:
        raise SamplingError(f"tokens must be 0 or more, got {tokens}")
    prompt_T = torch.tensor([tokenizer.eot, *known.tolist()])
    longest = longest_text(model.config)
    if longest is not None and len(prompt_T) + tokens > longest:
        raise SamplingError(
            f"positions {model.config.positions} has {longest} places, fewer than {len(prompt_T)} tokens of the prompt "
            f"and {tokens} new ones; ask for at most {max(0, longest - len(prompt_T))}"
        )
    found = write(
        model, prompt_T, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed,
        vocabulary=tokenizer.vocabulary, stop=tokenizer.eot, full_context=full_context,
    )  # fmt: skip
    return _text(tokenizer, found)


def _text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """A letter whose bytes come in several tokens comes whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        piece = decoder.decode(tokenizer.token_bytes(token))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
