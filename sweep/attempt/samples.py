"""Texts that a network writes while it is trained, so that people can read how it learns (`eval.samples`)."""

from __future__ import annotations

from collections.abc import Iterator

from ...results.store.records import Sample
from ..config import SamplesConfig
from ..probes.subject import Network
from .generation import decoder_of, pieces


def written(subject: Network, asked: SamplesConfig, *, seed: int, step: int) -> Iterator[Sample]:
    """A text for each prompt, by a network in evaluation mode. Raises SamplingError, and what `subject.pause` raises.

    Training is the same with and without it: no draw and no weight is changed. Draws follow from seed and place, so that
    a difference between two steps is the network's.
    """
    if not asked.prompts:
        return
    under_way = decoder_of(subject.model, subject.tokenizer, asked.prompts, tokens=asked.tokens)
    for item, prompt in enumerate(asked.prompts):
        text = []
        for piece in pieces(
            subject.model, subject.tokenizer, prompt, tokens=asked.tokens, temperature=asked.temperature,
            top_p=asked.top_p, seed=seed, full_context=False, under_way=under_way,
        ):  # fmt: skip
            subject.pause()
            text.append(piece)
        yield Sample(step=step, item=item, prompt=prompt, text="".join(text))
