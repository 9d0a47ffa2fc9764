"""Layers of flash-linear-attention: their list, on the CPU by Triton's interpreter, and on a GPU against fla itself."""

from __future__ import annotations

import importlib
import inspect
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.kernels.fla_configs import first_configs
from atma_sweep.model.backbone import build
from atma_sweep.model.bases import BlockPart
from atma_sweep.model.block_parts import fla_catalogue
from atma_sweep.model.config import ModelConfig, ModelConfigError
from atma_sweep.model.kv_cache import ChunkedStates
from atma_sweep.model.registry import MIXERS
from atma_sweep.model.resolve import check_model_config
from patience import PATIENCE_S

NAMES = fla_catalogue.fla_names()
PARTS = [name for name in NAMES if fla_catalogue.fla_layer(name).refusal is None]
needs_fla = pytest.mark.skipif(not NAMES, reason="needs flash-linear-attention")
INTERPRETED = Path(__file__).resolve().parents[1] / "testing" / "interpreted.py"
RECURRENT = ["GatedDeltaNet", "Mamba2", "RWKV7Attention"]
"""Layers whose kernels the interpreter runs in under a second; three kinds of state."""

CACHED = [
    "CyclicFlowAttention", "MoBA", "MomAttention", "MomentumDeltaNet", "MultiheadLatentAttention", "NativeSparseAttention",
    "PaTHAttention", "Parallax", "Raven", "RodimusAttention", "SlidingWindowSharedKeyAttention",
]  # fmt: skip
"""Layers whose cache can be filled on a CPU."""


@needs_fla
def test_fla_layers_are_mixers_without_being_listed() -> None:
    assert "fla:GatedDeltaNet" in MIXERS
    assert "fla:NoLayer" not in MIXERS
    assert not any(":" in name for name in MIXERS)
    assert {f"fla:{name}" for name in NAMES} == set(MIXERS.choices("fla:GatedDelta"))
    assert MIXERS.choices("poler") == list(MIXERS)
    with pytest.raises(ValueError, match="reserved"):
        MIXERS.register("fla:GatedDeltaNet")


@needs_fla
@pytest.mark.thorough
def test_catalogue_is_what_importing_fla_shows() -> None:
    """Names, and arguments with their defaults, by Python's own inspection."""
    layers = importlib.import_module("fla.layers")
    assert sorted(NAMES) == sorted(layers.__all__)
    for name in NAMES:
        signature = inspect.signature(getattr(layers, name).__init__).parameters
        ours = fla_catalogue.fla_layer(name).arguments
        assert {key: argument.default for key, argument in ours.items()} == {
            key: None if signature[key].default is inspect.Parameter.empty else signature[key].default for key in ours
        }
        scalars = {key for key, value in signature.items() if isinstance(value.default, bool | float | str)}
        assert scalars <= set(ours)


@needs_fla
@pytest.mark.thorough
def test_fla_settings_carry_its_version_and_defaults() -> None:
    config = check_model_config(
        ModelConfig(attn_type="fla:GatedDeltaNet", mixers={"fla:GatedDeltaNet": {"num_heads": 4}})
    )
    settings = config.mixers["fla:GatedDeltaNet"]
    assert settings["version"] == fla_catalogue.fla_version()
    assert (settings["num_heads"], settings["head_dim"], settings["expand_v"]) == (4, 256, 2.0)
    for wrong, message in (
        ({"version": "0.1"}, "needs fla-core 0.1"), ({"heads": 4}, "no such setting"), ({"num_heads": 0}, "fla refuses"),
    ):  # fmt: skip
        with pytest.raises(ModelConfigError, match=message):
            check_model_config(ModelConfig(attn_type="fla:GatedDeltaNet", mixers={"fla:GatedDeltaNet": wrong}))
    with pytest.raises(ModelConfigError, match="needs shared_k and shared_v of other layers"):
        check_model_config(ModelConfig(attn_type="fla:YOCOCrossAttention"))
    part = MIXERS.load("fla:GatedDeltaNet")
    assert "runs on a GPU only" in part(config, part.Config()).refusal(torch.device("cpu"))


