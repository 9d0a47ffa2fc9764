"""Address of the folder that holds an attempt's checkpoints and weights."""

from __future__ import annotations

from ...results.store.records import Attempt
from ...results.store.store import Store
from . import storage


def checkpoint_address(store: Store, attempt: Attempt) -> str:
    """Return the address of the folder that holds an attempt's checkpoints and weights.

    It is that of the recorded weights, else of the recorded checkpoint. Without both it follows from `checkpoint.path`
    of the stored config, or is the attempt's own folder. Of an imported attempt, whose files came with its bundle, it
    is that of the recorded weights, else the attempt's own folder. The result is relative to the runs folder, or
    absolute or a URL where the launch of the attempt set `checkpoint.path`.
    """
    if attempt.imported:
        # its files came with the bundle; the storage locations of its original machine do not apply
        return storage.split(attempt.weights)[0] if attempt.weights else attempt.run_dir
    for address in (attempt.weights, attempt.checkpoint):
        if address is not None:
            return storage.split(address)[0]
    provenance = store.provenance(attempt.id)
    path = provenance.config.get("checkpoint", {}).get("path") if provenance is not None else None
    return storage.attempt_address(path, attempt.run_dir)
