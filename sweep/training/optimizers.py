"""Optimizers: Muon, AdamW, and the split of the parameters between them.

Source: docs/reference/mechanisms.md, "Backbone" and "Training".
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import TrainConfig, uses_muon
from ..ranks.group import SINGLE, Ranks
from .loss_scale import LossScale

COEFFICIENTS = (2.0, -1.5, 0.5)
"""Newton-Schulz polynomial f(s) = 2 s - 1.5 s^3 + 0.5 s^5: fixed point 1 with slope 0, overshoot at most 1.0018."""


def orthogonalise(matrices_NRC: Tensor, iterations: int = 12, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the approximate nearest semi-orthogonal matrix of each of N matrices, by Newton-Schulz iteration.

    All singular values go to 1, approximately. X <- X / (|X|_F + 1e-7), then `iterations` times A = X X^T, X <- 2 X -
    1.5 A X + 0.5 A^2 X. A zero matrix stays zero. A matrix of one row or column has one singular value, so the
    iteration is done on that number.
    Source: docs/reference/mechanisms.md, "Training".

    Args:
        matrices_NRC: matrices [N, R, C] of any float type; not changed.
        iterations: number of iterations.
        dtype: type of the iteration and of the result.

    Returns:
        [N, R, C] in `dtype`.
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
        # fused multiply-adds save separate passes over memory
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a matrix is divided by its norm: float32 for float16, otherwise `dtype` itself.

    Updates of 1e-8 would be zero in float16.
    """
    return torch.float32 if dtype == torch.float16 else dtype


HeadBlocks = Mapping[nn.Parameter, tuple[int, int]]
"""Matrix -> (number of blocks that its rows are cut into, number that its columns are cut into)."""

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

_ADAM = {"cuda": "fused", "cpu": "foreach"}
"""AdamW implementation per device: on CUDA one kernel without temporary copies."""


_IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable")
"""Settings of a parameter group that select an implementation and change results by rounding only."""


