"""The command `atma-sweep launch`: the plan alone, a supervisor left on a cluster, or a launch that stays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...results.files import make_folder
from ...results.options import print_json, runs_folder
from ...results.store.store import Store, StoreMissing, open_store
from ...results.text import say
from ..errors import SweepError
from ..grid.grid import load_grid
from ..plan import corpora
from ..plan.planner import Plan
from ..run import launch, progress
from ..run.launch import Outcome, Request
from .prepare import Preparing


@dataclass(frozen=True)
class Asked:
    """What the command line says of a launch."""

    grid: str
    """A file, or the name of a shipped grid."""
    sets: Sequence[str]
    only: Sequence[str]
    name: str | None
    executor: str
    address: str | None
    detach: bool
    retrain: bool
    code: str
    most: int | None
    """Cells that the grid may have."""
    runs: Path | None
    db: str | None


def carry_out(asked: Asked, *, dry_run: bool, as_json: bool) -> bool:
    """Launches, or with `dry_run` only tells the plan; False when cells are left that failed."""
    if asked.detach and asked.address is None:
        raise SweepError("--detach leaves the supervisor on a cluster; name that with --address")
    console = progress.Terminal(stderr=as_json, soft_wrap=True)
    request, remarks = requested(asked, console, dry=dry_run)
    if dry_run:
        show_plan(launch.plan(request, _store_if_any(asked.db)), request.grid.name, remarks, as_json)
        return True
    store = open_store(asked.db, create=True)
    make_folder(request.runs, "--runs", parents=True)
    if asked.detach:
        leave(request, store, console, as_json)
        return True
    outcome = stay(request, store, console)
    show_outcome(outcome, request.grid.name, console, as_json)
    return outcome.finished


def requested(asked: Asked, console: Console, *, dry: bool) -> tuple[Request, list[str]]:
    """The launch, its text prepared where it lies on this machine, and remarks; a dry run prepares nothing."""
    grid = load_grid(asked.grid, sets=asked.sets, rename=asked.name, most=asked.most)
    runs = runs_folder(asked.runs, asked.db, write=not dry)
    with Preparing(console, "text") as tell:
        cells, remarks = corpora.expand(grid, runs / "corpora", dry=dry, tell=tell)
    request = Request(
        grid=grid, cells=cells, runs=runs, executor=asked.executor, address=asked.address,
        only=asked.only, retrain=asked.retrain, code=asked.code,
    )  # fmt: skip
    return request, remarks


def _store_if_any(db: str | None) -> Store | None:
    try:
        return open_store(db)
    except StoreMissing:
        return None


def leave(request: Request, store: Store, console: Console, as_json: bool) -> None:
    """Leaves a supervisor on the cluster, and says what it plans."""
    from ..run import detached  # which needs Ray

    for line in detached.order(request, store):
        console.print(line, highlight=False, markup=False)
    sweep = request.grid.name
    console.print(f"{sweep} goes on without this command. Next: atma-sweep status --watch", highlight=False)
    if as_json:
        print_json({"sweep": sweep, "supervisor": detached.actor_name(store, sweep)})


def stay(request: Request, store: Store, console: Console) -> Outcome:
    """Launches, and shows how it goes until it has ended."""

    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    def planned(plan: Plan) -> None:
        for line in progress.describe_plan(plan, request.grid.name):
            tell(line)
        screen.expect(len(plan.tasks))

    with progress.Display(console, len(request.cells)) as screen:
        return launch.run(request, store, screen, planned=planned, tell=tell)


def show_plan(plan: Plan, sweep: str, remarks: list[str], as_json: bool) -> None:
    """What a launch would do: every cell and how it stands, then the sum."""
    if as_json:
        rows = [
            {
                "cell": c.id,
                "slug": c.slug,
                "seed": c.config.seed,
                **c.levels,
                "axes": c.axes,
                "state": plan.standings[c.id],
            }
            for c in plan.cells
        ]
        print_json(
            {
                "sweep": sweep,
                "cells": rows,
                "counts": plan.counts,
                "to_train": [task.cell.id for task in plan.training],
                "to_evaluate": [task.cell.id for task in plan.evaluating],
                "tokens": plan.tokens,
                **(plan.disk.as_json() if plan.disk is not None else {}),
                "remarks": remarks,
            }
        )
        return
    lines = (f"{cell.id}  {plan.standings[cell.id]:<12} {cell.slug}" for cell in plan.cells)
    while part := list(itertools.islice(lines, 1000)):  # the terminal is told once, not a hundred thousand times
        say("\n".join(part))
    say("\n".join(progress.describe_plan(plan, sweep, remarks)))


def show_outcome(outcome: Outcome, sweep: str, console: Console, as_json: bool) -> None:
    """Where the cells stand after a launch, and what comes next."""
    counts = {word: count for word, count in sorted(outcome.standings.items()) if count}
    if as_json:
        print_json({"sweep": sweep, "counts": counts, "finished": outcome.finished})
        return
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    rest = (
        "atma-sweep report --table 6" if outcome.finished else "atma-sweep status tells why; launch again to continue"
    )
    console.print(f"{sweep}: {words}. Next: {rest}", highlight=False, markup=False)
