"""Three tiny tasks for lm-evaluation-harness, with their data in files beside them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

QUESTIONS = [
    {"text": "The cat", "choices": [" sleeps", " sleep"], "right": 0},
    {"text": "The cats ", "choices": ["sleep", "sleeps", "slept"], "right": 2},
    {"text": "", "choices": ["Two of them went.", "Two of it went."], "right": 0},
    {"text": "a b a b a", "choices": [" b", " a", " c", " d"], "right": 1},
    {"text": "1 2 3", "choices": [" 4", " 5"], "right": 0},
]
"""Questions with two to four choices; one has no context, and the context of one ends with a space."""
CHANCE = (1 / 2 + 1 / 3 + 1 / 2 + 1 / 4 + 1 / 2) / 5
TEXTS = ["a short text", "ab" * 150]
COMMON = """dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}.jsonl}}
test_split: test
num_fewshot: 0
metadata: {{version: 3.5}}
"""
TASKS = {
    "tiny_choices": """output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: right
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "tiny_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "tiny_answers": """output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["q"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return the records of a task's questions that stand in the folder of an attempt."""
    return [json.loads(line) for line in (folder / "samples" / f"{task}.jsonl").read_text().splitlines()]


def check_same_samples(folder: Path, task: str, theirs: list[dict[str, Any]], aside: Path) -> None:
    """Check that the records of a task are those that lm_eval itself writes, with log probabilities to 1e-4.

    Args:
        folder: Folder of the attempt with our records.
        task: Name of the task.
        theirs: Records of `simple_evaluate` with `log_samples`.
        aside: New folder for the file of lm_eval.
    """
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(aside))
    tracker.date_id = "today"  # otherwise set with the file of all results
    tracker.save_results_samples(task, theirs)
    (file,) = aside.rglob("*.jsonl")
    ours = read_samples(folder, task)
    expected = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(ours) == len(expected) > 0
    for our, their in zip(ours, expected, strict=True):
        assert list(our) == list(their)
        for key in our:
            assert _is_same(our[key], their[key]), (task, key, our[key], their[key])


def _is_same(ours: Any, theirs: Any) -> bool:
    """Return True if two values of records are the same, numbers (also as text) to 1e-4."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=1e-4)
    except (TypeError, ValueError):
        return bool(ours == theirs)


def write_tasks(folder: Path, answers: dict[str, str]) -> Path:
    """Write the tasks into a new folder; `answers` has the expected answer by prompt. Returns the folder."""
    folder.mkdir()
    rows = {
        "tiny_choices": QUESTIONS,
        "tiny_rolling": [{"text": text} for text in TEXTS],
        "tiny_answers": [{"text": text, "answer": answer} for text, answer in answers.items()],
    }
    for name, task in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(data=name)}{task}")
    return folder
