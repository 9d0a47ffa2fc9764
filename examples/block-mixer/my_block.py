# A block part of your own: a mixer in one piece, from hidden states to hidden states, with its own projections.
#
#     atma-sweep launch examples/block-mixer/blocks.yaml && atma-sweep report --table 6
#
# trains it beside NoPE, with matched parameters, at half a million parameters: two minutes on two cores.
import torch

from atma_sweep.model import BlockConfig, BlockPart, register_mixer


@register_mixer("retention")
class Retention(BlockPart):
    """Heads of a matrix state with a fixed decay: S <- keep S + v kᵀ, y = S q."""

    class Config(BlockConfig):
        heads: int = 2

    def __init__(self, model, config):
        super().__init__(model, config)
        if model.d_model % config.heads:
            raise ValueError(f"heads ({config.heads}) must divide the width ({model.d_model})")
        self.qkv = torch.nn.Linear(model.d_model, 3 * model.d_model, bias=False)
        self.out = torch.nn.Linear(model.d_model, model.d_model, bias=False)
        torch.nn.init.zeros_(self.out.weight)  # the branch starts at zero, as the other mixers do

    @classmethod
    def forward_flops(cls, model, config, keys):
        size = model.d_model // config.heads
        return 2 * 4 * model.d_model**2 + 5 * model.d_model * size  # decay, write and read of the state

    def split(self, x):
        q, k, v = torch.nn.functional.linear(x, self.qkv.weight.to(x.dtype)).chunk(3, -1)
        return (part.unflatten(-1, (self.config.heads, -1)) for part in (q, k / k.shape[-1] ** 0.5, v))

    def merge(self, y):
        return torch.nn.functional.linear(y.flatten(-2), self.out.weight.to(y.dtype))

    def keep(self, x):  # one decay per head
        powers = torch.arange(3, 3 + self.config.heads, device=x.device)
        return 1 - 2.0 ** -powers.to(torch.promote_types(x.dtype, torch.float32))

    def forward(self, x):  # [B, T, D]
        q, k, v = self.split(x)
        steps = torch.arange(x.shape[1], device=x.device)
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        weights = (self.keep(x)[:, None, None] ** distance).tril().to(x.dtype)
        scores = torch.einsum("bthx,bshx->bhts", q, k) * weights
        return self.merge(torch.einsum("bhts,bshx->bthx", scores, v))

    # Decoding: a state of fixed size per sequence. Without these two, each new token recomputes the text.
    def empty_state(self, x):  # x [B, D]
        heads, size = self.config.heads, x.shape[-1] // self.config.heads
        exact = torch.promote_types(x.dtype, torch.float32)
        return {"s": torch.zeros(len(x), heads, size, size, dtype=exact, device=x.device)}

    def step(self, x, state):  # x [B, D] of the next tokens
        q, k, v = self.split(x)
        s = state["s"] * self.keep(x)[:, None, None] + torch.einsum("bhv,bhk->bhvk", v, k)
        return self.merge(torch.einsum("bhvk,bhk->bhv", s.to(x.dtype), q)), {"s": s}
