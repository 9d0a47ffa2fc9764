"""Whatever a bundle holds: it comes in clean, and every command still works, or it is refused in one line. Nothing else.

Every field of every table is changed to what its type, range or shape does not have, to paths, control characters and
huge values; members and the zip itself, too. BUNDLE_FUZZ=3000 in the environment asks for so many of each kind, other ones each time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atma_sweep import cli
from atma_sweep.results.errors import StoreError
from atma_sweep.results.exchange import row_validation
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CurvePoint, Example, Measurement, Owner, Provenance
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.commands.verify import identify
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning.planner import to_record
from bundles import packed, unpacked
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

EXAMPLES = int(os.environ.get("BUNDLE_FUZZ", "0"))
FUZZ = settings(
    max_examples=EXAMPLES or 30,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # an example takes too long to be made smaller
    suppress_health_check=list(HealthCheck),
)
OWNER = Owner(name="ada", host="there", pid=7, started=1.5)
COMMANDS = (
    ["status", "--sweep", "theirs"],
    ["show", "{cell}"],
    ["report", "--sweep", "theirs", "--table", "6"],
    ["report", "--sweep", "theirs", "--table", "provenance"],
    ["db", "check"],
    ["export", "--sweep", "theirs", "--out", "again.zip"],
    ["export", "--sweep", "theirs", "--to", "csv", "--what", "attempts"],
    ["launch", "grid.yaml", "--dry-run"],
)
GRID = "name: theirs\nextends: tiny\nseeds: 2\n"


class Members(dict[str, bytes]):
    """Too long for a message."""

    def __repr__(self) -> str:
        return f"{len(self)} members"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the members of a real bundle of two cells: rows in every table, weights and logs."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "grid.yaml").write_text(GRID)
    cells = [to_record(cell) for cell in load_grid(str(folder / "grid.yaml")).expand(lambda data: "f" * 64)]
    store = open_store(folder / "atma.db", create=True)
    options = {"requested": [["val", 0], ["clean", 64]], "set": {"train.tokens": 1}}
    store.record_revision(
        "theirs", grid_text=GRID, grid_file="grid.yaml", options=options, commit="c0ffee", cells=cells
    )
    for cell in cells:
        attempt = store.start_attempt(cell.id, owner=OWNER, fence=1, steps_total=7, deviation={"train.micro_batch": 1})
        recorder = DatabaseRecorder(store, attempt.id, 1)
        provenance_fields = {
            "packages": {"torch": "2"}, "kernels": {"memory": "torch"}, "extra": {"parameters": 5}, "gpu_name": "x",
        }  # fmt: skip
        recorder.provenance(Provenance(config=dict(cell.config), seed=0, device="cpu", **provenance_fields))  # type: ignore[arg-type]
        recorder.curve([CurvePoint(step=n, tokens=n, wall_s=n / 3, train_loss=1 / 3, lr=0.5) for n in range(1, 4)])
        recorder.measurements(
            [
                Measurement(probe="val", metric="val_loss", value=1.5, unit="nats/token", n=9, low=1.0, high=2.0),
                Measurement(
                    probe="clean", metric="nats", length=64, reason="oom: none", unit="nats/token", seconds=1.0
                ),
            ]
        )
        recorder.examples([Example(probe="clean", metric="nats", length=64, item=0, value=0.1, detail={"a": [1]})])
        run_folder = store.runs / attempt.run_dir
        run_folder.mkdir(parents=True)
        (run_folder / "weights.safetensors").write_bytes(b"weights")
        (run_folder / "log.txt").write_text("log\n")
        named = f"{attempt.run_dir}/weights.safetensors"
        store.finish_attempt(attempt.id, 1, "done", cause="as it should", exit_code=0, weights=named)
    store.add_event("code", "0123456789ab", sweep="theirs")
    store.add_event("note", "hello", sweep="theirs")
    export_sweep(store, "theirs", folder / "out.zip", weights=True)
    store.close()
    return Members(unpacked(folder / "out.zip"))


class Victim:
    """A folder with a database of its own sweep, into which bundles are taken; and what must not change around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.ran: list[str] = []
        self.n_imported = 0
        self.empty = folder / "empty.db"
        store = open_store(self.empty, create=True)
        with store.transaction() as session:
            session.connection().exec_driver_sql("SELECT 1")
        store.close()
        (folder / "canary").write_text("as it was")

    def take(self, make: Callable[[Path], object]) -> bool:
        """Import the file that `make` writes, and return True if it was imported.

        Fail on any error but a domain error.
        """
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        (self.home / "grid.yaml").write_text(GRID)
        file = self.folder / "evil.zip"
        make(file)
        before = self.around()
        shutil.copy(self.empty, self.home / "atma.db")
        store, refused = open_store(self.home / "atma.db"), None
        try:
            import_bundle(store, file, rename="theirs", identify=identify)
        except StoreError as error:
            refused = str(error)
        if refused is None:
            self.works(store.cell_states("theirs"))
        else:
            assert refused.isprintable(), refused
            assert store.sweeps() == []
        store.close()
        assert self.around() == before, "something outside was written"
        self.inside()
        return refused is None

    def around(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file() and self.home not in path.parents)
        return {str(path): path.read_bytes() for path in files if path.name != "evil.zip"}

    def inside(self) -> None:
        """In the runs folder nothing but attempts, and in them nothing but weights and logs."""
        runs = self.home / "atma-runs"
        for path in runs.rglob("*") if runs.exists() else ():
            assert not path.is_symlink(), path
            parts = path.relative_to(runs).parts
            assert set(parts[0]) <= set("0123456789abcdef"), path
            assert len(parts[0]) == 12, path
            assert path.is_dir() == (len(parts) < 3), path
            assert len(parts) < 3 or parts[2] in ("weights.safetensors", "log.txt"), path

    def works(self, states: Any) -> None:
        """Every command ends in a result or in one line. Two at a time, in turn: together they take longer than imports."""
        self.n_imported += 1
        for at in range(2):
            command = COMMANDS[(2 * self.n_imported + at) % len(COMMANDS)]
            arguments = [word.format(cell=states[0].cell_id if states else "none") for word in command]
            with_home = pytest.MonkeyPatch()
            with_home.chdir(self.home)
            with_home.setenv("ATMA_DB", str(self.home / "atma.db"))
            try:
                done = CliRunner().invoke(cli.app, arguments)
            finally:
                with_home.undo()
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                # what the command line shows as one line, with an exit code of its own
                assert hasattr(done.exception, "exit_code"), (arguments, done.exception)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Whatever it takes in, no program is started and no file of it is run."""
    new_victim = Victim(tmp_path_factory.mktemp("victim"))
    watched = ["subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # a dry run reads the names of the GPUs from the driver's own program
        if watched and event in watched and arguments[0] != "nvidia-smi":
            new_victim.ran.append(f"{event} {arguments}")
        if watched and event == "exec" and str(new_victim.folder) in getattr(arguments[0], "co_filename", ""):
            new_victim.ran.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    yield new_victim
    watched.clear()


ODD: list[Any] = [
    None, True, 0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 10**26, 0.5, -0.0, 1e308, 5e-324, -1e300,
    "", " ", "x", "val", "source", "plugins", "corpora", "../../../evil", "/etc/passwd", "..", ".", "a/b", "a\\b",
    "file:///etc/passwd", "s3://bucket/x", "reference::file:///etc/passwd", "~root/x", "\0", "\x1b[31m", "\x1f", "\x1e",
    "\n", "a\r\nb", "\u202e", "\u2028", "\ud800", "ü", "😀" * 50, "=cmd()", "<script>", "{}", "%s%n", "x" * 101,
    "x" * 5000, "0" * 12, "f" * 12, "0123456789ab/1", "0123456789ab/../x", "9999-12-31T23:59:59.999Z",
    "0001-01-01T00:00:00.000Z", "1970-01-01T00:00:00.000Z", "2199-12-31T23:59:59.999Z", "2026-02-30T00:00:00.000Z",
    "done", "running", "failed", "evaluate", "code", "NaN", "Infinity", [], [1], [[]], {}, {"a": 1}, {"": None},
    {"requested": 5}, {"requested": [["val"]]}, {"requested": [[1, 2]]}, {"requested": [["val", -1]]},
    {"requested": [["\x1f", 5]]}, {"requested": [["val", 0]], "set": []}, {"plugins": 5},
    {"plugins": [{"path": "../x.py", "sha256": "0" * 64}]}, {"checkpoint": {"path": "/home/other"}},
    {"checkpoint": 5}, {"model": None}, {"eval": []}, {"a": {"b": [1, None, "x"]}}, {"parameters": "many"},
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=8,
    ),
)
FIELDS = [(table, word) for table in row_validation.BUNDLE_TABLES for word in row_validation.FIELD_RULES[table]]


def changed(members: dict[str, bytes], table: str, row: int, word: str, value: Any) -> dict[str, bytes]:
    """The members with one field of one row of a table changed."""
    lines = members[f"{table}.jsonl"].splitlines(keepends=True)
    at = row % len(lines)
    parsed = json.loads(lines[at])
    parsed[word] = value
    lines[at] = json.dumps(parsed).encode() + b"\n"
    return members | {f"{table}.jsonl": b"".join(lines)}


@pytest.mark.slow
def test_the_bundle_itself_comes_in(victim: Victim, members: dict[str, bytes]) -> None:
    assert all(members[f"{table}.jsonl"] for table in row_validation.BUNDLE_TABLES)
    assert victim.take(lambda file: packed(file, members))
    assert victim.ran == []


@pytest.mark.slow
@FUZZ
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), st.integers(0, 3), VALUES), min_size=1, max_size=2))
@pytest.mark.thorough
def test_any_value_in_any_field(victim: Victim, members: dict[str, bytes], changes: list[Any]) -> None:
    evil = members
    for (table, word), row, value in changes:
        evil = changed(evil, table, row, word, value)
    victim.take(lambda file: packed(file, evil))
    assert victim.ran == []


NAMES = [
    "../evil", "/evil", "files/1/../../evil", "source/x", "files/1/log.txt/x", "files/9/log.txt", "cell.jsonl ",
    "\0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.thorough
@FUZZ
@given(data=st.data())
def test_any_members_and_any_bytes(victim: Victim, members: dict[str, bytes], data: st.DataObject) -> None:
    evil = dict(members)
    name = data.draw(st.sampled_from(sorted(evil)))
    what = data.draw(st.sampled_from(["drop", "rename", "add", "lines", "bytes", "manifest", "zip", "mode"]))
    spot = data.draw(st.integers(0, 10**6))
    new_name = data.draw(st.one_of(st.sampled_from(NAMES), st.text(min_size=1, max_size=10)))

    def make(file: Path) -> None:
        if what == "drop" and name != "manifest.json":
            del evil[name]
        if what == "rename" and name != "manifest.json":
            evil[new_name] = evil.pop(name)
        if what == "add":
            evil[new_name] = b"evil"
        if what in ("lines", "bytes") and name != "manifest.json":
            evil[name] = damaged(evil[name], what, spot)
        facts = {}
        if what == "manifest":
            key = data.draw(st.sampled_from(["what", "format", "schema", "sweep", "counts", "members", "counts__cell"]))
            facts = {key: data.draw(VALUES)}
        try:
            packed(file, evil, **facts)
        except (UnicodeEncodeError, IndexError):  # a name that zipfile does not write
            packed(file, members)
        if what == "zip":
            content = bytearray(file.read_bytes())
            for step in range(3):
                content[(spot * (step + 1)) % len(content)] ^= 1 << (spot % 8)
            file.write_bytes(content if spot % 2 else content[: spot % len(content)])
        if what == "mode":
            with zipfile.ZipFile(file, "a") as archive:
                info = zipfile.ZipInfo("files/1/log.txt" if spot % 2 else "files/2/evil")
                info.external_attr = data.draw(st.sampled_from([0o120777, 0o020666, 0o040755, 0o100644])) << 16
                archive.writestr(info, b"/etc/passwd")

    victim.take(make)
    assert victim.ran == []


def damaged(content: bytes, what: str, spot: int) -> bytes:
    """Lines doubled or turned round, or a byte of them changed."""
    if what == "lines":
        lines = content.splitlines(keepends=True)
        return b"".join(lines[::-1] if spot % 2 else [*lines, *lines[:1]])
    return content[: spot % (len(content) + 1)] + bytes([spot % 256]) + content[spot % (len(content) + 1) + 1 :]
