"""Further long texts (`eval.texts`) and the window of training (`eval.window`) in the probes that read documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig
from atma_sweep.sweep.data.long_texts import read_long_text
from atma_sweep.sweep.data.sources import CorpusError
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.probes import bound, requested
from atma_sweep.sweep.probes.subject import CellSubject, run_probe
from torch.utils._python_dispatch import TorchDispatchMode

Make = Callable[..., CellSubject]
BYTES = load_tokenizer("bytes")


def write_records(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_long_text_takes_the_first_long_documents(tmp_path: Path) -> None:
    """Documents of 20, 5, 30, 8 and 40 letters; a document needs 9 tokens, of which one ends the text before it."""
    path = write_records(tmp_path / "code.jsonl", "a" * 20, "b" * 5, "c" * 30, "d" * 8, "e" * 40)
    text = read_long_text(path, BYTES, 3, 9)
    assert text.names == ("code.jsonl:1", "code.jsonl:3", "code.jsonl:4")
    assert [bytes(d[1:].tolist()) for d in text.documents] == [b"a" * 8, b"c" * 8, b"d" * 8]
    assert [d[0] for d in text.documents] == [BYTES.eot] * 3
    expected = b"".join(np.array([256, *[ord(letter)] * 8], dtype="<u4").tobytes() for letter in "acd")
    assert text.sha256 == hashlib.sha256(expected).hexdigest()
    # too few of 31 tokens: the longest of the others follow
    assert read_long_text(path, BYTES, 3, 31).names == ("code.jsonl:3", "code.jsonl:5", "code.jsonl:1")
    with pytest.raises(CorpusError, match="does not exist"):
        read_long_text(str(tmp_path / "gone"), BYTES, 1, 9)


def test_requested_adds_a_probe_per_text() -> None:
    config = EvalConfig(
        probes=("val", "clean", "junk", "needle"), lengths=(16, 32), texts=("/x/code.jsonl.xz", "/y/Books")
    )
    names = dict.fromkeys(name for name, _ in requested(config))
    assert list(names) == ["val", "clean", "clean:code", "clean:books", "junk", "needle", "needle:code", "needle:books"]
    assert [length for name, length in requested(config) if name == "needle:code"] == [16, 32]
    cell = CellConfig(eval=config.model_copy(update={"settings": {"needle": {"trials": 3}}}))
    probe = bound("needle:books", cell)
    assert (probe.name, probe.text, probe.settings.trials) == ("needle:books", "books", 3)
    assert probe.value("digit_accuracy", 0.5, 16).probe == "needle:books"
    with pytest.raises(ValueError, match="different names"):
        EvalConfig(texts=("a/code.txt", "b/code.jsonl"))
    assert not {"texts", "window"} & EvalConfig().model_dump().keys()


@pytest.mark.parametrize("name", ["clean", "position_nll", "needle"])
def test_probe_on_a_text_reads_its_documents(name: str, network: Any, subject: Make, tmp_path: Path) -> None:
    """The same numbers as of a subject whose held-out documents are those of the text."""
    texts = ["".join(map(chr, np.random.default_rng(seed).integers(97, 111, 400))) for seed in range(10, 13)]
    model = network(awake=True, vocab_size=264).eval()
    plain = subject(model, lengths=(24, 41), documents=3)
    path = write_records(tmp_path / "stories.jsonl", *texts)
    on = replace(
        plain, config=plain.config.model_copy(update={"eval": plain.config.eval.model_copy(update={"texts": (path,)})})
    )
    held = [np.array([256, *text.encode()], dtype=np.uint16) for text in texts]
    expected = replace(plain, corpus=replace(plain.corpus, heldout=held))
    for (ours, ours_each), (theirs, theirs_each) in zip(
        run_probe(f"{name}:stories", on, [24, 41]), run_probe(name, expected, [24, 41]), strict=True
    ):
        assert [replace(m, probe=name) for m in ours] == theirs
        assert [replace(e, probe=name) for e in ours_each] == theirs_each
        assert {m.probe for m in ours} == {f"{name}:stories"}
    own = next(run_probe(name, on, [24]))[0]
    assert own[0].value != next(run_probe(f"{name}:stories", on, [24]))[0][0].value or name == "needle"


def test_window_of_training_is_an_evaluation_setting(network: Any, subject: Make) -> None:
    model = network(awake=True, vocab_size=264, window=True, window_size=4, dtype=torch.float64).eval()
    full = subject(model, lengths=(40,))
    trained = replace(
        full, config=full.config.model_copy(update={"eval": full.config.eval.model_copy(update={"window": "trained"})})
    )
    rows = torch.from_numpy(np.stack([d[:41] for d in full.documents]).astype(np.int64))
    for who, full_context in ((full, True), (trained, False)):
        hidden = model.features(rows[:, :-1], full_context=full_context).hidden_BTD
        expected = model.token_losses(hidden, rows[:, 1:]).mean()
        assert next(run_probe("clean", who, [40]))[0][0].value == pytest.approx(expected.item(), abs=1e-9)


class LargestTensor(TorchDispatchMode):
    """Records the number of values of the largest tensor that any operation returns."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return result


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", ["rope", "fox", "wall"])
def test_long_documents_need_no_square_of_their_length(mixer: str, network: Any, subject: Make) -> None:
    """Twice the length: at most twice the largest tensor, far from T x T, and the vocabulary enters by chunks alone."""
    model = network(awake=True, vocab_size=264, attn_type=mixer).eval()
    sizes = {}
    for length in (1024, 2048):
        who = subject(model, length=2100, documents=1, held=1, lengths=(length,), chunk_tokens=64)
        with LargestTensor() as largest:
            next(run_probe("clean", who, [length]))
        sizes[length] = largest.values
    assert sizes[2048] <= 2.1 * sizes[1024]
    assert sizes[2048] < 2048 * 2048 / 4


def test_grid_resolves_and_checks_texts(tmp_path: Path, write: Callable[..., Path], fake_fingerprint: Any) -> None:
    text = "name: g\nextends: micro\naxes: {attn_type: [nope]}\nset:\n  eval.texts: [code.jsonl]\n"
    with pytest.raises(GridError, match=r"code\.jsonl does not exist"):
        load_grid(write(text)).expand(fake_fingerprint)
    path = write_records(tmp_path / "code.jsonl", "x" * 50)
    (cell,) = load_grid(write(text)).expand(fake_fingerprint)
    (plain,) = load_grid(write(text.split("set:")[0])).expand(fake_fingerprint)
    assert cell.config.eval.text_paths == {"code": path}
    assert cell.id == plain.id
