"""Parts that cannot run on a device: the check of a built network, and a process that checks parts on this machine's GPU.

`python -m ....part_check` reads a JSON list of model sections from standard input and prints the reasons as a JSON list.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

from ...model.config import ModelConfig

TIMEOUT_S = 600.0
"""Longest time that the check of a launch may take; fla compiles its kernels meanwhile."""


def refusals_on_gpu(models: Iterable[ModelConfig]) -> list[str]:
    """Return why the block parts of these networks cannot run on this machine's GPU; empty if they can.

    They are tried in a process of its own, so that this one starts no CUDA. A part that has passed on this machine
    before is not tried again. A process that fails gives its last line as a reason.
    """
    sections = [model.model_dump(mode="json") for model in models]
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(sections), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"the check of block parts took longer than {TIMEOUT_S:g} s"]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [f"the check of block parts failed: {lines[-1]}"]
    reasons: list[str] = json.loads(done.stdout.splitlines()[-1])
    return reasons


def _print_refusals() -> None:
    """Read model sections from standard input, try their parts on the GPU, and print the distinct reasons as JSON."""
    from ...model.bases import BlockPart
    from ...model.registry import MIXERS
    from ...model.resolve import mixer_settings
    from .device import choose_device, use_shared_self_tests

    device = choose_device(1)
    use_shared_self_tests(device)
    reasons: dict[str, None] = {}
    for section in json.load(sys.stdin):
        model = ModelConfig.model_validate(section)
        part = MIXERS.load(model.attn_type)(model, mixer_settings(model))
        assert isinstance(part, BlockPart)
        reason = part.refusal(device)
        if reason is not None:
            reasons[reason] = None
    print(json.dumps(list(reasons)))


if __name__ == "__main__":
    _print_refusals()
