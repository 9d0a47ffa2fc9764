"""Prepared corpora: three splits of tokens (training, validation, long held-out documents) with one fingerprint.

All lie in one folder. `<fingerprint>/` (its first 16 digits) holds shards, tokenizer and manifest.json. `requests/`
maps each request to its fingerprint, and `names/` does so for the names given with `data prepare --name`.

A corpus comes from documents, from ready-made shards (files of tokens), or is computed: its rows follow from their
numbers and are computed when they are read. Marks are a stream next to a split, with 1 for each token that counts as a
target of the loss and 0 for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...results.console.text import did_you_mean
from ...results.names import is_valid_name
from ..config import DataConfig
from . import computed
from . import tokenizer as tokenizers
from .computed_rows import Stream, Streams
from .registry import CORPORA, all_kinds
from .shards import CHUNK_TOKENS, ShardError, open_shard, read_shard_facts
from .sources import DEFAULT_COLUMN, CorpusError, DocumentSource, FileSource
from .tokenizer import Tokenizer

MARK_SPLITS = ("train_marks", "validation_marks")
"""Splits that hold marks instead of tokens."""
PROVISIONAL = "unprepared:"
"""Prefix of the placeholder that an unprepared corpus has in place of a fingerprint."""
LAYOUT = 1
"""Version that enters the fingerprint; raise it when the same text would be split or tokenised differently."""

UNMARKED = "it marks no tokens, but train.loss_on: marked needs marks; set train.loss_on: all, or add a NAME.marks.bin for each shard NAME.bin"

_PREPARE_AGAIN = "remove {folder} and prepare the corpus again"


class CorpusUnknown(CorpusError):
    """Exception for a corpus name that is neither built in nor prepared on this machine."""

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        """Create the message, with a suggestion for a misspelt name.

        Args:
            name: The unknown name.
            allowed: Names of the available corpora, registered ones and those prepared under a name.
        """
        self.name, self.allowed = name, list(allowed)
        super().__init__(
            f"no corpus {name!r}; allowed: {', '.join(self.allowed)}, or one prepared with `data prepare PATH --name {name}`"
            + did_you_mean(name, self.allowed, shown=repr)
        )


@dataclass(frozen=True)
class Corpus:
    """An open prepared corpus.

    `train` and `validation` are streams of documents, each preceded by the end-of-text token. `heldout` holds complete
    documents, preceded by it too, in the order in which probes read them. Tokens are uint16, or uint32 for a large
    vocabulary. Rows of a computed corpus are computed when they are read; nothing of it lies on a disk.
    """

    fingerprint: str
    """SHA-256 in hex of everything that decides the tokens (`fingerprint_of`)."""
    tokenizer: str
    """Name of the tokenizer, with the hash of its file for a JSON tokenizer."""
    train: Sequence[Stream]
    """Training shards in order; no row of training crosses from one to the next."""
    validation: Stream
    """Validation split."""
    heldout: list[np.ndarray]
    """Long held-out documents; empty for a computed corpus."""
    heldout_names: list[str]
    """Names of the held-out documents, in the same order."""
    unigram_entropy: float
    """Entropy of the training split, nats per token."""
    bigram_entropy: float | None
    """Conditional entropy of a token given the previous one, nats; None for vocabularies too large to count."""
    largest: int = -1
    """Largest token id of any split."""
    folder: Path | None = None
    """Folder of the prepared corpus; None if it was created otherwise."""
    tokenizer_facts: dict[str, Any] | None = None
    """Facts from which `load_saved_tokenizer` loads the saved tokenizer; None as for `folder`."""
    train_marks: Sequence[Stream] | None = None
    """Marks of each training shard, 1 for tokens that count as targets; None for a corpus without marks."""
    validation_marks: Stream | None = None
    """Marks of the validation split; None together with `train_marks`."""
    computed: bool = False
    """Rows are computed when they are read; such a corpus has no long documents and accepts none from another."""
    expected_share: float | None = None
    """Share of the training tokens that are marked, where it is known without reading them, else None."""

    @property
    def train_tokens(self) -> int:
        """Number of tokens in all training shards."""
        return sum(map(len, self.train))

    @property
    def marked_share(self) -> float:
        """Share of the training tokens that are marked, 0 to 1; 1 for a corpus without marks.

        Reads all marks unless the share is known in advance.
        """
        if self.expected_share is not None:
            return self.expected_share
        if self.train_marks is None:
            return 1.0
        return sum(float(marks[:].sum(dtype=np.int64)) for marks in self.train_marks) / self.train_tokens

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the corpus, from the copy saved with it where there is one.

        A corpus without a folder has the tokenizer of its name, which must not be a JSON one.

        Raises:
            TokenizerError: The saved copy is missing or has changed.
        """
        if self.folder is None or self.tokenizer_facts is None:
            return tokenizers.load_tokenizer(self.tokenizer)
        return tokenizers.load_saved_tokenizer(self.tokenizer_facts, self.folder)


