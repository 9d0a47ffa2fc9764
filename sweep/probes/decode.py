"""Decoding speed of a network and the size of its cache (docs/explanation/decoding.md)."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from ...model.bounds import MAX_COUNT
from ...model.config import Flag, Int, knob
from ...results import metrics
from .base import LengthwiseProbe, ProbeConfig, Result

if TYPE_CHECKING:
    from ...model.inference.decode import PagedDecoder
    from .subject import CellSubject


class DecodeConfig(ProbeConfig):
    """Settings of the probe `decode`."""

    texts: Int = knob(8, "Texts that are decoded in parallel.", ge=1, le=MAX_COUNT)
    fp8: Flag = knob(False, "Cache keys and values in 8 bits, which wall can; approximate.")
    steps: Int = knob(8, "Tokens per text of one timing; the median of three timings counts.", ge=1, le=MAX_COUNT)


class Decode(LengthwiseProbe):
    """Speed of decoding after texts of the context length, with full context.

    The content of a text does not affect the speed, so it is a single token, repeated.
    """

    Config = DecodeConfig
    metrics = metrics.metrics_of_probe("decode")
    by_length = True
    names_every_missing = True
    settings: DecodeConfig

    def tokens(self, length: int) -> int:
        """Return the tokens of the text and of the timed steps."""
        return length + 3 * self.settings.texts * self.settings.steps

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `written_per_s` (tokens per second over all texts) and `cache_bytes` (bytes of one text's cache).

        There are no examples. The reason why both are absent is that the network cannot decode token by token, or that
        its positions do not suffice for the text and the new tokens. Allocates a cache for all texts.
        """
        import torch

        from ...model.inference.decode import PagedDecoder

        texts, new_tokens = self.settings.texts, 4 * self.settings.steps
        if (unsupported := subject.model.no_step_reason()) is not None:
            return f"n/a: {unsupported} cannot decode token by token"
        if self.settings.fp8 and (unsupported := subject.model.no_fp8_reason()) is not None:
            return f"n/a: {unsupported}"
        if (reason := subject.beyond(length + new_tokens)) is not None:
            return reason
        subject.pause()
        paged = PagedDecoder(
            subject.model, texts=texts, tokens=length + new_tokens, full_context=True,
            chunk=self.config.eval.chunk_tokens, compiled=subject.model.device.type == "cuda", fp8=self.settings.fp8,
        )  # fmt: skip
        first, _ = paged.begin(torch.zeros(length, dtype=torch.int64))
        slots = [first, *(paged.fork(first) for _ in range(texts - 1))]
        cache_bytes = paged.cache_bytes(first)
        speed = self.value(
            "written_per_s", self._tokens_per_second(paged, slots), length, n=3 * texts * self.settings.steps
        )
        return [speed, self.value("cache_bytes", float(cache_bytes), length, n=1)], []

    def _tokens_per_second(self, paged: PagedDecoder, slots: list[int]) -> float:
        """Return the decoded tokens per second over all texts: the median of three timings, after one for compilation.

        Each timing is of `settings.steps` steps, in which every text gets a token; the texts grow by four times as
        many.

        Args:
            paged: Decoder that holds the texts.
            slots: Slots of the texts.
        """
        import torch

        steps, device = self.settings.steps, paged.model.device
        tokens_B = torch.zeros(len(slots), dtype=torch.int64, device=device)
        durations = []
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(steps):
                paged.step(slots, tokens_B, copy_logits=False)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            durations.append(time.perf_counter() - began)
        # the first time compiles and captures graphs
        return len(slots) * steps / statistics.median(durations[1:])
