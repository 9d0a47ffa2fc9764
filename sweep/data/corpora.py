"""Prepared corpora: three splits of tokens (training, validation, long held-out documents) with one fingerprint.

They lie in one folder: `<fingerprint>/` with shards, tokenizer and manifest.json; `requests/` says which request led to
which fingerprint, `names/` what `data prepare --name` called it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
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
from .registry import CORPORA, every_kind
from .shards import CHUNK_TOKENS, ShardError, open_shard, read_shard_facts
from .sources import CorpusError, DocumentSource, FileSource
from .tokenizer import Tokenizer

MARK_SPLITS = ("train_marks", "validation_marks")
PROVISIONAL = "unprepared:"
"""Begins what stands for the fingerprint of a corpus that is not prepared."""
LAYOUT = 1
"""Enters the fingerprint; raise it when the same text would be split or tokenised differently."""

UNMARKED = (
    "it marks no tokens, but train.loss_on is marked; set that to all, or give each shard NAME.bin a NAME.marks.bin"
)

_PREPARE_AGAIN = "remove {folder} and prepare the corpus again"


class CorpusUnknown(CorpusError):
    """A corpus name that is neither built in nor prepared here."""

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        self.name, self.allowed = name, list(allowed)
        super().__init__(
            f"no corpus {name!r}; allowed: {', '.join(self.allowed)}, or one prepared with `data prepare PATH --name {name}`"
            + did_you_mean(name, self.allowed, shown=repr)
        )


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    `train` and `validation` are streams of documents, each led by the end-of-text token; `heldout` are whole documents,
    led by it too, in the order in which probes take them. All uint16, or uint32 for a large vocabulary.
    The rows of some corpora are worked out as they are read: nothing of those lies on a disk.
    """

    fingerprint: str
    tokenizer: str
    train: Sequence[Stream]
    """Shards, in order; a row of training never crosses from one to the next."""
    validation: Stream
    heldout: list[np.ndarray]
    heldout_names: list[str]
    unigram_entropy: float
    """Nats per token of the training split."""
    bigram_entropy: float | None
    """Conditional entropy of a token given the one before, nats; None for vocabularies too large to count."""
    largest: int = -1
    """Largest token id of any split."""
    folder: Path | None = None
    tokenizer_facts: dict[str, Any] | None = None
    train_marks: Sequence[Stream] | None = None
    """For each training shard which of its tokens count as targets, 0 or 1; None when the corpus does not say."""
    validation_marks: Stream | None = None
    """The same of the validation split; both or neither."""
    computed: bool = False
    """Whether its rows are worked out as they are read; such a corpus has no long documents, and nobody can lend it any."""
    expected_share: float | None = None
    """Share of the training tokens that are marked, where it is known without reading them."""

    @property
    def train_tokens(self) -> int:
        """Tokens of all training shards."""
        return sum(map(len, self.train))

    @property
    def marked_share(self) -> float:
        """Share of the training tokens that are marked; 1 when the corpus marks none."""
        if self.expected_share is not None:
            return self.expected_share
        if self.train_marks is None:
            return 1.0
        return sum(float(marks[:].sum(dtype=np.int64)) for marks in self.train_marks) / self.train_tokens

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus, from the copy that lies with it."""
        if self.folder is None or self.tokenizer_facts is None:
            return tokenizers.load_tokenizer(self.tokenizer)
        return tokenizers.load_saved_tokenizer(self.tokenizer_facts, self.folder)


# --- what was asked for, and where it is --------------------------------------------------------------------------


def source_of(data: DataConfig) -> DocumentSource | None:
    """The documents that a config names; None for shards and for rows. Raises CorpusError when the path is missing."""
    kind = CORPORA.load(data.corpus)
    return None if kind.ready or kind.tokenizer else kind.source(data)


def _is_training_text(heldout: str, data: DataConfig) -> bool:
    if heldout == data.corpus:
        return True
    if data.path is None or CORPORA.load(data.corpus).ready or heldout in CORPORA:
        return False
    trained_path, heldout_path = Path(data.path).resolve(), Path(heldout).resolve()
    return trained_path.is_relative_to(heldout_path) or heldout_path.is_relative_to(trained_path)


def heldout_source(data: DataConfig) -> DocumentSource | None:
    """The long documents, when another corpus lends them. Raises CorpusError for one that cannot."""
    if data.heldout is None:
        return None
    if _is_training_text(data.heldout, data):
        raise CorpusError(
            f"data.heldout: {data.heldout} is what is trained on; name other text, or leave it out to hold some of it back"
        )
    source = CORPORA.load(data.heldout).lent() if data.heldout in CORPORA else None
    if source is not None:
        return source
    if not os.path.exists(data.heldout):  # False, too, for what is no path at all, such as a name that is too long
        long_corpora = ", ".join(name for name, kind in every_kind().items() if kind.lent() is not None)
        raise CorpusError(
            f"data.heldout: {data.heldout} is neither a file or folder nor one of the corpora that lend long documents: "
            f"{long_corpora}"
        )
    return FileSource(Path(data.heldout), "data.heldout")


def request(data: DataConfig) -> dict[str, Any]:
    """What decides a prepared corpus, as JSON: the config's fields, and the state of the files that it names."""
    kind = CORPORA.load(data.corpus)
    if data.validation_tokens is not None and (kind.ready or kind.tokenizer is not None):
        raise CorpusError(f"data.validation_tokens: corpus {data.corpus!r} has splits of its own; remove it")
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
    """Return whether the documents of a corpus are divided into splits by tokens."""
    kind = CORPORA.load(data.corpus)
    if kind.ready or kind.tokenizer is not None:
        return False
    return kind.by_tokens or data.validation_tokens is not None or data.heldout_documents is not None


