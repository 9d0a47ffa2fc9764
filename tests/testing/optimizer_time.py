"""Time the optimizer step of a network on several GPUs, without forward and backward passes.

`python -m tests.testing.optimizer_time --ranks 1 2 4` from the root of the repository; `--width` and `--layers` change the network
(default: intended-370m with memory). Without CUDA it runs over gloo, to try the script. Two medians over 20 steps per number of ranks, in ms:
`reduce` (gradients of all parameters into their owners, which training overlaps with the backward pass) and `step` (clipping, update, weights
to all ranks).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.ranks.group import Ranks
from atma_sweep.sweep.training.sharded import ShardedOptimizers, build_optimizers

sys.path.append(str(Path(__file__).parent))
from ranked import run_ranks

STEPS, WARM_UP = 20, 3


def times(ranks: Ranks, width: int, layers: int) -> tuple[float, float]:
    """Return (median seconds of the reduction, median seconds of the rest of the step) on this rank."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.rank) if cuda else torch.device("cpu")
    heads = width // 128 or 1
    config = ModelConfig(
        d_model=width, n_layers=layers, n_heads=heads, n_kv_heads=max(1, heads // 4), head_dim=width // heads,
        vocab_size=50304, memory="gated_delta",
    )  # fmt: skip
    model = Backbone(config, dtype=torch.bfloat16 if cuda else torch.float32).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizers = build_optimizers(model, TrainConfig(), device, ranks)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        ranks.barrier()
        return time.perf_counter()

    reductions, steps = [], []
    for _ in range(WARM_UP + STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.set_factor(0.5)
        began = now()
        if isinstance(optimizers, ShardedOptimizers):
            optimizers.expect_gradients()
            optimizers.reduce_gradients()
        reduced = now()
        optimizers.clip(1.0)
        optimizers.update()
        ended = now()
        optimizers.zero_grad()
        reductions.append(reduced - began)
        steps.append(ended - reduced)
    return statistics.median(reductions[WARM_UP:]), statistics.median(steps[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    print(f"{name}, width {options.width}, {options.layers} layers")
    for size in options.ranks:
        by_rank = run_ranks(size, times, options.width, options.layers, cuda=torch.cuda.is_available())
        reduction, step = (max(values) for values in zip(*by_rank, strict=True))
        print(f"{size} ranks: reduce {1e3 * reduction:.2f} ms, step {1e3 * step:.2f} ms")


if __name__ == "__main__":
    main()
