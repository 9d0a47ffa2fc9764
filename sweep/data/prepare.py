"""Text into prepared corpora: documents drawn into splits, tokenised on all cores, written as shards, resumable."""

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

from ...results.console.output_files import translate_os_errors
from ...results.names import NAME_RULE, is_valid_name, quoted_short
from ..config import DataConfig
from ..host.hardware import cores
from . import computed, corpora
from . import tokenizer as tokenizers
from .corpora import Corpus, CorpusError
from .division import Division, PoolIndex, pieces
from .registry import CORPORA
from .shards import ShardError, ShardFacts, SplitWriter, find_mark_shards, open_shard, read_shard_facts, write_shard
from .sources import DocumentSource, Text, name_digest, name_fraction
from .tokenizer import Tokenizer

HELDOUT_DOCUMENTS = 64
"""Long documents that a corpus divided by names keeps at most, and that a corpus takes of one that lends them."""
POOL = "pool"
"""The documents of a corpus that is divided by tokens, before they are."""
VALIDATION_SHARE = 0.05
HELDOUT_SHARE = 0.25
BATCH_CHARACTERS = 8_000_000
BATCH_DOCUMENTS = 2000
SYNC_SECONDS = 5.0


@dataclass(frozen=True)
class Told:
    """How far a preparation is."""

    phase: str
    """tokenizing, long documents, reading shards, downloading."""
    documents: int
    tokens: int
    seconds: float
    """Of this run, without what an earlier one did."""
    new_tokens: int
    """Tokens of this run."""
    wanted: int | None
    """Training tokens asked for."""

    @property
    def rate(self) -> float:
        """Tokens per second of this run."""
        return self.new_tokens / max(self.seconds, 1e-9)


ProgressFn = Callable[[Told], None]


def prepare(
    data: DataConfig,
    root: Path,
    *,
    name: str | None = None,
    tell: ProgressFn = lambda progress: None,
    threads: int | None = None,
) -> str:
    """Prepares what `data` asks for under `root` unless it is there; returns its fingerprint.

    A preparation that was stopped goes on where it was. Two at once: the second waits for the first. Raises
    CorpusError, ShardError, TokenizerError for text, shards and files that cannot be used, MachineError when a
    download fails, WriteRefused when the machine does not let it be written.
    """
    kind = CORPORA.load(data.corpus) if data.corpus in CORPORA else None
    is_computed = kind is not None and kind.tokenizer is not None
    if name is not None and is_computed:
        raise CorpusError(f"--name: corpus {data.corpus} is worked out as it is read; a grid names it as it is")
    if name is not None and (name in CORPORA or not is_valid_name(name)):
        raise CorpusError(f"--name: {quoted_short(name)} must be {NAME_RULE}; and not the name of a known corpus")
    with translate_os_errors(root, "use"):
        fingerprint = corpora.find(data, root)
        if fingerprint is None:
            corpus_request = corpora.request(data)
            key = corpora.request_id(corpus_request)
            with _lock(root / f"{key}.lock"):
                fingerprint = corpora.find(data, root)
                if fingerprint is None:
                    preparation = Preparation(data, corpus_request, root / f"{key}.part", tell, threads)
                    fingerprint = preparation.write_manifest(root) if is_computed else preparation.run(root)
                corpora.write_pointer(root, "requests", key, fingerprint, request=corpus_request)
        if name is not None:
            corpora.write_pointer(root, "names", name, fingerprint)
        return fingerprint


