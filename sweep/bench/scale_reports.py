"""What the reports of a large sweep take: seconds, processor and memory of the whole command, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

from ...results.store.store import Store
from .subprocess_usage import MIB, OURS, used

COMMANDS = {
    "the figure of training losses": ("report", "--figure", "loss", "--out", "loss.svg"),
    "the dashboard": ("report", "--dashboard", "dashboard.html"),
}


def reports(store: Store, folder: Path) -> list[tuple[str, float, str]]:
    """(what, value, unit) for the reports that read every point of every curve; their files are left in `folder`.

    Raises MachineError when one of them fails.
    """
    found = []
    for name, arguments in COMMANDS.items():
        took = used([*OURS, *arguments, "--db", str(store)], folder)
        found += [
            (f"{name}, with the start", took.wall, "s"),
            ("of which processor", took.processor, "s"),
            ("its memory", took.memory / MIB, "MiB"),
        ]
    return found