@needs_fla
@pytest.mark.thorough
def test_fla_layers_decode_as_their_forward_in_interpreter() -> None:
    """A network of each, and the bytes of what fla's cache then holds, against the closed forms."""
    done = subprocess.run(
        [sys.executable, str(INTERPRETED), *RECURRENT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, result in json.loads(done.stdout.splitlines()[-1]).items():
        assert result["difference"] <= 1e-5 * max(1, result["logits"]), name
        assert result["bytes"] == result["wanted_bytes"], name


@needs_fla
@pytest.mark.thorough
def test_cache_of_fla_layers_has_the_stated_bytes() -> None:
    """A tiny layer's cache after a prefill, by Triton's interpreter or with attention replaced."""
    command = [sys.executable, str(INTERPRETED), "--cache", *CACHED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, result in json.loads(done.stdout.splitlines()[-1]).items():
        assert result["bytes"] == result["wanted_bytes"], name


def network(name: str, **changes: Any) -> ModelConfig:
    small = {"d_model": 1024, "n_layers": 2, "attn_every": 2, "attn_offset": 1, "vocab_size": 264, "mlp_ratio": 1}
    return ModelConfig(**small | {"attn_type": f"fla:{name}", "init": "llama"} | changes)


@pytest.fixture
def untuned() -> Iterator[None]:
    """Kernels take the first configuration that runs, since their speed is of no interest; fla lists up to 133."""
    with first_configs():
        yield


def fla_alone(name: str) -> torch.nn.Module:
    """The layer by fla's own constructor, with its defaults."""
    own = getattr(importlib.import_module("fla.layers"), name)
    accepted = {"hidden_size": 1024, "layer_idx": 0, "num_hidden_layers": 2}
    accepted = {key: value for key, value in accepted.items() if key in inspect.signature(own.__init__).parameters}
    layer: torch.nn.Module = own(**accepted | ({"num_heads": 32} if name == "LogLinearMamba2" else {}))
    return layer.cuda()


def output_and_gradient(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block part is called in x's type, a layer of fla by its own signature under autocast. The results are float32."""
    torch.manual_seed(0)  # some routers draw noise
    read, is_part = x.clone().requires_grad_(), isinstance(layer, BlockPart)
    with torch.autocast("cuda", torch.bfloat16, enabled=not is_part):
        out = layer(read) if is_part else layer(read, attention_mask=None)
    y = out[0] if isinstance(out, tuple) else out
    (gradient,) = torch.autograd.grad(y.float().square().sum(), read)
    return y.detach().float(), gradient.float()


def part_or_skip(name: str, x: torch.Tensor) -> BlockPart:
    """The block part of a network in bfloat16 on the GPU, without parameters of zeros; skips where fla's own layer fails."""
    reason: str | None
    try:
        model = build(network(name), seed=0, device="cuda", dtype=torch.bfloat16)
        reason = model.blocks[1].refusal(torch.device("cuda", 0))
    except ModelConfigError as error:
        reason = error.message
    if reason is not None:
        try:
            runs = all(bool(result.isfinite().all()) for result in output_and_gradient(fla_alone(name), x))
        except Exception:  # noqa: BLE001 - of any package that fla lacks
            runs = False
        assert not runs, f"fla alone runs what the part refuses: {reason}"
        pytest.skip(f"needs what fla wants: {reason}")
    part: BlockPart = model.blocks[1].mix.part
    for parameter in part.parameters():  # some last projections start at zero
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return part


def of_layers(names: list[str]) -> Any:
    """Parameters whose tests share a process of xdist, and with it the trial of the layer."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names])


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@of_layers(PARTS)
def test_fla_part_gives_what_fla_gives_on_a_gpu(name: str) -> None:
    """The layer with the same weights, called by fla's own signature: output and gradient of the input."""
    x = torch.randn(2, 128, 1024, device="cuda", dtype=torch.bfloat16)
    part = part_or_skip(name, x)
    reference = fla_alone(name)
    reference.load_state_dict(part.inner.state_dict())
    for ours, theirs in zip(output_and_gradient(part, x), output_and_gradient(reference, x), strict=True):
        assert theirs.norm() > 0
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@of_layers([name for name in PARTS if fla_catalogue.fla_layer(name).decodes])
@torch.no_grad()
def test_fla_part_decodes_as_its_forward_on_a_gpu(name: str) -> None:
    """In bfloat16: 130 tokens read at once, then eight one by one, against the part's forward pass of all."""
    x = torch.randn(1, 138, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.enable_grad():
        part = part_or_skip(name, x).eval()
    wanted, states, slots = part(x)[0].float(), ChunkedStates(), torch.zeros(1, dtype=torch.int64, device="cuda")
    assert wanted.norm() > 0
    read = part.begin(x[:, :130], states, slots, chunk=64)[0]
    written = torch.cat([part.decode(x[:, token], states, slots) for token in range(130, 138)])
    for got, expected in ((read, wanted[:130]), (written, wanted[130:])):
        assert (got.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.xdist_group("launch")
def test_fla_cells_are_launched_and_decoded_on_a_gpu(tmp_path: Path) -> None:
    """A cell beside NoPE, by the command line, with the blocks of convolutions compiled; then generated text."""
    grid = (
        "name: flas\nextends: tiny\naxes: {attn_type: ['fla:GatedDeltaNet', nope]}\nresources: {gpus: 1, cpus: 2}\n"
        "set: {model.d_model: 128, train.tokens: 40960, eval.lengths: [128], eval.probes: [val, decode]}\n"
        "levels: {attn_type: {'fla:GatedDeltaNet': {model.mixers.fla:GatedDeltaNet.num_heads: 2}}}\n"
    )
    (tmp_path / "flas.yaml").write_text(grid)
    for command in (["launch", "flas.yaml", "--executor", "local"], ["status", "--json"]):
        full = [sys.executable, "-m", "atma_sweep.cli", *command]
        done = subprocess.run(full, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    database = sqlite3.connect(tmp_path / "atma.db")
    losses = [value for (value,) in database.execute("SELECT value FROM results WHERE metric = 'val_loss'")]
    assert len(losses) == 2
    assert all(1 < loss < 5.55 for loss in losses)  # a guess among 256 bytes has ln 256 = 5.545
    kernels = " ".join(text for (text,) in database.execute("SELECT kernels FROM provenance"))
    assert f"fla {fla_catalogue.fla_version()}" in kernels
    assert "1 of 4 blocks eager" in kernels