# --- requests and their prepared corpora --------------------------------------------------------------------------


def source_of(data: DataConfig) -> DocumentSource | None:
    """Return the documents that a data section names; None for a corpus of shards or of computed rows.

    The files themselves are not looked for yet.

    Raises:
        CorpusError: `data` lacks a setting that the corpus needs, such as `data.path`.
        KeyError: No corpus of that name is registered.
    """
    kind = CORPORA.load(data.corpus)
    return None if kind.ready or kind.tokenizer else kind.source(data)


def _is_training_text(heldout: str, data: DataConfig) -> bool:
    """Return True if the source of held-out documents is, or overlaps, the training text.

    That is so if both name the same corpus, or if one of both paths (symlinks resolved) lies within the other. Paths
    are not compared for a corpus of shards, nor if `heldout` is the name of a registered corpus.

    Args:
        heldout: Value of `data.heldout`: name of a corpus or a path.
        data: Data section of the config.
    """
    if heldout == data.corpus:
        return True
    if data.path is None or CORPORA.load(data.corpus).ready or heldout in CORPORA:
        return False
    trained_path, heldout_path = Path(data.path).resolve(), Path(heldout).resolve()
    return trained_path.is_relative_to(heldout_path) or heldout_path.is_relative_to(trained_path)


def heldout_source(data: DataConfig) -> DocumentSource | None:
    """Return the source of long held-out documents that `data.heldout` names; None when it names none.

    A registered corpus that provides long documents has precedence; any other text is taken as the path of a file or
    folder.

    Raises:
        CorpusError: It is the training text, or neither an existing path nor a corpus that provides long documents.
    """
    if data.heldout is None:
        return None
    if _is_training_text(data.heldout, data):
        raise CorpusError(
            f"data.heldout: {data.heldout} is also the training text; name other text, or remove data.heldout to hold out part of it"
        )
    source = CORPORA.load(data.heldout).lent() if data.heldout in CORPORA else None
    if source is not None:
        return source
    if not os.path.exists(data.heldout):  # also False for an invalid path, such as an overlong name
        long_corpora = ", ".join(name for name, kind in all_kinds().items() if kind.lent() is not None)
        raise CorpusError(
            f"data.heldout: {data.heldout} is neither a file, a folder nor a corpus with long documents: {long_corpora}"
        )
    return FileSource(Path(data.heldout), "data.heldout", data.column)


