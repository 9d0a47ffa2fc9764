"""`eval.chunk_tokens`: the same numbers for any size, and bounded memory for long rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from atma_sweep.kernels.attention.softmax import op as softmax
from atma_sweep.model.backbone import build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.probes.subject import run_probe
from registries import EVERY_MIXER, PAIRS
from tiers import long_form
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda")
GIB = 2**30
PROBES = ("val", "clean", "same_tail", "junk", "needle")
CELLS = [(mixer, (memory, memory != "none")) for mixer, memory in PAIRS]


def numbers(who: Any, lengths: tuple[int, ...] = (16, 45)) -> dict[tuple[Any, ...], float]:
    """Return every measurement and example of these probes."""
    values = {}
    for probe in PROBES:
        for measured, examples in run_probe(probe, who, (0,) if probe == "val" else lengths):
            values |= {("mean", m.probe, m.metric, m.length): m.value for m in measured}
            values |= {("one", e.probe, e.metric, e.length, e.item, e.position): e.value for e in examples}
    return values


SMALL = {"lengths": (16, 45), "junk_rows": 2, "needle_trials": 2, "validation_tokens": 40}


def never(is_fused: Any) -> bool:
    """Return False: all cases belong to the second tier."""
    return False


def awake(network: Any, dtype: torch.dtype, attn_type: str, branches: tuple[str, bool]) -> Any:
    """Return a network for byte tokens whose memory solves five tokens together."""
    memory, window = branches
    return network(
        awake=True, dtype=dtype, vocab_size=264, attn_type=attn_type, memory=memory, window=window,
        memories={"gated_delta": {"chunk": 5}},
    ).eval()  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "branches", "dtype", "tolerance"),
    [
        *((*cell, torch.float64, {"abs": 1e-10, "rel": 0}) for cell in CELLS),
        # what rounding could hide is seen in float64; float32 has paths of its own in these
        *((*cell, torch.float32, {"abs": 0, "rel": 1e-5}) for cell in CELLS if cell[0] == "polar"),
        *long_form(*((*cell, torch.float32, {"abs": 0, "rel": 1e-5}) for cell in CELLS if cell[0] == "rope")),
    ],
)
def test_probes_do_not_depend_on_chunk(
    network: Any, subject: Any, attn_type: str, branches: tuple[str, bool], dtype: torch.dtype, tolerance: Any
) -> None:
    model = awake(network, dtype, attn_type, branches)
    at = {chunk: numbers(subject(model, chunk_tokens=chunk, **SMALL)) for chunk in (1, 7, 64, 100_000)}
    peak_of_full_row = at.pop(100_000)
    assert {key[1] for key in peak_of_full_row} == set(PROBES)
    for peak_bytes in at.values():
        assert peak_bytes == pytest.approx(peak_of_full_row, **tolerance)
    assert at[7] == numbers(subject(model, chunk_tokens=7, **SMALL)), "bit for bit at one size"


class Largest(TorchDispatchMode):
    """Mode that records the number of elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                # the size of the storage, so that an expanded view counts as its base
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


