"""Every mixer in a whole attempt: trained beside all that it composes with, measured, recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from attempts import STEPS, Room
from bench import Bench
from registries import EVERY_MIXER, has_distractor

Command = Callable[..., tuple[int, str, str]]


def test_a_grid_of_every_mixer_is_planned(tmp_path: Path, command: Command) -> None:
    bench = Bench(tmp_path)
    bench.edit("[nope, polar]", f"[{', '.join(EVERY_MIXER)}]")
    bench.edit("n_kv_heads: 1", "n_kv_heads: 2")
    code, out, err = command("launch", str(bench.folder / "micro.yaml"), "--dry-run", "--list")
    assert (code, err) == (0, "")
    slugs = {line.split()[-1] for line in out.splitlines()[: len(EVERY_MIXER)]}
    assert slugs == {f"{name}-baseline-d0-m0-w0-s0" for name in EVERY_MIXER}
    assert f"to train: {len(EVERY_MIXER)} cells" in out


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", EVERY_MIXER)
def test_attempt_with_memory_window_regularizer_and_distractor(room: Callable[..., Room], mixer: str) -> None:
    sets = {"eval.validate_every": 12, "eval.documents": 1, "eval.lengths": "[32]", "attn_type": mixer, "model.n_kv_heads": 2, "memory": "on", "window": "on", "reg_mode": "weak",
            "distractor": "on" if has_distractor(mixer) else "off"}  # fmt: skip
    ours = room(*(f"{path}={value}" for path, value in sets.items()))
    attempt = ours.run(every_steps=100)
    assert attempt.state == "done"
    step, _, loss, _, _ = ours.curve(attempt)[-1]
    assert step == STEPS
    assert loss is not None
    assert loss < math.log(264) - 0.5
    missing = {m.metric: m.reason for m in ours.store.measurements(ours.cell.id) if m.value is None}
    assert missing.keys() == {"mfu", "mfu_paper"}, "its FLOPs are known, the CPU's peak is not"
    assert set(missing.values()) == {"n/a: MFU needs the device's peak FLOP/s, unknown for the CPU"}