def request(data: DataConfig) -> dict[str, Any]:
    """Return the facts that determine a prepared corpus, as JSON: fields of the config and the state of its files.

    For a corpus of documents or shards the keys are layout, corpus, path, tokenizer, train_tokens, heldout,
    heldout_tokens, source and heldout_source. Further ones are plugin, for a corpus of a plugin, and division
    (validation_tokens, heldout_documents), where tokens decide the splits. `computed.request` gives those of a computed
    corpus. Sizes and modification times of local files count, so the result changes when a file is touched.

    Raises:
        CorpusError: A setting does not fit the corpus, or a path is missing.
        KeyError: No corpus of that name is registered.
    """
    kind = CORPORA.load(data.corpus)
    if data.validation_tokens is not None and (kind.ready or kind.tokenizer is not None):
        raise CorpusError(
            f"data.validation_tokens: corpus {data.corpus!r} has its own splits; remove data.validation_tokens"
        )
    if kind.tokenizer is not None:
        return computed.request(data, kind)
    source, heldout = source_of(data), heldout_source(data)
    key = source.key() if source is not None else kind.key(data)
    plugin = {"plugin": data.corpus_source} if data.corpus_source is not None else {}
    sizes = {"validation_tokens": data.validation_tokens, "heldout_documents": data.heldout_documents}
    division = {"division": sizes} if is_by_tokens(data) or data.heldout_documents is not None else {}
    return {
        "layout": LAYOUT,
        "corpus": data.corpus,
        "path": data.path,
        "tokenizer": tokenizers.request_key(data.tokenizer, data.tokenizer_file, data.end_of_text),
        "train_tokens": data.train_tokens,
        "heldout": data.heldout,
        "heldout_tokens": data.heldout_tokens,
        "source": key,
        "heldout_source": heldout.key() if heldout is not None else None,
        **plugin,
        **division,
    }


def is_by_tokens(data: DataConfig) -> bool:
    """Return True if the documents of a corpus are divided into splits by tokens, not by the hashes of their names.

    A class of corpora says so (`CorpusKind.by_tokens`), and a config that sets `validation_tokens` or
    `heldout_documents`. A corpus of shards or computed rows is not divided at all, which gives False.

    Raises:
        KeyError: No corpus of that name is registered.
    """
    kind = CORPORA.load(data.corpus)
    if kind.ready or kind.tokenizer is not None:
        return False
    return kind.by_tokens or data.validation_tokens is not None or data.heldout_documents is not None


def is_divided(corpus: Corpus) -> bool:
    """Return True if a prepared corpus was divided into splits by tokens, or would be if prepared again.

    False for a corpus without a folder. A corpus whose class is no longer registered counts only if it was so divided.

    Raises:
        CorpusError: The manifest is missing or damaged.
    """
    if corpus.folder is None:
        return False
    prepared_from = read_manifest(corpus.folder)["request"]
    kind = CORPORA.load(prepared_from["corpus"]) if prepared_from["corpus"] in CORPORA else None
    return "division" in prepared_from or (
        kind is not None and kind.by_tokens and not kind.ready and kind.tokenizer is None
    )


