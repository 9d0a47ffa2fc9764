"""What every attempt does once there is something to measure: probe after probe, every number recorded as it comes."""

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
from ..probes import PROBES, bound
from ..probes.subject import Subject, measure
from ..training.loop import Stopped
from .job import Job
from .process import StopFlag, log_line

HEARTBEAT_S = 5.0


class AttemptRunner:
    """An attempt that measures. `weights` is the address of the kept weights, as the database holds it, once there are any."""

    def __init__(self, job: Job, runs: Path, recorder: AttemptWriter, stop: StopFlag) -> None:
        self.job, self.runs, self.stop = job, runs, stop
        self.recorder = recorder
        self.weights: str | None = None
        for plugin in job.config.get("plugins", ()):
            load_plugin(Path(plugin["path"]), plugin["sha256"])
        self.config = config_of(job.config)
        self._last_heartbeat = time.monotonic()

    def run(self, began: float) -> None:
        """Does what the job asks. Raises Stopped, LostLease and whatever goes wrong."""
        raise NotImplementedError

    def clean(self) -> None:
        """Removes what nobody needs any more, once the database knows how the attempt ended."""

    def probe(self, subject: Subject) -> None:
        """Measures all that the job asks for."""
        self.recorder.progress(self.config.train.steps, self.config.train.steps, phase="probing")
        for name, group in groupby(sorted(self.job.missing), key=lambda item: item[0]):
            began, lengths = time.perf_counter(), [length for _, length in group]
            for length in lengths:
                self._run_probe(subject, name, length)
                self.check_stop()
            tokens = ", ".join(f"{length:,}" for length in lengths)
            at = f" at {tokens} tokens" if bound(name, self.config).by_length else ""
            log_line(f"probe {name}{at}: {time.perf_counter() - began:.1f} s")

    def _run_probe(self, subject: Subject, name: str, length: int) -> None:
        """Records what the probe found at that length, and the peak memory that it took, if the system tells.

        On CUDA that is what torch allocated, weights included, on the CPU the resident memory of the whole process.
        """
        probe = bound(name, subject.config)
        cuda = subject.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(subject.device)
        resident = not cuda and reset_peak_resident()
        started = time.perf_counter()
        try:
            results = list(measure(name, subject, [length]))
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            reason = f"oom: {(str(error) or type(error).__name__).splitlines()[0]}"
            results = [([probe.missing(reason, length)], [])]
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated(subject.device) if cuda else peak_resident() if resident else None
        measurements = [one for some, _ in results for one in some]
        if peak is not None and probe.by_length:
            # A length without a single number has no peak either, and for the same reason.
            missing_reason = measurements[0].reason if all(one.value is None for one in measurements) else None
            value = None if missing_reason else float(peak)
            fields: dict[str, Any] = {"metric": PEAK_MEMORY, "length": length, "value": value, "unit": "bytes"}
            measurements.append(Measurement(probe=name, reason=missing_reason, **fields))
        self.recorder.examples([example for _, some in results for example in some])
        source = plugin_of(PROBES, name, self.config.plugins)
        origin: dict[str, Any] = {"seconds": seconds, "peak_memory": peak, "source": source}
        self.recorder.measurements(
            [replace(one, description=probe.description(one.metric), **origin) for one in measurements]
        )

    def check_stop(self) -> None:
        """Between two pieces of a measurement: leaves if asked to, else says from time to time that it goes on."""
        if self.stop.is_set:
            raise Stopped
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = time.monotonic()
            self.recorder.heartbeat()


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether memory ran out: on the GPU, in Python or numpy, or in torch's allocator of the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
