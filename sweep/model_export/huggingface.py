"""A trained cell as a Hugging Face model folder: config, weights, tokenizer, modeling file, model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model.config import ModelConfig
from ...model.resolve import longest_text
from ...results.console.output_files import make_folder, sha256, write_file
from ...results.errors import PackageMissing
from ...results.store.records import CellRecord, MeasuredValue
from ...results.store.store import Store
from ..attempt.trained_cells import LoadedModel, find_trained_cell, load_trained
from ..errors import SweepError
from ..external_models.hub_checkpoint import EXPORTED, EXPORTED_WEIGHTS, WEIGHTS_HASH
from ..grid.plugins import is_installed
from .tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from ..config import CellConfig
    from ..data.tokenizer import Tokenizer

MODELING_FILE = "modeling_atma_sweep.py"
MODELING = '''"""The network of this folder, from the package atma-sweep: pip install "atma-sweep[hf]"."""

from atma_sweep.hf import CellForCausalLM, CellModelConfig


class AtmaSweepConfig(CellModelConfig):
    """Config of the network."""


class AtmaSweepForCausalLM(CellForCausalLM):
    """The network with the interface of transformers."""

    config_class = AtmaSweepConfig
'''
CLASSES = {
    "AutoConfig": f"{MODELING_FILE.removesuffix('.py')}.AtmaSweepConfig",
    "AutoModelForCausalLM": f"{MODELING_FILE.removesuffix('.py')}.AtmaSweepForCausalLM",
}
"""Class by what transformers looks for, as config.json names them."""


def export_to_hugging_face(
    store: Store, cell_name: str, folder: Path, *, runs: Path, sweep: str | None = None, version: str = ""
) -> dict[str, Any]:
    """Write a trained cell as a folder that transformers loads with `trust_remote_code=True`.

    Files: config.json, model.safetensors (float32), generation_config.json, tokenizer.json, tokenizer_config.json,
    special_tokens_map.json, modeling_atma_sweep.py, the cell's plugin files, and README.md, the model card. The folder
    is complete or absent.

    Args:
        store: Database.
        cell_name: Id, slug or beginning of the cell.
        folder: Folder to create; an existing one must be empty.
        runs: Runs folder.
        sweep: Sweep to look in; None: the newest, else any.
        version: Version of this program, for the model card.

    Returns:
        Dict for JSON: cell (id), slug, folder, parameters (number) and files (names).

    Raises:
        SweepError: The cell has no weights or cannot be loaded, its tokenizer cannot be exported, or the folder holds
            files.
        StoreError: There is no such cell, or the folder cannot be written.
        PackageMissing: transformers is not installed.
    """
    try:
        import torch
        import transformers  # noqa: F401 - the modeling file needs it, so the user learns it here
    except ModuleNotFoundError as error:
        raise PackageMissing(error.name or "transformers") from error
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SweepError(f"{folder} exists and is not an empty folder; name another")
    trained = find_trained_cell(store, cell_name, runs, sweep)
    record = store.find_cell(trained.cell.id, sweep)
    loaded = load_trained(trained, runs, torch.device("cpu"))
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part, "--out", parents=True)
    try:
        write_model_folder(part, loaded, record, store.measurements(record.id), version)
        if folder.exists():
            folder.rmdir()
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    files = sorted(path.name for path in folder.iterdir())
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return {
        "cell": record.id, "slug": record.slug, "folder": str(folder), "parameters": parameters, "files": files,
    }  # fmt: skip


def write_model_folder(
    folder: Path, loaded: LoadedModel, record: CellRecord, values: Sequence[MeasuredValue], version: str
) -> None:
    """Write all files of a model folder, which exists and is empty.

    Args:
        folder: The folder.
        loaded: The network with its tokenizer and config.
        record: Its cell, for the model card.
        values: Its measurements, for the model card.
        version: Version of this program, for the model card.

    Raises:
        SweepError: The tokenizer cannot be exported.
    """
    from safetensors.torch import save_file

    from ..checkpoints.checkpoint import model_state

    config, tokenizer = loaded.config, loaded.tokenizer
    plugins = [Path(plugin.path) for plugin in config.plugins if not is_installed(plugin.path)]
    for name, content in tokenizer_files(tokenizer).items():
        write_file(folder / name, content)
    state = {f"network.{name}": tensor for name, tensor in model_state(loaded.model).items()}
    save_file(state, folder / EXPORTED_WEIGHTS, metadata={"format": "pt"})
    digest = {WEIGHTS_HASH: sha256(folder / EXPORTED_WEIGHTS)}
    _write_json(folder / "config.json", _config_json(config.model, tokenizer, [path.name for path in plugins]) | digest)
    # rows of the embedding beyond the vocabulary were never trained
    unused = list(range(tokenizer.vocabulary, config.model.vocab_size))
    generation = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}
    _write_json(folder / "generation_config.json", generation | ({"suppress_tokens": unused} if unused else {}))
    write_file(folder / MODELING_FILE, MODELING)
    for path in plugins:
        shutil.copy(path, folder / path.name)
    write_file(folder / "README.md", model_card(config, record, values, version))


def _config_json(model: ModelConfig, tokenizer: Tokenizer, plugins: Sequence[str]) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        model: The network.
        tokenizer: Tokenizer of its text.
        plugins: Names of the cell's plugin files in the folder.
    """
    longest, eot = longest_text(model), tokenizer.eot
    return {
        "model_type": EXPORTED,
        "architectures": ["AtmaSweepForCausalLM"],
        "auto_map": CLASSES,
        "dtype": "float32",
        "network": model.model_dump(mode="json"),
        "full_context": False,
        "corpus_tokenizer": tokenizer.name,
        "vocab_size": model.vocab_size,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        **({"max_position_embeddings": longest} if longest is not None else {}),
        **({"plugins": list(plugins)} if plugins else {}),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(value, indent=2) + "\n")


def model_card(config: CellConfig, record: CellRecord, values: Sequence[MeasuredValue], version: str) -> str:
    """Return the README of a model folder: how to load it, what it is, what was measured, how to cite it.

    Args:
        config: Config of the cell.
        record: The cell in the database.
        values: Its measurements; those without a value are left out.
        version: Version of this program.
    """
    import jinja2

    template = resources.files(__package__).joinpath("model_card.md.jinja").read_text(encoding="utf-8")
    measured = [value for value in values if value.value is not None]
    settings = {
        "mixer": config.model.attn_type, "memory": config.model.memory, "positions": config.model.positions,
        "window": config.model.window_size if config.model.window else "none", "layers": config.model.n_layers,
        "width": config.model.d_model, "training tokens": f"{config.train.tokens:,}",
        "row length": f"{config.train.seq_len:,} tokens", "text": config.data.corpus, "tokenizer": config.data.tokenizer,
        "seed": config.seed,
    }  # fmt: skip
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template).render(
        cell=record, settings=settings, values=measured, describe=_measure, version=version
    )


def _measure(value: MeasuredValue) -> str:
    """Return the name of a measurement as the model card prints it, such as "needle digit_accuracy at 2,048 tokens"."""
    at = f" at {value.length:,} tokens" if value.length else ""
    return f"{value.probe} {value.metric}{at}"
