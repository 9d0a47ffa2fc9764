"""Preparations killed at every change of a file and at random times give the same result as undisturbed ones."""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mortal
import numpy as np
import pyarrow as pa
import pytest
from copies import article, finepdfs, fineweb_edu, prose, published_shard, table, wikitext
from patience import PATIENCE_S, until
from prepared import naive, number_of, put


def packed(path: Path, texts: list[str]) -> Path:
    path.write_bytes(lzma.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    return path


def interesting(folder: Path) -> Path:
    """Write a file in which a text draws validation and the long ones are not stored in reading order."""
    texts = dict(enumerate(prose(14), 1))
    for name in (f"text{n}.jsonl.xz" for n in range(999)):
        held = list(naive({f"{name}:{n}": text for n, text in texts.items()}, long=150)["heldout"])
        drawn = any(number_of(f"{name}:{n}") < 0.05 and len(text) < 140 for n, text in texts.items())
        if drawn and len(held) > 2 and held != sorted(held, key=lambda name: int(name.rpartition(":")[2])):
            return packed(folder / name, list(texts.values()))
    raise AssertionError("no such name")


def without_validation(folder: Path) -> Path:
    """Write texts of which no name draws validation, so that the first pass is discarded and every tenth validates."""
    names = [name for name in (f"{n}.txt" for n in range(99)) if number_of(name) > 0.05][:11]
    for name, text in zip(names, prose(11), strict=True):
        put(folder / "t", [text], name)
    return folder / "t"


def shards(folder: Path) -> Path:
    for number in (1, 2):
        published_shard(folder / "s" / f"x_train_{number}.bin", np.arange(40) + number)
    return published_shard(folder / "s" / "x_val_0.bin", [256, 1, 2]).parent


def tables(folder: Path) -> Path:
    table(folder / "t" / "a.parquet", prose(20))
    return table(folder / "t" / "b.parquet", prose(20, 1), group=3).parent


def zstandard(folder: Path) -> Path:
    """Write a folder with compressed JSON lines in two frames, and a compressed text file."""
    rows = ["".join(json.dumps({"body": text}) + "\n" for text in prose(20, seed)).encode() for seed in (0, 1)]
    frames = [pa.Codec("zstd").compress(raw, asbytes=True) for raw in (*rows, b"one text")]
    (folder / "t").mkdir()
    (folder / "t" / "a.jsonl.zst").write_bytes(frames[0] + frames[1])
    (folder / "t" / "b.txt.zst").write_bytes(frames[2])
    return folder / "t"


def articles(folder: Path) -> Path:
    """Write articles, whose source cannot be resumed and starts again."""
    rows = {
        split: [row for n in range(count) for row in article(f"{n}", f" {text}\n" * n)]
        for split, count, text in (("train", 12, "a b c"), ("validation", 4, "d"), ("test", 3, "e f"))
    }
    return wikitext(folder / "copy", rows)


EVERY, CHAIN = {"mode": "every"}, {"mode": "chain"}
KILLED = [
    # what is prepared, how it is killed, and more deaths than this; two batches of the first are saved each, with two shards
    ("files", interesting, EVERY | {"small": {"shard": 900}}, {}, 50),
    ("files", without_validation, EVERY, {}, 50),
    ("shards", shards, EVERY, {"heldout": "long"}, 30),
    ("fineweb-edu", lambda folder: fineweb_edu(folder / "copy", prose(45)), CHAIN | {"seed": 3, "turns": 2, "small": {"documents": 4}},
     {"heldout": "long", "train_tokens": 5000}, 8),
    ("files", zstandard, CHAIN | {"seed": 5, "small": {"documents": 4}}, {"column": "body"}, 8),
    ("hub", lambda folder: finepdfs(folder / "copy", prose(30)), CHAIN | {"seed": 6, "small": {"documents": 4}},
     {"settings": {"hub": {"dataset": "own/text"}}}, 5),
    ("files", tables, CHAIN | {"seed": 4, "small": {"documents": 4}}, {}, 8),
    ("wikitext-103", articles, CHAIN | {"seed": 7, "turns": 2}, {}, 3),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("corpus", "make", "how", "settings", "deaths"), KILLED)
def test_killed_preparation_resumes_to_same_corpus(
    tmp_path: Path, corpus: str, make: Callable[[Path], Path], how: Any, settings: Any, deaths: int
) -> None:
    path, folder = make(tmp_path), tmp_path / "work"
    folder.mkdir()
    lent = {"heldout": str(put(tmp_path / "long", prose(12, 7)))} if "heldout" in settings else {}
    data = {"corpus": corpus, "path": str(path), "heldout_tokens": 150, **settings, **lent}
    order = mortal.ordered(folder=str(folder), data=data, **how)
    assert order["wrong"] == []
    assert order["points"] > deaths


# --- random kills in separate processes ---------------------------------------------------------------------------

PROGRAM = "import sys, mortal; mortal.small(documents=1, shard=1500); sys.exit(mortal.command(*sys.argv[1:]))"


def start(*arguments: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(mortal.__file__).parent)}
    command = [sys.executable, "-c", PROGRAM, "data", "prepare", *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def saved(corpora: Path) -> int:
    """Return the number of documents that the current preparation has saved."""
    for path in corpora.glob("*.part/state.json"):
        return int(json.loads(path.read_text())["documents"])
    return 0


def wait(process: subprocess.Popen[str], corpora: Path, documents: int) -> None:
    def enough() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return saved(corpora) >= documents

    until(enough, f"{documents} documents", pause=0.002)


@pytest.mark.thorough
def test_two_preparations_survive_random_kills(tmp_path: Path) -> None:
    path = packed(tmp_path / "größe text.jsonl.xz", prose(900))
    arguments, dying = (path, "--heldout-tokens", 400, "--runs"), tmp_path / "dying"
    expected = start(*arguments, tmp_path / "whole")
    draw = random.Random(6)
    for documents in (1, 200):
        process = start(*arguments, dying)
        wait(process, dying / "corpora", documents)
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -9
    before = saved(dying / "corpora")
    assert 200 <= before < 900
    first, second = start(*arguments, dying), start(*arguments, dying)
    wait(first, dying / "corpora", before + 50)
    # one prepares while the other waits; if either is killed, the other finishes
    first.kill()
    out = second.communicate(timeout=PATIENCE_S)[0]
    assert second.returncode == 0, out
    first.communicate()
    assert (
        "\nfiles: 900 documents, " in f"\n{expected.communicate(timeout=PATIENCE_S)[0]}"
    )  # after its progress, if it took long
    assert expected.returncode == 0
    assert mortal.contents(dying / "corpora") == mortal.contents(tmp_path / "whole" / "corpora")
    assert not list((dying / "corpora").glob("*.part"))
