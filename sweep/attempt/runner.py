"""The body of an attempt: a model trained or loaded, then probed, every number recorded as it comes."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kernels.choice import use_plain_torch
from ...model.backbone import Backbone, build
from ...results.metrics import PEAK_MEMORY
from ...results.store.records import CurvePoint, Measurement
from ...results.store.writer import AttemptWriter
from ..checkpoints import checkpoint, storage
from ..config import CellConfig
from ..data.batches import training_batches
from ..data.corpora import Corpus, open_corpus
from ..grid.plugins import load_plugin, plugin_of
from ..machine.hardware import peak_resident, reset_peak_resident
from ..probes import PROBES, bound
from ..probes.measure import measure
from ..probes.perplexity import stream_loss
from ..probes.subject import Subject, evaluating
from ..training import flops
from ..training.loop import Pending, Point, Stopped, Trainer
from ..training.optimizers import Optimizers
from . import provenance
from .device import choose_device, repeat_exactly, share_compiled
from .job import Job
from .log import say, told

if TYPE_CHECKING:
    from .stop import StopFlag

HEARTBEAT_S = 5.0


class Work:
    """Runs one job. `weights` is the address of the kept weights, as the database holds it, once there are any."""

    def __init__(self, job: Job, runs: Path, recorder: AttemptWriter, stop: StopFlag) -> None:
        self.job, self.runs, self.stop = job, runs, stop
        self.recorder = recorder
        self.weights: str | None = None
        for plugin in job.config["plugins"]:
            load_plugin(Path(plugin["path"]), plugin["sha256"])
        self.config = CellConfig.model_validate(job.config)
        self.home = storage.home(self.config.checkpoint.path, job.folder)
        """Where checkpoints and weights go, as the database says it."""
        self._place = storage.resolve(runs, self.home)
        self._earlier = [storage.resolve(runs, folder) for _, folder in job.resume]
        """Places of earlier attempts that may hold checkpoints, newest first."""
        self._source = ("", "")
        """Place and name of the checkpoint that this attempt went on from."""
        self._saved = self._heard = time.monotonic()

    def run(self, began: float) -> None:
        """Trains or loads, then probes. Raises Stopped, Diverged, LostLease and whatever goes wrong."""
        config = self.config
        torch.set_num_threads(config.resources.cpus)
        if config.train.deterministic:
            repeat_exactly()
        use_plain_torch(config.train.kernels == "torch")
        if self.job.kind == "train":
            self._claim()
        device = choose_device(config.resources.gpus)
        corpus = open_corpus(self.runs / "corpora", config.data.fingerprint or "")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = build(config.model, seed=config.seed, device=device, dtype=dtype)
        subject = Subject(model, corpus.load_tokenizer(), corpus, config, device, self._leave_if_asked)
        if self.job.kind == "train" and config.train.compile and device.type == "cuda":
            share_compiled(device)
            model.compile_blocks()
        kernels = model.kernel_paths()
        self.recorder.provenance(
            provenance.collect(
                self.job,
                device=device,
                dtype=dtype,
                kernels=kernels,
                tokenizer=config.data.tokenizer,
                corpus=config.data.corpus,
                extra={
                    "parameters": count(model),
                    "start_seconds": round(time.monotonic() - began, 3),
                    "chunk_tokens": config.eval.chunk_tokens,
                },
            )
        )
        self.recorder.neighbours()
        self._introduce(subject, dtype, kernels)
        if self.job.kind == "train":
            self._train(subject)
            self._throughput(subject)
            self._references(corpus)
        else:
            assert self.job.weights is not None
            checkpoint.load_weights(storage.resolve(self.runs, self.job.weights), model)
            say(f"weights from {self.job.weights}")
        self._leave_if_asked()
        self._probe(subject)
        if self.job.kind == "train":
            self._keep()
        self.recorder.neighbours()

    def _introduce(self, subject: Subject, dtype: torch.dtype, kernels: Mapping[str, str]) -> None:
        """The first line of the log: which cell, on what, and how."""
        cuda = subject.device.type == "cuda"
        where = torch.cuda.get_device_name(subject.device) if cuda else f"CPU ({torch.get_num_threads()} threads)"
        ways: dict[str, list[str]] = {}
        for part, way in kernels.items():
            ways.setdefault(way, []).append(part)
        told = "; ".join(f"{', '.join(parts)}: {way}" for way, parts in ways.items())
        say(
            f"cell {self.job.slug} ({self.job.cell}), attempt {Path(self.job.folder).name} ({self.job.kind}) on {where}, "
            f"{str(dtype).removeprefix('torch.')}, {count(subject.model):,} parameters; {told}"
        )

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self, subject: Subject) -> None:
        config, model = self.config, subject.model
        trainer = Trainer(
            model=model,
            optimizers=Optimizers(model.parameter_groups(), config.train, subject.device),
            batches=training_batches(config, subject.corpus),
            config=config.train,
            seed=config.seed,
            device=subject.device,
            validate=lambda: self._validate(subject),
            validate_every=config.eval.validate_every,
            watcher=self,
        )
        self._model, self._optimizers, self._subject = model, trainer.optimizers, subject
        self._resume(trainer)
        say(
            f"{config.train.steps:,} steps of {config.train.batch_tokens:,} tokens, "
            + ("loss on marked targets, " if config.train.loss_on == "marked" else "")
            + (f"resumed at step {trainer.step:,}" if trainer.step else "from the first step")
        )
        self.recorder.progress(trainer.step, config.train.steps, phase="training")
        trainer.run()
        # The finished state, so that an attempt that dies while probing does not train again.
        self.save(trainer.step, trainer.step * config.train.batch_tokens, trainer.wall_s)

    def _validate(self, subject: Subject) -> float:
        with evaluating(subject.model):
            return stream_loss(subject, full_context=False)[0]

    def _claim(self) -> None:
        """Makes sure that checkpoints can be written, and that no strange one lies where ours will be looked for."""
        if self.config.checkpoint.path is not None:
            checkpoint.claim(self._place)
        else:
            # The runs folder is this database's own: what lies there is left of one that was deleted.
            checkpoint.clear(self._place)

    def _resume(self, trainer: Trainer) -> None:
        for (attempt, _), place in zip(self.job.resume, self._earlier, strict=True):
            state = checkpoint.newest(place, say)
            if state is None:
                continue
            trainer.restore(state)
            self._source = place, state.name
            self.recorder.inherit_curve(attempt, state.step)
            self.recorder.event("resumed", f"from step {state.step} of attempt {attempt}")
            return

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Watcher: how far the training is."""
        self.recorder.progress(step, self.config.train.steps, loss, tokens_per_s, "training")

    def point(self, point: Point) -> None:
        """Watcher: a point of the curve, with both MFU figures."""
        steps = self.config.train.steps
        if told(point.step, self.config.eval.validate_every, steps):
            say(
                f"step {point.step:,} of {steps:,}: train loss {point.train_loss:.4f}, val loss {point.val_loss:.4f}, "
                f"{point.tokens_per_s:,.0f} tokens/s"
            )
        paper, honest = self._mfu(point.tokens_per_s)
        self.recorder.curve(
            [
                CurvePoint(
                    step=point.step,
                    tokens=point.tokens,
                    wall_s=point.wall_s,
                    train_loss=point.train_loss,
                    val_loss=point.val_loss,
                    tokens_per_s=point.tokens_per_s,
                    grad_norm=point.grad_norm,
                    lr=point.lr,
                    mfu_paper=paper,
                    mfu=honest,
                    peak_memory=point.peak_memory,
                )
            ]
        )

    def should_stop(self) -> bool:
        """Watcher: whether SIGTERM has come."""
        return self.stop.set

    def should_save(self, step: int) -> bool:
        """Watcher: whether a checkpoint is due."""
        every = self.config.checkpoint.every_steps
        return time.monotonic() - self._saved >= 60 * self.config.checkpoint.every_minutes or (
            every is not None and step % every == 0
        )

    def save(self, step: int, tokens: int, wall_s: float, pending: Pending | None = None) -> None:
        """Watcher: writes a checkpoint."""
        self.recorder.settle()
        name = checkpoint.save(
            self._place,
            self._model,
            self._optimizers.state_dict(),
            step=step,
            tokens=tokens,
            wall_s=wall_s,
            pending=pending,
        )
        self.recorder.checkpoint(storage.join(self.home, name))
        if self._earlier:
            self._thin_out()
        self._saved = time.monotonic()

    def _thin_out(self) -> None:
        """Leaves two checkpoints over all attempts of the cell, so that stops do not pile them up."""
        enough = len(checkpoint.found(self._place)) >= checkpoint.KEPT
        for place in self._earlier:
            checkpoint.clear(place, but=None if enough or place != self._source[0] else self._source[1])
        if enough:
            self._earlier = []

    # --- measuring ------------------------------------------------------------------------------------------------

    def _peak(self) -> float | None:
        device = self._subject.device
        return flops.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def _mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        model, seq_len = self._model.config, self.config.train.seq_len
        peak = self._peak()
        paper = flops.paper_flops(model, count(self._model), seq_len)
        honest = flops.training_flops(model, seq_len, counted=self._counted)
        return flops.mfu(paper, tokens_per_s, peak), flops.mfu(honest, tokens_per_s, peak)

    @functools.cached_property
    def _counted(self) -> float:
        """Share of the training targets that the loss is of."""
        return self._subject.corpus.marked_share if self.config.train.loss_on == "marked" else 1.0

    def _throughput(self, subject: Subject) -> None:
        """Speed over the last validation interval, validation excluded, as the paper reports it."""
        last = self.recorder.last_point()
        if last is None or last.tokens_per_s is None:
            return
        paper, honest = self._mfu(last.tokens_per_s)
        chip = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "the CPU"
        no_peak = f"n/a: no peak FLOP/s known for {chip}" if self._peak() is None else None
        unsaid = flops.unknown(self._model.config)

        def one(metric: str, value: float | None, unit: str, why: str | None = None) -> Measurement:
            return Measurement(
                probe="throughput", metric=metric, value=value, unit=unit, reason=why, peak_memory=last.peak_memory
            )

        self.recorder.measurements(
            [
                one("tokens_per_s", last.tokens_per_s, "tokens/s"),
                one("train_seconds", last.wall_s, "s"),
                one("mfu_paper", paper, "fraction", no_peak),
                one("mfu", honest, "fraction", no_peak or (unsaid and f"n/a: {unsaid}")),
                one("parameters", float(count(subject.model)), "parameters"),
            ]
        )

    def _references(self, corpus: Corpus) -> None:
        n = corpus.train_tokens
        bigram = corpus.bigram_entropy
        why = None if bigram is not None else "n/a: the vocabulary is too large to count pairs"
        self.recorder.measurements(
            [
                Measurement(
                    probe="corpus", metric="unigram_entropy", value=corpus.unigram_entropy, unit="nats/token", n=n
                ),
                Measurement(probe="corpus", metric="bigram_entropy", value=bigram, unit="nats/token", n=n, reason=why),
            ]
        )

    def _probe(self, subject: Subject) -> None:
        self.recorder.progress(self.config.train.steps, self.config.train.steps, phase="probing")
        with evaluating(subject.model):
            for name, group in groupby(sorted(self.job.missing), key=lambda item: item[0]):
                began, lengths = time.perf_counter(), [length for _, length in group]
                for length in lengths:
                    self._probe_at(subject, name, length)
                    self._leave_if_asked()
                at = (
                    f" at {', '.join(f'{length:,}' for length in lengths)} tokens"
                    if bound(name, self.config).by_length
                    else ""
                )
                say(f"probe {name}{at}: {time.perf_counter() - began:.1f} s")

    def _probe_at(self, subject: Subject, name: str, length: int) -> None:
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
        measured = [one for some, _ in results for one in some]
        if peak is not None and probe.by_length:
            # A length without a single number has no peak either, and for the same reason.
            why = measured[0].reason if all(one.value is None for one in measured) else None
            value = None if why else float(peak)
            measured.append(
                Measurement(probe=name, metric=PEAK_MEMORY, length=length, value=value, unit="bytes", reason=why)
            )
        self.recorder.examples([example for _, some in results for example in some])
        source = plugin_of(PROBES, name, self.config.plugins)
        self.recorder.measurements(
            [
                replace(
                    one, seconds=seconds, peak_memory=peak, source=source, description=probe.description(one.metric)
                )
                for one in measured
            ]
        )

    def _leave_if_asked(self) -> None:
        """Between two pieces of a measurement: leaves if asked to, else says from time to time that it goes on."""
        if self.stop.set:
            raise Stopped
        if time.monotonic() - self._heard >= HEARTBEAT_S:
            self._heard = time.monotonic()
            self.recorder.heartbeat()

    def _keep(self) -> None:
        """Leaves the weights on disk if the config says so."""
        if self.config.checkpoint.keep != "nothing":
            checkpoint.save_weights(storage.join(self._place, checkpoint.WEIGHTS), self._model)
            self.weights = storage.join(self.home, checkpoint.WEIGHTS)

    def clean(self) -> None:
        """Removes the checkpoints of every attempt of this cell, once the database knows that they are not needed."""
        if self.job.kind == "train" and self.config.checkpoint.keep != "everything":
            try:
                for place in (self._place, *self._earlier):
                    checkpoint.clear(place)
            except storage.StorageError as error:
                # the numbers stand, so this is only told
                self.recorder.event("storage", f"checkpoints were left behind: {error}")


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether memory ran out: on the GPU, in Python or numpy, or in torch's allocator of the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def count(model: Backbone) -> int:
    """All parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
