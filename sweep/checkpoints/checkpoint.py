"""Checkpoints of a running attempt, published atomically, hashed after being read back, the previous one retained."""

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
from ..config import uses_muon
from . import storage
from .file_names import KEEP_NEWEST, MODEL, OPTIMIZERS, PREFIX, WEIGHTS, name_of
from .seal import CheckpointFacts, DamagedCheckpoint, read_verified_facts
from .weights import CheckpointError as CheckpointError
from .weights import check_weights


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointFacts):
    """State of a training after `step` optimizer steps.

    Data order and all random draws follow from the step, so nothing else is saved.
    """

    model: dict[str, Tensor]
    """Parameters and buffers by name, on the CPU."""
    optimizers: dict[str, Any]
    """State dicts of the optimizers, on the CPU."""

    @property
    def name(self) -> str:
        """Name in its storage location."""
        return name_of(self.step)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, on the CPU and contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, replacing an older file; failures are OSErrors.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _write_optimizers(optimizers: Mapping[str, Any], path: Path) -> None:
    """Write the optimizers' state with torch.save.

    Raises:
        OSError: The disk refuses it; torch's own RuntimeError for that is turned into one.
    """
    try:
        torch.save(optimizers, path)
    except RuntimeError as error:
        # torch's zip writer reports a full disk this way
        if "inline_container" not in str(error):
            raise
        raise OSError(str(error)) from error


def save_weights(address: str | Path, model: nn.Module) -> str:
    """Write the model's tensors as safetensors, completely or not at all, and return the file's SHA-256 in hex.

    Tensors are parameters and buffers. The file replaces an older one, and has been read back.

    Args:
        address: Address of the file, a full one (`storage.resolve`).
        model: The model, on any device.

    Raises:
        StorageError: The storage location cannot be written.
    """
    folder, name = storage.split(str(address))
    return storage.open_storage(folder).put(name, functools.partial(_write_tensors, model_state(model)))


def load_weights(address: str | Path, model: nn.Module, recorded: str | None = None) -> None:
    """Load the weights that `save_weights` wrote into the model; remote ones are downloaded first.

    Args:
        address: Address of the file, a full one (`storage.resolve`).
        model: Model that receives the weights; it must have the same tensors.
        recorded: SHA-256 that the file must have, in hex; None skips the check.

    Raises:
        CheckpointError: The file is missing, damaged or of another model.
        StorageError: The storage location cannot be reached.
    """
    folder, name = storage.split(str(address))
    with storage.open_storage(folder).file(name) as path:
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
    """Write a checkpoint into the storage location `folder` and return its name there.

    It is complete or absent, and replaces one of the same step. Once it has been read back, all checkpoints are removed
    except the `KEEP_NEWEST` (2) of the highest steps.

    Args:
        folder: Address of the storage location, a full one; created if absent.
        model: The model.
        optimizers: State dicts of the optimizers, by name.
        step: Optimizer steps so far.
        tokens: Training tokens so far.
        wall_s: Seconds of training so far, without validation.
        pending: Train loss, gradient norm and tokens per second of a point whose validation is not complete.

    Raises:
        StorageError: The storage location cannot be written.
    """
    location = storage.open_storage(folder)
    writers = {
        MODEL: functools.partial(_write_tensors, model_state(model)),
        OPTIMIZERS: functools.partial(_write_optimizers, optimizers),
    }
    location.publish(name_of(step), writers, {"step": step, "tokens": tokens, "wall_s": wall_s, "pending": pending})
    for old in list_checkpoints(folder)[KEEP_NEWEST:]:
        location.remove(old)
    return name_of(step)


def list_checkpoints(folder: str | Path) -> list[str]:
    """Return the names of the checkpoints in a storage location, newest first, damaged ones included.

    Unfinished ones are left out. Empty when the location does not exist.

    Raises:
        StorageError: The storage location cannot be reached.
    """
    return [name for name in reversed(storage.open_storage(folder).names()) if name.startswith(PREFIX)]