def request_id(corpus_request: dict[str, Any]) -> str:
    """Return the file name of a request: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(json.dumps(corpus_request, sort_keys=True).encode()).hexdigest()[:16]


def provisional_fingerprint(data: DataConfig) -> str:
    """Return a placeholder fingerprint for an unprepared corpus: `PROVISIONAL` and the SHA-256 of the data section.

    Different requests give different placeholders. Files on disk do not count.
    """
    # newer fields are left out at their defaults, so that older databases keep their placeholders
    newer = ("corpus_source", "settings", "validation_tokens", "heldout_documents", "column")
    defaults = {name for name in newer if getattr(data, name) in (None, {}, DEFAULT_COLUMN)}
    return f"{PROVISIONAL}{hashlib.sha256(data.model_dump_json(exclude=defaults).encode()).hexdigest()}"


def find_fingerprint(data: DataConfig, root: Path) -> str | None:
    """Return the fingerprint of the prepared corpus that a data section asks for.

    The result is None when a registered corpus is not prepared under `root`. A registered corpus is found by its
    request. A corpus that an older release divided by names satisfies a request that sets no sizes of splits. Any other
    name is that of a corpus prepared with `data prepare --name`.

    Args:
        data: Data section of the config.
        root: Folder of the prepared corpora.

    Raises:
        CorpusUnknown: The name is neither registered nor that of a prepared corpus.
        CorpusError: A path is missing, a setting does not fit, or a named corpus was prepared with another tokenizer.
        TokenizerError: The tokenizer file of the config cannot be used, for a named corpus with a JSON tokenizer.
    """
    if data.corpus not in CORPORA:
        return _fingerprint_of_name(data, root)
    current = request(data)
    fingerprint = _fingerprint_of_request(current, root)
    if fingerprint is None and data.validation_tokens is None and data.heldout_documents is None:
        # a corpus of an older release, divided by names, stays valid, and so do the ids of its cells
        former = {name: value for name, value in current.items() if name != "division"}
        fingerprint = _fingerprint_of_request(former, root)
    return fingerprint


def _fingerprint_of_request(corpus_request: dict[str, Any], root: Path) -> str | None:
    return _read_pointer(root / "requests" / f"{request_id(corpus_request)}.json", root)


def _read_pointer(path: Path, root: Path) -> str | None:
    """Return the fingerprint that a file of `requests/` or `names/` holds.

    The result is None when the file is missing or unreadable, or when no such corpus is prepared under `root`.
    """
    try:
        fingerprint = str(json.loads(path.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None
    return fingerprint if is_prepared(fingerprint, root) else None


def is_prepared(fingerprint: str, root: Path) -> bool:
    """Return True if a corpus with that fingerprint lies under `root`; its contents are not checked."""
    return (root / fingerprint[:16] / "manifest.json").is_file()


def _fingerprint_of_name(data: DataConfig, root: Path) -> str:
    """Return the fingerprint of the corpus that was prepared with `data prepare --name`.

    The tokenizer of `data` may be a kind ("gpt2") or a full name with the hash of a file. For "json" the file of `data`
    is loaded and its hash compared.

    Raises:
        CorpusUnknown: No corpus has that name.
        CorpusError: It was prepared with another tokenizer than `data` asks for, or its manifest is damaged.
        TokenizerError: The tokenizer file of `data` cannot be used.
    """
    fingerprint = _read_pointer(root / "names" / f"{data.corpus}.json", root) if is_valid_name(data.corpus) else None
    if fingerprint is None:
        raise CorpusUnknown(data.corpus, [*CORPORA, *named_fingerprints(root)])
    prepared_tokenizer, requested_tokenizer = read_manifest(root / fingerprint[:16])["tokenizer"], data.tokenizer
    if requested_tokenizer == "json" == prepared_tokenizer.split(":")[0]:
        requested_tokenizer = tokenizers.load_tokenizer("json", data.tokenizer_file, data.end_of_text).name
    if prepared_tokenizer != requested_tokenizer and prepared_tokenizer.split(":")[0] != requested_tokenizer:
        raise CorpusError(
            f"corpus {data.corpus!r} was prepared with tokenizer {prepared_tokenizer}, but the grid requests "
            f"{requested_tokenizer}"
        )
    return fingerprint


@dataclass(frozen=True)
class PreparedCorpus:
    """Facts about a corpus that a config needs, from its manifest or, for a computed corpus, from its class."""

    name: str
    """Name in the data section."""
    fingerprint: str
    """Fingerprint; empty for a computed corpus."""
    tokenizer: str
    """Name of the tokenizer, with the hash of its file for a JSON tokenizer."""
    kind: str
    """Kind of tokenizer: bytes, gpt2 or json, or that of a computed corpus."""
    file: str | None
    """Path of the saved copy of the tokenizer's file; None for a tokenizer without a file."""
    end_of_text: str | None
    """Name of the end-of-text token, where the config gave it."""
    vocabulary: int
    """Number of token ids."""
    marked: bool = False
    """True if the corpus marks the tokens that count for `train.loss_on: marked`."""


def find_prepared(name: str, root: Path) -> PreparedCorpus | None:
    """Return the facts of the corpus that was prepared under `name`.

    The result is None when the name is invalid or unused, when its pointer is unreadable, and when its corpus was
    removed.

    Args:
        name: Name given with `data prepare --name`.
        root: Folder of the prepared corpora.

    Raises:
        CorpusError: The manifest is damaged.
    """
    fingerprint = _read_pointer(root / "names" / f"{name}.json", root) if is_valid_name(name) else None
    if fingerprint is None:
        return None
    folder = root / fingerprint[:16]
    facts = read_manifest(folder)
    tokenizer_facts = facts["tokenizer_file"]
    tokenizer_file = str(folder / tokenizer_facts["file"]) if tokenizer_facts["file"] else None
    marked = "train_marks" in facts["shards"]
    return PreparedCorpus(
        name,
        fingerprint,
        facts["tokenizer"],
        tokenizer_facts["kind"],
        tokenizer_file,
        tokenizer_facts["end_of_text"],
        tokenizer_facts["vocabulary"],
        marked,
    )


