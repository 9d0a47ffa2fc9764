"""The agent of a node as an actor. The module keeps this name, since frozen copies of older code have the agent here."""

from __future__ import annotations

import os
import threading
import time

from ..host import processes
from .node_agent import Node

CLOSE_S = processes.GRACE_S + 5.0


class Agent(Node):
    """A Node as an actor: looks after its lease by itself and ends its process when that is over."""

    def __init__(self, lease: float) -> None:
        super().__init__(lease=lease)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.tick():
            time.sleep(0.2)
        # whoever polls still hears that it is over; with the driver gone, Ray ends this process anyway
        time.sleep(CLOSE_S)
        os._exit(0)
