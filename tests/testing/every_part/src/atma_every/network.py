"""A mixer, a memory, a position scheme and a regularizer."""

import torch
from atma_sweep.model import Memory, MemoryConfig, Mixer, MixerConfig, Position, PositionConfig


class Copies(Mixer):
    """Each token reads its own value."""

    class Config(MixerConfig):
        """No settings."""

    def forward(self, q, k, v, *, window):
        """Return what every query head reads, [B, T, heads, size], from values [B, T, kv heads, size]."""
        return v.repeat_interleave(q.size(2) // v.size(2), dim=2)


class Means(Memory):
    """Mean of the inputs so far, times a gain."""

    class Config(MemoryConfig):
        """No settings."""

    def __init__(self, model, config):
        """Create the gain, zero at first."""
        super().__init__(model, config)
        self.gain = torch.nn.Parameter(torch.zeros(model.d_model))

    def forward(self, x, q, k, v):
        """Return the memory's output, [B, T, D], from inputs [B, T, D]."""
        counts = torch.arange(1, x.size(1) + 1, device=x.device, dtype=x.dtype)
        return x.cumsum(1) / counts[:, None] * self.gain.to(x.dtype)


class Sines(Position):
    """Sines of rising wavelength."""

    class Config(PositionConfig):
        """No settings."""

    def __init__(self, model, config):
        """Keep the number of channels."""
        super().__init__(model, config)
        self.width = model.d_model

    def forward(self, positions_BT):
        """Return what is added to the embeddings, [B, T, D], from int64 positions [B, T]."""
        return (positions_BT[..., None] * 0.5 ** torch.arange(self.width, device=positions_BT.device)).sin()


def centred(streams, normal_LKD):
    """Return the squared mean of each layer's residual stream, [L]."""
    return torch.stack([stream.float().mean(0).square().sum() for stream in streams])
