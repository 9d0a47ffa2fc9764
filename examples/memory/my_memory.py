# A recurrent memory of your own: an exponential moving average of the inputs, beside the attention.
#
#     atma-sweep launch examples/memory/average.yaml && atma-sweep report --table 6
#
# trains NoPE without it and with two half-lives, three minutes on two cores.
import torch

from atma_sweep.model import Memory, MemoryConfig, register_memory
from atma_sweep.model.config import Float, knob


class AverageConfig(MemoryConfig):
    """Settings of average."""

    decay: Float = knob(0.95, "Fraction of the state that each token keeps.", ge=0, lt=1)


@register_memory("average")
class Average(Memory):
    """state_t = decay state_(t-1) + (1 - decay) x_t; the output is the state times a learned gain per channel."""

    Config = AverageConfig

    def __init__(self, model, config):
        super().__init__(model, config)
        # zero, so that the network starts as if it had no memory
        self.gain = torch.nn.Parameter(torch.zeros(model.d_model))

    def forward(self, x, q, k, v):
        # x [B, T, D]; q [B, T, heads, size]; k, v [B, T, kv heads, size]; returns [B, T, D]
        decay = self.config.decay
        steps = torch.arange(x.size(1), device=x.device)
        weights = (1 - decay) * (decay ** (steps[:, None] - steps[None, :]).clamp(min=0)).tril()
        return torch.einsum("ts,bsd->btd", weights.to(x.dtype), x) * self.gain.to(x.dtype)

    # The other three methods decode token by token. Without `step` each new token recomputes the text.

    def open(self, capacity):
        # a row per text that is decoded at a time, in float32, since a state is read and changed at every token
        return capacity.table(self.gain.numel(), dtype=torch.float32)

    def begin(self, x, q, k, v, states, slot, *, chunk):
        # a new text, [1, T, D], goes into the row `slot`; returns what forward does
        ages = torch.arange(x.size(1) - 1, -1, -1, device=x.device)
        states[slot] = (1 - self.config.decay) * self.config.decay**ages @ x[0].float()
        return self.evaluate(x, q, k, v, chunk=chunk)

    def step(self, x, q, k, v, states, slots):
        # the next token of B texts: x [B, D], slots [B]; returns [B, D]
        state = self.config.decay * states[slots] + (1 - self.config.decay) * x.float()
        states[slots] = state
        return state.to(x.dtype) * self.gain.to(x.dtype)
