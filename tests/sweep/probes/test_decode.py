"""Probe `decode`: exact bytes of a text's cache, and a positive speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from atma_sweep.sweep.probes.subject import run_probe


@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["none", "gated_delta"])
def test_decode_counts_cache_bytes_exactly(network: Any, subject: Callable[..., Any], memory: str) -> None:
    model = network(awake=True, vocab_size=264, attn_type="polar", memory=memory).eval()
    who = subject(model, settings={"decode": {"texts": 3, "steps": 2}})
    measured = {(m.metric, m.length): m for measurements, _ in run_probe("decode", who, (16, 32)) for m in measurements}
    config = model.config
    of_token = 2 * 4 * config.n_kv_heads * config.head_dim * sum(map(config.is_global, range(config.n_layers)))
    cache_bytes = {length: measured["cache_bytes", length].value for length in (16, 32)}
    assert cache_bytes[32] - cache_bytes[16] == 16 * of_token
    states = config.head_dim * (config.head_dim if memory != "none" else 0) * config.n_heads
    tails = (config.canon_taps - 1) * config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
    is_global = [config.is_global(layer) for layer in range(config.n_layers)]
    fixed = sum(
        states + tails if is_global_layer else (config.conv_taps - 1) * config.d_model for is_global_layer in is_global
    )
    assert cache_bytes[16] == 16 * of_token + 4 * fixed
    for length in (16, 32):
        assert measured["written_per_s", length].value > 0
        assert measured["written_per_s", length].n == 3 * 3 * 2


@pytest.mark.thorough
def test_decode_of_network_without_step_has_reason(network: Any, subject: Callable[..., Any]) -> None:
    who = subject(network(awake=True, vocab_size=264, attn_type="path").eval())
    ((measurements, _),) = run_probe("decode", replace(who), (16,))
    assert {m.reason for m in measurements} == {"n/a: mixer PaTH cannot decode token by token"}


@pytest.mark.parametrize(("attn_type", "reason"), [("wall", None), ("nope", "n/a: mixer NoPE has no 8-bit cache")])
def test_decode_in_8_bits(network: Any, subject: Callable[..., Any], attn_type: str, reason: str | None) -> None:
    """Wall keeps fewer bytes than in the activations' type; a mixer without such a cache has a reason."""
    model, cache_bytes = network(awake=True, vocab_size=264, attn_type=attn_type).eval(), []
    for fp8 in (False, True):
        who = subject(model, settings={"decode": {"texts": 1, "steps": 1, "fp8": fp8}})
        ((measurements, _),) = run_probe("decode", who, (16,))
        cache_bytes.append({m.metric: m for m in measurements}["cache_bytes"])
    if reason is None:
        assert 0 < cache_bytes[1].value < cache_bytes[0].value
    else:
        assert cache_bytes[1].reason.startswith(reason)
