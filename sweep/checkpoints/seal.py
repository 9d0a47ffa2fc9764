"""The seal of a bundle: a small file with its facts, the hash of each of its other files, and a hash of all that.

So no byte of a bundle can change unnoticed, and a checkpoint says itself which step it is of. Imports no torch.
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
"""Facts about a bundle; under sha256 the hash of each of its other files; under seal the hash of the rest."""
_PARTS = {MODEL, OPTIMIZERS}
_FACTS = {"step", "tokens", "wall_s", "pending"}


class DamagedCheckpoint(Exception):
    """A bundle that is not as it was written; the message says in a few words what is wrong with it."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What the seal of a checkpoint says of it."""

    step: int
    tokens: int
    wall_s: float
    """Training seconds so far, validation excluded."""
    pending: tuple[float, float, float] | None
    """Train loss, gradient norm and tokens per second of a point whose validation was left half-way."""


def written(facts: Mapping[str, Any], hashes: Mapping[str, str]) -> bytes:
    """The content of the file SEAL for a bundle with these facts and files."""
    said = {**facts, "sha256": dict(hashes)}
    return json.dumps(said | {"seal": _hash_of(said)}).encode()


def _hash_of(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def read_verified_facts(bundle: Path, name: str) -> CheckpointFacts:
    """The facts of a local copy of the checkpoint `name`, all of whose files have been hashed.

    One of an older release, whose seal has no hash of itself, passes when its facts can be true. Raises Damaged.
    """
    said = _opened(bundle)
    hashes = said.pop("sha256", None)
    if not isinstance(hashes, dict) or set(hashes) != _PARTS:
        raise DamagedCheckpoint(f"{SEAL} does not name its files")
    facts = _facts(said)
    if name != name_of(facts.step):
        raise DamagedCheckpoint(f"{SEAL} is of step {facts.step}")
    try:
        found = map_in_threads(sha256, [bundle / part for part in hashes])
    except OSError as error:
        raise DamagedCheckpoint(f"{Path(str(error.filename)).name}: {error.strerror}") from error
    for part, old, new in zip(hashes, hashes.values(), found, strict=True):
        if old != new:
            raise DamagedCheckpoint(f"{part} has changed since it was written")
    return facts


def _opened(bundle: Path) -> dict[str, Any]:
    """What the seal says, its own hash aside."""
    try:
        raw = (bundle / SEAL).read_bytes()
        said = json.loads(raw)
    except OSError as error:
        raise DamagedCheckpoint(f"{SEAL}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{SEAL} cannot be read") from error
    if not isinstance(said, dict):
        raise DamagedCheckpoint(f"{SEAL} cannot be read")
    # byte by byte, so that what a reader would let pass, as a space more, is noticed, too
    if json.dumps(said).encode() != raw or ("seal" in said and said.pop("seal") != _hash_of(said)):
        raise DamagedCheckpoint(f"{SEAL} has changed since it was written")
    return said


def _facts(said: Mapping[str, Any]) -> CheckpointFacts:
    step, tokens, wall_s, pending = (said.get(key) for key in ("step", "tokens", "wall_s", "pending"))
    numbers = [wall_s, *(pending if isinstance(pending, list) else [])]
    sound = (
        set(said) <= _FACTS
        and all(type(count) is int and count > 0 for count in (step, tokens))
        and all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers)
        and numbers[0] >= 0
        and (pending is None or len(numbers) == 4)
    )
    if not sound:
        raise DamagedCheckpoint(f"{SEAL} holds values that no training has")
    return CheckpointFacts(step, tokens, wall_s, tuple(pending) if pending else None)  # type: ignore[arg-type]


def map_in_threads(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """`work` of each item, in threads: hashing, reading and writing let the interpreter go."""
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(work, items))
