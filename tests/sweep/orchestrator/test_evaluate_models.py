"""`evaluate hf:...`: an open-weight checkpoint measured for a trained sweep, in the database and in the tables."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.external_models.tiny import make_tiny_checkpoint
from bench import Bench
from harness_tasks import TASKS, check_same_samples, read_samples, write_tasks
from once import once

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
EXTERNAL = "SELECT a.number, a.state, a.parent_id FROM attempt a WHERE a.kind = 'external' ORDER BY a.id"
VALUES = (
    "SELECT attempt_id, probe, metric, length, value, unit, n, reason FROM measurement "
    "WHERE attempt_id IN (SELECT id FROM attempt WHERE kind = 'external')"
)


def _make(folder: Path) -> None:
    (folder / "desk").mkdir()
    bench = Bench(folder / "desk")
    bench.launch("--only", "attn_type=nope")
    make_tiny_checkpoint(folder / "tiny-llama", "llama")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "beside", _make)


@pytest.fixture
def desk(model_folder: Path, tmp_path: Path) -> Bench:
    shutil.copytree(model_folder / "desk", tmp_path / "desk")
    return Bench(tmp_path / "desk", copied=model_folder / "desk")


def evaluate(desk: Bench, *arguments: str, code: int = 0) -> str:
    return desk.run("evaluate", *arguments, "--executor", "local", code=code)


def test_cells_and_models_answer_the_same_tasks(desk: Bench, model_folder: Path, tmp_path: Path) -> None:
    """The model's scores are those of lm_eval with transformers; both rows stand in one table."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    folder = write_tasks(tmp_path / "tasks", {"Say": "", "Once more": "never"})
    options = ("--tasks", ",".join(TASKS), "--include-path", str(folder), "--samples")
    cell = "nope-baseline-d0-m0-w0-s0"
    output = evaluate(desk, cell, *options)
    assert "downstream tasks 3" in output
    runs = desk.folder / "atma-runs"
    ((run_dir,),) = desk.sql("SELECT run_dir FROM attempt WHERE kind = 'evaluate'")
    assert f"{cell}: samples of 3 tasks in {runs / str(run_dir) / 'samples'}" in output.replace("\n", "")
    assert f"samples of 3 tasks: {run_dir}/samples, in the runs folder" in desk.ask("show", cell)
    output = evaluate(desk, f"hf:{model_folder / 'tiny-llama'}", "--sweep", "micro", "--json", *options)
    files = {row["metric"]: row["samples"] for row in json.loads(output[output.index("[\n") :])}
    ((run_dir,),) = desk.sql("SELECT run_dir FROM attempt WHERE kind = 'external'")
    assert files["tiny_choices/acc"] == str(runs / str(run_dir) / "samples" / "tiny_choices.jsonl")
    assert files["tasks"] is None
    stored = {metric: value for _, probe, metric, _, value, *_ in desk.sql(VALUES) if probe == "downstream"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        theirs = lm_eval.simple_evaluate(
            model="hf", model_args={"pretrained": str(model_folder / "tiny-llama")}, device="cpu", tasks=list(TASKS),
            task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False), log_samples=True,
        )  # fmt: skip
    samples, theirs = theirs["samples"], theirs["results"]
    for task in TASKS:
        check_same_samples(runs / str(run_dir), task, samples[task], tmp_path / "theirs" / task)
    accuracies = [record["acc"] for record in read_samples(runs / str(run_dir), "tiny_choices")]
    assert stored["tiny_choices/acc"] == pytest.approx(sum(accuracies) / 5)
    for task, metric in (("tiny_choices", "acc"), ("tiny_answers", "exact_match"), ("tiny_rolling", "bits_per_byte")):
        assert stored[f"{task}/{metric}"] == pytest.approx(theirs[task][f"{metric},none"], rel=1e-5), task
    table = json.loads(desk.ask("report", "--table", "downstream", "--sweep", "micro", "--json"))
    rows = {next(iter(row["row"].values())): {value["heading"]: value for value in row["values"]} for row in table}
    assert list(rows) == ["polar", "nope", "tiny-llama, float32 (external)"][-len(rows) :]
    model = rows["tiny-llama, float32 (external)"]
    assert (model["tiny_choices"]["value"], model["tiny_choices"]["n"]) == (stored["tiny_choices/acc"], 5)
    assert rows["nope"]["tiny_choices"]["value"] is not None
    ((packages,),) = desk.sql("SELECT DISTINCT packages FROM provenance WHERE tokenizer LIKE 'sha256:%'")
    assert json.loads(str(packages))["lm_eval"] == lm_eval.__version__
    (folder / "tiny_choices.jsonl").unlink()
    refused = evaluate(desk, cell, *options, code=3)
    assert "task tiny_choices: its data cannot be read (FileNotFoundError: " in refused