FULL_CONTEXT_PROBES = ("clean", "junk", "needle")
LONG_ROWS = [
    ("polar", "none", True, FULL_CONTEXT_PROBES), ("polar", "gated_delta", True, FULL_CONTEXT_PROBES),
    ("nope", "none", True, FULL_CONTEXT_PROBES), ("nope", "gated_delta", False, FULL_CONTEXT_PROBES),
    ("rope", "gated_delta", True, FULL_CONTEXT_PROBES), ("rope", "none", False, FULL_CONTEXT_PROBES),
    *((mixer, "none", True, ("needle",)) for mixer in EVERY_MIXER if mixer not in ("polar", "nope", "rope")),
]  # fmt: skip
"""attn_type, memory, fused, probes: one probe is enough to see what a mixer takes."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attn_type", "memory", "fused", "probes"),
    LONG_ROWS,
)
def test_probe_memory_grows_with_chunk_not_square(
    network: Any, subject: Any, monkeypatch: pytest.MonkeyPatch, attn_type: str, memory: str, fused: bool,
    probes: tuple[str, ...],
) -> None:  # fmt: skip
    """A row of 1500 tokens, 64 at a time. Whole, the smallest wide tensor is the gated convolution's, T x 3d.

    In pieces the largest is the scores of 64 queries in two heads. `fused` off: as where torch has no kernel for full
    attention in linear memory, its plain path alone.
    """
    if not fused:
        monkeypatch.setattr(softmax, "_is_fused", lambda q, k: False)
    length, vocabulary, width, size = 1500, 2003, 64, 64
    model = network(
        awake=True, vocab_size=vocabulary, d_model=width, head_dim=size, attn_type=attn_type, memory=memory,
        n_heads=2, n_kv_heads=2 if attn_type == "diff" else 1,
    ).eval()  # fmt: skip
    sizes = {"junk_rows": 1, "needle_trials": 1, "lengths": (length,), "length": 1600, "validation": 1600}

    def largest(probe: str, chunk: int) -> int:
        who = subject(model, chunk_tokens=chunk, **sizes)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION] if fused else [SDPBackend.MATH]), Largest() as watch:
            ((measured, _),) = run_probe(probe, who, [length])
        assert measured[0].value is not None
        return watch.elements

    for probe in probes:
        assert largest(probe, 64) < 250_000 < length * 3 * width < length * length
    if "clean" in probes:
        assert largest("clean", 10_000) >= length * vocabulary, "whole, all logits exist"
    if attn_type == "polar" or not fused:
        assert largest("needle", 10_000) >= 1024 * length, "whole, the scores of 1024 queries exist"


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("attn_type", "branches"), CELLS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_cuda_probes_do_not_depend_on_chunk(
    network: Any, subject: Any, attn_type: str, branches: tuple[str, bool], dtype: torch.dtype, tolerance: float
) -> None:
    model = awake(network, dtype, attn_type, branches).to(CUDA)
    at = {chunk: numbers(replace(subject(model, chunk_tokens=chunk, **SMALL), device=CUDA)) for chunk in (7, 64, 10**5)}
    for chunk in (7, 64):
        assert at[chunk] == pytest.approx(at[10**5], rel=tolerance, abs=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("attn_type", "memory"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cuda_probe_memory_does_not_grow_with_square(
    subject: Any, attn_type: str, memory: str, dtype: torch.dtype
) -> None:
    """For 16,384 tokens, 512 at a time, one head's scores would take 0.5 GiB in bf16, all logits 1.5 GiB."""
    config = ModelConfig(d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, vocab_size=50_304,
                         attn_type=attn_type, memory=memory)  # fmt: skip
    model = build(config, seed=0, device=CUDA, dtype=dtype).eval()
    who = replace(subject(model, lengths=(16_384,), length=16_500, chunk_tokens=512), device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ((measured, _),) = run_probe("clean", who, [16_384])
    assert measured[0].value is not None
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{attn_type} {memory} {dtype}: {peak / GIB:.3f} GiB")
    assert peak < 0.45 * GIB * dtype.itemsize / 2


@pytest.mark.gpu
@pytest.mark.parametrize(("attn_type", "memory"), PAIRS)
def test_row_of_65536_tokens_of_370m_network_fits_24_gb(subject: Any, attn_type: str, memory: str) -> None:
    """The allocator's limit is the L4's 22 GiB; less than 20 GB are used, weights included."""
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 22 * GIB / total))
    try:
        model = build(ModelConfig(attn_type=attn_type, memory=memory), seed=0, device=CUDA, dtype=torch.bfloat16).eval()
        settings = {"lengths": (65_536,), "documents": 1, "junk_rows": 1, "needle_trials": 1, "validation": 65_600}
        for probe in ("clean", "junk", "needle"):
            who = subject(model, length=65_600, **settings)
            torch.cuda.reset_peak_memory_stats()
            ((measured, _),) = run_probe(probe, replace(who, device=CUDA), [65_536])
            peak = torch.cuda.max_memory_allocated()
            print(f"{attn_type} {memory} {probe}: {peak / 1e9:.2f} GB, kernels {model.kernel_paths()}")
            assert measured[0].value is not None
            assert peak < 20e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
