"""How the work of an optimizer step reaches the device: as it comes, or captured once as CUDA graphs and replayed.

A step is a few pieces of work: the first micro-batch, which makes the gradients, each further one, which adds to them, and
clipping with both optimizers. Queued kernel by kernel they take the host a fixed time a step, which is most of the step of a
small network. A graph queues a whole piece at once, and finds everything that changes from step to step, tokens, draws and
learning rates, in the same memory each time.
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
from .flops import SMALL
from .optimizers import Optimizers

StepPart = Callable[[], None]
Capture = Callable[[Mapping[str, StepPart]], Mapping[str, StepPart]]
"""Makes of pieces of work what does each of them again."""


class Batch(NamedTuple):
    """What one micro-batch reads."""

    inputs_BT: Tensor
    targets_BT: Tensor
    drawn: RandomDraws
    marked: MarkedTargets | None = None

    def tensors(self) -> list[Tensor]:
        """All that changes from one to the next."""
        return [self.inputs_BT, self.targets_BT, *self.drawn.tensors(), *(self.marked or ())]

    def copy(self) -> Batch:
        """The same in memory of its own."""
        marked = None if self.marked is None else MarkedTargets(*(tensor.clone() for tensor in self.marked))
        return Batch(self.inputs_BT.clone(), self.targets_BT.clone(), self.drawn.copy(), marked)


Objective = Callable[[Batch], tuple[Tensor, Tensor]]
"""Objective and mean cross-entropy of a micro-batch."""


def capture_graphs(parts: Mapping[str, StepPart]) -> Mapping[str, StepPart]:
    """Each piece as a CUDA graph; they share their working memory, so they are replayed in this order or from the first on.

    Nothing is computed. Raises RuntimeError when a piece does what a graph cannot hold, such as a copy to the host.
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
        # a capture that cannot be ended leaves its own stream in place, and up to torch 2.11 the allocator in the belief that it goes on;
        # only a private function of torch ends that, whose version pyproject.toml bounds
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        raise
    return replays


def without_capture(parts: Mapping[str, StepPart]) -> Mapping[str, StepPart]:
    """Each piece itself: the same work over the same memory, where there are no graphs."""
    return parts


class OptimizerSteps:
    """The work of optimizer steps. Without `capture` each operation is queued when it is reached.

    With it the first step goes over memory that stays; then its pieces are captured, and replayed for every further step.
    What cannot be captured is told once and goes on as it comes, over the same gradients and to the same numbers: a piece that
    waits for the device, a batch whose shapes change.
    """

    def __init__(
        self, objective: Objective, optimizers: Optimizers, config: TrainConfig, capture: Capture | None = None,
        on_capture_refused: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        self.objective, self._optimizers, self._config = objective, optimizers, config
        self.capture, self.refused = capture, on_capture_refused
        self._static_batch: Batch | None = None
        self._batch: Batch | None = None
        self._total: Tensor | None = None
        self._norm: Tensor | None = None
        self._gradients: list[Tensor | None] = []
        """Those that the captured pieces read and write; they live as long as the pieces."""
        self.replays: Mapping[str, StepPart] = {}
        self._num_complete_steps = 0
        self._is_eager = capture is None
        self._micro = 0

    def run_micro_batch(self, batch: Batch) -> None:
        """Run forward and backward of the next micro-batch of a step."""
        self._load_batch(batch)
        if self._num_complete_steps and not self.replays and not self._is_eager:
            self._capture_parts()
        self._run_part("further" if self._micro else "first")
        self._micro += 1

    def finish_step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Clip and update, learning rates times `factor`; return mean cross-entropy and gradient norm, on the device."""
        self._optimizers.set_factor(factor)
        self._run_part("finish")
        self._optimizers.zero_grad()
        assert self._total is not None
        assert self._norm is not None
        self._micro = 0
        self._num_complete_steps += 1
        return self._total.clone(), self._norm.clone()

    def discard_step(self) -> None:
        """Forget the micro-batches of a step that is not finished."""
        self._micro = 0
        self._optimizers.zero_grad()

    def reset(self) -> None:
        """Forget whatever was captured: weights and optimizers have been put in place anew."""
        self.discard_step()
        self.replays, self._gradients, self._num_complete_steps = {}, [], 0

    # --- what is captured -----------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, StepPart]:
        further = {"further": self._accumulate} if self._config.accumulation > 1 else {}
        return {"first": self._first_micro_batch, **further, "finish": self._finish}

    def _first_micro_batch(self) -> None:
        assert self._total is not None
        for parameter in self._optimizers.parameters:
            parameter.grad = None
        self._total.zero_()
        self._accumulate()

    def _accumulate(self) -> None:
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
        replay = self.replays.get(name)
        if replay is not None:
            replay()
        else:
            self._parts()[name]()

    def _load_batch(self, batch: Batch) -> None:
        """Puts a batch into the memory that the pieces read."""
        if self._total is None:
            self._total = torch.zeros((), device=batch.inputs_BT.device)
        if self._is_eager:
            self._batch = batch
            return
        if self._static_batch is None:
            self._batch = self._static_batch = batch.copy()
            return
        targets, sources = self._static_batch.tensors(), batch.tensors()
        if [(one.shape, one.dtype) for one in targets] != [(one.shape, one.dtype) for one in sources]:
            self._fall_back("the shapes of what a micro-batch reads change from step to step")
            self._batch = batch
            return
        # torch names this operation with an underscore; pyproject.toml bounds its version
        torch._foreach_copy_(targets, sources)

    def _capture_parts(self) -> None:
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
        # of this step nothing is done yet
        self._optimizers.zero_grad()

    def _fall_back(self, reason: str) -> None:
        for parameter, gradient in zip(self._optimizers.parameters, self._gradients, strict=False):
            if parameter.grad is None:
                parameter.grad = gradient  # of the micro-batches of this step so far
        self.replays, self._gradients, self._static_batch, self._is_eager = {}, [], None, True
        self.refused(reason)


def _reason(error: BaseException) -> str:
    """The first line of what was refused first: ending a capture that failed raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def should_capture(config: TrainConfig, parameters: int, device: torch.device) -> tuple[bool, str]:
    """Whether steps are to be captured, and why or why not, in words. `parameters`: of the whole network."""
    if device.type != "cuda":
        return False, "no GPU"
    if config.graphs == "off":
        return False, "train.graphs: off"
    if config.precision == "fp16":
        return False, "loss scaling waits at every step for whether to skip it"
    if config.graphs == "on":
        return True, "train.graphs: on"
    flops = 6.0 * parameters * config.micro_batch * config.seq_len
    is_small = flops <= SMALL
    return is_small, f"a micro-batch is {flops:.2g} FLOPs, {'at most' if is_small else 'more than'} {SMALL:.0e}"
