"""Text generation: sampling tokens one by one after a prompt.

Source: docs/explanation/decoding.md. Letters of shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..backbone import Backbone
from .decode import Decoder, make_decoder


def generate_tokens(
    model: Backbone, prompt_T: Tensor, *, tokens: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    seed: int = 0, vocabulary: int | None = None, stop: int | None = None, full_context: bool = False,
    decoder: Decoder | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `tokens` sampled tokens that continue a prompt; ends after yielding `stop`.

    The prompt itself is not yielded. A text has a random stream of its own on the device of its logits, so its tokens
    do not depend on the other texts of the decoder. On the CPU they are those of `torch.manual_seed(seed)` and
    transformers' `generate` of this text alone. A generator: nothing happens, and nothing is raised, before the first
    token is requested. The sequence's slot in the decoder is freed when the generator ends or is closed. The model must
    be in evaluation mode.

    Args:
        model: network; unused if `decoder` is given.
        prompt_T: int64 [T], one token or more.
        tokens: most tokens to generate; below 1: none.
        temperature: 0 takes the most probable token.
        top_k: sample from this many of the most probable tokens; 0: from all.
        top_p: sample from the fewest tokens that together have this probability.
        seed: seed of the sampling; unused with temperature 0.
        vocabulary: token ids from this one on are never sampled; None: all may be.
        stop: token id that ends the text; it is yielded too. None: none does.
        full_context: ignore the network's attention window; without effect if `decoder` is given.
        decoder: decoder with a free slot to use; None: a new one.

    Raises:
        ValueError: temperature, top_k or top_p out of range.
        CacheFull: a given decoder has no free slot or no room for the prompt (at the first token), or runs out of room
            later, after tokens were yielded. A new decoder has room for all.
    """
    check_sampling(temperature, top_k, top_p, seed)
    if tokens < 1:
        return
    active_decoder = decoder or make_decoder(model, tokens=len(prompt_T) + tokens, full_context=full_context)
    slot, logits_V = active_decoder.begin(prompt_T)
    generator = torch.Generator(logits_V.device).manual_seed(seed)
    try:
        for remaining in reversed(range(tokens)):
            token = sample_token(logits_V, temperature, top_k, top_p, generator, vocabulary)
            yield token
            if token == stop or not remaining:
                return
            logits_V = active_decoder.step([slot], torch.tensor([token]))[0]
    finally:
        active_decoder.close(slot)


def check_sampling(temperature: float, top_k: int, top_p: float, seed: int = 0) -> None:
    """Raise ValueError unless temperature is finite and >= 0, top_k >= 0, 0 < top_p <= 1 and the seed has 64 bits."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature:g}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 or more, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p:g}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a number of 64 bits, got {seed}")


def sample_token(
    logits_V: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator,
    vocabulary: int | None = None,
) -> int:  # fmt: skip
    """Sample a token id as transformers' `generate` does, bit for bit: temperature, then top-k, then top-p, in float32.

    Args:
        logits_V: logits of the next token, on any device.
        temperature: above 0; 0 returns the most probable token (the first of equals) without a random draw. So does one
            that is so low that float32 cannot hold the divided logits.
        top_k: number of the most probable tokens that stay, and those equal to the last; 0: all.
        top_p: above 0, at most 1; the fewest tokens whose probabilities add up to at least this stay.
        generator: random stream on the device of the logits; V numbers are drawn, none with temperature 0.
        vocabulary: token ids from this one on are never sampled; None: all may be.
    """
    scores_V = logits_V.to(torch.float32, copy=True)
    scores_V[vocabulary if vocabulary is not None else len(scores_V) :] = -torch.inf
    most_probable = scores_V.argmax()
    if temperature == 0:
        return int(most_probable)
    scores_V = scores_V / temperature
    if not scores_V[most_probable].isfinite():
        return int(most_probable)
    if top_k:
        scores_V[scores_V < scores_V.topk(min(top_k, len(scores_V))).values[-1]] = -torch.inf
    if top_p < 1:
        ascending_V, token_V = scores_V.sort()
        is_dropped_V = ascending_V.softmax(-1).cumsum(-1) <= 1 - top_p
        scores_V[token_V[:-1][is_dropped_V[:-1]]] = -torch.inf
    return int(scores_V.softmax(-1).multinomial(1, generator=generator))