def test_model_is_stored_in_a_companion_sweep_with_origin(desk: Bench, model_folder: Path) -> None:
    word = f"hf:{model_folder / 'tiny-llama'}"
    evaluate(desk, word, "--probe", "val")
    assert "1 needs-eval" in desk.ask("status", "--sweep", "micro-open-weight")
    output = evaluate(desk, word, "--sweep", "micro")
    assert "needle digit_accuracy 64" in output
    assert desk.sql(EXTERNAL) == [(1, "done", None), (2, "done", None)]
    # a second evaluation measures what the first has not; then nothing is left
    values = {
        (probe, metric, length): (attempt, value, unit, n)
        for attempt, probe, metric, length, value, unit, n, _ in desk.sql(VALUES)
    }
    attempts = {
        probe: {values[key][0] for key in values if key[0] == probe} for probe in ("val", "clean", "junk", "needle")
    }
    assert all(len(ids) == 1 for ids in attempts.values())
    assert min(attempts["val"]) < min(attempts["clean"])
    assert attempts["clean"] == attempts["junk"] == attempts["needle"]
    assert "already measured; --probe or --length measures again" in evaluate(desk, word)
    assert desk.sql("SELECT count(*) FROM attempt a JOIN cell c ON c.id = a.cell_id WHERE kind = 'train'") == [(1,)]

    # the loss of whole texts in one forward, by transformers alone
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ((fingerprint,),) = desk.sql("SELECT DISTINCT corpus_fingerprint FROM provenance")
    corpus = open_corpus(desk.folder / "atma-runs" / "corpora", str(fingerprint))
    model, tokenizer = (
        loader.from_pretrained(model_folder / "tiny-llama") for loader in (AutoModelForCausalLM, AutoTokenizer)
    )
    nats = 0.0
    for document in corpus.heldout[:2]:
        ids = torch.tensor([[0, *tokenizer(bytes(document[1:65].tolist()).decode())["input_ids"]]])
        with torch.no_grad():
            nats += float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    assert values["clean", "nats", 64][1] == pytest.approx(nats / 128, rel=1e-5)
    assert values["clean", "bits_per_byte", 64][1:] == (
        pytest.approx(nats / math.log(2) / 128, rel=1e-5),
        "bits/byte",
        128,
    )

    ((config,),) = desk.sql("SELECT config FROM cell WHERE attn_type = 'tiny-llama'")
    origin = json.loads(str(config))["open_weight"]
    assert (origin["name"], origin["dtype"], origin["pairing"], origin["context"]) == (
        "tiny-llama",
        "float32",
        "text",
        64,
    )
    assert origin["revision"].startswith("sha256:")
    ((extra, tokens),) = desk.sql(
        "SELECT DISTINCT extra, tokenizer FROM provenance WHERE tokenizer LIKE 'sha256:%' LIMIT 1"
    )
    assert json.loads(str(extra))["revision"] == origin["revision"]
    assert origin["tokenizer"].startswith(str(tokens).removeprefix("sha256:"))

    # beside our own rows, and nowhere among them
    table = json.loads(desk.ask("report", "--table", "open-weight", "--sweep", "micro", "--json"))
    rows = {row["model"]: row for row in table}
    assert list(rows) == ["tiny-llama, float32 (external)", "polar", "nope"]
    budgets = desk.ask("report", "--table", "budgets", "--sweep", "micro")
    assert "tiny-llama, float32 (external)" in budgets
    assert "tiny-llama" not in desk.ask("report", "--table", "6", "--sweep", "micro")
    assert "1 done" in desk.ask("status", "--sweep", "micro-open-weight")
    assert "sweep micro," in desk.ask("report", "--table", "6"), "the sweep launched last is still the one of the grid"


