"""Random streams: every random draw comes from `rng_stream` and depends on (seed, purpose, key) alone."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, key: str | int) -> int:
    """Return the first 63 bits of SHA-256 over (seed, purpose, key) as an int >= 0, equal on every machine.

    The three are joined as text, so key 1 and key "1" give the same seed.
    """
    digest = hashlib.sha256(f"{int(seed)}\x00{purpose}\x00{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def rng_stream(seed: int, purpose: str, key: str | int, *, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a freshly seeded generator on `device` for one random draw.

    Args:
        seed: seed of the cell.
        purpose: name of the draw's use ("init", "sketch", ...).
        key: identifier of the draw among those of the same purpose, such as a parameter name or a step.
        device: device of the generator; CPU and CUDA generators give different numbers.
    """
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, key))
