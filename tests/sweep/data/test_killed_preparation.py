"""Preparations that are killed, at every change of a file and at random moments, end as if nothing had happened."""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mortal
import numpy as np
import pytest
from copies import article, fineweb_edu, prose, published_shard, table, wikitext
from patience import PATIENCE_S, until
from prepared import naive, number_of, put


@pytest.fixture
def ordered(tmp_path: Path) -> Any:
    """ordered(mode, path, corpus, **settings) gives how often it died; every corpus is as an uninterrupted one."""

    def order(mode: str, path: Path, corpus: str = "files", **more: Any) -> int:
        folder = tmp_path / "work"
        folder.mkdir()
        driver = {name: more.pop(name) for name in ("seed", "turns", "small") if name in more}
        data = {"corpus": corpus, "path": str(path), "heldout_tokens": 150, **more}
        found = mortal.ordered(folder=str(folder), mode=mode, data=data, **driver)
        assert found["wrong"] == []
        return int(found["points"])

    return order


def packed(path: Path, texts: list[str]) -> Path:
    path.write_bytes(lzma.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    return path


@pytest.mark.thorough
def test_text_of_ones_own_killed_before_every_change(tmp_path: Path, ordered: Any) -> None:
    texts = dict(enumerate(prose(14), 1))

    def interesting(name: str) -> bool:
        """Some text draws validation, and the long ones do not stand in the order in which they are kept."""
        held = list(naive({f"{name}:{n}": text for n, text in texts.items()}, long=150)["heldout"])
        drawn = any(number_of(f"{name}:{n}") < 0.05 and len(text) < 140 for n, text in texts.items())
        return drawn and len(held) > 2 and held != sorted(held, key=lambda name: int(name.rpartition(":")[2]))

    name = next(name for name in (f"text{n}.jsonl.xz" for n in range(999)) if interesting(name))
    path = packed(tmp_path / name, list(texts.values()))
    points = ordered("every", path, small={"shard": 900})
    assert points > 50, "two batches, saved each, with two shards and held-out documents"


@pytest.mark.thorough
def test_a_second_pass_killed_before_every_change(tmp_path: Path, ordered: Any) -> None:
    """No name draws validation, so what was written is thrown away, and every tenth text validates."""
    names = [name for name in (f"{n}.txt" for n in range(99)) if number_of(name) > 0.05][:11]
    for name, text in zip(names, prose(11), strict=True):
        put(tmp_path / "t", [text], name)
    assert ordered("every", tmp_path / "t") > 50


@pytest.mark.thorough
def test_adopted_shards_killed_before_every_change(tmp_path: Path, ordered: Any) -> None:
    for number in (1, 2):
        published_shard(tmp_path / "s" / f"x_train_{number}.bin", np.arange(40) + number)
    published_shard(tmp_path / "s" / "x_val_0.bin", [256, 1, 2])
    long = put(tmp_path / "long", prose(12))
    assert ordered("every", tmp_path / "s", "shards", heldout=str(long)) > 30


@pytest.mark.thorough
def test_a_dataset_killed_again_and_again(tmp_path: Path, ordered: Any) -> None:
    root = fineweb_edu(tmp_path / "copy", prose(45))
    long = put(tmp_path / "long", prose(9, 7))
    asked = {"heldout": str(long), "train_tokens": 5000}
    assert ordered("chain", root, "fineweb-edu", **asked, seed=3, turns=2, small={"documents": 4}) > 8


def test_parquet_killed_again_and_again(tmp_path: Path, ordered: Any) -> None:
    table(tmp_path / "t" / "a.parquet", prose(20))
    table(tmp_path / "t" / "b.parquet", prose(20, 1), group=3)
    assert ordered("chain", tmp_path / "t", seed=4, small={"documents": 4}) > 8


@pytest.mark.thorough
def test_articles_killed_again_and_again(tmp_path: Path, ordered: Any) -> None:
    """They have no point to go on from, and begin anew."""
    texts = {
        split: [row for n in range(count) for row in article(f"{n}", f" {text}\n" * n)]
        for split, count, text in (("train", 12, "a b c"), ("validation", 4, "d"), ("test", 3, "e f"))
    }
    root = wikitext(tmp_path / "copy", texts)
    assert ordered("chain", root, "wikitext-103", seed=7, turns=2) > 3


# --- by the clock, in processes of their own ----------------------------------------------------------------------

PROGRAM = "import sys, mortal; mortal.small(documents=1, shard=1500); sys.exit(mortal.command(*sys.argv[1:]))"


def start(*arguments: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(Path(mortal.__file__).parent)}
    command = [sys.executable, "-c", PROGRAM, "data", "prepare", *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def saved(corpora: Path) -> int:
    """Documents that the preparation under way has on the disk."""
    for path in corpora.glob("*.part/state.json"):
        return int(json.loads(path.read_text())["documents"])
    return 0


def wait(process: subprocess.Popen[str], corpora: Path, documents: int) -> None:
    def enough() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return saved(corpora) >= documents

    until(enough, f"{documents} documents", pause=0.002)


@pytest.mark.thorough
def test_two_processes_and_kills_at_random_moments(tmp_path: Path) -> None:
    path = packed(tmp_path / "größe text.jsonl.xz", prose(900))
    asked, dying = (path, "--heldout-tokens", 400, "--runs"), tmp_path / "dying"
    whole = start(*asked, tmp_path / "whole")
    draw = random.Random(6)
    for documents in (1, 200):
        process = start(*asked, dying)
        wait(process, dying / "corpora", documents)
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -9
    before = saved(dying / "corpora")
    assert 200 <= before < 900
    first, second = start(*asked, dying), start(*asked, dying)
    wait(first, dying / "corpora", before + 50)
    # one of them works, the other waits for it; whichever dies, the other ends
    first.kill()
    out = second.communicate(timeout=PATIENCE_S)[0]
    assert second.returncode == 0, out
    first.communicate()
    assert (
        "\nfiles: 900 documents, " in f"\n{whole.communicate(timeout=PATIENCE_S)[0]}"
    )  # after its progress, if it took long
    assert whole.returncode == 0
    assert mortal.contents(dying / "corpora") == mortal.contents(tmp_path / "whole" / "corpora")
    assert not list((dying / "corpora").glob("*.part"))
