"""Loss scaling against torch's GradScaler, and trainings in float16 and 8 bits beside those in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.layers import Linear
from atma_sweep.sweep.checkpoints import checkpoint
from atma_sweep.sweep.config import CellConfig, TrainConfig
from atma_sweep.sweep.data.batches import Batches
from atma_sweep.sweep.training import loss_scale, optimizer_steps
from atma_sweep.sweep.training.loop import Diverged, Stopped, Trainer
from atma_sweep.sweep.training.loss_scale import LossScale
from atma_sweep.sweep.training.optimizers import Optimizers, orthogonalise
from pydantic import ValidationError
from small_training import CPU, Watch, recipe, small_trainer, trained

Network = Callable[..., Backbone]
LETTERS = np.frombuffer((Path(__file__).parents[3] / "LICENSE").read_bytes(), dtype=np.uint8).astype(np.uint16)
"""A text that a small network learns something of in a few steps."""


# --- loss scaling -------------------------------------------------------------------------------------------------


def test_the_scale_follows_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, skipped steps and scales of sixty steps in which now and then one is infinite or no number."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 5)
    draw = torch.Generator().manual_seed(0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    ours = LossScale(CPU)
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    sgd, skipped = torch.optim.SGD(parameters, 1.0), 0
    for step in range(60):
        grads = [torch.randn(p.shape, generator=draw) * theirs.get_scale() for p in parameters]
        wrong = step % 7 == 3 or step in (11, 12, 13)
        if wrong:
            grads[step % 2].view(-1)[step % 3] = float("inf") if step % 4 else float("nan")
        assert float(ours.scaled(torch.tensor(1.5))) == float(theirs.scale(torch.tensor(1.5)))
        losses = []
        for scaler in (theirs, ours):
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad.clone()
            scaler.unscale_(sgd) if scaler is theirs else ours.unscale(parameters)  # type: ignore[union-attr]
            losses.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        assert torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())
        before = [p.detach().clone() for p in parameters]
        theirs.step(sgd)
        theirs.update()
        assert ours.update_scale() is not wrong
        skipped += wrong
        assert all(torch.equal(*pair) for pair in zip(before, parameters, strict=True)) is wrong
        assert (ours.scale, ours.skipped) == (theirs.get_scale(), skipped)


def test_scaling_alone_changes_no_bit(network: Network) -> None:
    """In float32, where nothing leaves the range, powers of two come and go."""
    plain, scaled = (trained(network(), recipe(precision=word, clip=0.1)) for word in ("bf16", "fp16"))
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


class Overflowing(Watch):
    """Makes a gradient of some steps infinite."""

    def __init__(self, steps: tuple[int, ...], *, folder: Path | None = None, stop: int = 0) -> None:
        super().__init__(folder, stop)
        self.steps = steps

    def hook(self, model: Backbone) -> None:
        def spoil(grad: torch.Tensor) -> torch.Tensor:
            assert self.trainer is not None
            return grad * float("inf") if self.trainer.step in self.steps else grad

        model.norm.weight.register_hook(spoil)


def overflowing(model: Backbone, config: TrainConfig, watch: Overflowing) -> Trainer:
    watch.hook(model)
    return small_trainer(model, config, watch)


def test_overflowing_step_is_skipped_and_halves_the_scale(network: Network) -> None:
    model, watch = network(), Overflowing((1, 3))
    trainer = overflowing(model, recipe(precision="fp16"), watch)
    weights: list[torch.Tensor] = []
    update = trainer.optimizers.update

    def spy() -> None:
        update()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    trainer.optimizers.update = spy  # type: ignore[method-assign]
    trainer.run()
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [True, False, True, False]
    assert trainer.optimizers.scaling is not None
    assert (trainer.optimizers.scaling.skipped, trainer.optimizers.scaling.scale) == (2, 2.0**14)
    assert [point.grad_norm == 0 for point in watch.points] == [False, True, False, True, False]
    assert trainer.step == 5


def test_overflow_at_the_smallest_scale_is_divergence(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "MIN_SCALE", 2.0**14)
    with pytest.raises(Diverged, match="gradient norm is not finite at step 3"):
        overflowing(network(), recipe(precision="fp16"), Overflowing((0, 1, 2, 3, 4))).run()


def test_pieces_that_are_done_again_skip_the_same_steps(network: Network) -> None:
    """Captured steps with loss scaling; on a GPU they are eager, as CUDA graphs cannot wait for the host."""
    weights = []
    for graphs in (False, True):
        model, watch = network(), Overflowing((1, 3))
        watch.hook(model)
        trainer = small_trainer(model, recipe(precision="fp16"), watch, graphs=graphs)
        trainer.run()
        assert trainer.optimizers.scaling is not None
        assert trainer.optimizers.scaling.skipped == 2
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
    wanted, why = optimizer_steps.should_capture(recipe(precision="fp16", graphs="on"), 1000, torch.device("cuda"))
    assert (wanted, why) == (False, "fp16 loss scaling synchronises with the host at every step")


@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_training_has_scale_and_count(
    network: Network, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    config, steps = recipe(precision="fp16"), (1, 3)
    model = network()
    uninterrupted = overflowing(model, config, Overflowing(steps))
    uninterrupted.run()
    with pytest.raises(Stopped):
        overflowing(network(), config, Overflowing(steps, folder=tmp_path, stop=stop)).run()
    second = network(seed=9)
    later = overflowing(second, config, Overflowing(steps))
    state = checkpoint.load_newest(tmp_path)
    assert state is not None
    later.restore(state)
    later.run()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    assert uninterrupted.optimizers.scaling is not None
    assert later.optimizers.scaling is not None
    assert uninterrupted.optimizers.scaling.state_dict() == later.optimizers.scaling.state_dict()
    assert uninterrupted.optimizers.scaling.skipped == 2


def test_float16_iterates_on_updates_that_it_cannot_hold() -> None:
    small = 1e-9 * torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    half_result, wanted = (orthogonalise(small, dtype=kind) for kind in (torch.float16, torch.float32))
    assert half_result.dtype == torch.float16
    assert float((half_result.float() - wanted).norm() / wanted.norm()) < 5e-3
    assert float(small.to(torch.float16).abs().max()) == 0


# --- whole trainings ----------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"d_model": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "vocab_size": 256}


def text_losses(config: TrainConfig, dtype: torch.dtype = torch.float32, *, fp8: bool = False) -> list[float]:
    model = build(ModelConfig(**SIZES, attn_type="polar", memory="gated_delta"), seed=0, dtype=dtype)
    if fp8:
        assert model.use_fp8().backend == "torch"
    watch = Watch()
    watch.trainer = Trainer(
        model=model, optimizers=Optimizers(model.parameter_groups(), config, CPU),
        batches=Batches([LETTERS], config.seq_len, config.batch_tokens // config.seq_len, 0, True), config=config,
        seed=0, device=CPU, validate=lambda: 1.0, validate_every=1, hooks=watch,
    )  # fmt: skip
    watch.trainer.run()
    return [point.train_loss for point in watch.points]


def on_text(steps: int, **changes: Any) -> TrainConfig:
    return TrainConfig(tokens=steps * 256, seq_len=32, batch_tokens=256, micro_batch=8, **changes)


@pytest.mark.thorough
def test_eight_bits_train_as_well_as_float32() -> None:
    """Within 0.01 nats of it while the loss falls by more than one and a half, the products being no longer the same.

    Both start from the same weights: the loss falls by 2.09, and eight bits move it by 0.0003 at most, rounding by less.
    """
    plain, eight = (text_losses(on_text(25), fp8=fp8) for fp8 in (False, True))
    assert plain[0] - plain[-1] > 1.5
    assert 1e-5 < max(abs(a - b) for a, b in zip(plain, eight, strict=True)) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "precision", "fp8"), [
    (torch.bfloat16, "bf16", True), (torch.bfloat16, "bf16", False), (torch.float16, "fp16", False),
])  # fmt: skip
def test_sixteen_bits_train_as_well_as_float32(dtype: torch.dtype, precision: str, fp8: bool) -> None:
    plain = text_losses(on_text(60))
    narrow = text_losses(on_text(60, precision=precision), dtype, fp8=fp8)
    assert abs(np.mean(plain[-10:]) - np.mean(narrow[-10:])) < 0.02


def test_fp8_is_for_the_projections_of_blocks() -> None:
    model = build(ModelConfig(**SIZES, attn_type="polar", memory="gated_delta"), seed=0)
    assert model.precision == "float32"
    assert "projections" not in model.kernel_paths()
    model.use_fp8()
    assert model.precision == "float32, fp8 projections"
    assert model.kernel_paths()["projections"] == "fp8 by torch (8-bit products need CUDA, the device is cpu)"
    eight = {name for name, part in model.named_modules() if isinstance(part, Linear) and part.fp8 is not None}
    wide = {name for name, part in model.named_modules() if isinstance(part, Linear) and part.fp8 is None}
    globals_ = {n for n in range(3) if model.config.is_global(n)}
    assert eight == {f"blocks.{n}.mlp.{part}" for n in range(3) for part in ("fc", "proj")} | {
        f"blocks.{n}.mix.{part}"
        for n in range(3)
        for part in (("w_q", "w_k", "w_v", "proj") if n in globals_ else ("in_proj", "out_proj"))
    }
    assert "head" in wide
    assert any(".memory." in name for name in wide)
    assert any(name.endswith("mu_proj") for name in wide)


def test_evaluation_in_pieces_rounds_alike() -> None:
    """Scales are those of a token's row, so a piece gives what the whole text gives."""
    model = build(ModelConfig(**SIZES, attn_type="nope"), seed=0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    model.use_fp8()
    tokens = torch.randint(256, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        at_once = model.features(tokens).hidden_BTD
        pieces = model.features(tokens, chunk=5).hidden_BTD
    assert float((at_once - pieces).norm() / at_once.norm()) < 0.02


def test_float16_keeps_the_embedding_wide() -> None:
    model = Backbone(ModelConfig(**SIZES), dtype=torch.float16)
    assert model.dtype == torch.float16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- the setting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "cuda", "cpu"), [
    ("bf16", "bfloat16", "float32"), ("fp16", "float16", "float32"), ("fp8", "bfloat16", "float32"),
])  # fmt: skip
def test_types_of_each_precision(precision: Any, cuda: str, cpu: str) -> None:
    train = CellConfig(train=TrainConfig(precision=precision)).train
    assert (train.activations_on(cuda=True), train.activations_on(cuda=False)) == (cuda, cpu)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_precision_decides_alone(precision: Any) -> None:
    with pytest.raises(ValidationError, match=rf"precision \({precision}\) .* set activations to auto"):
        TrainConfig(precision=precision, activations="float32")
