"""Initial weights of a cell: copies in the runs folder, and their transfer into a new network."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.weights import describe_initial
from . import storage
from .weights import CheckpointError, check_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

FOLDER = "initial"
"""Folder of the copies below the runs folder."""
METADATA_SOURCE = "source_sha256"
"""Key in a copy's metadata: the hash of its source, which is its name, too."""
_MAX_NAMES = 4
"""Names of tensors that a message lists."""


@dataclass(frozen=True)
class InitialReport:
    """Comparison of the tensors of a network with those of its initial weights; names of blocks have `*` as number."""

    source: str
    """Source as the grid names it."""
    sha256: str
    new: tuple[str, ...] = ()
    """Tensors that the source lacks, which have random values."""
    unused: tuple[str, ...] = ()
    """Tensors of the source that the network lacks."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict: source, sha256, new, unused."""
        return asdict(self)

    def text(self) -> str:
        """Return the report as one line."""
        return describe_initial(self.as_json())


def copy_path(runs: Path, sha256: str) -> Path:
    """Return the path of the copy of initial weights in the runs folder."""
    return runs / FOLDER / f"{sha256}.safetensors"


def compare(source: Mapping[str, tuple[int, ...]], target: Mapping[str, tuple[int, ...]]) -> InitialReport:
    """Return the report on tensors given by name and shape; its source and hash are empty.

    Raises:
        CheckpointError: A tensor has another shape in the source; the first one is named with both shapes.
    """
    for name, shape in target.items():
        if name in source and source[name] != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(source[name])} in the source and {list(shape)} in the network; "
                "set the model section to the source's sizes"
            )
    new, unused = (name for name in target if name not in source), (name for name in source if name not in target)
    return InitialReport("", "", _by_block(new), _by_block(unused))


def check_complete(report: InitialReport) -> None:
    """Raise CheckpointError if a report has new or unused tensors; the message names the first of them."""
    for names, text in (
        (report.new, "the source lacks tensor"),
        (report.unused, "the network has no counterpart of the source's tensor"),
    ):
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise CheckpointError(
                f"{text} {', '.join(names[:_MAX_NAMES])}{more}; with train.init_missing: init, new tensors get random "
                "values and others are left out"
            )


def _by_block(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with `*` for the number of a block, each once, in order."""
    return tuple(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in names))


def network_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters and buffers of a network, which may be on the meta device."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a safetensors file, from its header alone.

    Raises:
        CheckpointError: The file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def write_copy(runs: Path, sha256: str, state: Mapping[str, Tensor]) -> None:
    """Write tensors as the copy of initial weights with this hash, completely or not at all.

    Raises:
        StorageError: The operating system refused a write.
    """
    from safetensors.torch import save_file

    path = copy_path(runs, sha256)
    folder = storage.open_storage(path.parent)
    written = folder.put(path.name, lambda file: save_file(dict(state), file, metadata={METADATA_SOURCE: sha256}))

    def write_hash(file: Path) -> None:
        file.write_text(written)

    folder.put(_hash_path(path).name, write_hash)


def has_copy(runs: Path, sha256: str) -> bool:
    """Return True if the runs folder holds a complete copy of the initial weights with this hash."""
    path = copy_path(runs, sha256)
    return path.is_file() and _hash_path(path).is_file()


def renew_copy(runs: Path, sha256: str) -> None:
    """Make the files of a copy young, since gc spares young files, which a sweep may be about to use."""
    path = copy_path(runs, sha256)
    with contextlib.suppress(OSError):
        os.utime(path)
        os.utime(_hash_path(path))


def _hash_path(path: Path) -> Path:
    """Return the path of the file that holds the hash of a copy."""
    return path.with_suffix(".sha256")


def load_initial(runs: Path, model: nn.Module, *, source: str, sha256: str, allow_missing: bool) -> InitialReport:
    """Copy initial weights from the runs folder into a network in place, and return what was new.

    Tensors that the weights lack keep their values. Stored types are converted to the network's.

    Args:
        runs: The runs folder.
        model: Network, on any device.
        source: Source as the grid names it, for messages and the report.
        sha256: Hash of the weights.
        allow_missing: Let the tensors of network and source differ; False raises for each difference.

    Raises:
        CheckpointError: The copy is missing or damaged, or its tensors do not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    path = copy_path(runs, sha256)
    if not has_copy(runs, sha256):
        raise CheckpointError(f"the initial weights of {source} are not in {path}; launch the grid again")
    try:
        check_weights(path, str(path), _hash_path(path).read_text())
        with safe_open(path, framework="pt") as file, torch.no_grad():
            if (file.metadata() or {}).get(METADATA_SOURCE) != sha256:
                raise CheckpointError(f"{path} holds other weights than those of {source}; remove it and launch again")
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            report = compare(stored, network_shapes(model))
            if not allow_missing:
                check_complete(report)
            for name, tensor in model.state_dict().items():
                if name in stored:
                    tensor.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error).splitlines()[0]}; remove it and launch again"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"train.init_from: {source}: {error}") from error
    return InitialReport(source, sha256, report.new, report.unused)
