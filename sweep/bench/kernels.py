"""Single kernels compared with alternatives: milliseconds, FLOP/s and bytes/s, as the model calls them.

Calls are compiled, with the surroundings that a kernel has in its op. They are replayed as a CUDA graph, so that the
host is far ahead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.contextual import op as contextual
from ...kernels.attention.polar import op as polar
from ...kernels.attention.polysketch import op as polysketch
from ...kernels.attention.relative import op as relative
from ...kernels.attention.softmax import op as softmax
from ...kernels.attention.threshold import op as threshold
from ...kernels.conv import op as conv
from ...kernels.cross_entropy import op as cross_entropy
from ...kernels.dispatch import BackendChoice, why_no_fla
from ...kernels.features import sketch_draws
from ...kernels.fp8 import op as fp8_linear
from ...kernels.gated_delta import op as gated_delta
from ...kernels.key_gated_step.op import KeyGates
from ...kernels.norms import rms_norm
from ...kernels.paged.page_tables import PAGE
from ...kernels.row_linear.op import row_linear
from ...results.console.text import choices_hint
from ..errors import SweepError
from . import kernel_variants, single_token
from .ceilings import Ceilings, Timing, as_cuda_graph, ceilings, time_interleaved
from .report import tell as report_line
from .subprocess_usage import child_arguments, rows_of_child

H, J, D = 8, 2, 128
"""Query heads, KV heads and head size of the 370M network."""
WIDTH, VOCABULARY = 1024, 50304
TOKENS = 16 * 2048
POSITIONS, REACH = 64, 512
"""Positions of contextual attention and reach of relative attention, as their mixers have them."""
DEGREE, SKETCH, BLOCK = 4, 32, 256
"""Degree, columns of a half sketch and tokens of a block of PolySketch attention, as its mixer has them."""
OPS = (
    "polar", "softmax", "forgetting", "wall_head", "wall_kv", "threshold", "contextual", "relative", "polysketch", "gated_delta", *kernel_variants.MEMORY_OPS, "gated_conv",
    "canon", "cross_entropy", "polar_distractor", "fp8_linear", "decode", "wall_decode",
    "row_linear",
)  # fmt: skip
NAIVE = "torch"
"""Variant by torch's own operations, one by one."""
EAGER = "eager"
"""Polar attention over the complete T x T matrix, with which the paper compares its kernel."""
FOREIGN = ("forgetting", "wall_head", "wall_kv", "wall_decode")
"""Ops compared with flash-linear-attention, whose tuner may compile for many minutes; a child process times them."""
CASE_LIMIT_S = 240.0
"""Seconds that a child process may spend on one case."""


@dataclass
class Case:
    """An op at one size, with the variants to time.

    A variant maps the inputs to the tensors of which the loss is taken.
    """

    op: str
    size: str
    inputs: Callable[[], list[Tensor]]
    """Returns new random inputs on each call."""
    variants: dict[str, Callable[..., Any]]
    """Name -> function of all inputs."""
    flops: float
    """FLOPs of the forward pass."""
    bytes_moved: float
    """Fewest bytes of the forward pass."""
    backward: float
    """Ratio of the backward pass to the forward pass, in FLOPs, or in bytes if these are the limit."""
    rival: str | None = None
    """Variant by which the time of the others is divided."""
    eager: Collection[str] = (NAIVE,)
    """Variants that are not compiled."""
    ungated: Collection[str] = ()
    """Variants that use only the first three inputs: q, k and v."""

    def compiled(self) -> dict[str, Callable[..., Any]]:
        """Return name -> variant as the model calls it, compiled unless its name is in `eager`.

        Compilation takes place at the first call, as one graph with static shapes. Resets the compiler of the process.
        """
        torch.compiler.reset()  # else each size of an op would count as a recompilation
        return {
            name: call if name in self.eager else torch.compile(call, fullgraph=True, dynamic=False)
            for name, call in self.variants.items()
        }


@dataclass
class KernelRow:
    """Results of one variant of one case. Times in milliseconds; shares are of the limits measured in the same run."""

    op: str
    size: str
    variant: str
    forward: float
    """Median of the forward pass."""
    both: float | None
    """Forward and backward; None if only the forward pass fits or is wanted."""
    both_low: float | None
    both_high: float | None
    """Fastest and slowest round of forward and backward."""
    share_forward: float
    share_both: float | None
    """Time that the limits allow over the measured time, forward alone and with the backward pass."""
    to_rival: float | None
    """Time of forward and backward over the rival's, or of forward alone if there is no backward."""
    peak_memory: int
    """Bytes in addition to the inputs."""


