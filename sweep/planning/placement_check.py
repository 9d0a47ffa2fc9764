"""Whether the cells of a plan fit on the machines that there are."""

from __future__ import annotations

from collections.abc import Sequence

from ...results.console.text import counted
from ..errors import MachineError, SweepError
from ..grid.cell import Cell
from ..host.allocation import Machine, Room, is_type, need
from ..host.hardware import PRECISIONS, Gpu


def check(cells: Sequence[Cell], *machines: Machine, held: Sequence[Gpu] = ()) -> None:
    """Refuses cells that fit on none of the machines even while nothing else runs there; `held`: GPUs that another sweep has.

    Raises MachineError naming the need and what there is, SweepError for a precision that a GPU does not have.
    """
    _check_precisions(cells, [gpu for machine in machines for gpu in machine.gpus])
    rooms = [Room(machine) for machine in machines]
    never = [cell for cell in cells if all(room.place(cell.config.resources) is None for room in rooms)]
    if not never:
        return
    more = f" (and {counted(len(never) - 1, 'more cell')})" if len(never) > 1 else ""
    others = f"; another sweep holds {', '.join(gpu.name for gpu in held)}" if held else ""
    have = (
        f"this machine has {machines[0]}" if len(machines) == 1 else f"the nodes have {'; '.join(map(str, machines))}"
    )
    raise MachineError(
        f"cell {never[0].slug}{more} needs {need(never[0].config.resources)}, and {have}{others}; "
        "change resources in the grid, or launch where there is more"
    )


def _check_precisions(cells: Sequence[Cell], gpus: Sequence[Gpu]) -> None:
    """Refuses fp8 where an attempt might be given a GPU without it. bf16 runs everywhere, slower before 8.0."""
    major, minor = least = PRECISIONS["fp8"]
    for cell in cells:
        resources = cell.config.resources
        if cell.config.train.precision != "fp8" or not resources.gpus:
            continue
        for gpu in gpus:
            if gpu.capability is not None and gpu.capability < least and is_type(gpu.name, resources.gpu_type):
                has = ".".join(map(str, gpu.capability))
                raise SweepError(
                    f"cell {cell.slug}: train.precision is fp8, which needs compute capability {major}.{minor} (Ada, "
                    f"Hopper and later), and {gpu.name} has {has}; set train.precision to bf16, or resources.gpu_type "
                    "to a GPU that has it"
                )
