"""Resumable preparation of corpora: documents are divided into splits, tokenised on all cores and written as shards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...results.console.cores import usable_cores
from ...results.console.output_files import translate_os_errors
from ...results.names import NAME_RULE, is_valid_name, quoted_short
from ..config import DataConfig
from . import computed, corpora
from . import tokenizer as tokenizers
from .corpora import Corpus, CorpusError
from .division import Division, PoolIndex, pieces
from .registry import CORPORA
from .shards import ShardError, ShardFacts, SplitWriter, find_mark_shards, open_shard, read_shard_facts, write_shard
from .sources import DocumentSource, Text, name_digest, name_fraction
from .tokenizer import Tokenizer

HELDOUT_DOCUMENTS = 64
"""Maximum of held-out documents in a corpus divided by names, and default maximum of those read from another corpus."""
POOL = "pool"
"""Name of the split that holds the documents of a corpus divided by tokens, before the division."""
VALIDATION_SHARE = 0.05
"""Share of the documents that validate in a corpus divided by names."""
HELDOUT_SHARE = 0.25
"""Share of the documents that may be held out in a corpus divided by names."""
BATCH_CHARACTERS = 8_000_000
"""Characters of a batch of documents at which it is tokenised."""
BATCH_DOCUMENTS = 2000
"""Maximum number of documents in a batch."""
SYNC_SECONDS = 5.0
"""Minimum time between two saved states."""


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a corpus preparation: phase, documents, tokens and rate."""

    phase: str
    """Current phase: tokenizing, long documents, reading shards or downloading."""
    documents: int
    """Documents so far, earlier runs included."""
    tokens: int
    """Tokens so far, earlier runs included."""
    seconds: float
    """Duration of this run, without earlier ones."""
    new_tokens: int
    """Tokens of this run."""
    target_tokens: int | None
    """Requested training tokens; None: all."""
    read_share: float | None = None
    """Share of the text that was read, 0 to 1; None if its size is unknown."""

    @property
    def share(self) -> float | None:
        """Completed share of the preparation, 0 to 1: of the requested tokens, or of the text if that ends first."""
        shares = [self.tokens / self.target_tokens] if self.target_tokens else []
        shares += [self.read_share] if self.read_share is not None else []
        return min(1.0, max(shares)) if shares else None

    @property
    def rate(self) -> float:
        """Tokens per second of this run."""
        return self.new_tokens / max(self.seconds, 1e-9)


ProgressFn = Callable[[PrepareProgress], None]
"""Callback that receives the progress of a preparation."""


def prepare(
    data: DataConfig,
    root: Path,
    *,
    name: str | None = None,
    report: ProgressFn = lambda progress: None,
    threads: int | None = None,
) -> str:
    """Prepare the corpus that `data` asks for under `root`, unless it is there, and return its full fingerprint.

    Blocks until it is done. A stopped preparation resumes. A lock file makes a second preparation of the same request
    wait for the first. A corpus that exists already is not verified, and gets `name` all the same.

    Args:
        data: Data section of the config.
        root: Folder of the prepared corpora.
        name: Name to record for the corpus, in place of an earlier corpus of that name; None records none.
        report: Callback for progress, called after each batch of documents or shard, on this thread.
        threads: Threads of the tokenizer; None: one per core.

    Raises:
        CorpusUnknown: `data.corpus` is neither registered nor the name of a prepared corpus.
        CorpusError: The text or the name cannot be used.
        ShardError: A token shard cannot be used.
        TokenizerError: The tokenizer file cannot be used.
        MachineError: A download failed.
        WriteRefused: The operating system refused a write.
    """
    kind = CORPORA.load(data.corpus) if data.corpus in CORPORA else None
    is_computed = kind is not None and kind.tokenizer is not None
    if name is not None and is_computed:
        raise CorpusError(
            f"--name: corpus {data.corpus} is generated, not prepared, and takes no name; set data.corpus: {data.corpus} in the grid"
        )
    if name is not None and (name in CORPORA or not is_valid_name(name)):
        raise CorpusError(
            f"--name: {quoted_short(name)} must be {NAME_RULE}, and must not be the name of a known corpus"
        )
    with translate_os_errors(root, "use"):
        fingerprint = corpora.find_fingerprint(data, root)
        if fingerprint is None:
            corpus_request = corpora.request(data)
            key = corpora.request_id(corpus_request)
            with _lock(root / f"{key}.lock"):
                fingerprint = corpora.find_fingerprint(data, root)
                if fingerprint is None:
                    preparation = Preparation(data, corpus_request, root / f"{key}.part", report, threads)
                    fingerprint = preparation.write_manifest(root) if is_computed else preparation.run(root)
                corpora.write_pointer(root, "requests", key, fingerprint, request=corpus_request)
        if name is not None:
            corpora.write_pointer(root, "names", name, fingerprint)
        return fingerprint


