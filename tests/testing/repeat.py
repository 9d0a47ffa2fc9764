"""Trains small models in a process of its own, goes on from a checkpoint when there is one, prints every number.

python repeat.py FOLDER STOP EXACTLY DEVICE [HOW...]: STOP is the step to save at and leave (0: train to the end), EXACTLY 1 for
deterministic operations; HOW any of `graphs` (steps are captured and replayed), `compiled`, `blocks` (compiled block by block), `marked` (some targets count), and `asking` (a
layer asks the device for a value). Prints one JSON object: by model its curve, the hash of its weights, its kernels, and why steps could not
be captured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from atma_sweep.model.backbone import build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.attempt.device import enable_determinism, use_shared_compile_cache, use_shared_self_tests
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.data.batches import Batches, marked_capacity
from atma_sweep.sweep.training.loop import Stopped, Trainer, ValidationPoint
from atma_sweep.sweep.training.optimizers import Optimizers

STEPS = 12
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "polar+memory": ({"attn_type": "polar", "memory": "gated_delta"}, {}),
    "nope+window+distractor": ({"attn_type": "nope", "window": True}, {"distractor": True, "regularizer": "zipfian"}),
}
SIZE = {"d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "vocab_size": 5003}
STREAM = np.random.default_rng(0).zipf(1.3, 200_000).clip(max=5002).astype(np.uint16)
MARKS = (np.random.default_rng(1).random(200_000) < 0.3).astype(np.uint16)


@dataclass
class Watch:
    """Keeps the curve; saves and leaves at a step."""

    folder: Path
    stop: int
    trainer: Trainer | None = None
    points: list[ValidationPoint] = field(default_factory=list)

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Nobody asks."""

    def point(self, point: ValidationPoint) -> None:
        self.points.append(point)

    def training_points(self, points: Any) -> None:
        """Validations are enough."""

    def should_stop(self) -> bool:
        assert self.trainer is not None
        return self.trainer.step == self.stop > 0

    def should_save(self, step: int) -> bool:
        return False

    def save(self, step: int, tokens: int, wall_s: float, pending: Any = None) -> None:
        assert self.trainer is not None
        state = self.trainer.optimizers.state_dict()
        checkpoint.save(self.folder, self.trainer.model, state, step=step, tokens=tokens, wall_s=wall_s)


def train(
    folder: Path, stop: int, device: torch.device, how: tuple[str, ...], model_: dict[str, Any], train_: dict[str, Any]
) -> Any:
    """Train one model from its checkpoint, or its seed, to its stop, or its end."""
    # rows of 8 x 512 tokens: enough for the paths that a real micro-batch takes
    loss = {"loss_on": "marked"} if "marked" in how else {}
    config = TrainConfig(tokens=STEPS * 8192, seq_len=512, batch_tokens=8192, micro_batch=8, **train_, **loss)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(ModelConfig(**SIZE, window_size=100, **model_), seed=0, device=device, dtype=dtype)
    if "asking" in how:
        mlp = model.blocks[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) if x.sum().item() < 1e30 else x  # type: ignore[method-assign]
    if {"compiled", "blocks"} & set(how):
        model.compile_blocks(regional="blocks" in how)
    lines: list[str] = []
    inputs, targets = (x.to(device) for x in Batches([STREAM], 512, 4, 1, True).step(0))

    @torch.no_grad()
    def validate() -> float:
        return float(model.token_losses(model.features(inputs).hidden_BTD, targets).mean())

    watch = Watch(folder, stop)
    trainer = watch.trainer = Trainer(
        model=model, optimizers=Optimizers(model.parameter_groups(), config, device),
        batches=Batches([STREAM], 512, 16, 0, True, marks=[MARKS] if loss else None), config=config, seed=0, device=device,
        validate=validate, validate_every=1, hooks=watch, marked_capacity=marked_capacity(0.3, 8 * 512) if loss else None,
        graphs="graphs" in how, on_capture_refused=lines.append,
    )  # fmt: skip
    state = checkpoint.load_newest(folder)
    if state is not None:
        trainer.restore(state)
    with contextlib.suppress(Stopped):
        trainer.run()
    if lines and device.type == "cuda":
        torch.cuda.empty_cache()  # which fails where the allocator takes a refused capture for one that goes on
    weights = hashlib.sha256()
    for tensor in checkpoint.model_state(model).values():
        weights.update(tensor.view(torch.uint8).numpy().tobytes())
    curve = [(p.step, p.train_loss, p.val_loss, p.grad_norm) for p in watch.points]
    return {"curve": curve, "weights": weights.hexdigest(), "kernels": model.kernel_paths(), "told": lines}


def main(folder: str, stop: str, exactly: str, device: str, *how: str) -> None:
    if int(exactly):
        enable_determinism()
    if device == "cuda":  # as an attempt does
        use_shared_compile_cache(torch.device(device))
        use_shared_self_tests(torch.device(device))
    results = {
        name: train(Path(folder) / name, int(stop), torch.device(device), how, *settings)
        for name, settings in CELLS.items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
