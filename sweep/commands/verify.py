"""Verification of the runs folder: code snapshots, plugin copies and corpora must match their hashes."""

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
from ..grid.cell import base_slug, possible_ids
from ..grid.settings import levels_of, synonyms_of


def identify(config: Any, claimed: str) -> str:
    """Return the id that follows from a cell's config; `claimed` if it is among the possible ids. Loads no plugin.

    Settings of a plugin that is not loaded may or may not be part of the id, so there are several possible ids. If none
    is `claimed`, the last possible one is returned.

    Args:
        config: Stored config of the cell, as a dict; an open-weight model has a single possible id.
        claimed: Id under which the cell is stored.

    Raises:
        Exception: Errors of pydantic and of the registries for an invalid config.
    """
    computed_id = ""
    if openweight.KEY in config:
        return openweight.stored_open_weight_id(config)
    for computed_id in possible_ids(CellConfig.model_validate(config)):
        if computed_id == claimed:
            break
    return computed_id


def derive(config: Mapping[str, Any]) -> Derived:
    """Return the columns of a cell that follow from its config: seed, level of each axis, and tokens_total.

    Also the synonyms of each level, by axis, and the beginning and end of its slug. An open-weight model has seed and
    levels only.

    Raises:
        Exception: Errors of pydantic and of the registries for an invalid config.
    """
    if openweight.KEY in config:
        return Derived(columns={"seed": config["seed"], **openweight.levels_of_stored(config)})
    read = CellConfig.model_validate(config)
    levels = levels_of(read)
    columns = {"seed": read.seed, **levels, "tokens_total": read.train.steps * read.train.batch_tokens}
    synonyms = {axis: synonyms_of(axis, level) for axis, level in levels.items()}
    return Derived(columns=columns, synonyms=synonyms, slug_start=f"{base_slug(read)}-", slug_end=f"-s{read.seed}")


def check(
    db: str | None, runs: Path, *, weights: bool = True, tell: Callable[[str], None] = lambda line: None
) -> list[Finding]:
    """Return all problems of a database and of the files of its runs folder, worst first. Changes nothing.

    Reads every code snapshot, plugin copy and corpus. Problems of the same severity keep their order: database first.

    Args:
        db: Database, as for --db.
        runs: Runs folder.
        weights: True to compare kept weights with their hashes, which reads them.
        tell: Prints one line of progress.
    """
    findings = maintenance.check(db, runs=runs, identify=identify, derive=derive, weights=weights, report_progress=tell)
    findings += changed_files(runs)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def changed_files(runs: Path) -> Iterator[Finding]:
    """Yield an error for every code snapshot, plugin copy or corpus that differs from its name or manifest.

    In this order: snapshots and plugins sorted by path, corpora oldest first. Folders and files with other names are
    ignored; missing folders yield nothing.

    Args:
        runs: Runs folder.
    """
    for snapshot in sorted((runs / "source").glob("*")):
        if source_snapshot.is_fingerprint(snapshot.name) and not source_snapshot.is_intact(snapshot):
            yield Finding.error(
                f"the code in {snapshot} does not match the fingerprint in its name",
                "remove it; the next launch creates it again",
            )
    for copy in sorted((runs / "plugins").glob("*.py")):
        if copy.is_symlink() or not sha256(copy).startswith(copy.name.partition("_")[0]):
            yield Finding.error(
                f"the plugin {copy} does not match the hash in its name", "remove it, and launch its grid again"
            )
    for folder in corpora.folders(runs / "corpora"):
        for line in corpora.verify(folder):
            what, _, remedy = line.rpartition("; ")
            yield Finding.error(what, remedy)
