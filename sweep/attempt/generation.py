"""Text generation by trained models (docs/explanation/decoding.md)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import torch

from ...model.backbone import Backbone
from ...model.inference.decode import Decoder, PagedDecoder, make_decoder
from ...model.inference.generation import check_sampling, generate_tokens
from ...model.resolve import longest_text
from ...results.store.records import Sample
from ..config import SamplesConfig
from ..data.tokenizer import Tokenizer
from ..errors import SweepError
from ..probes.subject import CellSubject


class SamplingError(SweepError):
    """The requested text cannot be generated."""


def generate_text(
    model: Backbone, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, top_p: float, seed: int,
    full_context: bool, top_k: int = 0, fp8: bool = False, decoder: Decoder | None = None,
) -> Iterator[str]:  # fmt: skip
    """Return an iterator over the pieces of text that continue `prompt`; errors are raised at once, not later.

    The prompt follows an end-of-text token and is not repeated. The text ends after `tokens` tokens or at an
    end-of-text token, whose text is yielded too if it has any.

    Args:
        model: network in evaluation mode.
        tokenizer: its tokenizer.
        prompt: text that the continuation follows.
        tokens: most tokens to generate; 0 gives nothing.
        temperature: 0 takes the most probable token.
        top_p: sample from the fewest tokens that together have this probability.
        seed: seed of the sampling.
        full_context: ignore the network's attention window; without effect if `decoder` is given.
        top_k: sample from this many of the most probable tokens; 0: from all.
        fp8: cache keys and values in 8 bits; without effect if `decoder` is given.
        decoder: decoder with a free slot to use; None: a new one.

    Raises:
        SamplingError: numbers out of range, a prompt that cannot be tokenized, a text longer than the network supports,
            or a network without an 8-bit cache.
    """
    try:
        check_sampling(temperature, top_k, top_p, seed)
        prompt_T = _prompt_tokens(model, tokenizer, prompt, tokens)
        if fp8 and decoder is None:
            decoder = PagedDecoder(model, tokens=len(prompt_T) + tokens, full_context=full_context, fp8=True)
    except ValueError as error:
        raise SamplingError(str(error)) from error
    tokens_written = generate_tokens(
        model, prompt_T, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        vocabulary=tokenizer.vocabulary, stop=tokenizer.eot, full_context=full_context, decoder=decoder,
    )  # fmt: skip
    return _decode_pieces(tokenizer, tokens_written)


def decoder_for(model: Backbone, tokenizer: Tokenizer, prompts: Iterable[str], *, tokens: int) -> Decoder:
    """Return a decoder for `generate_text` on each of these prompts, one at a time.

    It has room for the longest prompt and `tokens` new tokens, and keeps the network's attention window.

    Raises:
        SamplingError: a prompt cannot be tokenized, or its text would be too long for the network.
        ValueError: no prompts.
    """
    longest = max(len(_prompt_tokens(model, tokenizer, prompt, tokens)) for prompt in prompts)
    return make_decoder(model, tokens=longest + tokens)


def _prompt_tokens(model: Backbone, tokenizer: Tokenizer, prompt: str, tokens: int) -> torch.Tensor:
    """Return the prompt's tokens after an end-of-text token, int64 [T] on the CPU.

    Args:
        model: network, whose position scheme bounds the length.
        tokenizer: its tokenizer.
        prompt: text; empty gives the end-of-text token alone.
        tokens: tokens that are to follow; they count in the length.

    Raises:
        SamplingError: the prompt cannot be tokenized, `tokens` is negative, or the text would be too long for the
            network.
    """
    try:
        encoded = tokenizer.encode(prompt)
    except (ValueError, SweepError) as error:
        raise SamplingError(str(error)) from error
    if tokens < 0:
        raise SamplingError(f"tokens must be 0 or more, got {tokens}")
    prompt_T = torch.tensor([tokenizer.eot, *encoded.tolist()])
    longest = longest_text(model.config)
    if longest is not None and len(prompt_T) + tokens > longest:
        raise SamplingError(
            f"position scheme {model.config.positions} supports at most {longest} tokens, fewer than "
            f"{len(prompt_T)} of the prompt and {tokens} new ones; request at most "
            f"{max(0, longest - len(prompt_T))}"
        )
    return prompt_T


def _decode_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yield the tokens' text, about a piece per token; no piece is empty.

    A character whose bytes are spread over several tokens comes in one piece. Bytes that are no UTF-8 become U+FFFD.
    """
    letters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        piece = letters.decode(tokenizer.token_bytes(token))
        if piece:
            yield piece
    rest = letters.decode(b"", final=True)
    if rest:
        yield rest


def write_samples(subject: CellSubject, settings: SamplesConfig, *, seed: int, step: int) -> Iterator[Sample]:
    """Yield a generated text per prompt of the settings, in their order; the model must be in evaluation mode.

    Nothing is yielded without prompts. Training is not affected: no random stream and no weight changes. Draws depend
    on seed and position alone, so a difference between the samples of two steps is due to the network.

    Args:
        subject: network, tokenizer and `pause`, which is called after every piece and may raise.
        settings: prompts, length and sampling.
        seed: seed of the sampling.
        step: optimizer step that the samples are recorded for.

    Raises:
        SamplingError: a text cannot be generated.
    """
    if not settings.prompts:
        return
    decoder = decoder_for(subject.model, subject.tokenizer, settings.prompts, tokens=settings.tokens)
    for item, prompt in enumerate(settings.prompts):
        text = []
        for piece in generate_text(
            subject.model, subject.tokenizer, prompt, tokens=settings.tokens, temperature=settings.temperature,
            top_p=settings.top_p, seed=seed, full_context=False, decoder=decoder,
        ):  # fmt: skip
            subject.pause()
            text.append(piece)
        yield Sample(step=step, item=item, prompt=prompt, text="".join(text))
