"""Whether the cells of a plan fit on the machines that there are."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import MachineError
from ..grid.cell import Cell
from ..machine.allocation import Machine, Room, need
from ..machine.hardware import Gpu


def check(cells: Sequence[Cell], *machines: Machine, held: Sequence[Gpu] = ()) -> None:
    """Refuses cells that fit on none of the machines even while nothing else runs there; `held`: GPUs that another sweep has.

    Raises MachineError naming the need and what there is.
    """
    rooms = [Room(machine) for machine in machines]
    never = [cell for cell in cells if all(room.place(cell.config.resources) is None for room in rooms)]
    if not never:
        return
    more = f" (and {len(never) - 1} more cells)" if len(never) > 1 else ""
    others = f"; another sweep holds {', '.join(gpu.name for gpu in held)}" if held else ""
    have = (
        f"this machine has {machines[0]}" if len(machines) == 1 else f"the nodes have {'; '.join(map(str, machines))}"
    )
    raise MachineError(
        f"cell {never[0].slug}{more} needs {need(never[0].config.resources)}, and {have}{others}; "
        "change resources in the grid, or launch where there is more"
    )
