"""Execution of optimizer steps: eagerly, or by replaying captured CUDA graphs.

A step has up to three parts: the first micro-batch, which creates the gradients; each further one, which adds to them;
and clipping with the optimizer updates. Queuing their kernels one by one takes the host a fixed time per step, which
dominates in a small network. A CUDA graph queues a whole part at once. It reads everything that changes from step to
step (tokens, random draws, learning rates) from the same memory each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.backbone import RandomDraws
from ..config import TrainConfig
from ..data.batches import MarkedTargets
from .flops import MAX_CAPTURE_FLOPS
from .optimizers import Optimizers

StepPart = Callable[[], None]
"""Part of a step, called without arguments."""
Capture = Callable[[Mapping[str, StepPart]], Mapping[str, StepPart]]
"""Function from named parts of a step to functions that repeat each of them."""


class Batch(NamedTuple):
    """Inputs of one micro-batch: int64 tokens and targets [B, T], and the random tensors drawn for it."""

    inputs_BT: Tensor
    targets_BT: Tensor
    drawn: RandomDraws
    marked: MarkedTargets | None = None
    """Targets that count in the loss (`loss_on: marked`); None: all."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors that differ between micro-batches, not copies, in a fixed order.

        Inputs, targets, random draws (`RandomDraws.tensors`), then those of `marked` if there are any.
        """
        return [self.inputs_BT, self.targets_BT, *self.drawn.tensors(), *(self.marked or ())]

    def copy(self) -> Batch:
        """Return a copy whose tensors are clones."""
        marked = None if self.marked is None else MarkedTargets(*(tensor.clone() for tensor in self.marked))
        return Batch(self.inputs_BT.clone(), self.targets_BT.clone(), self.drawn.copy(), marked)


Objective = Callable[[Batch], tuple[Tensor, Tensor]]
"""Function from a micro-batch to (objective to differentiate, mean cross-entropy)."""


def capture_graphs(parts: Mapping[str, StepPart]) -> Mapping[str, StepPart]:
    """Capture each part as a CUDA graph; return the graphs' replay functions by name, in the given order.

    Parts are called once each while being captured, but their GPU work is only recorded: no result is computed. The
    graphs share their working memory, so they must be replayed in this order, starting from the first; a middle one may
    be repeated. After a failure nothing is captured, and the previous stream is current again.

    Args:
        parts: name -> function that queues GPU work on tensors that stay in place.

    Raises:
        RuntimeError: a part does something that a graph cannot hold, such as a copy to the host.
    """
    stream = torch.cuda.current_stream()
    replays: dict[str, StepPart] = {}
    pool = torch.cuda.graph_pool_handle()
    try:
        for name, part in parts.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                part()
            replays[name] = graph.replay
    except BaseException:
        # a failed capture leaves its stream current and, up to torch 2.11, the allocator in capture mode;
        # only a private function of torch ends that mode, so pyproject.toml bounds torch's version
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        raise
    return replays


def without_capture(parts: Mapping[str, StepPart]) -> Mapping[str, StepPart]:
    """Return the parts themselves: the same work over the same memory, for devices without graphs."""
    return parts


class OptimizerSteps:
    """Runs optimizer steps, eagerly or (with `capture`) by replaying captured parts.

    A step is `config.accumulation` calls of `run_micro_batch`, divided over the ranks, and then one of `finish_step`. With `capture` the first
    step runs eagerly over static memory; then the parts are captured, and replayed in every later step. If a part
    cannot be captured (it waits for the device, or batch shapes change), `refused` is called once with the reason.
    Steps then go on eagerly over the same gradients with the same results.
    """

    def __init__(
        self, objective: Objective, optimizers: Optimizers, config: TrainConfig, capture: Capture | None = None,
        on_capture_refused: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        """Prepare to run steps; nothing is computed.

        Args:
            objective: function from a micro-batch to (objective to differentiate, mean cross-entropy).
            optimizers: optimizers of the model.
            config: training settings; `accumulation` (micro-batches per step) and `clip` are read.
            capture: function that captures parts, such as `capture_graphs`; None: eager steps.
            on_capture_refused: called once with the reason in words if capturing fails.
        """
        self.objective, self._optimizers, self._config = objective, optimizers, config
        self.capture, self.refused = capture, on_capture_refused
        self._static_batch: Batch | None = None
        self._batch: Batch | None = None
        self._total: Tensor | None = None
        self._norm: Tensor | None = None
        self._gradients: list[Tensor | None] = []
        """Gradients that the captured parts read and write; they must live as long as these."""
        self.replays: Mapping[str, StepPart] = {}
        self._num_complete_steps = 0
        self._is_eager = capture is None
        self._micro = 0
        ranks = optimizers.ranks
        self._share = len(range(ranks.rank, config.accumulation, ranks.size))
        """Micro-batches of a step that this rank runs."""

    def run_micro_batch(self, batch: Batch) -> None:
        """Run forward and backward of the next micro-batch of the current step; gradients add up over a step.

        The batch is copied first if capturing is enabled. The first call after a complete step captures the parts. If
        capturing fails, this micro-batch runs eagerly.
        """
        self._load_batch(batch)
        if self._num_complete_steps and not self.replays and not self._is_eager:
            self._capture_parts()
        self._run_part("further" if self._micro else "first")
        self._micro += 1

    def finish_step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Clip gradients and update all parameters with learning rates times `factor`, then clear the gradients.

        With loss scaling an overflow skips the update, and the norm is then 0. Call it after the step's micro-batches.

        Args:
            factor: factor on every group's learning rate, from 0 to 1.

        Returns:
            (mean cross-entropy over the step's micro-batches, global gradient norm before clipping), new scalars on the
            device.
        """
        self._optimizers.set_factor(factor)
        self._run_part("finish")
        self._optimizers.zero_grad()
        assert self._total is not None
        assert self._norm is not None
        self._micro = 0
        self._num_complete_steps += 1
        return self._optimizers.ranks.sum_(self._total.clone()), self._norm.clone()

    def discard_step(self) -> None:
        """Discard the micro-batches of an unfinished step and their gradients; weights and captured parts stay."""
        self._micro = 0
        self._optimizers.discard()

    def reset(self) -> None:
        """Drop captured graphs and gradients after weights and optimizer state were replaced (checkpoint restore).

        The next step runs eagerly again, and the one after it captures anew, unless capturing has failed before.
        """
        self.discard_step()
        self.replays, self._gradients, self._num_complete_steps = {}, [], 0

    # --- what is captured -----------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, StepPart]:
        further = {"further": self._accumulate} if self._config.accumulation > 1 else {}
        return {"first": self._first_micro_batch, **further, "finish": self._finish}

    def _first_micro_batch(self) -> None:
        """Drop the gradients, zero the step's cross-entropy, then run forward and backward of the current batch."""
        assert self._total is not None
        for parameter in self._optimizers.parameters:
            parameter.grad = None
        self._total.zero_()
        self._accumulate()

    def _accumulate(self) -> None:
        """Run forward and backward of the current batch; add to the gradients and to the step's cross-entropy.

        Each micro-batch adds its mean cross-entropy divided by `config.accumulation`. During this rank's last one
        gradients start to be added over ranks.
        """
        assert self._batch is not None
        assert self._total is not None
        if self._micro == self._share - 1:
            self._optimizers.expect_gradients()
        objective, cross_entropy = self.objective(self._batch)
        self._optimizers.scaled(objective).backward()
        self._total += cross_entropy.detach() / self._config.accumulation

    def _finish(self) -> None:
        self._norm = self._optimizers.clip(self._config.clip)
        self._optimizers.update()

    # --- around it ------------------------------------------------------------------------------------------------

    def _run_part(self, name: str) -> None:
        """Run a part of the step: its replay if it is captured, else the part itself, eagerly.

        Parts: "first" (first micro-batch), "further" (each later one) and "finish" (clipping and update).
        """
        replay = self.replays.get(name)
        if replay is not None:
            replay()
        else:
            self._parts()[name]()

    def _load_batch(self, batch: Batch) -> None:
        """Make a batch the current one; with capturing, copy it into the static memory that the parts read.

        The first batch is copied into new tensors, which are that memory. A batch of other shapes or types ends
        capturing for good (`refused` is called).
        """
        if self._total is None:
            double = self._optimizers.parameters[0].dtype == torch.float64
            dtype = torch.float64 if double else torch.float32
            self._total = torch.zeros((), dtype=dtype, device=batch.inputs_BT.device)
        if self._is_eager:
            self._batch = batch
            return
        if self._static_batch is None:
            self._batch = self._static_batch = batch.copy()
            return
        targets, sources = self._static_batch.tensors(), batch.tensors()
        if [(tensor.shape, tensor.dtype) for tensor in targets] != [(tensor.shape, tensor.dtype) for tensor in sources]:
            self._fall_back("the shapes of micro-batches change from step to step")
            self._batch = batch
            return
        # this operation is private to torch, so pyproject.toml bounds torch's version
        torch._foreach_copy_(targets, sources)

    def _capture_parts(self) -> None:
        """Capture the parts; on failure fall back to eager steps for good. Clears all gradients.

        Only called before a step's first micro-batch has run, so no gradient is lost. Only a RuntimeError counts as
        failure; others pass through.
        """
        parameters = self._optimizers.parameters
        gradients: list[Tensor | None] = []

        def finish() -> None:
            gradients[:] = [parameter.grad for parameter in parameters]
            self._finish()

        assert self.capture is not None
        try:
            replays = self.capture({**self._parts(), "finish": finish})
        except RuntimeError as error:
            self._fall_back(_reason(error))
        else:
            self.replays, self._gradients = replays, gradients
        # capturing computes nothing, so this step has no gradients yet
        self._optimizers.zero_grad()

    def _fall_back(self, reason: str) -> None:
        """Switch to eager steps for good, keep the gradients of the current step, and report the reason.

        Calls `refused` with it.
        """
        for parameter, gradient in zip(self._optimizers.parameters, self._gradients, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient  # keeps what this step's micro-batches have accumulated
        self.replays, self._gradients, self._static_batch, self._is_eager = {}, [], None, True
        self.refused(reason)


def _reason(error: BaseException) -> str:
    """Return the first non-empty line of the error that came first, or its class name if it has no text.

    Follows the chain of contexts: ending a failed capture raises a second error.
    """
    while error.__context__ is not None:
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def should_capture(config: TrainConfig, parameters: int, device: torch.device, n_ranks: int = 1) -> tuple[bool, str]:
    """Return (True if steps are to be captured as CUDA graphs, the reason in words).

    Never without CUDA, on several ranks, with `graphs: off` or with fp16 precision (even with `graphs: on`). With `graphs: on` otherwise
    always. With auto, if 6 FLOPs per parameter and token of a micro-batch add up to at most 1e13 (MAX_CAPTURE_FLOPS).

    Args:
        config: training settings; `graphs`, `precision`, `micro_batch` and `seq_len` are read.
        parameters: number of parameters of the network, vocabulary matrices included.
        device: device of the training.
        n_ranks: processes that train together.
    """
    if n_ranks > 1:
        return False, f"{n_ranks} ranks add gradients during the backward pass"
    if device.type != "cuda":
        return False, "no GPU"
    if config.graphs == "off":
        return False, "train.graphs: off"
    if config.precision == "fp16":
        return False, "fp16 loss scaling synchronises with the host at every step"
    if config.graphs == "on":
        return True, "train.graphs: on"
    flops = 6.0 * parameters * config.micro_batch * config.seq_len
    is_small = flops <= MAX_CAPTURE_FLOPS
    return (
        is_small,
        f"a micro-batch takes {flops:.2g} FLOPs, {'at most' if is_small else 'more than'} the capture limit of {MAX_CAPTURE_FLOPS:.0e}",
    )
