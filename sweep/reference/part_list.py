"""`atma-sweep parts`: every mixer, memory and layer of flash-linear-attention, and what this machine can do with it.

Imports torch only for the parts of plugins.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ...model.block_parts.fla_catalogue import (
    LENGTH_LIMITS,
    NEEDS_FLASH_ATTN,
    PREFIX,
    fla_layer,
    fla_names,
    fla_version,
)
from ...model.block_parts.fla_costs import cost_of, state_bytes
from ...results.console.command_line import AsJson, print_result
from ...results.console.quantities import format_bytes
from ...results.console.terminal_table import table_lines

OWN_PARTS = Path(__file__).with_name("own_parts.csv")
"""Facts of the package's own parts; part_facts.py measures them."""
WIDTH = 1024
"""Width of the 370M network."""
HEADINGS = ("part", "kind", "trains here", "decodes here", "longest text", "FLOPs", "state", "cache per token")


class PartEntry(NamedTuple):
    """Part of the list."""

    name: str
    kind: str
    """Mixer, memory or block part."""
    trains: bool
    """True if it trains on this machine."""
    decodes: bool
    """True if it decodes token by token on this machine."""
    reason: str | None
    """Reason why it does not train or decode here; None if it does both."""
    length_limit: int | None
    """Most tokens of a sequence; None for no limit."""
    flops: str | None
    """Formula, or "projections" if only these are counted, by torch's FLOP counter; None if unknown."""
    state_bytes: int | None
    """Bytes per sequence in one layer of the 370M network, whatever its length; None if unknown."""
    token_bytes: int | None
    """Further bytes per token; None if unknown."""

    def texts(self) -> tuple[str, ...]:
        """Return the entries of the list's row, in the order of HEADINGS."""
        yes = {True: "yes", False: "no"}
        state = "n/a" if self.state_bytes is None else format_bytes(self.state_bytes)
        token = "n/a" if self.token_bytes is None else format_bytes(self.token_bytes)
        limit = "any" if self.length_limit is None else f"{self.length_limit:,}"
        runs = (yes[self.trains], yes[self.decodes])
        return self.name, self.kind, *runs, limit, self.flops or "n/a", state, token


def parts(
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin",
            metavar="FILE",
            help="Plugin file whose mixers and memories are listed too, after a check of each; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List every mixer, memory and layer of flash-linear-attention: where it runs, and the size of its state.

    The state is what decoding stores per sequence in one global layer of the 370M network: bytes of a fixed size, and
    bytes per token of the text. A layer of flash-linear-attention needs a GPU; a launch tries it there first.
    Parts of --plugin must run in bfloat16, see no later token, and decode to the outputs of their forward pass.

    \b
    Example:
      atma-sweep parts
      atma-sweep parts --json
    """
    from ...results.console.streams import terminal_width

    no_gpu = _no_gpu_reason()
    entries = [*own_entries(), *_plugin_entries(plugin or ()), *fla_entries(no_gpu)]
    lines = table_lines(HEADINGS, [entry.texts() for entry in entries], len(HEADINGS) - 2, terminal_width(sys.stdout))
    reasons = dict.fromkeys(entry.reason for entry in entries if entry.reason not in (None, no_gpu))
    lines += [f"{', '.join(e.name for e in entries if e.reason == reason)}: {reason}" for reason in reasons]
    version = fla_version()
    lines.append("flash-linear-attention is not installed" if version is None else f"flash-linear-attention {version}")
    if version is not None and no_gpu is not None:
        lines[-1] += f": its layers need what this machine lacks; {no_gpu}"
    print_result([entry._asdict() for entry in entries], lines, as_json=as_json)


def own_entries() -> Iterator[PartEntry]:
    """Yield the package's own mixers and memories, in the order of own_parts.csv."""
    with OWN_PARTS.open(encoding="utf-8", newline="") as file:
        yield from map(_own_entry, csv.DictReader(file))


def _own_entry(row: dict[str, str]) -> PartEntry:
    """Return the entry of a row of own_parts.csv; its FLOPs have a formula."""
    decodes = row["decodes"] == "yes"
    sizes = [int(row[name]) if row[name] else None for name in ("state_bytes", "token_bytes")]
    reason = None if decodes else "recomputes the text for each new token"
    return PartEntry(row["name"], row["kind"], True, decodes, reason, None, "formula", *sizes)


def _plugin_entries(files: Sequence[Path]) -> Iterator[PartEntry]:
    """Yield the mixers and memories that plugin files register.

    Raises:
        GridError: A file cannot be loaded, or a part of it fails in bfloat16, sees later tokens, or decodes to other
            outputs.
    """
    if not files:
        return
    from ...model.registry import MEMORIES, MIXERS
    from ..attempt.failures import user_frame
    from ..errors import GridError
    from ..grid.plugins import cause_of, load_plugins
    from .part_facts import contract_problem, part_row

    load_plugins(files)
    for kind, registry in (("mixer", MIXERS), ("memory", MEMORIES)):
        for name in registry:
            if registry.owner(name) is not None:
                has_formula = "forward_flops" in vars(registry.load(name))
                try:
                    row, problem = part_row(kind, name), contract_problem(kind, name)
                except Exception as error:
                    at = user_frame(error)
                    problem = f"fails on a text of 128 tokens: {cause_of(error)}{f' ({at})' if at else ''}"
                    raise GridError("--plugin", None, f"{kind} {name}", problem) from error
                if problem is not None:
                    raise GridError("--plugin", None, f"{kind} {name}", problem)
                yield _own_entry(row)._replace(flops="formula" if has_formula else None)


def _no_gpu_reason() -> str | None:
    """Return why no layer of flash-linear-attention runs on this machine; None if there is a GPU, and Triton."""
    from ..host import hardware

    if not hardware.gpu_names():
        return "a GPU that can be used is missing"
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"


def fla_entries(no_gpu: str | None) -> Iterator[PartEntry]:
    """Yield every layer class of the installed flash-linear-attention; none if it is not installed.

    Args:
        no_gpu: Reason why none of them runs here; None if they may.
    """
    for name in fla_names():
        layer = fla_layer(name)
        settings: dict[str, Any] = {key: argument.default for key, argument in layer.arguments.items()}
        sizes = state_bytes(name, settings, WIDTH) if layer.refusal is None else None
        cost = cost_of(name, settings, WIDTH)
        lacks_flash = name in NEEDS_FLASH_ATTN and importlib.util.find_spec("flash_attn") is None
        reason = layer.refusal or no_gpu or ("needs flash-attn, which is not installed" if lacks_flash else None)
        if reason is None and not layer.decodes:
            reason = "recomputes the text for each new token"
        trains = reason is None or (not layer.decodes and no_gpu is None and not lacks_flash and layer.refusal is None)
        yield PartEntry(
            f"{PREFIX}:{name}", "block part", trains, trains and layer.decodes, reason, LENGTH_LIMITS.get(name),
            None if layer.refusal else "formula" if cost is not None else "projections",
            *((None, None) if sizes is None or not layer.decodes else sizes),
        )  # fmt: skip
