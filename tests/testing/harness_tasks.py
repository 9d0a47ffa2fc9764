"""Three tiny tasks for lm-evaluation-harness, with their data in files beside them."""

from __future__ import annotations

import json
from pathlib import Path

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
