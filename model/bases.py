"""What a mixer is. One of your own is a subclass with a `Config` and a `forward`, registered under a name:

    @register_mixer("mean")
    class Mean(Mixer):
        def forward(self, q_BTHD, k_BTJD, v_BTJD, *, window):
            ...
            return y_BTHD

B batch, T length, H query heads, J KV heads (J divides H; head h uses KV head h // (H / J)), X head size, D model
width, R distractors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..parts import MixerConfig as MixerConfig
from ..parts import MixerOutline

Mixed = Tensor | tuple[Tensor, Tensor]
"""y [B, T, H, X], or (y, extra [B, T, D]) with a term that is added after the output projection."""


def _forward(
    self: Mixer, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, *, window: int | None, **read: Tensor
) -> Mixed:
    raise NotImplementedError(f"{type(self).__name__} defines no forward")


def _evaluate_whole(
    self: Mixer,
    q_BTHX: Tensor,
    k_BTJX: Tensor,
    v_BTJX: Tensor,
    *,
    window: int | None,
    chunk: int,
    **read: Tensor,
) -> Mixed:
    mixed: Mixed = self.forward(q_BTHX, k_BTJX, v_BTJX, window=window, **read)
    return mixed


class Mixer(MixerOutline, nn.Module):
    """What a global layer does between tokens. q, k, v come normed (q, k) and, with `canon`, convolved.

    Give own parameters their values in `__init__`: torch's random functions are seeded there from the cell's seed.
    """

    reads_input: ClassVar[bool] = False
    """Whether `forward` and `evaluate` also take `x_BTD`, the block's normed input, as a memory does: for gates of one's own."""

    def __init__(self, model: ModelConfig, config: MixerConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def norm_distractor_keys(self) -> bool:
        """Whether distractor keys are RMS-normed like real ones, where these are (`qk_norm`)."""
        return True

    # These two are attributes, as torch's own `forward` is, because a mixer that reads its input takes one more argument.
    forward: Callable[..., Mixed] = _forward
    """forward(q_BTHX, k_BTJX, v_BTJX, *, window) -> Mixed, with `x_BTD` as well if `reads_input`.

    Query i may see the keys i - window < j <= i, all up to i when `window` is None; never a later one.
    """
    evaluate: Callable[..., Mixed] = _evaluate_whole
    """evaluate(q_BTHX, k_BTJX, v_BTJX, *, window, chunk) -> Mixed, with `x_BTD` as well if `reads_input`: `forward` for
    evaluation, which works through `chunk` tokens at a time. The default is `forward` itself.

    Define it for a mixer whose `forward` needs much more memory than its inputs, such as T x T scores.
    """

    def distractor_loss(
        self, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, k_r_BRJX: Tensor, v_r_BRJX: Tensor, y_BTHX: Tensor, *,
        window: int | None,
    ) -> Tensor:  # fmt: skip
        """Scalar: how much R detached random keys and values draw attention away. `y` is what `forward` returned."""
        raise NotImplementedError(f"{type(self).__name__} defines no distractor loss")

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Op -> implementation that `forward` takes for such tensors, for the record of a run."""
        return {}