def describe_computed(name: str, settings: Mapping[str, Any] | None = None) -> PreparedCorpus | None:
    """Return the facts of a registered computed corpus, which has a tokenizer of its own; None for any other corpus.

    Fingerprint is empty, file and end_of_text are None.

    Args:
        name: Name of the corpus.
        settings: Its valid settings, which may make its vocabulary smaller; None: the tokenizer's vocabulary.

    Raises:
        KeyError: No corpus of that name is registered.
    """
    kind = CORPORA.load(name)
    if kind.tokenizer is None:
        return None
    vocabulary = tokenizers.load_tokenizer(kind.tokenizer).vocabulary
    if settings is not None:
        vocabulary = kind.vocabulary(kind.Config.model_validate(settings)) or vocabulary
    return PreparedCorpus(name, "", kind.tokenizer, kind.tokenizer, None, None, vocabulary, kind.may_mark)


def named_fingerprints(root: Path) -> dict[str, str]:
    """Return the fingerprints of the corpora that were prepared under a name, by name, sorted by name.

    Names whose corpus was removed, and unreadable pointers, are left out.
    """
    fingerprints = {path.stem: _read_pointer(path, root) for path in sorted((root / "names").glob("*.json"))}
    return {name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint}


def write_pointer(root: Path, kind: str, name: str, fingerprint: str, **more: Any) -> None:
    """Record that a request or a name stands for a fingerprint.

    The file is `<root>/<kind>/<name>.json`; it replaces an older one.

    Args:
        root: Folder of the prepared corpora.
        kind: Folder of the pointer, "requests" or "names"; created if absent.
        name: File name without suffix.
        fingerprint: Fingerprint of the prepared corpus.
        more: Further keys of the JSON file.
    """
    folder = root / kind
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", {"fingerprint": fingerprint, **more})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: through a temporary file that replaces it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)


# --- prepared corpora ---------------------------------------------------------------------------------------------


