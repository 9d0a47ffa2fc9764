"""What gc finds and removes: exactly what no attempt of the database owns, whatever else lies beside it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from atma_sweep.results.maintenance import deletion
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import CellRecord, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.checkpoints import garbage
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.orchestrator.supervisor import freeze_plugins
from factories import cell_record

OWNER = Owner(name="ada", host="elsewhere", pid=1, started=0.0)
HASHES = {"kept": "a" * 64, "gone": "b" * 64}


def nobody(owner: object, until: object) -> bool:
    return False


def cell(letter: str, plugin: str | None = None) -> CellRecord:
    return cell_record(letter, config={"plugins": [{"path": "x.py", "sha256": HASHES[plugin]}]} if plugin else {})


class House:
    """Sweep old with cells a, b and c, sweep new with c and d; every cell has an attempt with files, d's runs."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.place = folder / "atma-runs", folder / "elsewhere"
        self.store: Store = open_store(folder / "atma.db", create=True)
        for name, cells in (
            ("old", [cell("a", "gone"), cell("b"), cell("c")]),
            ("new", [cell("c"), cell("d", "kept")]),
        ):
            self.store.record_revision(name, grid_text="x", grid_file="x", cells=cells)
        for letter in "abcd":
            made = self.store.start_attempt(letter * 12, owner=OWNER, fence=1)
            path = str(self.place) if letter in "bc" else None
            DatabaseRecorder(self.store, made.id, 1).provenance(
                Provenance(config={"checkpoint": {"path": path}}, seed=0)
            )
            self.write(self.runs / made.run_dir / "checkpoint-00000001" / "model.safetensors", 1000)
            self.write(self.runs / made.run_dir / "log.txt", 10)
            if path is not None:
                self.write(self.place / made.run_dir / "weights.safetensors", 500)
            if letter != "d":
                self.store.finish_attempt(made.id, 1, "done")
        for name, sha in HASHES.items():
            self.write(self.runs / "plugins" / f"{sha[:12]}_{name}.py", 7, age=7200)
        for name in ("old", "new"):
            self.write(self.runs / f"launch-{name}.log", 9, age=7200)
        self.write(self.runs / "corpora" / "text" / "train.bin", 100)
        self.write(self.runs / "source" / "0123456789ab" / "x.py", 100)
        self.write(self.runs / "mine" / "notes.txt", 100)

    def write(self, path: Path, count: int, age: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(count))
        os.utime(path, (time.time() - age,) * 2)

    def files(self) -> set[str]:
        root = self.runs.parent
        return {
            str(path.relative_to(root)) for top in (self.runs, self.place) for path in top.rglob("*") if path.is_file()
        }

    def delete(self, *names: str) -> None:
        found = deletion.plan(self.store, names, holds=nobody)
        deletion.execute_deletion(self.store, found, names, holds=nobody, who="ada")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.store.close()


def short(found: garbage.GarbageReport, root: Path) -> dict[str, int]:
    return {str(Path(thing.address).relative_to(root)): thing.bytes for thing in found.things}


def test_while_everything_is_owned_nothing_goes(house: House) -> None:
    before = house.files()
    found = garbage.find(house.store, house.runs, [str(house.place)])
    assert (found.things, found.elsewhere) == ((), ())
    assert garbage.find(house.store, house.runs).elsewhere == (str(house.place),)
    garbage.remove(house.store, found)
    assert house.files() == before


def test_what_was_deleted_goes_and_all_else_stays(house: House, tmp_path: Path) -> None:
    house.delete("old")
    before = house.files()
    found = garbage.find(house.store, house.runs, [str(house.place)])
    a, b = "a" * 12, "b" * 12
    assert short(found, tmp_path) == {
        f"atma-runs/{a}/1": 1010,
        f"atma-runs/{b}/1": 1010,
        f"elsewhere/{b}/1": 500,
        f"atma-runs/plugins/{'b' * 12}_gone.py": 7,
        "atma-runs/launch-old.log": 9,
    }
    assert house.files() == before, "looking changes nothing"
    done = garbage.remove(house.store, found)
    assert (done.bytes, done.problems) == (2536, [])
    gone = {name for name in before if f"/{a}/" in name or f"/{b}/" in name or "gone" in name or "launch-old" in name}
    assert house.files() == before - gone
    assert not (house.runs / a).exists()
    assert garbage.find(house.store, house.runs, [str(house.place)]).things == ()
    assert house.store.events()[-1].kind == "collected"


