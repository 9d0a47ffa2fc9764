"""Base class of attempts that measure: probes run one after another, and results are recorded as they come."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ...results.metrics import PEAK_MEMORY
from ...results.store.recorder import AttemptWriter
from ...results.store.records import Measurement
from ..external_models.config import config_of
from ..grid.plugins import load_plugin, plugin_of
from ..host.hardware import peak_resident, reset_peak_resident
from ..probes import PROBES, Probe, bound
from ..probes.subject import Subject, run_probe
from ..ranks.group import SINGLE, Ranks
from ..training.loop import Stopped
from .job import Job
from .process import StopFlag, log_line

HEARTBEAT_S = 5.0
"""Seconds between heartbeats to the database."""


class AttemptRunner:
    """Runner of one attempt. `weights` is the address of the stored weights, as in the database; None before.

    A subclass defines `run`, which calls `run_probes`.
    """

    def __init__(self, job: Job, runs: Path, recorder: AttemptWriter, stop: StopFlag, ranks: Ranks = SINGLE) -> None:
        """Load the job's plugins, which runs their code in this process, and validate its config.

        Args:
            job: what to train, load and measure.
            runs: folder that the job's addresses are relative to.
            recorder: writer of the attempt's results.
            stop: flag that a stop request sets.
            ranks: group of the processes of the attempt; every rank runs the same code, rank 0 records, logs and saves.
        """
        self.job, self.runs, self.stop, self.ranks = job, runs, stop, ranks
        self.recorder = recorder
        self.weights: str | None = None
        for plugin in job.config.get("plugins", ()):
            load_plugin(Path(plugin["path"]), plugin["sha256"])
        self.config = config_of(job.config)
        self._last_heartbeat = time.monotonic()

    def run(self, began: float) -> None:
        """Run the job; `began` is the monotonic time at which the process started it. Subclasses define it.

        Raises:
            Stopped: a stop was requested.
            LeaseLost: another process owns the attempt.
        """
        raise NotImplementedError

    def clean(self) -> None:
        """Delete checkpoints that are not needed any more; called after the attempt's end is in the database.

        Does nothing here.
        """

    def run_probes(self, subject: Subject) -> None:
        """Run every probe and length that the job lacks, sorted by name and length, and record the results.

        Results are recorded after each length, so a stop loses at most one. Logs a line per probe.

        Args:
            subject: model to measure, in evaluation mode.

        Raises:
            Stopped: a stop was requested.
            LeaseLost: another process owns the attempt.
        """
        self.recorder.progress(self.config.train.steps, self.config.train.steps, phase="probing")
        subject = subject.in_folder(self.runs / self.job.folder)
        for name, group in groupby(sorted(self.job.missing), key=lambda item: item[0]):
            began, lengths = time.perf_counter(), [length for _, length in group]
            for length in lengths:
                self._run_probe(subject, name, length)
                self.check_stop()
            tokens = ", ".join(f"{length:,}" for length in lengths)
            at = f" at {tokens} tokens" if bound(name, self.config).by_length else ""
            self.log(f"probe {name}{at}: {time.perf_counter() - began:.1f} s")

    def log(self, line: str) -> None:
        """Log a line on rank 0."""
        if self.ranks.is_first:
            log_line(line)

    def _run_probe(self, subject: Subject, name: str, length: int) -> None:
        """Run a probe at one length and record its results with its duration and peak memory, where these are known.

        Peak memory in bytes is what torch allocated on CUDA, weights included, and on the CPU the resident memory of
        the process, of the rank with the most; None where it cannot be reset. For a probe with lengths it is recorded as a measurement of its own
        too. If memory runs out, a missing value with that reason ("oom: ...") is recorded instead; other errors pass
        through.

        Args:
            subject: model to measure.
            name: name of the probe.
            length: tokens of its texts; 0 for a probe without lengths.
        """
        probe = bound(name, subject.config)
        cuda = subject.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(subject.device)
        resident = not cuda and reset_peak_resident()
        started = time.perf_counter()
        try:
            results = list(run_probe(name, subject, [length]))
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            reason = f"oom: {(str(error) or type(error).__name__).splitlines()[0]}"
            results = [([probe.missing(reason, length)], [])]
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(subject.device) if cuda else peak_resident() if resident else None
        peaks = [peak for peak in self.ranks.gather_objects(peak) if peak is not None]
        peak = max(peaks, default=None)
        measurements = [measurement for group, _ in results for measurement in group]
        if peak is not None and probe.by_length:
            # If every value of this length is missing, its peak is missing too, for the same reason.
            missing_reason = (
                measurements[0].reason if all(measurement.value is None for measurement in measurements) else None
            )
            value = None if missing_reason else float(peak)
            fields: dict[str, Any] = {"metric": PEAK_MEMORY, "length": length, "value": value, "unit": "bytes"}
            measurements.append(Measurement(probe=name, reason=missing_reason, **fields))
        self.recorder.examples([example for _, examples in results for example in examples])
        source = plugin_of(PROBES, name, self.config.plugins)
        origin: dict[str, Any] = {"seconds": seconds, "peak_memory": peak, "source": source}
        facts = _reading_facts(subject, probe)
        self.recorder.measurements(
            [
                replace(
                    measurement,
                    description=({**(measurement.description or probe.description(measurement.metric) or {}), **facts})
                    or None,
                    **origin,
                )
                for measurement in measurements
            ]
        )

    def check_stop(self) -> None:
        """Raise Stopped if a stop was requested; otherwise send a heartbeat if one is due (every 5 s).

        Measurements call it between their parts. The heartbeat raises LeaseLost if another process owns the attempt.
        """
        if self.stop.set:
            raise Stopped
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = time.monotonic()
            self.recorder.heartbeat()


def _reading_facts(subject: Subject, probe: Probe) -> dict[str, str]:
    """Return what else decides a number and stands in no other column: "text_sha256" and "window".

    They are the SHA-256 of the tokens of a further text, and "trained" if the probe reads with the window of training;
    each is there only if it applies.
    """
    facts = {"text_sha256": subject.long_text(probe.text).sha256} if probe.text else {}
    if subject.config.eval.window == "trained" and subject.config.model.window:
        facts["window"] = "trained"
    return facts


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return True if memory ran out: on the GPU, in Python or numpy, or in torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