def fingerprint_of(facts: dict[str, Any]) -> str:
    """Return the SHA-256 in hex over the manifest's facts that decide the tokens.

    These are the layout, the tokenizer's name, the names and ends of held-out documents, and the hash of every split.
    Marks count where there are any. Borders between shards count, because no row of training crosses one. For a
    computed corpus its settings and the hashes of its first rows count instead.
    """
    hashed = {name: facts[name] for name in ("layout", "tokenizer", "heldout_names", "heldout_ends")}
    if computed.KEY in facts:
        hashed[computed.KEY] = facts[computed.KEY]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
    for split in ("train", "validation", "heldout", *(name for name in MARK_SPLITS if name in facts["shards"])):
        hashes = [shard["sha256"] for shard in facts["shards"][split]]
        hashed[split] = hashes[0] if len(hashes) == 1 else hashes
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def with_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the manifest with its own checksum under `manifest_sha256`, which `read_manifest` verifies.

    A former checksum is replaced and does not count.
    """
    unsealed = {name: value for name, value in facts.items() if name != "manifest_sha256"}
    return unsealed | {"manifest_sha256": hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the verified manifest of a prepared corpus, its checksum included.

    Shards and tokenizer are not looked at.

    Raises:
        CorpusError: There is none, it is no JSON, or its checksum does not match.
    """
    path = folder / "manifest.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        is_intact = facts == with_checksum(facts)
    except OSError as error:
        raise CorpusError(f"no prepared corpus in {folder}; prepare it again, or launch the grid again") from error
    except (ValueError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CorpusError(f"{path}: damaged or of another version; {_PREPARE_AGAIN.format(folder=folder)}")
    return facts


def open_corpus(root: Path, fingerprint: str) -> Corpus:
    """Return a prepared corpus without verifying its tokens; of shards only header and size are checked.

    Training shards are memory-mapped. A validation or held-out split of several shards is read into memory.

    Args:
        root: Folder of the prepared corpora.
        fingerprint: Full fingerprint.

    Raises:
        CorpusError: The corpus is missing, its manifest is damaged or has another fingerprint, or the plugin of a
            computed corpus is not loaded.
        ShardError: A shard is missing or damaged.
    """
    folder = root / fingerprint[:16]
    facts = read_manifest(folder)
    if facts["fingerprint"] != fingerprint:
        raise CorpusError(
            f"{folder} holds corpus {facts['fingerprint'][:12]}, not {fingerprint[:12]}; {_PREPARE_AGAIN.format(folder=folder)}"
        )
    if fingerprint_of(facts) != fingerprint:
        raise CorpusError(
            f"{folder}: the fingerprint does not match the manifest; {_PREPARE_AGAIN.format(folder=folder)}"
        )
    common = {
        "fingerprint": fingerprint,
        "tokenizer": facts["tokenizer"],
        "folder": folder,
        "tokenizer_facts": facts["tokenizer_file"],
    }
    if computed.KEY in facts:
        return _computed_corpus(computed.open_streams(facts), common)
    splits = {
        split: [_open_checked_shard(folder, shard) for shard in shards] for split, shards in facts["shards"].items()
    }
    return Corpus(
        **common,
        train=splits["train"],
        validation=_join_shards(splits["validation"]),
        heldout=split_documents(_join_shards(splits["heldout"]), facts["heldout_ends"]),
        heldout_names=facts["heldout_names"],
        unigram_entropy=facts["unigram_entropy"],
        bigram_entropy=facts["bigram_entropy"],
        largest=max(shard["largest"] for shards in facts["shards"].values() for shard in shards),
        train_marks=splits.get("train_marks"),
        validation_marks=_join_shards(splits["validation_marks"]) if "validation_marks" in splits else None,
    )


def _computed_corpus(streams: Streams, common: dict[str, Any]) -> Corpus:
    """Return an open computed corpus: one training shard, no long documents, and marks where its streams have them.

    Args:
        streams: Its splits.
        common: Fields of `Corpus` that every kind of corpus has: fingerprint, tokenizer, folder and tokenizer_facts.
    """
    return Corpus(
        **common,
        train=[streams.train],
        validation=streams.validation,
        heldout=[],
        heldout_names=[],
        unigram_entropy=streams.unigram_entropy,
        bigram_entropy=streams.bigram_entropy,
        largest=streams.largest,
        train_marks=None if streams.train_marks is None else [streams.train_marks],
        validation_marks=streams.validation_marks,
        computed=True,
        expected_share=None if streams.train_marks is None else streams.marked_share,
    )


def open_verified(root: Path, fingerprint: str) -> Corpus:
    """Return a prepared corpus after comparing every token with the hashes of its manifest.

    100M tokens take a tenth of a second, once: `checked/` remembers size, inode and times of the files that were read,
    and an unchanged folder is not read again. A failed write there is ignored. Of a computed corpus only the first rows
    are compared.

    Raises:
        CorpusError: The corpus is missing or its contents differ from its manifest; the message has the first
            difference.
        ShardError: A shard is missing or damaged.
    """
    corpus = open_corpus(root, fingerprint)
    folder, note = root / fingerprint[:16], root / "checked" / f"{fingerprint[:16]}.json"
    states = _file_states(folder)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(note.read_text()) == states:
            return corpus
    problems = verify(folder)
    if problems:
        raise CorpusError(problems[0])
    with contextlib.suppress(OSError):  # without write access the corpus is read every time
        note.parent.mkdir(exist_ok=True)
        write_json(note, states)
    return corpus


def _file_states(folder: Path) -> dict[str, list[int]]:
    """Return [size, inode, mtime in ns, ctime in ns] of every file of a prepared corpus, by name."""
    statuses = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {
        name: [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns] for name, state in statuses.items()
    }


def _open_checked_shard(folder: Path, shard: dict[str, Any]) -> np.ndarray:
    """Return the memory-mapped tokens of a shard that the manifest names.

    Raises:
        ShardError: The shard is damaged or holds another number of tokens than the manifest says.
    """
    advice = _PREPARE_AGAIN.format(folder=folder)
    try:
        tokens = open_shard(folder / shard["file"])
    except ShardError as error:
        raise ShardError(f"{error}; {advice}") from error
    if len(tokens) != shard["tokens"]:
        raise ShardError(
            f"{folder / shard['file']}: {len(tokens)} tokens instead of the {shard['tokens']} that were prepared; {advice}"
        )
    return tokens


def _join_shards(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def split_documents(tokens: np.ndarray, ends: Sequence[int]) -> list[np.ndarray]:
    """Split a stream into documents, which are views; tokens after the last end belong to none.

    Args:
        tokens: The stream.
        ends: Position after the last token of each document, rising.
    """
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def verify(folder: Path) -> list[str]:
    """Read every token of a prepared corpus and return one line per difference from its manifest; empty if intact.

    Compared are the number of tokens, the hash and the largest token of each shard, the tokenizer's file, the
    fingerprint, and the first rows of a computed corpus. An unreadable shard or tokenizer is one of the lines; an
    unreadable manifest is the only one. Nothing is raised for them.
    """
    try:
        recorded = read_manifest(folder)
    except CorpusError as error:
        return [str(error)]
    problems = computed.differences(recorded, folder) if computed.KEY in recorded else []
    for shards in recorded["shards"].values():
        for shard in shards:
            try:
                current = asdict(read_shard_facts(folder / shard["file"]))
            except ShardError as error:
                problems.append(str(error))
                continue
            problems += [
                f"{folder / shard['file']}: {name} is {current[name]}, but {shard[name]} in the manifest"
                for name in ("tokens", "sha256", "largest")
                if current[name] != shard[name]
            ]
    tokenizer = recorded["tokenizer_file"]
    if not tokenizers.is_unchanged(tokenizer, folder):
        problems.append(f"{folder / tokenizer['file']}: {tokenizers.CHANGED}")
    if fingerprint_of(recorded) != recorded["fingerprint"] or folder.name != recorded["fingerprint"][:16]:
        problems.append(f"{folder}: the fingerprint does not match the manifest")
    return [f"{line}; {_PREPARE_AGAIN.format(folder=folder)}" for line in problems]


def folders(root: Path) -> list[Path]:
    """Return the folders of the corpora prepared under `root`, oldest manifest first.

    Their order is that of the manifests' modification times. Unfinished preparations (*.part) are left out. The
    manifests are not read.
    """
    try:
        # not glob, which from Python 3.13 on hides that a path is too long or may not be read
        manifests = [folder / "manifest.json" for folder in root.iterdir() if folder.suffix != ".part"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    manifests = [path for path in manifests if path.is_file()]
    return [path.parent for path in sorted(manifests, key=lambda path: path.stat().st_mtime)]


def listing(root: Path, fingerprints: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return a row for each corpus prepared under `root`, oldest first.

    Args:
        root: Folder of the prepared corpora.
        fingerprints: Fingerprints to list, of which the first 16 digits are compared; None lists all.

    Returns:
        Dicts with names (a list, empty without a name), corpus, path, heldout, tokenizer, heldout_documents (a number),
        fingerprint, folder (text), bytes and prepared_at (ISO 8601, UTC). `<split>_tokens` is there for train,
        validation and heldout, without marks. Bytes are the size of all files; targets of symlinks count, broken ones
        do not.

    Raises:
        CorpusError: A manifest is damaged.
    """
    names_by_fingerprint: dict[str, list[str]] = {}
    for name, fingerprint in named_fingerprints(root).items():
        names_by_fingerprint.setdefault(fingerprint, []).append(name)
    rows = []
    for folder in folders(root):
        if fingerprints is not None and folder.name not in {fingerprint[:16] for fingerprint in fingerprints}:
            continue
        facts = read_manifest(folder)
        tokens = computed.split_tokens(facts) | {
            split: sum(shard["tokens"] for shard in shards)
            for split, shards in facts["shards"].items()
            if split not in MARK_SPLITS
        }
        rows.append(
            {
                "names": names_by_fingerprint.get(facts["fingerprint"], []),
                "corpus": facts["request"]["corpus"],
                "path": facts["request"]["path"],
                "heldout": facts["request"]["heldout"],
                "tokenizer": facts["tokenizer"],
                **{f"{split}_tokens": count for split, count in tokens.items()},
                "heldout_documents": len(facts["heldout_ends"]),
                "fingerprint": facts["fingerprint"],
                "folder": str(folder),
                # shards of the user are symlinks, which may be broken by now
                "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.exists()),
                "prepared_at": facts["prepared_at"],
            }
        )
    return rows


def find_folders(root: Path, selector: str) -> list[Path]:
    """Return the folders of the prepared corpora that `selector` means, oldest first, at least one.

    Args:
        root: Folder of the prepared corpora.
        selector: A name given with --name, which means one folder. Else the name of a corpus as listed (`stdlib`,
            `files`), which means every folder prepared from it and those with an unreadable manifest. Else the
            beginning of a fingerprint, which must mean exactly one.

    Raises:
        CorpusError: No corpus matches, or several match the beginning of a fingerprint.
    """
    fingerprints = named_fingerprints(root)
    fingerprint = fingerprints.get(selector)
    if fingerprint:
        return [root / fingerprint[:16]]
    prepared_folders = folders(root)
    corpus_by_folder = {folder: _read_corpus_name(folder) for folder in prepared_folders}
    if selector in (*CORPORA, *corpus_by_folder.values()) and (
        of_kind := [folder for folder, kind in corpus_by_folder.items() if kind in (selector, None)]
    ):
        return of_kind
    matches = [folder for folder in prepared_folders if folder.name.startswith(selector[:16])]
    if len(matches) != 1 or (len(selector) > 16 and not read_manifest(matches[0])["fingerprint"].startswith(selector)):
        count_text = "more than one corpus" if len(matches) > 1 else "no corpus"
        raise CorpusError(f"{count_text} {selector!r} is prepared in {root}; list them with atma-sweep data list")
    return matches


def _read_corpus_name(folder: Path) -> str | None:
    """Return the corpus that a folder was prepared from; None for an unreadable manifest, which `verify` reports."""
    try:
        return str(json.loads((folder / "manifest.json").read_text())["request"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- reference values ---------------------------------------------------------------------------------------------


def entropies(shards: Sequence[np.ndarray], vocabulary: int) -> tuple[float, float | None]:
    """Return (unigram entropy, bigram conditional entropy H(x_t | x_{t-1})) of a stream in shards, nats per token.

    Both are the entropies of the observed frequencies, without a correction for the size of the sample. Pairs across a
    border between shards are not counted. The second is None above 1024 tokens of vocabulary, where counts describe the
    sample rather than the text.

    Args:
        shards: Tokens of each shard, below `vocabulary`.
        vocabulary: Number of token ids.
    """
    small = vocabulary <= 1024
    counts = np.zeros(vocabulary, dtype=np.int64)
    pairs = np.zeros(vocabulary**2 if small else 0, dtype=np.int64)
    for shard in shards:
        for start in range(0, len(shard), CHUNK_TOKENS):
            piece = np.asarray(shard[start : start + CHUNK_TOKENS + 1]).astype(np.int64)
            counts += np.bincount(piece[:CHUNK_TOKENS], minlength=vocabulary)
            if small:
                pairs += np.bincount(piece[:-1] * vocabulary + piece[1:], minlength=vocabulary**2)
    unigram = _entropy(counts)
    if not small:
        return unigram, None
    return unigram, _entropy(pairs) - _entropy(pairs.reshape(vocabulary, vocabulary).sum(1))


def _entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of a distribution given by counts of any shape."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
