"""Initial weights that cells start from: found when a grid is planned, and copied to the runs folder before a launch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model import registry
from ...model.config import ModelConfig
from ...results.console.output_files import sha256
from ...results.errors import StoreError, StoreMissing
from ...results.store.store import open_store
from ..checkpoints import file_names, initial, storage
from ..checkpoints.weights import CheckpointError
from ..config import HUB_PREFIX
from ..data import corpora, tokenizer
from ..errors import SweepError
from ..external_models.conversion import HubWeights, open_hub_weights
from ..external_models.hub_checkpoint import (
    EXPORTED,
    InvalidCheckpoint,
    WeightsUnavailable,
    locate_checkpoint,
    read_config,
)
from ..grid.cell import Cell
from ..grid.initial import PROVISIONAL, InitialWeights, fill_identity_defaults, provisional_weights
from ..grid.settings import is_checkpoint
from ..grid.validate import InvalidConfig

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILE = "tokenizer.json"
"""File of a model's folder that holds its tokenizer."""


@dataclass(frozen=True)
class WeightsFinder:
    """Lookup of the weights that `train.init_from` names; calls with one source are answered from memory."""

    db: str | None
    """Database of the cells; None: the default one."""
    runs: Path
    """Runs folder, to which addresses of weights are relative."""
    dry: bool = False
    """True gives models of the hub that are not on this machine a provisional hash, instead of an error."""
    download: bool = False
    """True downloads models of the hub."""
    _cached: dict[str, InitialWeights] = field(default_factory=dict, repr=False, compare=False)
    _hub: dict[str, HubWeights] = field(default_factory=dict, repr=False, compare=False)
    """Models in the hub's format whose files have been checked, by source."""

    def __call__(self, source: str) -> InitialWeights:
        """Return the hash, network and tokenizer of a source.

        Raises:
            InvalidConfig: There is no such source, its cell is not trained, or its network cannot be expressed.
            WeightsUnavailable: A model of the hub is not on this machine and must not be downloaded.
            StorageError: The location of weights cannot be reached.
        """
        if source not in self._cached:
            try:
                self._cached[source] = self._find(source)
            except WeightsUnavailable:
                if not self.dry or Path(source.removeprefix(HUB_PREFIX)).is_dir():
                    raise
                return provisional_weights(source)
            except (InvalidCheckpoint, CheckpointError, StoreError) as error:
                raise InvalidConfig(("train.init_from",), str(error)) from error
        return self._cached[source]

    def _find(self, source: str) -> InitialWeights:
        """Return the facts of a source that was not looked up before; errors as for `__call__`, less translated."""
        if source.startswith(HUB_PREFIX):
            weights = self._hub_weights(source)
            return InitialWeights(weights.sha256(), weights.model_settings(), _tokenizer_of(weights.folder))
        if is_checkpoint(source):
            with ExitStack() as stack:
                path, config = _open_checkpoint(source, stack)
                return self._described(sha256(path), config)
        record, address, recorded = self._trained_cell(source)
        if recorded is None:
            with _weights_file(storage.resolve(self.runs, address)) as path:
                recorded = sha256(path)
        return self._described(recorded, record)

    def _hub_weights(self, source: str) -> HubWeights:
        """Return the model of a source in the hub's format; its files are checked, and hashed, at the first call."""
        if source not in self._hub:
            self._hub[source] = open_hub_weights(locate_checkpoint(source, download=self.download)[1])
        return self._hub[source]

    def _described(self, digest: str, config: Mapping[str, Any]) -> InitialWeights:
        """Return weights with the network and tokenizer of a stored config of a cell; {} for an unknown one."""
        model = config.get("model")
        if not model:
            return InitialWeights(digest)
        full = fill_identity_defaults(ModelConfig, model)
        for section, table in registry.SETTINGS.items():
            full[section] = {
                name: fill_identity_defaults(table.load(name).Config, part) if name in table else part
                for name, part in full.get(section, {}).items()
            }
        return InitialWeights(digest, full, prepared_tokenizer(self.runs, config["data"].get("fingerprint")))

    def _trained_cell(self, name: str) -> tuple[Mapping[str, Any], str, str | None]:
        """Return (config, address of the weights, recorded SHA-256) of a trained cell of the database.

        Raises:
            InvalidConfig: It is not trained, or its weights were not kept.
            StoreError: There is no such cell, or more than one, or no database.
        """
        try:
            store = open_store(self.db)
        except StoreMissing as error:
            raise _refused(
                f"{name} is a cell, and there is no database yet; launch the grid of that cell first"
            ) from error
        try:
            sweep, _, short = name.rpartition(":")
            record = store.find_cell(short, sweep or None, source=name)
            done = [a for a in store.attempts(record.id) if a.kind == "train" and a.state == "done"]
            origin = store.provenance(done[-1].id) if done else None
        finally:
            store.close()
        if not done:
            raise _refused(f"cell {record.id} ({record.slug}) is not trained yet; launch its grid first")
        if done[-1].weights is None:
            raise _refused(
                f"cell {record.id} ({record.slug}) was trained, but its weights were not kept; set checkpoint.keep: "
                "weights in its grid, and launch that with --retrain"
            )
        return record.config, done[-1].weights, None if origin is None else origin.weights_sha256

    def state(self, source: str) -> dict[str, Tensor]:
        """Return the tensors of a source by name in this program's network, on the CPU. Errors as for `__call__`."""
        from safetensors.torch import load_file

        if source.startswith(HUB_PREFIX):
            return self._hub_weights(source).state()
        with ExitStack() as stack:
            if is_checkpoint(source):
                path, _ = _open_checkpoint(source, stack)
            else:
                path = stack.enter_context(_weights_file(storage.resolve(self.runs, self._trained_cell(source)[1])))
            return load_file(path)


