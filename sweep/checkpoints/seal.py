"""Seal of a checkpoint: a small file with its facts, the hashes of its other files, and a hash of all that.

It detects every changed byte of a checkpoint, and states to which step the checkpoint belongs. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...results.console.output_files import sha256
from .file_names import MODEL, OPTIMIZERS, name_of

SEAL = "state.json"
"""File name of the seal: facts of the checkpoint, hashes of its other files (sha256), hash of both (seal)."""
_PARTS = {MODEL, OPTIMIZERS}
_FACTS = {"step", "tokens", "wall_s", "pending"}


class DamagedCheckpoint(Exception):
    """Exception for a checkpoint that differs from what was written; the message names the defect in a few words."""


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts of a checkpoint, as its seal stores them."""

    step: int
    """Optimizer steps so far."""
    tokens: int
    """Training tokens so far."""
    wall_s: float
    """Seconds of training so far, without validation."""
    pending: tuple[float, float, float] | None
    """Train loss, gradient norm and tokens per second of a point whose validation is not complete; None without one."""


def seal_content(facts: Mapping[str, Any], hashes: Mapping[str, str]) -> bytes:
    """Return the content of the seal file: JSON of the facts, the hashes (sha256), and the hash of both (seal).

    Args:
        facts: Facts of the checkpoint, as JSON: step, tokens, wall_s, pending. They become keys of the same object.
        hashes: SHA-256 in hex of its other files, by name.
    """
    content = {**facts, "sha256": dict(hashes)}
    return json.dumps(content | {"seal": _hash_of(content)}).encode()


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_verified_facts(bundle: Path, name: str) -> CheckpointFacts:
    """Return the facts of a local copy of a checkpoint, after hashing all its files.

    A checkpoint of an older release, whose seal has no hash of itself, passes if its facts are plausible.

    Args:
        bundle: Folder of the local copy.
        name: Name of the checkpoint, which must match its step.

    Raises:
        DamagedCheckpoint: A file is missing or has changed, or the seal is invalid or of another step.
    """
    content = _read_seal(bundle)
    hashes = content.pop("sha256", None)
    if not isinstance(hashes, dict) or set(hashes) != _PARTS:
        raise DamagedCheckpoint(f"{SEAL} does not list its files")
    facts = _check_facts(content)
    if name != name_of(facts.step):
        raise DamagedCheckpoint(f"{SEAL} belongs to step {facts.step}")
    try:
        current = map_in_threads(sha256, [bundle / part for part in hashes])
    except OSError as error:
        raise DamagedCheckpoint(f"{Path(str(error.filename)).name}: {error.strerror}") from error
    for part, old, new in zip(hashes, hashes.values(), current, strict=True):
        if old != new:
            raise DamagedCheckpoint(f"{part} has changed since it was written")
    return facts


def _read_seal(bundle: Path) -> dict[str, Any]:
    """Return the content of the seal, without its own hash; its facts and hashes are not checked here.

    A seal without its own hash, from an older release, is accepted.

    Args:
        bundle: Folder of the checkpoint.

    Raises:
        DamagedCheckpoint: The seal is missing, cannot be read as a JSON object, does not match its own hash, or differs
            in any byte from JSON as this program writes it.
    """
    try:
        raw = (bundle / SEAL).read_bytes()
        content = json.loads(raw)
    except OSError as error:
        raise DamagedCheckpoint(f"{SEAL}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{SEAL} cannot be read") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{SEAL} cannot be read")
    # compare bytes, so that a change that JSON ignores, such as a space, is noticed too
    if json.dumps(content).encode() != raw or ("seal" in content and content.pop("seal") != _hash_of(content)):
        raise DamagedCheckpoint(f"{SEAL} has changed since it was written")
    return content


def _check_facts(content: Mapping[str, Any]) -> CheckpointFacts:
    """Return the facts in a seal, whose content has neither its hash nor those of the files any more.

    Raises:
        DamagedCheckpoint: A value is missing or implausible, or there are further ones. Plausible are positive integers
            for step and tokens, a finite wall_s of at least 0, and a pending that is absent, None or three finite
            numbers.
    """
    step, tokens, wall_s, pending = (content.get(key) for key in ("step", "tokens", "wall_s", "pending"))
    numbers = [wall_s, *(pending if isinstance(pending, list) else [])]
    is_valid = (
        set(content) <= _FACTS
        and all(type(count) is int and count > 0 for count in (step, tokens))
        and all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
        and numbers[0] >= 0
        and (pending is None or len(numbers) == 4)
    )
    if not is_valid:
        raise DamagedCheckpoint(f"{SEAL} holds impossible values")
    return CheckpointFacts(step, tokens, wall_s, tuple(pending) if pending else None)  # type: ignore[arg-type]


def map_in_threads(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Return the results of `work` for each item, in order, computed in one thread per item; wait for all of them.

    An exception of `work` is raised again, the first by the order of the items. Hashing, reading and writing release
    the interpreter lock.
    """
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(work, items))
