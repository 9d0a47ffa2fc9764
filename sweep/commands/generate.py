"""Command `atma-sweep generate`: a trained cell continues a prompt."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ...model.bounds import MAX_FLOAT, MAX_INT64, MAX_WRITTEN
from ...results.console.command_line import AsJson, Db, Documented, Runs, print_json
from ...results.console.text import echo_text
from ...results.weights import NO_HASH
from .options import CellName, NamedSweep


@Documented
def generate(
    cell: CellName,
    prompt: str = "",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_WRITTEN)] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=MAX_FLOAT)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, max=MAX_INT64)] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(min=-MAX_INT64, max=MAX_INT64)] = 0,
    full_context: bool = False,
    fp8: bool = False,
    device: Literal["cpu", "cuda"] | None = None,
    sweep: NamedSweep = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write text with a trained cell, from its kept weights. The same options give the same text on the same machine.

    The prompt and the generated text go to standard output as they are written.

    \b
    Example:
      atma-sweep generate polar-baseline-d0-m1-w0-s0 --prompt "def "

    Args:
        cell (CELL): Trained cell {BY_NAME}.
        prompt (TEXT): Beginning of the text.
        tokens (N): Maximum number of tokens to write; the end of a text stops earlier.
        temperature (X): Sampling temperature: below 1 more predictable, above 1 more random, 0 always the most likely token.
        top_k (K): Sample from the K most likely tokens; 0: from all.
        top_p (P): Sample from the smallest set of tokens whose total probability is at least P.
        seed (N): Seed of the sampling.
        full_context: Ignore the attention window that the cell was trained with, as probes do.
        fp8: Cache keys and values in 8 bits, which wall can; approximate.
        device (cpu|cuda): Device to use; default: the GPU, if there is one.
        sweep (NAME): Sweep to look in; default: the one launched last, then all.
    """
    from ..attempt.generation import SamplingError
    from ..attempt.trained_cells import load

    target_device = device or _default_device()
    if not 0 < top_p <= 1:
        raise SamplingError(f"--top-p must be above 0 and at most 1, got {top_p:g}")
    trained = load(cell, db=db, runs=runs, sweep=sweep, device=target_device)
    options = {
        "tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "full_context": full_context, "fp8": fp8,
    }  # fmt: skip
    pieces = trained.generate(prompt, **options)  # type: ignore[arg-type]
    if trained.weights_sha256 is None:
        echo_text(f"the weights of {trained.slug} were not compared with a hash ({NO_HASH})", err=True)
    reason = trained.model.no_step_reason()
    if reason is not None:
        echo_text(f"{reason} cannot decode token by token: every new token recomputes the whole text (slow)", err=True)
    if as_json:
        fields = {"cell": trained.cell, "slug": trained.slug, "device": target_device, "prompt": prompt, **options}
        print_json({**fields, "text": "".join(pieces)})
        return
    echo_text(prompt, nl=False)
    for piece in pieces:
        echo_text(piece, nl=False)
    echo_text("")


def _default_device() -> str:
    """Return "cuda" if torch can use a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
