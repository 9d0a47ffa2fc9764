"""Studies that a grid's `tune` section requires before its factorial, launched one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from ...results.store.store import Store
from ...results.studies import tuning
from ..errors import SweepError
from ..orchestrator.launch import LaunchOutcome, LaunchRequest
from ..planning import admission
from ..planning.studies import StudyProgress
from ..planning.tuning import Tuning, tuning_of

NOT_LIMITED = "tune: --budget limits the factorial alone; fewer trials, or less train.tokens, make the studies cheaper"
"""Remark on a launch with a budget whose studies are not finished."""

LaunchFunction = Callable[[LaunchRequest, Store, Console], LaunchOutcome]
"""Function that launches a request in the foreground and returns the outcome."""


def plan_studies(request: LaunchRequest, store: Store | None) -> tuple[LaunchRequest, Tuning | None, list[str]]:
    """Return the request with cells at the best settings so far, the studies, and lines on them. Writes nothing.

    Without a `tune` section the request is unchanged, the studies are None, and there are no lines. Cells have
    provisional ids until all studies are finished.
    """
    studies = tuning_of(request.grid, request.runs / "corpora", store, dry=True)
    if studies is None:
        return request, None, []
    lines = [f"tune: {progress.space.grid.name}: {progress.describe()}" for progress in studies.studies.values()]
    if not studies.finished:
        lines += [NOT_LIMITED] if request.budget is not None else []
        lines.append(
            "tune: the ids of the factorial's cells are provisional; they depend on the best trial of each study"
        )
    cells, _ = admission.expand_grid(studies.tuned_grid, request.runs / "corpora", dry=True)
    return replace(request, grid=studies.tuned_grid, cells=cells), studies, lines


def first_launches(request: LaunchRequest, studies: Tuning | None) -> list[LaunchRequest]:
    """Return the launches that come first: one per unfinished study, or the request itself if there is none.

    Args:
        request: Launch of the grid.
        studies: Studies of its `tune` section; None without one.
    """
    parts = studies.studies.values() if studies is not None else ()
    return [_study_request(request, progress) for progress in parts if not progress.finished] or [request]


def _study_request(request: LaunchRequest, progress: StudyProgress) -> LaunchRequest:
    """Return the request that launches one study, without selection, budget and notification."""
    space = progress.space
    return replace(request, grid=space.grid, cells=[], space=space, only=(), budget=None, notify=None)


def run_studies(
    request: LaunchRequest, store: Store, console: Console, launch_function: LaunchFunction
) -> LaunchRequest | None:
    """Launch every unfinished study, one by one, and return the request with the best settings.

    None, after a line of output, if a study was not finished; later studies are then not launched. Prints the best
    trial of each study. Without a `tune` section the request is returned unchanged.

    Args:
        request: Launch of the grid.
        store: Database.
        console: Console for output.
        launch_function: Launches one study in the foreground.

    Raises:
        SweepError: No trial of a finished study was measured.
    """
    root = request.runs / "corpora"
    studies = tuning_of(request.grid, root, store)
    if studies is None:
        return request
    if request.budget is not None and not studies.finished:
        console.print(NOT_LIMITED, highlight=False, markup=False)
    for progress in studies.studies.values():
        if not progress.finished:
            study_request = _study_request(request, progress)
            if not launch_function(study_request, store, console).finished:
                console.print(f"study {study_request.grid.name} is not finished, and {request.grid.name} starts after it; launch again to continue", highlight=False, markup=False)  # fmt: skip
                return None
    studies = tuning_of(request.grid, root, store)
    assert studies is not None
    for word in studies.studies.keys() - studies.best.keys():
        name = studies.studies[word].space.grid.name
        raise SweepError(f"no trial of study {name} was completed with a value of the objective, so there is no best setting; correct or widen tune.ranges and launch under another name (--name)")  # fmt: skip
    for word, progress in studies.studies.items():
        console.print(f"tuned {word}: {progress.best()[0].removeprefix('best: ')}", highlight=False, markup=False)
    cells, _ = admission.expand_grid(studies.tuned_grid, root)
    return replace(request, grid=studies.tuned_grid, cells=cells, options={tuning.OPTION_KEY: studies.as_option(store)})