def load_newest(folder: str | Path, log: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """Return the newest intact checkpoint of a storage location, on the CPU; None if there is none.

    Every file is hashed before it is loaded.

    Args:
        folder: Address of the storage location.
        log: Callback that receives a line for each damaged checkpoint, which is skipped and stays.

    Raises:
        StorageError: The storage location cannot be reached.
    """
    for name in list_checkpoints(folder):
        with storage.open_storage(folder).bundle(name) as path:
            try:
                facts = read_verified_facts(path, name)
            except DamagedCheckpoint as error:
                log(f"{storage.join(folder, name)} is damaged and was skipped: {error}")
                continue
            return _load(path, facts)
    return None


def load(path: Path) -> Checkpoint:
    """Load a checkpoint from a local folder onto the CPU; the optimizer state is loaded with `weights_only`.

    Args:
        path: Folder of the checkpoint, whose name must be that of its step.

    Raises:
        DamagedCheckpoint: A file is missing or does not match the seal, the file of hashes in the folder.
    """
    return _load(path, read_verified_facts(path, path.name))


def _load(path: Path, facts: CheckpointFacts) -> Checkpoint:
    """Load the tensors of a verified local checkpoint onto the CPU.

    Args:
        path: Folder of the checkpoint.
        facts: Its facts, as `read_verified_facts` returns them.
    """
    return Checkpoint(
        **vars(facts),
        model=load_file(path / MODEL),
        optimizers=torch.load(path / OPTIMIZERS, map_location="cpu", weights_only=True),
    )


def remove_checkpoints(folder: str | Path, keep: str | None = None) -> None:
    """Remove every checkpoint of a storage location, unfinished ones included; final weights and other files stay.

    Args:
        folder: Address of the storage location.
        keep: Name of a checkpoint to retain; None removes all.

    Raises:
        StorageError: The storage location cannot be changed.
    """
    location = storage.open_storage(folder)
    for name in location.names():
        unfinished = name.startswith(f".{PREFIX}") and name.endswith(".part")
        if (name.startswith(PREFIX) or unfinished) and name != keep:
            location.remove(name)


def check_unclaimed(folder: str | Path) -> None:
    """Check that a shared storage location is writable and holds no other training, by writing a small file to it.

    Unfinished checkpoints do not count as a training.

    Raises:
        StorageOccupied: It holds checkpoints or weights.
        StorageError: It cannot be reached or written.
    """
    location = storage.open_storage(folder)
    if any(name.startswith(PREFIX) or name == WEIGHTS for name in location.names()):
        raise storage.StorageOccupied(
            f"{folder} already holds a training that is not in this database; remove it, or set checkpoint.path "
            "to another location"
        )
    location.check()


def unallocated_network(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Backbone:
    """Return a network on the meta device, where nothing is allocated; on the CPU if its mixer refuses that."""
    try:
        with torch.device("meta"):
            return Backbone(config, dtype=dtype)
    except (NotImplementedError, RuntimeError):
        # a plugin's mixer may need real numbers in its constructor
        return Backbone(config, dtype=dtype)


def state_bytes(
    config: ModelConfig, *, narrow: bool, optimizer: str = "muon", muon_for: str = "matrices"
) -> tuple[int, int]:
    """Return (bytes of a model's weights, bytes of its optimizers' state), computed from shapes.

    Weights are parameters and buffers. The state is one buffer of a parameter's size for each parameter of Muon, two
    for each of AdamW; step counters are not counted. The blocks repeat every `attn_every`, so only that many are built.
    They are on the meta device, where nothing is allocated, unless a mixer needs real numbers in its constructor.

    Args:
        config: Config of the model.
        narrow: Activations of 16 bits (bfloat16) instead of 32.
        optimizer: `train.optimizer`: "muon", for Muon where a parameter's group is that and AdamW elsewhere, or another
            name for AdamW everywhere.
        muon_for: `train.muon_for`.
    """
    n_built = min(config.n_layers, config.attn_every)
    shorter, dtype = config.model_copy(update={"n_layers": n_built}), torch.bfloat16 if narrow else torch.float32
    model = unallocated_network(shorter, dtype)

    def total_bytes(name: str, tensor: torch.Tensor) -> int:
        """Return the bytes of all tensors of that name, over all blocks that the built one stands for."""
        top, layer, *_ = name.split(".")
        return tensor.nbytes * (len(range(int(layer), config.n_layers, n_built)) if top == "blocks" else 1)

    weights = sum(total_bytes(name, tensor) for name, tensor in model.state_dict().items())
    # Muon keeps one buffer for each of its parameters, AdamW two.
    buffers = sum(
        total_bytes(name, parameter) * (1 if group == "muon" and uses_muon(parameter.shape, optimizer, muon_for) else 2)
        for group, members in model.parameter_groups().items()
        for name, parameter in members
    )
    return weights, buffers
