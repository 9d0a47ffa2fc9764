"""Trained cells from the database: their configs restored, their weights located, their models loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ...model import registry
from ...model.config import ModelConfig, ModelConfigError
from ...model.resolve import check_model_config
from ...results.arguments import COUNT, FLAG, NUMBER, PATH, TEXT, check_argument
from ...results.store.records import CellRecord
from ...results.store.store import Store, open_store
from ..checkpoints import storage
from ..config import CellConfig, DataConfig, Plugin, TrainConfig
from ..data.corpora import open_verified
from ..errors import MachineError, SweepError
from ..grid.cell import Cell, cell_id
from ..grid.initial import fill_identity_defaults
from ..grid.plugins import PLUGGABLE, Pluggable, is_installed, load_plugin, source_of

if TYPE_CHECKING:
    import torch

    from ...model.backbone import Backbone
    from ..data.tokenizer import Tokenizer


class NotTrained(SweepError):
    """The cell has no finished training."""


class WeightsGone(SweepError):
    """The cell was trained, but its weights were not stored or have been deleted."""


class CellUnreadable(SweepError):
    """The stored config cannot be restored to the cell that was trained."""


@dataclass(frozen=True)
class TrainedCell:
    """Trained cell whose weights exist."""

    cell: Cell
    attempt: int
    """Id of the training that the weights come from."""
    weights: str
    """Address of the weights, as in the database (see checkpoints/storage.py)."""
    sha256: str | None
    """Recorded SHA-256 of the weights, hex; None if an earlier version stored them."""


@dataclass(frozen=True)
class LoadedModel:
    """Trained model with its tokenizer and config."""

    model: Backbone
    """Network in evaluation mode, on the requested device: `model(tokens)` maps int64 [B, T] to float32 [B, T, V]."""
    tokenizer: Tokenizer
    config: CellConfig
    cell: str
    """Id of the cell."""
    slug: str
    weights_sha256: str | None = None
    """SHA-256 of the weights, checked against the file; None if an earlier version stored them without one."""

    def generate(
        self, prompt: str = "", *, tokens: int = 256, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
        full_context: bool = False, top_k: int = 0, fp8: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """Return an iterator over the continuation of `prompt`: at most `tokens` tokens, up to the end of the text.

            print("".join(trained.generate("def main(", tokens=64)))

        It yields pieces of text, without the prompt. Wrong arguments raise at the call, not later. The prompt follows
        an end-of-text token, like a document in training. The same arguments give the same text on the same machine.

        Args:
            prompt: text to continue; empty: a new document.
            tokens: most tokens to generate.
            temperature: 0 takes the most probable token.
            top_p: sample from the fewest tokens that together have this probability.
            seed: seed of the sampling.
            full_context: let a network that was trained with a window read without it, as probes do.
            top_k: sample from this many of the most probable tokens; 0: from all.
            fp8: cache keys and values in 8 bits; approximate.

        Raises:
            SamplingError: numbers out of range, a prompt that cannot be tokenized, a text longer than the network has
                positions for, or a network without an 8-bit cache.
            TypeError: an argument has another type.
        """
        for name, value, kind in (
            ("prompt", prompt, TEXT), ("tokens", tokens, COUNT), ("temperature", temperature, NUMBER),
            ("top_p", top_p, NUMBER), ("seed", seed, COUNT), ("full_context", full_context, FLAG),
            ("top_k", top_k, COUNT), ("fp8", fp8, FLAG),
        ):  # fmt: skip
            check_argument("generate", name, value, kind)
        from .generation import generate_text

        return generate_text(
            self.model, self.tokenizer, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed,
            full_context=full_context, top_k=top_k, fp8=fp8,
        )  # fmt: skip


def find_trained_cell(store: Store, cell_name: str, runs: Path, sweep: str | None = None) -> TrainedCell:
    """Return the trained cell of that name, with the weights of its newest finished training.

    Loads the cell's plugins, which runs their code. The weights are not read, only their existence is checked.

    Args:
        store: database.
        cell_name: id, slug or prefix of the cell, as `Store.find_cell` takes it.
        runs: folder that addresses are relative to.
        sweep: sweep to look in; None: the newest, else any.

    Raises:
        CellUnknown, CellAmbiguous, SweepUnknown: there is no such cell, or more than one.
        NotTrained: it has no finished training, or diverged.
        WeightsGone: its weights were not stored or have been deleted.
        CellUnreadable, PluginChanged: its config cannot be restored.
        StorageError: the location of the weights cannot be reached.
    """
    record = store.find_cell(cell_name, sweep)
    trainings = [attempt for attempt in store.attempts(record.id) if attempt.kind == "train"]
    done = [attempt for attempt in trainings if attempt.state == "done"]
    if not done and any(attempt.state == "diverged" for attempt in trainings):
        raise NotTrained(f"cell {record.id} ({record.slug}) diverged, so it has no weights; launch it with --retrain")
    if not done:
        raise NotTrained(f"cell {record.id} ({record.slug}) is not trained yet; launch its grid")
    weights = done[-1].weights
    if weights is None:
        raise WeightsGone(
            f"cell {record.id} ({record.slug}) was trained, but its weights were not kept; "
            "import them from a bundle of export --with-weights, or add the measurements to its grid, set checkpoint.keep: "
            "weights, and launch it with --retrain"
        )
    cell = restore_cell(record, runs)  # first, because it checks that the config gives the cell's id
    address = storage.resolve(runs, weights)
    if not storage.exists(address):
        raise WeightsGone(
            f"the weights of cell {record.id} ({record.slug}) are gone from {address}; "
            "name their folder with --runs, or add the measurements to its grid and launch it with --retrain"
        )
    origin = store.provenance(done[-1].id)
    return TrainedCell(cell, done[-1].id, weights, origin.weights_sha256 if origin is not None else None)


def restore_cell(record: CellRecord, runs: Path) -> Cell:
    """Return the cell that a database row describes, with its plugins loaded from the copies under `runs`.

    Loading a plugin runs its code. The config is checked before, as far as it can be without plugins. Settings that are
    newer than the cell stand at their identity defaults.

    Args:
        record: the cell's row.
        runs: folder of the runs; copies lie in its subfolder "plugins".

    Raises:
        CellUnreadable: this version computes another cell from the stored config, or cannot read it, or a plugin's copy
            is missing or fails to load.
        PluginChanged: a plugin's copy has changed.
    """
    try:
        named = tuple(Plugin.model_validate(stored) for stored in record.config.get("plugins", ()))
        registered = [(part, _is_registered(part, record.config[part.section], named)) for part in PLUGGABLE]
    except (ValidationError, ModelConfigError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(record, error) from error
    if all(there for part, there in registered if part.section == "model"):
        _validated_config(record, named)  # before any plugin code runs; a regularizer has no settings
    plugins = tuple(_load_stored_plugin(record, plugin, runs) for plugin in named)
    return Cell(record.id, record.slug, _validated_config(record, plugins), dict(record.axes))


def _is_registered(part: Pluggable, section: Mapping[str, Any], plugins: tuple[Plugin, ...]) -> bool:
    """Return True if the part that the section names can be used before any plugin is loaded.

    That is, no part is named, or the registered one comes from the same source as the cell's. False: one of the cell's
    plugins must provide it.

    Args:
        part: kind of part.
        section: section of the stored config that names the part and the SHA-256 of its source (None for this
            package's).
        plugins: plugins of the cell.

    Raises:
        ModelConfigError: neither this version nor a plugin of the cell can provide the part.
    """
    source = section.get(part.source)
    name = section[part.name] if part.none_name is None else section.get(part.name, part.none_name)
    is_available = name == part.none_name or name in part.registry or (part.allows_unregistered and source is None)
    if (source is None and not is_available) or (
        source is not None and source not in {plugin.sha256 for plugin in plugins}
    ):
        raise ModelConfigError(
            f"{part.section}.{part.name}", f"no {part.registry.kind} named {name!r}", sorted(part.registry)
        )
    return is_available and (name == part.none_name or source_of(part, name, plugins) == source)


def _validated_config(record: CellRecord, plugins: tuple[Plugin, ...]) -> CellConfig:
    """Return the stored config, validated and complete, with these plugins.

    Args:
        record: the cell's row; missing fields get their identity defaults.
        plugins: plugins to put into the config.

    Raises:
        CellUnreadable: the config is invalid, or this version computes another cell id from it.
    """
    try:
        config = CellConfig.model_validate({**_fill_sections(record.config), "plugins": plugins})
        config = config.model_copy(update={"model": check_model_config(config.model)})
        computed_id = cell_id(config)
    except (ValidationError, ModelConfigError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(record, error) from error
    if computed_id != record.id:
        raise CellUnreadable(
            f"this version computes another id ({computed_id}) for the config of cell {record.id} ({record.slug}); "
            "use the version that trained it, or launch its grid again"
        )
    return config


def _unreadable(record: CellRecord, error: Exception) -> CellUnreadable:
    first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return CellUnreadable(
        f"this version cannot read the config of cell {record.id} ({record.slug}): {first}; launch its grid again"
    )


def _load_stored_plugin(record: CellRecord, stored: Plugin, runs: Path) -> Plugin:
    """Load a plugin from its copy under `runs`, or from its installed package, which runs its code.

    Returns the plugin with the copy's path.

    Args:
        record: the cell's row, for messages alone.
        stored: the plugin as the config names it; its file name and SHA-256 are used.
        runs: folder of the runs.

    Raises:
        CellUnreadable: the copy is missing or fails to load.
        SweepError: passed through, such as PluginExited of a plugin that ends the process.
        PluginChanged: the copy has another SHA-256.
    """
    if is_installed(stored.path):
        return load_plugin(Path(stored.path), stored.sha256)
    copy = runs / "plugins" / Path(stored.path).name
    if not copy.is_file():
        raise CellUnreadable(
            f"the plugin of cell {record.id} ({record.slug}) is not in {copy}; name its folder with --runs, "
            "or launch its grid again"
        )
    try:
        return load_plugin(copy.resolve(), stored.sha256)
    except SweepError:
        raise
    except Exception as error:
        raise CellUnreadable(
            f"{copy} cannot be loaded for cell {record.id} ({record.slug}): {type(error).__name__}: {error}; "
            "load cells with different versions of a plugin in separate processes"
        ) from error


def _fill_sections(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored config with missing fields at their identity defaults, as older cells had them.

    Filled are the sections model, data and train, and the settings of mixers, memories and position schemes. Imports
    the parts. `stored` is not changed. Raises KeyError for an unknown part or a missing section.
    """
    full = dict(stored)
    for section, cls in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig)):
        full[section] = fill_identity_defaults(cls, stored[section])
    model = full["model"]
    for section, table in registry.SETTINGS.items():
        model[section] = {
            name: fill_identity_defaults(table.load(name).Config, part) for name, part in model[section].items()
        }
    return full


