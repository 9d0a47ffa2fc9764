"""Which machine a launch is priced on, and what the database and a calibration know of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...results.store.records import Timed
from ...results.store.store import Store
from ..grid.cell import Cell
from ..host import hardware
from ..host.allocation import is_type
from ..training.flops import PEAK_BF16
from . import calibration
from .cost_estimate import Prices
from .speed_model import Place, Speeds

ASSUMED_GPU = "NVIDIA H200"


def prices(cells: Sequence[Cell], runs: Path, store: Store | None, *, gpu: str | None = None) -> Prices:
    """Prices of these cells on `gpu`, a GPU's name or a word of it; without it on what the cells or this machine say."""
    timed = store.timed() if store is not None else []
    return Prices(Speeds(_place(cells, timed, gpu), timed, calibration.read(runs)))


def gpus_here() -> int:
    """GPUs of this machine, at least 1: whoever has none plans for another machine."""
    return max(1, len(hardware.driver_gpus()))


def _place(cells: Sequence[Cell], timed: Sequence[Timed], gpu: str | None) -> Place:
    resources = {id(cell.config.resources): cell.config.resources for cell in cells}.values()
    if not any(one.gpus for one in resources):
        return Place(None)
    if gpu is not None:
        return Place(_whole_name(gpu, timed))
    here = hardware.driver_gpus()
    word = next((one.gpu_type for one in resources if one.gpu_type is not None), None)
    if word is not None:
        return Place(next((name for name in here if is_type(name, word)), None) or _whole_name(word, timed))
    if here:
        return Place(here[0])
    measured = next((one.gpu_name for one in reversed(timed) if one.gpu_name is not None), None)
    if measured is not None:
        return Place(measured, "as the attempts in the database; --gpu names another")
    return Place(ASSUMED_GPU, "assumed; --gpu names another")


def _whole_name(word: str, timed: Sequence[Timed]) -> str:
    """The name of a GPU as its driver has it: of one that was measured, else of one whose peak is known, else the word."""
    known = [one.gpu_name.removeprefix("NVIDIA ") for one in reversed(timed) if one.gpu_name is not None]
    known += [name for peak in PEAK_BF16 for name in peak.names]
    short = word.removeprefix("NVIDIA ")
    exact = next((name for name in known if name.lower() == short.lower()), None)
    return exact or next((name for name in known if is_type(name, short)), None) or short
