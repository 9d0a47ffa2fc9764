"""Text that a trained model writes (docs/decoding.md)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import torch

from ...model.backbone import Backbone
from ...model.inference.decode import Decoder, make_decoder
from ...model.inference.generation import check_sampling, write
from ...model.resolve import longest_text
from ...results.store.records import Sample
from ..config import SamplesConfig
from ..data.tokenizer import Tokenizer
from ..errors import SweepError
from ..probes.subject import CellSubject


class SamplingError(SweepError):
    """What is asked for cannot be written."""


def generate_text(
    model: Backbone, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, top_p: float, seed: int,
    full_context: bool, decoder: Decoder | None = None,
) -> Iterator[str]:  # fmt: skip
    """What `Trained.generate` returns; its errors come at once, not with the first piece. `decoder` as in `write`."""
    try:
        check_sampling(temperature, top_p)
    except ValueError as error:
        raise SamplingError(str(error)) from error
    prompt_T = _prompt_tokens(model, tokenizer, prompt, tokens)
    tokens_written = write(
        model, prompt_T, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed,
        vocabulary=tokenizer.vocabulary, stop=tokenizer.eot, full_context=full_context, decoder=decoder,
    )  # fmt: skip
    return _decode_pieces(tokenizer, tokens_written)


def decoder_for(model: Backbone, tokenizer: Tokenizer, prompts: Iterable[str], *, tokens: int) -> Decoder:
    """One for `generate_text` of each of these prompts, one after the other. Raises SamplingError as that does."""
    longest = max(len(_prompt_tokens(model, tokenizer, prompt, tokens)) for prompt in prompts)
    return make_decoder(model, tokens=longest + tokens)


def _prompt_tokens(model: Backbone, tokenizer: Tokenizer, prompt: str, tokens: int) -> torch.Tensor:
    """The tokens that so many new ones come behind, int64 [T]. Raises SamplingError."""
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
            f"positions {model.config.positions} has {longest} places, fewer than {len(prompt_T)} tokens of the prompt "
            f"and {tokens} new ones; ask for at most {max(0, longest - len(prompt_T))}"
        )
    return prompt_T


def _decode_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """A letter whose bytes come in several tokens comes whole."""
    letters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        piece = letters.decode(tokenizer.token_bytes(token))
        if piece:
            yield piece
    rest = letters.decode(b"", final=True)
    if rest:
        yield rest


def write_samples(subject: CellSubject, settings: SamplesConfig, *, seed: int, step: int) -> Iterator[Sample]:
    """A text for each prompt, by a network in evaluation mode. Raises SamplingError, and what `subject.pause` raises.

    Training is the same with and without it: no draw and no weight is changed. Draws follow from seed and place, so that
    a difference between two steps is the network's.
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
