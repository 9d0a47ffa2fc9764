"""Every random draw of the project comes from `rng_stream`: it depends on what it is for and on nothing else."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, key: str | int) -> int:
    """The first 63 bits of SHA-256 over (seed, purpose, key); equal on every machine."""
    digest = hashlib.sha256(f"{int(seed)}\x00{purpose}\x00{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def rng_stream(seed: int, purpose: str, key: str | int, *, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator on `device` for one draw.

    `purpose` names what the draw is for ("init", "sketch", ...), `key` which one it is (a parameter name, a step).
    """
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, key))
