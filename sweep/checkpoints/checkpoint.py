"""Checkpoints of a running attempt: whole or not there, hashed as they were read back, the one before kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...model.backbone import Backbone
from ...model.config import ModelConfig
from . import storage
from .file_names import KEPT, MODEL, OPTIMIZERS, PREFIX, WEIGHTS, name_of
from .seal import CheckpointFacts, DamagedCheckpoint, read_verified_facts
from .weights import CheckpointError as CheckpointError
from .weights import check_weights


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointFacts):
    """A state after `step` optimizer steps. Data order and every draw follow from the step, so nothing else is kept."""

    model: dict[str, Tensor]
    optimizers: dict[str, Any]

    @property
    def name(self) -> str:
        """What it is called in its place."""
        return name_of(self.step)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, on the CPU and contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _write_optimizers(optimizers: Mapping[str, Any], path: Path) -> None:
    try:
        torch.save(optimizers, path)
    except RuntimeError as error:
        # what torch's zip writer says of a full disk
        if "inline_container" not in str(error):
            raise
        raise OSError(str(error)) from error


def save_weights(address: str | Path, model: nn.Module) -> str:
    """Write the model's tensors as safetensors, complete or not at all, and return the file's SHA-256 in hex.

    Raises StorageError.
    """
    folder, name = storage.split(str(address))
    return storage.place(folder).put(name, functools.partial(_write_tensors, model_state(model)))


def load_weights(address: str | Path, model: nn.Module, recorded: str | None = None) -> None:
    """Read what `save_weights` wrote into the model, if the file has the SHA-256 `recorded` (None: unknown).

    Raises CheckpointError when the file is missing, damaged or of another model, StorageError when its place cannot be
    reached.
    """
    folder, name = storage.split(str(address))
    with storage.place(folder).file(name) as path:
        try:
            check_weights(path, str(address), recorded)
            model.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"{address}: the weights cannot be read: {str(error).splitlines()[0]}; "
                "train the cell again with --retrain"
            ) from error


def save(
    folder: str | Path, model: nn.Module, optimizers: Mapping[str, Any], *, step: int, tokens: int, wall_s: float,
    pending: Sequence[float] | None = None,
) -> str:  # fmt: skip
    """Writes a checkpoint into the place `folder` and returns its name there.

    Once it has been read back, older ones go, but for the one just before it. Raises StorageError.
    """
    location = storage.place(folder)
    writers = {
        MODEL: functools.partial(_write_tensors, model_state(model)),
        OPTIMIZERS: functools.partial(_write_optimizers, optimizers),
    }
    location.publish(name_of(step), writers, {"step": step, "tokens": tokens, "wall_s": wall_s, "pending": pending})
    for old in list_checkpoints(folder)[KEPT:]:
        location.remove(old)
    return name_of(step)


def list_checkpoints(folder: str | Path) -> list[str]:
    """Names of the checkpoints in a place, newest first, sound or not. Raises StorageError."""
    return [name for name in reversed(storage.place(folder).names()) if name.startswith(PREFIX)]


def newest(folder: str | Path, log: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest sound checkpoint of a place; `log` gets a line for each damaged one, which is passed over.

    Raises StorageError.
    """
    for name in list_checkpoints(folder):
        with storage.place(folder).bundle(name) as path:
            try:
                facts = read_verified_facts(path, name)
            except DamagedCheckpoint as error:
                log(f"{storage.join(folder, name)} is damaged and passed over: {error}")
                continue
            return _load(path, facts)
    return None


def load(path: Path) -> Checkpoint:
    """Reads a local checkpoint onto the CPU; the optimizer state loads with weights_only. Raises Damaged."""
    return _load(path, read_verified_facts(path, path.name))


def _load(path: Path, facts: CheckpointFacts) -> Checkpoint:
    return Checkpoint(
        **vars(facts),
        model=load_file(path / MODEL),
        optimizers=torch.load(path / OPTIMIZERS, map_location="cpu", weights_only=True),
    )


def clear(folder: str | Path, but: str | None = None) -> None:
    """Removes every checkpoint of a place, unfinished ones included, except the one named `keep`. Raises StorageError."""
    location = storage.place(folder)
    for name in location.names():
        unfinished = name.startswith(f".{PREFIX}") and name.endswith(".part")
        if (name.startswith(PREFIX) or unfinished) and name != but:
            location.remove(name)


def claim(folder: str | Path) -> None:
    """Makes sure that a shared place is writable and that nobody else's state lies there. Raises StorageError."""
    location = storage.place(folder)
    if any(name.startswith(PREFIX) or name == WEIGHTS for name in location.names()):
        raise storage.StorageOccupied(
            f"{folder} already holds a training that this database does not know; remove it, or name another place "
            "with checkpoint.path"
        )
    location.check()


def sizes(config: ModelConfig, *, narrow: bool, optimizer: str = "muon") -> tuple[int, int]:
    """Bytes of a model's weights and of its optimizers' state, with activations of 16 bits or not.

    Every `attn_every`-th block is alike, so that many are built, on the meta device, where nothing is allocated.
    """
    n_built = min(config.n_layers, config.attn_every)
    shorter, dtype = config.model_copy(update={"n_layers": n_built}), torch.bfloat16 if narrow else torch.float32
    try:
        with torch.device("meta"):
            model = Backbone(shorter, dtype=dtype)
    except (NotImplementedError, RuntimeError):
        # a mixer of somebody's own may need real numbers in its constructor
        model = Backbone(shorter, dtype=dtype)

    def total_bytes(name: str, tensor: torch.Tensor) -> int:
        """Return the bytes of all tensors of that name in blocks that are alike."""
        top, layer, *_ = name.split(".")
        return tensor.nbytes * (len(range(int(layer), config.n_layers, n_built)) if top == "blocks" else 1)

    weights = sum(total_bytes(name, tensor) for name, tensor in model.state_dict().items())
    # Muon keeps one buffer for each of its parameters, AdamW two.
    buffers = sum(
        total_bytes(name, parameter) * (1 if group == optimizer == "muon" else 2)
        for group, members in model.parameter_groups().items()
        for name, parameter in members
    )
    return weights, buffers