def check_ops(selected: Sequence[str]) -> None:
    """Raise SweepError for the first name that is not in OPS."""
    for name in selected:
        if name not in OPS:
            raise SweepError(f"no operation {name!r}; {choices_hint(name, OPS)}")


def cases(selected: Sequence[str], device: torch.device, *, without_fla: str | None = None) -> Iterator[Case]:
    """Yield the cases of the selected ops, in a fixed order; all for an empty selection.

    Inputs are made later, by `Case.inputs`; self-tests of backends run on the way, for some ops for minutes.

    Args:
        selected: Names of ops (OPS), such as "polar", "wall_head" or "decode"; unknown ones are ignored.
        device: Device of the inputs.
        without_fla: Reason to leave out the kernels of flash-linear-attention in gated attention, which the size then
            mentions; None includes them.
    """
    for case in _all_cases(device, selected, without_fla):
        if not selected or case.op in selected:
            yield case


def run(
    selected: Sequence[str], device: torch.device, *, rounds: int = 10, tell: Callable[[str], None] = print
) -> tuple[Ceilings, list[KernelRow]]:
    """Time every variant of the selected ops, the variants of a case in turns.

    Args:
        selected: Names of ops; all if empty.
        device: A CUDA device.
        rounds: Timed rounds per case, of three calls each.
        tell: Called with lines of progress, some of which hold several table rows.

    Returns:
        (Limits of the device, rows). There is a row per variant and case: those of this process first, then those of
        FOREIGN (forgetting, wall_head, wall_kv, wall_decode), which a child process times.
    """
    limits = ceilings(device)
    rows: list[KernelRow] = []
    own = [op for op in selected or OPS if op not in FOREIGN]
    for case in cases(own, device) if own else ():
        rows += timed_case(case, limits, rounds, tell)
    for op in FOREIGN:
        if op in (selected or FOREIGN):
            rows += _foreign_rows(op, device, limits, rounds, tell)
    return limits, rows


def timed_case(case: Case, limits: Ceilings, rounds: int, tell: Callable[[str], None]) -> list[KernelRow]:
    """Time one case and return its rows, one per variant; empties the CUDA cache at the end.

    A line is reported before, since half a minute may pass, and the rows after, as lines of the table.
    """
    tell(f"{case.op}, {case.size}: compiling and timing {', '.join(case.variants)}")
    rows = _rows(case, limits, rounds)
    tell("\n".join(map(_line, rows)))
    torch.cuda.empty_cache()
    return rows


def _foreign_rows(
    op: str, device: torch.device, limits: Ceilings, rounds: int, tell: Callable[[str], None]
) -> list[KernelRow]:
    """Return the rows of an op of FOREIGN, timed in a child process with 240 s (CASE_LIMIT_S) per case.

    If the child fails or exceeds the limit, the cases that it has not finished are timed in this process, without
    flash-linear-attention.

    Args:
        op: "forgetting", "wall_head", "wall_kv" or "wall_decode".
        device: A CUDA device.
        limits: Limits of the device, handed to the child.
        rounds: Timed rounds per case.
        tell: Called with lines of progress of this process; the child reports to standard error.
    """
    torch.cuda.empty_cache()
    finished, reason = rows_of_child(
        [f"{__package__}.kernels", op, str(device), str(rounds), *map(str, limits)], CASE_LIMIT_S
    )
    rows = [KernelRow(**row) for case in finished for row in case]
    if reason is not None:
        tell(f"{op}: timed again without fla: {reason}")
        for number, case in enumerate(cases([op], device, without_fla=reason)):
            if number >= len(finished):
                rows += timed_case(case, limits, rounds, tell)
    return rows


def print_rows(op: str, device: str, rounds: str, flops: str, bytes_per_s: str) -> None:
    """Time an op and print the rows of each case as one line of JSON; the body of a child process.

    A line is a list of mappings with the fields of KernelRow. Progress goes to standard error.

    Args:
        op: Name of the op.
        device: Name of the device.
        rounds: Timed rounds per case, as text.
        flops: Measured FLOP/s, as text.
        bytes_per_s: Measured bytes/s, as text.
    """
    limits = Ceilings(float(flops), float(bytes_per_s))
    for case in cases([op], torch.device(device)):
        rows = timed_case(case, limits, int(rounds), report_line)
        print(json.dumps([asdict(row) for row in rows]), flush=True)


