"""Checkpoints: atomic writes, retention of the previous one, and detection of damage."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model import register_mixer
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.bases import Mixer, MixerConfig
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.checkpoints.seal import SEAL, DamagedCheckpoint, read_verified_facts, seal_content
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.training.optimizers import Optimizers
from patience import PATIENCE_S
from registries import EVERY_MEMORY
from torch import nn

Network = Callable[..., Backbone]


def newest_step(folder: Path) -> int:
    loaded = checkpoint.load_newest(folder)
    assert loaded is not None
    return loaded.step


def put(folder: Path, step: int, value: float = 0.0) -> Path:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    state = {"x": torch.tensor([value])}
    return folder / checkpoint.save(folder, model, state, step=step, tokens=10 * step, wall_s=0.5 * step)


def test_checkpoint_round_trip(network: Network, tmp_path: Path) -> None:
    model = network(awake=True)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), torch.device("cpu"))
    tokens = torch.randint(0, 29, (2, 8))
    model.token_losses(model.features(tokens).hidden_BTD, tokens).mean().backward()
    optimizers.step(0.5)
    name = checkpoint.save(tmp_path / "run", model, optimizers.state_dict(), step=12, tokens=34, wall_s=5.5)
    assert name == "checkpoint-00000012"
    path = tmp_path / "run" / name
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "optimizers.pt", "state.json"]
    state = json.loads((path / SEAL).read_text())
    assert (state["step"], state["tokens"], state["wall_s"]) == (12, 34, 5.5)
    assert {name: len(digest) for name, digest in state["sha256"].items()} == {
        "model.safetensors": 64, "optimizers.pt": 64,
    }  # fmt: skip
    loaded = checkpoint.load_newest(tmp_path / "run")
    assert loaded is not None
    assert (loaded.step, loaded.tokens, loaded.wall_s, loaded.name) == (12, 34, 5.5, name)
    assert loaded.model.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.model[name], value) for name, value in model.state_dict().items())
    again = Optimizers(network(awake=True).parameter_groups(), TrainConfig(), torch.device("cpu"))
    again.load_state_dict(loaded.optimizers)
    for old, new in (
        (optimizers.by_name["muon"], again.by_name["muon"]),
        (optimizers.by_name["adam"], again.by_name["adam"]),
    ):
        for (_, a), (_, b) in zip(old.state.items(), new.state.items(), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_checkpoint_keeps_bfloat16(network: Network, tmp_path: Path) -> None:
    model = network(dtype=torch.bfloat16)
    loaded = checkpoint.load(tmp_path / checkpoint.save(tmp_path, model, {}, step=1, tokens=1, wall_s=0.0))
    assert loaded.model["embedding.weight"].dtype == torch.bfloat16
    assert torch.equal(loaded.model["embedding.weight"], model.embedding.weight)


def test_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    put(tmp_path, 5)
    unfinished = tmp_path / ".checkpoint-00000010.part"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert newest_step(tmp_path) == 5
    put(tmp_path, 10)
    assert newest_step(tmp_path) == 10
    assert not unfinished.exists()


def test_crash_before_rename_keeps_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 5, 1.0)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            put(tmp_path, 10, 2.0)
    assert newest_step(tmp_path) == 5


@pytest.mark.thorough
def test_checkpoint_detects_every_changed_byte(tmp_path: Path) -> None:
    """Flip one bit in every byte of every file; in the seal, which is also parsed, flip each of its bits."""
    put(tmp_path, 5)
    folder = put(tmp_path, 10)
    flips = 0
    for file in folder.iterdir():
        raw = file.read_bytes()
        for index in range(len(raw)):
            for bits in (1 << index % 8, 0xFF)[: 2 if file.name == SEAL else 1]:
                file.write_bytes(raw[:index] + bytes([raw[index] ^ bits]) + raw[index + 1 :])
                with pytest.raises(DamagedCheckpoint):
                    read_verified_facts(folder, folder.name)
                flips += 1
        file.write_bytes(raw)
    assert flips > 1500
    assert newest_step(tmp_path) == 10


def edited(folder: Path, *, sealed: bool, **facts: object) -> None:
    """Change facts in a seal, with a matching hash of its own, or without one as an older release wrote it."""
    seal = json.loads((folder / SEAL).read_text())
    hashes = seal.pop("sha256")
    del seal["seal"]
    seal |= facts
    (folder / SEAL).write_bytes(
        seal_content(seal, hashes) if sealed else json.dumps(seal | {"sha256": hashes}).encode()
    )


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    "facts",
    [
        {"step": -3}, {"step": "x"}, {"step": 0}, {"step": 11}, {"step": 10.0}, {"step": True}, {"step": None},
        {"tokens": "many"}, {"tokens": -1}, {"wall_s": -0.5}, {"wall_s": None}, {"wall_s": float("nan")},
        {"wall_s": "1"}, {"wall_s": 10**400}, {"pending": 3}, {"pending": [1.0, 2.0]}, {"pending": [1.0, 2.0, "x"]},
        {"pending": [1.0, 2.0, float("inf")]}, {"pace": 3},
    ],
    ids=str,
)  # fmt: skip
def test_seal_rejects_implausible_facts(tmp_path: Path, facts: dict[str, object], sealed: bool) -> None:
    put(tmp_path, 5)
    edited(put(tmp_path, 10), sealed=sealed, **facts)
    log: list[str] = []
    loaded = checkpoint.load_newest(tmp_path, log.append)
    assert loaded is not None
    assert loaded.step == 5
    (line,) = log
    assert line.startswith(f"{tmp_path}/checkpoint-00000010 is damaged and was skipped: state.json ")


def test_seal_rejects_wrong_name(tmp_path: Path) -> None:
    """A checkpoint that was copied or renamed would state another step than its name."""
    put(tmp_path, 5).rename(tmp_path / "checkpoint-00000007")
    assert checkpoint.load_newest(tmp_path) is None


def test_seal_of_older_release_is_accepted(tmp_path: Path) -> None:
    folder = put(tmp_path, 10, 2.0)
    edited(folder, sealed=False)
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.tokens, loaded.wall_s, loaded.pending) == (10, 100, 5.0, None)
    seal = json.loads((folder / SEAL).read_text())
    del seal["pending"]  # the oldest
    (folder / SEAL).write_text(json.dumps(seal))
    assert newest_step(tmp_path) == 10
    (folder / "model.safetensors").write_bytes(b"?")
    assert checkpoint.load_newest(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"sha256": 3}', '{"sha256": {}}', '{"sha256": [["state.json", 3]]}', "", "\0"]
)
def test_seal_with_strange_content_is_damage(tmp_path: Path, text: str) -> None:
    (put(tmp_path, 5) / "state.json").write_text(text)
    assert checkpoint.load_newest(tmp_path) is None


class Trap:
    """Class whose unpickling would call a function, as a pickled attack does."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("unpickled",))