def without_compile_guard(kind: type[OptimizerT]) -> type[OptimizerT]:
    """Remove torch's guard, which imports the compiler, from the methods of an optimizer class; class decorator.

    Changes the class in place, its add_param_group, zero_grad, state_dict and load_state_dict, and returns it. No
    optimizer step is compiled here, and the import would take a second of every attempt on the CPU.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    return kind


@without_compile_guard
class Muon(torch.optim.Optimizer):
    """Muon optimizer: momentum orthogonalised by Newton-Schulz, for parameters of two or more dimensions.

    m <- mu m + (1 - mu) g; u = (1 - mu) g + mu m (Nesterov); u <- orthogonalise(u) sqrt(max(1, rows / cols)); p <- p (1
    - lr wd) - lr u. The last two axes are a matrix: a parameter [C, 1, k] is treated as C matrices of one row.
    A parameter of `blocks` is cut into equal blocks, each of which is orthogonalised on its own; its momentum is not cut.
    The factor then has the rows of a block and the columns of the uncut matrix, so that a weight moves about as far as
    without the cut. Parameters of one shape are updated together. A group's lr may be a 0-dimensional tensor on the device. `dtype` is
    the type of the iteration; the project uses 16 bits on CUDA, and float32 on the CPU, where bfloat16 is emulated.
    Source: docs/reference/mechanisms.md, "Training".
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
        blocks: HeadBlocks | None = None,
    ) -> None:
        """Create the optimizer; momentum buffers follow at a parameter's first update.

        Args:
            params: parameters of two or more dimensions, or parameter groups.
            lr: learning rate.
            momentum: mu of the momentum, the weight of the old buffer.
            weight_decay: decoupled weight decay, multiplied by the learning rate.
            iterations: Newton-Schulz iterations.
            dtype: type of the iteration; parameters keep theirs.
            blocks: numbers of blocks of the matrices that are cut; None: none is.

        Raises:
            ValueError: a parameter has fewer than two dimensions, or blocks of unequal sizes.
        """
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        self.dtype, self._blocks = dtype, dict(blocks or {})
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    raise ValueError(f"Muon takes parameters of 2 or more dimensions, got shape {tuple(p.shape)}")
                if any(size % parts for size, parts in zip(p.shape[-2:], self.blocks(p), strict=True)):
                    raise ValueError(
                        f"Muon cannot cut a matrix of shape {tuple(p.shape)} into {self.blocks(p)} equal blocks"
                    )

    def blocks(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the numbers of blocks that a parameter's rows and columns are cut into, (1, 1) if it is not cut."""
        return self._blocks.get(parameter, (1, 1))

    def stacks(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of a group in lists of equal shape and blocks, which are updated together."""
        stacks: dict[tuple[torch.Size, tuple[int, int]], list[nn.Parameter]] = defaultdict(list)
        for p in group["params"]:
            stacks[p.shape, self.blocks(p)].append(p)
        yield from stacks.values()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update parameters and their momentum buffers in place by `update_shape`, in stacks of equal shape.

        Parameters without a gradient are left as they are, also by weight decay.

        Raises:
            ValueError: a closure is passed.
        """
        if closure is not None:
            raise ValueError("Muon does not support a closure")
        for group in self.param_groups:
            for params in self.stacks(group):
                self.update_shape([p for p in params if p.grad is not None], group)

    @torch.no_grad()
    def update_shape(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters of one shape and equal blocks, which all have gradients, with the settings of their group, in place.

        m <- mu m + (1 - mu) g; u = orthogonalise((1 - mu) g + mu m), block by block; p <- p (1 - lr wd) - lr
        sqrt(max(1, rows / cols)) u, with the rows of a block. Creates missing momentum buffers (zeros) in `state`. The
        last two axes are the matrix; there may be more. Does nothing without parameters.
        """
        if not params:
            return
        mu, weights = group["momentum"], list[Tensor](params)
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        # these operations are private to torch, so pyproject.toml bounds torch's version
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        rows, cols = params[0].shape[-2:]
        updates = params[0].new_empty((len(params), *params[0].shape), dtype=norm_dtype(self.dtype))
        torch._foreach_copy_(updates.unbind(), torch._foreach_lerp(grads, buffers, mu))
        row_parts, col_parts = self.blocks(params[0])
        # [N, row blocks, rows of one, column blocks, columns of one]
        cut = updates.reshape(-1, row_parts, rows // row_parts, col_parts, cols // col_parts).transpose(2, 3)
        flat = orthogonalise(cut.flatten(0, 2), group["iterations"], self.dtype)
        u = flat.view(cut.shape).transpose(2, 3).reshape(updates.shape)
        shrink, scale = 1 - group["lr"] * group["weight_decay"], group["lr"] * max(1.0, rows / row_parts / cols) ** 0.5
        if isinstance(scale, Tensor):
            # a rate in device memory can only scale a whole stack; the rounding is the same as below
            stacked = torch.stack(weights).mul_(shrink).addcmul_(u, scale, value=-1)
            torch._foreach_copy_(weights, stacked.unbind())
        else:
            torch._foreach_mul_(weights, shrink)
            torch._foreach_add_(weights, u.unbind(), alpha=-scale)


@without_compile_guard
class AdamW(torch.optim.AdamW):
    """torch's AdamW with a step that never builds an autograd graph or imports the compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def _iteration_dtype(config: TrainConfig, params: list[nn.Parameter], device: torch.device) -> torch.dtype:
    """Return the type of Muon's iteration: on the CPU float32, or float64 for such parameters; on CUDA one of 16 bits.

    That is float16 with `precision: fp16`, else bfloat16.
    """
    if device.type != "cuda":
        return torch.float64 if params and params[0].dtype == torch.float64 else torch.float32
    return torch.float16 if config.precision == "fp16" else torch.bfloat16


class Optimizers:
    """Optimizers of one model, driven by a single learning-rate factor: Muon and AdamW, or AdamW alone.

    A step: backward on `scaled` objectives, `expect_gradients` before the last of them, then `set_factor`, `clip`,
    `update` and `zero_grad`.
    """

    ranks: Ranks = SINGLE
    """Ranks that train the model together."""

    def __init__(
        self,
        groups: dict[str, list[tuple[str, nn.Parameter]]],
        config: TrainConfig,
        device: torch.device,
        *,
        rates_on_device: bool | None = None,
        head_blocks: HeadBlocks | None = None,
    ) -> None:
        """Assign the parameter groups to optimizers.

        Args:
            groups: `Backbone.parameter_groups()`: muon, embedding, head, scalar.
            config: training settings; with `optimizer: adamw` AdamW updates the matrices (group muon) too, at
                `matrix_lr`, and with `muon_for: square` those that are not square. With `precision: fp16` losses are
                scaled.
            device: device of the parameters.
            rates_on_device: store learning rates in device memory, where a captured `update` reads those of each step;
                None: on CUDA.
            head_blocks: `Backbone.head_blocks()`, needed with `muon_split: head` alone.

        Raises:
            ValueError: `muon_split: head` without `head_blocks`.
        """
        if config.muon_split == "head" and head_blocks is None:
            raise ValueError("muon_split: head needs the blocks of the heads; pass head_blocks=model.head_blocks()")

        def params(name: str) -> list[nn.Parameter]:
            return [parameter for _, parameter in groups[name]]

        adam = [
            {"params": params("embedding"), "lr": config.embedding_lr},
            {"params": params("head"), "lr": config.head_lr},
            {"params": params("scalar"), "lr": config.scalar_lr},
        ]
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        """Optimizers by name: `muon` for the matrices, unless AdamW has them, and `adam` for all other parameters."""
        muon = [p for p in params("muon") if uses_muon(p.shape, config.optimizer, config.muon_for)]
        if muon:
            self.by_name["muon"] = Muon(
                muon,
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=config.muon_weight_decay,
                iterations=config.muon_iterations,
                dtype=_iteration_dtype(config, muon, device),
                blocks=head_blocks if config.muon_split == "head" else None,
            )
        if len(muon) < len(params("muon")):
            rest = [p for p in params("muon") if not uses_muon(p.shape, config.optimizer, config.muon_for)]
            adam.insert(0, {"params": rest, "lr": config.matrix_lr})
        rates_on_device = device.type == "cuda" if rates_on_device is None else rates_on_device
        self.by_name["adam"] = AdamW(
            adam,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.adam_weight_decay,
            **{"fused" if rates_on_device else _ADAM[device.type]: True},
        )
        self.scaling = LossScale(device) if config.precision == "fp16" else None
        """Loss scale with fp16; None otherwise."""
        self._base = [group["lr"] for group in self._groups()]
        self._factor = 1.0
        self._device_rates = _DeviceRates(self._base, device) if rates_on_device else None
        self._assign_rates()
        self.parameters = [p for group in self._groups() for p in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    def scaled(self, objective: Tensor) -> Tensor:
        """Return the objective to call backward on, multiplied by the loss scale if there is one."""
        return objective if self.scaling is None else self.scaling.scaled(objective)

    def expect_gradients(self) -> None:
        """Announce that the next backward pass completes the step's gradients; does nothing on one rank."""

    def discard(self) -> None:
        """End the step without an update and drop its gradients."""
        self.zero_grad()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients in place so that their global norm is at most `max_norm`; undoes the loss scale first.

        The norm is the Euclidean one over all parameters together.

        Returns:
            The norm before clipping, a scalar on the device; 0 if loss scaling skips the step. It may be NaN or
            infinite.
        """
        if self.scaling is not None:
            self.scaling.unscale(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return norm if self.scaling is None else self.scaling.reported_norm(norm)

    def step(self, factor: float) -> None:
        """Update parameters with learning rates times `factor`, unless loss scaling skips it; clear gradients.

        Does not clip: call `clip` before, without which loss scaling would not work.
        """
        self.set_factor(factor)
        self.update()
        self.zero_grad()

    def set_factor(self, factor: float) -> None:
        """Set the factor (0 to 1) on every group's base learning rate for the following updates."""
        self._factor = factor
        if self._device_rates is None:
            self._assign_rates()
        else:
            self._device_rates.factor.fill_(factor)

    def update(self) -> None:
        """Update every parameter with the current factor, unless loss scaling skips the step.

        With loss scaling, `clip` must have been called before. With rates on the device the work is the same at every
        step; only loss scaling waits for the device.
        """
        if self.scaling is not None and not self.scaling.update_scale():
            return
        if self._device_rates is not None:
            self._device_rates.refresh()
        for optimizer in self.by_name.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop every gradient."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and numbers only, loadable with `weights_only`.

        Keys: "muon" (if it exists), "adam" and, with loss scaling, "scaling". It does not depend on where learning
        rates are stored. Tensors are those of the optimizers, not copies.
        """
        state = {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}
        groups = (group for name in self.by_name for group in state[name]["param_groups"])
        for group, base in zip(groups, self._base, strict=True):
            group["lr"] = base * self._factor
            if "capturable" in group:
                group["capturable"] = False
        return state if self.scaling is None else state | {"scaling": self.scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, on this or another device.

        Learning rates keep this object's base values and factor; those in the state are ignored. The same optimizers
        and groups are required.
        """
        if self.scaling is not None:
            self.scaling.load_state_dict(state["scaling"])
        for name, optimizer in self.by_name.items():
            # a state from another device contains that device's implementation flags
            groups = [
                {**theirs, **{key: ours[key] for key in _IMPLEMENTATION_FLAGS if key in ours}}
                for theirs, ours in zip(state[name]["param_groups"], optimizer.param_groups, strict=True)
            ]
            optimizer.load_state_dict({**state[name], "param_groups": groups})
        # load_state_dict creates new group dictionaries with the saved step's rates
        self._assign_rates()

    def _assign_rates(self) -> None:
        """Set every group's learning rate: base times factor as a number, or a tensor that holds it on the device.

        Device tensors get new values only in `update`. Muon's is float64, AdamW's float32 and with `capturable` set.
        """
        if self._device_rates is None:
            for group, base in zip(self._groups(), self._base, strict=True):
                group["lr"] = base * self._factor
            return
        for index, group in enumerate(self._groups()):
            muon = "muon" in self.by_name and index == 0
            group["lr"] = (self._device_rates.exact if muon else self._device_rates.single)[index]
            if not muon:
                group["capturable"] = True
        # silences torch's warning about capturable updates that are not captured; a private attribute, so
        # pyproject.toml bounds torch's version
        self.by_name["adam"]._warned_capturable_if_run_uncaptured = True


class _DeviceRates:
    """Learning-rate factor and every group's rate in device memory, in double and in single precision.

    Rates follow a new factor only after `refresh`.
    """

    def __init__(self, base: list[float], device: torch.device) -> None:
        """Allocate the factor (1) and the rates; `base` holds each group's learning rate at factor 1."""
        self._base = torch.tensor(base, dtype=torch.float64, device=device)
        self.factor = torch.ones((), dtype=torch.float64, device=device)
        self.exact = self._base.clone()
        self.single = self._base.float()
        """Rates in single precision, the only type that AdamW's kernel reads."""

    def refresh(self) -> None:
        """Recompute every rate from the current factor."""
        torch.mul(self._base, self.factor, out=self.exact)
        self.single.copy_(self.exact)
