"""Loss scaling, without which small gradients are zero in float16 (docs/mechanisms.md, "Precision")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

INITIAL_SCALE = 2.0**16
GROWTH, GROWTH_INTERVAL = 2.0, 2000
"""Factor, and steps in a row that must have been taken before it."""
BACKOFF = 0.5
MIN_SCALE = 2.0**-24
"""A gradient that overflows even with this scale has diverged."""


class LossScale:
    """torch's GradScaler over all optimizers at once: they take a step together or skip it together.

    The loss is multiplied by the scale and gradients divided by it. One that is not finite skips the step and halves the scale;
    after 2,000 steps in a row it doubles. Only `update_scale` waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.tensor(INITIAL_SCALE, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        """Steps taken since the last that was skipped or the last growth."""
        self._found_inf = torch.zeros(1, device=device)
        """1 when a gradient of this step is not finite."""
        self.skipped = 0
        """Steps that changed no weight."""

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by; waits for the device."""
        return float(self._scale)

    def scaled(self, objective: Tensor) -> Tensor:
        """The loss to call backward on."""
        return objective * self._scale

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides the gradients, all of one type, and notes whether one is not finite."""
        self._found_inf.zero_()
        grads = [p.grad for p in parameters if p.grad is not None]
        # torch names this operation, and the one of `update_scale`, with an underscore; pyproject.toml bounds its version
        torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found_inf, self._scale.reciprocal())

    def reported_norm(self, norm: Tensor) -> Tensor:
        """The gradient norm as a curve says it: 0 for a step that is skipped; as it is where a smaller scale helps no more."""
        return torch.where((self._found_inf > 0) & (self._scale > MIN_SCALE), 0.0, norm).squeeze()

    def update_scale(self) -> bool:
        """Whether the step may be taken; sets the scale of the next one. The one look at a value, once a step."""
        torch._amp_update_scale_(self._scale, self._growth_tracker, self._found_inf, GROWTH, BACKOFF, GROWTH_INTERVAL)
        is_finite = not self._found_inf.item()
        self.skipped += not is_finite
        return is_finite

    def state_dict(self) -> dict[str, float | int]:
        """Numbers alone."""
        return {"scale": self.scale, "row": int(self._growth_tracker), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restores what `state_dict` gave."""
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["row"])
        self.skipped = int(state["skipped"])