def aside(data: DataConfig) -> Corpus:
    """The corpus without leaving anything on the disk, and so without a tokenizer, and without reference values; for small ones."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, translate_os_errors(Path(folder), "use"):
        kind, root = CORPORA.load(data.corpus), Path(folder)
        preparation = Preparation(
            data, corpora.request(data), root / "part", lambda progress: None, None, skip_entropies=True
        )
        fingerprint = preparation.write_manifest(root) if kind.tokenizer is not None else preparation.run(root)
        # shards that are open stay readable when their files are gone; where they do not, as on NFS, the folder stays
        return corpora.open_corpus(root, fingerprint)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def _initial_state(*, every_tenth: bool = False) -> dict[str, Any]:
    """The state before the first document; with `every_tenth` every tenth validates, whatever its name."""
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
    """One request on its way to a folder of shards; `state.json` in `part` is where it goes on."""

    data: DataConfig
    request: dict[str, Any]
    part: Path
    report: ProgressFn
    threads: int | None
    skip_entropies: bool = False
    """Whether the fingerprint alone is wanted, so that reference values of the text may be missing."""
    _writers: dict[str, SplitWriter] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)
    _index: PoolIndex = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _new_tokens: int = 0

    def run(self, root: Path) -> str:
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
        """Says what the rows of a corpus are that is worked out as it is read; there is nothing to prepare but that."""
        self.part.mkdir(parents=True, exist_ok=True)
        return self._seal(root, computed.build_manifest(self.request, self.part))

    # --- from documents -------------------------------------------------------------------------------------------

    def _load_state(self, source: DocumentSource | None) -> None:
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
        if POOL in self._writers:
            self._state["index"] = self._index.sync()
        self._state["splits"] |= {split: writer.sync() for split, writer in self._writers.items()}
        corpora.write_json(self.part / "state.json", self._state)

    def _tokenize_by_name(self, source: DocumentSource) -> dict[str, list[ShardFacts]]:
        if self._state["phase"] == "main":
            self._read_documents(source)
            if not self._state["tenth"] and not self._writers["validation"].tokens and self._writers["train"].tokens:
                # a small corpus may hash into one split only: every tenth text then validates
                self._restart(source)
            if not all(self._writers[split].tokens for split in ("train", "validation")):
                raise CorpusError(f"corpus {self.data.corpus!r} has too few documents: give at least two")
            self._close_splits()
        return self._closed_shards()

    def _tokenize_pool(self, source: DocumentSource) -> dict[str, list[ShardFacts]]:
        """Tokenise all documents into a pool, and divide it by tokens."""
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
        """Write the splits of the pool, from where it stopped on; the pool is removed when they are closed."""
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
        """Close training and validation; long documents of another corpus may follow."""
        self._state["phase"] = "long documents"
        self._state["splits"].pop(POOL, None)
        for split in ("train", "validation"):
            self._state["splits"][split] = [asdict(shard) for shard in self._writers.pop(split).close()]
        self._save_state()

    def _closed_shards(self) -> dict[str, list[ShardFacts]]:
        closed = self._state["splits"]
        return {split: [ShardFacts(**shard) for shard in closed[split]] for split in ("train", "validation")}

    def _read_documents(self, source: DocumentSource) -> None:
        saved = time.monotonic()
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
        """Without what a source puts into a split of its own that is full, or that another corpus lends."""
        for text in texts:
            lent = text.split == "heldout" and self.data.heldout is not None
            if not lent and not (text.split == "train" and self._has_enough()):
                yield text

    def _restart(self, source: DocumentSource) -> None:
        # said first, so that a death in the middle does not lead back to the pass that was in vain
        corpora.write_json(self.part / "state.json", _initial_state(every_tenth=True))
        self._writers.clear()
        self._load_state(source)
        self._read_documents(source)

    def _clear_folder(self) -> None:
        """Removes everything but the state, which speaks of none of it."""
        for path in self.part.iterdir():
            if path.name != "state.json":
                _remove(path)

    def encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        eot = np.array([self.tokenizer.eot], dtype=self.tokenizer.dtype)
        encoded = self.tokenizer.encode_batch([text.text for text in texts], self.threads or cores())
        return [np.concatenate([eot, ids]) for ids in encoded]

    def _append_document(self, text: Text, ids: np.ndarray) -> None:
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
        number, long = name_fraction(text.name), len(ids) >= self.data.heldout_tokens
        has_room = len(self._state["names"]) < HELDOUT_DOCUMENTS
        if self.data.heldout is None and number < HELDOUT_SHARE and long and has_room:
            return "heldout"
        if self._state["tenth"]:
            return "validation" if (index - len(self._state["names"])) % 10 == 0 else "train"
        return "validation" if number < VALIDATION_SHARE else "train"

    def _append_heldout(self, name: str, ids: np.ndarray) -> None:
        writer = self._writers["heldout"]
        writer.append(ids)
        self._state["names"].append(name)
        self._state["ends"].append(writer.tokens)

    def _has_enough(self) -> bool:
        if POOL in self._writers:
            return self._index.is_full()
        target = self.data.train_tokens
        return target is not None and self._writers["train"].tokens >= target

    def _report_progress(self, phase: str) -> None:
        closed = (state for state in self._state["splits"].values() if isinstance(state, list))
        tokens = sum(writer.tokens for writer in self._writers.values())
        tokens += sum(shard["tokens"] for shards in closed for shard in shards)
        seconds = time.monotonic() - self._began
        self.report(Told(phase, self._state["documents"], tokens, seconds, self._new_tokens, self.data.train_tokens))

    # --- long documents -------------------------------------------------------------------------------------------

    def _read_heldout_from(self, heldout_corpus: DocumentSource) -> None:
        """The lender's first long documents, in its order."""
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
                "lower data.heldout_tokens or name another"
            )

    def _write_heldout(self, *, sort: bool) -> list[ShardFacts]:
        """The held-out documents as one shard; a corpus's own in an order drawn from their names, no alphabetical one.

        What the writer made stays until the end, because `state.json` speaks of it.
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
        """Takes shards that others made into the folder, and reads each once."""
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
        """Takes a shard of marks; one a token, each 0 or 1."""
        marks = self._open_foreign_shard(path)
        if len(marks) != tokens:
            raise CorpusError(f"{path}: has {len(marks)} marks for the {tokens} tokens of its shard")
        self._link_shard(path, target)
        facts = read_shard_facts(target)
        if facts.largest > 1:
            raise CorpusError(f"{path}: holds {facts.largest}; a mark is 0 or 1")
        return facts

    def _open_foreign_shard(self, path: Path) -> np.ndarray:
        try:
            return open_shard(path)
        except ShardError as error:
            raise ShardError(f"{error}; fetch it again, or leave it out") from error

    def _link_shard(self, path: Path, target: Path) -> None:
        """What lies where the user says stays there alone; what was fetched or made stays though its first place goes."""
        target.unlink(missing_ok=True)
        if self.data.path is not None and not path.is_relative_to(self.part):
            target.symlink_to(path.resolve())
            return
        try:
            os.link(path.resolve(), target)
        except OSError:
            shutil.copyfile(path, target)

    def _adopt_shard(self, path: Path, target: Path) -> ShardFacts:
        self._open_foreign_shard(path)
        self._link_shard(path, target)
        facts = read_shard_facts(target)
        if facts.largest >= self.tokenizer.vocabulary:
            raise CorpusError(
                f"{path}: holds token {facts.largest}, but tokenizer {self.data.tokenizer} has {self.tokenizer.vocabulary} "
                "tokens; name the one that made it with data.tokenizer"
            )
        self._new_tokens += facts.tokens
        self._report_progress("reading shards")
        return facts

    # --- the end --------------------------------------------------------------------------------------------------

    def check_training_tokens(self, shards: dict[str, list[ShardFacts]]) -> None:
        target, available = self.data.train_tokens, sum(shard.tokens for shard in shards["train"])
        if target is not None and available < target:
            raise CorpusError(
                f"corpus {self.data.corpus!r} has {available} training tokens; data.train_tokens asks for {target}"
            )

    def _commit(self, root: Path, shards: dict[str, list[ShardFacts]]) -> str:
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
        manifest |= {"request": self.request, "prepared_at": datetime.now(UTC).isoformat(timespec="seconds")}
        manifest["fingerprint"] = corpora.fingerprint_of(manifest)
        # from here on the corpus is whole, and what is left is to say so
        corpora.write_json(self.part / "manifest.json", corpora.sealed(manifest))
        return self._publish(root, manifest)

    def _publish(self, root: Path, manifest: dict[str, Any]) -> str:
        """Removes what the manifest does not name, and gives the folder its name."""
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
                # the same tokens were prepared from another place
                shutil.rmtree(self.part)
            else:
                shutil.rmtree(folder)
                os.rename(self.part, folder)
        return fingerprint


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_complete(root: Path, fingerprint: str) -> bool:
    try:
        corpora.open_corpus(root, fingerprint)
    except (CorpusError, ShardError):
        return False
    return True


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    """A few megabytes at a time; nothing is read ahead, so that a source's state fits what was given out."""
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
