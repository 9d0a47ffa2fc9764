"""Tasks of lm-evaluation-harness, loaded, answered by the subject of a probe, and turned into measurements.

Imports lm_eval at its top; `downstream.load_harness` imports this module where tasks are needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import numpy as np
from datasets import disable_progress_bars
from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, sanitize_list

from ...model.inference.generation import check_sampling
from ...model.rng import derive_seed
from ...results.console.output_files import atomic_file, atomic_folder
from ...results.console.text import did_you_mean
from ...results.metrics import FRACTION, METRICS, SAMPLES, STDERR_SUFFIX
from ...results.names import safe_file_name
from ...results.store.records import Measurement
from ..errors import MachineError, SweepError
from .base import GREEDY, Prompt, Sampling

if TYPE_CHECKING:
    from .subject import Subject

CHOICE_METRICS = ("acc_norm", "acc", "acc_bytes", "acc_mutual_info")
"""Shares of questions whose best-scored choice is right; the first that a task has is its main metric."""
MAIN_METRICS = (*CHOICE_METRICS, "exact_match")
SHARES = (*MAIN_METRICS, "em", "f1", "contains", "pass@1")
"""Metrics between 0 and 1 that are printed in percent."""
UNITS = {"bits_per_byte": "bits/byte"}
"""Unit of a metric that is neither a share nor a pure number."""
NEW_TOKENS = 256
"""Most tokens of an answer where a task sets no limit, as in lm-evaluation-harness."""
SAMPLING_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed")
"""Settings of answers that a task which samples may have."""
Z_95 = 1.959963984540054
SHOWN_NEAREST = 3
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, httpx.HTTPError, DatasetsError)  # fmt: skip
"""Exceptions of tasks whose data or code cannot be loaded."""


class UnreadableTasks(Exception):
    """Exception for tasks with texts that the model cannot read; `reasons` has the reason by name of the task."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class SubjectModel(LM):
    """Model of lm-evaluation-harness whose answers come from the subject of a probe."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (sum of log probabilities in nats, True if each token is the most probable one) per continuation.

        Args:
            requests: Instances with the arguments (context, continuation); an empty context is the start of a document.

        Raises:
            UnreadableTasks: Texts are too long for the model, or its tokenizer cannot read them.
        """
        return self._scores(self._encoded(requests, lambda request: [self._pair(*request.args)]))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the sum of log probabilities in nats of each complete text.

        A text is cut into windows of at most `subject.window_tokens` tokens; every token is scored once.

        Args:
            requests: Instances with the argument (text,).

        Raises:
            UnreadableTasks: The tokenizer cannot read a text.
        """
        windows = self._encoded(requests, lambda request: self._windows(*request.args))
        owners = [index for index, parts in enumerate(windows) for _ in parts]
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._scores(windows), strict=True):
            sums[owner] += nats
        return sums

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the continuation of each context, up to the first of its stop texts or the end of the text.

        It is the most probable one unless the settings sample. The draws follow from the setting `seed` (0 without
        it), the task, the question and its repetition alone.

        Args:
            requests: Instances with the arguments (context, settings), settings as a task's `generation_kwargs`.

        Raises:
            UnreadableTasks: A text would be too long, the tokenizer cannot read it, or a setting is not supported.
        """
        settings = [normalize_gen_kwargs(request.args[1], NEW_TOKENS) for request in requests]
        samplings = self._samplings(requests, settings)
        limits = {
            id(request): int(options["max_gen_toks"]) for request, options in zip(requests, settings, strict=True)
        }
        prompts = self._encoded(
            requests,
            lambda request: [(self.subject.encode_prompt(request.args[0]), np.zeros(limits[id(request)] + 1))],
        )
        return [
            self._continuation(prompt, limits[id(request)], options.get("until") or [], sampling)
            for request, options, sampling, ((prompt, _),) in zip(requests, settings, samplings, prompts, strict=True)
        ]

    def _samplings(self, requests: Sequence[Any], settings: Sequence[Mapping[str, Any]]) -> list[Sampling]:
        """Return the choice of tokens of each request, in order.

        Raises:
            UnreadableTasks: A task samples with settings that are not supported or out of range.
        """
        samplings: list[Sampling] = []
        reasons: dict[str, str] = {}
        repeats: Counter[str] = Counter()
        for request, options in zip(requests, settings, strict=True):
            sampling = GREEDY
            if options.get("do_sample"):
                unknown = sorted(
                    name for name in options if name not in SAMPLING_SETTINGS and options[name] is not None
                )
                key = f"{request.task_name}/{request.doc_id}/{request.idx}"
                seed = derive_seed(int(options.get("seed") or 0), "downstream", f"{key}/{repeats[key]}")
                repeats[key] += 1
                temperature = options["temperature"] if "temperature" in request.args[1] else 1.0
                top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
                sampling = Sampling(float(temperature), top_k, top_p, seed)
                try:
                    check_sampling(sampling.temperature, top_k, top_p)
                except ValueError as error:
                    reasons.setdefault(request.task_name, f"n/a: generation_kwargs of the task: {error}")
                if unknown:
                    reason = f"n/a: the task samples with {', '.join(unknown)}, which is not supported"
                    reasons.setdefault(request.task_name, reason)
            samplings.append(sampling)
        if reasons:
            raise UnreadableTasks(reasons)
        return samplings

    def _continuation(self, prompt: np.ndarray, tokens: int, stops: Sequence[str], sampling: Sampling) -> str:
        """Return the continuation of a prompt, at most `tokens` tokens, without the first stop text and its rest."""
        written: list[int] = []
        text = ""
        for token in self.subject.continue_prompt(prompt, tokens, sampling):
            written.append(token)
            text = self.subject.decode(written)
            if any(stop and stop in text for stop in stops):
                break
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text

    def _pair(self, context: str, continuation: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a context and of its continuation.

        Spaces at the end of the context go to the continuation, as words begin with a space in most vocabularies. An
        empty context is the token that starts a text.
        """
        if not context:
            start = np.array([self.subject.tokenizer.eot])
            return start, np.asarray(self.subject.tokenizer.encode(continuation), dtype=np.int64)
        stripped = context.rstrip()
        before = self.subject.encode_prompt(stripped)
        return before, self.subject.encode_prompt(context + continuation)[len(before) :]

    def _windows(self, text: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (context, scored tokens) of each window of a text, in order."""
        pairs = get_rolling_token_windows(
            token_list=self.subject.encode_prompt(text).tolist(), prefix_token=self.subject.tokenizer.eot,
            max_seq_len=self.subject.window_tokens, context_len=1,
        )  # fmt: skip
        return [(np.array(context), np.array(scored)) for context, scored in map(make_disjoint_window, pairs)]

    def _encoded(
        self, requests: Sequence[Any], encode: Callable[[Any], list[tuple[np.ndarray, np.ndarray]]]
    ) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Return the (context, scored tokens) parts of each request, checked before anything is computed.

        Raises:
            UnreadableTasks: It names every task with a part that the model cannot read or that has no tokens.
        """
        encoded: list[list[tuple[np.ndarray, np.ndarray]]] = []
        reasons: dict[str, str] = {}
        for request in requests:
            parts: list[tuple[np.ndarray, np.ndarray]] = []
            try:
                parts = encode(request)
                sizes = [len(context) + len(scored) - 1 for context, scored in parts]
                reason = self.subject.beyond(max(sizes, default=0))
                if any(not len(scored) for _, scored in parts):
                    reason = "n/a: an answer of the task has no tokens"
            except (ValueError, SweepError) as error:
                reason = f"n/a: the tokenizer cannot read the task: {_first_line(error)}"
            if reason is not None:
                reasons.setdefault(str(request.task_name), reason)
            encoded.append(parts)
        if reasons:
            raise UnreadableTasks(reasons)
        return encoded

    def _scores(self, parts_by_request: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]) -> list[tuple[float, bool]]:
        """Return (sum of log probabilities in nats, True if each token is the most probable one) of each part."""
        prompts = [
            Prompt(np.concatenate([context, scored]), np.arange(len(context), len(context) + len(scored)))
            for parts in parts_by_request
            for context, scored in parts
        ]
        answers = self.subject.answers(prompts, full_context=False)
        return [(-float(loss.double().sum()), bool(is_argmax.all())) for is_argmax, loss in answers]


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, at most 160 characters, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


@contextlib.contextmanager
def _inside(folder: str | None) -> Iterator[None]:
    """Context manager in which relative paths start in `folder`; None changes nothing."""
    if folder is None:
        yield
        return
    with contextlib.chdir(folder):
        yield


def _open_tasks(names: Sequence[str], include_path: str | None) -> TaskManager:
    """Return the index of all tasks, those of a folder included.

    If the folder has all the names, only its files are read, which is faster.

    Raises:
        SweepError: The folder does not exist.
    """
    # warnings of files that nobody named, and of every retry
    for library in ("lm_eval", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    disable_progress_bars()
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise SweepError(f"--include-path {include_path}: no such folder; name one with task files (YAML)")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    return TaskManager(include_path=include_path)


class LoadedTask:
    """A requested task, group or tag with its data."""

    def __init__(self, name: str, manager: TaskManager, include_path: str | None) -> None:
        """Load the data, which may download them.

        Raises:
            MachineError: The data cannot be read, which includes a machine without a network.
            SweepError: There is no such task, it runs code that a model wrote, or it needs pictures.
        """
        self.name = name
        if name not in manager.task_index:
            nearest = did_you_mean(name, manager.all_tasks, most=SHOWN_NEAREST)
            hint = nearest or "; `lm-eval ls tasks` lists them, and --include-path adds those of a folder"
            raise SweepError(f"task {name!r}: lm-evaluation-harness has no such task{hint}")
        try:
            with _inside(include_path):
                loaded = manager.load([name])
        except LOAD_ERRORS as error:
            self._refuse(error)
        self.tasks: dict[str, Any] = loaded["tasks"]
        self.groups: dict[str, Any] = loaded.get("groups", {})
        for task in self.tasks.values():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise SweepError(f"task {name}: runs code that models write, or needs pictures; leave it out")

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise MachineError with the first line of the cause and the remedies."""
        raise MachineError(
            f"task {self.name}: its data cannot be read ({type(error).__name__}: {_first_line(error)}); run the command once where the "
            "hub is reachable, or name a folder of tasks with local data with --include-path"
        ) from error

    @property
    def specification(self) -> list[Any]:
        """Objects that `simple_evaluate` takes: the group, or else the tasks."""
        return [self.groups[self.name]] if self.name in self.groups else list(self.tasks.values())


def check_tasks(names: Sequence[str], include_path: str | None) -> None:
    """Check that all tasks exist and load their data, which may download them.

    Raises:
        SweepError: A name is unknown, the folder does not exist, two names share a task, or a task is not supported.
        MachineError: Data cannot be read.
    """
    manager = _open_tasks(names, include_path)
    owners: dict[str, str] = {}
    for name in names:
        for task in LoadedTask(name, manager, include_path).tasks:
            if owners.setdefault(task, name) != name:
                raise SweepError(f"task {task} belongs to {owners[task]} and to {name}; name one of them")


def measure_tasks(
    subject: Subject,
    probe: str,
    names: Sequence[str],
    *,
    include_path: str | None,
    shots: int | None,
    limit: int | None,
    samples_folder: Path | None = None,
) -> list[Measurement]:
    """Return the scores of tasks, with their standard errors, and reasons for those without.

    Metrics are TASK/METRIC, and TASK/METRIC_stderr for the standard error; METRIC is "acc" or "acc,FILTER". A value has
    the number of questions and the 95 % interval of the normal distribution. Descriptions hold task, version, shots,
    chance level, the group that a task is part of, `main` for the metric that reports show, and `samples`, the file of
    the task's questions as "FOLDER/FILE".

    Args:
        subject: Model to be measured.
        probe: Name of the probe.
        names: Tasks, groups or tags.
        include_path: Folder with further task files; None: none.
        shots: Solved examples before each question; None: as the task says.
        limit: Number of questions of each task; None: all.
        samples_folder: New folder for a file of questions and answers per task; None: none is written.

    Raises:
        SweepError: The folder of tasks does not exist.
        StoreError: The folder of samples exists.
        WriteRefused: The folder of samples cannot be written.
    """
    manager = _open_tasks(names, include_path)
    loaded, scores = [], []
    for name in names:
        try:
            loaded.append(LoadedTask(name, manager, include_path))
        except SweepError as error:
            scores.append(_missing(probe, name, f"no-data: {error}"))
    while loaded:
        try:
            results = simple_evaluate(
                model=SubjectModel(subject), tasks=[item for task in loaded for item in task.specification],
                num_fewshot=shots, limit=limit, task_manager=manager, log_samples=samples_folder is not None,
            )  # fmt: skip
        except UnreadableTasks as error:
            unreadable = [task for task in loaded if set(task.tasks) & set(error.reasons)]
            for task in unreadable:
                reason = next(error.reasons[name] for name in task.tasks if name in error.reasons)
                scores.append(_missing(probe, task.name, reason))
            loaded = [LoadedTask(task.name, manager, include_path) for task in loaded if task not in unreadable]
            continue
        files = {} if samples_folder is None else _write_samples(samples_folder, results["samples"])
        scores += [score for task in loaded for score in _task_scores(task, results, limit, probe, files)]
        break
    return scores


def _write_samples(folder: Path, samples_by_task: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Write a new folder with a file per task, whole or not at all, and return "FOLDER/FILE" by name of the task.

    A file has a JSON object per line, for each question and filter, with the keys and types of the files that
    `lm_eval --log_samples` writes.

    Args:
        folder: New folder in an existing one.
        samples_by_task: The `samples` of the results of `simple_evaluate`.

    Raises:
        StoreError: The folder exists.
        WriteRefused: It cannot be written.
    """
    files = {task: f"{safe_file_name(task)}.jsonl" for task in samples_by_task}
    with atomic_folder(folder) as part:
        for task, samples in samples_by_task.items():
            with atomic_file(part / files[task]) as stream:
                for sample in samples:
                    arguments = {
                        f"gen_args_{request}": {f"arg_{index}": argument for index, argument in enumerate(values)}
                        for request, values in enumerate(sample["arguments"])
                    }
                    line = {
                        **sample, "arguments": arguments, "target": str(sample["target"]),
                        **{key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")},
                    }  # fmt: skip
                    text = json.dumps(line, default=handle_non_serializable, ensure_ascii=False)
                    stream.write(text.encode() + b"\n")
    return {task: f"{folder.name}/{name}" for task, name in files.items()}


def _missing(probe: str, name: str, reason: str) -> Measurement:
    """Return a task's main metric without a value, with the reason; the metric is "acc" for a task not declared."""
    declared = next((metric for of, metric in METRICS if of == probe and metric.startswith(f"{name}/")), f"{name}/acc")
    return Measurement(
        probe=probe, metric=declared, unit=FRACTION, n=0, reason=reason, description={"task": name, "main": True}
    )


def _task_scores(
    loaded: LoadedTask, results: Mapping[str, Any], limit: int | None, probe: str, samples: Mapping[str, str]
) -> Iterator[Measurement]:
    """Yield the scores of a requested task, group or tag and of its parts, each followed by its standard error.

    Args:
        loaded: The task.
        results: Results of `simple_evaluate`.
        limit: Number of questions of each task; None: all.
        probe: Name of the probe.
        samples: File with the questions of a task, by name of the task.
    """
    has_total = loaded.name in loaded.groups and any("," in key for key in results["results"].get(loaded.name, ()))
    chances = {name: _chance(task) for name, task in loaded.tasks.items()}
    for name in (*loaded.groups, *loaded.tasks):
        scores = results["results"].get(name, {})
        keys = [key for key in scores if "," in key and "_stderr," not in key and isinstance(scores[key], int | float)]
        main = min(keys, key=lambda key: _rank(key.partition(",")[0]), default=None)
        group = loaded.groups.get(name)
        for key in keys:
            metric, _, filtered = key.partition(",")
            facts: dict[str, Any] = {
                "task": name, "version": str(results["versions"].get(name, group.version if group else "N/A")),
                "shots": results["n-shot"].get(name),
                "main": key == main and (name == loaded.name or not has_total),
                **({"part_of": loaded.name} if name != loaded.name else {}),
                **({"limit": limit} if limit is not None else {}),
                SAMPLES: samples.get(name),
            }  # fmt: skip
            if metric in CHOICE_METRICS:
                facts["chance"] = _group_chance(group, metric, chances, loaded) if group else chances[name]
            better = results["higher_is_better"].get(name, {}).get(metric)
            label = f"{name}/{metric}" + ("" if filtered == "none" else f",{filtered}")
            yield from _score(probe, label, metric, scores, key, facts, better)


def _rank(metric: str) -> int:
    """Return the position of a metric among those that are shown first."""
    return MAIN_METRICS.index(metric) if metric in MAIN_METRICS else len(MAIN_METRICS)


def _score(
    probe: str, label: str, metric: str, scores: Mapping[str, Any], key: str, facts: dict[str, Any], better: bool | None
) -> Iterator[Measurement]:
    """Yield the measurement of one score, and its standard error where there is one.

    Args:
        probe: Name of the probe.
        label: Name of the metric with its task.
        metric: Name of the metric in lm-evaluation-harness.
        scores: Results of the task.
        key: Key of the score in these, "METRIC,FILTER".
        facts: Description of the metric; a key without a value is left out.
        better: True if more is better, None if unknown.
    """
    unit = FRACTION if metric in SHARES else UNITS.get(metric, "1")
    n = int(scores.get("sample_len") or 0) or None
    value = float(scores[key])
    description = {
        "better": {True: "higher", False: "lower", None: "neither"}[better], "decimals": 1 if unit == FRACTION else 3,
        "words": f"Task {facts['task']} of lm-evaluation-harness, version {facts['version']}: {metric}.",
        **{name: fact for name, fact in facts.items() if fact is not None},
    }  # fmt: skip
    if (probe, label) in METRICS:
        # the words of results/metrics.csv
        description = {name: fact for name, fact in description.items() if name not in ("better", "decimals", "words")}
    fields: dict[str, Any] = {"probe": probe, "metric": label, "unit": unit, "n": n}
    if not math.isfinite(value):
        yield Measurement(**fields, reason="n/a: the score is not a finite number", description=description)
        return
    stderr = scores.get(key.replace(",", "_stderr,", 1))
    if not isinstance(stderr, int | float) or not math.isfinite(stderr):
        yield Measurement(**fields, value=value, description=description)
        return
    low, high = value - Z_95 * stderr, value + Z_95 * stderr
    if unit == FRACTION:
        low, high = max(0.0, low), min(1.0, high)
    yield Measurement(**fields, value=value, low=low, high=high, description=description)
    fields["metric"] = label + STDERR_SUFFIX
    yield Measurement(
        **fields,
        value=float(stderr),
        description={"words": f"Standard error of {label}, over the questions.", "task": facts["task"]},
    )


def _chance(task: Any) -> float | None:
    """Return the score of a random choice, the mean of 1 / choices over the questions; None if there are no choices."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    counts = Counter(request.doc_id for request in task.instances)
    unconditional = 2 if any(entry["metric"] == "acc_mutual_info" for entry in task.config.metric_list or ()) else 1
    return fmean(unconditional / count for count in counts.values()) if counts else None


def _group_chance(group: Any, metric: str, chances: Mapping[str, float | None], loaded: LoadedTask) -> float | None:
    """Return the chance level of a group's metric, weighted as the group weights its tasks; None if one has none."""
    names = [task.task_name for task in group.get_all_tasks()]
    levels = [chances.get(name) for name in names]
    shares = [level for level in levels if level is not None]
    if len(shares) < len(levels) or not shares:
        return None
    by_size = any(entry.metric == metric and entry.weight_by_size for entry in group.aggregate_metric_list or ())
    sizes = [len({request.doc_id for request in loaded.tasks[name].instances}) if by_size else 1 for name in names]
    return sum(level * size for level, size in zip(shares, sizes, strict=True)) / sum(sizes)
