"""A mixer: the mean of the values seen so far, weighted by keep**distance."""

import torch
from atma_sweep.model import Mixer, MixerConfig


class Fade(Mixer):
    """Mean of the values seen so far, weighted by keep**distance."""

    class Config(MixerConfig):
        """Settings: `keep`, the weight of a value one token further back."""

        keep: float = 0.9

    def forward(self, q, k, v, *, window):
        """Return what every query head reads, [B, T, heads, size], from values [B, T, kv heads, size]."""
        steps = torch.arange(v.size(1), device=v.device)
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        weights = (self.config.keep**distance).tril().to(v.dtype)
        if window is not None:
            weights = weights.triu(1 - window)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.einsum("ts,bshd->bthd", weights, v)
        return y.repeat_interleave(q.size(2) // v.size(2), dim=2)