def is_divided(corpus: Corpus) -> bool:
    """Return whether the corpus is of documents that are divided into splits by tokens, or would be if prepared again."""
    if corpus.folder is None:
        return False
    prepared_from = manifest(corpus.folder)["request"]
    kind = CORPORA.load(prepared_from["corpus"]) if prepared_from["corpus"] in CORPORA else None
    return "division" in prepared_from or (
        kind is not None and kind.by_tokens and not kind.ready and kind.tokenizer is None
    )


def request_id(corpus_request: dict[str, Any]) -> str:
    """Names the request's file."""
    return hashlib.sha256(json.dumps(corpus_request, sort_keys=True).encode()).hexdigest()[:16]


def provisional_fingerprint(data: DataConfig) -> str:
    """What stands for the fingerprint of a corpus that is not prepared; another for everything asked differently."""
    # what is newer than databases, where it says nothing
    newer = ("corpus_source", "settings", "validation_tokens", "heldout_documents")
    defaults = {name for name in newer if getattr(data, name) in (None, {})}
    return f"{PROVISIONAL}{hashlib.sha256(data.model_dump_json(exclude=defaults).encode()).hexdigest()}"


def find(data: DataConfig, root: Path) -> str | None:
    """Fingerprint of the prepared corpus that a config asks for; None when it is not prepared under `root`.

    Raises CorpusUnknown for a name that nothing has, CorpusError for a path that is not there or a tokenizer that is
    not the one a named corpus was prepared with.
    """
    if data.corpus not in CORPORA:
        return _fingerprint_of_name(data, root)
    current = request(data)
    fingerprint = _fingerprint_of_request(current, root)
    if fingerprint is None and data.validation_tokens is None and data.heldout_documents is None:
        # prepared by a release that drew a split for each document by its name; it stays, and with it the ids of its cells
        former = {name: value for name, value in current.items() if name != "division"}
        fingerprint = _fingerprint_of_request(former, root)
    return fingerprint


def _fingerprint_of_request(corpus_request: dict[str, Any], root: Path) -> str | None:
    return _read_pointer(root / "requests" / f"{request_id(corpus_request)}.json", root)