def _refused(problem: str) -> InvalidConfig:
    return InvalidConfig(("train.init_from",), problem)


def _weights_file(address: str) -> Any:
    """Return a context manager with the local path of a weight file at a full address.

    Raises:
        InvalidConfig: There is no such file.
        StorageError: The location cannot be reached.
    """
    folder, name = storage.split(address)
    if not storage.exists(address):
        raise _refused(f"there are no weights at {address}; name their folder with --runs, or restore them")
    return storage.open_storage(folder or "/").file(name)


def _open_checkpoint(source: str, stack: ExitStack) -> tuple[Path, Mapping[str, Any]]:
    """Return (local path of the weights, config of their cell or {}) of the file or folder of a checkpoint.

    A folder is that of an attempt, whose final weights are taken or else the newest checkpoint, or of one checkpoint.
    The config is that of job.json in the folder of the attempt.

    Args:
        source: Path or URL.
        stack: Receives the context in which a downloaded copy exists.

    Raises:
        InvalidConfig: There are no weights.
        StorageError: The location cannot be reached.
    """
    if source.endswith(".safetensors"):
        folder = storage.split(source)[0]
        path = stack.enter_context(_weights_file(source))
    else:
        folder, location = source, storage.open_storage(source)
        names = location.names()
        checkpoints = [name for name in names if name.startswith(file_names.PREFIX)]
        if file_names.WEIGHTS in names or file_names.MODEL in names:
            name = file_names.WEIGHTS if file_names.WEIGHTS in names else file_names.MODEL
            path = stack.enter_context(location.file(name))
        elif checkpoints:
            path = stack.enter_context(location.bundle(checkpoints[-1])) / file_names.MODEL
        else:
            raise _refused(
                f"{source} holds neither {file_names.WEIGHTS} nor {file_names.MODEL}, so it is no checkpoint; name the "
                f"folder of an attempt, or {HUB_PREFIX}{source} for a model of Hugging Face"
            )
    if not path.is_file():
        raise _refused(f"{path} is missing, so {source} is no complete checkpoint")
    for near in (Path(folder), Path(folder).parent):
        try:
            config = json.loads((near / file_names.JOB).read_text())["config"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return path, config
    return path, {}


def _tokenizer_of(folder: Path) -> str | None:
    """Return the full name of the tokenizer in a model's folder; None without one that this program can read.

    An exported cell has the name in its config, since its tokenizer.json says the same as another kind of tokenizer.
    """
    config = read_config(folder)
    if config["model_type"] == EXPORTED:
        return config.get("corpus_tokenizer")
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    try:
        return tokenizer.load_tokenizer("json", str(file), None).name
    except SweepError:
        return None


def prepared_tokenizer(runs: Path, fingerprint: str | None) -> str | None:
    """Return the full name of the tokenizer of a prepared text; None if the text is not in the runs folder."""
    folder = runs / "corpora" / (fingerprint or "-")[:16]
    return corpora.read_manifest(folder)["tokenizer"] if (folder / "manifest.json").is_file() else None


def check_tokenizers(cells: Iterable[Cell], finder: WeightsFinder) -> None:
    """Check that the text of every cell with initial weights has the tokenizer that their source was trained with.

    Unknown tokenizers pass, and so does every tokenizer with `init_missing: init`.

    Raises:
        SweepError: It has another, so that equal numbers stand for other tokens.
    """
    checked = set()
    for config in (cell.config for cell in cells):
        train, fingerprint = config.train, config.data.fingerprint
        if train.init_from is None or train.init_missing == "init" or (train.init_from, fingerprint) in checked:
            continue
        checked.add((train.init_from, fingerprint))
        theirs, ours = finder(train.init_from).tokenizer, prepared_tokenizer(finder.runs, fingerprint)
        if theirs is not None and ours is not None and theirs != ours:
            raise SweepError(
                f"train.init_from: {train.init_from} was trained with tokenizer {theirs}, but text {config.data.corpus!r} "
                f"was prepared with {ours}; prepare it with the source's, or set train.init_missing: init"
            )


def copy_initial_weights(cells: Iterable[Cell], finder: WeightsFinder) -> None:
    """Copy the initial weights of cells to the runs folder, where attempts on every machine find them.

    Copies that exist already stay, so that a source may be removed once a cell has been launched. The tensors are
    compared with the network of every cell.

    Args:
        cells: Cells to be trained.
        finder: Lookup of the sources.

    Raises:
        SweepError: A source was not looked up, has changed since the grid was planned, is gone, or does not fit a cell.
    """
    from ..checkpoints.checkpoint import unallocated_network

    checked = set()
    for cell in cells:
        train, model = cell.config.train, cell.config.model
        source, digest = train.init_from, train.init_sha256 or ""
        key = (digest, train.init_missing, model.model_dump_json())
        if source is None or key in checked:
            continue
        checked.add(key)
        if digest.startswith(PROVISIONAL):
            raise SweepError(f"cell {cell.slug}: the initial weights of {source} were not looked up; launch its grid")
        try:
            if not initial.has_copy(finder.runs, digest):
                fresh = WeightsFinder(finder.db, finder.runs, download=finder.download)
                if fresh(source).sha256 != digest:
                    raise SweepError("the weights have changed since the grid was planned; launch it again")
                initial.write_copy(finder.runs, digest, fresh.state(source))
            initial.renew_copy(finder.runs, digest)
            stored = initial.stored_shapes(initial.copy_path(finder.runs, digest))
            report = initial.compare(stored, initial.network_shapes(unallocated_network(model)))
            if train.init_missing == "error":
                initial.check_complete(report)
        except (InvalidConfig, InvalidCheckpoint, CheckpointError) as error:
            raise SweepError(f"cell {cell.slug}: train.init_from: {source}: {error}") from error
