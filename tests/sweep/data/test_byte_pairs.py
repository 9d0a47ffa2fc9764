"""A tokenizer made from text: repeatable, whole, and what `data prepare` takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from atma_sweep.sweep.data.tokenizer import Tokenizer, load_tokenizer

Command = Callable[..., tuple[int, str, str]]
TEXTS = [
    "the cat sat on the mat and the cat ate the rat. " * 30,
    "Ünïcode: das Äffchen, 猫! " * 30,
    "half \ud800 a pair",
]


def test_it_repeats_knows_every_text_and_joins_what_stands_together_often(tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, size in {"a": 300, "b": 300, "bytes": 257}.items():
        code, out, _ = command("data", "tokenizer", "texts", "--size", str(size), "--out", f"{name}.json")
        assert (code, out.splitlines()[-1]) == (0, f"{name}.json: {size} tokens")
    first, second, plain = (tmp_path / f"{name}.json" for name in ("a", "b", "bytes"))
    assert first.read_bytes() == second.read_bytes()
    one, bare = (load_tokenizer("json", str(file), None) for file in (first, plain))
    assert (one.vocabulary, one.eot, bare.vocabulary) == (300, 0, 257)
    text = "a <|endoftext|> that is text, and the cat"
    assert b"".join(map(one.token_bytes, one.encode(text).tolist())) == text.encode()
    assert [len(bare.encode(text)) for text in TEXTS[:2]] == [len(text.encode()) for text in TEXTS[:2]]
    assert len(one.encode(" the cat the cat")) == 4
    found = command("data", "prepare", "texts", "--tokenizer", "json", "--tokenizer-file", "a.json", "--json")
    assert found[0] == 0


def test_single_digits_are_in_no_token_with_anything_else(tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.txt").write_text("in 1875 and in 1875 there were 12 12 of 3 " * 50)
    for name, option in {"apart": ["--single-digits"], "together": []}.items():
        assert command("data", "tokenizer", "texts", "--size", "300", "--out", f"{name}.json", *option)[0] == 0
    apart, together = (load_tokenizer("json", str(tmp_path / f"{name}.json"), None) for name in ("apart", "together"))

    def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
        found = [tokenizer.token_bytes(int(token)) for token in tokenizer.encode(text)]
        assert b"".join(found) == text.encode()
        return found

    assert pieces(apart, " in 1875") == [b" in", b" ", b"1", b"8", b"7", b"5"]
    assert pieces(apart, "3 4") == [b"3", b" ", b"4"]
    assert pieces(together, " in 1875") == [b" in", b" 1875"]
    digits = set(b"0123456789")
    of_digits = [one for one in map(apart.token_bytes, range(apart.vocabulary)) if digits & set(one)]
    assert sorted(of_digits) == [b"%d" % digit for digit in range(10)]


def test_what_is_no_text_is_said(tmp_path: Path, command: Command) -> None:
    code, _, err = command("data", "tokenizer", "nowhere", "--out", "x.json")
    assert (code, err) == (2, f"atma-sweep: PATH: {tmp_path}/nowhere does not exist\n")
    assert command("data", "tokenizer", "nowhere", "--size", "200", "--out", "x.json")[0] == 2
    assert not (tmp_path / "x.json").exists()