def _read_pointer(path: Path, root: Path) -> str | None:
    try:
        fingerprint = str(json.loads(path.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None
    return fingerprint if is_prepared(fingerprint, root) else None


def is_prepared(fingerprint: str, root: Path) -> bool:
    """Whether a corpus with that fingerprint lies under `root`; nobody has looked at it."""
    return (root / fingerprint[:16] / "manifest.json").is_file()


def _fingerprint_of_name(data: DataConfig, root: Path) -> str:
    fingerprint = _read_pointer(root / "names" / f"{data.corpus}.json", root) if is_valid_name(data.corpus) else None
    if fingerprint is None:
        raise CorpusUnknown(data.corpus, [*CORPORA, *named_fingerprints(root)])
    prepared_tokenizer, requested_tokenizer = manifest(root / fingerprint[:16])["tokenizer"], data.tokenizer
    if requested_tokenizer == "json" == prepared_tokenizer.split(":")[0]:
        requested_tokenizer = tokenizers.load_tokenizer("json", data.tokenizer_file, data.end_of_text).name
    if prepared_tokenizer != requested_tokenizer and prepared_tokenizer.split(":")[0] != requested_tokenizer:
        raise CorpusError(
            f"corpus {data.corpus!r} was prepared with tokenizer {prepared_tokenizer}, but the grid asks for {requested_tokenizer}"
        )
    return fingerprint


@dataclass(frozen=True)
class PreparedCorpus:
    """What the manifest of a corpus with a name says that a config needs to know."""

    name: str
    fingerprint: str
    tokenizer: str
    """With the hash of its file, where it has one that decides."""
    kind: str
    """bytes, gpt2 or json."""
    file: str | None
    """The copy of its file that lies with the corpus."""
    end_of_text: str | None
    vocabulary: int
    marked: bool = False
    """Whether it says which of its tokens count for `train.loss_on: marked`."""


def prepared(name: str, root: Path) -> PreparedCorpus | None:
    """The corpus that was prepared under that name; None when none was. Raises CorpusError for a damaged manifest."""
    fingerprint = _read_pointer(root / "names" / f"{name}.json", root) if is_valid_name(name) else None
    if fingerprint is None:
        return None
    folder = root / fingerprint[:16]
    facts = manifest(folder)
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


def with_own_tokens(name: str) -> PreparedCorpus | None:
    """The same of a known corpus whose rows are worked out, which brings its tokens too; None for any other."""
    kind = CORPORA.load(name)
    if kind.tokenizer is None:
        return None
    vocabulary = tokenizers.load_tokenizer(kind.tokenizer).vocabulary
    return PreparedCorpus(name, "", kind.tokenizer, kind.tokenizer, None, None, vocabulary, kind.may_mark)


def named_fingerprints(root: Path) -> dict[str, str]:
    """Name -> fingerprint of what was prepared under a name."""
    fingerprints = {path.stem: _read_pointer(path, root) for path in sorted((root / "names").glob("*.json"))}
    return {name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint}


def write_pointer(root: Path, kind: str, name: str, fingerprint: str, **more: Any) -> None:
    """Remembers that a request or a name means that fingerprint."""
    folder = root / kind
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", {"fingerprint": fingerprint, **more})


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, path)


# --- a prepared corpus --------------------------------------------------------------------------------------------


def fingerprint_of(facts: dict[str, Any]) -> str:
    """SHA-256 (hex) over the hashes of every split, the held-out documents' names and ends, and the tokenizer's name.

    Marks count where there are any. Borders between shards count, because no row of training crosses one. Of rows that are
    worked out their settings count, and the hashes of the first ones.
    """
    hashed = {name: facts[name] for name in ("layout", "tokenizer", "heldout_names", "heldout_ends")}
    if computed.KEY in facts:
        hashed[computed.KEY] = facts[computed.KEY]
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
    for split in ("train", "validation", "heldout", *(name for name in MARK_SPLITS if name in facts["shards"])):
        hashes = [shard["sha256"] for shard in facts["shards"][split]]
        hashed[split] = hashes[0] if len(hashes) == 1 else hashes
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with the hash over all of them, as `read_manifest` wants to find it."""
    unsealed = {name: value for name, value in facts.items() if name != "manifest_sha256"}
    return unsealed | {"manifest_sha256": hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()}


def manifest(folder: Path) -> dict[str, Any]:
    """The facts of a prepared corpus. Raises CorpusError when there is none, or it is not as it was written."""
    path = folder / "manifest.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        is_intact = facts == sealed(facts)
    except OSError as error:
        raise CorpusError(f"no prepared corpus in {folder}; prepare it again, or launch the grid again") from error
    except (ValueError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CorpusError(f"{path}: damaged or of another version; {_PREPARE_AGAIN.format(folder=folder)}")
    return facts


def open_corpus(root: Path, fingerprint: str) -> Corpus:
    """Opens a prepared corpus. Raises CorpusError or ShardError when it is missing or damaged."""
    folder = root / fingerprint[:16]
    facts = manifest(folder)
    if facts["fingerprint"] != fingerprint:
        raise CorpusError(
            f"{folder} holds corpus {facts['fingerprint'][:12]}, not {fingerprint[:12]}; {_PREPARE_AGAIN.format(folder=folder)}"
        )
    if fingerprint_of(facts) != fingerprint:
        raise CorpusError(
            f"{folder}: the fingerprint does not follow from the manifest; {_PREPARE_AGAIN.format(folder=folder)}"
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
    """A corpus whose rows are worked out; it has no long documents."""
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


def verified(root: Path, fingerprint: str) -> Corpus:
    """`open_corpus`, every token of it being that which the fingerprint was taken of. Raises CorpusError, ShardError.

    Reading 100M tokens takes a tenth of a second, and is done once: `checked/` remembers the state of the files that
    were read, by what no copy and no other write has (inode and time of change).
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
    with contextlib.suppress(OSError):  # a folder that cannot be written is read each time
        note.parent.mkdir(exist_ok=True)
        write_json(note, states)
    return corpus


def _file_states(folder: Path) -> dict[str, list[int]]:
    """Of every file of a prepared corpus, by name: size, inode, and the times of its last write and change."""
    statuses = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {
        name: [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns] for name, state in statuses.items()
    }


def _open_checked_shard(folder: Path, shard: dict[str, Any]) -> np.ndarray:
    advice = _PREPARE_AGAIN.format(folder=folder)
    try:
        tokens = open_shard(folder / shard["file"])
    except ShardError as error:
        raise ShardError(f"{error}; {advice}") from error
    if len(tokens) != shard["tokens"]:
        raise ShardError(
            f"{folder / shard['file']}: {len(tokens)} tokens, not the {shard['tokens']} that were prepared; {advice}"
        )
    return tokens


def _join_shards(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def split_documents(tokens: np.ndarray, ends: Sequence[int]) -> list[np.ndarray]:
    """A stream as the documents that end there."""
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def verify(folder: Path) -> list[str]:
    """Reads every token again and compares with the manifest; one line for each thing that differs."""
    try:
        recorded = manifest(folder)
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
                f"{folder / shard['file']}: {name} is {current[name]}, the manifest says {shard[name]}"
                for name in ("tokens", "sha256", "largest")
                if current[name] != shard[name]
            ]
    tokenizer = recorded["tokenizer_file"]
    if not tokenizers.is_unchanged(tokenizer, folder):
        problems.append(f"{folder / tokenizer['file']}: {tokenizers.CHANGED}")
    if fingerprint_of(recorded) != recorded["fingerprint"] or folder.name != recorded["fingerprint"][:16]:
        problems.append(f"{folder}: the fingerprint does not follow from the manifest")
    return [f"{line}; {_PREPARE_AGAIN.format(folder=folder)}" for line in problems]


def folders(root: Path) -> list[Path]:
    """The folders of what is prepared under `root`, oldest first."""
    manifests = [path for path in root.glob("*/manifest.json") if path.parent.suffix != ".part"]
    return [path.parent for path in sorted(manifests, key=lambda path: path.stat().st_mtime)]


def listing(root: Path, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row for each corpus prepared under `root`: names, request, tokens by split, fingerprint, folder, bytes.

    `fingerprints` are the fingerprints that are wanted. Raises CorpusError for a damaged manifest.
    """
    names_by_fingerprint: dict[str, list[str]] = {}
    for name, fingerprint in named_fingerprints(root).items():
        names_by_fingerprint.setdefault(fingerprint, []).append(name)
    rows = []
    for folder in folders(root):
        if only is not None and folder.name not in {fingerprint[:16] for fingerprint in only}:
            continue
        facts = manifest(folder)
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
                # shards of others are links, which may lead nowhere by now
                "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.exists()),
                "prepared_at": facts["prepared_at"],
            }
        )
    return rows


def choose(root: Path, word: str) -> list[Path]:
    """The folders of the prepared corpora that a word of `data list` means, oldest first.

    That is a name, else a corpus in the list's words (`stdlib`, `files`: every one that is prepared, with whichever
    tokenizer), else the beginning of a fingerprint. Raises CorpusError.
    """
    fingerprints = named_fingerprints(root)
    fingerprint = fingerprints.get(word)
    if fingerprint:
        return [root / fingerprint[:16]]
    prepared_folders = folders(root)
    corpus_by_folder = {folder: _read_corpus_name(folder) for folder in prepared_folders}
    if word in (*CORPORA, *corpus_by_folder.values()) and (
        of_kind := [folder for folder, kind in corpus_by_folder.items() if kind in (word, None)]
    ):
        return of_kind
    matches = [folder for folder in prepared_folders if folder.name.startswith(word[:16])]
    if len(matches) != 1 or (len(word) > 16 and not manifest(matches[0])["fingerprint"].startswith(word)):
        count_text = "more than one corpus" if len(matches) > 1 else "no corpus"
        raise CorpusError(f"{count_text} {word!r} is prepared in {root}; atma-sweep data list shows them")
    return matches


def _read_corpus_name(folder: Path) -> str | None:
    """The corpus that a folder was prepared from; None where its manifest cannot say so, which is for `verify` to tell."""
    try:
        return str(json.loads((folder / "manifest.json").read_text())["request"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- reference values ---------------------------------------------------------------------------------------------


def entropies(shards: Sequence[np.ndarray], vocabulary: int) -> tuple[float, float | None]:
    """Unigram entropy and bigram conditional entropy H(x_t | x_{t-1}) of a stream in shards, nats per token.

    Pairs across a border between shards are not counted. The second is None above 1024 tokens of vocabulary, where
    counts say more about the sample than about the text.
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
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
