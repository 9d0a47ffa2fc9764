"""Text generation: sampling tokens one by one after a prompt.

Source: docs/explanation/decoding.md. Letters of shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..backbone import Backbone
from ..rng import rng_stream
from .decode import Decoder, make_decoder


def generate_tokens(
    model: Backbone, prompt_T: Tensor, *, tokens: int, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
    vocabulary: int | None = None, stop: int | None = None, full_context: bool = False,
    decoder: Decoder | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `tokens` sampled tokens that continue a prompt; ends after yielding `stop`.

    The prompt itself is not yielded. The token at a position is a function of logits, seed and position alone. A
    generator: nothing happens, and nothing is raised, before the first token is requested. The sequence's slot in the
    decoder is freed when the generator ends or is closed. The model must be in evaluation mode.

    Args:
        model: network; unused if `decoder` is given.
        prompt_T: int64 [T], one token or more.
        tokens: most tokens to generate; below 1: none.
        temperature: 0 takes the most probable token.
        top_p: sample from the fewest tokens that together have this probability.
        seed: seed of the sampling; unused with temperature 0.
        vocabulary: token ids from this one on are never sampled; None: all may be.
        stop: token id that ends the text; it is yielded too. None: none does.
        full_context: ignore the network's attention window; without effect if `decoder` is given.
        decoder: decoder with a free slot to use; None: a new one.

    Raises:
        ValueError: temperature or top_p out of range.
        CacheFull: a given decoder has no free slot or no room for the prompt (at the first token), or runs out of room
            later, after tokens were yielded. A new decoder has room for all.
    """
    check_sampling(temperature, top_p)
    if tokens < 1:
        return
    active_decoder = decoder or make_decoder(model, tokens=len(prompt_T) + tokens, full_context=full_context)
    slot, logits_V = active_decoder.begin(prompt_T)
    try:
        for position in range(len(prompt_T), len(prompt_T) + tokens):
            token = sample_token(logits_V[:vocabulary], temperature, top_p, rng_stream(seed, "write", position))
            yield token
            if token == stop or position + 1 == len(prompt_T) + tokens:
                return
            logits_V = active_decoder.step([slot], torch.tensor([token]))[0]
    finally:
        active_decoder.close(slot)


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise ValueError unless temperature is finite and >= 0 and 0 < top_p <= 1; NaN is refused too."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature:g}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p:g}")


def sample_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Sample a token id from softmax(logits / temperature), restricted to the most probable tokens reaching `top_p`.

    These are the fewest tokens whose probabilities add up to at least `top_p`, renormalised; equal probabilities rank
    by token id. Computed in float64 on the CPU, after waiting for the logits.

    Args:
        logits_V: logits of the next token, on any device.
        temperature: above 0; 0 returns the most probable token (the first of equals) without a random draw.
        top_p: above 0, at most 1.
        generator: random stream on the CPU; one number is drawn, none with temperature 0.
    """
    logits_V = logits_V.double().cpu()
    if temperature == 0:
        return int(logits_V.argmax())
    ranked_V, token_V = (logits_V / temperature).softmax(-1).sort(descending=True, stable=True)
    cumulative_V = ranked_V.cumsum(-1)
    # the first token at which the cumulative probability reaches top_p is included
    count = int((cumulative_V < top_p).sum()) + 1
    total = float(cumulative_V[min(count, len(cumulative_V)) - 1])
    drawn = float(torch.rand((), generator=generator, dtype=torch.float64)) * total
    return int(token_V[min(int(torch.searchsorted(cumulative_V, drawn, right=True)), count - 1, len(cumulative_V) - 1)])
