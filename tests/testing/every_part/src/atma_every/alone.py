"""An executor."""

from atma_sweep.sweep.executors.executor import LocalExecutor


class AloneExecutor(LocalExecutor):
    """Executor `local` for a single attempt at a time."""

    name = "alone"

    def fits(self, resources):
        """Return True if an attempt with these resources may start now."""
        return not self._running and super().fits(resources)
