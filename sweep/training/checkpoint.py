"""Checkpoints of a running attempt: written aside, synced, renamed; the one before stays until the new one is verified."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import SweepError

PREFIX = "checkpoint-"


class CheckpointError(SweepError):
    """Weights that are missing or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A state after `step` optimizer steps. Data order and every draw follow from the step, so nothing else is kept."""

    step: int
    tokens: int
    wall_s: float
    """Training seconds so far, validation excluded."""
    model: dict[str, Tensor]
    optimizers: dict[str, Any]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers, on the CPU and contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def save_weights(path: Path, model: nn.Module) -> None:
    """Writes the model's tensors as safetensors, complete or not at all."""
    aside = path.with_name(path.name + ".part")
    save_file(model_state(model), aside)
    _sync(aside)
    os.replace(aside, path)


def load_weights(path: Path, model: nn.Module) -> None:
    """Reads what `save_weights` wrote. Raises CheckpointError when the file is missing, damaged or of another model."""
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: the weights cannot be read: {str(error).splitlines()[0]}; train the cell again with --retrain"
        ) from error


def save(
    folder: Path, model: nn.Module, optimizers: Mapping[str, Any], *, step: int, tokens: int, wall_s: float
) -> Path:
    """Writes `folder`/checkpoint-<step> and removes older ones, the one just before it excepted."""
    final = folder / f"{PREFIX}{step:08d}"
    aside = folder / f".{final.name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(model_state(model), aside / "model.safetensors")
    torch.save(optimizers, aside / "optimizers.pt")
    state: dict[str, Any] = {"step": step, "tokens": tokens, "wall_s": wall_s}
    state["sha256"] = {name: _sha256(aside / name) for name in ("model.safetensors", "optimizers.pt")}
    (aside / "state.json").write_text(json.dumps(state))
    for path in (*aside.iterdir(), aside):
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(aside, final)
    _sync(folder)
    if verified(final):
        for old in found(folder)[2:]:
            shutil.rmtree(old)
    return final


def found(folder: Path) -> list[Path]:
    """Checkpoint folders in `folder`, newest first, verified or not."""
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)


def verified(path: Path) -> bool:
    """Whether every file of a checkpoint is there with the hash that was written down."""
    try:
        state = json.loads((path / "state.json").read_text())
        return all(_sha256(path / name) == digest for name, digest in state["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that verifies; damaged ones are passed over."""
    return next((path for path in found(folder) if verified(path)), None)


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU; the optimizer state loads with weights_only."""
    state = json.loads((path / "state.json").read_text())
    return Checkpoint(
        step=state["step"],
        tokens=state["tokens"],
        wall_s=state["wall_s"],
        model=load_file(path / "model.safetensors"),
        optimizers=torch.load(path / "optimizers.pt", map_location="cpu", weights_only=True),
    )


def clear(folder: Path) -> None:
    """Removes every checkpoint in `folder`, unfinished ones included."""
    for path in (*found(folder), *folder.glob(f".{PREFIX}*.part")):
        shutil.rmtree(path)
