"""Downstream tasks: scores by lm-evaluation-harness against log probabilities from the network's logits."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.rng import derive_seed
from atma_sweep.results.errors import PackageMissing, WriteRefused
from atma_sweep.results.store.records import Measurement
from atma_sweep.sweep.attempt.trained_cells import LoadedModel
from atma_sweep.sweep.errors import MachineError, SweepError
from atma_sweep.sweep.model_export.huggingface import write_model_folder
from atma_sweep.sweep.orchestrator.evaluate import check_tasks, task_settings
from atma_sweep.sweep.probes.downstream import load_harness
from atma_sweep.sweep.probes.subject import CellSubject, run_probe
from factories import cell_record
from harness_tasks import CHANCE, QUESTIONS, TASKS, TEXTS, check_same_samples, read_samples, write_tasks

PROMPTS = {"Say": "", "Once more": ""}
SMALL = {"attn_type": "rope", "window": True, "window_size": 8, "vocab_size": 264}


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def pupil(network: Any, subject: Callable[..., CellSubject]) -> CellSubject:
    """Network in float32 whose attention window is shorter than some texts."""
    return subject(network(awake=True, **SMALL).eval())


def scores(pupil: CellSubject, folder: Path, *tasks: str, **options: Any) -> dict[str, Measurement]:
    """Return the measurements of the probe by metric."""
    named = task_settings(tasks, include_path=str(folder), **({"shots": None, "limit": None} | options))
    evaluation = pupil.config.eval.model_copy(update={"settings": named})
    config = pupil.config.model_copy(update={"eval": evaluation})
    ((measured, examples),) = run_probe("downstream", replace(pupil, config=config), [0])
    assert (examples, measured[0].metric) == ([], "tasks")
    return {measurement.metric: measurement for measurement in measured}


def log_probability(pupil: CellSubject, context: str, text: str) -> float:
    """Return the log probability of the bytes of a text after an end-of-text token and the bytes of a context."""
    before = [pupil.tokenizer.eot, *context.encode()]
    tokens = torch.tensor([*before, *text.encode()])
    nats = pupil.model(tokens[None])[0].double().log_softmax(-1)
    return math.fsum(float(nats[position - 1, tokens[position]]) for position in range(len(before), len(tokens)))


def greedy(pupil: CellSubject, prompt: str, tokens: int) -> str:
    """Return the most probable continuation, by a forward pass over the whole text for every token."""
    row = [pupil.tokenizer.eot, *prompt.encode()]
    for _ in range(tokens):
        row.append(int(pupil.model(torch.tensor([row]))[0, -1, : pupil.tokenizer.vocabulary].argmax()))
        if row[-1] == pupil.tokenizer.eot:
            row.pop()
            break
    return bytes(row[1 + len(prompt.encode()) :]).decode(errors="replace").split("q")[0]


@pytest.mark.thorough
def test_harness_scores_equal_those_of_logits(pupil: CellSubject, tmp_path: Path) -> None:
    with torch.no_grad():
        chosen = [
            max(range(len(row["choices"])), key=lambda i: log_probability(pupil, row["text"], row["choices"][i]))
            for row in QUESTIONS
        ]
        right = [float(choice == row["right"]) for choice, row in zip(chosen, QUESTIONS, strict=True)]
        written = {prompt: greedy(pupil, prompt, 12) for prompt in PROMPTS}
    answers = {"Say": written["Say"], "Once more": written["Once more"] + "!"}
    got = scores(pupil.in_folder(tmp_path), write_tasks(tmp_path / "tasks", answers), *TASKS, samples=True)
    accuracy = got["tiny_choices/acc"]
    mean = sum(right) / 5
    error = math.sqrt(mean * (1 - mean) / 4)
    assert 0 < mean < 1
    assert (accuracy.value, accuracy.n, accuracy.unit) == (pytest.approx(mean), 5, "fraction")
    assert got["tiny_choices/acc_stderr"].value == pytest.approx(error)
    assert accuracy.high == pytest.approx(min(1, mean + 1.959964 * error))
    facts = dict(accuracy.description or {})
    assert facts.pop("chance") == pytest.approx(CHANCE)
    assert facts.pop("words") == "Task tiny_choices of lm-evaluation-harness, version 3.5: acc."
    assert facts == {
        "better": "higher", "decimals": 1, "task": "tiny_choices", "version": "3.5", "shots": 0, "main": True,
        "samples": "samples/tiny_choices.jsonl",
    }  # fmt: skip
    questions = read_samples(tmp_path, "tiny_choices")
    assert [(record["doc"], record["acc"]) for record in questions] == list(zip(QUESTIONS, right, strict=True))
    for record in questions:
        text = record["doc"]["text"]
        # spaces at the end of a context are scored
        nats = [log_probability(pupil, text.rstrip(), text[len(text.rstrip()) :] + c) for c in record["doc"]["choices"]]
        assert [float(logprob) for logprob, _ in record["filtered_resps"]] == pytest.approx(nats, rel=1e-5)
    answered = read_samples(tmp_path, "tiny_answers")
    assert [(record["resps"], record["exact_match"]) for record in answered] == [
        ([[text]], float(text == answers[prompt])) for prompt, text in written.items()
    ]
    assert got["tiny_answers/exact_match"].value == 0.5
    assert got["tiny_rolling/bits_per_byte"].unit == "bits/byte"
    assert got["tasks"].value == 3


def sampled(pupil: CellSubject, prompt: str, seed: int, temperature: float, top_p: float, top_k: int) -> str:
    """Return twelve tokens, each the first of exponential clocks with the rates of its ranks, a forward pass per token."""
    row = [pupil.tokenizer.eot, *prompt.encode()]
    begin, draw = len(row), torch.Generator().manual_seed(seed)
    while len(row) < begin + 12:
        logits = pupil.model(torch.tensor([row]))[0, -1].double().numpy()[: pupil.tokenizer.vocabulary] / temperature
        waits = torch.empty(pupil.model.config.vocab_size).exponential_(generator=draw).double().numpy()
        order = np.argsort(-logits, kind="stable")[: top_k or None]
        weights = np.exp(logits[order] - logits.max())
        nucleus = order[: int((np.cumsum(weights / weights.sum()) < top_p).sum()) + 1]
        row.append(int(min(nucleus, key=lambda token: waits[token] / np.exp(logits[token] - logits.max()))))
        if row[-1] == pupil.tokenizer.eot:
            return bytes(row[begin:-1]).decode(errors="replace")
    return bytes(row[begin:]).decode(errors="replace")


def test_answers_are_sampled_as_the_task_says(pupil: CellSubject) -> None:
    def answer(repeats: int = 1, **settings: Any) -> list[str]:
        request = SimpleNamespace(args=("Say", {"max_gen_toks": 12} | settings), task_name="quiz", doc_id=4, idx=0)
        return load_harness().SubjectModel(pupil).generate_until([request] * repeats)

    with torch.no_grad():
        for settings in (
            {"temperature": 0.7, "seed": 3},
            {"do_sample": True, "top_p": 0.8},
            {"do_sample": True, "top_k": 9, "top_p": 0.7},
        ):
            chosen = [settings.get("temperature", 1.0), settings.get("top_p", 1.0), settings.get("top_k", 0)]
            seeds = [derive_seed(settings.get("seed", 0), "downstream", f"quiz/4/0/{n}") for n in range(2)]
            expected = [sampled(pupil, "Say", seed, *chosen) for seed in seeds]
            assert answer(2, **settings) == expected
            assert expected[0] != expected[1]
        assert answer(temperature=1e-9) == answer() == answer(do_sample=False, temperature=2.0)
    for settings, reason in (
        ({"do_sample": True, "min_p": 0.1}, "samples with min_p, which is not supported"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be 0 or more"),
    ):
        with pytest.raises(load_harness().UnreadableTasks, match=reason):
            answer(**settings)


@pytest.mark.thorough
def test_samples_appear_complete_or_never(pupil: CellSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tasks(tmp_path / "tasks", PROMPTS)
    harness = load_harness()
    lists: list[Any] = []

    def fill_disk(values: Any) -> Any:
        lists.append(values)
        if len(lists) > 2 * len(QUESTIONS):
            raise OSError(errno.ENOSPC, "no space left")
        return values

    monkeypatch.setattr(harness, "sanitize_list", fill_disk)
    with pytest.raises(WriteRefused, match="no space left"):
        scores(pupil.in_folder(tmp_path), folder, "tiny_choices", "tiny_rolling", samples=True)
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("datasets", "tasks")] == []
    assert "samples" not in dict(scores(pupil, folder, "tiny_rolling")["tiny_rolling/bits_per_byte"].description or {})


@pytest.mark.thorough
def test_rolling_bits_count_every_token_once(pupil: CellSubject, tmp_path: Path) -> None:
    """Each text follows two end-of-text tokens, of which the second is scored."""
    eot = pupil.tokenizer.eot
    nats = 0.0
    with torch.no_grad():
        for text in TEXTS:
            tokens = torch.tensor([eot, eot, *text.encode()])
            rows = pupil.model(tokens[None, :-1])[0].double().log_softmax(-1)
            nats += math.fsum(float(rows[i, token]) for i, token in enumerate(tokens[1:]))
    got = scores(pupil, write_tasks(tmp_path / "tasks", PROMPTS), "tiny_rolling")["tiny_rolling/bits_per_byte"]
    assert got.value == pytest.approx(-nats / math.log(2) / sum(map(len, TEXTS)), rel=1e-6)


@pytest.mark.thorough
def test_task_that_is_too_long_has_a_reason(network: Any, subject: Callable[..., CellSubject], tmp_path: Path) -> None:
    short = subject(
        network(awake=True, vocab_size=264, positions="ape", position_settings={"ape": {"length": 16}}).eval()
    )
    folder = write_tasks(tmp_path / "tasks", {"a prompt of some length": "x"})
    got = scores(short, folder, "tiny_choices", "tiny_answers", limit=2)
    assert got["tiny_choices/acc"].n == 2
    assert (got["tiny_answers/acc"].value, got["tiny_answers/acc"].reason) == (
        None, "n/a: position scheme ape supports at most 16 tokens, fewer than 36",
    )  # fmt: skip
    assert got["tiny_choices/acc"].description["limit"] == 2


def _refused(folder: Path) -> Iterator[tuple[type[Exception], tuple[str, ...], str]]:
    yield SweepError, ("tiny_choice",), r"task 'tiny_choice': .* no such task; did you mean tiny_choices, "
    (folder / "tiny_choices.jsonl").unlink()
    yield (
        MachineError,
        ("tiny_choices",),
        r"task tiny_choices: its data cannot be read \(FileNotFoundError: .*--include-path$",
    )


def test_tasks_that_cannot_be_loaded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load_harness()
    folder = write_tasks(tmp_path / "tasks", PROMPTS)
    local = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda **options: local(**options | {"include_defaults": False}))
    for error, names, message in _refused(folder):
        with pytest.raises(error, match=message):
            check_tasks(task_settings(names, include_path=str(folder), shots=None, limit=None))
    with pytest.raises(SweepError, match="no such folder"):
        check_tasks(task_settings(["a"], include_path=str(tmp_path / "none"), shots=None, limit=None))
    for option, values in (("limit", {"limit": 3}), ("samples", {"samples": True})):
        with pytest.raises(SweepError, match=f"--{option}: applies to downstream tasks only; name some with --tasks"):
            task_settings([], **{"include_path": None, "shots": None, "limit": None} | values)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "atma_sweep.sweep.probes.harness", raising=False)
    monkeypatch.delattr("atma_sweep.sweep.probes.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        PackageMissing,
        match=r"'lm_eval', which this command needs, is not installed; pip install 'atma-sweep\[lm-eval\]'",
    ):
        check_tasks(task_settings(["blimp"], include_path=None, shots=None, limit=None))


@pytest.mark.thorough
def test_exported_cell_scores_the_same_by_lm_eval(pupil: CellSubject, tmp_path: Path) -> None:
    """Both score the same folder of tasks: ours by the subject of a probe, lm_eval by transformers."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    with torch.no_grad():
        answers = {prompt: greedy(pupil, prompt, 12) for prompt in PROMPTS}
    folder = write_tasks(tmp_path / "tasks", {**answers, "third": "never"})
    ours = scores(pupil.in_folder(tmp_path), folder, *TASKS, samples=True)
    (tmp_path / "model").mkdir()
    loaded = LoadedModel(pupil.model, pupil.tokenizer, pupil.config, "c" * 12, "slug")
    write_model_folder(tmp_path / "model", loaded, cell_record("c"), [], "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        patch.syspath_prepend(str(tmp_path / "modules"))
        patch.chdir(folder)
        theirs = lm_eval.simple_evaluate(
            model="hf", model_args={"pretrained": str(tmp_path / "model"), "trust_remote_code": True}, device="cpu",
            tasks=list(TASKS), batch_size=2, log_samples=True,
            task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        )  # fmt: skip
    samples, theirs = theirs["samples"], theirs["results"]
    for task in TASKS:
        check_same_samples(tmp_path, task, samples[task], tmp_path / "theirs" / task)
    pairs = [("tiny_choices", "acc"), ("tiny_answers", "exact_match"), ("tiny_rolling", "bits_per_byte")]
    for task, metric in pairs:
        assert ours[f"{task}/{metric}"].value == pytest.approx(theirs[task][f"{metric},none"], rel=1e-5), task
    assert ours["tiny_choices/acc_stderr"].value == pytest.approx(theirs["tiny_choices"]["acc_stderr,none"])
    assert ours["tiny_answers/exact_match"].value == pytest.approx(2 / 3)
