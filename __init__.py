"""atma-sweep: a YAML grid of sequence mixers goes in, the finished ablation appendix comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .api import Sweep
    from .sweep.attempt.trained_cells import LoadedModel

__all__ = ["Sweep", "__version__", "load"]
__version__: str


def __getattr__(name: str) -> Any:
    """Return `Sweep`, or `__version__`, the version of the installed package ("unknown" in an uninstalled source tree).

    They are imported only now, so that `import atma_sweep` loads nothing.

    Raises:
        AttributeError: The package has no attribute of that name.
    """
    if name == "Sweep":
        from .api import Sweep

        return Sweep
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("atma-sweep")
    except PackageNotFoundError:
        return "unknown"


def load(
    cell: str,
    *,
    db: str | Path | None = None,
    runs: str | Path | None = None,
    sweep: str | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Return the trained model of a cell with its tokenizer and config.

        trained = atma_sweep.load("polar-baseline-d0-m1-w0-s0")
        tokens_BT = torch.from_numpy(trained.tokenizer.encode("def main(").astype("int64"))[None]
        logits_BTV = trained.model(tokens_BT)

    A model that was trained with a window keeps it in `model(...)`; probes measure
    `model.features(tokens_BT, full_context=True)`.

    Args:
        cell: Id or slug of the cell, with or without its seed, or the beginning of either.
        db: Database file or URL; None: that of ATMA_DB, else atma.db in the working folder.
        runs: Folder of checkpoints and weights; None: `<db name>-runs` beside the database.
        sweep: Sweep to look in; None: the one launched last, then every other.
        device: "cpu" (float32) or "cuda" (bfloat16).

    Raises:
        StoreMissing, SweepUnknown, CellUnknown, CellAmbiguous: There is no such cell, or there are several.
        NotTrained, WeightsGone, CellUnreadable: The cell has no weights, or its config cannot be restored.
        CheckpointError: The weights are damaged, or others than were recorded.
        CorpusError: `runs` lacks the prepared corpus, which holds the tokenizer.
        MachineError: There is no usable GPU, or the location of the weights cannot be reached.
        TypeError: An argument has another type.
    """
    # Imported only now, so that `import atma_sweep` loads nothing heavy.
    from .sweep.attempt.trained_cells import load as load_cell

    return load_cell(cell, db=db, runs=runs, sweep=sweep, device=device)
