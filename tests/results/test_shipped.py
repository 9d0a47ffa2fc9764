"""The sweeps that come along, and what docs/replication.md says of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from atma_sweep.reports.data import SweepData, gather, level_of
from atma_sweep.results import shipped
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.known import open_known, with_known
from atma_sweep.results.names import SHIPPED
from atma_sweep.results.store.store import StoreMissing, SweepUnknown, open_store
from atma_sweep.sweep.grid.grid import load_grid
from reads import sweeps_read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replication.md").read_text()
TEXT = "76939ae0d6f985eb48af0c2ca98935d11b250c67a9aa3a28fa44d9e2c35c4af5"
Command = Callable[..., tuple[int, str, str]]


def data(sweep: str) -> SweepData:
    return gather(shipped.shared(sweep), sweep)


@pytest.mark.parametrize("sweep", SHIPPED)
def test_a_bundle_is_small_and_whole(sweep: str) -> None:
    assert shipped.bundle_of(sweep).stat().st_size < 3e6
    found = data(sweep)
    assert found.done == len(found.cells)
    # of the very cells that the grid has now, on the text that the page names
    assert TEXT.startswith(re.findall(r"fingerprint `([0-9a-f]+)`: no cell", PAGE)[0])
    assert {cell.cell_id for cell in found.cells} == {cell.id for cell in load_grid(sweep).expand(lambda data: TEXT)}


def test_every_reading_command_knows_them_without_a_database(tmp_path: Path, command_line: Command) -> None:
    code, out, _ = command_line("report", "--sweep", "replication-pilot", "--table", "6", "--format", "csv")
    assert code == 0
    assert len(out.splitlines()) == 13
    assert command_line("status", "--sweep", "replication-rates", "--json")[0] == 0
    told = command_line("status", "--sweep", "replication-rates", "--watch")
    assert told == (
        2,
        "",
        "atma-sweep: replication-rates comes along with this program and nothing of it runs; leave --watch out\n",
    )
    assert not list(tmp_path.glob("*.db*"))
    with pytest.raises(StoreMissing):
        open_known(tmp_path / "none.db", "replication-piloted")


def test_ones_own_sweep_goes_before(tmp_path: Path) -> None:
    store = open_store(tmp_path / "own.db", create=True)
    assert with_known(store, "replication-pilot") is shipped.shared("replication-pilot")
    with pytest.raises(SweepUnknown, match="comes along with this program"):
        store.revision("replication-pilot")
    import_bundle(store, shipped.bundle_of("replication-pilot"))
    assert with_known(store, "replication-pilot") is store
    with pytest.raises(SweepUnknown, match="no sweep is named"):
        with_known(store, "replication-piloted")


def test_the_tables_and_figures_of_the_page_say_what_the_numbers_say(
    tmp_path: Path, command_line: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "replication"
    shutil.copytree(ROOT / "docs" / "replication", folder)
    read = sweeps_read(monkeypatch)
    code, out, err = command_line("report", "--check", str(folder))
    assert code == 0, out + err
    assert sorted(map(str, read)) == sorted(SHIPPED), "a sweep is read once, however many files are made of it"
    assert out.count("as the database says") == len(list(folder.iterdir())) >= 4
    gone = command_line("report", "--check", str(tmp_path / "gone"))
    assert gone == (
        2,
        "",
        f"atma-sweep: {tmp_path}/gone: no such file or folder; name what report --out or report --all wrote\n",
    )
    (folder / "pilot.md").write_text((folder / "pilot.md").read_text().replace("54.4", "55.4"))
    assert command_line("report", "--check", str(folder / "pilot.md"))[0] == 1


def test_tokens_are_what_the_pilot_decides_by_the_rule() -> None:
    """The smallest number at which two of the six cells answer at least twice what the best constant answer does."""
    found = data("replication-pilot")
    constant = {
        value.value for place, value in found.values.items() if place[1:] == ("needle", "constant_accuracy", 512)
    }
    (best,) = constant
    assert best is not None
    enough: dict[int, int] = {}
    for cell in found.cells:
        answered = found.values[cell.cell_id, "needle", "digit_accuracy", 512].value
        assert answered is not None
        tokens = int(level_of(cell, "train.tokens"))
        enough[tokens] = enough.get(tokens, 0) + (answered >= 2 * best)
    decided = min(tokens for tokens, count in enough.items() if count >= 2)
    cells = load_grid("replication").expand(lambda data: "text")
    assert {cell.config.train.tokens for cell in cells} == {decided}


def test_rates_are_what_the_rates_decide_by_the_rule_and_the_page_says() -> None:
    """The lowest mean over both recipes; of two that differ by less than 0.005 nats the smaller; no end of the range."""
    found = data("replication-rates")
    losses: dict[str, dict[float, dict[str, float]]] = {}
    for cell in found.cells:
        rate, value = float(level_of(cell, "train.muon_lr")), found.values[cell.cell_id, "val", "val_loss", 0].value
        assert value is not None
        losses.setdefault(cell.levels["attn_type"], {}).setdefault(rate, {})[level_of(cell, "recipe")] = value
    decided = {}
    for mixer, by_rate in losses.items():
        means = {rate: fmean(by_recipe.values()) for rate, by_recipe in by_rate.items()}
        assert all(len(by_recipe) == 2 for by_recipe in by_rate.values())
        lowest = min(means.values())
        decided[mixer] = min(rate for rate, mean in means.items() if mean - lowest < 0.005)
        assert min(means) < decided[mixer] < max(means)
    cells = load_grid("replication").expand(lambda data: "text")
    assert {cell.config.model.attn_type: cell.config.train.muon_lr for cell in cells} == decided
    assert len({(cell.config.model.attn_type, cell.config.train.muon_lr) for cell in cells}) == 3
    # the page's table, row by row
    told = re.findall(r"^\| (0\.0\d+) \| (.*) \|$", PAGE.split("## What pilot and rates decided")[1], re.MULTILINE)
    assert len(told) == 4
    for rate, row in told:
        numbers = [float(word.strip("* ")) for word in row.split("|")]
        for at, mixer in enumerate(("polar", "nope", "rope")):
            one = losses[mixer][float(rate)]
            wanted = [one["intended"], one["published"], fmean(one.values())]
            for shown, exact, digits in zip(numbers[3 * at : 3 * at + 3], wanted, (3, 3, 4), strict=True):
                assert shown == pytest.approx(exact, abs=0.5 * 10**-digits + 1e-9), (rate, mixer)


@pytest.mark.thorough
def test_the_page_says_how_often_a_difference_would_be_seen() -> None:
    """By its own code, which is far from the program's tests: 250 sweeps a row have a standard deviation of 3 points at most."""
    code = re.findall(r"```python\n(.*?)print\(seen", PAGE, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    rows = re.findall(
        r"^\| (\d+)[^|]*\| ([\d.]+)[^|]*\| (\d+) \| (\d+)% \((\d+)%\) \| (\d+)% \((\d+)%\) \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == 6
    for row in rows:
        configurations, difference, sd, *told = map(float, row)
        for seeds, shown in ((3, told[:2]), (5, told[2:])):
            found = names["seen"](int(configurations), difference, sd, seeds=seeds, sweeps=250)
            assert [100 * share for share in found] == pytest.approx(shown, abs=11), row