def test_optimizer_state_loads_weights_only(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, nn.Linear(2, 2), {"x": Trap()}, step=1, tokens=1, wall_s=0.0)
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.load_newest(tmp_path)


def test_clear_removes_all_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 5)
    (tmp_path / ".checkpoint-00000010.part").mkdir()
    (tmp_path / "weights.safetensors").touch()
    checkpoint.remove_checkpoints(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]


def test_save_hashes_each_file_before_removing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    hashed: list[tuple[str, list[str]]] = []
    digest = hashlib.file_digest

    def spy(file: Any, name: str) -> Any:
        hashed.append((Path(file.name).name, sorted(p.name for p in tmp_path.iterdir())))
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", spy)
    put(tmp_path, 3)
    assert sorted(name for name, _ in hashed) == ["model.safetensors", "optimizers.pt"]
    # while it was read back, both older ones were still there
    lying = [".checkpoint-00000003.part", "checkpoint-00000001", "checkpoint-00000002"]
    assert [names for _, names in hashed] == [lying, lying]
    assert checkpoint.list_checkpoints(tmp_path) == ["checkpoint-00000003", "checkpoint-00000002"]


FULL = """
import resource, sys, torch
from atma_sweep.sweep.checkpoints import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
model, large = torch.nn.Linear(3, int(sys.argv[2])), torch.zeros(int(sys.argv[3]))
try:
    checkpoint.save(sys.argv[1], model, {"x": large}, step=9, tokens=1, wall_s=1.0)
except checkpoint.storage.StorageError as error:
    print(error.exit_code, error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(("100000", "1"), id="model"),
        pytest.param(("2", "100000"), id="optimizers"),
    ],
)
def test_save_on_full_disk_keeps_old_checkpoint(tmp_path: Path, sizes: tuple[str, str]) -> None:
    """A limit on the file size stands in for a full disk: writing fails half-way."""
    put(tmp_path, 5)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), *sizes], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.startswith(f"3 {tmp_path} cannot be written: "), done.stdout + done.stderr
    assert done.stdout.endswith("set checkpoint.path to another location, then launch again\n")
    assert len(done.stdout.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-00000005"]
    assert newest_step(tmp_path) == 5


# --- size ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("memory", EVERY_MEMORY)
@pytest.mark.parametrize("cuda", [False, True])
def test_sizes_match_saved_checkpoint(network: Network, tmp_path: Path, cuda: bool, memory: str) -> None:
    """Compare with the bytes of real files after a real step, for the types that attempts have on that device."""
    settings = {"d_model": 128, "head_dim": 32, "vocab_size": 5003, "memory": memory}
    model = network(dtype=torch.bfloat16 if cuda else torch.float32, **settings)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), torch.device("cpu"))
    tokens = torch.randint(0, 29, (2, 8))
    model.token_losses(model.features(tokens).hidden_BTD, tokens).mean().backward()
    optimizers.step(0.5)
    path = tmp_path / checkpoint.save(tmp_path, model, optimizers.state_dict(), step=1, tokens=1, wall_s=0.0)
    weights, state = checkpoint.state_bytes(model.config, narrow=cuda)
    assert weights == pytest.approx((path / "model.safetensors").stat().st_size, rel=0.01)
    assert state == pytest.approx((path / "optimizers.pt").stat().st_size, rel=0.01)
    assert weights + state > 4e6


def test_sizes_of_370m_model_allocate_nothing() -> None:
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights, state = checkpoint.state_bytes(ModelConfig(), narrow=True)
    # 369,758,464 parameters: the embedding's 51,511,296 take 2 bytes, all others 4
    embedding, head, hidden_blocks = 51_511_296, 51_511_296, 369_758_464 - 2 * 51_511_296
    assert weights == 2 * embedding + 4 * (head + hidden_blocks)
    vectors = state - (4 * embedding + 8 * head + 4 * hidden_blocks)  # the second buffer of AdamW
    assert 0 < vectors < 0.01 * state
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 200_000  # kilobytes; the weights take 1.4e6


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_sizes_count_repeated_blocks(layers: int, optimizer: str) -> None:
    """Compare with the complete network, all of whose sizes differ."""
    config = ModelConfig(
        d_model=24, n_layers=layers, n_heads=12, n_kv_heads=6, head_dim=8, vocab_size=29, mlp_ratio=3, conv_taps=5,
        canon_taps=2, attn_every=3, attn_offset=1, attn_type="wall", memory="omega", positions="ape",
        memories={"omega": {"features": "sketch", "sketch": 3}},
    )  # fmt: skip
    for narrow in (False, True):
        model = build(config, seed=0, dtype=torch.bfloat16 if narrow else torch.float32)
        state = sum(
            parameter.nbytes * (1 if group == optimizer == "muon" else 2)
            for group, members in model.parameter_groups().items()
            for _, parameter in members
        )
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        assert checkpoint.state_bytes(config, narrow=narrow, optimizer=optimizer) == (weights, state)


@pytest.mark.usefixtures("registries")
def test_sizes_with_mixer_that_needs_real_numbers() -> None:
    class Real(Mixer):
        def __init__(self, model: ModelConfig, config: MixerConfig) -> None:
            super().__init__(model, config)
            self.slope = nn.Parameter(torch.full((7,), torch.ones(3).sum().item()))

    register_mixer("real")(Real)
    config = ModelConfig(d_model=16, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, vocab_size=29, attn_type="real")
    plain = checkpoint.state_bytes(config.model_copy(update={"attn_type": "nope"}), narrow=False)
    assert checkpoint.state_bytes(config, narrow=False) == (plain[0] + 4 * 7, plain[1] + 2 * 4 * 7)
