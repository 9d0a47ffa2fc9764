"""Memories that take gradient steps at test time: omega and atlas.

Source: docs/reference/mechanisms.md, "Omega memory".
Letters of shapes: B batch, T length, D model width, H query heads, J KV heads, X head size, F columns of a feature.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels import features
from ...kernels.norms import statistics_dtype
from ...kernels.omega.op import Rates, State, answer, choose_backend, first_state, omega, unit
from ...kernels.shapes import expand_kv
from ..bases import MemoryConfig
from ..bounds import MAX_LENGTH, MAX_RATIO, MAX_WIDTH
from ..config import Config, Flag, Int, ModelConfig, Real, knob
from ..layers import Linear
from .recurrent import Recurrent

MAX_COLUMNS = 1 << 16
"""Largest number of feature columns for which a memory is built."""


class OmegaConfig(MemoryConfig):
    """Settings of a memory that takes gradient steps on the last key-value pairs."""

    window: Int = knob(
        16, "Number of latest tokens whose pairs are in the loss of each step.", identity=16, ge=1, le=MAX_LENGTH
    )
    chunk: Int = knob(
        16, "Tokens per chunk, whose gradients are taken at the memory before the chunk; 1: at the memory before each token.",
        identity=16, ge=1, le=MAX_LENGTH,
    )  # fmt: skip
    features: Literal["identity", "poly2", "sketch"] = knob(
        "identity",
        "Features of keys and queries: unchanged, all products of up to two channels, or products of random projections (sketch).",
        identity="identity",
    )
    sketch: Int = knob(
        16,
        "Random products per head with `features: sketch`; the features have the square of this number of columns.",
        identity=16,
        ge=1,
        le=MAX_WIDTH,
    )
    degree: Int = knob(
        2, "Channels that are multiplied for a column of a sketch, an even number.", identity=2, ge=2, le=MAX_WIDTH
    )
    normalise: Flag = knob(True, "Scale features to length 1.", identity=True)
    memory: Literal["matrix", "mlp2"] = knob(
        "matrix", "Memory that learns the pairs: a matrix, or a network with one hidden layer.", identity="matrix"
    )
    hidden: Int = knob(4, "Units of the hidden layer, in multiples of the head size.", identity=4, ge=1, le=MAX_RATIO)
    keep_offset: Real = knob(3.9, "Initial logit of the memory's retention per token: 3.9 is 0.98.", identity=3.9)
    step_offset: Real = knob(-1.0, "Initial logit of the step size: -1 is 0.27.", identity=-1.0)


class AtlasConfig(OmegaConfig):
    """Settings of an omega memory with momentum, whose steps are orthogonalised."""

    chunk: Int = knob(
        64,
        "Tokens per chunk, whose gradients are taken at the memory before the chunk.",
        identity=64,
        ge=1,
        le=MAX_LENGTH,
    )
    keep_offset: Real = knob(
        6.4, "Initial logit of the memory's retention per token: 6.4 is 0.9 over 64 tokens.", identity=6.4
    )
    step_offset: Real = knob(-1.1, "Initial logit of the step size: -1.1 is 0.25.", identity=-1.1)
    momentum_offset: Real = knob(
        2.94, "Initial logit of the momentum's retention per token: 2.94 is 0.95.", identity=2.94
    )
    orthogonal: Literal["chunk", "token", "none"] = knob(
        "chunk",
        "Newton-Schulz on the momentum: once per chunk, whose tokens then read the memory before the chunk; at each token; or never.",
        identity="chunk",
    )


class Omega(Recurrent):
    """Omega memory: each token takes a gradient step on the last `window` key-value pairs.

    The memory f maps features of keys to values. g_t is the gradient of the sum over the window of gamma_i ||f(k_i) -
    v_i||^2 / 2, taken at the memory before the token's chunk. Then M_t = alpha_t M_{t-1} - eta_t g_t, and the readout
    is M_t(q_t). The rates alpha (keep), eta (step) and gamma (weight) are projected from x, one per head.
    """

    Config: ClassVar[type[Config]] = OmegaConfig
    RATES: ClassVar[tuple[str, ...]] = ("keep", "step", "weight")
    """Names of the rates that are projected from x, one of each per head."""
    config: OmegaConfig
    draws: Tensor
    """Fixed random directions of `features: sketch`, [degree / 2, H, X, sketch]; a buffer."""
    is_capturable: ClassVar[bool] = False

    @classmethod
    def columns(cls, model: ModelConfig, config: OmegaConfig) -> int:
        """Return the number of columns F of a key's feature, from settings and head size."""
        return features.columns(config.features, model.head_dim, config.sketch)

    @classmethod
    def layers(cls, model: ModelConfig, config: OmegaConfig) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each matrix of the memory of one head, first to last.

        `memory: matrix` has one, [(X, F)]; `mlp2` has two, [(hidden X, F), (X, hidden X)].
        """
        columns, size = cls.columns(model, config), model.head_dim
        if config.memory == "matrix":
            return [(size, columns)]
        return [(config.hidden * size, columns), (size, config.hidden * size)]

    @classmethod
    def check(cls, model: ModelConfig, config: OmegaConfig) -> None:
        """Raise ValueError for an odd `degree` or for features of more than MAX_COLUMNS columns (65,536)."""
        if config.degree % 2:
            raise ValueError(f"degree ({config.degree}) must be even")
        columns = cls.columns(model, config)
        if columns > MAX_COLUMNS:
            state = 4 * sum(o * i for o, i in cls.layers(model, config)) * model.n_heads
            raise ValueError(
                f"features ({config.features}) of {model.head_dim} channels have {columns:,} columns, and the memory of a "
                f"layer {state / 2**20:,.0f} MiB per row; reduce sketch or model.head_dim"
            )

    @classmethod
    def unfit(cls, config: OmegaConfig, tokens: int) -> str | None:
        """Return a text if `window` exceeds the `tokens` tokens of a sequence; None otherwise.

        Such a window would never be full. The text says what to set.
        """
        if config.window > tokens:
            return f"window ({config.window}) exceeds the {tokens} tokens of a row, so it is never full; set it to at most {tokens}"
        return None

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: OmegaConfig) -> float:
        """Return an omega memory's FLOPs per token and layer: projections, gradients and readouts.

        Two FLOPs per multiply-add. Projections are those of the rates, the readout gate and the output. With K = chunk
        + window - 1 pairs per chunk, a matrix [out, in] of a head adds 2 out in (2 K / chunk + 1) + 2 K (in + out). The
        computation of the features is not counted.
        """
        d, inner = model.d_model, model.n_heads * model.head_dim
        surround = 2.0 * (len(cls.RATES) * d * model.n_heads + 2 * d * inner)
        # keys that the tokens of a chunk use: those of the chunk and of the window before it
        keys = config.chunk + config.window - 1
        head_flops = 0.0
        for outputs, inputs in cls.layers(model, config):
            # readouts for these keys and for the query, the chunk's update, and masked products within the chunk
            head_flops += 2.0 * outputs * inputs * (2 * keys / config.chunk + 1) + 2.0 * keys * (inputs + outputs)
        return surround + model.n_heads * head_flops

    def __init__(self, model: ModelConfig, config: OmegaConfig) -> None:
        """Create the omega memory's projections, initial weights (`memory: mlp2`) and random directions (`sketch`).

        Initial weights are learned, N(0, 1/inputs), shared by all heads. With `memory: matrix` the memory starts at 0
        and has no such parameter. The directions, for `features: sketch` only, are a buffer that is not trained. Both
        draws come from torch's global generator.
        """
        super().__init__(model, config)
        self.width = self.columns(model, config)
        if config.memory == "mlp2":
            shapes = self.layers(model, config)
            self.start = nn.ParameterList(torch.randn(o, i).mul_(i**-0.5) for o, i in shapes)
        if config.features == "sketch":
            # drawn here, where torch's generator is seeded from the cell's seed; shared by q and k, not trained
            draws = torch.randn(config.degree // 2, model.n_heads, model.head_dim, config.sketch)
            self.register_buffer("draws", draws)

    def add_rates(self, model: ModelConfig) -> None:
        """Create one projection per rate."""
        self.rates = nn.ModuleDict({name: Linear(model.d_model, model.n_heads, bias=model.bias) for name in self.RATES})

    def together(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return `chunk`, the tokens that share the memory at which gradients are taken."""
        return self.config.chunk

    def chunk_tokens(self) -> int:
        """Return `chunk`: results depend on where a chunk starts."""
        return self.config.chunk

    def log_gates(self, x_BTD: Tensor) -> Tensor:
        """Return ln alpha, the log of the fraction of the memory that is kept, [B, T, H]."""
        return self.read_rates(x_BTD).log_keep_BTH

    def read_rates(self, x_BTD: Tensor) -> Rates:
        """Return the omega memory's rates of each token, [B, T, H] each, computed from the block's input [B, T, D].

        They are the fields of `Rates`: ln alpha = logsigmoid(logit + keep_offset), eta = sigmoid(logit + step_offset),
        gamma = sigmoid(logit) / window, and the log of the momentum's decay (None without momentum). Float32 (float64
        for float64). The division by `window` makes a full window's loss a weighted mean over its pairs.
        """
        dtype = statistics_dtype(x_BTD.dtype)
        logit = {name: rate(x_BTD).to(dtype) for name, rate in self.rates.items()}
        keep = functional.logsigmoid(logit["keep"] + self.config.keep_offset)
        step = torch.sigmoid(logit["step"] + self.config.step_offset)
        return Rates(keep, step, torch.sigmoid(logit["weight"]) / self.config.window, self._momentum(logit))

    def _momentum(self, logit: dict[str, Tensor]) -> Tensor | None:
        """Return the log of the fraction of the momentum that each token keeps, [B, T, H]; None: no momentum."""
        return None

    @property
    def orthogonal(self) -> Literal["none", "chunk", "token"]:
        """Granularity at which Newton-Schulz orthogonalises the momentum: per "chunk", per "token" or "none"."""
        return "none"

    def write(
        self, rates: Rates, q_BTHX: Tensor, k_BTJX: Tensor, v_BTJX: Tensor, state: State | None
    ) -> tuple[Tensor, State]:
        """Update the memory by gradient steps on a sequence's key-value pairs and read it with the queries.

        At each token, g is the gradient of the sum over the last `window` pairs of gamma ||M(k) - v||^2 / 2, taken at
        the memory before the token's chunk. Then S <- theta S + g (S = g without momentum) and M <- alpha M - eta S,
        where Atlas orthogonalises S by Newton-Schulz (with `orthogonal: chunk` once per chunk, with the chunk's mean
        eta). The token's readout M(q) follows its step, except with `orthogonal: chunk`, where a chunk reads the memory
        before it. Pairs of the last `window` - 1 tokens before the sequence come from the state.

        Args:
            rates: from `read_rates`.
            q_BTHX: queries; mapped to features here.
            k_BTJX: keys; mapped to features here.
            v_BTJX: values.
            state: state before the first token, which must start a chunk; None: the initial memory, 0 or with `memory:
                mlp2` its learned weights.

        Returns:
            (readout [B, T, H, X] in v's type, the state after the last token, float32, or float64 for float64).
        """
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
        """Return the Frobenius norm over all matrices of a state together, [B, H]."""
        squares = [layer.square().sum((-2, -1)) for layer in state.layers]
        return torch.stack(squares).sum(0).sqrt()

    def answer(self, state: State, q_BTHX: Tensor) -> Tensor:
        """Return the memory's readouts for queries, [B, T, H, X] in the state's type, without writing.

        Queries are mapped to features here; every query reads the same state. The readouts are not yet normed and
        gated.
        """
        return answer(state, self._features(q_BTHX))

    def _features(self, x_BTHX: Tensor) -> Tensor:
        """Map keys or queries [B, T, H, X] to features [B, T, H, F] in float32 (float64 for float64).

        They are L2-normalised (a zero vector stays zero) and expanded as the setting `features` says: "identity" leaves
        them, "poly2" gives 1, the channels and all products of two (1 + X + X (X + 1) / 2 columns), "sketch" random
        sums of products (sketch^2 columns). With `normalise` the last two are normalised again.
        """
        x = unit(x_BTHX)
        if self.config.features == "poly2":
            x = features.poly2(x)
        elif self.config.features == "sketch":
            x = features.sketch(x, self.draws)
        else:
            return x
        return unit(x) if self.config.normalise else x

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return {"memory": "backend chunk N (reason)"} for tensors of that device and dtype.

        The backend is "triton" or "torch", and N the setting `chunk`. The first call for a case may run a self-test.
        """
        is_plain_matrix = self.config.features == "identity" and self.config.memory == "matrix"
        choice = choose_backend(
            device, dtype, self.head_dim if is_plain_matrix else 0, self.config.window, self.config.chunk, self.orthogonal,
            "momentum" in self.RATES,
        )  # fmt: skip
        return {"memory": f"{choice.backend} chunk {self.config.chunk} ({choice.reason})"}


class Atlas(Omega):
    """Atlas memory: omega with momentum, orthogonalised by Newton-Schulz before each step.

    S_t = theta_t S_{t-1} + g_t and M_t = alpha_t M_{t-1} - eta_t N(S_t), where N orthogonalises per token, once per
    chunk, or not at all (setting `orthogonal`).
    """

    Config: ClassVar[type[Config]] = AtlasConfig
    RATES: ClassVar[tuple[str, ...]] = (*Omega.RATES, "momentum")
    config: AtlasConfig

    @classmethod
    def unfit(cls, config: Any, tokens: int) -> str | None:
        """Return a text if nothing would ever be read, or if `window` exceeds the sequence; None otherwise.

        With `orthogonal: chunk` a chunk's writes are read only after it, so `chunk` must be below `tokens`, the tokens
        of a sequence.
        """
        if config.orthogonal == "chunk" and config.chunk >= tokens:
            return (
                f"with orthogonal: chunk, writes are read only after their chunk of {config.chunk} tokens, but a row has only "
                f"{tokens}, so nothing would be read: set chunk below {tokens}, or orthogonal: token or none"
            )
        return super().unfit(config, tokens)

    @classmethod
    def forward_flops(cls, model: ModelConfig, config: Any) -> float:
        """Return an atlas memory's FLOPs per token and layer: those of omega plus five Newton-Schulz iterations.

        An iteration on a matrix of short and long sides s and l takes 2 (2 s^2 l + s^3). They count once per token with
        `orthogonal: token`, once per chunk with `chunk`, not at all with `none`.
        """
        flops = super().forward_flops(model, config)
        if config.orthogonal == "none":
            return flops
        rounds_per_token = 1.0 if config.orthogonal == "token" else 1 / config.chunk
        for outputs, inputs in cls.layers(model, config):
            short, long = sorted((outputs, inputs))
            # five iterations, each with a Gram matrix, its square and a product
            flops += model.n_heads * rounds_per_token * 5 * 2.0 * (2 * short * short * long + short**3)
        return flops

    @property
    def orthogonal(self) -> Literal["none", "chunk", "token"]:
        return self.config.orthogonal

    def _momentum(self, logit: dict[str, Tensor]) -> Tensor | None:
        """Return ln theta, the log of the fraction of the momentum that each token keeps, [B, T, H]."""
        return functional.logsigmoid(logit["momentum"] + self.config.momentum_offset)
