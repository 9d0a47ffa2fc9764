"""Learned slope of a Polar network's count map, mag = tanh(beta ln(1 + m)) (docs/reference/mechanisms.md, "Polar attention")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....results import metrics
from ..base import LengthwiseProbe, Result

if TYPE_CHECKING:
    from ..subject import CellSubject


class CountMap(LengthwiseProbe):
    """Slope beta = softplus(mag_beta): mean, minimum and maximum over all heads of all Polar layers.

    Examples hold the slope of every head, by index among the Polar layers (`item`) and head (`position`).
    """

    metrics = metrics.metrics_of_probe("count_map")
    names_every_missing = True

    def tokens(self, length: int) -> int:
        """Return 1, because no text is read."""
        return 1

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return `beta` (mean), `beta_lowest` and `beta_highest` over all heads, or a reason without a Polar layer.

        Slopes are read from the parameters; no text is read. Examples are `beta` of every head, where `item` counts the
        Polar layers alone.
        """
        import torch
        from torch.nn import functional

        from ....model.attention import Attention
        from ....model.mixers.polar import Polar

        mixers = [block.mix.mixer for block in subject.model.blocks if isinstance(block.mix, Attention)]
        betas = [
            functional.softplus(mixer.mag_beta.detach().double()).cpu() for mixer in mixers if isinstance(mixer, Polar)
        ]
        if not betas:
            return "n/a: the network has no PoLAR layer"
        all_LH = torch.stack(betas)
        numbers = {"beta": all_LH.mean(), "beta_lowest": all_LH.min(), "beta_highest": all_LH.max()}
        return [self.value(metric, float(value), n=all_LH.numel()) for metric, value in numbers.items()], [
            self.example("beta", float(value), item=item, position=position)
            for item, heads in enumerate(all_LH)
            for position, value in enumerate(heads)
        ]
