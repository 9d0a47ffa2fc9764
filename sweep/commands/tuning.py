"""The studies that a grid asks for before its factorial, launched one after the other."""

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

Stay = Callable[[LaunchRequest, Store, Console], LaunchOutcome]


def plan_studies(request: LaunchRequest, store: Store | None) -> tuple[LaunchRequest, Tuning | None, list[str]]:
    """The request with the cells that the studies so far lead to, the studies, and a line on each."""
    found = tuning_of(request.grid, request.runs / "corpora", store, dry=True)
    if found is None:
        return request, None, []
    told = [f"tune: {progress.space.grid.name}: {progress.describe()}" for progress in found.parts.values()]
    if not found.finished:
        told.append(
            "tune: the ids of the factorial's cells are provisional; they follow from the best trial of each study"
        )
    cells, _ = admission.expand_grid(found.settled, request.runs / "corpora", dry=True)
    return replace(request, grid=found.settled, cells=cells), found, told


def first_launches(request: LaunchRequest, studies: Tuning | None) -> list[LaunchRequest]:
    """What a launch would begin with: the studies that are not finished, else the request itself."""
    parts = studies.parts.values() if studies is not None else ()
    return [_study(request, progress) for progress in parts if not progress.finished] or [request]


def _study(request: LaunchRequest, progress: StudyProgress) -> LaunchRequest:
    """The launch of one of the studies."""
    space = progress.space
    return replace(request, grid=space.grid, cells=[], space=space, only=(), budget=None, notify=None)


def run_studies(request: LaunchRequest, store: Store, console: Console, stay: Stay) -> LaunchRequest | None:
    """The request with the best of every study, each launched until it is finished; None when one could not be.

    Raises SweepError for a study whose trials are all made and none of them done.
    """
    root = request.runs / "corpora"
    found = tuning_of(request.grid, root, store)
    if found is None:
        return request
    for progress in found.parts.values():
        if not progress.finished:
            part = _study(request, progress)
            if not stay(part, store, console).finished:
                console.print(f"{part.grid.name} is not finished, so that {request.grid.name} cannot begin; launch again", highlight=False, markup=False)  # fmt: skip
                return None
    found = tuning_of(request.grid, root, store)
    assert found is not None
    for word in found.parts.keys() - found.best.keys():
        name = found.parts[word].space.grid.name
        raise SweepError(f"no trial of {name} was measured, so that there is no best setting; widen or mend tune.ranges under another name")  # fmt: skip
    for word, progress in found.parts.items():
        console.print(f"tuned {word}: {progress.best()[0].removeprefix('best: ')}", highlight=False, markup=False)
    cells, _ = admission.expand_grid(found.settled, root)
    return replace(request, grid=found.settled, cells=cells, options={tuning.OPTION: found.as_option(store)})
