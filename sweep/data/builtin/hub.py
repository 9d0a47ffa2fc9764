"""Corpora of the Hugging Face hub: WikiText-103, FinePDFs and FineWeb-Edu, the last also as GPT-2 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ....model.config import Config, knob
from ...config import DataConfig
from ...errors import MachineError
from ..corpus_kind import BYTES_PER_TOKEN, CorpusConfig, CorpusKind, HubCorpus, LogFn
from ..shards import SHARD_TOKENS, shard_files, shards_key
from ..sources import CorpusError, DocumentSource, HubSource, HubSpec, is_external_error

REPOSITORY = "kjj0/finewebedu10B-gpt2"
SHARDS = 99
"""Number of training shards in the repository."""


class FineWebEduShards(CorpusKind):
    """FineWeb-Edu as GPT-2 tokens in shards of 100M, used by the published runs, or a local copy under `data.path`."""

    description = f"FineWeb-Edu as ready-made GPT-2 tokens ({REPOSITORY})"
    preset: ClassVar = {"tokenizer": "gpt2", "train_tokens": 10**9, "heldout": "finepdfs"}
    ready = True

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """Return the repository, or a key of the local copy's files."""
        return shards_key(Path(data.path)) if data.path else REPOSITORY

    @classmethod
    def shards(cls, data: DataConfig, work_folder: Path, log: LogFn) -> tuple[list[Path], list[Path]]:
        """Return the training shards that `data.train_tokens` needs and the validation shard; download missing ones.

        Downloads go to the hub's cache, and `log` is called with "downloading" for each file. Of a local copy
        (`data.path`) all shards are returned.

        Raises:
            MachineError: A download failed.
            CorpusError: The local copy lacks training or validation shards.
        """
        if data.path is not None:
            return shard_files(Path(data.path))
        numbers = range(1, _count_training_shards(data) + 1)
        train = [_download(f"finewebedu_train_{number:06d}.bin", log) for number in numbers]
        return train, [_download("finewebedu_val_000000.bin", log)]

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Return True unless `data.path` names a local copy."""
        return data.path is None

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Return the bytes of the needed training shards and the validation shard, at two bytes per token."""
        return 2 * SHARD_TOKENS * (_count_training_shards(data) + 1)


def _count_training_shards(data: DataConfig) -> int:
    """Return the number of training shards that hold the requested tokens."""
    target_tokens = data.train_tokens
    return SHARDS if target_tokens is None else min(SHARDS, -(-target_tokens // SHARD_TOKENS))


def _download(name: str, log: LogFn) -> Path:
    """Return the local path of a file of the repository, downloaded unless the hub's cache holds it.

    Args:
        name: Name of the file.
        log: Called with "downloading", even for a cached file.

    Raises:
        MachineError: The download failed.
    """
    from huggingface_hub import hf_hub_download

    log("downloading")
    try:
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset"))
    except Exception as error:
        # the hub's transfer library raises RuntimeError
        if not is_external_error(error) and not isinstance(error, RuntimeError):
            raise
        raise MachineError(
            f"{REPOSITORY}/{name} cannot be downloaded ({type(error).__name__}); run again to continue, or set "
            "data.path to a folder with the shards"
        ) from error


class FinePDFs(HubCorpus):
    """A sample of FinePDFs with 100M tokens."""

    spec = HubSpec("codelion/finepdfs-100M", None, (("train", None),), 10**8)
    description = f"long coherent documents, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2"}


class FineWebEdu(HubCorpus):
    """The 10B-token sample of FineWeb-Edu."""

    spec = HubSpec("HuggingFaceFW/fineweb-edu", "sample-10BT", (("train", None),), 10**10)
    description = f"web text filtered for education, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2", "train_tokens": 10**9, "heldout": "finepdfs"}


class WikiText103(HubCorpus):
    """The articles of WikiText-103, in its own splits."""

    spec = HubSpec(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        (("train", "train"), ("validation", "validation"), ("test", "heldout")),
        118_000_000,
        articles=True,
    )
    description = f"Wikipedia articles, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2"}


class HubDatasetConfig(CorpusConfig):
    """Dataset of the hub, for the corpus hub."""

    dataset: str | None = knob(
        None, "Repository of the dataset, OWNER/NAME.", pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$"
    )
    config: str | None = knob(None, "Config of the dataset; null: its only one.")
    split: str = knob("train", "Split of the dataset to read.")
    revision: str | None = knob(
        None, "Commit, tag or branch; null: the main branch, as it is when the text is prepared."
    )


class AnyDataset(CorpusKind):
    """A split of any dataset of the hub, or of a local copy under `data.path`, streamed row by row."""

    Config: ClassVar[type[Config]] = HubDatasetConfig
    description = (
        "any dataset of the hub: data.settings.hub names it, data.column its text; or a local copy under data.path"
    )

    @classmethod
    def source(cls, data: DataConfig) -> DocumentSource:
        """Return the streamed rows of the dataset, from the local copy if `data.path` names one.

        Raises:
            CorpusError: `data.settings.hub.dataset` is not set.
        """
        chosen = HubDatasetConfig.model_validate(data.settings.get("hub", {}))
        if not chosen.dataset:
            raise CorpusError(
                "data.corpus: hub needs data.settings.hub.dataset, the OWNER/NAME of a dataset of the hub"
            )
        spec = HubSpec(
            chosen.dataset, chosen.config, ((chosen.split, None),), 0, column=data.column, revision=chosen.revision
        )
        return HubSource(spec, Path(data.path) if data.path else None)

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Return True unless `data.path` names a local copy."""
        return data.path is None

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Return an estimate from the requested training tokens; None if all are requested."""
        return None if data.train_tokens is None else BYTES_PER_TOKEN * data.train_tokens
