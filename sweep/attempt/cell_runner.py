"""Attempt on a cell: a network is trained or loaded, then probed, and every number is recorded as it comes."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...kernels.dispatch import use_torch_backend
from ...model.backbone import Backbone
from ...results.store.recorder import AttemptWriter
from ...results.store.records import CurvePoint, Measurement
from ...results.weights import INITIAL_WEIGHTS, NO_HASH, WEIGHTS_SHA256
from ..checkpoints import checkpoint, initial, storage
from ..data.batches import marked_capacity, training_batches
from ..data.corpora import Corpus, open_corpus, read_manifest
from ..errors import SweepError
from ..probes.perplexity import stream_loss
from ..probes.subject import CellSubject, evaluating
from ..ranks.group import SINGLE, Ranks
from ..training import flops, optimizer_steps
from ..training.loop import Trainer, TrainingPoint, UnvalidatedPoint, ValidationPoint
from ..training.sharded import build_optimizers
from . import provenance
from .base_runner import AttemptRunner
from .compile_lock import CompileLock
from .device import (
    build_network,
    choose_device,
    compile_lock_for,
    enable_determinism,
    use_shared_compile_cache,
    use_shared_self_tests,
)
from .generation import SamplingError, write_samples
from .job import Job
from .process import StopFlag, is_logged


class CellRunner(AttemptRunner):
    """Runner of an attempt that trains or evaluates one of our networks; implements the training loop's hooks.

    The job's kind "train" trains, probes and stores weights; any other kind loads stored weights and probes them.
    """

    def __init__(self, job: Job, runs: Path, recorder: AttemptWriter, stop: StopFlag, ranks: Ranks = SINGLE) -> None:
        """Load plugins and config, and resolve the locations of checkpoints and weights; nothing is read there yet.

        Arguments as for `AttemptRunner`: the job, the folder of the runs, the writer of results, the stop flag and the
        group of ranks.
        """
        super().__init__(job, runs, recorder, stop, ranks)
        self.checkpoint_address = storage.attempt_address(self.config.checkpoint.path, job.folder)
        """Address of checkpoints and weights, as the database stores it."""
        self.storage_address = storage.resolve(runs, self.checkpoint_address)
        self._previous_locations = [storage.resolve(runs, folder) for _, folder in job.resume]
        """Locations of earlier attempts that may hold checkpoints, newest first."""
        self._resumed_from = ("", "")
        """Location and name of the checkpoint that this attempt resumed from; empty texts if none."""
        self._graphs = False
        self.compile_lock: CompileLock | None = None
        """Lock held from before compilation until the first step is done; None otherwise."""
        self._last_save = time.monotonic()
        self._samples_failed = False

    def run(self, began: float) -> None:
        """Train or load the network, run the missing probes and store the weights of a training.

        Kind "train": from the newest checkpoint of earlier attempts, if there is one, else from the config's initial
        weights; then throughput and corpus
        entropies are recorded, and weights stored after the probes. Other kinds load the job's weights. Sets
        process-wide options of torch (threads, determinism, kernels, compile cache). May wait for another attempt that
        compiles the same network. Provenance is recorded before anything else, results as they come; its `extra` has
        parameters (their number), start_seconds, waited_seconds, chunk_tokens, with several ranks their number, and, in
        training, steps (how they are queued). `began` is the job's start in monotonic seconds.

        Raises:
            Stopped: a stop was requested; a training's state has been saved.
            Diverged: the training diverged.
            LeaseLost: another process owns the attempt.
            SweepError: device, corpus, weights or their storage cannot be used, or there are more ranks than
                micro-batches.
        """
        config, ranks = self.config, self.ranks
        problem = config.train.ranks_problem("resources.gpus", ranks.size) if self.job.kind == "train" else None
        if problem is not None:
            raise SweepError(problem)
        torch.set_num_threads(max(1, config.resources.cpus // ranks.size))
        if config.train.deterministic:
            enable_determinism()
        use_torch_backend(config.train.kernels == "torch")
        if self.job.kind == "train" and ranks.is_first:
            self._prepare_checkpoint_location()
        device = choose_device(config.resources.gpus) if ranks.size == 1 else ranks.device
        if device.type == "cuda":
            use_shared_compile_cache(device, *(plugin.sha256 for plugin in config.plugins))
            use_shared_self_tests(device)
        corpus = open_corpus(self.runs / "corpora", config.data.fingerprint or "")
        model = build_network(config, device, training=self.job.kind == "train")
        subject = CellSubject(model, corpus.load_tokenizer(), corpus, config, device, self.check_stop, ranks)
        waited = 0.0
        if self.job.kind == "train" and config.train.compile and device.type == "cuda":
            if ranks.is_first:
                self.compile_lock = compile_lock_for(config)
                waited = self.compile_lock.acquire(self.check_stop)
            if waited >= 1:
                self.log(f"waited {waited:.0f} s for another attempt to compile the same network")
            model.compile_blocks(regional=config.train.compile == "blocks")
        kernels = model.kernel_paths()
        extra: dict[str, object] = {
            "parameters": parameter_count(model),
            "start_seconds": round(time.monotonic() - began - waited, 3),
            "waited_seconds": round(waited, 3),
            "chunk_tokens": config.eval.chunk_tokens,
            "corpus_request": read_manifest(corpus.folder)["request"] if corpus.folder is not None else None,
            **({"ranks": ranks.size} if ranks.size > 1 else {}),
            **self._load_initial_weights(model),
        }
        if self.job.kind == "train":
            self._graphs, why = optimizer_steps.should_capture(config.train, parameter_count(model), device, ranks.size)
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
            self.log(f"weights from {self.job.weights} ({self.job.weights_sha256 or NO_HASH})")
        self.check_stop()
        with evaluating(subject.model):
            self.run_probes(subject)
        if self.job.kind == "train":
            self._save_weights()
        self.recorder.neighbours()

    def _load_initial_weights(self, model: Backbone) -> dict[str, object]:
        """Load the weights that a training begins from into the network, and log which tensors were new.

        Returns:
            The facts for the provenance, under INITIAL_WEIGHTS; empty if the config names none, or nothing is trained.

        Raises:
            CheckpointError: their copy in the runs folder is missing or damaged, or does not fit the network.
        """
        train = self.config.train
        if train.init_from is None or self.job.kind != "train":
            return {}
        report = initial.load_initial(
            self.runs, model, source=train.init_from, sha256=train.init_sha256 or "",
            allow_missing=train.init_missing == "init",
        )  # fmt: skip
        self.log(report.text())
        return {INITIAL_WEIGHTS: report.as_json()}

    def _log_header(self, subject: CellSubject, kernels: Mapping[str, str]) -> None:
        """Log the first line: cell, attempt, device, precision, parameter count and implementations of ops.

        Args:
            subject: network and device.
            kernels: op -> implementation; ops of the same implementation are listed together.
        """
        cuda = subject.device.type == "cuda"
        where = torch.cuda.get_device_name(subject.device) if cuda else f"CPU ({torch.get_num_threads()} threads)"
        parts_by_implementation: dict[str, list[str]] = {}
        for part, implementation in kernels.items():
            parts_by_implementation.setdefault(implementation, []).append(part)
        implementations = "; ".join(f"{', '.join(parts)}: {way}" for way, parts in parts_by_implementation.items())
        self.log(
            f"cell {self.job.slug} ({self.job.cell}), attempt {Path(self.job.folder).name} ({self.job.kind}) on {where}, "
            f"{subject.model.precision}, {parameter_count(subject.model):,} parameters; {implementations}"
        )

    # --- training -------------------------------------------------------------------------------------------------

    def _train(self, subject: CellSubject) -> None:
        """Train the network from the newest checkpoint or from its first step, and save its final state.

        Reports to this runner's hooks; the final state is a checkpoint. A checkpoint of the last step means that
        nothing is trained.

        Raises:
            Stopped: a stop was requested; the state has been saved.
            Diverged: the training diverged.
        """
        config, model = self.config, subject.model
        self._subject = subject
        trainer = Trainer(
            model=model,
            optimizers=build_optimizers(model, config.train, subject.device, self.ranks),
            batches=training_batches(config, subject.corpus),
            config=config.train,
            seed=config.seed,
            device=subject.device,
            validate=lambda: self._validate(subject, trainer.step),
            validate_every=config.eval.validate_every,
            hooks=self,
            graphs=self._graphs,
            on_capture_refused=self._on_capture_refused,
            marked_capacity=self._marked_capacity(subject),
        )
        self._model, self._optimizers = model, trainer.optimizers
        self._resume(trainer)
        self.log(
            f"{config.train.steps:,} steps of {config.train.batch_tokens:,} tokens, "
            + ("loss on marked targets, " if config.train.loss_on == "marked" else "")
            + (f"resumed at step {trainer.step:,}" if trainer.step else "from the first step")
        )
        self.recorder.progress(trainer.step, config.train.steps, phase="training")
        if config.train.compile and subject.device.type == "cuda":
            trainer.compile_first()
        trainer.run()
        if self.compile_lock is not None:  # the checkpoint was complete, so no first step released it
            self.compile_lock.release()
        # Save the final state, so that an attempt that dies while probing need not be trained again.
        self.save(trainer.step, trainer.step * config.train.batch_tokens, trainer.wall_s)

    def _marked_capacity(self, subject: CellSubject) -> int | None:
        """Return the number that a micro-batch's marked targets are padded to, from their share in the corpus.

        None, no padding, on the CPU and with `loss_on: all`, because only CUDA graphs need fixed shapes.
        """
        train = self.config.train
        if train.loss_on == "all" or subject.device.type != "cuda":
            return None
        return marked_capacity(self._loss_share, train.micro_batch * train.seq_len)

    def _on_capture_refused(self, why: str) -> None:
        """Log and record in the provenance that steps cannot be captured as CUDA graphs, with the reason."""
        self.log(f"CUDA graphs cannot be used; steps run eagerly with identical results: {why}")
        self._add_provenance(steps=f"as they come: {why}")
        self.recorder.neighbours()

    def _add_provenance(self, **extra: object) -> None:
        """Record the provenance again with further facts, which are added to its `extra` or replace some of it."""
        self._provenance = dataclasses.replace(self._provenance, extra={**self._provenance.extra, **extra})
        self.recorder.provenance(self._provenance)

    def _validate(self, subject: CellSubject, step: int) -> float:
        """Return the validation loss with the trained window, nats per token; if it is finite, write samples too.

        The model is in evaluation mode meanwhile.

        Args:
            subject: network, corpus and tokenizer.
            step: optimizer steps done; samples are recorded for it.

        Raises:
            Stopped: a stop was requested.
        """
        with evaluating(subject.model):
            loss = stream_loss(subject, full_context=False)[0]
            if math.isfinite(loss) and self.config.eval.samples.prompts:
                self.ranks.first(lambda: self._write_samples(subject, step))
            return loss

    def _write_samples(self, subject: CellSubject, step: int) -> None:
        """Generate and record the texts that the config asks for (`eval.samples`) at this step; called on rank 0.

        If a sample cannot be generated, this is logged and recorded as an event once and
        no more are tried; training goes on.
        """
        settings = self.config.eval.samples
        if self._samples_failed:
            return
        try:
            samples = [
                sample.as_example() for sample in write_samples(subject, settings, seed=self.config.seed, step=step)
            ]
        except SamplingError as error:
            self._samples_failed = True
            self.log(f"no samples (eval.samples): {error}")
            self.recorder.event("samples", f"not written: {error}")
        else:
            self.recorder.examples(samples)

    def _prepare_checkpoint_location(self) -> None:
        """Check or clean this attempt's checkpoint location before training.

        A location that the config names (`checkpoint.path`) must be writable and hold no other training, otherwise a
        SweepError is raised. In the runs folder, checkpoints that lie there already are deleted.
        """
        if self.config.checkpoint.path is not None:
            checkpoint.check_unclaimed(self.storage_address)
        else:
            # The runs folder belongs to this database, so files there are remains of a deleted one.
            checkpoint.remove_checkpoints(self.storage_address)

    def _resume(self, trainer: Trainer) -> None:
        """Restore the newest usable checkpoint of the cell's earlier attempts, if any, and inherit their curve.

        Attempts are tried from the newest on; damaged checkpoints are skipped. The curve up to the checkpoint's step is
        copied to this attempt, and an event "resumed" recorded.
        """
        for (attempt, _), location in zip(self.job.resume, self._previous_locations, strict=True):
            state = checkpoint.load_newest(location, self.log) if self.ranks.is_first else None
            facts = self.ranks.agree(None if state is None else dataclasses.replace(state, model={}, optimizers={}))
            if facts is None:
                continue
            # the other ranks receive weights and optimizers from rank 0
            trainer.restore(facts if state is None else state)
            self._resumed_from = location, facts.name
            self.recorder.inherit_curve(attempt, facts.step)
            self.recorder.event("resumed", f"from step {facts.step} of attempt {attempt}")
            return

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Record step, loss and speed in the database; the first call releases the compile lock.

        It also marks the network as compiled for other processes. `loss` is nats per token of the last step's batch.
        """
        if self.compile_lock is not None:
            self.compile_lock.mark_compiled()
            self.compile_lock = None
        self.recorder.progress(step, self.config.train.steps, loss, tokens_per_s, "training")

    def point(self, point: ValidationPoint) -> None:
        """Log a validation point (not every one in long trainings) and record it with both MFU figures.

        They are `mfu_paper` (the paper's formula) and `mfu` (actual FLOPs), fractions, or None where unknown.
        """
        steps = self.config.train.steps
        if is_logged(point.step, self.config.eval.validate_every, steps):
            self.log(
                f"step {point.step:,} of {steps:,}: train loss {point.train_loss:.4f}, val loss {point.val_loss:.4f}, "
                f"{point.tokens_per_s:,.0f} tokens/s{self._loss_scale_text()}"
            )
        paper, honest = self._mfu(point.tokens_per_s)
        self.recorder.curve([CurvePoint(**vars(point), mfu_paper=paper, mfu=honest)])

    def training_points(self, points: Sequence[TrainingPoint]) -> None:
        """Record points of the curve between validations, in one write."""
        self.recorder.curve([CurvePoint(**vars(point)) for point in points])

    def _loss_scale_text(self) -> str:
        """Return ", loss scale ..., ... steps skipped" for the log; an empty text without loss scaling."""
        scaling = self._optimizers.scaling
        return "" if scaling is None else f", loss scale {scaling.scale:g}, {scaling.skipped:,} steps skipped"

    def should_stop(self) -> bool:
        """Return True if a stop was requested (SIGTERM)."""
        return self.stop.set

    def should_save(self, step: int) -> bool:
        """Return True if a checkpoint is due: `every_minutes` since the last save, or at multiples of `every_steps`."""
        every = self.config.checkpoint.every_steps
        return time.monotonic() - self._last_save >= 60 * self.config.checkpoint.every_minutes or (
            every is not None and step % every == 0
        )

    def save(self, step: int, tokens: int, wall_s: float, pending: UnvalidatedPoint | None = None) -> None:
        """Write a checkpoint, record its address, and delete superseded ones of earlier attempts.

        Waits first until everything recorded so far is durable in the database. Every rank calls it; rank 0 collects
        the optimizers' state and writes.

        Args:
            step: optimizer steps done.
            tokens: tokens trained on.
            wall_s: training seconds, validation and checkpoints excluded.
            pending: point at this step whose validation has not been done yet; None if there is none.
        """
        state = self._optimizers.state_dict()
        if not self.ranks.is_first:
            return
        self.recorder.settle()
        name = checkpoint.save(
            self.storage_address, self._model, state, step=step, tokens=tokens, wall_s=wall_s, pending=pending
        )
        self.recorder.checkpoint(storage.join(self.checkpoint_address, name))
        if self._previous_locations:
            self._prune_checkpoints()
        self._last_save = time.monotonic()

    def _prune_checkpoints(self) -> None:
        """Delete checkpoints of earlier attempts, so that at most two (KEEP_NEWEST) remain over all attempts of the cell.

        While this attempt has fewer, the checkpoint that it resumed from stays; later none of the earlier attempts'
        does.
        """
        has_enough = len(checkpoint.list_checkpoints(self.storage_address)) >= checkpoint.KEEP_NEWEST
        for location in self._previous_locations:
            checkpoint.remove_checkpoints(
                location, keep=None if has_enough or location != self._resumed_from[0] else self._resumed_from[1]
            )
        if has_enough:
            self._previous_locations = []

    # --- measuring ------------------------------------------------------------------------------------------------

    def _peak_flops(self) -> float | None:
        """Return the peak bf16 FLOP/s of all GPUs of the attempt.

        None on the CPU, with float32 activations, and for an unknown GPU.
        """
        device = self._subject.device
        # the table holds bfloat16 peaks; float16 has the same, and fp8 projections are measured against them
        if device.type != "cuda" or self._model.dtype == torch.float32:
            return None
        peak = flops.peak_flops(torch.cuda.get_device_name(device))
        return None if peak is None else peak * self.ranks.size

    def _mfu(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Return (MFU by the paper's formula, MFU by actual FLOPs), fractions of the device's bf16 peak.

        Each is None where peak or FLOPs are unknown. `tokens_per_s` is the training speed.
        """
        model, seq_len = self._model.config, self.config.train.seq_len
        peak = self._peak_flops()
        paper = flops.paper_flops(model, parameter_count(self._model), seq_len)
        honest = flops.training_flops(model, seq_len, counted=self._loss_share)
        return flops.mfu(paper, tokens_per_s, peak), flops.mfu(honest, tokens_per_s, peak)

    @functools.cached_property
    def _loss_share(self) -> float:
        """Fraction of the training targets that the loss covers; 1 unless `loss_on: marked`."""
        return self._subject.corpus.marked_share if self.config.train.loss_on == "marked" else 1.0

    def _record_throughput(self, subject: CellSubject) -> None:
        """Record speed, training time, MFU and parameters, from the last validation interval without its validation.

        This is the paper's definition of speed. Measurements of probe "throughput": tokens_per_s, train_seconds (over
        all attempts), mfu_paper, mfu, parameters and, with fp16, skipped_steps. Unknown MFU figures are recorded
        without a value, with the reason. Does nothing if the curve is empty.
        """
        last = self.recorder.last_point()
        if last is None or last.tokens_per_s is None:
            return
        paper, honest = self._mfu(last.tokens_per_s)
        chip = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else "the CPU"
        no_peak = f"n/a: MFU needs the device's peak FLOP/s, unknown for {chip}" if self._peak_flops() is None else None
        unknown_flops, scaling = flops.unknown_reason(self._model.config), self._optimizers.scaling

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
        """Record the corpus's unigram and bigram entropies in nats per token, as reference values (probe "corpus").

        n is the number of training tokens. A bigram entropy that was not computed is recorded without a value, with the
        reason.
        """
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
        """Write the weights and record their SHA-256, unless the config says `checkpoint.keep: nothing`.

        Sets `weights` to their address.
        """
        if self.config.checkpoint.keep != "nothing" and self.ranks.is_first:
            written = checkpoint.save_weights(storage.join(self.storage_address, checkpoint.WEIGHTS), self._model)
            self._add_provenance(**{WEIGHTS_SHA256: written})
            self.weights = storage.join(self.checkpoint_address, checkpoint.WEIGHTS)

    def clean(self) -> None:
        """Delete the checkpoints of every attempt of this cell, unless the config says `checkpoint.keep: everything`.

        Weights stay. Does nothing in a job that is not a training. Call it once the database knows that the checkpoints
        are not needed. A storage error ends the deletion and is only recorded as an event.
        """
        if self.job.kind == "train" and self.config.checkpoint.keep != "everything" and self.ranks.is_first:
            try:
                for location in (self.storage_address, *self._previous_locations):
                    checkpoint.remove_checkpoints(location)
            except storage.StorageError as error:
                # the results are recorded, so this is no failure
                self.recorder.event("storage", f"old checkpoints could not be removed: {error}")


def parameter_count(model: Backbone) -> int:
    """Return the number of parameters of a built network, vocabulary matrices included; a tied head's matrix once."""
    return sum(parameter.numel() for parameter in model.parameters())
