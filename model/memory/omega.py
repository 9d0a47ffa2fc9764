"""Memories that learn by gradient steps while they read: omega and atlas (docs/mechanisms.md, "Omega memory")."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.norms import statistics_dtype
from ...kernels.omega import features
from ...kernels.omega.op import Rates, State, answer, choose_backend, first_state, omega, unit
from ...kernels.shapes import expand_kv
from ..config import ModelConfig
from ..layers import Linear
from .omega_outline import AtlasConfig, AtlasOutline, OmegaConfig, OmegaOutline
from .recurrent import Recurrent


class Omega(OmegaOutline, Recurrent):
    """The rates are read from x, one of each a head."""

    config: OmegaConfig
    draws: Tensor
    one_stream: ClassVar[bool] = False

    def __init__(self, model: ModelConfig, config: OmegaConfig) -> None:
        super().__init__(model, config)
        self.width = self.columns(model, config)
        if config.memory == "mlp2":
            shapes = self.layers(model, config)
            self.start = nn.ParameterList(torch.randn(o, i) * i**-0.5 for o, i in shapes)
        if config.features == "sketch":
            # drawn here, where chance is the cell's; the same for q and k, and no parameters
            draws = torch.randn(config.degree // 2, model.n_heads, model.head_dim, config.sketch)
            self.register_buffer("draws", draws)

    def add_rates(self, model: ModelConfig) -> None:
        self.rates = nn.ModuleDict({name: Linear(model.d_model, model.n_heads, bias=model.bias) for name in self.RATES})

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        return self.config.chunk

    def whole(self) -> int:
        return self.config.chunk

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """ln alpha [B, T, H]."""
        return self.read_rates(x_BTD).log_keep_BTH

    def read_rates(self, x_BTD: Tensor) -> Rates:
        """From the block's input; a window's loss is the mean of its pairs."""
        dtype = statistics_dtype(x_BTD.dtype)
        logit = {name: rate(x_BTD).to(dtype) for name, rate in self.rates.items()}
        keep = functional.logsigmoid(logit["keep"] + self.config.keep_offset)
        step = torch.sigmoid(logit["step"] + self.config.step_offset)
        return Rates(keep, step, torch.sigmoid(logit["weight"]) / self.config.window, self._momentum(logit))

    def _momentum(self, logit: dict[str, Tensor]) -> Tensor | None:
        return None

    @property
    def orthogonal(self) -> Literal["none", "chunk", "token"]:
        """What is done to the momentum before it is a step."""
        return "none"

    def write(
        self, rates: Rates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: State | None
    ) -> tuple[Tensor, State]:
        b, dtype = len(q_BTHX), statistics_dtype(q_BTHX.dtype)
        q, k = self._features(q_BTHX), self._features(expand_kv(k_BTJX, self.heads))
        v = expand_kv(v_BTJX, self.heads)
        if state is None:
            start = list(self.start) if self.config.memory == "mlp2" else [q.new_zeros(self.head_dim, self.width)]
            layers = [layer.to(dtype) for layer in start]
            state = first_state(layers, b, self.heads, self.width, self.head_dim, self.config.window)
        return omega(
            q, k, v, rates, state,
            window=self.config.window, chunk=self.config.chunk, orthogonal=self.orthogonal,
        )  # fmt: skip

    def norm(self, state: State) -> Tensor:
        squares = [layer.square().sum((-2, -1)) for layer in state.layers]
        return torch.stack(squares).sum(0).sqrt()

    def answer(self, state: State, q_BTHX: Tensor) -> Tensor:
        return answer(state, self._features(q_BTHX))

    def _features(self, x_BTHX: Tensor) -> Tensor:
        x = unit(x_BTHX)
        if self.config.features == "poly2":
            x = features.poly2(x)
        elif self.config.features == "sketch":
            x = features.sketch(x, self.draws)
        else:
            return x
        return unit(x) if self.config.normalise else x

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        alone = self.config.features == "identity" and self.config.memory == "matrix"
        choice = choose_backend(
            device, dtype, self.head_dim if alone else 0, self.config.window, self.config.chunk, self.orthogonal,
            "momentum" in self.RATES,
        )  # fmt: skip
        return {"memory": f"{choice.backend} chunk {self.config.chunk} ({choice.reason})"}


class Atlas(AtlasOutline, Omega):
    """With a momentum, whose steps are made orthogonal."""

    config: AtlasConfig

    @property
    def orthogonal(self) -> Literal["none", "chunk", "token"]:
        return self.config.orthogonal

    def _momentum(self, logit: dict[str, Tensor]) -> Tensor | None:
        return functional.logsigmoid(logit["momentum"] + self.config.momentum_offset)