def test_native_pairing_is_another_row(desk: Bench, model_folder: Path) -> None:
    word = f"hf:{model_folder / 'tiny-llama'}"
    evaluate(desk, word, "--probe", "clean", "--probe", "needle")
    evaluate(desk, word, "--pairing", "native", "--probe", "clean", "--probe", "needle")
    slugs = {str(slug) for (slug,) in desk.sql("SELECT slug FROM cell WHERE attn_type = 'tiny-llama'")}
    assert len(slugs) == 2
    assert sum(slug.endswith("-native") for slug in slugs) == 1
    table = desk.ask("report", "--table", "open-weight", "--sweep", "micro")
    assert "tiny-llama, float32, native pairing (external)" in table
    assert "Native pairing: texts are cut by the model's own tokens" in table
    assert desk.sql("SELECT count(*) FROM sweep") == [(2,)]


def test_bundle_includes_open_weight_models(desk: Bench, model_folder: Path, tmp_path: Path) -> None:
    evaluate(desk, f"hf:{model_folder / 'tiny-llama'}", "--probe", "val")
    desk.run("export", "--sweep", "micro-open-weight", "--out", "beside.zip")
    with contextlib.chdir(desk.folder):
        desk.run("import", "beside.zip", "--db", "other.db")
    assert "tiny-llama" in desk.ask("status", "--db", "other.db")
    report = json.loads(
        desk.ask(
            "show", str(desk.sql("SELECT cell_id FROM attempt WHERE kind = 'external'")[0][0]), "--json", "--db",
            "other.db",
        )
    )  # fmt: skip
    assert [attempt["kind"] for attempt in report["attempts"]] == ["external"]
    assert any(value["metric"] == "bits_per_byte" for value in report["measurements"])


@pytest.mark.parametrize(("arguments", "code", "output"), [
    (["hf:nowhere/at/all"], 2, "neither a folder nor a repository of the hub"),
    (["hf:{tiny}", "--pairing", "nativ"], 2, "did you mean native?"),
    (["hf:{tiny}", "--probe", "gates"], 2, "needs a model that atma-sweep trained"),
    (["hf:{tiny}", "--length", "100000"], 2, "too long for the text of cell"),
    (["hf:{tiny}", "nope-baseline-d0-m0-w0-s0"], 2, "evaluate them with separate commands"),
    (["hf:{tiny}", "--sweep", "none"], 2, "no sweep is named 'none'"),
    (["hf:{empty}"], 3, "put the checkpoint's *.safetensors next to its config.json"),
    (["hf:{bare}"], 2, "has no config.json, so it is not a checkpoint in the hub's format; name a folder written by"),
])  # fmt: skip
def test_unmeasurable_model_changes_nothing(
    arguments: list[str], code: int, output: str, desk: Bench, model_folder: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(model_folder / "tiny-llama", empty)
    (empty / "model.safetensors").unlink()
    (tmp_path / "bare").mkdir()
    folders = {"tiny": model_folder / "tiny-llama", "empty": empty, "bare": tmp_path / "bare"}
    out = evaluate(desk, *(word.format(**folders) for word in arguments), code=code)
    assert output in out
    assert len(out.strip().splitlines()) == 1
    assert desk.sql("SELECT count(*) FROM sweep") == [(1,)]
    assert desk.sql(EXTERNAL) == []
