"""Checkpoints in the Hugging Face format: location, identity, and a check that they load without foreign code."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...results.console.output_files import sha256 as file_sha256
from ...results.console.text import closest_match
from ...results.errors import PackageMissing, install_hint
from ..config import HUB_PREFIX as PREFIX
from ..errors import MachineError, SweepError

DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Downloaded files of a repository: no code, and no weights in a format that can run code."""
EXPORTED = "atma-sweep"
"""Value of model_type of an exported cell."""
EXPORTED_WEIGHTS = "model.safetensors"
"""File of the weights of an exported cell."""
WEIGHTS_HASH = "weights_sha256"
"""Key in an exported cell's config.json: SHA-256 of the file of its weights, until another program saves them."""
EXPORT_AGAIN = "export the cell again: atma-sweep export CELL --to hf FOLDER"
"""Remedy of messages about half an export."""
FOLDER_REMEDY = "name a folder written by save_pretrained, `hf download --local-dir` or `atma-sweep export --to hf`"
"""Remedy of messages about a folder that is no checkpoint."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of weights in a format that can run code."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")
"""Files that decide how a text is tokenised."""
FLOAT32_FAMILIES = ("gemma3", "gemma3_text", "granite", "granitemoehybrid")
"""Families that the paper measured in float32, because 16-bit activations overflow or lose accuracy in them."""
GPU_FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
"""Families whose linear attention needs a GPU where flash-linear-attention is installed."""
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


class InvalidCheckpoint(SweepError):
    """Exception for a name that stands for no usable checkpoint."""


class WeightsUnavailable(MachineError):
    """Exception for weights that are neither on this machine nor downloadable from the hub."""

    passing = False


@dataclass(frozen=True)
class HubCheckpoint:
    """A checkpoint on this machine."""

    name: str
    """Repository of the hub as requested, or the name of the folder."""
    folder: Path
    """Folder of the files."""
    revision: str
    """Commit of the hub, or `sha256:` and the hash of the folder's files."""
    tokenizer: str
    """SHA-256 of the files that decide how a text is tokenised."""
    family: str
    """Model type in config.json."""
    context: int | None
    """Trained context length in tokens, according to config.json; None if it gives none."""
    max_positions: int | None
    """Length in tokens of a learned position table; None for a model that can read any length."""

    @property
    def short_name(self) -> str:
        """Last part of the name."""
        return self.name.rpartition("/")[2]

    def check(self, *, cuda: bool) -> None:
        """Check that the model can run where it is to be measured.

        Args:
            cuda: True if it gets a GPU, where every model passes.

        Raises:
            MachineError: It gets none, is of a family with linear attention (GPU_FAMILIES: qwen3_5, qwen3_5_moe, both
                also with _text, and qwen3_next), and flash-linear-attention is installed.
        """
        if not cuda and self.family in GPU_FAMILIES and importlib.util.find_spec("fla") is not None:
            raise MachineError(
                f"{self.name} is of the family {self.family}, whose linear attention needs an NVIDIA GPU when flash-linear-attention is "
                "installed; evaluate it with a sweep whose resources have gpus: 1"
            )

    def dtype(self, *, cuda: bool) -> str:
        """Return the dtype of weights and activations: float32 on the CPU and for some families, else bfloat16.

        The families are gemma3, gemma3_text, granite and granitemoehybrid (FLOAT32_FAMILIES).
        """
        return "bfloat16" if cuda and self.family not in FLOAT32_FAMILIES else "float32"


