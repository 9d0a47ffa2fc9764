"""Texts that a network writes at its validations: the same however often it is stopped, and its training knows nothing of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.dashboard.core_block import _thinned_samples
from atma_sweep.reports.dashboard.page import build_blocks
from atma_sweep.reports.live.cell_details import cell_details
from atma_sweep.results.store.records import Sample
from atma_sweep.sweep.attempt.trained_cells import load
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.errors import SweepError
from attempts import STEPS, Room

SAMPLE_SETTINGS = ("eval.samples.prompts=['', 'def ']", "eval.samples.tokens=7")


def texts(of: Room, attempt: Any) -> list[Sample]:
    return of.store.samples([attempt.id]).get(attempt.id, [])


@pytest.mark.thorough
def test_samples_do_not_depend_on_stops(room: Callable[..., Room]) -> None:
    settings = (*SAMPLE_SETTINGS, "eval.samples.temperature=0.1")
    plain, ours = room(), room(*settings)
    assert plain.cell.id == ours.cell.id, "outside the id"
    uninterrupted = plain.run()
    straight = room(*settings)
    expected = texts(straight, straight.run())
    for stop in (31, 40, 45):
        assert ours.run(stop=stop).state == "interrupted"
    second = ours.run()
    samples = texts(ours, second)
    assert second.state == "done"
    assert samples == expected
    assert [(sample.step, sample.prompt) for sample in samples] == [
        (s, p) for s in range(1, STEPS + 1) for p in ("", "def ")
    ]
    assert len({sample.text for sample in samples}) > 4, "the network changes, and so does what it writes"
    assert ours.curve(second) == plain.curve(uninterrupted), "no number of the training"
    assert texts(plain, uninterrupted) == []


@pytest.mark.thorough
def test_last_sample_equals_generation_from_stored_weights(room: Callable[..., Room]) -> None:
    ours = room(*SAMPLE_SETTINGS, "eval.samples.temperature=0")
    attempt = ours.run()
    trained = load(ours.cell.id, db=str(ours.store.url), device="cpu")
    for sample in texts(ours, attempt)[-2:]:
        assert sample.step == STEPS
        assert sample.text == "".join(trained.generate(sample.prompt, tokens=7, temperature=0))
    (cell,) = json.loads(build_blocks(ours.store, "g")[1]["core"])["cells"]
    assert [tuple(sample) for sample in cell["samples"]] == [(s.step, s.prompt, s.text) for s in texts(ours, attempt)]
    sheet = cell_details(ours.store, ours.cell.id)
    assert [sample["step"] for sample in sheet.as_json()["samples"]] == [text.step for text in texts(ours, attempt)]
    lines = sheet.text().splitlines()
    (at,) = (index for index, line in enumerate(lines) if line.startswith("samples after step"))
    assert lines[at] == f"samples after step {STEPS}, the last of {STEPS} sampled steps; --json prints all:"
    pairs = [line.strip().partition(" -> ") for line in lines[at + 1 :]]
    assert [(json.loads(a), json.loads(b)) for a, _, b in pairs] == [
        (sample.prompt, sample.text) for sample in texts(ours, attempt)[-2:]
    ]


def test_failed_samples_are_logged_once_and_training_goes_on(
    room: Callable[..., Room], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = room(SAMPLE_SETTINGS[0], "model.positions=ape", "eval.samples.tokens=10000")
    attempt = ours.run()
    assert attempt.state == "done"
    assert texts(ours, attempt) == []
    (event,) = (event.message for event in ours.store.events() if event.kind == "samples")
    assert event.startswith("not written: position scheme ape supports at most ")
    assert capsys.readouterr().out.count("no samples (eval.samples): position scheme ape") == 1


def test_sample_settings_out_of_range_are_refused(room: Callable[..., Room]) -> None:
    for setting, why in (
        ("eval.samples.tokens=0", "eval.samples.tokens"),
        ("eval.samples.top_p=0", "eval.samples.top_p"),
        ("eval.samples.temperature=-1", "eval.samples.temperature"),
        ("eval.samples.prompts=7", "eval.samples.prompts"),
        ("eval.samples.promts=[a]", "eval.samples.promts"),
    ):
        with pytest.raises(SweepError, match=why):
            room(setting)


def test_config_without_samples_keeps_its_stored_form() -> None:
    settings = CellConfig().model_dump(mode="json")["eval"]
    assert "samples" not in settings
    config = CellConfig.model_validate({"eval": {"samples": {"prompts": ["a"]}}})
    assert CellConfig.model_validate(config.model_dump(mode="json")) == config


def test_samples_with_unstorable_characters_are_stored(room: Callable[..., Room]) -> None:
    assert "\0" not in str(Sample(step=1, item=0, prompt="", text="a\0b").as_example().detail)


def test_a_page_has_few_steps_and_the_last() -> None:
    samples = [Sample(step=step, item=item, prompt="p", text="t") for step in range(1, 51) for item in (0, 1)]
    steps = sorted({sample.step for sample in _thinned_samples(samples)})
    assert steps == list(range(5, 51, 5))
    assert len(_thinned_samples(samples)) == 2 * len(steps)
    assert _thinned_samples([]) == []
