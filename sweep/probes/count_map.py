"""What a Polar network has learned of its count map, mag = tanh(beta ln(1 + m)) (docs/mechanisms.md, "Polar attention")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional

from ...model.attention import Attention
from ...model.mixers.polar import Polar
from ...results.store.records import Example, Measurement
from . import Result
from .subject import Subject, unmeasured

METRICS = ("beta", "beta_lowest", "beta_highest")


@torch.no_grad()
def count_map(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """The slope beta = softplus(mag_beta): mean, lowest and highest over all heads of all Polar layers.

    Examples hold every head's, by layer among those with a mixer (`item`) and head (`position`).
    """
    mixers = [block.mix.mixer for block in subject.model.blocks if isinstance(block.mix, Attention)]
    betas = [functional.softplus(mixer.mag_beta.double()).cpu() for mixer in mixers if isinstance(mixer, Polar)]
    for _ in lengths:
        if not betas:
            reason = "n/a: the network has no Polar layer"
            yield [unmeasured("count_map", metric, 0, "1", reason) for metric in METRICS], []
            continue
        all_LH = torch.stack(betas)
        found = (float(all_LH.mean()), float(all_LH.min()), float(all_LH.max()))
        yield (
            [
                Measurement(probe="count_map", metric=metric, value=value, unit="1", n=all_LH.numel())
                for metric, value in zip(METRICS, found, strict=True)
            ],
            [
                Example(probe="count_map", metric="beta", item=item, position=position, value=float(value))
                for item, heads in enumerate(all_LH)
                for position, value in enumerate(heads)
            ],
        )
