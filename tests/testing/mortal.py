"""Preparations that are killed. A process imports everything once; each of its children prepares, and may die of it.

`python mortal.py ORDER`, where ORDER is JSON: `folder` to work in, `data` with the settings that ask for text, `mode`:

- `every`: for n = 1, 2, ... a preparation is killed just before its n-th change of a file, and run again to the end;
- `chain`: one preparation is killed again and again, after up to `most` changes each time, drawn from `seed`, until it
  ends; `turns` such preparations.

Prints JSON: `points` where they died, `wrong` ones after which the corpus differed from an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
FLEETING = ("prepared_at", "manifest_sha256")


def contents(corpora: Path) -> dict[str, Any]:
    """Return the contents of the one prepared corpus: bytes of every file, and the manifest without its time."""
    (folder,) = (path.parent for path in corpora.glob("*/manifest.json"))
    files: dict[str, Any] = {path.name: path.read_bytes().hex() for path in sorted(folder.iterdir())}
    manifest = json.loads((folder / "manifest.json").read_text())
    files["manifest.json"] = {name: value for name, value in manifest.items() if name not in FLEETING}
    return files


def small(*, sync: float = -1.0, documents: int = 9, shard: int = 997) -> None:
    """Few documents at a time, saved after each batch, in small shards: constants, because no setting names them."""
    from atma_sweep.sweep.data import prepare, shards

    prepare.SYNC_SECONDS, prepare.BATCH_DOCUMENTS, shards.SHARD_TOKENS = sync, documents, shard


def die_before(change: int, is_change: Callable[[str, tuple[Any, ...]], bool]) -> Callable[[], None]:
    """Kills this process just before its `change`-th change: an audit event that is one, or a call of what is returned."""
    remaining = [change]

    def count() -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, arguments: count() if is_change(event, arguments) else None)
    return count


def is_within(folder: Path, event: str, arguments: tuple[Any, ...], changes: Sequence[str] = CHANGES) -> bool:
    """Return whether an audit event changes something below a folder, which is removed by names within it."""
    by_name = event in ("os.remove", "os.rmdir") and arguments[1] != -1
    return event in changes and (by_name or str(arguments[0]).startswith(str(folder)))


def in_child(work: Callable[[], object]) -> int:
    """Does the work in a forked child; returns its exit code, -9 when it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def _prepare(order: dict[str, Any], corpora: Path, change: int | None) -> int:
    """Prepares in a child; its exit code, -9 when it was killed before its `change`-th change of a file."""

    def work() -> None:
        from atma_sweep.sweep.config import DataConfig
        from atma_sweep.sweep.data.prepare import prepare

        if change is not None:
            real, count = os.fsync, die_before(change, partial(is_within, corpora))
            os.fsync = lambda file: count() or real(file)  # type: ignore[func-returns-value]
        prepare(DataConfig(**order["data"]), corpora)
        imported = corpora.parent.parent / "modules.json"
        if not imported.exists():
            imported.write_text(json.dumps(sorted(sys.modules)))

    return in_child(work)


def command(*arguments: str) -> int:
    """Run one command line in this process and return its exit code."""
    from atma_sweep import cli

    sys.argv = ["atma-sweep", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _finished(order: dict[str, Any], corpora: Path, expected: dict[str, Any]) -> bool:
    """Return whether the command, run to its end, makes the corpus of an uninterrupted one and leaves no partial file."""
    return not _prepare(order, corpora, None) and contents(corpora) == expected and not list(corpora.glob("*.part"))


def _every(order: dict[str, Any], folder: Path, expected: dict[str, Any]) -> tuple[int, list[int]]:
    wrong = []
    for point in range(1, 1000):
        corpora = folder / "dying" / "corpora"
        code = _prepare(order, corpora, point)
        if code != -signal.SIGKILL:
            return point - 1, wrong if code == 0 else [*wrong, point]
        if not _finished(order, corpora, expected):
            wrong.append(point)
        shutil.rmtree(corpora.parent)
    raise AssertionError("never comes to an end")


def _chain(order: dict[str, Any], folder: Path, expected: dict[str, Any]) -> tuple[int, list[int]]:
    draw, wrong, points = random.Random(order["seed"]), [], 0
    for turn in range(order.get("turns", 3)):
        corpora = folder / f"dying{turn}" / "corpora"
        while (code := _prepare(order, corpora, draw.randint(1, order.get("most", 60)))) == -signal.SIGKILL:
            points += 1
        if code or not _finished(order, corpora, expected):
            wrong.append(turn)
    return points, wrong


def main() -> None:
    """Carries out the order."""
    order = json.loads(sys.argv[1])
    small(**order.get("small", {}))
    folder = Path(order["folder"])
    corpora = folder / "whole" / "corpora"
    assert _prepare(order, corpora, None) == 0
    # what a child imports on its way is imported here, so that the others need not
    for name in json.loads((folder / "modules.json").read_text()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    points, wrong = {"every": _every, "chain": _chain}[order["mode"]](order, folder, contents(corpora))
    print(json.dumps({"points": points, "wrong": wrong}))


def ordered(**order: Any) -> dict[str, Any]:
    """The answer to an order, from a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, json.dumps(order)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
