"""Grids written on the spot, and models that take a step in milliseconds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from attempts import Room, room_of, small_grid
from bench import Bench
from optional_data import optional_data
from registries import scope

FINGERPRINT = "f" * 64
# a base that nobody tunes, so that line numbers, ids and messages of these tests stay
MICRO = """
set:
  model: {d_model: 80, n_layers: 4, n_heads: 4, n_kv_heads: 2, head_dim: 20, vocab_size: 264, window_size: 64}
  data: {corpus: stdlib, tokenizer: bytes}
  train: {tokens: 153_600, seq_len: 128, batch_tokens: 1024, micro_batch: 8}
  eval: {lengths: [128, 256, 512, 1024], validate_every: 30, validation_tokens: 16_384}
"""
SMALL = {"d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 29, "window_size": 3}


def fake(data: DataConfig) -> str:
    """A corpus hash that needs no corpus; MAD's difficulties, which no other setting distinguishes, have their own."""
    if data.corpus != "mad":
        return FINGERPRINT
    return hashlib.sha256(json.dumps(data.settings["mad"], sort_keys=True).encode()).hexdigest()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file into the test's folder, where the base `micro` lies: write(text, name="g.yaml")."""
    (tmp_path / "micro.yaml").write_text(MICRO)

    def put(text: str, name: str = "g.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return put


@pytest.fixture
def cells(write: Callable[..., Path]) -> Callable[..., list[Cell]]:
    """Cells of a grid with the given lines after `name` and `extends: micro`."""

    def expand(text: str = "", *, base: str = "micro", sets: tuple[str, ...] = ()) -> list[Cell]:
        path = write(f"name: g\nextends: {base}\n{text}")
        return load_grid(path, sets=sets, rename="h" if sets else None).expand(fake)

    return expand


@pytest.fixture
def fake_fingerprint() -> Callable[[DataConfig], str]:
    return fake


@pytest.fixture
def network(wake: Callable[[Backbone], None]) -> Callable[..., Backbone]:
    """network(awake=False, dtype=float32, **model settings); `awake` adds noise so that no branch ends in zeros."""

    def make(*, awake: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Backbone:
        model = build(ModelConfig(**(SMALL | settings)), seed=seed, dtype=dtype)
        if awake:
            wake(model)
        return model

    return make


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new database."""
    with contextlib.closing(open_store(tmp_path / "atma.db", create=True)) as opened:
        yield opened


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A folder in which commands run; whatever runs at the end is ended."""
    with contextlib.closing(Bench(tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small grid file, shared by the tests of a module."""
    return small_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture
def room(grid: Path, tmp_path: Path) -> Callable[..., Room]:
    """Return a function of settings `path=value` that makes a folder for attempts of the small grid (`room_of`)."""
    return lambda *sets: room_of(grid, tmp_path, *sets)


@pytest.fixture(autouse=True, scope="module")
def plugged_in() -> Iterator[None]:
    """A plugin that one file of tests loads is unknown to the next."""
    modules = set(sys.modules)
    with scope():
        yield
    for name in set(sys.modules) - modules:
        if name.startswith("atma_sweep_plugin_"):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty caches of the hub and of tiktoken: tests neither find what a user has there nor leave anything."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HOME", "TIKTOKEN_CACHE_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="session")
def gpt2() -> Any:
    """GPT-2's tokenizer from its ranks, which are optional data of the tests."""
    from atma_sweep.sweep.data.tokenizer import load_tokenizer

    return load_tokenizer("gpt2", str(optional_data("data/gpt2/gpt2.tiktoken")))


@pytest.fixture(scope="session")
def byte_pair_texts() -> list[str]:
    """Generated documents, in which single digits behind a space are frequent, as the needle has them."""
    draw = random.Random(7)
    subjects, verbs = ("The access code for record", "A river", "Her answer", "This number"), ("is", "was", "follows")
    return [
        " ".join(
            f"{draw.choice(subjects)} {draw.choice(verbs)} {' '.join(str(draw.randrange(10)) for _ in range(5))}."
            for _ in range(40)
        )
        for _ in range(50)
    ]


@pytest.fixture(scope="session")
def byte_pair_file(byte_pair_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer of byte pairs in the format of Hugging Face tokenizers, made from generated text."""
    from atma_sweep.sweep.data.byte_pairs import byte_pairs

    file = tmp_path_factory.mktemp("pairs") / "pairs.json"
    byte_pairs(byte_pair_texts, 600).save(str(file))
    return file


@pytest.fixture(scope="session")
def pairs(byte_pair_file: Path) -> Any:
    """Tokenizer of that file as a corpus has it; what tests of more than one byte a token need, without anybody's weights."""
    from atma_sweep.sweep.data.tokenizer import load_tokenizer

    return load_tokenizer("json", str(byte_pair_file))


@pytest.fixture
def command(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in the test's folder and return (exit code, stdout, stderr)."""
    return run
