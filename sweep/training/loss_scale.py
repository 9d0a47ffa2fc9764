"""Dynamic loss scaling, without which small gradients underflow in float16.

Source: docs/reference/mechanisms.md, "Precision".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ranks.group import Ranks

INITIAL_SCALE = 2.0**16
GROWTH, GROWTH_INTERVAL = 2.0, 2000
"""Growth factor of the scale, and the number of consecutive applied steps before the scale grows."""
BACKOFF = 0.5
MIN_SCALE = 2.0**-24
"""Smallest scale; a gradient that overflows even with it has diverged."""


class LossScale:
    """Loss scale shared by all optimizers, which apply or skip a step together; the rules of torch's GradScaler.

    Per step: `scaled` on each objective, `unscale`, then `update_scale`. The loss is multiplied by the scale and
    gradients are divided by it. A gradient that is not finite skips the step and halves the scale; after 2,000 applied
    steps in a row the scale doubles. Only `update_scale` and reading the state wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with scale 65,536 (`INITIAL_SCALE`); the state is kept on `device`."""
        self._scale = torch.tensor(INITIAL_SCALE, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        """Steps applied since the last skipped step or the last growth."""
        self._overflow = torch.zeros(1, device=device)
        """1 if a gradient of this step is not finite, else 0."""
        self.skipped = 0
        """Number of skipped steps."""

    @property
    def scale(self) -> float:
        """Current scale; reading it waits for the device."""
        return float(self._scale)

    def scaled(self, objective: Tensor) -> Tensor:
        """Return the objective times the scale, on which to call backward."""
        return objective * self._scale

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients by the scale in place and note if any is not finite.

        Parameters without a gradient are skipped. All gradients must have the same type.
        """
        self._overflow.zero_()
        grads = [p.grad for p in parameters if p.grad is not None]
        # this operation and that of `update_scale` are private to torch, so pyproject.toml bounds torch's version
        torch._amp_foreach_non_finite_check_and_unscale_(grads, self._overflow, self._scale.reciprocal())

    def agree(self, ranks: Ranks) -> None:
        """Note an overflow on every rank if any has one; call it after `unscale`."""
        ranks.max_(self._overflow)

    def reported_norm(self, norm: Tensor) -> Tensor:
        """Return the gradient norm to report: 0 for a step that will be skipped, otherwise `norm` unchanged.

        Once the scale has reached 2^-24 (MIN_SCALE), an overflow is reported as it is, so that training counts as
        diverged. Call it after `unscale` and before `update_scale`.
        """
        return torch.where((self._overflow > 0) & (self._scale > MIN_SCALE), 0.0, norm).squeeze()

    def update_scale(self) -> bool:
        """Update the loss scale; return True if this step is to be applied. Waits for the device.

        An overflow that `unscale` has noted halves the scale; after 2,000 applied steps in a row it doubles. Call it
        once per step, after `unscale`. A False counts in `skipped`.
        """
        torch._amp_update_scale_(self._scale, self._growth_tracker, self._overflow, GROWTH, BACKOFF, GROWTH_INTERVAL)
        is_finite = not self._overflow.item()
        self.skipped += not is_finite
        return is_finite

    def state_dict(self) -> dict[str, float | int]:
        """Return the state as plain numbers; waits for the device.

        Keys: "scale", "row" (steps applied since the last skipped step or the last growth) and "skipped".
        """
        return {"scale": self.scale, "row": int(self._growth_tracker), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore the state that `state_dict` returned."""
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["row"])
        self.skipped = int(state["skipped"])
