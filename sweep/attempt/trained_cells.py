"""Trained cells from the database: the frozen config restored, the kept weights found, the model built from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ...model import registry
from ...model.config import ModelConfig, ModelConfigError
from ...model.resolve import check_model_config
from ...results.arguments import COUNT, FLAG, NUMBER, PATH, TEXT, check_argument
from ...results.store.records import CellRecord
from ...results.store.store import Store, open_store
from ..checkpoints import storage
from ..config import CellConfig, DataConfig, Plugin, TrainConfig
from ..data.corpora import verified
from ..errors import MachineError, SweepError
from ..grid.cell import Cell, cell_id
from ..grid.plugins import PLUGGABLE, Pluggable, load_plugin, source_of

if TYPE_CHECKING:
    import torch

    from ...model.backbone import Backbone
    from ..data.tokenizer import Tokenizer


class NotTrained(SweepError):
    """The cell has no finished training."""


class WeightsGone(SweepError):
    """The cell was trained, but its weights were not kept or have been deleted."""


class CellUnreadable(SweepError):
    """The stored config cannot be turned back into the cell that was trained."""


@dataclass(frozen=True)
class TrainedCell:
    """A trained cell whose weights are there."""

    cell: Cell
    attempt: int
    """The training that the weights come from."""
    weights: str
    """Their address, as the database has it (see checkpoints/storage.py)."""
    sha256: str | None
    """Their recorded SHA-256, hex; None where an earlier version kept them."""


@dataclass(frozen=True)
class LoadedModel:
    """A trained model and what it was trained with."""

    model: Backbone
    """In evaluation mode, on the device asked for. `model(tokens)`: int64 [B, T] to float32 logits [B, T, V]."""
    tokenizer: Tokenizer
    config: CellConfig
    cell: str
    """The cell's id."""
    slug: str
    weights_sha256: str | None = None
    """SHA-256 of its weights, with which the file was compared; None where an earlier version kept them without one."""

    def generate(
        self, prompt: str = "", *, tokens: int = 256, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
        full_context: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """How the model goes on with a prompt, piece by piece: at most `tokens` tokens, and none behind the end of the text.

            print("".join(trained.generate("def main(", tokens=64)))

        The prompt stands behind the end-of-text token, as a document does in training. Temperature 0 takes the most probable
        token; `top_p` draws from the fewest tokens that together have that probability. The same arguments give the same text
        on the same machine. With `full_context` a network that was trained with a window reads without it, as probes do.

        Raises SamplingError for numbers out of range, a prompt that the tokenizer has no tokens for, and a text longer than the
        network has positions for; TypeError for an argument of another type.
        """
        for name, value, kind in (
            ("prompt", prompt, TEXT), ("tokens", tokens, COUNT), ("temperature", temperature, NUMBER),
            ("top_p", top_p, NUMBER), ("seed", seed, COUNT), ("full_context", full_context, FLAG),
        ):  # fmt: skip
            check_argument("generate", name, value, kind)
        from .generation import generate_text

        return generate_text(
            self.model, self.tokenizer, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed,
            full_context=full_context,
        )  # fmt: skip


def kept(store: Store, asked: str, runs: Path, sweep: str | None = None) -> TrainedCell:
    """The trained cell of that name, as `Store.find_cell` takes it: of the sweep named, else of the newest, else of any.

    Its weights are those of its newest finished training. Raises CellUnknown, CellAmbiguous, SweepUnknown, NotTrained,
    WeightsGone, CellUnreadable, PluginChanged, StorageError when the place of the weights cannot be reached.
    """
    record = store.find_cell(asked, sweep)
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
            "add what is to be measured to its grid, with checkpoint.keep: weights, and launch that with --retrain"
        )
    cell = restore_cell(record, runs)  # first of all whether the cell is what its id says
    address = storage.resolve(runs, weights)
    if not storage.exists(address):
        raise WeightsGone(
            f"the weights of cell {record.id} ({record.slug}) are gone from {address}; "
            "name their folder with --runs, or add what is to be measured to its grid and launch that with --retrain"
        )
    origin = store.provenance(done[-1].id)
    return TrainedCell(cell, done[-1].id, weights, origin.weights_sha256 if origin is not None else None)


