"""FineWeb-Edu as GPT-2 tokens in shards of 100M, which the published runs trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ...config import DataConfig
from ...errors import MachineError
from ..corpus_kind import CorpusKind, Told
from ..shard_files import key_of, shard_files
from ..shards import SHARD_TOKENS
from ..sources import from_outside

REPOSITORY = "kjj0/finewebedu10B-gpt2"
SHARDS = 99


class FineWebEduShards(CorpusKind):
    """Those of the hub, or a local copy under `data.path`."""

    description = f"the same as GPT-2 tokens, ready-made ({REPOSITORY})"
    preset: ClassVar = {"tokenizer": "gpt2", "train_tokens": 10**9, "heldout": "finepdfs"}
    ready = True

    @classmethod
    def key(cls, data: DataConfig) -> Any:
        """The repository, or the state of the copy's files."""
        return key_of(Path(data.path)) if data.path else REPOSITORY

    @classmethod
    def shards(cls, data: DataConfig, made: Path, told: Told) -> tuple[list[Path], list[Path]]:
        """As many training shards as are asked for. Raises MachineError when one cannot be downloaded."""
        if data.path is not None:
            return shard_files(Path(data.path))
        numbers = range(1, _training_shards(data) + 1)
        train = [_fetched(f"finewebedu_train_{number:06d}.bin", told) for number in numbers]
        return train, [_fetched("finewebedu_val_000000.bin", told)]

    @classmethod
    def remote(cls, data: DataConfig) -> bool:
        """Unless there is a copy."""
        return data.path is None

    @classmethod
    def download_bytes(cls, data: DataConfig) -> int | None:
        """Count the training shards and the validation shard, two bytes per token."""
        return 2 * SHARD_TOKENS * (_training_shards(data) + 1)


def _training_shards(data: DataConfig) -> int:
    """Return the number of training shards that hold the tokens that `data` asks for."""
    wanted = data.train_tokens
    return SHARDS if wanted is None else min(SHARDS, -(-wanted // SHARD_TOKENS))


def _fetched(name: str, told: Told) -> Path:
    from huggingface_hub import hf_hub_download

    told("downloading")
    try:
        return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset"))
    except Exception as error:
        # the hub's transfer library raises RuntimeError
        if not from_outside(error) and not isinstance(error, RuntimeError):
            raise
        raise MachineError(
            f"{REPOSITORY}/{name} cannot be downloaded ({type(error).__name__}); run again to go on where "
            "it stopped, or give data.path, a folder that holds the shards"
        ) from error