def table(limits: Ceilings, rows: Sequence[KernelRow]) -> str:
    """Return the rows as a Markdown table, one line per variant of a case, below the limits.

    Times are in milliseconds, peak memory in MiB; cells without a value are empty.
    """
    head = [
        limits.line,
        "",
        "| op | size | variant | forward (ms) | forward + backward (ms) | range (ms) | forward, of limit | both, of limit | vs rival | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [_line(row) for row in rows])


def _line(row: KernelRow) -> str:
    """Return a row as a line of the Markdown table, with empty cells for missing values."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    span = "" if row.both_low is None else f"{row.both_low:.3f} to {row.both_high:.3f}"
    return (
        f"| {row.op} | {row.size} | {row.variant} | {row.forward:.3f} | {number(row.both, '.3f')} | {span} | "
        f"{row.share_forward:.0%} | {number(row.share_both, '.0%')} | {number(row.to_rival, '.2f')} | "
        f"{row.peak_memory / 2**20:.0f} |"
    )


def _rows(case: Case, limits: Ceilings, rounds: int) -> list[KernelRow]:
    """Return the rows of a case, one per variant in the order of the case: times and peak memory.

    Forward and backward are timed together if any input has a gradient. A share is the time that the measured limits
    allow over the median time. The allowed time is the longer of FLOPs and bytes; with the backward pass it is
    multiplied by 1 + `backward`. `to_rival` is the median time over the rival's, with backward if that is timed. Runs
    on CUDA.
    """
    inputs, variants = case.inputs(), case.compiled()
    differentiable = [x for x in inputs if x.requires_grad]
    with torch.no_grad():
        shaped = [x for x in _tuple(next(iter(variants.values()))(*inputs)) if x.is_floating_point()]
    grads = [torch.randn_like(x) for x in shaped]
    del shaped

    def both(name: str, variant: Callable[..., Any]) -> Callable[[], object]:
        parameters = differentiable[:3] if name in case.ungated else differentiable
        return lambda: torch.autograd.grad(_tuple(variant(*inputs)), parameters, grads)

    def forward(variant: Callable[..., Any]) -> Callable[[], object]:
        """Return the variant's forward pass without gradients, as a call without arguments."""

        def call() -> object:
            with torch.no_grad():
                return variant(*inputs)

        return call

    peaks = {
        name: _peak_bytes(both(name, variant) if differentiable else forward(variant))
        for name, variant in variants.items()
    }
    forward_timings = _time_calls({name: forward(variant) for name, variant in variants.items()}, rounds)
    both_timings = (
        _time_calls({name: both(name, variant) for name, variant in variants.items()}, rounds) if differentiable else {}
    )
    reference_timings = both_timings or forward_timings
    roof_ms = 1e3 * max(case.flops / limits.flops, case.bytes_moved / limits.bytes_per_s)
    rows = []
    for name in case.variants:
        both_timing = both_timings.get(name)
        rows.append(
            KernelRow(
                op=case.op,
                size=case.size,
                variant=name,
                forward=forward_timings[name].median,
                both=both_timing and both_timing.median,
                both_low=both_timing and both_timing.low,
                both_high=both_timing and both_timing.high,
                share_forward=roof_ms / forward_timings[name].median,
                share_both=both_timing and roof_ms * (1 + case.backward) / both_timing.median,
                to_rival=reference_timings[name].median / reference_timings[case.rival].median if case.rival else None,
                peak_memory=peaks[name],
            )
        )
    return rows


def _time_calls(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Return name -> milliseconds per call, the calls taking turns in each round.

    All calls are replayed as CUDA graphs, except those named "torch" (NAIVE) or "eager" (EAGER): a graph would hold
    their memory twice.
    """
    # a graph would hold the memory of eager variants twice; their operations are long enough to hide the host
    ready = {name: call if name in (NAIVE, EAGER) else as_cuda_graph(call) for name, call in calls.items()}
    return time_interleaved(ready, rounds=rounds, repeat=3)


def _peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that a second run of the call holds in addition to those allocated before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _all_cases(device: torch.device, selected: Sequence[str], without_fla: str | None) -> Iterator[Case]:
    """Yield the cases of all ops in a fixed order.

    Cases outside `selected` are skipped only where making them is slow.
    """
    random = _Inputs(device)
    for b, t, window, grad in (
        (16, 2048, None, True), (16, 2048, 1024, True), (1, 16384, None, True), (1, 16384, 1024, True),
        (1, 65536, None, False), (1, 65536, 1024, True),
    ):  # fmt: skip
        yield from _attention(random, b, t, window, grad)
    for b, t in ((16, 2048), (1, 16384)):
        yield from _gated_attention(random, b, t, selected, without_fla)
    for b, t in ((16, 2048), (1, 16384), (1, 65536)):
        if not selected or "polysketch" in selected:
            yield _polysketch(random, b, t)
    yield _gated_delta(random)
    for op in kernel_variants.MEMORY_OPS:
        if not selected or op in selected:
            yield _memory(random, op)
    yield from _convolutions(random)
    yield _cross_entropy(random)
    yield _polar_distractor(random)
    for inputs, outputs in ((WIDTH, 8 * WIDTH), (4 * WIDTH, WIDTH)):
        yield _fp8_linear(random, inputs, outputs)
    for b, tokens in single_token.SIZES:
        yield _decode_step(random, b, tokens)
    for heads, kv_heads in ((H, J), (16, 16)):
        for b, tokens in single_token.WALL_SIZES:
            yield _wall_decode_step(random, b, tokens, heads, kv_heads, without_fla)
    yield _row_linear(random, WIDTH, 8 * WIDTH, "relu2")
    yield _row_linear(random, 4 * WIDTH, WIDTH, "none")


class _Inputs:
    """Random inputs in bf16 on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_(grad)

    def qkv(self, b: int, t: int, grad: bool = True) -> list[Tensor]:
        return [self.normal(b, t, heads, D, grad=grad) for heads in (H, J, J)]

    def per_head(self, grad: bool = True) -> list[Tensor]:
        parameters = [torch.full((H,), value, device=self.device) for value in (2.0, 0.5, -1.0, -1.5)]
        return [x.requires_grad_(grad) for x in (*parameters, torch.zeros(H, D, device=self.device))]


def _with_backend(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return lambda *inputs: function(*inputs, backend=backend, **options)


def _attention(random: _Inputs, b: int, t: int, window: int | None, grad: bool) -> Iterator[Case]:
    """Yield the case of polar attention, then that of softmax attention, at one size.

    Variants are the available backends (torch's up to 16,384 tokens) and the eager one if it fits into the GPU's
    memory. Softmax has one variant: cuDNN, or with a window this package's kernels.

    Args:
        random: Source of the inputs.
        b: Batch size.
        t: Tokens per row.
        window: Sliding window in tokens; None for full attention.
        grad: True times the backward pass too.
    """
    size = f"B{b} T{t}" + (f" W{window}" if window else "")
    reach = min(window or t, t)
    flops = 4 * D * b * H * (reach * (reach + 1) / 2 + (t - reach) * reach)
    moved = 2 * b * t * D * (2 * H + 2 * J)

    def rival(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return softmax.softmax_attention(q, k, v, window=window, backend="triton" if window else "cudnn")

    def polar_inputs() -> list[Tensor]:
        return [*random.qkv(b, t, grad), *random.per_head(grad)]

    # torch's own operations take seconds on the longest texts
    backends = [name for name in polar.available(random.device, torch.bfloat16, D) if name != NAIVE or t <= 2**14]
    variants = {name: _with_backend(polar.polar_attention, str(name), window=window) for name in backends}
    why = _eager_unfit_reason(random.device, b, t)
    if why is None:
        variants[EAGER] = lambda *inputs: kernel_variants.polar_attention_eager(*inputs, window=window)
    polar_size = size if why is None else f"{size}, without {EAGER}: {why}"
    yield Case("polar", polar_size, polar_inputs, variants, flops, moved, 2.5, eager=(NAIVE, EAGER))
    name = "softmax, our kernels" if window else "softmax, cuDNN"
    yield Case("softmax", size, lambda: random.qkv(b, t, grad), {name: rival}, flops, moved, 2.5)


def _eager_unfit_reason(device: torch.device, b: int, t: int) -> str | None:
    """Return why the complete T x T matrices do not fit into the GPU's total memory.

    None if they do, or on the CPU.
    """
    if device.type != "cuda":
        return None
    needed, free = kernel_variants.peak_bytes(b, H, t), torch.cuda.get_device_properties(device).total_memory
    return None if needed < free else f"it may take {needed / 2**30:.0f} GiB"


def _gated_attention(
    random: _Inputs, b: int, t: int, selected: Sequence[str], without_fla: str | None
) -> Iterator[Case]:
    """Yield a case per selected attention op with gates or biases, with the backends that pass their self-test.

    Ops without an implementation in flash-linear-attention are compared with torch's operations.

    Args:
        random: Source of the inputs.
        b: Batch size.
        t: Tokens per row.
        selected: Names of ops; others are skipped before their self-test. Empty selects all.
        without_fla: Reason to leave out flash-linear-attention; None tests it, which may take minutes.
    """
    own_only: dict[kernel_variants.Gated, Callable[[], BackendChoice]] = {
        kernel_variants.threshold: lambda: threshold.choose_backend(random.device, torch.bfloat16, D),
        kernel_variants.contextual: lambda: contextual.choose_backend(random.device, torch.bfloat16, D, POSITIONS),
        kernel_variants.relative: lambda: relative.choose_backend(random.device, torch.bfloat16, D),
    }
    for op, name, shape in (
        (kernel_variants.forgetting, "forgetting", (b, t, H)), (kernel_variants.wall, "wall_head", (b, t, H, D)),
        (kernel_variants.wall, "wall_kv", (b, t, J, D)), (kernel_variants.threshold, "threshold", (b, t, H)),
        (kernel_variants.contextual, "contextual", (POSITIONS, D)), (kernel_variants.relative, "relative", (H, REACH + 1)),
    ):  # fmt: skip
        if selected and name not in selected:
            continue  # the self-test of fla takes minutes
        if op in own_only:
            choice = own_only[op]()
            reasons = {"triton": None if choice.backend == "triton" else choice.reason, NAIVE: None}
        else:
            tied = shape == (b, t, J, D)
            reasons = kernel_variants.gated_available(op, random.device, D, gates_tied=tied, without_fla=without_fla)
        yield _with_softmax_baseline(random, b, t, name, op, shape, reasons)


def _with_softmax_baseline(
    random: _Inputs,
    b: int,
    t: int,
    name: str,
    op: kernel_variants.Gated,
    fourth_shape: tuple[int, ...],
    reasons: dict[str, str | None],
) -> Case:
    """Return the case of an attention op by each usable backend, with cuDNN's softmax attention as the rival.

    Args:
        random: Source of the inputs.
        b: Batch size.
        t: Tokens per row.
        name: Name of the op.
        op: The op, which takes q, k, v and a fourth input.
        fourth_shape: Shape of the fourth input.
        reasons: Backend -> reason to leave it out, which the size mentions; None to include it.
    """
    baseline = "softmax, cuDNN"

    def softmax_alone(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return softmax.softmax_attention(q, k, v, backend="cudnn")

    def inputs() -> list[Tensor]:
        return [*random.qkv(b, t), random.normal(*fourth_shape)]

    variants = {baseline: softmax_alone} | {
        name: _with_backend(op, name) for name, reason in reasons.items() if reason is None
    }
    size = ", ".join([f"B{b} T{t}", *(f"without {name}: {reason}" for name, reason in reasons.items() if reason)])
    flops = 4.0 * D * b * H * t * (t + 1) / 2
    # q, k, v, the result and the fourth input, 2 bytes each
    moved = 2.0 * (b * t * D * (2 * H + 2 * J) + math.prod(fourth_shape))
    return Case(
        name, size, inputs, variants, flops, moved, 2.5, baseline, eager=(kernel_variants.FLA, NAIVE),
        ungated=(baseline,),
    )  # fmt: skip


def _polysketch(random: _Inputs, b: int, t: int) -> Case:
    """Return the case of PolySketch attention by Triton, if available, and by torch, beside cuDNN's softmax attention."""
    baseline = "softmax, cuDNN"
    choice = polysketch.choose_backend(random.device, torch.bfloat16, D, DEGREE, SKETCH, BLOCK)
    size = f"B{b} T{t}" + (f", without triton: {choice.reason}" if choice.backend != "triton" else "")

    def inputs() -> list[Tensor]:
        draws = sketch_draws(J, D, SKETCH, DEGREE, torch.Generator().manual_seed(0))
        return [*random.qkv(b, t), draws.to(random.device)]

    variants: dict[str, Callable[..., Any]] = {
        baseline: lambda q, k, v, _: softmax.softmax_attention(q, k, v, backend="cudnn")
    }
    for name in dict.fromkeys((choice.backend, NAIVE)):
        variants[name] = _with_backend(polysketch.polysketch_attention, name, block=BLOCK)
    near = min(t, BLOCK)
    sums = SKETCH**2 * (D + 1) * (H + J) if t > BLOCK else 0
    flops = 2.0 * b * t * (D * H * (near + 1) + (H + J) * DEGREE * D * SKETCH * (t > BLOCK) / 2 + sums)
    moved = 2.0 * b * t * D * (2 * H + 2 * J)
    return Case("polysketch", size, inputs, variants, flops, moved, 2.0, baseline)


def _gated_delta(random: _Inputs) -> Case:
    """Return the case of the gated delta rule by each available backend except "torch".

    The rival is "fla" if available.
    """

    def inputs() -> list[Tensor]:
        gates = [torch.randn(16, 2048, H, device=random.device) for _ in range(2)]
        return [*random.qkv(16, 2048), *(x.requires_grad_() for x in gates)]

    def by(backend: str) -> Callable[..., Any]:
        """Return the op by a backend, as a function of q, k, v and the logits of gamma and beta."""

        def call(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, beta: Tensor) -> Any:
            log_gamma = torch.nn.functional.logsigmoid(gamma + 3.9)
            return gated_delta.gated_delta(q, k, v, log_gamma, beta.sigmoid(), backend=backend)

        return call

    names = gated_delta.available(random.device, torch.bfloat16, D)
    return Case(
        "gated_delta", "B16 T2048", inputs, {name: by(name) for name in names if name != "torch"},
        TOKENS * H * D * (4 * D + 6 * 64), 2 * TOKENS * D * (2 * H + 2 * J), 2.5,
        rival="fla" if "fla" in names else None,
    )  # fmt: skip


def _memory(random: _Inputs, op: str) -> Case:
    """Return the case of a memory op, with the variants of `kernel_variants.memory_variants`.

    The rival is "fla" if available, else "torch" if it is a variant.
    """

    def inputs() -> list[Tensor]:
        logits = [
            torch.randn(16, 2048, *shape, device=random.device) for shape in kernel_variants.memory_rates(op, H, D)
        ]
        return [*random.qkv(16, 2048), *(x.requires_grad_() for x in logits)]

    variants = kernel_variants.memory_variants(op, random.device, D)
    rival = next((name for name in (kernel_variants.FLA, NAIVE) if name in variants), None)
    moved = 2.0 * TOKENS * D * (2 * H + 2 * J)
    return Case(op, "B16 T2048", inputs, variants, TOKENS * H * kernel_variants.memory_flops(op, D), moved, 2.5, rival)


def _convolutions(random: _Inputs) -> Iterator[Case]:
    """Yield the case of the gated convolution, then that of Canon: Triton kernels against compiled torch."""
    for op, function, shape, filters, moved, backward in (
        ("gated_conv", conv.gated_causal_conv, (16, 2048, 3 * WIDTH), (WIDTH, 3), 8 * TOKENS * WIDTH, 1.75),
        ("canon", lambda x, w, backend: conv.canon(x, w, norm=True, backend=backend), (16, 2048, H, D), (H * D, 4),
         4 * TOKENS * WIDTH, 1.5),
    ):  # fmt: skip

        def inputs(shape: tuple[int, ...] = shape, filters: tuple[int, int] = filters) -> list[Tensor]:
            return [random.normal(*shape), random.normal(*filters)]

        variants = {"triton": _with_backend(function, "triton"), "torch, compiled": _with_backend(function, "torch")}
        yield Case(op, "B16 T2048", inputs, variants, 0, moved, backward, "torch, compiled")


def _cross_entropy(random: _Inputs) -> Case:
    """Return the case of the fused linear layer and cross-entropy (capped logits, summed), Triton against torch."""

    def inputs() -> list[Tensor]:
        w = torch.randn(VOCABULARY, WIDTH, device=random.device) / 32
        b = torch.zeros(VOCABULARY, device=random.device)
        targets = torch.randint(VOCABULARY, (TOKENS,), device=random.device)
        return [random.normal(TOKENS, WIDTH), w.requires_grad_(), b.requires_grad_(), targets]

    def by(backend: str) -> Callable[..., Any]:
        return lambda h, w, b, y: cross_entropy.linear_cross_entropy_sum(h, w, b, y, cap=15.0, backend=backend)

    return Case(
        "cross_entropy", "32768 tokens", inputs, {name: by(name) for name in ("triton", "torch")},
        2.0 * TOKENS * WIDTH * VOCABULARY, 0, 2.0, "torch",
    )  # fmt: skip


def _polar_distractor(random: _Inputs) -> Case:
    """Return the case of polar attention's distractor loss, Triton against torch; the keys have no gradient."""

    def inputs() -> list[Tensor]:
        return [random.normal(16, 2048, H, D), random.normal(16, 2048, J, D, grad=False), *random.per_head()[:3]]

    def loss(q: Tensor, k: Tensor, base: Tensor, slope: Tensor, gain: Tensor, backend: str) -> Tensor:
        return polar.polar_distractor_loss(q, k, gain, base, slope, backend=backend)

    variants = {name: _with_backend(loss, name) for name in ("triton", "torch")}
    flops = 4.0 * D * 16 * 2048 * H * 2048
    return Case("polar_distractor", "B16 T2048 R2048", inputs, variants, flops, 0, 0.0, "torch")


def _fp8_linear(random: _Inputs, inputs: int, outputs: int) -> Case:
    """Return the case of a norm and a projection, in bf16 and, if available, fp8; the size gives the reason if not.

    The norm belongs to the case because its kernel also casts to 8 bits.

    Args:
        random: Source of the inputs.
        inputs: Input features.
        outputs: Output features.
    """

    def by(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: product(rms_norm(x), w)

    def parts() -> list[Tensor]:
        return [
            random.normal(16, 2048, inputs),
            (torch.randn(outputs, inputs, device=random.device) / 32).requires_grad_(),
        ]

    variants = {"bf16": by(lambda x, w: torch.nn.functional.linear(x, w.to(x.dtype)))}
    choice, size = fp8_linear.choose_backend(random.device), f"32768 tokens, norm, {inputs} to {outputs}"
    if choice.backend == "torch":
        size += f", without fp8: {choice.reason}"
    else:
        variants["fp8"] = by(_with_backend(fp8_linear.fp8_linear, choice.backend))
    return Case("fp8_linear", size, parts, variants, 2.0 * TOKENS * inputs * outputs, 0, 2.0, "bf16", eager=())


def _decode_step(random: _Inputs, b: int, tokens: int) -> Case:
    """Return the case of one decoding step of attention, forward only.

    Variants are polar and softmax attention over pages, and torch's backends over dense keys where they support it. The
    bytes moved are the keys and values of `b` texts.

    Args:
        random: Source of the inputs.
        b: Number of texts.
        tokens: Tokens of each text.
    """

    def inputs() -> list[Tensor]:
        pools = [random.normal(-(-tokens // PAGE) * b, PAGE, J, D, grad=False) for _ in range(2)]
        return [random.normal(b, H, D, grad=False), *pools]

    variants: dict[str, Callable[..., Any]] = {
        "polar, pages": single_token.paged(b, tokens, random.device, random.per_head(grad=False)),
        "softmax, pages": single_token.paged(b, tokens, random.device),
    }
    size = f"B{b} T{tokens}"
    for name, backend in single_token.DENSE.items():
        why = single_token.unsupported_reason(backend, random.device, H, J, D)
        if why is None:
            variants[name] = single_token.dense(b, tokens, backend)
        else:
            size += f", without {name}: {why}"
    rival = single_token.BASELINE if single_token.BASELINE in variants else None
    moved = 2.0 * 2 * b * tokens * J * D
    return Case("decode", size, inputs, variants, 4.0 * D * b * H * tokens, moved, 0.0, rival, eager=tuple(variants))


def _wall_decode_step(random: _Inputs, b: int, tokens: int, heads: int, kv_heads: int, without_fla: str | None) -> Case:
    """Return the case of one decoding step of Wall attention, forward only, beside cuDNN's softmax and fla.

    fla has gates per query head alone. The bytes moved are the keys and values of `b` texts, one key per KV head.

    Args:
        random: Source of the inputs.
        b: Number of texts.
        tokens: Tokens of each text.
        heads: Query heads.
        kv_heads: KV heads; with as many as query heads there is one kind of gates.
        without_fla: Reason to leave out fla, which the size then mentions; None includes it where it can run.
    """
    gate_heads = sorted({kv_heads, heads})

    def inputs() -> list[Tensor]:
        k_pool, v_pool = (random.normal(tokens // PAGE * b, PAGE, kv_heads, D, grad=False) for _ in range(2))
        return single_token.wall_inputs(random.normal(b, heads, D, grad=False), k_pool, v_pool, gate_heads, tokens)

    variants: dict[str, Callable[..., Any]] = {}
    for case, (name, p) in enumerate(zip(("KV", "query"), gate_heads, strict=False)):
        for bits in (16, 8):
            variants[f"wall, gates per {name} head" + ", 8-bit cache" * (bits == 8)] = single_token.wall(
                b, tokens, random.device, case, eight_bits=bits == 8
            )
        weight, offset = (
            0.02 * random.normal(p, D, D, grad=False),
            torch.full((p, D), kernel_variants.GATE_BIAS, device=random.device),
        )
        gates = KeyGates(weight, offset, kernel_variants.WALL_CLAMP)
        variants[f"wall, gates per {name} head from plain keys"] = single_token.wall_from_keys(
            b, tokens, random.device, gates
        )
    size = f"{heads}/{kv_heads} heads, B{b} T{tokens}"
    baseline = single_token.BASELINE
    reasons = {
        baseline: single_token.unsupported_reason(single_token.DENSE[baseline], random.device, heads, kv_heads, D),
        kernel_variants.FLA: without_fla or why_no_fla(random.device, torch.bfloat16),
    }
    dense = single_token.dense(b, tokens, single_token.DENSE[baseline])
    rivals = {baseline: lambda *parts: dense(*parts[:3]), kernel_variants.FLA: single_token.fla_wall}
    for name, why in reasons.items():
        if why is None:
            variants[name] = rivals[name]
        else:
            size += f", without {name}: {why}"
    moved = 2.0 * 2 * b * tokens * kv_heads * D
    return Case(
        "wall_decode", size, inputs, variants, 4.0 * D * b * heads * tokens, moved, 0.0,
        baseline if baseline in variants else None, eager=tuple(variants),
    )  # fmt: skip


def _row_linear(random: _Inputs, inputs: int, outputs: int, gate: str) -> Case:
    """Return the case of a product with one row, as in a decoding step.

    Eight matrices take turns, so that no cache holds them.

    Args:
        random: Source of the inputs.
        inputs: Input features.
        outputs: Output features.
        gate: "none" adds the residual stream; any other gate is applied to the output after a norm of the input.
    """
    matrices, has_norm, has_stream = 8, gate != "none", gate == "none"

    def parts() -> list[Tensor]:
        weights = random.normal(matrices, outputs, inputs, grad=False) * inputs**-0.5
        return [random.normal(1, inputs, grad=False), random.normal(1, outputs, grad=False), weights]

    def by(backend: str) -> Callable[..., object]:
        """Return the products with all matrices by a backend, as a function of row, stream and stacked matrices."""

        def call(x: Tensor, stream: Tensor, weights: Tensor) -> object:
            """Return one product per matrix, as a tuple of [1, outputs], or of half that width with a gate."""
            options: dict[str, Any] = (
                {"norm_D": torch.ones_like(x[0], dtype=torch.float32), "eps": 1e-6} if has_norm else {}
            )
            return tuple(
                row_linear(x, w, gate=gate, under_BE=stream if has_stream else None, backend=backend, **options)
                for w in weights.unbind()
            )

        return call

    variants = {"triton": by("triton"), "cuBLAS, compiled": by("torch")}
    weights = matrices * inputs * outputs
    size = f"1 row, {inputs} to {outputs}, {matrices} times"
    return Case("row_linear", size, parts, variants, 2.0 * weights, 2.0 * weights, 0.0, "cuBLAS, compiled", eager=())


if __name__ == "__main__":
    print_rows(*child_arguments())
