"""Tokenizers with a common interface: bytes, GPT-2's byte pairs, `tokenizers` JSON files, computed corpora."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import MachineError, SweepError

TokenArray = np.ndarray
"""Token ids, one-dimensional, uint16, or uint32 for a vocabulary beyond 65,536."""

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""Hash of GPT-2's ranks in tiktoken's text format, the one that tiktoken pins for r50k_base."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names of the end-of-text token in `tokenizers` files, tried in this order."""


CHANGED = "missing, or not the tokenizer that made the corpus"


class TokenizerError(SweepError):
    """Exception for a tokenizer file that is missing or not in the expected format."""


class Tokenizer(Protocol):
    """Protocol of a tokenizer between text and token ids.

    `eot` separates documents and is never produced by `encode`.
    """

    name: str
    """Name that enters a corpus's fingerprint: two tokenizers of one name give the same ids."""
    vocabulary: int
    """Number of token ids."""
    eot: int
    """Id of the end-of-text token."""

    def __hash__(self) -> int:
        """Return a hash, as every object has, so that results can be cached by tokenizer."""

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Type of the ids: uint16, or uint32 for a vocabulary beyond 65,536."""

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of `text`; special tokens written out in it are treated as plain text."""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[TokenArray]:
        """Return the token ids of each text, computed on several threads."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for; empty for `eot`."""

    def save(self, folder: Path) -> str | None:
        """Write the file that recreates the tokenizer into `folder` and return its name; None if it needs no file."""


