"""atma-sweep: a YAML grid of sequence mixers goes in, the finished ablation appendix comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from .sweep.attempt.trained_cells import LoadedModel

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def load(
    cell: str,
    *,
    db: str | Path | None = None,
    runs: str | Path | None = None,
    sweep: str | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Return the trained model of a cell, with its tokenizer and config.

    Example::

        trained = atma_sweep.load("polar-baseline-d0-m0-w0-s0")
        tokens_BT = torch.from_numpy(trained.tokenizer.encode("def main(").astype("int64"))[None]
        logits_BTV = trained.model(tokens_BT)

    A model that was trained with a window keeps it in `model(...)`; probes measure
    `model.features(tokens_BT, full_context=True)`.

    Args:
        cell: Id or slug of the cell, with or without its seed, or the beginning of either.
        db: File or URL of the database; by default ATMA_DB, else atma.db in this folder.
        runs: Folder of artifacts; by default `NAME-runs` next to the database NAME.db.
        sweep: Sweep in which to look for the cell; by default the sweep launched last, then all others.
        device: "cpu" computes in float32, "cuda" in bfloat16.

    Raises:
        StoreMissing, SweepUnknown, CellUnknown, CellAmbiguous: The database, sweep or cell cannot be identified.
        NotTrained, WeightsGone, CellUnreadable: The cell has no usable weights.
        CheckpointError: The weights are damaged, or are not those that were stored.
        CorpusError: `runs` has no prepared corpus, which holds the tokenizer.
        MachineError: There is no usable GPU, or the weights cannot be reached.
        TypeError: An argument has another type.
    """
    # Imported only now, so that `import atma_sweep` loads nothing heavy.
    from .sweep.attempt.trained_cells import load as load_cell

    return load_cell(cell, db=db, runs=runs, sweep=sweep, device=device)
