"""atma-sweep: a YAML grid of sequence mixers goes in, the finished ablation appendix comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from .sweep.attempt.trained_cells import LoadedModel

__all__ = ["__version__", "load"]
__version__: str


def __getattr__(name: str) -> str:
    """Return `__version__`, the version of the installed package; "unknown" in a source tree that is not installed.

    Raises:
        AttributeError: The package has no attribute of that name.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only now, so that `import atma_sweep` loads nothing heavy.
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
    """The trained model of a cell, by id or slug, with or without its seed, or by the beginning of either, with its tokenizer and its config.

        trained = atma_sweep.load("polar-baseline-d0-m0-w0-s0")
        tokens_BT = torch.from_numpy(trained.tokenizer.encode("def main(").astype("int64"))[None]
        logits_BTV = trained.model(tokens_BT)

    `db` is a file or URL (else ATMA_DB, else atma.db here), `runs` the folder of artifacts (else `<db name>-runs` beside
    it), `sweep` where to look for the cell (else the sweep launched last, then every other). On `device` "cpu" the
    model computes in float32, on "cuda" in bfloat16. A model that was trained with a window keeps it in `model(...)`;
    probes measure `model.features(tokens_BT, full_context=True)`.

    Raises StoreMissing, SweepUnknown, CellUnknown, CellAmbiguous; NotTrained, WeightsGone, CellUnreadable,
    CheckpointError (damaged weights, or others than were kept), CorpusError (no prepared corpus in `runs`, which holds the tokenizer),
    MachineError (no usable GPU, or a place of weights that cannot be reached); TypeError (an argument of another type).
    """
    # Imported only now, so that `import atma_sweep` loads nothing heavy.
    from .sweep.attempt.trained_cells import load as load_cell

    return load_cell(cell, db=db, runs=runs, sweep=sweep, device=device)