def need_transformers() -> None:
    """Raise MachineError if the package transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MachineError(f"open-weight models need the package transformers; {install_hint('transformers')}")


def resolve_checkpoint(requested: str, revision: str | None = None) -> HubCheckpoint:
    """Return the checkpoint that `hf:NAME` or `hf:FOLDER` stands for, downloaded if necessary, its files hashed.

    Args:
        requested: Name, with or without the prefix `hf:`. An existing folder takes precedence over a repository, and
            becomes the checkpoint's name by its last part.
        revision: Commit, tag or branch of a repository; None: its main branch. Not allowed for a folder.

    Raises:
        WeightsUnavailable: The weights are missing and cannot be downloaded; the message says what to download and
            where to put it.
        InvalidCheckpoint: The name stands for no checkpoint, or for one that needs foreign code.
        MachineError: The package transformers is not installed.
    """
    need_transformers()
    return _describe(*locate_checkpoint(requested, revision))


def locate_checkpoint(
    requested: str, revision: str | None = None, *, download: bool = True
) -> tuple[str, Path, str | None]:
    """Return (name, folder, commit) of what `hf:NAME` or `hf:FOLDER` stands for, downloaded if necessary and allowed.

    Neither needs the package transformers. Nothing is checked about the files.

    Args:
        requested: Name, with or without the prefix `hf:`. An existing folder takes precedence over a repository, and
            becomes the checkpoint's name by its last part.
        revision: Commit, tag or branch of a repository; None: its main branch. Not allowed for a folder.
        download: False takes a repository from the hub's cache alone.

    Raises:
        WeightsUnavailable: The weights are not on this machine, and cannot or must not be downloaded.
        InvalidCheckpoint: The name stands for neither a folder nor a repository.
        MachineError: The package huggingface_hub is not installed.
    """
    name = requested.removeprefix(PREFIX)
    local = Path(name).expanduser()
    if local.is_dir():
        if revision is not None:
            raise InvalidCheckpoint(
                f"--revision {revision}: {local} is a folder, which has no revisions; name a repository of the hub"
            )
        return local.resolve().name, local.resolve(), None
    if local.exists() or not REPOSITORY.fullmatch(name):
        raise InvalidCheckpoint(
            f"{requested} is neither a folder nor a repository of the hub; write {PREFIX}OWNER/NAME or {PREFIX}FOLDER"
        )
    folder = _from_hub(name, revision, download=download)
    return name, folder, folder.name


def _from_hub(name: str, revision: str | None, *, download: bool) -> Path:
    """Return the folder of a repository's snapshot, from the hub's cache or downloaded.

    Only files that end in .json, .safetensors, .model, .txt or .jinja are downloaded. A cached snapshot that has
    config.json and at least one *.safetensors is taken without asking the hub, even if it is outdated or lacks further
    files. The folder's name is the commit.

    Args:
        name: Repository, OWNER/NAME.
        revision: Commit, tag or branch; None: the main branch.
        download: False raises for a snapshot that is not cached.

    Raises:
        WeightsUnavailable: The snapshot is not cached, and the download failed or is not allowed.
        MachineError: The package huggingface_hub is not installed.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MachineError(f"{name} needs the package huggingface_hub; {install_hint('huggingface_hub')}")
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(*, local_only: bool) -> Path:
        """Return the folder of the snapshot, from the hub's cache alone if `local_only`."""
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS), local_files_only=local_only
            )
        )

    try:
        snapshot = fetch(local_only=True)
        if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")):
            return snapshot
    except LocalEntryNotFoundError:
        pass
    if not download:
        raise WeightsUnavailable(
            f"{PREFIX}{name} is not in {constants.HF_HUB_CACHE}; launch with --prepare to download it, or name a folder"
        )
    revision_option = f" --revision {revision}" if revision else ""
    try:
        return fetch(local_only=False)
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise WeightsUnavailable(
            f"the weights of {name} are not in {constants.HF_HUB_CACHE} and could not be downloaded ({cause}); where the "
            f"hub is reachable, run `hf download {name}{revision_option} --local-dir {name.rpartition('/')[2]}`, copy that folder here "
            f"and name it {PREFIX}{name.rpartition('/')[2]}"
        ) from error


