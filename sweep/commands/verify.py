"""Whether what lies under the runs folder is what its names say: frozen code, plugins and prepared text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...results.console.output_files import sha256
from ...results.derived import Derived
from ...results.maintenance import check as maintenance
from ...results.maintenance.finding import SEVERITIES, Finding
from ..config import CellConfig
from ..data import corpora
from ..executors import source_snapshot
from ..external_models import config as openweight
from ..grid.cell import five_levels, possible_ids
from ..grid.settings import levels_of, synonyms_of


def identify(config: Any, claimed: str) -> str:
    """The id of a cell's config: `claimed`, if that can be it. Raises what pydantic and the registries raise.

    No plugin is loaded for it.
    """
    found = ""
    if openweight.KEY in config:
        return openweight.stored_open_weight_id(config)
    for found in possible_ids(CellConfig.model_validate(config)):
        if found == claimed:
            break
    return found


def derive(config: Mapping[str, Any]) -> Derived:
    """Return the columns of a cell that follow from its config. Raises what pydantic and the registries raise."""
    if openweight.KEY in config:
        return Derived(columns={"seed": config["seed"], **openweight.levels_of_stored(config)})
    read = CellConfig.model_validate(config)
    levels = levels_of(read)
    columns = {"seed": read.seed, **levels, "tokens_total": read.train.steps * read.train.batch_tokens}
    synonyms = {axis: synonyms_of(axis, level) for axis, level in levels.items()}
    return Derived(columns=columns, synonyms=synonyms, slug_start=f"{five_levels(read)}-", slug_end=f"-s{read.seed}")


def check(
    db: str | None, runs: Path, *, weights: bool = True, tell: Callable[[str], None] = lambda line: None
) -> list[Finding]:
    """Return everything that is wrong with a database and with the files of its runs folder, worst first.

    `weights` and `tell` are those of maintenance.check.check.
    """
    found = maintenance.check(db, runs=runs, identify=identify, derive=derive, weights=weights, tell=tell)
    found += differing(runs)
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def differing(runs: Path) -> Iterator[Finding]:
    """Files whose content is not what their name, or the manifest beside them, says."""
    for home in sorted((runs / "source").glob("*")):
        if source_snapshot.is_fingerprint(home.name) and not source_snapshot.is_intact(home):
            yield Finding.error(
                f"{home} does not hold the code that its name stands for", "remove it; the next launch makes another"
            )
    for copy in sorted((runs / "plugins").glob("*.py")):
        if copy.is_symlink() or not sha256(copy).startswith(copy.name.partition("_")[0]):
            yield Finding.error(
                f"{copy} is not the plugin that its name stands for", "remove it, and launch its grid again"
            )
    for folder in corpora.folders(runs / "corpora"):
        for line in corpora.verify(folder):
            what, _, remedy = line.rpartition("; ")
            yield Finding.error(what, remedy)
