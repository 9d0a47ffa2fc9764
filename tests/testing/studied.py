"""Studies, made up: for tests of reports, which train nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, Measurement, NewRevision, Owner
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store
from atma_sweep.results.studies.optuna_study import Trial
from atma_sweep.results.studies.search import OPTION_KEY, Interval, LevelChoice, Search, search_as_json
from atma_sweep.results.studies.study_store import StudyWriter
from sqlalchemy import update

FIGURES = ("history", "slices", "contours", "parallel", "importance", "front")
RATE, DEPTH, KIND, DECAY = "train.muon_lr", "model.n_layers", "attn_type", "train.weight_decay"
SEARCH = Search(
    {
        RATE: Interval(0.003, 0.1, log=True),
        DEPTH: Interval(4, 16, step=4),
        KIND: LevelChoice(("polar", "nope", "rope")),
        DECAY: Interval(0.0, 0.2),
    },
    {"val.val_loss": "minimize"}, trials=40, pruner="asha",
)  # fmt: skip
TWO = replace(
    SEARCH, objectives={"val.val_loss": "minimize", "throughput.tokens_per_s": "maximize"}, sampler="nsga2", pruner=None
)
OWNER = Owner(name="ada", host="here", pid=1, started=0.0)
START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
SECONDS = 90
"""What the attempt of trial k takes, times k + 1."""


def drawn(search: Search, number: int) -> dict[str, Any]:
    """The settings of a trial at random, the same every time."""
    draw, values = random.Random(number), {}
    for path, parameter in search.ranges.items():
        if isinstance(parameter, LevelChoice):
            values[path] = draw.choice(parameter.levels)
        elif parameter.is_integer:
            values[path] = draw.randrange(int(parameter.low), int(parameter.high) + 1, int(parameter.step or 1))
        else:
            share = draw.random()
            values[path] = (
                parameter.low * (parameter.high / parameter.low) ** share
                if parameter.log
                else parameter.low + share * (parameter.high - parameter.low)
            )
    return values


def loss(params: dict[str, Any]) -> float:
    """Nats per token: nearly all of it is the rate, a little the mixer, and nothing the rest."""
    return (
        3 + 0.3 * math.log2(params[RATE] / 0.02) ** 2 + {"polar": 0.0, "nope": 0.05, "rope": 0.1}.get(params[KIND], 0)
    )


def joint_loss(params: dict[str, Any]) -> float:
    """Nats per token of a study whose settings act together: the best rate falls with the decay, and depends on the mixer."""
    rate, decay = math.log2(params[RATE] / 0.02), (params[DECAY] - 0.1) / 0.05
    best = {"polar": 0.0, "nope": -1.2, "rope": 1.2}[params[KIND]]
    return 3 + 0.12 * (rate - best) ** 2 + 0.12 * (rate + decay) ** 2


def speed(params: dict[str, Any]) -> float:
    """Tokens a second: less the deeper."""
    return 4e5 / params[DEPTH] * (1 if params[KIND] == "nope" else 0.9)


def trials_at_random(
    search: Search, count: int, *, ends: dict[int, str] | None = None, first_cell: int = 1
) -> list[Trial]:
    """So many trials; `ends` gives some of them another end than done. One that is pruned has a curve of two points."""
    trials = []
    for number in range(count):
        params, standing = drawn(search, number), (ends or {}).get(number, "done")
        values = (loss(params), speed(params))[: len(search.objectives)] if standing == "done" else None
        curve = ((1, loss(params) + 1), (2, loss(params) + 0.5)) if standing == "pruned" else ()
        trials.append(Trial(number, params, standing, values, curve, {}, f"{number + first_cell:012x}", None))  # type: ignore[arg-type]
    return trials


def record(store: Store, name: str, search: Search, trials: Sequence[Trial], *, gpus: int = 2) -> None:
    """Records the study: each trial's cell, an attempt of SECONDS x (its number + 1) unless it was only asked, and its end."""
    options = json.loads(json.dumps({OPTION_KEY: search_as_json(search)}))
    revision = NewRevision(grid_text="x", grid_file="x.yaml", options=options, cells=[])
    fence = store.acquire_sweep(name, OWNER, 3600.0, revision=revision)
    studies = StudyWriter(store, name, fence)
    recorded: set[str] = set()
    for trial in trials:
        studies.propose(trial, None if trial.cell is None else _cell(trial, gpus))
        if trial.cell is None or trial.cell in recorded or trial.standing == "asked":
            continue
        recorded.add(trial.cell)
        attempt = store.start_attempt(trial.cell, owner=OWNER, fence=fence)
        numbers = zip(search.objectives, trial.values or (), strict=False)
        DatabaseRecorder(store, attempt.id, fence).measurements(
            [Measurement(probe=n.partition(".")[0], metric=n.partition(".")[2], value=value) for n, value in numbers]
        )
        state: Any = {"pruned": "interrupted"}.get(trial.standing, trial.standing)
        store.finish_attempt(attempt.id, fence, state)
        _last(store, attempt.id, trial.number)
    store.release_sweep(name, fence)


def _cell(trial: Trial, gpus: int) -> CellRecord:
    axes = {path: str(value) for path, value in trial.params.items()}
    levels = dict(zip(AXES, (axes.get("attn_type", "polar"), "baseline", "off", "on", "off"), strict=True))
    config = {"resources": {"gpus": gpus, "cpus": 4}}
    assert trial.cell is not None
    return CellRecord(
        id=trial.cell, slug=f"trial-{trial.number}-s0", seed=0, levels=levels, config=config, axes=axes, tokens=10
    )


def _last(store: Store, attempt: int, number: int) -> None:
    ended = START + timedelta(seconds=SECONDS * (number + 1))

    def move(session: Any) -> None:
        times = {"started_at": START, "finished_at": ended, "heartbeat_at": ended}
        session.execute(update(AttemptRow).where(AttemptRow.id == attempt).values(**times))

    store.write(move)


ENDS = {4: "pruned", 7: "pruned", 9: "failed", 13: "pruned", 20: "diverged", 31: "pruned"}


def record_study(store: Store, name: str = "tuned") -> list[Trial]:
    """A study of one objective: forty trials, four pruned, one diverged, one failed, one not finished."""
    trials = trials_at_random(SEARCH, 40, ends=ENDS | {39: "asked"})
    record(store, name, SEARCH, trials)
    return trials


def joint(store: Store, name: str = "joint") -> list[Trial]:
    """A study of one objective whose settings act together (`joint_loss`), a hundred trials."""
    search = replace(SEARCH, trials=100, pruner=None)
    trials = [
        replace(trial, values=(joint_loss(trial.params),)) for trial in trials_at_random(search, 100, first_cell=5001)
    ]
    record(store, name, search, trials)
    return trials


def two(store: Store, name: str = "both") -> list[Trial]:
    """A study of two objectives, thirty trials."""
    trials = trials_at_random(TWO, 30, ends={5: "failed"}, first_cell=1001)
    record(store, name, TWO, trials)
    return trials
