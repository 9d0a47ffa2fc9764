"""Corpora: text into three splits of tokens (training, validation, long held-out documents) with one fingerprint.

The embedded corpus `stdlib` is what every Python installation holds: the sources of the standard library without
test and idlelib, and the texts of its help topics.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..cell import DataConfig
from ..errors import MachineError, SweepError
from .shards import open_shard, write_shard
from .tokenizer import Tokenizer, load_tokenizer

LAYOUT = 1
"""Enters the fingerprint; raise it when the same text would be split or tokenised differently."""

STDLIB_SKIP = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "ensurepip",
    "sitecustomize.py",
}
STDLIB_LONG_BYTES = 20_000


class CorpusError(SweepError):
    """Text that cannot be used as it is."""


@dataclass(frozen=True)
class Text:
    """One document of a corpus, before it is tokenised."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    `train` and `validation` are streams of documents, each led by the end-of-text token; `heldout` are whole documents,
    led by it too, in the order in which probes take them. All uint16.
    """

    fingerprint: str
    tokenizer: str
    train: np.ndarray
    validation: np.ndarray
    heldout: list[np.ndarray]
    heldout_names: list[str]
    unigram_entropy: float
    """Nats per token of the training split."""
    bigram_entropy: float | None
    """Conditional entropy of a token given the one before, nats; None for vocabularies too large to count."""


def _draw(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _stdlib_texts() -> Iterator[Text]:
    root = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "argparse.py").is_file():
        raise MachineError(
            f"this Python keeps no standard library sources under {root}; use `data.corpus: files` with text of your own"
        )
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        # _sysconfigdata and config-* describe one machine's build, not the language
        if STDLIB_SKIP.intersection(parts) or any(p.startswith(("_sysconfigdata", "config-")) for p in parts):
            continue
        if parts == ("pydoc_data", "topics.py"):
            yield from _help_topics(path)
        else:
            yield Text("/".join(parts), path.read_text(encoding="utf-8", errors="replace"))


def _help_topics(path: Path) -> Iterator[Text]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield Text(f"help/{topic}", text)


def _stdlib_split(text: Text) -> str:
    draw = _draw(text.name)
    if draw < 0.25 and len(text.text) >= STDLIB_LONG_BYTES:
        return "heldout"
    return "validation" if draw < 0.08 else "train"


def _file_texts(root: Path) -> Iterator[Text]:
    if not root.exists():
        raise CorpusError(f"data.path: {root} does not exist")
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    known = [p for p in files if p.suffix in (".txt", ".md", ".rst", ".py", ".jsonl")]
    if not known:
        raise CorpusError(f"data.path: {root} holds no .txt, .md, .rst, .py or .jsonl file")
    for path in known:
        name = path.name if path == root else path.relative_to(root).as_posix()
        if path.suffix != ".jsonl":
            yield Text(name, path.read_text(encoding="utf-8", errors="replace"))
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _record(f"{name}:{number}", path, number, line)


def _record(name: str, path: Path, number: int, line: str) -> Text:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{path}:{number}: not a JSON object: {error.msg}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise CorpusError(f"{path}:{number}: a record needs the key `text` with a string")
    return Text(name, record["text"])


def _file_split(data: DataConfig) -> Callable[[Text], str]:
    def split(text: Text) -> str:
        draw = _draw(text.name)
        if draw < 0.25 and len(text.text) >= data.heldout_tokens:
            return "heldout"
        return "validation" if draw < 0.05 else "train"

    return split


CORPORA: dict[str, str] = {
    "stdlib": "the Python standard library's sources and help topics, always there",
    "files": "text of your own: a folder, .txt, .md or .jsonl under data.path",
    "fineweb-edu": "web text filtered for education; must be prepared on disk",
    "fineweb-edu-shards": "the same as GPT-2 tokens; must be prepared on disk",
}


def _texts(data: DataConfig) -> tuple[Iterator[Text], Callable[[Text], str]]:
    if data.corpus == "stdlib":
        return _stdlib_texts(), _stdlib_split
    if data.corpus == "files":
        if not data.path:
            raise CorpusError("data.corpus: files needs data.path, the folder or file that holds the text")
        return _file_texts(Path(data.path)), _file_split(data)
    raise MachineError(
        f"corpus {data.corpus!r} is not prepared on this machine, and this version cannot fetch it; "
        "use --set data.corpus=files --set data.path=FOLDER with text of your own (and --name), or --dry-run to look at the plan"
    )


@dataclass(frozen=True)
class _Manifest:
    layout: int
    tokenizer: str
    train: str
    validation: str
    heldout: str
    heldout_names: list[str]
    heldout_ends: list[int]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def _tokens(texts: list[Text], tokenizer: Tokenizer) -> list[np.ndarray]:
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    return [np.concatenate([eot, tokenizer.encode(text.text)]) for text in texts]


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


@functools.lru_cache(maxsize=4)
def _build(data: DataConfig) -> tuple[_Manifest, dict[str, np.ndarray]]:
    texts, split = _texts(data)
    tokenizer = load_tokenizer(data.tokenizer)
    splits: dict[str, list[Text]] = {"train": [], "validation": [], "heldout": []}
    for text in texts:
        splits[split(text)].append(text)
    # A small corpus of one's own may hash into one split only: every tenth text then validates.
    if not splits["validation"]:
        splits["validation"], splits["train"] = (
            splits["train"][::10],
            [t for i, t in enumerate(splits["train"]) if i % 10],
        )
    if not splits["train"] or not splits["validation"]:
        raise CorpusError(f"corpus {data.corpus!r} has too few documents: give at least two")
    # Long documents in an order drawn from their names, so that the first ones are no alphabetical sample.
    splits["heldout"].sort(key=lambda text: hashlib.sha256(text.name.encode()).digest())
    parts = {name: _tokens(found, tokenizer) for name, found in splits.items()}
    arrays = {name: _join(found) for name, found in parts.items()}
    manifest = _Manifest(
        layout=LAYOUT,
        tokenizer=data.tokenizer,
        train=hashlib.sha256(arrays["train"].tobytes()).hexdigest(),
        validation=hashlib.sha256(arrays["validation"].tobytes()).hexdigest(),
        heldout=hashlib.sha256(arrays["heldout"].tobytes()).hexdigest(),
        heldout_names=[text.name for text in splits["heldout"]],
        heldout_ends=np.cumsum([len(part) for part in parts["heldout"]]).tolist(),
    )
    return manifest, arrays


def _source(data: DataConfig) -> DataConfig:
    """The fields that decide a corpus, so that cells that differ elsewhere share one."""
    return DataConfig(corpus=data.corpus, path=data.path, tokenizer=data.tokenizer, heldout_tokens=data.heldout_tokens)


def fingerprint(data: DataConfig) -> str:
    """SHA-256 (hex) of the tokenised splits. Raises CorpusError or MachineError when the text is not there."""
    return _build(_source(data))[0].fingerprint


def entropies(tokens: np.ndarray, vocabulary: int) -> tuple[float, float | None]:
    """Unigram entropy and bigram conditional entropy H(x_t | x_{t-1}) of a stream, nats per token.

    The second is None above 1024 tokens of vocabulary, where counts say more about the sample than about the text.
    """
    counts = np.bincount(tokens, minlength=vocabulary).astype(np.float64)
    unigram = _entropy(counts)
    if vocabulary > 1024:
        return unigram, None
    pairs = np.bincount(tokens[:-1].astype(np.int64) * vocabulary + tokens[1:], minlength=vocabulary**2)
    first = pairs.reshape(vocabulary, vocabulary).sum(1).astype(np.float64)
    return unigram, _entropy(pairs.astype(np.float64)) - _entropy(first)


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def prepare(data: DataConfig, root: Path) -> Path:
    """Writes the corpus's shards under `root` unless they are there; returns their folder, named by the fingerprint."""
    manifest, arrays = _build(_source(data))
    folder = root / manifest.fingerprint[:16]
    if (folder / "manifest.json").is_file():
        return folder
    aside = root / f"{folder.name}.{os.getpid()}.part"
    aside.mkdir(parents=True, exist_ok=True)
    for name, tokens in arrays.items():
        write_shard(aside / f"{name}.bin", tokens)
    unigram, bigram = entropies(arrays["train"], load_tokenizer(data.tokenizer).vocabulary)
    facts = {
        **asdict(manifest),
        "fingerprint": manifest.fingerprint,
        "unigram_entropy": unigram,
        "bigram_entropy": bigram,
    }
    (aside / "manifest.json").write_text(json.dumps(facts, indent=1))
    try:
        os.rename(aside, folder)
    except OSError:
        # Another launcher was first; its copy has the same fingerprint.
        shutil.rmtree(aside)
        if not (folder / "manifest.json").is_file():
            raise
    return folder


def open_corpus(root: Path, fingerprint: str) -> Corpus:
    """Opens a prepared corpus. Raises CorpusError or ShardError when it is missing or damaged."""
    folder = root / fingerprint[:16]
    try:
        facts = json.loads((folder / "manifest.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CorpusError(f"no prepared corpus in {folder}; launch the grid again") from error
    if facts["fingerprint"] != fingerprint:
        raise CorpusError(
            f"{folder} holds corpus {facts['fingerprint'][:12]}, not {fingerprint[:12]}; remove it and launch again"
        )
    heldout = open_shard(folder / "heldout.bin") if facts["heldout_ends"] else np.zeros(0, dtype=np.uint16)
    starts = [0, *facts["heldout_ends"][:-1]]
    return Corpus(
        fingerprint=fingerprint,
        tokenizer=facts["tokenizer"],
        train=open_shard(folder / "train.bin"),
        validation=open_shard(folder / "validation.bin"),
        heldout=[heldout[start:end] for start, end in zip(starts, facts["heldout_ends"], strict=True)]
        if facts["heldout_ends"]
        else [],
        heldout_names=facts["heldout_names"],
        unigram_entropy=facts["unigram_entropy"],
        bigram_entropy=facts["bigram_entropy"],
    )