def test_another_place_is_looked_into_when_it_is_named(house: House, tmp_path: Path) -> None:
    house.delete("old")
    found = garbage.find(house.store, house.runs)
    assert not any(address.startswith("elsewhere") for address in short(found, tmp_path))
    assert found.elsewhere == (str(house.place),)


def test_what_is_taken_up_meanwhile_stays(house: House) -> None:
    house.delete("old")
    found = garbage.find(house.store, house.runs)
    house.store.record_revision("old", grid_text="x", grid_file="x", cells=[cell("a")])
    made = house.store.start_attempt("a" * 12, owner=OWNER, fence=1)
    assert made.run_dir == f"{'a' * 12}/1", "the number is free again"
    done = garbage.remove(house.store, found)
    assert [line.split("/")[-2][:2] for line in done.problems] == ["aa"]
    assert (house.runs / made.run_dir / "log.txt").exists()
    assert not (house.runs / f"{'b' * 12}/1").exists()


def test_a_removal_that_was_cut_short_is_finished_by_the_next(house: House, tmp_path: Path) -> None:
    house.delete("old")
    folder = house.runs / ("a" * 12)
    os.rename(folder / "1", folder / ".1.unowned")
    found = garbage.find(house.store, house.runs)
    assert f"atma-runs/{'a' * 12}/.1.unowned" in short(found, tmp_path)
    garbage.remove(house.store, found)
    assert not folder.exists()


def test_another_databases_folder_is_refused(house: House, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other.db", create=True)
    before = house.files()
    with pytest.raises(SweepError, match="none of the 4 attempts"):
        garbage.find(other, house.runs)
    (house.runs / ".import-x").mkdir()
    with pytest.raises(SweepError, match="belongs to an import"):
        garbage.find(house.store, house.runs)
    assert house.files() == before
    other.close()


def test_links_are_not_followed_and_what_is_young_stays(house: House, tmp_path: Path) -> None:
    house.delete("old")
    away = tmp_path / "away"
    house.write(away / "1" / "weights.safetensors", 5)
    os.symlink(away, house.runs / ("e" * 12))
    os.symlink(away / "1", house.runs / ("a" * 12) / "2")
    for path in (house.runs / "plugins" / f"{'b' * 12}_gone.py", house.runs / "launch-old.log"):
        os.utime(path)
    found = garbage.find(house.store, house.runs)
    assert set(short(found, tmp_path)) == {f"atma-runs/{letter * 12}/1" for letter in "ab"}
    garbage.remove(house.store, found)
    assert (away / "1" / "weights.safetensors").exists()
    assert (house.runs / ("a" * 12) / "2").is_symlink()


def test_a_plugin_that_is_used_again_is_young_again(tmp_path: Path) -> None:
    """So that gc leaves it alone between the moment it is frozen and the moment its sweep is in the database."""
    from hashlib import sha256

    from atma_sweep.sweep.config import CellConfig, Plugin

    source = tmp_path / "part.py"
    source.write_text("x = 1\n")
    plugin = Plugin(path=str(source), sha256=sha256(source.read_bytes()).hexdigest())
    made = Cell(id="a" * 12, slug="s", config=CellConfig.model_construct(plugins=(plugin,)), axes={})
    (frozen,) = freeze_plugins([made], tmp_path)
    copy = Path(frozen.config.plugins[0].path)
    os.utime(copy, (1.0, 1.0))
    freeze_plugins([made], tmp_path)
    assert time.time() - copy.stat().st_mtime < 3600


def test_gc_asks_and_tells(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    house = House(tmp_path)
    house.delete("old")
    house.store.close()
    before = house.files()
    code, out, _ = run("gc", "--dry-run")
    assert (code, "launch-old.log: log, 9 B" in out, "gc --place" in out) == (0, True, True)
    code, _, err = run("gc")
    assert (code, err) == (2, "atma-sweep: nothing was removed; --yes does so without asking\n")
    assert house.files() == before
    told = json.loads(run("gc", "--yes", "--json", "--place", str(house.place))[1])
    assert (told["removed"], told["bytes"], len(told["things"])) == (True, 2536, 5)
    assert run("gc")[:2] == (
        0,
        f"nobody owns 0 B, 0 files or folders of {house.runs}\nnot looked into: {house.place}; if no other database uses it: atma-sweep gc --place {house.place}\n",
    )
