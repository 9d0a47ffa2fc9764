"""What people ask of a running sweep: to pause, to go on, to finish, to stop, to try failed cells again. Safe to ask twice."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...results.store.store import Store
from ..errors import SweepError
from ..host import processes

ControlCommand = Literal["pause", "resume", "finish", "cancel", "retry"]


def person() -> str:
    """Who runs this command, and where."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # a user id without a name, as in a container
    return f"{user} on {socket.gethostname()}"


@dataclass(frozen=True)
class ControlResult:
    """What came of it."""

    sweep: str
    asked: ControlCommand
    running: bool
    """Whether anybody runs the sweep, and so does what is asked."""
    cells: tuple[str, ...] = ()
    """Cells that are to be tried again, by id."""

    @property
    def text(self) -> str:
        """The answer as one line."""
        if not self.running:
            more = {"retry": "; launch its grid again, which tries failed cells", "resume": "; launch its grid again"}
            return f"nobody runs sweep {self.sweep}, so there is nothing to {self.asked}{more.get(self.asked, '')}"
        return {
            "pause": f"sweep {self.sweep} saves its cells and waits; atma-sweep resume lets it go on",
            "resume": f"sweep {self.sweep} goes on",
            "finish": f"sweep {self.sweep} starts nothing more and stops when its running cells have ended",
            "cancel": f"sweep {self.sweep} saves its cells and stops",
            "retry": f"sweep {self.sweep} tries again: {', '.join(self.cells) or 'nothing, no such cell has failed'}",
        }[self.asked]


def send_command(
    store: Store, wish: ControlCommand, sweep: str | None = None, cells: Sequence[str] = ()
) -> ControlResult:
    """Asks it of whoever runs the sweep (None: the one launched last), who hears it within seconds.

    `retry` takes cells as `Store.find_cell` does, none for every failed cell. Raises SweepUnknown, CellUnknown, CellAmbiguous, and
    SweepError for cells beside another wish than retry.
    """
    if cells and wish != "retry":
        raise SweepError(f"{wish} takes a whole sweep, not cells")
    name = sweep or store.default_sweep()
    found = store.sweep(name)
    chosen: tuple[str, ...] = ()
    if wish == "retry":
        failed = {state.cell_id for state in store.cell_states(name) if state.state == "failed"}
        wanted = {store.find_cell(cell, name).id for cell in cells} if cells else failed
        chosen = tuple(sorted(wanted & failed))
    running = found.owner is not None and processes.holds(found.owner, found.lease_until)
    if running:
        if wish == "retry":
            store.ask(name, retry=chosen)
        elif wish == "resume":
            store.ask(name, pause=None, finish=None)
        else:
            if not store.asked(name).get(wish):
                store.add_event(f"{wish} asked", f"by {person()}", sweep=name)
            store.ask(name, **{wish: True})
    return ControlResult(name, wish, running, chosen)
