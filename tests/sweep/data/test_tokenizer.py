"""Conversion of text to tokens and back."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from atma_sweep.sweep.data import tokenizer as ours
from atma_sweep.sweep.data.tokenizer import (
    TOKENIZERS,
    Gpt2Tokenizer,
    JsonTokenizer,
    Tokenizer,
    TokenizerError,
    dtype_of,
    load_saved_tokenizer,
    load_tokenizer,
    request_key,
    store_tokenizer,
)
from atma_sweep.sweep.errors import MachineError, SweepError
from optional_data import optional_data
from prepared import word_level
from refusals import refused
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TEXTS = [
    "",
    "a",
    "Hello world, 12345!\n  naïve 🙂<|endoftext|>",
    "The quick brown fox jumps over the lazy dog",
    "don't  we'll\t\r\n  \n x  ",
    "你好，世界。 é e\u0301 \u2028 \x00 \ufeff",
    "🙂" * 20,
    "0123456789" * 30 + " " * 50,
]


def save(model: tokenizers.Tokenizer, path: Path) -> Path:
    model.save(str(path))
    return path


def byte_level(merges: list[tuple[str, str]], end: str | None = "<|endoftext|>") -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes in GPT-2's spelling, numbered by spelling, then the merges, then the end of text."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    model = tokenizers.Tokenizer(models.BPE({word: number for number, word in enumerate(vocabulary)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    if end:
        model.add_special_tokens([end])
    return model


def joined(tokenizer: Any, tokens: np.ndarray) -> bytes:
    return b"".join(tokenizer.token_bytes(int(token)) for token in tokens)


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_is_utf8(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert (tokens.dtype, tokens.tolist()) == (np.uint16, list(text.encode()))
    assert joined(tokenizer, tokens).decode() == text


def test_byte_tokenizer_replaces_lone_surrogates() -> None:
    assert load_tokenizer("bytes").encode("a\ud800b").tolist() == [97, 63, 98]


def test_byte_tokenizer_end_of_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.eot, tokenizer.vocabulary, tokenizer.token_bytes(256)) == (256, 257, b"")
    assert TOKENIZERS["bytes"].vocabulary == 257
    assert tokenizer.dtype is np.uint16
    assert load_saved_tokenizer(store_tokenizer(tokenizer, tmp_path), tmp_path).name == "bytes"
    assert list(tmp_path.iterdir()) == []


# --- the interface ------------------------------------------------------------------------------------------------


def test_load_tokenizer_rejects_unknown_name() -> None:
    assert (
        refused(lambda: load_tokenizer("byte"))
        == "no tokenizer 'byte'; allowed: bytes, gpt2, json, mqar, mad, flipflop"
    )


def test_load_tokenizer_caches() -> None:
    assert load_tokenizer("bytes") is load_tokenizer("bytes")


@pytest.mark.parametrize(("vocabulary", "dtype"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_dtype_follows_vocabulary(vocabulary: int, dtype: type) -> None:
    assert dtype_of(vocabulary) is dtype


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "words", "byte pairs"])
def test_encode_batch_matches_encode(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    tokenizer: Any
    if kind == "gpt2":
        tokenizer = request.getfixturevalue("gpt2")
    elif kind == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        model = word_level("a", "fox") if kind == "words" else byte_level([("o", "x"), ("f", "ox")])
        tokenizer = JsonTokenizer(save(model, tmp_path / "t.json"))
    texts = [*TEXTS, "half \ud800 a pair"]
    for threads in (1, 2):
        encoded = tokenizer.encode_batch(texts, threads)
        assert [tokens.tolist() for tokens in encoded] == [tokenizer.encode(text).tolist() for text in texts]
        assert {tokens.dtype for tokens in encoded} == {np.dtype(tokenizer.dtype)}
    assert tokenizer.encode_batch([]) == []


def test_request_key_follows_contents_not_path(tmp_path: Path) -> None:
    for name, text in (("a.json", "1"), ("b.json", "1"), ("c.json", "2")):
        (tmp_path / name).write_text(text)
    key, same, changed_key, gone = (
        request_key("json", str(tmp_path / name), None) for name in ("a.json", "b.json", "c.json", "d")
    )
    assert key == same
    assert (
        len(
            {
                key,
                changed_key,
                gone,
                request_key("json", str(tmp_path / "a.json"), "</s>"),
                request_key("gpt2", None, None),
            }
        )
        == 5
    )


# --- GPT-2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ids"), [
    ("Hello world", [15496, 995]), (" The access code", [383, 1895, 2438]), ("Hello, world!", [15496, 11, 995, 0]),
    ("The quick brown fox jumps over the lazy dog", [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]), ("", []),
])  # fmt: skip
def test_gpt2_encodes_published_ids(gpt2: Any, text: str, ids: list[int]) -> None:
    tokens = gpt2.encode(text)
    assert (tokens.dtype, tokens.tolist()) == (np.uint16, ids)


def test_gpt2_never_encodes_end_of_text(gpt2: Any) -> None:
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert (gpt2.eot, gpt2.vocabulary, gpt2.token_bytes(50256)) == (50256, 50257, b"")
    assert (gpt2.name, TOKENIZERS["gpt2"].vocabulary) == ("gpt2", 50257)


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_token_bytes_join_to_text(gpt2: Any, text: str) -> None:
    assert joined(gpt2, gpt2.encode(text)).decode() == text


def test_gpt2_loads_authors_files_and_saved_copy(gpt2: Any, tmp_path: Path) -> None:
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(optional_data(f"data/gpt2/{name}"), tmp_path / name)
    tokenizer = Gpt2Tokenizer(tmp_path / "vocab.bpe")
    assert [tokenizer.encode(text).tolist() for text in TEXTS] == [gpt2.encode(text).tolist() for text in TEXTS]
    facts = json.loads(json.dumps(store_tokenizer(tokenizer, tmp_path)))
    assert facts["sha256"] == hashlib.sha256((optional_data("data/gpt2/gpt2.tiktoken")).read_bytes()).hexdigest()
    assert {name: facts[name] for name in ("kind", "file", "end_of_text", "vocabulary")} == {
        "kind": "gpt2", "file": "gpt2.tiktoken", "end_of_text": None, "vocabulary": 50257,
    }  # fmt: skip
    assert load_saved_tokenizer(facts, tmp_path).encode(TEXTS[2]).tolist() == gpt2.encode(TEXTS[2]).tolist()


def test_gpt2_loads_from_tiktoken_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(optional_data(f"data/gpt2/{name}"), tmp_path / hashlib.sha1(address.encode()).hexdigest())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", lambda address: pytest.fail(f"asks for {address}"))
    assert Gpt2Tokenizer().encode("Hello world").tolist() == [15496, 995]


@pytest.mark.parametrize("failure", ["disconnected", "another page"])
def test_gpt2_reports_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    import requests

    def fetch(address: str) -> bytes:
        if failure == "disconnected":
            raise requests.ConnectionError("no route")
        return b"<html>please log in</html>"

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", fetch)
    with pytest.raises(MachineError) as caught:
        Gpt2Tokenizer()
    kind = "ConnectionError" if failure == "disconnected" else "ValueError"
    assert str(caught.value) == (
        f"the GPT-2 tokenizer files are neither in tiktoken's cache nor downloadable ({kind}); connect to the network once, set "
        "TIKTOKEN_CACHE_DIR to a folder that holds them, or set data.tokenizer_file"
    )


def test_gpt2_rejects_foreign_ranks(tmp_path: Path) -> None:
    lines = (optional_data("data/gpt2/gpt2.tiktoken")).read_bytes().splitlines(keepends=True)
    first, second = (line.split()[0] for line in lines[-2:])
    swapped = [*lines[:-2], second + b" 50254\n", first + b" 50255\n"]
    for name, changed in (("swapped", swapped), ("short", lines[:-1]), ("small", [base64.b64encode(b"a") + b" 0\n"])):
        path = tmp_path / f"{name}.tiktoken"
        path.write_bytes(b"".join(changed))
        assert refused(lambda path=path: Gpt2Tokenizer(path)) == (  # type: ignore[misc]
            f"data.tokenizer_file: {path} does not hold GPT-2's ranks; use data.tokenizer: json for another tokenizer"
        )


@pytest.mark.parametrize(("name", "content", "why"), [
    ("a.tiktoken", b"one two three\n", "too many values to unpack (expected 2"),
    ("a.tiktoken", b"YQ= 1\n", "Incorrect padding"),
    ("a.tiktoken", b"YQ== one\n", "invalid literal for int() with base 10: b'one'"),
    ("vocab.bpe", b"#version: 0.2\na b c\n", "too many values to unpack (expected 2"),
    ("vocab.bpe", "#version: 0.2\n☃ b\n".encode(), "'☃'"),
    ("vocab.bpe", b"#version: 0.2\na b\n", "vocab.bpe and encoder.json disagree"),
])  # fmt: skip
def test_gpt2_rejects_damaged_rank_files(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (tmp_path / "encoder.json").write_text("{}")
    assert refused(lambda: Gpt2Tokenizer(path)).startswith(
        f"data.tokenizer_file: {path} holds no byte-pair ranks: {why}"
    )


def test_gpt2_rejects_missing_rank_files(tmp_path: Path) -> None:
    gone, alone = tmp_path / "gone.tiktoken", tmp_path / "vocab.bpe"
    alone.write_text("#version: 0.2\n")
    assert refused(lambda: Gpt2Tokenizer(gone)) == f"data.tokenizer_file: {gone} does not exist"
    assert refused(lambda: Gpt2Tokenizer(alone)) == (
        f"data.tokenizer_file: {alone} needs encoder.json in the same folder"
    )


def test_gpt2_reads_repaired_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of tiktoken is keyed by file name, and would return the earlier contents."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_text("{}")
    assert "holds no byte-pair ranks" in refused(lambda: Gpt2Tokenizer(tmp_path / "vocab.bpe"))
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(optional_data(f"data/gpt2/{name}"), tmp_path / name)
    assert Gpt2Tokenizer(tmp_path / "vocab.bpe").encode("Hello world").tolist() == [15496, 995]


# --- tokenizers files ---------------------------------------------------------------------------------------------


def test_json_tokenizer_at_word_level(tmp_path: Path) -> None:
    path = save(word_level("the", "fox", "7", "<pad>"), tmp_path / "t.json")
    tokenizer = load_tokenizer("json", str(path))
    assert tokenizer.encode("the 7 fox 8").tolist() == [2, 4, 3, 0]
    assert (tokenizer.eot, tokenizer.vocabulary, tokenizer.dtype) == (1, 6, np.uint16)
    assert [tokenizer.token_bytes(token) for token in (2, 4, 1)] == [b"the", b"7", b""]
    assert tokenizer.name == f"json:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def test_json_tokenizer_of_byte_pairs(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(save(byte_level([("1", "2"), ("12", "3"), ("f", "o")]), tmp_path / "t.json"))
    letter = {word: number for number, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert tokenizer.encode("fox 123124").tolist() == [
        258, letter["x"], letter["Ġ"], 257, 256, letter["4"],
    ]  # fmt: skip
    assert [tokenizer.token_bytes(token) for token in (257, 258, letter["4"])] == [b"123", b"fo", b"4"]
    assert (tokenizer.eot, tokenizer.vocabulary) == (259, 260)


def test_json_tokenizer_with_large_vocabulary(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(save(word_level(*(f"w{n}" for n in range(70_000))), tmp_path / "t.json"))
    tokens = tokenizer.encode("w69999 w0")
    assert (tokenizer.vocabulary, tokenizer.dtype) == (70_002, np.uint32)
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, [70_001, 2])


def test_json_tokenizer_vocabulary_counts_gaps(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 65_537, "</s>": 3}, unk_token="[UNK]"))
    tokenizer = JsonTokenizer(save(model, tmp_path / "t.json"))
    assert (tokenizer.vocabulary, tokenizer.eot, tokenizer.dtype) == (65_538, 3, np.uint32)


@pytest.mark.parametrize("listed", ["special", "ordinary", "not at all"])
def test_json_tokenizer_treats_special_tokens_as_text(tmp_path: Path, listed: str) -> None:
    model = byte_level([], end="<|endoftext|>" if listed == "special" else None)
    if listed == "ordinary":
        model.add_tokens(["<|endoftext|>"])
    if listed == "not at all":
        model = byte_level([], end=None)
        model.add_special_tokens(["</s>"])
    tokenizer = JsonTokenizer(save(model, tmp_path / "t.json"))
    alone = [
        JsonTokenizer(save(byte_level([]), tmp_path / "u.json")).encode(letter).tolist()[0]
        for letter in "a<|endoftext|>"
    ]
    assert tokenizer.encode("a<|endoftext|>").tolist() == alone
    assert tokenizer.eot == 256


def test_json_tokenizer_treats_added_tokens_as_text(tmp_path: Path) -> None:
    model = byte_level([])
    model.add_special_tokens(["<pad>", "[MASK]"])
    tokenizer = JsonTokenizer(save(model, tmp_path / "t.json"))
    plain = JsonTokenizer(save(byte_level([]), tmp_path / "u.json"))
    assert tokenizer.encode("x<pad>[MASK]").tolist() == plain.encode("x<pad>[MASK]").tolist()
    assert tokenizer.vocabulary == 259


def test_json_tokenizer_never_encodes_end_of_text(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(save(word_level("a", "b"), tmp_path / "t.json"))
    assert tokenizer.encode("a <eos> b").tolist() == [2, 3]
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(["<eos>", "b <eos>"])] == [[], [3]]


def test_json_tokenizer_ignores_truncation_and_padding(tmp_path: Path) -> None:
    model = byte_level([])
    plain = JsonTokenizer(save(model, tmp_path / "plain.json"))
    model.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    model.enable_truncation(3)
    model.enable_padding(length=9)
    model.normalizer = normalizers.Lowercase()
    tokenizer = JsonTokenizer(save(model, tmp_path / "t.json"))
    assert tokenizer.encode("Some Text").tolist() == plain.encode("some text").tolist()
    assert [len(tokens) for tokens in tokenizer.encode_batch(["Some Text", "a"])] == [9, 1]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"])
def test_json_tokenizer_finds_usual_end_of_text(tmp_path: Path, end: str) -> None:
    assert JsonTokenizer(save(word_level("a", end=end), tmp_path / "t.json")).eot == 1


def test_json_tokenizer_needs_name_of_unusual_end(tmp_path: Path) -> None:
    path = save(word_level("a", end="fin:is:"), tmp_path / "t.json")
    end_tokens = "<|endoftext|> or <|end_of_text|> or </s> or <eos> or <|im_end|> or [SEP]"
    assert refused(lambda: JsonTokenizer(path)) == (
        f"data.tokenizer_file: {path} has no end-of-text token {end_tokens}; name its own in data.end_of_text"
    )
    assert refused(lambda: JsonTokenizer(path, "<fin>")) == (
        f"data.tokenizer_file: {path} has no end-of-text token <fin>; name its own in data.end_of_text"
    )
    tokenizer = JsonTokenizer(path, "fin:is:")
    assert (tokenizer.eot, tokenizer.name.split(":", 2)[2]) == (1, "fin:is:")
    facts = json.loads(json.dumps(store_tokenizer(tokenizer, tmp_path)))
    again = load_saved_tokenizer(facts, tmp_path)
    assert (again.eot, again.name, again.encode("a b").tolist()) == (1, tokenizer.name, [2, 0])


@pytest.mark.parametrize(("content", "why"), [
    (b"{}", "is not a file of the tokenizers library: "), (b"[1, 2", "is not a file of the tokenizers library: "), (b"\xff\xfe{", "is not a file of the tokenizers library: "), (b"", "is not a file of the tokenizers library: "),
    (None, "cannot be read: No such file or directory"),
])  # fmt: skip
def test_json_tokenizer_rejects_foreign_files(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    assert refused(lambda: JsonTokenizer(path)).startswith(f"data.tokenizer_file: {path} {why}")


def test_json_tokenizer_rejects_empty_vocabulary(tmp_path: Path) -> None:
    path = save(tokenizers.Tokenizer(models.BPE()), tmp_path / "t.json")
    assert "has no end-of-text token <|endoftext|> or" in refused(lambda: JsonTokenizer(path))


def test_json_tokenizer_needs_file() -> None:
    expected = "data.tokenizer: json needs data.tokenizer_file, a file of the tokenizers library"
    assert refused(lambda: load_tokenizer("json")) == expected


def test_load_saved_tokenizer_rejects_changed_copy(tmp_path: Path) -> None:
    source = save(word_level("a", "b"), tmp_path / "source.json")
    folder = tmp_path / "copy"
    folder.mkdir()
    facts = store_tokenizer(JsonTokenizer(source), folder)
    source.unlink()
    assert load_saved_tokenizer(facts, folder).encode("b a").tolist() == [3, 2]
    copy = folder / "tokenizer.json"
    copy.write_text(copy.read_text().replace('"b"', '"c"'))
    expected = (
        f"{copy}: missing, or not the tokenizer that made the corpus; remove {folder} and prepare the corpus again"
    )
    assert refused(lambda: load_saved_tokenizer(facts, folder)) == expected
    copy.unlink()
    assert refused(lambda: load_saved_tokenizer(facts, folder)) == expected
    assert issubclass(TokenizerError, SweepError)


@pytest.mark.thorough
def test_gpt2_as_json_file_matches_tiktoken(gpt2: Any, tmp_path: Path) -> None:
    files = (str(optional_data("data/gpt2/encoder.json")), str(optional_data("data/gpt2/vocab.bpe")))
    model = tokenizers.Tokenizer(models.BPE.from_file(*files))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    tokenizer = JsonTokenizer(save(model, tmp_path / "gpt2.json"))
    assert (tokenizer.vocabulary, tokenizer.eot, tokenizer.dtype) == (50257, 50256, np.uint16)
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [*TEXTS, *((library / name).read_text() for name in ("argparse.py", "pydoc_data/topics.py", "this.py"))]
    for actual, expected, text in zip(
        tokenizer.encode_batch(texts, 2), gpt2.encode_batch(texts, 2), texts, strict=True
    ):
        assert actual.tolist() == expected.tolist(), text[:60]
    assert sum(len(ids) for ids in gpt2.encode_batch(texts)) > 200_000
    # the needle probe asks if a token contains a digit
    digits = [
        [any(48 <= byte <= 57 for byte in candidate.token_bytes(t)) for t in range(0, 50257, 5)]
        for candidate in (tokenizer, gpt2)
    ]
    assert digits[0] == digits[1]
    assert 200 < sum(digits[0]) < 1000


def test_tokenizer_libraries_are_imported_lazily() -> None:
    """Every launch imports the module, and tiktoken and tokenizers are slow to import."""
    program = f"import sys, {ours.__name__}; print({{'tiktoken', 'tokenizers'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# --- training on text ----------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str, str]]
PAIRED = [
    "the cat sat on the mat and the cat ate the rat. " * 30,
    "Ünïcode: das Äffchen, 猫! " * 30,
    "half \ud800 a pair",
]


def test_byte_pairs_are_reproducible_and_lossless(tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PAIRED))
    records = "".join(json.dumps({"body": text, "text": "other"}) + "\n" for text in PAIRED)
    (tmp_path / "bodies.jsonl").write_text(records)
    sources = {"a": ("texts", "300"), "b": ("bodies.jsonl", "300", "--column", "body"), "bytes": ("texts", "257")}
    for name, (source, size, *column) in sources.items():
        code, out, _ = command("data", "tokenizer", source, "--size", size, "--out", f"{name}.json", *column)
        assert (code, out.splitlines()[-1]) == (0, f"{name}.json: {size} tokens")
    first, second, plain = (tmp_path / f"{name}.json" for name in ("a", "b", "bytes"))
    assert first.read_bytes() == second.read_bytes()
    digits_apart, bare = (load_tokenizer("json", str(file), None) for file in (first, plain))
    assert (digits_apart.vocabulary, digits_apart.eot, bare.vocabulary) == (300, 0, 257)
    text = "a <|endoftext|> that is text, and the cat"
    assert b"".join(map(digits_apart.token_bytes, digits_apart.encode(text).tolist())) == text.encode()
    assert [len(bare.encode(text)) for text in PAIRED[:2]] == [len(text.encode()) for text in PAIRED[:2]]
    assert len(digits_apart.encode(" the cat the cat")) == 4
    result = command("data", "prepare", "texts", "--tokenizer", "json", "--tokenizer-file", "a.json", "--json")
    assert result[0] == 0


def test_byte_pairs_with_single_digits(tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.txt").write_text("in 1875 and in 1875 there were 12 12 of 3 " * 50)
    for name, option in {"apart": ["--single-digits"], "together": []}.items():
        assert command("data", "tokenizer", "texts", "--size", "300", "--out", f"{name}.json", *option)[0] == 0
    apart, together = (load_tokenizer("json", str(tmp_path / f"{name}.json"), None) for name in ("apart", "together"))

    def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
        token_texts = [tokenizer.token_bytes(int(token)) for token in tokenizer.encode(text)]
        assert b"".join(token_texts) == text.encode()
        return token_texts

    assert pieces(apart, " in 1875") == [b" in", b" ", b"1", b"8", b"7", b"5"]
    assert pieces(apart, "3 4") == [b"3", b" ", b"4"]
    assert pieces(together, " in 1875") == [b" in", b" 1875"]
    digits = set(b"0123456789")
    of_digits = [
        token_text for token_text in map(apart.token_bytes, range(apart.vocabulary)) if digits & set(token_text)
    ]
    assert sorted(of_digits) == [b"%d" % digit for digit in range(10)]


def test_data_tokenizer_reports_missing_path(tmp_path: Path, command: Command) -> None:
    code, _, err = command("data", "tokenizer", "nowhere", "--out", "x.json")
    assert (code, err) == (2, f"atma-sweep: PATH: {tmp_path}/nowhere does not exist\n")
    assert command("data", "tokenizer", "nowhere", "--size", "200", "--out", "x.json")[0] == 2
    assert not (tmp_path / "x.json").exists()
