"""Control commands for a running sweep: pause, resume, finish, cancel and retry. Each is idempotent."""

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


def current_user() -> str:
    """Return "USER on HOST" for this process; a user id without a name is called "unknown user"."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown user"  # a user id without a name, as in a container
    return f"{user} on {socket.gethostname()}"


@dataclass(frozen=True)
class ControlResult:
    """Result of a control command; `asdict` of it is the command's JSON output."""

    sweep: str
    asked: ControlCommand
    """The command that was sent."""
    running: bool
    """True if a live supervisor runs the sweep, so that the command was stored for it."""
    cells: tuple[str, ...] = ()
    """Ids of the failed cells that are to be tried again; only for `retry`."""

    @property
    def message(self) -> str:
        """The result as one sentence for people; for `retry` it lists the cells' ids."""
        if not self.running:
            more = {"retry": "; launch its grid again to retry failed cells", "resume": "; launch its grid again"}
            return f"sweep {self.sweep} is not running, so there is nothing to {self.asked}{more.get(self.asked, '')}"
        return {
            "pause": f"sweep {self.sweep} saves its cells and pauses; atma-sweep resume continues it",
            "resume": f"sweep {self.sweep} continues",
            "finish": f"sweep {self.sweep} starts no more cells and stops when its running cells have finished",
            "cancel": f"sweep {self.sweep} saves its cells and stops",
            "retry": f"sweep {self.sweep} retries: {', '.join(self.cells) or 'none, since no such cell has failed'}",
        }[self.asked]


def send_command(
    store: Store, command: ControlCommand, sweep: str | None = None, cells: Sequence[str] = ()
) -> ControlResult:
    """Store a control command in the database for the sweep's supervisor, which polls for it about once a second.

    Returns at once, before the supervisor acts. Nothing is stored when no live supervisor runs the sweep; that is no
    error. The first pause, finish or cancel is also recorded as an event with the user's name. `resume` withdraws both
    pause and finish. Retries are added to those that are pending.

    Args:
        store: Database with the sweep.
        command: Command to send.
        sweep: Name of the sweep; None for the sweep launched last.
        cells: For `retry` only: cells by slug or id, as `Store.find_cell` takes them; empty for every failed cell.
            Cells that have not failed are ignored.

    Returns:
        The sweep's name, the command, True if a supervisor will carry it out, and the sorted ids of the failed cells to
        retry (empty for other commands).

    Raises:
        SweepUnknown: There is no such sweep.
        CellUnknown: There is no such cell.
        CellAmbiguous: A cell name fits several cells.
        SweepError: `cells` were passed with a command other than `retry`.
    """
    if cells and command != "retry":
        raise SweepError(f"{command} applies to a whole sweep; leave the cells out")
    name = sweep or store.default_sweep()
    summary = store.sweep(name)
    retried: tuple[str, ...] = ()
    if command == "retry":
        failed = {state.cell_id for state in store.cell_states(name) if state.state == "failed"}
        requested = {store.find_cell(cell, name).id for cell in cells} if cells else failed
        retried = tuple(sorted(requested & failed))
    running = summary.owner is not None and processes.is_holder_active(summary.owner, summary.lease_until)
    if running:
        if command == "retry":
            store.request_actions(name, retry=retried)
        elif command == "resume":
            store.request_actions(name, pause=None, finish=None)
        else:
            if not store.pending_requests(name).get(command):
                store.add_event(f"{command} asked", f"by {current_user()}", sweep=name)
            store.request_actions(name, **{command: True})
    return ControlResult(name, command, running, retried)
