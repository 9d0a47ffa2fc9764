"""Muon, and the split of the parameters among Muon and AdamW (docs/mechanisms.md, "Backbone" and "Training")."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from .loss_scale import LossScale

COEFFICIENTS = (2.0, -1.5, 0.5)
"""f(s) = 2 s - 1.5 s^3 + 0.5 s^5: fixed point 1 with slope 0, overshoot at most 1.0018."""


def orthogonalise(matrices_NRC: Tensor, iterations: int = 12, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrix of each of N matrices.

    Input [N, R, C], any float dtype; worked in `dtype`; result [N, R, C] in `dtype`. A zero matrix stays zero.
    X <- X / (|X|_F + 1e-7), then `iterations` times A = X X^T, X <- 2 X - 1.5 A X + 0.5 A^2 X (docs/mechanisms.md, "Training"). A matrix
    of one row or column has one singular value, so there the iteration is one of numbers.
    """
    a, b, c = COEFFICIENTS
    X = matrices_NRC.to(norm_dtype(dtype))
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    X = (X / (torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    if X.size(-2) == 1:
        wide = torch.promote_types(dtype, torch.float32)
        s = start = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide)
        for _ in range(iterations):
            s = s * (a + b * s.square() + c * s.square().square())
        X = X * (s / start.clamp(min=torch.finfo(wide).tiny)).to(dtype)
        return X.mT if tall else X
    for _ in range(iterations):
        A = X @ X.mT
        # products that add what stands there, so that no pass over memory does nothing else
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of a matrix until it is divided by its norm: updates of 1e-8 are zero in float16."""
    return torch.float32 if dtype == torch.float16 else dtype


OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_ADAM = {"cuda": "fused", "cpu": "foreach"}
"""How AdamW works through its parameters: on CUDA in one kernel without temporary copies."""


_IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable")
"""Settings of a group that say how it is worked through, and change no number but by rounding."""


def without_compile_guard(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Class decorator: an optimizer whose methods are torch's own without the guard that imports the compiler.

    No step is ever compiled here, and the import takes a second of every attempt on the CPU.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    return kind


@without_compile_guard
class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz, for parameters of two or more dimensions (docs/mechanisms.md, "Training").

    m <- mu m + (1 - mu) g; u = (1 - mu) g + mu m; u <- orthogonalise(u) sqrt(max(1, rows / cols));
    p <- p (1 - lr wd) - lr u. A parameter [C, 1, k] is C matrices of one row. Matrices of one shape go together. A group's
    lr may be a tensor of no axes on the device.
    `dtype` is that of the iteration: bfloat16 on CUDA, float32 on the CPU, where bfloat16 is emulated.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        iterations: int = 12,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Raises ValueError for a parameter of fewer than two dimensions."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        self.dtype = dtype
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    raise ValueError(f"Muon takes parameters of 2 or more dimensions, got shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            params_by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    params_by_shape[p.shape].append(p)
            for params in params_by_shape.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        mu, weights = group["momentum"], list[Tensor](params)
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        # torch names these operations with an underscore; pyproject.toml bounds its version
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        rows, cols = params[0].shape[-2:]
        updates = params[0].new_empty((len(params), *params[0].shape), dtype=norm_dtype(self.dtype))
        torch._foreach_copy_(updates.unbind(), torch._foreach_lerp(grads, buffers, mu))
        u = orthogonalise(updates.reshape(-1, rows, cols), group["iterations"], self.dtype).reshape(updates.shape)
        shrink, scale = 1 - group["lr"] * group["weight_decay"], group["lr"] * max(1.0, rows / cols) ** 0.5
        if isinstance(scale, Tensor):
            # a rate that stands in memory can be a factor of a whole stack alone, with the same rounding as below
            stacked = torch.stack(weights).mul_(shrink).addcmul_(u, scale, value=-1)
            torch._foreach_copy_(weights, stacked.unbind())
        else:
            torch._foreach_mul_(weights, shrink)
            torch._foreach_add_(weights, u.unbind(), alpha=-scale)


@without_compile_guard
class AdamW(torch.optim.AdamW):
    """torch's own, with a step that never builds a graph."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def _iteration_dtype(config: TrainConfig) -> torch.dtype:
    """The 16 bits that Muon iterates in."""
    return torch.float16 if config.precision == "fp16" else torch.bfloat16


class Optimizers:
    """Muon and AdamW, or with `optimizer: adamw` AdamW alone, over one model, driven by one learning-rate factor."""

    def __init__(
        self,
        groups: dict[str, list[tuple[str, nn.Parameter]]],
        config: TrainConfig,
        device: torch.device,
        *,
        rates_on_device: bool | None = None,
    ) -> None:
        """`groups` is `Backbone.parameter_groups()`: muon, embedding, head, scalar.

        With `rates_on_device`, None: on CUDA, learning rates stand in the device's memory, where a captured `update` finds those
        of each step.
        """

        def params(name: str) -> list[nn.Parameter]:
            return [parameter for _, parameter in groups[name]]

        adam = [
            {"params": params("embedding"), "lr": config.embedding_lr},
            {"params": params("head"), "lr": config.head_lr},
            {"params": params("scalar"), "lr": config.scalar_lr},
        ]
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        """`muon`, of the matrices, unless AdamW has them; `adam`, of everything else."""
        if config.optimizer == "muon":
            self.by_name["muon"] = Muon(
                params("muon"),
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=config.muon_weight_decay,
                iterations=config.muon_iterations,
                dtype=_iteration_dtype(config) if device.type == "cuda" else torch.float32,
            )
        else:
            adam.insert(0, {"params": params("muon"), "lr": config.matrix_lr})
        rates_on_device = device.type == "cuda" if rates_on_device is None else rates_on_device
        self.by_name["adam"] = AdamW(
            adam,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.adam_weight_decay,
            **{"fused" if rates_on_device else _ADAM[device.type]: True},
        )
        self.scaling = LossScale(device) if config.precision == "fp16" else None
        """Of the loss, with float16."""
        self._base = [group["lr"] for group in self._groups()]
        self._factor = 1.0
        self._device_rates = _DeviceRates(self._base, device) if rates_on_device else None
        self._assign_rates()
        self.parameters = [p for group in self._groups() for p in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    def scaled(self, objective: Tensor) -> Tensor:
        """The loss to call backward on."""
        return objective if self.scaling is None else self.scaling.scaled(objective)

    def clip(self, max_norm: float) -> Tensor:
        """Brings the global gradient norm to `max_norm` at most; returns it as it was, 0 if loss scaling skips the step."""
        if self.scaling is not None:
            self.scaling.unscale(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return norm if self.scaling is None else self.scaling.reported_norm(norm)

    def step(self, factor: float) -> None:
        """One update with every learning rate times `factor`, unless loss scaling skips it; gradients are cleared."""
        self.set_factor(factor)
        self.update()
        self.zero_grad()

    def set_factor(self, factor: float) -> None:
        """What `update` multiplies every learning rate by from now on."""
        self._factor = factor
        if self._device_rates is None:
            self._assign_rates()
        else:
            self._device_rates.factor.fill_(factor)

    def update(self) -> None:
        """One update of every parameter, unless loss scaling skips it.

        With rates in memory it is the same work at every step, and waits for nothing but whether to skip it.
        """
        if self.scaling is not None and not self.scaling.update_scale():
            return
        if self._device_rates is not None:
            self._device_rates.refresh()
        for optimizer in self.by_name.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only, so that it loads with weights_only; the same wherever learning rates stand."""
        state = {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}
        groups = (group for name in self.by_name for group in state[name]["param_groups"])
        for group, base in zip(groups, self._base, strict=True):
            group["lr"] = base * self._factor
            if "capturable" in group:
                group["capturable"] = False
        return state if self.scaling is None else state | {"scaling": self.scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        if self.scaling is not None:
            self.scaling.load_state_dict(state["scaling"])
        for name, optimizer in self.by_name.items():
            # a state from another device brings along how that one worked
            groups = [
                {**theirs, **{key: ours[key] for key in _IMPLEMENTATION_FLAGS if key in ours}}
                for theirs, ours in zip(state[name]["param_groups"], optimizer.param_groups, strict=True)
            ]
            optimizer.load_state_dict({**state[name], "param_groups": groups})
        # load_state_dict makes new group dictionaries and brings the last step's rate along
        self._assign_rates()

    def _assign_rates(self) -> None:
        """Every group's rate: the base times the factor as a number, or where it stands in memory."""
        if self._device_rates is None:
            for group, base in zip(self._groups(), self._base, strict=True):
                group["lr"] = base * self._factor
            return
        for index, group in enumerate(self._groups()):
            muon = "muon" in self.by_name and index == 0
            group["lr"] = (self._device_rates.exact if muon else self._device_rates.single)[index]
            if not muon:
                group["capturable"] = True
        # torch warns of updates that could be captured and are not; the attribute is private, pyproject.toml bounds its version
        self.by_name["adam"]._warned_capturable_if_run_uncaptured = True


class _DeviceRates:
    """The factor and every group's learning rate in the device's memory, in double precision and in single."""

    def __init__(self, base: list[float], device: torch.device) -> None:
        self._base = torch.tensor(base, dtype=torch.float64, device=device)
        self.factor = torch.ones((), dtype=torch.float64, device=device)
        self.exact = self._base.clone()
        self.single = self._base.float()
        """AdamW's kernel reads no other type."""

    def refresh(self) -> None:
        """The rates of the factor as it now stands."""
        torch.mul(self._base, self.factor, out=self.exact)
        self.single.copy_(self.exact)
