# A sequence mixer of your own: softmax-free attention whose weights depend on distance alone.
#
#     atma-sweep launch examples/mixer/mine.yaml && atma-sweep report --table 6
#
# trains it beside NoPE at half a million parameters, two minutes on two cores.
import torch

from atma_sweep.model import Mixer, MixerConfig, register_mixer


@register_mixer("fade")
class Fade(Mixer):
    """Mean of the values seen so far, weighted by keep**distance."""

    class Config(MixerConfig):
        keep: float = 0.9

    def forward(self, q, k, v, *, window):
        # q [B, T, heads, size]; k, v [B, T, kv heads, size]; returns [B, T, heads, size]
        steps = torch.arange(v.size(1), device=v.device)
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        weights = (self.config.keep**distance).tril().to(v.dtype)
        if window is not None:
            weights = weights.triu(1 - window)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.einsum("ts,bshd->bthd", weights, v)
        return y.repeat_interleave(q.size(2) // v.size(2), dim=2)
