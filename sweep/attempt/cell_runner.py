"""The body of an attempt: a model trained or loaded, then probed, every number recorded as it comes."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...kernels.dispatch import use_torch_backend
from ...model.backbone import Backbone
from ...results.store.recorder import AttemptWriter
from ...results.store.records import CurvePoint, Measurement
from ...results.weights import NO_HASH, WEIGHTS_SHA256
from ..checkpoints import checkpoint, storage
from ..data.batches import marked_capacity, training_batches
from ..data.corpora import Corpus, open_corpus
from ..probes.perplexity import stream_loss
from ..probes.subject import CellSubject, evaluating
from ..training import flops, optimizer_steps
from ..training.loop import Trainer, UnvalidatedPoint, ValidationPoint
from ..training.optimizers import Optimizers
from . import provenance
from .base_runner import AttemptRunner
from .compile_lock import CompileLock
from .device import (
    choose_device,
    compile_lock_for,
    enable_determinism,
    network,
    share_self_tests,
    use_shared_compile_cache,
)
from .generation import SamplingError, write_samples
from .job import Job
from .process import StopFlag, is_logged, log_line


class CellRunner(AttemptRunner):
    """Runs one job of a network of ours."""

    def __init__(self, job: Job, runs: Path, recorder: AttemptWriter, stop: StopFlag) -> None:
        super().__init__(job, runs, recorder, stop)
        self.checkpoint_address = storage.home(self.config.checkpoint.path, job.folder)
        """Where checkpoints and weights go, as the database says it."""
        self.storage_address = storage.resolve(runs, self.checkpoint_address)
        self._previous_locations = [storage.resolve(runs, folder) for _, folder in job.resume]
        """Places of earlier attempts that may hold checkpoints, newest first."""
        self._resumed_from = ("", "")
        """Place and name of the checkpoint that this attempt went on from."""
        self._graphs = False
        self.compile_lock: CompileLock | None = None
        """Of compiling, until the first step is done."""
        self._last_save = time.monotonic()
        self._samples_failed = False

    def run(self, began: float) -> None:
        """Trains or loads, then probes. Raises Stopped, Diverged, LostLease and whatever goes wrong."""
        config = self.config
        torch.set_num_threads(config.resources.cpus)
        if config.train.deterministic:
            enable_determinism()
        use_torch_backend(config.train.kernels == "torch")
        if self.job.kind == "train":
            self._prepare_checkpoint_location()
        device = choose_device(config.resources.gpus)
        if device.type == "cuda":
            use_shared_compile_cache(device, *(plugin.sha256 for plugin in config.plugins))
            share_self_tests(device)
        corpus = open_corpus(self.runs / "corpora", config.data.fingerprint or "")
        model = network(config, device, training=self.job.kind == "train")
        subject = CellSubject(model, corpus.load_tokenizer(), corpus, config, device, self.check_stop)
        waited = 0.0
        if self.job.kind == "train" and config.train.compile and device.type == "cuda":
            self.compile_lock = compile_lock_for(config)
            waited = self.compile_lock.acquire(self.check_stop)
            if waited >= 1:
                log_line(f"waited {waited:.0f} s for another attempt to compile the same network")
            model.compile_blocks(regional=config.train.compile == "blocks")
        kernels = model.kernel_paths()
        extra: dict[str, object] = {
            "parameters": parameter_count(model),
            "start_seconds": round(time.monotonic() - began - waited, 3),
            "waited_seconds": round(waited, 3),
            "chunk_tokens": config.eval.chunk_tokens,
        }
        if self.job.kind == "train":
            self._graphs, why = optimizer_steps.should_capture(config.train, parameter_count(model), device)
            extra["steps"] = f"{'CUDA graphs' if self._graphs else 'as they come'}: {why}"
        self._provenance = provenance.collect_provenance(
            self.job, device=device, precision=model.precision, kernels=kernels, tokenizer=config.data.tokenizer,
            corpus=config.data.corpus, extra=extra,
        )  # fmt: skip
        self.recorder.provenance(self._provenance)
        self.recorder.neighbours()
        self._log_header(subject, kernels)
        if self.job.kind == "train":
            self._train(subject)
            self._record_throughput(subject)
            self._record_corpus_entropies(corpus)
        else:
            assert self.job.weights is not None
            checkpoint.load_weights(storage.resolve(self.runs, self.job.weights), model, self.job.weights_sha256)
            log_line(f"weights from {self.job.weights} ({self.job.weights_sha256 or NO_HASH})")
        self.check_stop()
        with evaluating(subject.model):
            self.probe(subject)
        if self.job.kind == "train":
            self._save_weights()
        self.recorder.neighbours()

    def _log_header(self, subject: CellSubject, kernels: Mapping[str, str]) -> None:
        """The first line of the log: which cell, on what, and how."""
        cuda = subject.device.type == "cuda"
        where = torch.cuda.get_device_name(subject.device) if cuda else f"CPU ({torch.get_num_threads()} threads)"
        parts_by_implementation: dict[str, list[str]] = {}
        for part, implementation in kernels.items():
            parts_by_implementation.setdefault(implementation, []).append(part)
        implementations = "; ".join(f"{', '.join(parts)}: {way}" for way, parts in parts_by_implementation.items())
        log_line(
            f"cell {self.job.slug} ({self.job.cell}), attempt {Path(self.job.folder).name} ({self.job.kind}) on {where}, "
            f"{subject.model.precision}, {parameter_count(subject.model):,} parameters; {implementations}"
        )

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self, subject: CellSubject) -> None:
        config, model = self.config, subject.model
        self._subject = subject
        trainer = Trainer(
            model=model,
            optimizers=Optimizers(model.parameter_groups(), config.train, subject.device),
            batches=training_batches(config, subject.corpus),
            config=config.train,
            seed=config.seed,
            device=subject.device,
            validate=lambda: self._validate(subject, trainer.step),
            validate_every=config.eval.validate_every,
            watcher=self,
            graphs=self._graphs,
            refused=self._on_capture_refused,
            room=self._marked_capacity(subject),
        )
        self._model, self._optimizers = model, trainer.optimizers
        self._resume(trainer)
        log_line(
            f"{config.train.steps:,} steps of {config.train.batch_tokens:,} tokens, "
            + ("loss on marked targets, " if config.train.loss_on == "marked" else "")
            + (f"resumed at step {trainer.step:,}" if trainer.step else "from the first step")
        )
        self.recorder.progress(trainer.step, config.train.steps, phase="training")
        trainer.run()
        if self.compile_lock is not None:  # no step was left to do
            self.compile_lock.release()
        # The finished state, so that an attempt that dies while probing does not train again.
        self.save(trainer.step, trainer.step * config.train.batch_tokens, trainer.wall_s)

    def _marked_capacity(self, subject: CellSubject) -> int | None:
        """How many marked targets a micro-batch has room for, on a GPU, where a graph needs shapes that stay."""
        train = self.config.train
        if train.loss_on == "all" or subject.device.type != "cuda":
            return None
        return marked_capacity(self._loss_share, train.micro_batch * train.seq_len)

    def _on_capture_refused(self, why: str) -> None:
        """Steps were to be captured as CUDA graphs, and could not be."""
        log_line(f"steps cannot be captured as CUDA graphs and are queued as they come, to the same numbers: {why}")
        self._add_provenance(steps=f"as they come: {why}")
        self.recorder.neighbours()

    def _add_provenance(self, **extra: object) -> None:
        """Record the provenance again with these further facts."""
        self._provenance = dataclasses.replace(self._provenance, extra={**self._provenance.extra, **extra})
        self.recorder.provenance(self._provenance)

    def _validate(self, subject: CellSubject, step: int) -> float:
        with evaluating(subject.model):
            loss = stream_loss(subject, full_context=False)[0]
            if math.isfinite(loss):
                self._write_samples(subject, step)
            return loss

    def _write_samples(self, subject: CellSubject, step: int) -> None:
        """Text that the network writes at this step. What cannot be written is told once; it stops no training."""
        settings = self.config.eval.samples
        if not settings.prompts or self._samples_failed:
            return
        try:
            samples = [one.as_example() for one in write_samples(subject, settings, seed=self.config.seed, step=step)]
        except SamplingError as error:
            self._samples_failed = True
            log_line(f"no samples (eval.samples): {error}")
            self.recorder.event("samples", f"none is written: {error}")
        else:
            self.recorder.examples(samples)

    def _prepare_checkpoint_location(self) -> None:
        """Makes sure that checkpoints can be written, and that no strange one lies where ours will be looked for."""
        if self.config.checkpoint.path is not None:
            checkpoint.claim(self.storage_address)
        else:
            # The runs folder is this database's own: what lies there is left of one that was deleted.
            checkpoint.clear(self.storage_address)

    def _resume(self, trainer: Trainer) -> None:
        for (attempt, _), location in zip(self.job.resume, self._previous_locations, strict=True):
            state = checkpoint.newest(location, log_line)
            if state is None:
                continue
            trainer.restore(state)
            self._resumed_from = location, state.name
            self.recorder.inherit_curve(attempt, state.step)
            self.recorder.event("resumed", f"from step {state.step} of attempt {attempt}")
            return

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Watcher: how far the training is."""
        if self.compile_lock is not None:
            self.compile_lock.mark_compiled()
            self.compile_lock = None
        self.recorder.progress(step, self.config.train.steps, loss, tokens_per_s, "training")

    def point(self, point: ValidationPoint) -> None:
        """Watcher: a point of the curve, with both MFU figures."""
        steps = self.config.train.steps
        if is_logged(point.step, self.config.eval.validate_every, steps):
            log_line(
                f"step {point.step:,} of {steps:,}: train loss {point.train_loss:.4f}, val loss {point.val_loss:.4f}, "
                f"{point.tokens_per_s:,.0f} tokens/s{self._loss_scale_text()}"
            )
        paper, honest = self._mfu(point.tokens_per_s)
        self.recorder.curve([CurvePoint(**vars(point), mfu_paper=paper, mfu=honest)])

    def _loss_scale_text(self) -> str:
        """What loss scaling has done so far, for the log."""
        scaling = self._optimizers.scaling
        return "" if scaling is None else f", loss scale {scaling.scale:g}, {scaling.skipped:,} steps skipped"

    def should_stop(self) -> bool:
        """Watcher: whether SIGTERM has come."""
        return self.stop.is_set

    def should_save(self, step: int) -> bool:
        """Watcher: whether a checkpoint is due."""
        every = self.config.checkpoint.every_steps
        return time.monotonic() - self._last_save >= 60 * self.config.checkpoint.every_minutes or (
            every is not None and step % every == 0
        )

    def save(self, step: int, tokens: int, wall_s: float, pending: UnvalidatedPoint | None = None) -> None:
        """Watcher: writes a checkpoint."""
        self.recorder.settle()
        state = self._optimizers.state_dict()
        name = checkpoint.save(
            self.storage_address, self._model, state, step=step, tokens=tokens, wall_s=wall_s, pending=pending
        )
        self.recorder.checkpoint(storage.join(self.checkpoint_address, name))
        if self._previous_locations:
            self._prune_checkpoints()
        self._last_save = time.monotonic()

    def _prune_checkpoints(self) -> None:
        """Leaves two checkpoints over all attempts of the cell, so that stops do not pile them up."""
        has_enough = len(checkpoint.list_checkpoints(self.storage_address)) >= checkpoint.KEPT
        for location in self._previous_locations:
            checkpoint.clear(
                location, but=None if has_enough or location != self._resumed_from[0] else self._resumed_from[1]
            )
        if has_enough:
            self._previous_locations = []

    # --- measuring ------------------------------------------------------------------------------------------------

    def _peak(self) -> float | None:
        device = self._subject.device
        # the peaks are those of bfloat16, which float16 shares and fp8 projections are measured by
        if device.type != "cuda" or self._model.dtype == torch.float32:
            return None
        return flops.peak_flops(torch.cuda.get_device_name(device))

    def _mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        model, seq_len = self._model.config, self.config.train.seq_len
        peak = self._peak()
        paper = flops.paper_flops(model, parameter_count(self._model), seq_len)
        honest = flops.training_flops(model, seq_len, counted=self._loss_share)
        return flops.mfu(paper, tokens_per_s, peak), flops.mfu(honest, tokens_per_s, peak)

    @functools.cached_property
    def _loss_share(self) -> float:
        """Share of the training targets that the loss is of."""
        return self._subject.corpus.marked_share if self.config.train.loss_on == "marked" else 1.0

    def _record_throughput(self, subject: CellSubject) -> None:
        """Speed over the last validation interval, validation excluded, as the paper reports it."""
        last = self.recorder.last_point()
        if last is None or last.tokens_per_s is None:
            return
        paper, honest = self._mfu(last.tokens_per_s)
        chip = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "the CPU"
        no_peak = f"n/a: no peak FLOP/s known for {chip}" if self._peak() is None else None
        unknown_flops, scaling = flops.unknown(self._model.config), self._optimizers.scaling

        def measurement(metric: str, value: float | None, unit: str, why: str | None = None) -> Measurement:
            return Measurement(
                probe="throughput", metric=metric, value=value, unit=unit, reason=why, peak_memory=last.peak_memory
            )

        self.recorder.measurements(
            [
                measurement("tokens_per_s", last.tokens_per_s, "tokens/s"),
                measurement("train_seconds", last.wall_s, "s"),
                measurement("mfu_paper", paper, "fraction", no_peak),
                measurement("mfu", honest, "fraction", no_peak or (unknown_flops and f"n/a: {unknown_flops}")),
                measurement("parameters", float(parameter_count(subject.model)), "parameters"),
                *([] if scaling is None else [measurement("skipped_steps", float(scaling.skipped), "steps")]),
            ]
        )

    def _record_corpus_entropies(self, corpus: Corpus) -> None:
        n = corpus.train_tokens
        bigram = corpus.bigram_entropy
        why = None if bigram is not None else "n/a: the vocabulary is too large to count pairs"
        fields: dict[str, Any] = {"probe": "corpus", "unit": "nats/token", "n": n}
        self.recorder.measurements(
            [
                Measurement(metric="unigram_entropy", value=corpus.unigram_entropy, **fields),
                Measurement(metric="bigram_entropy", value=bigram, reason=why, **fields),
            ]
        )

    def _save_weights(self) -> None:
        """Leaves the weights on disk if the config says so."""
        if self.config.checkpoint.keep != "nothing":
            written = checkpoint.save_weights(storage.join(self.storage_address, checkpoint.WEIGHTS), self._model)
            self._add_provenance(**{WEIGHTS_SHA256: written})
            self.weights = storage.join(self.checkpoint_address, checkpoint.WEIGHTS)

    def clean(self) -> None:
        """Removes the checkpoints of every attempt of this cell, once the database knows that they are not needed."""
        if self.job.kind == "train" and self.config.checkpoint.keep != "everything":
            try:
                for place in (self.storage_address, *self._previous_locations):
                    checkpoint.clear(place)
            except storage.StorageError as error:
                # the numbers stand, so this is only told
                self.recorder.event("storage", f"checkpoints were left behind: {error}")


def parameter_count(model: Backbone) -> int:
    """All parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