def load(
    cell_name: str, *, db: str | Path | None = None, runs: str | Path | None = None, sweep: str | None = None,
    device: str = "cpu",
) -> LoadedModel:  # fmt: skip
    """Load a trained cell as `atma_sweep.load` does: network in evaluation mode, tokenizer and config.

    The database is only read and is closed again. Runs the code of the cell's plugins.

    Args:
        cell_name: id, slug or prefix of the cell.
        db: database; None: the one of ATMA_DB or the default.
        runs: folder of the runs; None: the database's own.
        sweep: sweep to look in; None: the newest, else any.
        device: "cpu" or "cuda".

    Raises:
        TypeError: an argument has another type.
        StoreError: the database cannot be read, or there is no such cell, or more than one.
        SweepError: the cell has no weights or cannot be loaded, or the device cannot be used.
    """
    check_argument("load", "cell", cell_name, TEXT)
    check_argument("load", "db", db, PATH, optional=True)
    check_argument("load", "runs", runs, PATH, optional=True)
    check_argument("load", "sweep", sweep, TEXT, optional=True)
    check_argument("load", "device", device, TEXT)
    torch_device = _device(device)
    store = open_store(db)
    try:
        folder = Path(runs) if runs is not None else store.runs
        trained = find_trained_cell(store, cell_name, folder, sweep)
    finally:
        store.close()
    return load_trained(trained, folder, torch_device)