def dtype_of(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of the ids in shards of a vocabulary of that size."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32


class _WithoutFile:
    """Base class of tokenizers with uint16 ids that need no file."""

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Type of the ids, uint16."""
        return np.uint16

    @abstractmethod
    def encode(self, text: str) -> TokenArray:
        """Return the token ids of `text`, uint16."""

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[TokenArray]:
        """Return the token ids of each text; `threads` is ignored."""
        return [self.encode(text) for text in texts]

    def save(self, folder: Path) -> str | None:
        """Write nothing and return None."""
        return None


class ByteTokenizer(_WithoutFile):
    """UTF-8 bytes as tokens; id 256 ends a text."""

    name = "bytes"
    vocabulary = 257
    eot = 256

    def encode(self, text: str) -> TokenArray:
        """Return the bytes of `text`, uint16; lone surrogates become question marks."""
        # JSON may hold lone surrogates, which UTF-8 cannot encode
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; empty for `eot`."""
        return b"" if token == self.eot else bytes([token])


FLIPFLOP = "wri01"
"""Letters of the flip-flop language, in the order of their ids."""


class FlipFlopTokenizer(_WithoutFile):
    """The five letters of flip-flop as tokens, and a sixth token for padding that occurs in no row."""

    name = "flipflop"
    vocabulary = 6
    eot = 5

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of `text`, uint16.

        Raises:
            TokenizerError: A letter is none of the five.
        """
        unknown = next((letter for letter in text if letter not in FLIPFLOP), None)
        if unknown is not None:
            raise TokenizerError(f"tokenizer flipflop supports only the letters {FLIPFLOP}, got {unknown!r}")
        return np.array([FLIPFLOP.index(letter) for letter in text], dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """Return the letter of a token; empty for `eot`."""
        return b"" if token == self.eot else FLIPFLOP[token].encode()


class RecallTokenizer(_WithoutFile):
    """Keys and values of associative recall, k0 to k511 and v0 to v510, and the blank `_`, which also ends a text."""

    name = "mqar"
    KEYS, VALUES = 512, 511
    vocabulary = 1 + KEYS + VALUES
    eot = 0

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of whitespace-separated symbols such as k3 and v17, uint16.

        Raises:
            TokenizerError: A symbol is no key, value or blank.
        """
        return np.array([self._token(word) for word in text.split()], dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """Return the symbol of a token followed by a space; empty for `eot`."""
        word = f"k{token - 1}" if token <= self.KEYS else f"v{token - 1 - self.KEYS}"
        return b"" if token == self.eot else f"{word} ".encode()

    def _token(self, word: str) -> int:
        """Return the id of one symbol: 0 for `_`, 1 on for keys, 513 on for values.

        Raises:
            TokenizerError: The symbol is none of these.
        """
        if word == "_":
            return self.eot
        kind, number = word[:1], word[1:]
        if kind in ("k", "v") and number.isdecimal() and int(number) < (self.KEYS if kind == "k" else self.VALUES):
            return 1 + int(number) + (0 if kind == "k" else self.KEYS)
        raise TokenizerError(
            f"tokenizer mqar supports only k0 to k{self.KEYS - 1}, v0 to v{self.VALUES - 1} and _, got {word!r}"
        )


class MadTokenizer(_WithoutFile):
    """Tokens t0 to t8191 of MAD's tasks, and one more that ends a text and occurs in no row."""

    name = "mad"
    TOKENS = 8192
    vocabulary = TOKENS + 1
    eot = TOKENS

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of whitespace-separated symbols such as t3, uint16.

        Raises:
            TokenizerError: A symbol is none of t0 to t8191.
        """
        symbols = text.split()
        unknown = next((word for word in symbols if self._token(word) is None), None)
        if unknown is not None:
            raise TokenizerError(f"tokenizer mad supports only t0 to t{self.TOKENS - 1}, got {unknown!r}")
        return np.array([self._token(word) for word in symbols], dtype=np.uint16)

    def token_bytes(self, token: int) -> bytes:
        """Return the symbol of a token followed by a space; empty for `eot`."""
        return b"" if token == self.eot else f"t{token} ".encode()

    def _token(self, word: str) -> int | None:
        """Return the id of one symbol; None if it is not one."""
        number = word[1:]
        is_symbol = word[:1] == "t" and number.isdecimal() and int(number) < self.TOKENS
        return int(number) if is_symbol else None


class Gpt2Tokenizer(_WithoutFile):
    """GPT-2's byte-pair encoding through tiktoken, with ranks from a given file, tiktoken's cache or a download."""

    name = "gpt2"
    vocabulary = 50257
    eot = 50256

    def __init__(self, file: Path | None = None) -> None:
        """Load the ranks.

        Args:
            file: A .tiktoken or vocab.bpe file; None uses tiktoken's cache or a download.

        Raises:
            TokenizerError: The file does not hold GPT-2's ranks.
            MachineError: The download failed.
        """
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self._ranks = _gpt2_ranks(file) if file is not None else _gpt2_download()
        special = {"<|endoftext|>": self.eot}
        self._bpe = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=self._ranks, special_tokens=special)

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of `text`, uint16."""
        return np.asarray(self._bpe.encode_ordinary(text), dtype=np.uint16)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[TokenArray]:
        """Return the token ids of each text, in order, uint16, computed on `threads` threads."""
        return [
            np.asarray(ids, dtype=np.uint16)
            for ids in self._bpe.encode_ordinary_batch(list(texts), num_threads=threads)
        ]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for; empty for `eot`."""
        return b"" if token == self.eot else self._bpe.decode_single_token_bytes(token)

    def save(self, folder: Path) -> str | None:
        """Write the ranks in tiktoken's text format and return the file's name."""
        (folder / "gpt2.tiktoken").write_bytes(_ranks_text(self._ranks))
        return "gpt2.tiktoken"


def _ranks_text(ranks: dict[bytes, int]) -> bytes:
    pairs = sorted(ranks.items(), key=operator.itemgetter(1))
    return b"".join(base64.b64encode(word) + b" " + str(rank).encode() + b"\n" for word, rank in pairs)


def _gpt2_download() -> dict[bytes, int]:
    """Return GPT-2's ranks by the bytes of each token, from tiktoken's cache or a download.

    Raises:
        MachineError: They are neither cached nor downloadable.
    """
    import requests
    from tiktoken_ext.openai_public import gpt2

    try:
        ranks: dict[bytes, int] = gpt2()["mergeable_ranks"]
    except (OSError, ValueError, requests.RequestException) as error:
        raise MachineError(
            f"the GPT-2 tokenizer files are neither in tiktoken's cache nor downloadable ({type(error).__name__}); "
            "connect to the network once, set TIKTOKEN_CACHE_DIR to a folder that holds them, or set data.tokenizer_file"
        ) from error
    return ranks


def _gpt2_ranks(file: Path) -> dict[bytes, int]:
    """Return GPT-2's ranks by the bytes of each token, from a file.

    Args:
        file: A .tiktoken file, or vocab.bpe with encoder.json next to it.

    Raises:
        TokenizerError: A file is missing or damaged, or its ranks do not have the hash of GPT-2's.
    """
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    if not file.is_file():
        raise TokenizerError(f"data.tokenizer_file: {file} does not exist")
    try:
        if file.suffix == ".bpe":
            encoder = file.with_name("encoder.json")
            if not encoder.is_file():
                raise TokenizerError(f"data.tokenizer_file: {file} needs encoder.json in the same folder")
            # the hashes keep tiktoken from using an outdated cache entry of the same path
            merges_hash, encoder_hash = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (file, encoder))
            ranks = data_gym_to_mergeable_bpe_ranks(str(file), str(encoder), merges_hash, encoder_hash)
        else:
            pairs = (line.split() for line in file.read_bytes().splitlines() if line)
            ranks = {base64.b64decode(word): int(rank) for word, rank in pairs}
    except (OSError, ValueError, LookupError, AttributeError, AssertionError) as error:
        cause = str(error) or "vocab.bpe and encoder.json disagree"
        raise TokenizerError(f"data.tokenizer_file: {file} holds no byte-pair ranks: {cause}") from error
    if hashlib.sha256(_ranks_text(ranks)).hexdigest() != GPT2_RANKS_SHA256:
        raise TokenizerError(
            f"data.tokenizer_file: {file} does not hold GPT-2's ranks; use data.tokenizer: json for another tokenizer"
        )
    return ranks


class JsonTokenizer:
    """Tokenizer from a file of the `tokenizers` library; its name contains the hash of the file."""

    def __init__(self, file: Path, end_of_text: str | None = None) -> None:
        """Load the file; truncation, padding and the parsing of special tokens in texts are turned off.

        The name is `json:` and 16 digits of the file's SHA-256, and after another colon `end_of_text` where it is
        given.

        Args:
            file: JSON file of the `tokenizers` library.
            end_of_text: Name of the token that ends a text; None takes the first name in `END_OF_TEXT` (see
                `load_tokenizer`) that the file has.

        Raises:
            TokenizerError: The file cannot be read, or has no such token.
        """
        import tokenizers

        try:
            self.content = file.read_bytes()
            """Bytes of the file."""
        except OSError as error:
            raise TokenizerError(f"data.tokenizer_file: {file} cannot be read: {error.strerror}") from error
        try:
            self._model = tokenizers.Tokenizer.from_buffer(self.content)
        except ValueError as error:
            raise TokenizerError(
                f"data.tokenizer_file: {file} is not a file of the tokenizers library: {error}"
            ) from error
        # this program cuts and joins texts itself, and special tokens written out in a text are plain text
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.vocabulary = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.dtype = dtype_of(self.vocabulary)
        names = [end_of_text] if end_of_text else END_OF_TEXT
        end_tokens = [(name, number) for name in names if (number := self._model.token_to_id(name)) is not None]
        if not end_tokens:
            raise TokenizerError(
                f"data.tokenizer_file: {file} has no end-of-text token {' or '.join(names)}; "
                "name its own in data.end_of_text"
            )
        # if the file lists it as an ordinary added token, texts could otherwise produce it
        self.end_of_text, self.eot = end_tokens[0]
        """Name and id of the token that ends a text."""
        self._model.add_special_tokens([self.end_of_text])
        file_hash = f"{hashlib.sha256(self.content).hexdigest()[:16]}"
        self.name = f"json:{file_hash}" if end_of_text is None else f"json:{file_hash}:{end_of_text}"

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of `text` in `dtype`, without `eot`; lone surrogates become question marks."""
        return self._without_eot(self._model.encode(_drop_surrogates(text), add_special_tokens=False).ids)

    def _without_eot(self, ids: list[int]) -> TokenArray:
        """Return the ids as an array without `eot`, which is an ordinary word in some vocabularies."""
        tokens = np.asarray(ids, dtype=self.dtype)
        return tokens[tokens != self.eot]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[TokenArray]:
        """Return the token ids of each text, computed on all cores; `threads` is ignored."""
        encodings = self._model.encode_batch_fast([_drop_surrogates(text) for text in texts], add_special_tokens=False)
        return [self._without_eot(encoding.ids) for encoding in encodings]

    def token_bytes(self, token: int) -> bytes:
        """Return the text of one token as UTF-8; empty for `eot`."""
        return b"" if token == self.eot else self._model.decode([token], skip_special_tokens=False).encode()

    def save(self, folder: Path) -> str | None:
        """Write a copy of the file and return its name."""
        (folder / "tokenizer.json").write_bytes(self.content)
        return "tokenizer.json"


def _drop_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced, which Rust strings cannot hold."""
    return text.encode("utf-8", errors="replace").decode()


@dataclass(frozen=True)
class TokenizerSpec:
    """Facts of a tokenizer that are available before it is loaded."""

    vocabulary: int | None
    """Number of token ids; None if only its file says."""
    create: Callable[[Path | None, str | None], Tokenizer]
    """Function from file and end-of-text token, each optional, to the tokenizer."""


def _create_json_tokenizer(file: Path | None, end_of_text: str | None) -> Tokenizer:
    if file is None:
        raise TokenizerError("data.tokenizer: json needs data.tokenizer_file, a file of the tokenizers library")
    return JsonTokenizer(file, end_of_text)


TOKENIZERS: dict[str, TokenizerSpec] = {
    "bytes": TokenizerSpec(ByteTokenizer.vocabulary, lambda file, end: ByteTokenizer()),
    "gpt2": TokenizerSpec(Gpt2Tokenizer.vocabulary, lambda file, end: Gpt2Tokenizer(file)),
    "json": TokenizerSpec(None, _create_json_tokenizer),
    "mqar": TokenizerSpec(RecallTokenizer.vocabulary, lambda file, end: RecallTokenizer()),
    "mad": TokenizerSpec(MadTokenizer.vocabulary, lambda file, end: MadTokenizer()),
    "flipflop": TokenizerSpec(FlipFlopTokenizer.vocabulary, lambda file, end: FlipFlopTokenizer()),
}


@functools.cache
def load_tokenizer(name: str, file: str | None = None, end_of_text: str | None = None) -> Tokenizer:
    """Return the tokenizer of that name; it is loaded once per process for the same arguments.

    A file that changes later is not read again.

    Args:
        name: A key of `TOKENIZERS`: "bytes", "gpt2", "json" or that of a corpus of rows ("flipflop", "mqar", "mad"); no hash.
        file: Tokenizer file: required for json, optional for gpt2 (its ranks), ignored by the others.
        end_of_text: Name of the token that ends a text, for json; None takes the first that the file has of
            <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|im_end|> and [SEP] (END_OF_TEXT).

    Raises:
        SweepError: No tokenizer has that name.
        TokenizerError: The file is missing or not in the expected format.
        MachineError: A download failed.
    """
    if name not in TOKENIZERS:
        raise SweepError(f"no tokenizer {name!r}; allowed: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name].create(Path(file) if file else None, end_of_text)


def store_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Save the tokenizer's file into `folder` and return the facts that `load_saved_tokenizer` needs.

    Returns:
        Dict with kind, file (name within the folder), sha256 (hex), end_of_text and vocabulary. File and sha256 are
        None without a file; end_of_text is None unless the config named that token.
    """
    file = tokenizer.save(folder)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest() if file else None
    end = tokenizer.name.split(":", 2)[2] if tokenizer.name.count(":") > 1 else None
    kind = tokenizer.name.split(":")[0]
    return {"kind": kind, "file": file, "sha256": digest, "end_of_text": end, "vocabulary": tokenizer.vocabulary}


def is_unchanged(facts: dict[str, Any], folder: Path) -> bool:
    """Return True if the file that `store_tokenizer` saved is still the same, or if there was none.

    Args:
        facts: Result of `store_tokenizer`.
        folder: Folder of the file; a missing file gives False.
    """
    if facts["file"] is None:
        return True
    try:
        return hashlib.sha256((folder / facts["file"]).read_bytes()).hexdigest() == facts["sha256"]
    except OSError:
        return False


def load_saved_tokenizer(facts: dict[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that `store_tokenizer` saved.

    Raises:
        TokenizerError: Its file is missing or has changed.
    """
    if not is_unchanged(facts, folder):
        raise TokenizerError(f"{folder / facts['file']}: {CHANGED}; remove {folder} and prepare the corpus again")
    file = str(folder / facts["file"]) if facts["file"] else None
    return load_tokenizer(facts["kind"], file, facts["end_of_text"])


def request_key(name: str, file: str | None, end_of_text: str | None) -> str:
    """Return JSON text that identifies a requested tokenizer without loading it.

    The contents of `file` count, not its path; a file that does not exist counts by its path.
    """
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else file
    return json.dumps([name, digest, end_of_text])
