"""Text that trained cells write: through the library, and at the command line."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.inference.decode import PagedDecoder
from atma_sweep.sweep.attempt import trained_cells as loading
from atma_sweep.sweep.attempt.generation import SamplingError, generate_text
from atma_sweep.sweep.attempt.trained_cells import LoadedModel
from atma_sweep.sweep.commands import generate as command
from atma_sweep.sweep.data.tokenizer import ByteTokenizer
from refusals import refused

SMALL = {"d_model": 16, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "vocab_size": 264}


@pytest.fixture
def trained(wake: Any) -> Any:
    """Return a function from changes of the network to a byte-level cell with eight tokens that no byte has."""

    def make(**changes: Any) -> LoadedModel:
        model = build(ModelConfig(**(SMALL | changes)), seed=0)
        wake(model)
        return LoadedModel(model.eval(), ByteTokenizer(), SimpleNamespace(), "0123456789ab", "polar-s0", "ab" * 32)  # type: ignore[arg-type]

    return make


def test_text_equals_greedy_decoding_of_the_network(trained: Any) -> None:
    cell = trained(memory="gated_delta")
    text = "".join(cell.generate("né", tokens=9, temperature=0))
    tokens = [256, *"né".encode()]
    for _ in range(9):
        with torch.no_grad():
            tokens.append(int(cell.model(torch.tensor([tokens]))[0, -1, :257].argmax()))
        if tokens[-1] == 256:
            break
    expected = bytes(token for token in tokens[4:] if token < 256).decode(errors="replace")
    assert text == expected
    assert text == "".join(cell.generate("né", tokens=9, temperature=0))


def test_multibyte_characters_are_not_split(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = trained()
    tokens = [*"aé€".encode(), 0xE2, 0x82]
    monkeypatch.setattr("atma_sweep.sweep.attempt.generation.generate_tokens", lambda *args, **options: iter(tokens))
    assert list(cell.generate("")) == ["a", "é", "€", "�"]


def test_a_text_ends_where_the_network_ends_it(trained: Any) -> None:
    cell = trained()
    with torch.no_grad():
        cell.model.head.bias.zero_()[256] = 50.0
    assert list(cell.generate("x", tokens=20, temperature=0)) == []
    with torch.no_grad():
        cell.model.head.bias.zero_()[260] = 50.0  # a token that the tokenizer does not know
    assert len("".join(cell.generate("x", tokens=20, temperature=0)).encode()) > 0


@pytest.mark.thorough
def test_generate_with_an_8_bit_cache(trained: Any) -> None:
    """The text of a decoder with such a cache, and another than that of 16 bits; no other mixer has one."""
    sizes = {"attn_type": "wall", "mixers": {"wall": {"gate_std": 0.2, "gate_bias": 1.0}}, "head_dim": 64}
    cell = trained(**sizes)
    options = {"tokens": 40, "temperature": 0.8, "top_p": 0.9}
    differing = 0  # a draw falls between both probabilities once in some hundred tokens
    for seed in range(8):
        decoder = PagedDecoder(cell.model, tokens=64, fp8=True)
        expected = "".join(
            generate_text(cell.model, cell.tokenizer, "né", full_context=False, decoder=decoder, seed=seed, **options)
        )
        assert "".join(cell.generate("né", fp8=True, seed=seed, **options)) == expected
        differing += "".join(cell.generate("né", seed=seed, **options)) != expected
    assert differing > 0
    for changes, reason in (
        ({}, "mixer Polar has no 8-bit cache"),
        ({"attn_type": "path"}, "mixer PaTH cannot decode"),
    ):
        assert reason in refused(lambda changes=changes: trained(**changes).generate("x", fp8=True), SamplingError)


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -0.5}, "temperature must be 0 or more, got -0.5"),
    ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ({"tokens": -1}, "tokens must be 0 or more, got -1"),
    ({"tokens": 30}, "position scheme ape supports at most 32 tokens, fewer than 4 of the prompt and 30 new ones; request at most 28"),
])  # fmt: skip
def test_impossible_requests_are_refused_at_once(trained: Any, options: dict[str, Any], message: str) -> None:
    cell = trained(positions="ape", position_settings={"ape": {"length": 32}})
    assert refused(lambda: cell.generate("abc", **options), SamplingError) == message
    assert len("".join(cell.generate("abc", tokens=28)).encode()) > 0


def test_generate_prints_prompt_and_continuation(
    trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = trained(attn_type="path")
    monkeypatch.setattr(loading, "load", lambda cell_name, **options: cell)
    expected = "".join(cell.generate("say ", tokens=5, seed=3))
    command.generate("polar", prompt="say ", tokens=5, seed=3, device="cpu", as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["text"] == expected
    assert json.loads(printed.out)["seed"] == 3
    assert printed.err == "mixer PaTH cannot decode token by token: every new token recomputes the whole text (slow)\n"
    with pytest.raises(SamplingError, match="--top-p must be above 0"):
        command.generate("polar", top_p=0.0, device="cpu")
    # what a terminal could be steered with is made visible
    monkeypatch.setattr(LoadedModel, "generate", lambda self, prompt, **options: iter(["a\x1b[2J", "b\n"]))
    command.generate("polar", prompt="say ", device="cpu")
    assert capsys.readouterr().out == "say a�[2Jb\n\n"