def _describe(name: str, folder: Path, commit: str | None) -> HubCheckpoint:
    """Return the checkpoint in a folder after checking its files; the weights are not loaded.

    The revision of a local folder is `sha256:` and a hash over its *.safetensors and *.json files. Context and position
    table are read from `text_config` where config.json has one. A learned position table is one that config.json gives
    as `n_positions`; the context is that, or else `max_position_embeddings`.

    Args:
        name: Name of the checkpoint.
        folder: Folder of its files.
        commit: Commit of the hub; None for a local folder, whose files are hashed instead.

    Raises:
        WeightsUnavailable: Weights are missing.
        InvalidCheckpoint: The files are no usable checkpoint, for example with weights in a format that can run code.
    """
    config = read_config(folder)
    family = _check_family(folder, config)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickled:
            raise InvalidCheckpoint(
                f"{folder} holds its weights only as {pickled[0]}, a format that can run code; ask its authors for safetensors, "
                "or convert the file if you trust it"
            )
        if commit is not None:
            raise InvalidCheckpoint(
                f"{name} has no safetensors; weights in other formats can run code and are not downloaded"
            )
        raise WeightsUnavailable(
            f"{folder} holds no weights; put the checkpoint's *.safetensors next to its config.json"
        )
    check_all_shards(folder)
    for path in weights:
        with open_tensors(path):  # reads the header
            pass
    text = config.get("text_config") or config
    limit = text.get("max_position_embeddings")
    return HubCheckpoint(
        name=name,
        folder=folder,
        revision=commit or f"sha256:{hash_files(folder, [*weights, *folder.glob('*.json')])}",
        tokenizer=hash_files(folder, _tokenizer_files(folder)),
        family=family,
        context=int(text.get("n_positions") or limit or 0) or None,
        max_positions=text.get("n_positions"),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json, a dict in which "model_type" is a string.

    Raises:
        InvalidCheckpoint: The file is missing, is no JSON object, or has no model type.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InvalidCheckpoint(
            f"{folder} has no config.json, so it is not a checkpoint in the hub's format; {FOLDER_REMEDY}"
        ) from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{folder / 'config.json'} is not valid JSON: {error}; {FOLDER_REMEDY}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InvalidCheckpoint(
            f"{folder / 'config.json'} names no model_type, so it is not a checkpoint in the hub's format; {FOLDER_REMEDY}"
        )
    return config


def _check_family(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the model type, if the installed transformers has a causal language model of that type.

    Other kinds of models, such as masked ones, do not count. Code that comes with the checkpoint is never run.

    Args:
        folder: Folder of the checkpoint, for the message alone.
        config: Contents of config.json; must have "model_type", as `read_config` ensures.

    Raises:
        InvalidCheckpoint: transformers has no such model; the message names the nearest type, if any.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    family = str(config["model_type"])
    if family in KNOWN:
        return family
    if family == EXPORTED:
        raise InvalidCheckpoint(
            f"{folder} holds a cell that atma-sweep exported; name the cell instead, or train from the folder with "
            f"train.init_from: {PREFIX}{folder}"
        )
    near = closest_match(family, list(KNOWN))
    raise InvalidCheckpoint(
        f"{folder}: transformers {transformers.__version__} has no language model of type {family!r}"
        + ("; code that comes with a checkpoint is never run" if config.get("auto_map") else "")
        + (f"; the nearest type is {near!r}" if near else "")
        + "; a newer transformers may have it"
    )


def check_all_shards(folder: Path) -> None:
    """Check that every weight file that an index (*.safetensors.index.json) names exists; without an index pass.

    Raises:
        WeightsUnavailable: A file is missing; the message has the first one by name and their number.
    """
    for index in folder.glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise WeightsUnavailable(
                f"{folder} lacks {len(missing)} of the {len(named)} weight files that {index.name} names, such as {missing[0]}"
            )


def check_export(folder: Path) -> dict[Path, str]:
    """Check that a cell's folder from `export --to hf` holds the weights that were exported; others pass.

    Returns:
        SHA-256 in hex of the files that were hashed for it, so that they are read once.

    Raises:
        InvalidCheckpoint: model.safetensors is missing, incomplete or changed, by the hash in config.json.
        WeightsUnavailable: A file that an index names is missing.
    """
    config = read_config(folder)
    if config["model_type"] != EXPORTED:
        return {}
    check_all_shards(folder)
    if not any(folder.glob("*.safetensors")):
        raise InvalidCheckpoint(f"{folder} holds no weights, so it is half an export; {EXPORT_AGAIN}")
    if config.get(WEIGHTS_HASH) is None:
        return {}
    path = folder / EXPORTED_WEIGHTS
    digest = file_sha256(path)
    if digest != config[WEIGHTS_HASH]:
        raise InvalidCheckpoint(
            f"{path} is incomplete or was changed: its SHA-256 is not that in config.json; {EXPORT_AGAIN}"
        )
    return {path: digest}


def check_loaded_tensors(source: object, loading_info: Mapping[str, Collection[Any]], remedy: str) -> None:
    """Check that the weights that transformers loaded had exactly the tensors of the network; others would be random.

    Args:
        source: Name or folder of the weights, for the message.
        loading_info: What `from_pretrained` returns with `output_loading_info`: collections of names in missing_keys and
            unexpected_keys, and of tuples that begin with a name in mismatched_keys.
        remedy: What to do about it, for the message.

    Raises:
        InvalidCheckpoint: Tensors are missing, have another shape or are surplus; the first by name and their number.
    """
    for key, problem in (
        ("missing_keys", "lack a tensor of the network"),
        ("mismatched_keys", "have another shape than the network's for tensor"),
        ("unexpected_keys", "hold a tensor that the network lacks"),
    ):
        names = [str(entry if isinstance(entry, str) else entry[0]) for entry in loading_info[key]]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InvalidCheckpoint(f"the weights of {source} {problem}: {min(names)}{more}; {remedy}")


def open_tensors(path: Path) -> Any:
    """Return a context manager that reads single tensors of a safetensors file.

    Raises:
        InvalidCheckpoint: The file is damaged or incomplete.
        PackageMissing: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise PackageMissing("safetensors") from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(
            f"{path} cannot be read ({str(error).splitlines()[0]}); it may be half a download, so download it again"
        ) from error


def _tokenizer_files(folder: Path) -> list[Path]:
    """Return the existing files that decide how a text is tokenised.

    They are tokenizer.json, tokenizer.model, vocab.json, merges.txt and tokenizer_config.json (TOKENIZER_FILES). Raises
    InvalidCheckpoint if there is none.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise InvalidCheckpoint(f"{folder} has no tokenizer; put its tokenizer.json next to its config.json")
    return files


def hash_files(folder: Path, files: list[Path], digests: Mapping[Path, str] | None = None) -> str:
    """Return the SHA-256 in hex over the relative paths and contents of files, in sorted order.

    Args:
        folder: Folder to which the paths are relative.
        files: Files below it; a file that is listed twice counts twice.
        digests: SHA-256 in hex of files whose contents were hashed before; the others are read.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        content = (digests or {}).get(path) or file_sha256(path)
        digest.update(f"{path.relative_to(folder)}:{content}\n".encode())
    return digest.hexdigest()
