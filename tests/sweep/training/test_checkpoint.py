"""Checkpoints: whole or not there, the one before kept, damage passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.cell import TrainConfig
from atma_sweep.sweep.training import checkpoint
from atma_sweep.sweep.training.checkpoint import CheckpointError
from atma_sweep.sweep.training.optimizers import Optimizers
from torch import nn

Network = Callable[..., Backbone]


def put(folder: Path, step: int, value: float = 0.0) -> Path:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return checkpoint.save(folder, model, {"x": torch.tensor([value])}, step=step, tokens=10 * step, wall_s=0.5 * step)


def test_round_trip_of_a_trained_model(network: Network, tmp_path: Path) -> None:
    model = network(awake=True)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), torch.device("cpu"))
    tokens = torch.randint(0, 29, (2, 8))
    model.token_losses(model.features(tokens).hidden_BTD, tokens).mean().backward()
    optimizers.step(0.5)
    path = checkpoint.save(tmp_path / "run", model, optimizers.state_dict(), step=12, tokens=34, wall_s=5.5)
    assert path == tmp_path / "run" / "checkpoint-00000012"
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "optimizers.pt", "state.json"]
    found = checkpoint.load(path)
    assert (found.step, found.tokens, found.wall_s) == (12, 34, 5.5)
    assert found.model.keys() == model.state_dict().keys()
    assert all(torch.equal(found.model[name], value) for name, value in model.state_dict().items())
    again = Optimizers(network(awake=True).parameter_groups(), TrainConfig(), torch.device("cpu"))
    again.load_state_dict(found.optimizers)
    for old, new in ((optimizers.muon, again.muon), (optimizers.adam, again.adam)):
        for (_, a), (_, b) in zip(old.state.items(), new.state.items(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_bfloat16_tensors_keep_their_type(network: Network, tmp_path: Path) -> None:
    model = network(dtype=torch.bfloat16)
    found = checkpoint.load(checkpoint.save(tmp_path, model, {}, step=1, tokens=1, wall_s=0.0))
    assert found.model["embedding.weight"].dtype == torch.bfloat16
    assert torch.equal(found.model["embedding.weight"], model.embedding.weight)


def test_the_one_before_is_kept_and_older_ones_go(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1000):
        put(tmp_path, step)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["checkpoint-00001000", "checkpoint-00000100"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-00001000"


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    put(tmp_path, 5, 1.0)
    put(tmp_path, 5, 2.0)
    assert checkpoint.load(tmp_path / "checkpoint-00000005").optimizers["x"].item() == 2.0
    assert len(checkpoint.found(tmp_path)) == 1


def test_an_unfinished_one_is_not_seen_and_not_in_the_way(tmp_path: Path) -> None:
    put(tmp_path, 5)
    left = tmp_path / ".checkpoint-00000010.part"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-00000005"
    put(tmp_path, 10)
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-00000010"
    assert not left.exists()


def test_a_death_before_the_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 5, 1.0)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, 10, 2.0)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found).step == 5


@pytest.mark.parametrize("name", ["model.safetensors", "optimizers.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_newest_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    put(tmp_path, 5)
    file = put(tmp_path, 10) / name
    raw = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        middle = len(raw) // 2
        file.write_bytes(
            raw[:middle] if damage == "cut" else raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
        )
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoint-00000005"


def test_all_damaged_is_none(tmp_path: Path) -> None:
    (put(tmp_path, 5) / "optimizers.pt").unlink()
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "gone") is None


@pytest.mark.parametrize("text", ["[1]", "{}", '{"sha256": 3}', "", "\0"])
def test_a_strange_state_is_damage_not_a_crash(tmp_path: Path, text: str) -> None:
    (put(tmp_path, 5) / "state.json").write_text(text)
    assert checkpoint.newest(tmp_path) is None


class Trap:
    """What a pickled attack looks like: unpickling it would call something."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("unpickled",))


def test_optimizer_state_loads_tensors_and_numbers_only(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, nn.Linear(2, 2), {"x": Trap()}, step=1, tokens=1, wall_s=0.0)
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.load(path)


def test_clear_removes_unfinished_ones_too_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 5)
    (tmp_path / ".checkpoint-00000010.part").mkdir()
    (tmp_path / "weights.safetensors").touch()
    checkpoint.clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_round_trip(network: Network, tmp_path: Path) -> None:
    model, other = network(awake=True), network(seed=3)
    checkpoint.save_weights(tmp_path / "w.safetensors", model)
    checkpoint.load_weights(tmp_path / "w.safetensors", other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("damage", ["gone", "cut", "text", "other-model"])
def test_weights_that_cannot_be_used_say_what_to_do(network: Network, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "w.safetensors"
    checkpoint.save_weights(path, network(d_model=24) if damage == "other-model" else network())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "text":
        path.write_text("not safetensors")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_weights(path, network())
    text = str(caught.value)
    assert text.startswith(f"{path}: the weights cannot be read: ")
    assert text.endswith("; train the cell again with --retrain")
    assert "\n" not in text


def test_state_is_readable_json(tmp_path: Path) -> None:
    state = json.loads((put(tmp_path, 7) / "state.json").read_text())
    assert (state["step"], state["tokens"], state["wall_s"]) == (7, 70, 3.5)
    assert {name: len(digest) for name, digest in state["sha256"].items()} == {
        "model.safetensors": 64,
        "optimizers.pt": 64,
    }