def restore_cell(record: CellRecord, runs: Path) -> Cell:
    """The cell that a row of the database stands for, its plugins loaded from the copies under `runs`.

    Raises CellUnreadable when this version makes another cell of the stored config, PluginChanged.
    """
    try:
        named = tuple(Plugin.model_validate(stored) for stored in record.config.get("plugins", ()))
        registered = [(part, _is_registered(part, record.config[part.section], named)) for part in PLUGGABLE]
    except (ValidationError, ModelConfigError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(record, error) from error
    if all(there for part, there in registered if part.section == "model"):
        _validated_config(record, named)  # before a line of any plugin runs; a regularizer has no settings of its own
    plugins = tuple(_load_stored_plugin(record, plugin, runs) for plugin in named)
    return Cell(record.id, record.slug, _validated_config(record, plugins), dict(record.axes))


def _is_registered(part: Pluggable, section: Mapping[str, Any], plugins: tuple[Plugin, ...]) -> bool:
    """Whether the part is known before a plugin is loaded. Raises ModelConfigError when none of them could bring it."""
    source = section.get(part.source)
    name = section[part.name] if part.absent is None else section.get(part.name, part.absent)
    is_known = name == part.absent or name in part.registry or (part.others and source is None)
    if (source is None and not is_known) or (
        source is not None and source not in {plugin.sha256 for plugin in plugins}
    ):
        raise ModelConfigError(
            f"{part.section}.{part.name}", f"no {part.registry.kind} named {name!r}", sorted(part.registry)
        )
    return is_known and (name == part.absent or source_of(part, name, plugins) == source)


def _validated_config(record: CellRecord, plugins: tuple[Plugin, ...]) -> CellConfig:
    """The stored config, if the cell's id is that of it."""
    try:
        config = CellConfig.model_validate({**_fill_sections(record.config), "plugins": plugins})
        config = config.model_copy(update={"model": check_model_config(config.model)})
        computed_id = cell_id(config)
    except (ValidationError, ModelConfigError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(record, error) from error
    if computed_id != record.id:
        raise CellUnreadable(
            f"this version takes the config of cell {record.id} ({record.slug}) for another cell, {computed_id}; "
            "use the version that trained it, or launch its grid again"
        )
    return config


def _unreadable(record: CellRecord, error: Exception) -> CellUnreadable:
    first = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return CellUnreadable(
        f"this version cannot read the config of cell {record.id} ({record.slug}): {first}; launch its grid again"
    )


def _load_stored_plugin(record: CellRecord, stored: Plugin, runs: Path) -> Plugin:
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
            "cells with different versions of a plugin need a process each"
        ) from error


def _fill_sections(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored config with fields that are newer than it at what every older cell implicitly had."""
    full = dict(stored)
    for section, cls in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig)):
        full[section] = fill_identity_defaults(cls, stored[section])
    model = full["model"]
    for section, table in registry.SETTINGS.items():
        model[section] = {
            name: fill_identity_defaults(table.load(name).Config, part) for name, part in model[section].items()
        }
    return full


def fill_identity_defaults(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with missing fields at their identity default, where they have one."""
    full = dict(values)
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra
        if name not in full and isinstance(extra, dict) and "identity" in extra:
            full[name] = extra["identity"]
    return full


def load(
    asked: str, *, db: str | Path | None = None, runs: str | Path | None = None, sweep: str | None = None,
    device: str = "cpu",
) -> LoadedModel:  # fmt: skip
    """What `atma_sweep.load` returns and raises."""
    check_argument("load", "cell", asked, TEXT)
    check_argument("load", "db", db, PATH, optional=True)
    check_argument("load", "runs", runs, PATH, optional=True)
    check_argument("load", "sweep", sweep, TEXT, optional=True)
    check_argument("load", "device", device, TEXT)
    torch_device = _device(device)
    store = open_store(db)
    try:
        folder = Path(runs) if runs is not None else store.runs
        trained = kept(store, asked, folder, sweep)
    finally:
        store.close()
    return _build_model(trained, folder, torch_device)


def _device(name: str) -> torch.device:
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


def _build_model(trained: TrainedCell, runs: Path, device: torch.device) -> LoadedModel:
    from ..checkpoints import checkpoint
    from .device import network

    config = trained.cell.config
    tokenizer = verified(runs / "corpora", config.data.fingerprint or "").load_tokenizer()
    model = network(config, device)
    checkpoint.load_weights(storage.resolve(runs, trained.weights), model, trained.sha256)
    model.eval()
    return LoadedModel(model, tokenizer, config, trained.cell.id, trained.cell.slug, trained.sha256)
