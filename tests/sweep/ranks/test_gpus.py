"""Cells on several GPUs through NCCL: the loss curve of one GPU, also when the number changes between attempts.

The networks are small and their rates calm, as in `test_training`, so that a curve differs by roundings alone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench import Bench
from factories import ended

N_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.xdist_group("launch"),  # a GPU is held by one sweep at a time
    pytest.mark.skipif(N_GPUS == 1, reason="needs an NVIDIA GPU and a second one"),
]
STEPS = 200
GRID = """
name: micro
extends: tiny
axes: {{attn_type: [polar], memory: [on]}}
set:
  model: {{d_model: 256, n_layers: 6, n_heads: 4, n_kv_heads: 2, head_dim: 64}}
  data: {{corpus: files, path: {text}, heldout_tokens: 400}}
  train: {{tokens: {tokens}, seq_len: 128, batch_tokens: 2048, micro_batch: 4, activations: {activations}, compile: off,
    muon_lr: 0.002, scalar_lr: 0.001, embedding_lr: 0.02}}
  eval: {{lengths: [128], documents: 2, junk_rows: 2, needle_trials: 2, validate_every: 20, validation_tokens: 2048}}
  checkpoint: {{every_steps: 20}}
resources: {{gpus: {n_gpus}}}
"""
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
"""In nats. Sums of gradients differ in their order, 2^-24 relative; weights rounded to bf16 (2^-9) turn some of these
differences into whole units of the last place, each worth about 1e-4 nats here."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def write_grid(bench: Bench, n_gpus: int, activations: str) -> None:
    (bench.folder / "micro.yaml").write_text(
        GRID.format(text=bench.text, tokens=2048 * STEPS, activations=activations, n_gpus=n_gpus)
    )


def losses(bench: Bench) -> list[float]:
    """Launch the grid and return the training losses by step."""
    ended(bench.start("launch", "micro.yaml", "--executor", "local"))
    (curve,) = bench.curves().values()
    return [float(str(train_loss)) for _, _, train_loss, *_ in curve]


def losses_on(bench: Bench, n_gpus: int, activations: str) -> list[float]:
    """Return the training losses of a launch in a folder of its own."""
    own = Bench(bench.folder / f"{n_gpus}", copied=bench.folder)
    own.folder.mkdir()
    write_grid(own, n_gpus, activations)
    return losses(own)


@pytest.mark.parametrize("activations", list(TOLERANCE))
def test_curve_does_not_depend_on_the_number_of_gpus(bench: Bench, activations: str) -> None:
    curves = [losses_on(bench, n_gpus, activations) for n_gpus in (1, 2, 4)[: N_GPUS.bit_length()]]
    assert len(curves[0]) > STEPS // 20, "validations, and training losses between them"
    assert curves[0][-1] < curves[0][0] - 0.5, "it learns"
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=TOLERANCE[activations])


def test_interrupted_cell_continues_on_half_of_its_gpus(bench: Bench) -> None:
    reference = losses_on(bench, 1, "float32")
    n_gpus = 4 if N_GPUS >= 4 else 2
    write_grid(bench, n_gpus, "float32")
    launch = bench.start("launch", "micro.yaml", "--executor", "local")
    bench.wait("SELECT 1 FROM attempt WHERE number = 1 AND step > 20", launch)
    launch.send_signal(signal.SIGTERM)
    launch.communicate()
    assert launch.returncode == 143
    bench.gone()
    write_grid(bench, n_gpus // 2, "float32")
    assert losses(bench) == pytest.approx(reference, abs=TOLERANCE["float32"])
    assert bench.sql("SELECT state FROM attempt ORDER BY number") == [("interrupted",), ("done",)]
