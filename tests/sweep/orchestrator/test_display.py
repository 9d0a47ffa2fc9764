"""Output of a launch without a terminal."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from atma_sweep.results.console import terminal_table
from atma_sweep.sweep.orchestrator.display import ProgressDisplay, SafeConsole
from patience import until


def task(slug: str) -> Any:
    train = SimpleNamespace(steps=100, batch_tokens=20_000)
    return SimpleNamespace(cell=SimpleNamespace(id=slug, slug=slug, config=SimpleNamespace(train=train)), kind="train")


def attempt(key: int, **changes: Any) -> Any:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    start: dict[str, Any] = {
        "state": "running",
        "phase": "",
        "step": 0,
        "loss": None,
        "tokens_per_s": None,
        "number": 1,
    }
    rest: dict[str, Any] = {"failure": None, "cause": None, "started_at": moment, "finished_at": moment}
    return SimpleNamespace(id=key, **(start | rest | changes))


def piped(**how: Any) -> tuple[ProgressDisplay, io.StringIO]:
    out = io.StringIO()
    return ProgressDisplay(SafeConsole(file=out, soft_wrap=True), 4, **how), out


def test_summary_counts_cells_phases_tokens_and_rate() -> None:
    display, _ = piped()
    assert display.summary() == "cells: 0 of 4 done; running: none; 0 tokens trained"
    display.set_total(4, 8_000_000)
    for key, slug in enumerate(("a", "b", "c")):
        display.started(task(slug), attempt(key))
    display.running(
        [
            attempt(1, phase="training", step=50, loss=5.0, tokens_per_s=1500.0),
            attempt(2, phase="probing", step=100, loss=4.0, tokens_per_s=9999.0),
        ]
    )
    display.ended(task("a"), attempt(0, state="failed", step=10, cause="no luck"))
    # 10, 50 and 100 steps of 20,000 tokens, of 8M less the 1.8M that the failed cell lacks; the rate is of the one that
    # trains, and two workers need half of (2M of a step 50, and 2M - 1M) / 1,500 tokens/s
    assert display.summary() == (
        "cells: 0 of 4 done, 1 failed; running: 1 probing, 1 training; 3.20M of 6.20M tokens trained, 1,500 tokens/s, about 17 min left"
    )
    display.ended(task("b"), attempt(1, state="interrupted", step=60))
    display.ended(task("c"), attempt(2, state="done", step=100))
    assert display.summary() == "cells: 1 of 4 done, 1 failed; running: none; 3.40M of 6.20M tokens trained"


def test_piped_launch_prints_summaries_by_itself() -> None:
    """The summary appears even if the supervisor never calls the display."""
    display, out = piped(line_s=0.01)
    with display:
        until(lambda: out.getvalue().count("\n") > 2, "three lines")
    assert set(out.getvalue().splitlines()) == {"cells: 0 of 4 done; running: none; 0 tokens trained"}


def test_failed_cell_line_points_to_its_log() -> None:
    display, out = piped()
    with display:
        display.started(task("polar-s0"), attempt(0))
        display.ended(task("polar-s0"), attempt(0, state="failed", cause="ValueError: [so] (mine.py:3)"))
        display.started(task("rope-s0"), attempt(1))
        display.ended(task("rope-s0"), attempt(1, state="done"))
    assert out.getvalue().splitlines() == [
        "[1/4] polar-s0 failed in 0 s: ValueError: [so] (mine.py:3); atma-sweep logs polar-s0",
        "[2/4] rope-s0 done in 0 s",
    ]


class Tty(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("setting", "styled"), [(("TERM", "dumb"), False), (("NO_COLOR", "1"), False), (("TERM", "xterm"), True)]
)
def test_display_uses_escape_codes_only_where_wanted(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str], styled: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(*setting)
    monkeypatch.setenv("TTY_COMPATIBLE", "")  # so that what is set below is undone
    terminal_table.forgo_styles()
    assert terminal_table.is_styled(Tty()) is styled
    assert not terminal_table.is_styled(io.StringIO())
    out = Tty()
    with ProgressDisplay(SafeConsole(file=out), 4) as display:
        display.started(task("polar-s0"), attempt(0))
        display.ended(task("polar-s0"), attempt(0, state="failed"))
    assert ("\x1b" in out.getvalue()) is styled
