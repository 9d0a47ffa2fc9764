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
    """Inputs of one micro-batch."""

    inputs_BT: Tensor
    targets_BT: Tensor
    drawn: RandomDraws
    marked: MarkedTargets | None = None
    """Targets that count in the loss; None: all."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors that differ between micro-batches, in a fixed order."""
        return [self.inputs_BT, self.targets_BT, *self.drawn.tensors(), *(self.marked or ())]

    def copy(self) -> Batch:
        """Return a deep copy."""
        marked = None if self.marked is None else MarkedTargets(*(tensor.clone() for tensor in self.marked))
        return Batch(self.inputs_BT.clone(), self.targets_BT.clone(), self.drawn.copy(), marked)


Objective = Callable[[Batch], tuple[Tensor, Tensor]]
"""Function from a micro-batch to (objective to differentiate, mean cross-entropy)."""


def capture_graphs(parts: Mapping[str, StepPart]) -> Mapping[str, StepPart]:
    """Capture each part as a CUDA graph; return the graphs' replay functions by name. Nothing is computed.

    The graphs share their working memory, so they must be replayed in this order, starting from the first.

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

    With `capture` the first step runs eagerly over static memory; then the parts are captured, and replayed in every
    later step. If a part cannot be captured (it waits for the device, or batch shapes change), `refused` is called once
    with the reason, and steps go on eagerly over the same gradients with the same results.
    """

    def __init__(
        self, objective: Objective, optimizers: Optimizers, config: TrainConfig, capture: Capture | None = None,
        on_capture_refused: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        """Prepare to run steps.

        Args:
            objective: loss of a micro-batch.
            optimizers: optimizers of the model.
            config: training settings.
            capture: function that captures parts, such as `capture_graphs`; None: eager steps.
            on_capture_refused: called once with the reason if capturing fails.
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

    def run_micro_batch(self, batch: Batch) -> None:
        """Run forward and backward of the next micro-batch of the current step.

        The first call after a complete step captures the parts, if capturing is enabled.
        """
        self._load_batch(batch)
        if self._num_complete_steps and not self.replays and not self._is_eager:
            self._capture_parts()
        self._run_part("further" if self._micro else "first")
        self._micro += 1

    def finish_step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Clip gradients and update all parameters with learning rates times `factor`, then clear the gradients.

        Returns:
            (mean cross-entropy of the step, gradient norm before clipping), scalars on the device.
        """
        self._optimizers.set_factor(factor)
        self._run_part("finish")
        self._optimizers.zero_grad()
        assert self._total is not None
        assert self._norm is not None
        self._micro = 0
        self._num_complete_steps += 1
        return self._total.clone(), self._norm.clone()

    def discard_step(self) -> None:
        """Discard the micro-batches of an unfinished step and their gradients."""
        self._micro = 0
        self._optimizers.zero_grad()

    def reset(self) -> None:
        """Drop captured graphs and gradients after weights and optimizer state were replaced (checkpoint restore)."""
        self.discard_step()
        self.replays, self._gradients, self._num_complete_steps = {}, [], 0

    # --- what is captured -----------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, StepPart]:
        further = {"further": self._accumulate} if self._config.accumulation > 1 else {}
        return {"first": self._first_micro_batch, **further, "finish": self._finish}

    def _first_micro_batch(self) -> None:
        """Drop the gradients, reset the cross-entropy, then run forward and backward of the current batch."""
        assert self._total is not None
        for parameter in self._optimizers.parameters:
            parameter.grad = None
        self._total.zero_()
        self._accumulate()

    def _accumulate(self) -> None:
        """Run forward and backward of the current batch; add to the gradients and to the step's mean cross-entropy."""
        assert self._batch is not None
        assert self._total is not None
        objective, cross_entropy = self.objective(self._batch)
        self._optimizers.scaled(objective).backward()
        self._total += cross_entropy.detach() / self._config.accumulation

    def _finish(self) -> None:
        self._norm = self._optimizers.clip(self._config.clip)
        self._optimizers.update()

    # --- around it ------------------------------------------------------------------------------------------------

    def _run_part(self, name: str) -> None:
        """Run the part "first", "further" or "finish": its replay if it is captured, else the part itself."""
        replay = self.replays.get(name)
        if replay is not None:
            replay()
        else:
            self._parts()[name]()

    def _load_batch(self, batch: Batch) -> None:
        """Make a batch the current one; with capturing, copy it into the static memory that the parts read.

        A batch of other shapes ends capturing.
        """
        if self._total is None:
            self._total = torch.zeros((), device=batch.inputs_BT.device)
        if self._is_eager:
            self._batch = batch
            return
        if self._static_batch is None:
            self._batch = self._static_batch = batch.copy()
            return
        targets, sources = self._static_batch.tensors(), batch.tensors()
        if [(tensor.shape, tensor.dtype) for tensor in targets] != [(tensor.shape, tensor.dtype) for tensor in sources]:
            self._fall_back("the shapes of what a micro-batch reads change from step to step")
            self._batch = batch
            return
        # this operation is private to torch, so pyproject.toml bounds torch's version
        torch._foreach_copy_(targets, sources)

    def _capture_parts(self) -> None:
        """Capture the parts; on failure fall back to eager steps. Clears the gradients of this step."""
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
        """Switch to eager steps for good, keep the gradients of the current step, and report the reason."""
        for parameter, gradient in zip(self._optimizers.parameters, self._gradients, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient  # keeps what this step's micro-batches have accumulated
        self.replays, self._gradients, self._static_batch, self._is_eager = {}, [], None, True
        self.refused(reason)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that came first: ending a failed capture raises a second one."""
    while error.__context__ is not None:
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def should_capture(config: TrainConfig, parameters: int, device: torch.device) -> tuple[bool, str]:
    """Return (True if steps are to be captured as CUDA graphs, the reason in words).

    Args:
        config: training settings; `train.graphs` decides unless it is auto.
        parameters: number of parameters of the network.
        device: device of the training.
    """
    if device.type != "cuda":
        return False, "no GPU"
    if config.graphs == "off":
        return False, "train.graphs: off"
    if config.precision == "fp16":
        return False, "loss scaling waits at every step for whether to skip it"
    if config.graphs == "on":
        return True, "train.graphs: on"
    flops = 6.0 * parameters * config.micro_batch * config.seq_len
    is_small = flops <= MAX_CAPTURE_FLOPS
    return (
        is_small,
        f"a micro-batch is {flops:.2g} FLOPs, {'at most' if is_small else 'more than'} {MAX_CAPTURE_FLOPS:.0e}",
    )
