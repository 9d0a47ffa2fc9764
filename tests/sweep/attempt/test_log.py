"""Log lines of a healthy attempt, and their display by `logs`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from atma_sweep.sweep.attempt.process import MAX_VALIDATION_LINES, is_logged
from attempts import STEPS, Room
from patience import PATIENCE_S

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
NUMBER = r"[\d,.]+"


@pytest.mark.thorough
def test_the_log_of_a_healthy_attempt(room: Callable[..., Room], command: Callable[..., tuple[int, str, str]]) -> None:
    """The log has the cell and its device, the first step, a line per validation and probe, and the end."""
    ours = room()
    ours.run(stop=11)
    job = ours.job("train", ours.settings(), None)
    with (ours.runs / job.folder / "log.txt").open("w") as log:
        assert ours.start(job, out=log).wait(timeout=PATIENCE_S) == 0
    code, out, _ = command("logs", ours.cell.slug, "--db", str(ours.store.path))
    assert (code, out) == (0, (ours.runs / job.folder / "log.txt").read_text())
    lines = out.splitlines()
    assert all(TIME.match(line) for line in lines), out
    first, second, *rest = (TIME.sub("", line, count=1) for line in lines)
    assert first.startswith(f"cell {ours.cell.slug} ({ours.cell.id}), attempt 2 (train) on CPU (1 threads), float32, ")
    assert "blocks: eager" in first
    assert "polar" in first.split("parameters; ")[1]
    assert second == "12 steps of 128 tokens, resumed at step 3"
    points = rest[: STEPS - 3]
    for step, line in enumerate(points, 4):
        assert re.fullmatch(rf"step {step} of 12: train loss {NUMBER}, val loss {NUMBER}, {NUMBER} tokens/s", line)
    value = ours.store.curve(job.attempt)[-1].val_loss
    assert f"val loss {value:.4f}, " in points[-1]
    probes, last = rest[STEPS - 3 : -1], rest[-1]
    assert [line.split(":")[0] for line in probes] == [
        "probe clean at 32, 64 tokens", "probe junk at 32, 64 tokens", "probe needle at 32, 64 tokens", "probe val",
    ]  # fmt: skip
    assert all(re.search(r": \d+\.\d s$", line) for line in probes)
    assert re.fullmatch(r"done after \d+\.\d s", last)


@pytest.mark.parametrize(("every", "steps"), [(1, 10), (30, 150), (1, 1_000_000), (7, 99_999), (500, 100), (1, 1001)])
def test_a_log_stays_small_however_long_the_training(every: int, steps: int) -> None:
    """Every validation gets a line, or an even part of very many; the last one always does."""
    points = sorted({*range(every, steps + 1, every), steps})
    chosen = [step for step in points if is_logged(step, every, steps)]
    assert chosen[-1] == steps
    assert len(chosen) <= MAX_VALIDATION_LINES + 1
    assert chosen == points or len(chosen) >= MAX_VALIDATION_LINES // 2
