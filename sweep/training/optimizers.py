"""Muon, and the split of the parameters among Muon and AdamW (docs/mechanisms.md, "Backbone" and "Training")."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import TrainConfig

COEFFICIENTS = (2.0, -1.5, 0.5)
"""f(s) = 2 s - 1.5 s^3 + 0.5 s^5: fixed point 1 with slope 0, overshoot at most 1.0018."""


def orthogonalise(matrices_NRC: Tensor, iterations: int = 12, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrix of each of N matrices.

    Input [N, R, C], any float dtype; worked in `dtype`; result [N, R, C] in `dtype`. A zero matrix stays zero.
    X <- X / (|X|_F + 1e-7), then `iterations` times A = X X^T, X <- 2 X - 1.5 A X + 0.5 A^2 X (docs/mechanisms.md, "Training"). A matrix
    of one row or column has one singular value, so there the iteration is one of numbers.
    """
    a, b, c = COEFFICIENTS
    X = matrices_NRC.to(dtype)
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    X = X / (torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + 1e-7)
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


Kind = TypeVar("Kind", bound=torch.optim.Optimizer)

_ADAM = {"cuda": "fused", "cpu": "foreach"}
"""How AdamW works through its parameters: on CUDA in one kernel without temporary copies."""


def eager(kind: type[Kind]) -> type[Kind]:
    """Class decorator: an optimizer whose methods are torch's own without the guard that imports the compiler.

    No step is ever compiled here, and the import takes a second of every attempt on the CPU.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    return kind


@eager
class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz, for parameters of two or more dimensions (docs/mechanisms.md, "Training").

    m <- mu m + (1 - mu) g; u = (1 - mu) g + mu m; u <- orthogonalise(u) sqrt(max(1, rows / cols));
    p <- p (1 - lr wd) - lr u. A parameter [C, 1, k] is C matrices of one row. Matrices of one shape go together.
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
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for params in alike.values():
                self._update(params, group)

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        mu = group["momentum"]
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        rows, cols = params[0].shape[-2:]
        updates = torch.stack(
            [torch.lerp(g, buffer, mu).to(self.dtype) for g, buffer in zip(grads, buffers, strict=True)]
        )
        u = orthogonalise(updates.reshape(-1, rows, cols), group["iterations"], self.dtype).reshape(updates.shape)
        scale = group["lr"] * max(1.0, rows / cols) ** 0.5
        torch._foreach_mul_(list[Tensor](params), 1 - group["lr"] * group["weight_decay"])
        for p, update in zip(params, u, strict=True):
            p.sub_(update, alpha=scale)


@eager
class AdamW(torch.optim.AdamW):
    """torch's own, with a step that never builds a graph."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Optimizers:
    """Muon and AdamW, or with `optimizer: adamw` AdamW alone, over one model, driven by one learning-rate factor."""

    def __init__(
        self, groups: dict[str, list[tuple[str, nn.Parameter]]], config: TrainConfig, device: torch.device
    ) -> None:
        """`groups` is `Backbone.parameter_groups()`: muon, embedding, head, scalar."""

        def params(name: str) -> list[nn.Parameter]:
            return [parameter for _, parameter in groups[name]]

        adam = [
            {"params": params("embedding"), "lr": config.embedding_lr},
            {"params": params("head"), "lr": config.head_lr},
            {"params": params("scalar"), "lr": config.scalar_lr},
        ]
        self._all: dict[str, torch.optim.Optimizer] = {}
        if config.optimizer == "muon":
            self._all["muon"] = Muon(
                params("muon"),
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=config.muon_weight_decay,
                iterations=config.muon_iterations,
                dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            )
        else:
            adam.insert(0, {"params": params("muon"), "lr": config.matrix_lr})
        self._all["adam"] = AdamW(
            adam,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.adam_weight_decay,
            **{_ADAM[device.type]: True},
        )
        self._base = {id(group): group["lr"] for optimizer in self._all.values() for group in optimizer.param_groups}
        self.parameters = [
            p for optimizer in self._all.values() for group in optimizer.param_groups for p in group["params"]
        ]

    @property
    def muon(self) -> torch.optim.Optimizer:
        """That of the matrices; KeyError when AdamW has them."""
        return self._all["muon"]

    @property
    def adam(self) -> torch.optim.Optimizer:
        """AdamW, of everything that Muon has not."""
        return self._all["adam"]

    def step(self, factor: float) -> None:
        """One update with every learning rate times `factor`; gradients are cleared."""
        for optimizer in self._all.values():
            for group in optimizer.param_groups:
                group["lr"] = self._base[id(group)] * factor
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for optimizer in self._all.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only, so that it loads with weights_only."""
        return {name: optimizer.state_dict() for name, optimizer in self._all.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        base = dict(self._base)
        for name, optimizer in self._all.items():
            rates = [base[id(group)] for group in optimizer.param_groups]
            optimizer.load_state_dict(state[name])
            # load_state_dict makes new group dictionaries and brings the last step's rate along
            self._base.update({id(group): rate for group, rate in zip(optimizer.param_groups, rates, strict=True)})