def prepare_in_memory(data: DataConfig) -> Corpus:
    """Prepare a small corpus, with one tokenizer thread per core, and return it open.

    Its files exist in a temporary folder only while it is prepared. So `load_tokenizer` of the result fails unless the
    tokenizer needs no file, and its entropies are None unless its rows are computed.

    Raises:
        CorpusError: The text cannot be used; further errors as for `prepare`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, translate_os_errors(Path(folder), "use"):
        kind, root = CORPORA.load(data.corpus), Path(folder)
        preparation = Preparation(
            data, corpora.request(data), root / "part", lambda progress: None, None, skip_entropies=True
        )
        fingerprint = preparation.write_manifest(root) if kind.tokenizer is not None else preparation.run(root)
        # open shards stay readable after their files are removed; where they do not, as on NFS, the folder stays
        return corpora.open_corpus(root, fingerprint)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; wait for it if another process or thread holds it.

    The file and its folder are created first. The file is removed after success, and stays after an exception.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def _initial_state(*, every_tenth: bool = False) -> dict[str, Any]:
    """Return the state before the first document.

    Its keys are phase ("main"), source (position of the source, None: its start), documents (number so far), tenth,
    splits (writer's state or closed shards by split), and names and ends of the held-out documents.

    Args:
        every_tenth: Let every tenth document validate, whatever its name; stored as tenth.
    """
    return {
        "phase": "main",
        "source": None,
        "documents": 0,
        "tenth": every_tenth,
        "splits": {},
        "names": [],
        "ends": [],
    }


@dataclass
class Preparation:
    """Preparation of one request into a folder of shards; `state.json` in `part` records where to resume."""

    data: DataConfig
    """Data section of the config."""
    request: dict[str, Any]
    """Result of `corpora.request`, which the manifest records."""
    part: Path
    """Working folder, which becomes the folder of the corpus."""
    report: ProgressFn
    """Callback for progress."""
    threads: int | None
    """Threads of the tokenizer; None: one per core."""
    skip_entropies: bool = False
    """Leave the entropies of the text out, for use of the fingerprint or tokens alone."""
    _writers: dict[str, SplitWriter] = field(default_factory=dict)
    """Open writers by split."""
    _state: dict[str, Any] = field(default_factory=dict)
    """Contents of `state.json`."""
    _index: PoolIndex = field(init=False)
    """Documents of the pool, for a corpus divided by tokens."""
    _began: float = field(default_factory=time.monotonic)
    """Monotonic time at the start of this run, in seconds."""
    _new_tokens: int = 0
    """Tokens of this run."""
    _read_share: Callable[[], float | None] = lambda: None
    """Function that returns the share of the source that was read."""

    def run(self, root: Path) -> str:
        """Prepare a corpus of documents or shards, from where an earlier run stopped, and return its fingerprint.

        The working folder becomes the folder of the corpus. If it already holds a manifest, only that step is left.

        Args:
            root: Folder of the prepared corpora.

        Raises:
            CorpusError: The text does not suffice for the requested splits.
            ShardError: A token shard cannot be used.
            TokenizerError: The tokenizer file cannot be used.
            MachineError: A download failed.
        """
        data = self.data
        self.tokenizer: Tokenizer = tokenizers.load_tokenizer(data.tokenizer, data.tokenizer_file, data.end_of_text)
        self.part.mkdir(parents=True, exist_ok=True)
        if (self.part / "manifest.json").exists():
            return self._publish(root, json.loads((self.part / "manifest.json").read_text()))
        source, heldout_corpus = corpora.source_of(data), corpora.heldout_source(data)
        self._load_state(source)
        if source is None:
            shards = self._adopt_shards()
        else:
            shards = self._tokenize_pool(source) if self._is_by_tokens else self._tokenize_by_name(source)
        if heldout_corpus is not None:
            self._read_heldout_from(heldout_corpus)
        shards["heldout"] = self._write_heldout(sort=heldout_corpus is None)
        self.check_training_tokens(shards)
        return self._commit(root, shards)

    def write_manifest(self, root: Path) -> str:
        """Write the manifest of a computed corpus, which needs no other preparation, and return its fingerprint."""
        self.part.mkdir(parents=True, exist_ok=True)
        return self._seal(root, computed.build_manifest(self.request, self.part))

    # --- from documents -------------------------------------------------------------------------------------------

    def _load_state(self, source: DocumentSource | None) -> None:
        """Load `state.json` and open the writers of the splits that are not closed yet.

        A missing or unreadable file means the initial state. Without saved splits the working folder is cleared first.

        Args:
            source: Source of the documents; None for a corpus of shards, which writes only held-out documents.
        """
        try:
            self._state = json.loads((self.part / "state.json").read_text())
        except (OSError, ValueError):
            self._state = _initial_state()
        if not self._state["splits"]:
            self._clear_folder()
        splits = ("heldout",) if source is None else ("train", "validation", "heldout")
        if self._is_by_tokens and self._state["phase"] in ("main", "dividing"):
            splits = (POOL,) if self._state["phase"] == "main" else splits
            self._index = PoolIndex(self.part / "documents.jsonl", Division.of(self.data), self._state.get("index", 0))
        for split in splits:
            state = self._state["splits"].get(split)
            if isinstance(state, list):
                continue  # closed already
            self._writers[split] = SplitWriter(self.part, split, self.tokenizer.dtype, state=state)

    @property
    def _is_by_tokens(self) -> bool:
        return corpora.is_by_tokens(self.data)

    def _save_state(self) -> None:
        """Sync all writers to the disk, then write `state.json` atomically, so that it never names lost tokens."""
        if POOL in self._writers:
            self._state["index"] = self._index.sync()
        self._state["splits"] |= {split: writer.sync() for split, writer in self._writers.items()}
        corpora.write_json(self.part / "state.json", self._state)

    def _tokenize_by_name(self, source: DocumentSource) -> dict[str, list[ShardFacts]]:
        """Tokenise each document into the split that its name decides; return the training and validation shards.

        If no document validates, all are read again and every tenth validates. A part that an earlier run finished is
        not repeated.

        Returns:
            Facts of the shards, in order, under "train" and "validation".

        Raises:
            CorpusError: The corpus has too few documents.
        """
        if self._state["phase"] == "main":
            self._read_documents(source)
            if not self._state["tenth"] and not self._writers["validation"].tokens and self._writers["train"].tokens:
                # the names of a small corpus may all hash into one split: every tenth document then validates
                self._restart(source)
            if not all(self._writers[split].tokens for split in ("train", "validation")):
                raise CorpusError(f"corpus {self.data.corpus!r} has too few documents: give at least two")
            self._close_splits()
        return self._closed_shards()

    def _tokenize_pool(self, source: DocumentSource) -> dict[str, list[ShardFacts]]:
        """Tokenise all documents into a pool, divide it by tokens, and return the shards of training and validation.

        Reading stops early once the training split is sure to get the requested tokens. A part that an earlier run
        finished is not repeated.

        Returns:
            Facts of the shards, in order, under "train" and "validation".

        Raises:
            CorpusError: The text has too few documents or tokens for the requested sizes.
        """
        if self._state["phase"] == "main":
            self._read_documents(source)
            self._state["index"] = self._index.sync()
            shards = self._writers.pop(POOL).close()
            self._state |= {"phase": "dividing", "divided": 0, "splits": {POOL: [asdict(shard) for shard in shards]}}
            for split in ("train", "validation", "heldout"):
                self._writers[split] = SplitWriter(self.part, split, self.tokenizer.dtype)
            self._save_state()
        if self._state["phase"] == "dividing":
            self.divide()
        return self._closed_shards()

    def divide(self) -> None:
        """Write the splits of the pool, resuming where it stopped; the pool is removed once they are closed.

        The training split is cut at `data.train_tokens`. The state is saved every 5 s (SYNC_SECONDS).

        Raises:
            CorpusError: The text has too few documents or tokens for the requested sizes.
        """
        documents = self._index.documents
        self._index.close()
        splits = self._index.division.assign(documents)
        paths = [self.part / shard["file"] for shard in self._state["splits"][POOL]]
        saved = time.monotonic()
        for end, split, tokens in pieces(
            [open_shard(path) for path in paths], documents, splits, self._state["divided"]
        ):
            if split == "heldout":
                self._append_heldout(documents[end - 1].name, tokens)
            elif split == "train" and self.data.train_tokens is not None:
                self._writers[split].append(tokens[: self.data.train_tokens - self._writers[split].tokens])
            else:
                self._writers[split].append(tokens)
            self._state["divided"] = end
            if time.monotonic() - saved > SYNC_SECONDS:
                self._save_state()
                saved = time.monotonic()
        self._close_splits()
        for path in paths:
            path.unlink()

    def _close_splits(self) -> None:
        """Close training and validation and save the state; held-out documents of another corpus may follow."""
        self._state["phase"] = "long documents"
        self._state["splits"].pop(POOL, None)
        for split in ("train", "validation"):
            self._state["splits"][split] = [asdict(shard) for shard in self._writers.pop(split).close()]
        self._save_state()

    def _closed_shards(self) -> dict[str, list[ShardFacts]]:
        """Return the closed shards of training and validation, by split."""
        closed = self._state["splits"]
        return {split: [ShardFacts(**shard) for shard in closed[split]] for split in ("train", "validation")}

    def _read_documents(self, source: DocumentSource) -> None:
        """Tokenise and append documents until the source ends or the training split has enough tokens.

        Documents with a split of their own do not end the reading. Reports progress after each batch, and saves the
        state after a batch if 5 s (SYNC_SECONDS) have passed and the source can resume.
        """
        saved = time.monotonic()
        self._read_share = source.read_share
        for texts in _batches(self._drop_unused(source.documents(self._state["source"]))):
            for text, ids in zip(texts, self.encode(texts), strict=True):
                self._append_document(text, ids)
                if text.split is None and self._has_enough():
                    self._report_progress("tokenizing")
                    return
            self._report_progress("tokenizing")
            source_state = source.state()
            if source_state is not None and time.monotonic() - saved > SYNC_SECONDS:
                self._state["source"] = source_state
                self._save_state()
                saved = time.monotonic()

    def _drop_unused(self, texts: Iterator[Text]) -> Iterator[Text]:
        """Yield the documents that are needed.

        Held-out documents of the source are dropped if another corpus provides those. Documents that the source gives
        to training are dropped once there are enough.
        """
        for text in texts:
            is_replaced = text.split == "heldout" and self.data.heldout is not None
            if not is_replaced and not (text.split == "train" and self._has_enough()):
                yield text

    def _restart(self, source: DocumentSource) -> None:
        """Read all documents again with every tenth for validation; the tokens so far are dropped."""
        # saved first, so that a crash from here on does not repeat the first pass
        corpora.write_json(self.part / "state.json", _initial_state(every_tenth=True))
        self._writers.clear()
        self._load_state(source)
        self._read_documents(source)

    def _clear_folder(self) -> None:
        """Remove everything from the working folder except `state.json`, which refers to none of it."""
        for path in self.part.iterdir():
            if path.name != "state.json":
                _remove(path)

    def encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return the tokens of each document, in order, preceded by the end-of-text token, in the tokenizer's type."""
        eot = np.array([self.tokenizer.eot], dtype=self.tokenizer.dtype)
        encoded = self.tokenizer.encode_batch([text.text for text in texts], self.threads or usable_cores())
        return [np.concatenate([eot, ids]) for ids in encoded]

    def _append_document(self, text: Text, ids: np.ndarray) -> None:
        """Append a tokenised document to the pool or to the split that its source or its name decides.

        Training documents are cut at, or dropped beyond, the requested number of tokens. Dropped ones are not counted.

        Args:
            text: The document.
            ids: Its tokens, the leading end-of-text token included.
        """
        if POOL in self._writers:
            self._state["documents"] += 1
            self._new_tokens += len(ids)
            self._index.add(text.name, len(ids), text.split)
            self._writers[POOL].append(ids)
            return
        split = text.split or self._choose_split(text, ids, self._state["documents"])
        if split == "train" and self.data.train_tokens is not None:
            if self._has_enough():
                return
            ids = ids[: self.data.train_tokens - self._writers["train"].tokens]
        self._state["documents"] += 1
        self._new_tokens += len(ids)
        if split == "heldout":
            self._append_heldout(text.name, ids)
        else:
            self._writers[split].append(ids)

    def _choose_split(self, text: Text, ids: np.ndarray, index: int) -> str:
        """Return the split of a document by the hash of its name: "train", "validation" or "heldout".

        A document is held out if its fraction (`name_fraction`, uniform in [0, 1)) is below 0.25, it is long enough,
        fewer than 64 are held out so far, and no other corpus provides them. Otherwise it validates if its fraction is
        below 0.05; with the state `tenth` instead if it is a tenth one of those not held out, the first included.

        Args:
            text: The document.
            ids: Its tokens; at least `data.heldout_tokens` of them are long enough.
            index: Number of documents before it.
        """
        fraction, is_long = name_fraction(text.name), len(ids) >= self.data.heldout_tokens
        has_room = len(self._state["names"]) < HELDOUT_DOCUMENTS
        if self.data.heldout is None and fraction < HELDOUT_SHARE and is_long and has_room:
            return "heldout"
        if self._state["tenth"]:
            return "validation" if (index - len(self._state["names"])) % 10 == 0 else "train"
        return "validation" if fraction < VALIDATION_SHARE else "train"

    def _append_heldout(self, name: str, ids: np.ndarray) -> None:
        """Append a held-out document to its split, and its name and its end in that split to the state.

        Args:
            name: Name of the document.
            ids: Its tokens, the leading end-of-text token included.
        """
        writer = self._writers["heldout"]
        writer.append(ids)
        self._state["names"].append(name)
        self._state["ends"].append(writer.tokens)

    def _has_enough(self) -> bool:
        """Return True if the training split has the requested tokens; always False without a requested number.

        With a pool it is true once the split is sure to get them (`PoolIndex.is_full`).
        """
        if POOL in self._writers:
            return self._index.is_full()
        target = self.data.train_tokens
        return target is not None and self._writers["train"].tokens >= target

    def _report_progress(self, phase: str) -> None:
        """Call the progress callback with the current totals: documents, tokens of all splits, and seconds of this run.

        Args:
            phase: Name of the phase, for `PrepareProgress.phase`.
        """
        closed = (state for state in self._state["splits"].values() if isinstance(state, list))
        tokens = sum(writer.tokens for writer in self._writers.values())
        tokens += sum(shard["tokens"] for shards in closed for shard in shards)
        seconds = time.monotonic() - self._began
        self.report(
            PrepareProgress(
                phase, self._state["documents"], tokens, seconds, self._new_tokens, self.data.train_tokens,
                self._read_share(),
            )
        )  # fmt: skip

    # --- long documents -------------------------------------------------------------------------------------------

    def _read_heldout_from(self, heldout_corpus: DocumentSource) -> None:
        """Append the first long documents of another corpus, in its order, as held-out documents.

        Long are those of at least `data.heldout_tokens` tokens. At most `data.heldout_documents` are taken, by default
        64 (`HELDOUT_DOCUMENTS`); 0 takes none. Documents that are already held out count.

        Raises:
            CorpusError: It has no document of `data.heldout_tokens` tokens.
        """
        max_documents = HELDOUT_DOCUMENTS if self.data.heldout_documents is None else self.data.heldout_documents
        # no tokenizer makes more than four tokens of a character
        for texts in _batches(
            text for text in heldout_corpus.documents() if 4 * len(text.text) + 1 >= self.data.heldout_tokens
        ):
            for text, ids in zip(texts, self.encode(texts), strict=True):
                if len(ids) >= self.data.heldout_tokens and len(self._state["names"]) < max_documents:
                    self._new_tokens += len(ids)
                    self._append_heldout(text.name, ids)
            self._report_progress("long documents")
            if len(self._state["names"]) >= max_documents:
                break
        if not self._state["names"] and max_documents:
            raise CorpusError(
                f"data.heldout: {self.data.heldout} has no document of {self.data.heldout_tokens} tokens; "
                "lower data.heldout_tokens or name another text"
            )

    def _write_heldout(self, *, sort: bool) -> list[ShardFacts]:
        """Write the held-out documents as one shard, which can be empty, and return its facts in a list.

        Also updates names and ends of the documents in the state. The files of the writer stay until the end, because
        `state.json` refers to them.

        Args:
            sort: Order documents by the hashes of their names, so that the order is random and not alphabetical.
        """
        parts = [open_shard(self.part / shard.file) for shard in self._writers.pop("heldout").close()]
        tokens = np.concatenate(parts)
        pairs = list(zip(self._state["names"], corpora.split_documents(tokens, self._state["ends"]), strict=True))
        if sort:
            pairs.sort(key=lambda pair: name_digest(pair[0]))
        path = self.part / "heldout.bin"
        write_shard(path, np.concatenate([tokens[:0], *(document for _, document in pairs)]))
        self._state["names"] = [name for name, _ in pairs]
        self._state["ends"] = np.cumsum([len(document) for _, document in pairs]).tolist()
        return [read_shard_facts(path)]

    # --- ready-made shards ----------------------------------------------------------------------------------------

    def _adopt_shards(self) -> dict[str, list[ShardFacts]]:
        """Link ready-made shards and their marks into the working folder, read each once, and return them by split.

        Training shards are taken in order until they hold the requested tokens; the last one is not cut. All validation
        shards are taken.

        Returns:
            Facts of the shards, in order, under "train" and "validation"; also under "train_marks" and
            "validation_marks" if the shards have marks and the corpus may mark.

        Raises:
            CorpusError: A shard does not fit the tokenizer or its marks.
            ShardError: A file is no shard.
            MachineError: A download failed.
        """
        kind = CORPORA.load(self.data.corpus)
        work_folder = self.part / "made"
        work_folder.mkdir(exist_ok=True)
        train, validation = kind.shards(self.data, work_folder, self._report_progress)
        train_paths, n_tokens = [], 0
        for path in train:
            if self.data.train_tokens is not None and n_tokens >= self.data.train_tokens:
                break
            n_tokens += len(self._open_foreign_shard(path))
            train_paths.append(path)
        adopted: dict[str, list[ShardFacts]] = {}
        for split, paths in (("train", train_paths), ("validation", validation)):
            adopted[split] = []
            for index, path in enumerate(paths):
                adopted[split].append(self._adopt_shard(path, self.part / f"{split}_{index:06d}.bin"))
        if kind.may_mark and find_mark_shards([*train, *validation]):
            for split, paths in (("train", train_paths), ("validation", validation)):
                tokens = adopted[split]
                adopted[f"{split}_marks"] = [
                    self._adopt_marks(path, self.part / f"{split}_marks_{index:06d}.bin", tokens[index].tokens)
                    for index, path in enumerate(find_mark_shards(paths))
                ]
        return adopted

    def _adopt_marks(self, path: Path, target: Path, tokens: int) -> ShardFacts:
        """Link a shard of marks into the working folder and return its facts.

        Args:
            path: The shard of marks.
            target: Path in the working folder.
            tokens: Tokens of the marked shard.

        Raises:
            CorpusError: It does not hold one mark per token, each 0 or 1.
        """
        marks = self._open_foreign_shard(path)
        if len(marks) != tokens:
            raise CorpusError(f"{path}: has {len(marks)} marks for the {tokens} tokens of its shard")
        self._link_shard(path, target)
        facts = read_shard_facts(target)
        if facts.largest > 1:
            raise CorpusError(f"{path}: holds the value {facts.largest}, but marks must be 0 or 1")
        return facts

    def _open_foreign_shard(self, path: Path) -> np.ndarray:
        """Return the tokens of a ready-made shard; raise ShardError with advice if it is damaged."""
        try:
            return open_shard(path)
        except ShardError as error:
            raise ShardError(f"{error}; fetch the file again, or remove it") from error

    def _link_shard(self, path: Path, target: Path) -> None:
        """Make a shard available at `target`, in place of what is there.

        A file of the user's own folder is symlinked. A downloaded or created file is hard-linked, or copied where that
        fails, so that it survives the removal of its first path.
        """
        target.unlink(missing_ok=True)
        if self.data.path is not None and not path.is_relative_to(self.part):
            target.symlink_to(path.resolve())
            return
        try:
            os.link(path.resolve(), target)
        except OSError:
            shutil.copyfile(path, target)

    def _adopt_shard(self, path: Path, target: Path) -> ShardFacts:
        """Link a shard of tokens into the working folder, read it once, report progress and return its facts.

        Args:
            path: The ready-made shard.
            target: Path in the working folder, which is replaced.

        Raises:
            CorpusError: It holds a token that the tokenizer does not have.
            ShardError: The file is no shard.
        """
        self._open_foreign_shard(path)
        self._link_shard(path, target)
        facts = read_shard_facts(target)
        if facts.largest >= self.tokenizer.vocabulary:
            raise CorpusError(
                f"{path}: holds token {facts.largest}, but tokenizer {self.data.tokenizer} has {self.tokenizer.vocabulary} "
                "tokens; set data.tokenizer to the one that made the shard"
            )
        self._new_tokens += facts.tokens
        self._report_progress("reading shards")
        return facts

    # --- manifest and publication ---------------------------------------------------------------------------------

    def check_training_tokens(self, shards: dict[str, list[ShardFacts]]) -> None:
        """Check that the training split has the requested tokens; without a requested number pass.

        Args:
            shards: Facts of the shards by split, of which "train" is used.

        Raises:
            CorpusError: It has fewer.
        """
        target, available = self.data.train_tokens, sum(shard.tokens for shard in shards["train"])
        if target is not None and available < target:
            raise CorpusError(
                f"corpus {self.data.corpus!r} has {available} training tokens; data.train_tokens requests {target}"
            )

    def _commit(self, root: Path, shards: dict[str, list[ShardFacts]]) -> str:
        """Write the manifest of the finished shards, publish the folder, and return the fingerprint.

        The manifest has layout, tokenizer, tokenizer_file, shards, heldout_names, heldout_ends, unigram_entropy,
        bigram_entropy (both None with `skip_entropies`) and documents, and the keys that `_seal` adds. Saves the
        tokenizer's file.

        Args:
            root: Folder of the prepared corpora.
            shards: Facts of all shards by split.
        """
        train = [open_shard(self.part / shard.file) for shard in shards["train"]]
        unigram, bigram = (None, None) if self.skip_entropies else corpora.entropies(train, self.tokenizer.vocabulary)
        manifest: dict[str, Any] = {
            "layout": corpora.LAYOUT,
            "tokenizer": self.tokenizer.name,
            "tokenizer_file": tokenizers.store_tokenizer(self.tokenizer, self.part),
            "shards": {split: [asdict(shard) for shard in split_shards] for split, split_shards in shards.items()},
            "heldout_names": self._state["names"],
            "heldout_ends": self._state["ends"],
            "unigram_entropy": unigram,
            "bigram_entropy": bigram,
            "documents": self._state["documents"],
        }
        return self._seal(root, manifest)

    def _seal(self, root: Path, manifest: dict[str, Any]) -> str:
        """Complete and write a manifest, publish the folder, and return the fingerprint.

        Adds request, prepared_at (ISO 8601, UTC), fingerprint and manifest_sha256. From then on a stopped preparation
        only publishes.

        Args:
            root: Folder of the prepared corpora.
            manifest: The other facts; changed in place, but for manifest_sha256.
        """
        manifest |= {"request": self.request, "prepared_at": datetime.now(UTC).isoformat(timespec="seconds")}
        manifest["fingerprint"] = corpora.fingerprint_of(manifest)
        # from here on the corpus is complete, and only its publication remains
        corpora.write_json(self.part / "manifest.json", corpora.with_checksum(manifest))
        return self._publish(root, manifest)

    def _publish(self, root: Path, manifest: dict[str, Any]) -> str:
        """Rename the working folder to the fingerprint's first 16 digits under `root`, and return the full fingerprint.

        Files that the manifest does not name are removed first. A complete folder of the same fingerprint is kept in
        place of this one; an incomplete one is replaced.

        Args:
            root: Folder of the prepared corpora.
            manifest: The complete manifest.
        """
        fingerprint: str = manifest["fingerprint"]
        named_files = {"manifest.json", manifest["tokenizer_file"]["file"]}
        named_files |= {shard["file"] for shards in manifest["shards"].values() for shard in shards}
        for path in self.part.iterdir():
            if path.name not in named_files:
                _remove(path)
        folder = root / fingerprint[:16]
        try:
            os.rename(self.part, folder)
        except OSError:
            if not folder.is_dir():
                raise
            if _is_complete(root, fingerprint):
                # the same tokens were prepared from another source
                shutil.rmtree(self.part)
            else:
                shutil.rmtree(folder)
                os.rename(self.part, folder)
        return fingerprint


def _remove(path: Path) -> None:
    """Remove a file, a symlink or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_complete(root: Path, fingerprint: str) -> bool:
    """Return True if the corpus with that fingerprint can be opened; its tokens are not verified."""
    try:
        corpora.open_corpus(root, fingerprint)
    except (CorpusError, ShardError):
        return False
    return True


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """Yield the documents in batches, which end at 8 million characters or 2,000 documents.

    Nothing is read ahead, so that the source's state matches the documents already yielded. The last batch can be
    smaller.
    """
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
