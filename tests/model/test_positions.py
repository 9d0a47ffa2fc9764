"""Positions at the embedding: learned ones and randomized labels (docs/reference/mechanisms.md, "Positions")."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from atma_sweep.model import registry
from atma_sweep.model.backbone import AuxiliaryTerms, Backbone, RandomDraws, build
from atma_sweep.model.config import ModelConfig, ModelConfigError
from atma_sweep.model.positions.ape import APE
from atma_sweep.model.resolve import check_model_config, longest_text
from atma_sweep.model.rng import rng_stream
from graded import loss_of
from torch import Tensor

Awake = Callable[..., Backbone]
Aux = Callable[..., AuxiliaryTerms]
Small = Callable[..., ModelConfig]
SCHEMES = list(registry.POSITIONS)
TABLES = [name for name in SCHEMES if issubclass(registry.POSITIONS.load(name), APE)]
"""Those with a row for each place."""


def of(name: str, length: int = 20, **settings: Any) -> dict[str, Any]:
    return {"positions": name, "position_settings": {name: {"length": length, **settings}}}


def draw(seed: int) -> torch.Generator:
    return rng_stream(seed, "test", 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_moves_the_stream_and_keeps_its_type(small: Small, tokens: Tensor, name: str) -> None:
    positioned, plain = (build(small(positions=word), seed=0, dtype=torch.bfloat16) for word in (name, "none"))
    hidden = positioned.features(tokens).hidden_BTD
    assert hidden.dtype == torch.bfloat16
    assert not torch.equal(hidden, plain.features(tokens).hidden_BTD)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_zeros_is_no_table(awake: Awake, tokens: Tensor, auxiliary: Aux, name: str) -> None:
    model, plain = awake(**of(name)), awake()
    with torch.no_grad():
        model.positions.table.weight.zero_()
    for terms in (None, auxiliary()):
        hidden = [network.features(tokens, auxiliary=terms).hidden_BTD for network in (model, plain)]
        assert torch.equal(*hidden)


@pytest.mark.parametrize("name", TABLES)
def test_first_block_reads_embedding_plus_position(awake: Awake, tokens: Tensor, auxiliary: Aux, name: str) -> None:
    model = awake(**of(name))
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.features(tokens, auxiliary=auxiliary())
    positions = model.draw(auxiliary(), *tokens.shape).positions_BT
    table, embedding = model.positions.table.weight, model.embedding.weight
    expected = torch.stack([
        torch.stack([embedding[token] + table[position] for token, position in zip(row, at, strict=True)])
        for row, at in zip(tokens, positions.expand(len(tokens), -1), strict=True)
    ])  # fmt: skip
    assert torch.equal(seen[0], expected)
    if name == "ape":
        assert positions.tolist() == [list(range(12))]


def test_rows_beyond_the_text_get_no_gradient(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model = awake(**of("ape"))
    loss_of(model, tokens, auxiliary()).backward()
    grad = model.positions.table.weight.grad
    assert (grad[:11].abs().amax(1) > 0).all()
    assert not grad[11:].any()


def test_permuting_tokens_with_positions_permutes_the_output(awake: Awake) -> None:
    """Before the blocks, only the table tells the order of tokens."""
    model = awake(**of("ape"))
    tokens = torch.randint(0, 37, (1, 9), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    streams: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    for permutation in (torch.arange(9), order):
        model.features(tokens[:, permutation], auxiliary=RandomDraws(positions_BT=permutation[None]))
    assert torch.equal(streams[1], streams[0][:, order])


def test_labels_rise_and_are_all_equally_likely(small: Small) -> None:
    rows, length, table = 20_000, 7, 20
    positions = build(small(**of("label", table)), seed=0).positions.places(rows, length, draw(0))
    assert positions.shape == (rows, length)
    assert (positions.diff(dim=1) > 0).all()
    assert (positions.min(), positions.max()) == (0, table - 1)
    share = torch.bincount(positions.flatten(), minlength=table).double() / rows
    p = length / table
    assert (share - p).abs().max() < 4.5 * math.sqrt(p * (1 - p) / rows)
    # pairs as well: 7 of 20 without replacement
    both = ((positions == 3).any(1) & (positions == 11).any(1)).double().mean()
    assert abs(both - 7 * 6 / (20 * 19)) < 4.5 * math.sqrt(0.11 * 0.89 / rows)


def test_label_with_a_table_of_text_length_equals_ape(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    ape, label = awake(**of("ape", 11)), awake(**of("label", 11))
    assert torch.equal(loss_of(ape, tokens, auxiliary()), loss_of(label, tokens, auxiliary()))


def test_labels_depend_on_seed_step_and_micro_batch_alone(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    model, terms = awake(**of("label", 50)), auxiliary()
    first = loss_of(model, tokens, terms)
    torch.manual_seed(99)
    assert torch.equal(first, loss_of(awake(**of("label", 50)), tokens, terms))
    positions = model.draw(terms, 2, 11).positions_BT
    assert not torch.equal(positions[0], positions[1]), "each row has its own"
    for change in ({"seed": 1}, {"step": 4}, {"micro": 0}):
        assert not torch.equal(positions, model.draw(replace(terms, **change), 2, 11).positions_BT)


def test_labels_of_an_evaluation_depend_on_the_length_alone(awake: Awake, tokens: Tensor) -> None:
    model = awake(**of("label", 50))
    with torch.no_grad():
        both = model.features(tokens).hidden_BTD
        alone = model.features(tokens[1:]).hidden_BTD
        assert (both[1:] - alone).abs().max() <= 1e-13
        for chunk in (1, 5, 128):
            assert (model.features(tokens, chunk=chunk).hidden_BTD - both).abs().max() <= 1e-12
    read: list[Tensor] = []
    model.positions.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    for length in (11, 12):
        model.features(tokens[:, :length])
    assert not torch.equal(read[0], read[1][:, :11])


@pytest.mark.parametrize("name", TABLES)
def test_positions_leave_initial_weights_unchanged(small: Small, auxiliary: Aux, name: str) -> None:
    terms = auxiliary(regularizer="weak", distractor=True)
    positioned, plain = (build(small(**changes), seed=3) for changes in (of(name), {}))
    weights = dict(positioned.named_parameters())
    assert all(torch.equal(weights[key], value) for key, value in plain.named_parameters())
    assert torch.equal(positioned.draw(terms, 2, 5).sketches_LKD, plain.draw(terms, 2, 5).sketches_LKD)


@pytest.mark.parametrize("name", TABLES)
def test_table_group_type_and_initial_values(small: Small, name: str) -> None:
    config = check_model_config(small(**of(name, 3000, std=0.5)))
    model = build(config, seed=0, dtype=torch.bfloat16)
    table = model.positions.table.weight
    assert [name for name, _ in model.parameter_groups()["embedding"]] == ["embedding.weight", "positions.table.weight"]
    assert table.dtype == model.embedding.weight.dtype == torch.bfloat16
    assert table.float().std().item() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("name", TABLES)
def test_text_longer_than_the_table_is_refused(awake: Awake, tokens: Tensor, auxiliary: Aux, name: str) -> None:
    model = awake(**of(name, 11))
    assert longest_text(model.config) == 11
    assert model.features(tokens[:, :11]).hidden_BTD.shape[1] == 11
    for options in ({}, {"auxiliary": auxiliary()}, {"chunk": 4}):
        with pytest.raises(ValueError, match=f"position scheme {name} supports at most 11 tokens, got 12"):
            model.features(tokens, **options)


def test_no_scheme_is_inert(awake: Awake, tokens: Tensor, auxiliary: Aux) -> None:
    values = [
        loss_of(awake(**changes), tokens, auxiliary()).item() for changes in ({}, *(of(name) for name in SCHEMES))
    ]
    assert len({round(value, 6) for value in values}) == 1 + len(SCHEMES)


@pytest.mark.parametrize(("settings", "message"), [
    ({"positions": "apr"}, "model.positions: no position scheme named 'apr'; allowed: " + ", ".join(["none", *sorted(SCHEMES)])),
    (of("ape", 0), "model.position_settings.ape.length: Input should be greater than or equal to 1, got 0"),
    (of("ape", width=3), "model.position_settings.ape.width: no such setting; allowed: length, std"),
    ({"position_settings": {"rope": {}}}, "model.position_settings.rope: no such section; allowed: " + ", ".join(sorted(SCHEMES))),
])  # fmt: skip
def test_wrong_settings(small: Small, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        check_model_config(small(**settings))
    assert str(error.value) == message