def _device(name: str) -> torch.device:
    """Return the torch device of that name, "cpu" or "cuda" (the current CUDA device, which is started).

    Raises:
        SweepError: another name.
        MachineError: "cuda" without a usable GPU; it names the cause.
    """
    import torch

    from .device import choose_device

    if name not in ("cpu", "cuda"):
        raise SweepError(f'device {name!r} is unknown; use device="cpu" or device="cuda"')
    if name == "cpu":
        return torch.device("cpu")
    try:
        return choose_device(1)
    except MachineError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise MachineError(f'no usable CUDA GPU: {cause}; device="cpu" loads the model on the CPU') from error


def load_trained(trained: TrainedCell, runs: Path, device: torch.device) -> LoadedModel:
    """Build the network, load its weights and its tokenizer, and switch it to evaluation mode.

    The weights are checked against their SHA-256 if one is recorded. Raises SweepError if corpus or weights cannot be
    read.

    Args:
        trained: cell and address of its weights.
        runs: folder that addresses are relative to.
        device: device of the network.
    """
    from ..checkpoints import checkpoint
    from .device import build_network

    config = trained.cell.config
    tokenizer = open_verified(runs / "corpora", config.data.fingerprint or "").load_tokenizer()
    model = build_network(config, device)
    checkpoint.load_weights(storage.resolve(runs, trained.weights), model, trained.sha256)
    model.eval()
    return LoadedModel(model, tokenizer, config, trained.cell.id, trained.cell.slug, trained.sha256)
