"""The sweeps that come along, and what docs/experiments/replication.md says of them."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from atma_sweep.reports.stats.significance.paired_tests import holm
from atma_sweep.reports.sweep_data import SweepData, cell_level, load_sweep_data
from atma_sweep.results import shipped
from atma_sweep.results.builtin_sweeps import open_store_with_builtins, store_with_builtin
from atma_sweep.results.errors import StoreMissing, SweepUnknown
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.names import SHIPPED
from atma_sweep.results.store.records import CellState
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.grid.grid import load_grid
from reads import sweeps_read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments" / "replication.md").read_text()
HEADLINE = "headline-370m"
HEADLINE_PAGE = (ROOT / "docs" / "experiments" / f"{HEADLINE}.md").read_text()
RIVALS = "rivals-fla"
RIVALS_PAGE = (ROOT / "docs" / "experiments" / f"{RIVALS}.md").read_text()
RIVALS_TEXT = "fc9a5e86a75a9e5f204d3afb7aab326e3a08b746227e12bf9a8420dcacf343ad"
TEXT = "76939ae0d6f985eb48af0c2ca98935d11b250c67a9aa3a28fa44d9e2c35c4af5"
CONCLUSIONS = {1: [(0, +1)], 2: [(2, -1)], 3: [(4, -1), (6, +1)], 4: [(8, -1)], 5: [(10, -1)]}
"""By the page's number: which contrasts under `intended` (each next one is that under `published`), and the sign that it claims."""
Command = Callable[..., tuple[int, str, str]]


@functools.cache
def data(sweep: str) -> SweepData:
    return load_sweep_data(shipped.shipped_store(sweep), sweep)


@pytest.mark.thorough
@pytest.mark.parametrize("sweep", [sweep for sweep in SHIPPED if sweep not in (HEADLINE, RIVALS)])
def test_shipped_bundle_is_small_and_complete(sweep: str) -> None:
    assert shipped.bundle_path(sweep).stat().st_size < 3e6
    sweep_data = data(sweep)
    assert {sweep_data.standing(cell) for cell in sweep_data.cells} == {"done"}
    # of the very cells that the grid has now, on the text that the page names
    assert TEXT.startswith(re.findall(r"fingerprint `([0-9a-f]+)`: no cell", PAGE)[0])
    assert {cell.cell_id for cell in sweep_data.cells} == {
        cell.id for cell in load_grid(sweep).expand(lambda data: TEXT)
    }


def test_every_reading_command_knows_them_without_a_database(tmp_path: Path, command_line: Command) -> None:
    code, out, _ = command_line("report", "--sweep", "replication-pilot", "--table", "6", "--format", "csv")
    assert code == 0
    assert len(out.splitlines()) == 13
    assert command_line("status", "--sweep", "replication-rates", "--json")[0] == 0
    status = command_line("status", "--sweep", "replication-rates", "--watch")
    assert status == (
        2,
        "",
        "atma-sweep: replication-rates is built in and never runs; leave --watch out\n",
    )
    assert not list(tmp_path.glob("*.db*"))
    with pytest.raises(StoreMissing):
        open_store_with_builtins(tmp_path / "none.db", "replication-piloted")


def test_ones_own_sweep_goes_before(tmp_path: Path) -> None:
    store = open_store(tmp_path / "own.db", create=True)
    assert store_with_builtin(store, "replication-pilot") is shipped.shipped_store("replication-pilot")
    with pytest.raises(SweepUnknown, match="is built in; it is not in this database"):
        store.revision("replication-pilot")
    import_bundle(store, shipped.bundle_path("replication-pilot"))
    assert store_with_builtin(store, "replication-pilot") is store
    with pytest.raises(SweepUnknown, match="no sweep is named"):
        store_with_builtin(store, "replication-piloted")


def checked(folder: Path, command_line: Command, files: Sequence[str], source: str = "replication") -> str:
    """Return the output of --check for copies of these files below docs; it must report no difference."""
    folder.mkdir()
    for name in files:
        shutil.copy(ROOT / "docs" / "experiments" / source / name, folder)
    code, out, err = command_line("report", "--check", str(folder))
    assert code == 0, out + err
    assert out.count("matches the database") == len(files)
    return out


@pytest.mark.thorough
def test_tables_of_the_page_say_what_the_numbers_say(tmp_path: Path, command_line: Command) -> None:
    checked(tmp_path / "some", command_line, ["pilot.md", "rates.md", "contrasts.md"])
    gone = command_line("report", "--check", str(tmp_path / "gone"))
    assert gone == (
        2,
        "",
        f"atma-sweep: {tmp_path}/gone: no such file or folder; name what report --out or report --all wrote\n",
    )
    table = tmp_path / "some" / "pilot.md"
    table.write_text(table.read_text().replace("54.4", "55.4"))
    assert command_line("report", "--check", str(table))[0] == 1


@pytest.mark.thorough
def test_tables_and_figures_of_the_page_match_the_numbers(
    tmp_path: Path, command_line: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sweeps_read(monkeypatch)
    names = [path.name for path in (ROOT / "docs" / "experiments" / "replication").iterdir()]
    checked(tmp_path / "all", command_line, names)
    assert len(names) >= 29
    assert {HEADLINE, RIVALS, *map(str, read)} == set(SHIPPED), "every other sweep"
    assert len(read) == len(SHIPPED) - 2, "a sweep is read once, however many files are made of it"


def test_tokens_are_what_the_pilot_decides_by_the_rule() -> None:
    """The smallest number at which two of the six cells answer at least twice what the best constant answer does."""
    pilot = data("replication-pilot")
    constant = {value.value for key, value in pilot.values.items() if key[1:] == ("needle", "constant_accuracy", 512)}
    (best,) = constant
    assert best is not None
    enough: dict[int, int] = {}
    for cell in pilot.cells:
        answered = pilot.values[cell.cell_id, "needle", "digit_accuracy", 512].value
        assert answered is not None
        tokens = int(cell_level(cell, "train.tokens"))
        enough[tokens] = enough.get(tokens, 0) + (answered >= 2 * best)
    decided = min(tokens for tokens, count in enough.items() if count >= 2)
    cells = load_grid("replication").expand(lambda data: "text")
    assert {cell.config.train.tokens for cell in cells} == {decided}


def test_rates_of_the_page_follow_from_the_rule() -> None:
    """The lowest mean over both recipes; of two that differ by less than 0.005 nats the smaller; no end of the range."""
    rates_data = data("replication-rates")
    losses: dict[str, dict[float, dict[str, float]]] = {}
    for cell in rates_data.cells:
        rate, value = (
            float(cell_level(cell, "train.muon_lr")),
            rates_data.values[cell.cell_id, "val", "val_loss", 0].value,
        )
        assert value is not None
        losses.setdefault(cell.levels["attn_type"], {}).setdefault(rate, {})[cell_level(cell, "recipe")] = value
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
    page_rows = re.findall(r"^\| (0\.0\d+) \| (.*) \|$", PAGE.split("## What pilot and rates decided")[1], re.MULTILINE)
    assert len(page_rows) == 4
    for rate, row in page_rows:
        numbers = [float(word.strip("* ")) for word in row.split("|")]
        for at, mixer in enumerate(("polar", "nope", "rope")):
            cell_losses = losses[mixer][float(rate)]
            wanted = [cell_losses["intended"], cell_losses["published"], fmean(cell_losses.values())]
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
        configurations, difference, sd, *page_shares = map(float, row)
        for seeds, shown in ((3, page_shares[:2]), (5, page_shares[2:])):
            computed = names["seen"](int(configurations), difference, sd, seeds=seeds, sweeps=250)
            assert [100 * share for share in computed] == pytest.approx(shown, abs=11), row


def rows_of(command_line: Command, table: str, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = command_line("report", "--table", table, *arguments, "--format", "json")
    assert code == 0, err
    rows: list[dict[str, Any]] = json.loads(out)
    return rows


def of(row: dict[str, Any], heading: str) -> dict[str, Any]:
    entry: dict[str, Any] = next(value for value in row["values"] if value["heading"] == heading)
    return entry


def verdict_of(row: dict[str, Any]) -> str:
    verdict: str = of(row, "Verdict")["printed"]
    return verdict


def decided(rows: Sequence[tuple[dict[str, Any], int]], verdict: Callable[[dict[str, Any]], str] = verdict_of) -> str:
    """By "What decides" of the page: the contrasts of a conclusion, each with the sign that it claims."""
    each = set()
    for row, claimed in rows:
        if verdict(row).startswith("not tested"):
            each.add("not tested")
        elif of(row, "p corr")["value"] < 0.05:
            each.add("stands" if of(row, "Mean")["value"] * claimed > 0 else "falls")
        else:
            each.add("falls" if verdict(row).startswith("equivalent") else "undecided")
    return next(word for word in ("not tested", "falls", "undecided", "stands") if word in each)


@pytest.mark.thorough
def test_conclusions_of_the_page_follow_from_the_contrasts(command_line: Command) -> None:
    contrasts = rows_of(command_line, "contrasts", "--sweep", "replication")
    assert len(contrasts) == 14
    page_verdicts = dict(
        re.findall(r"^\| (\d) \| (.*) \|$", PAGE.split("## What came out")[1].split("## Question")[0], re.MULTILINE)
    )
    assert len(page_verdicts) == len(CONCLUSIONS)
    for number, parts in CONCLUSIONS.items():
        for recipe, cell in enumerate(page_verdicts[str(number)].split(" | ")[1:]):
            rows = [(contrasts[at + recipe], claimed) for at, claimed in parts]
            all_verdicts = decided(rows)
            assert cell.startswith(f"**{all_verdicts}**: "), (number, recipe)
            for row, _ in rows:
                assert ("published" if recipe else "intended") in row["row"]["Within"]
                shown = {name: of(row, name)["printed"] for name in ("Mean", "Low", "High", "p corr")}
                assert "{Mean} [{Low}, {High}]".format(**shown) in cell, (number, recipe)
                assert (f"p {shown['p corr']}" in cell) == (all_verdicts != "not tested")
                assert of(row, "Pairs")["value"] == (20 if number < 4 else 10)
    # whether there is retrieval to lose
    for row, wanted in zip(contrasts[12:], ("28.3 [16.7, 39.9]", "33.2 [24.8, 41.6]"), strict=True):
        assert wanted == "{} [{}, {}]".format(
            *(of(row, name)["printed"].lstrip("+") for name in ("Mean", "Low", "High"))
        )
        assert wanted in PAGE
        assert of(row, "p corr")["printed"] in PAGE


@pytest.mark.thorough
def test_the_page_says_how_firm_its_verdicts_are(command_line: Command) -> None:
    """The oracle corrects over the requested contrasts alone, and ignores the precedence of *not tested*."""
    contrasts = rows_of(command_line, "contrasts", "--sweep", "replication")
    requested = [row for row in contrasts if not verdict_of(row).startswith("not tested")]
    assert len(requested) == 7
    assert "Corrected over the other seven, p would be 0.028 for both" in PAGE
    corrected = holm([of(row, "p")["value"] for row in requested])
    undecided = [p for row, p in zip(requested, corrected, strict=True) if verdict_of(row) == "not significant"]
    assert [round(p, 3) for p in undecided] == [0.028, 0.028]

    def without_precedence(row: dict[str, Any]) -> str:
        return "equivalent" if (of(row, "p equiv")["value"] or 1) < 0.05 else "not significant"

    verdicts = [
        decided([(contrasts[at + recipe], claimed) for at, claimed in parts], without_precedence)
        for parts in CONCLUSIONS.values()
        for recipe in (0, 1)
    ]
    # 3 under `published` falls either way
    assert verdicts.count("falls") == 6
    assert "without it five of the ten would read *falls*" in PAGE


def test_the_pages_means_are_those_of_the_cells() -> None:
    sweep_data = data("replication")
    seen = PAGE.split("### What else is seen")[1].split("### What was run")[0]
    page_rows = re.findall(r"^\| (polar|nope|rope)(, memory)? \| ([\d. |]+) \|$", seen, re.MULTILINE)
    assert len(page_rows) == 6
    columns = (("val", "val_loss", 0, 1, 3), ("clean", "nats", 16384, 1, 3),
               ("needle", "digit_accuracy", 512, 100, 1), ("needle", "digit_accuracy", 16384, 100, 1))  # fmt: skip
    for mixer, memory, row in page_rows:
        numbers = [float(word) for word in row.split("|")]
        for at, recipe in enumerate(("intended", "published")):
            configurations: dict[tuple[str, ...], list[str]] = {}
            wanted = {"attn_type": mixer, "memory": "on" if memory else "off", "recipe": recipe}
            for cell in cells_of(sweep_data, wanted):
                if cell_level(cell, "reg_mode") != "strong":
                    configurations.setdefault(row_of(cell), []).append(cell.cell_id)
            assert len(configurations) == 16
            for (probe, metric, length, scale, digits), shown in zip(
                columns, numbers[4 * at : 4 * at + 4], strict=True
            ):
                means = [
                    fmean(number_of(sweep_data, cell, probe, metric, length) for cell in group)
                    for group in configurations.values()
                ]
                assert shown == pytest.approx(scale * fmean(means), abs=0.5 * 10**-digits + 1e-9), (
                    mixer,
                    memory,
                    recipe,
                )


def test_the_page_says_how_the_regularizers_disagree() -> None:
    """Nope - polar, both with memory, at 16,384 tokens."""
    sweep_data = data("replication")
    head, _, *lines = PAGE.split("| | baseline |")[1].split("\n\n")[0].splitlines()
    modes = ["baseline", *head.strip("| ").split(" | ")]
    assert modes == sweep_data.levels("reg_mode")
    for line, recipe in zip(lines, ("intended", "published"), strict=True):
        name, *shown = line.strip("| ").split(" | ")
        assert name == recipe
        for mode, number in zip(modes, shown, strict=True):
            wanted = {"memory": "on", "reg_mode": mode, "recipe": recipe}
            sides = [
                fmean(numbers_of("replication", {**wanted, "attn_type": mixer}, "clean", "nats", 16384))
                for mixer in ("nope", "polar")
            ]
            assert float(number) == pytest.approx(sides[0] - sides[1], abs=5.1e-4)


def row_of(cell: CellState) -> tuple[str, ...]:
    return tuple(cell_level(cell, axis) for axis in ("reg_mode", "distractor", "window"))


def cells_of(sweep_data: SweepData, levels: dict[str, str]) -> list[CellState]:
    """Those with these levels."""
    return [cell for cell in sweep_data.cells if all(cell_level(cell, axis) == level for axis, level in levels.items())]


def numbers_of(sweep: str, levels: dict[str, str], probe: str, metric: str, length: int) -> list[float]:
    """Return the values of the sweep's cells with these levels."""
    sweep_data = data(sweep)
    return [number_of(sweep_data, cell.cell_id, probe, metric, length) for cell in cells_of(sweep_data, levels)]


def number_of(sweep_data: SweepData, cell: str, probe: str, metric: str, length: int) -> float:
    number = sweep_data.values[cell, probe, metric, length].value
    assert number is not None
    return number


@pytest.mark.thorough
def test_the_pages_sentences_have_the_verdicts_of_the_claims(command_line: Command) -> None:
    """Beside the paper's printed numbers."""
    ways = (
        ["--sweep", "printed-v2"],
        *(["--sweep", "replication", "--only", f"recipe={name}"] for name in ("intended", "published")),
    )
    verdicts = [
        {row["row"]["Sentence"]: row["row"]["Verdict"] for row in rows_of(command_line, "claims", *arguments)}
        for arguments in ways
    ]
    page_lines = PAGE.split("| sentence |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(page_lines) == 11
    for line in page_lines:
        sentence, *shown = line.strip("| ").split(" | ")
        assert shown == [verdict_by_sentence[sentence] for verdict_by_sentence in verdicts]


def test_the_page_says_what_more_tokens_bring() -> None:
    """The sweep's own cells (mean, lowest and highest of the seeds) beside one run each at four and eight times the tokens."""
    section = PAGE.split("### With more tokens")[1].split("### At 370M")[0]
    rows = re.findall(r"^\| (polar|nope|rope)(, memory)? \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 6
    needle = "needle", "digit_accuracy"
    columns = (("val", "val_loss", 0, 1, 3), (*needle, 512, 100, 1), (*needle, 16384, 100, 1))
    plain = {"recipe": "intended", "reg_mode": "baseline", "distractor": "off", "window": "off"}
    for mixer, memory, shown in rows:
        cells = {"attn_type": mixer, "memory": "on" if memory else "off"}
        numbers = shown.split(" | ")
        for at, (probe, metric, length, scale, digits) in enumerate(columns):
            own = numbers_of("replication", cells | plain, probe, metric, length)
            assert len(own) == (5 if mixer == "polar" or (mixer == "nope" and memory) else 3)
            exact = [fmean(own), *([min(own), max(own)] if at else [])]
            for tokens in ("65536000", "131072000"):
                (number,) = numbers_of("replication-longer", cells | {"train.tokens": tokens}, probe, metric, length)
                exact.append(number)
            page_numbers = map(float, re.findall(r"[\d.]+", " ".join(numbers[3 * at : 3 * at + 3])))
            close = pytest.approx([scale * number for number in exact], abs=0.5 * 10**-digits + 1e-9)
            assert list(page_numbers) == close, (mixer, memory, probe, length)


def test_repeated_first_conclusion_follows_from_its_contrasts(command_line: Command) -> None:
    contrasts = rows_of(command_line, "contrasts", "--sweep", "replication-retrieval")
    section = PAGE.split("### Asked again")[1].split("### At 370M")[0]
    rows = re.findall(r"^\| needle at ([\d,]+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == len(contrasts) == 2
    for (length, shown), row in zip(rows, contrasts, strict=True):
        tokens = int(length.replace(",", ""))
        off, on = (
            numbers_of("replication-retrieval", {"memory": level}, "needle", "digit_accuracy", tokens)
            for level in ("off", "on")
        )
        assert len(off) == len(on) == 32
        (constant,) = set(numbers_of("replication-retrieval", {}, "needle", "constant_accuracy", tokens))
        twice = [sum(accuracy >= 2 * constant for accuracy in side) for side in (off, on)]
        printed = {name: of(row, name)["printed"] for name in ("Mean", "Low", "High", "p corr", "p equiv")}
        numbers = "{Mean} [{Low}, {High}] | {p corr} | p {p equiv}".format(**printed)
        assert decided([(row, +1)]) == ("falls" if tokens == 16384 else "undecided")
        verdict = "**falls**" if tokens == 16384 else "undecided"
        assert shown == f"{100 * fmean(off):.1f} | {100 * fmean(on):.1f} | {numbers} | {verdict}"
        if tokens == 512:
            assert f"{twice[0]} of 32 networks without memory" in section
            assert f"and {twice[1]} of 32 with memory" in section
        else:
            assert twice == [4, 4]
            assert f"memory - none is {printed['Mean']} [{printed['Low']}, {printed['High']}] points there" in PAGE


@pytest.mark.thorough
def test_the_page_says_what_would_decide_what_is_undecided() -> None:
    """By its own code, with the spread of the cells themselves."""
    sweep_data = data("replication")
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL):
        exec(re.sub(r"^print.*$", "", code, flags=re.MULTILINE), names)
    calls = re.findall(r"^print\(again\((.*), (\d+), seeds=(\d+), tests=(\d)\)\)$", PAGE, re.MULTILINE)
    shown = re.findall(r"(\d\d)%", PAGE.split("**What would decide.**")[1].split("([simulated]")[0])
    needle, clean = ("needle", "digit_accuracy"), ("clean", "nats")
    for call, share, (probe, metric) in zip(calls, shown, (needle, needle, clean, clean, clean), strict=True):
        numbers = {
            (cell.levels["attn_type"], *row_of(cell), cell.seed): number_of(
                sweep_data, cell.cell_id, probe, metric, 16384
            )
            for cell in cells_of(sweep_data, {"recipe": "intended", "memory": "on"})
        }
        rows = sorted({key[1:4] for key in numbers})
        table = [[numbers["nope", *row, s] - numbers["polar", *row, s] for s in range(5)] for row in rows]
        parts = names["parts"](np.array(table))
        assert parts == pytest.approx([float(word) for word in call[0].split(", ")], abs=6e-5)
        size, seeds, tests = map(int, call[1:])
        # 250 sweeps have a standard deviation of 3 points at most
        assert 100 * names["again"](*parts, size, seeds, tests, sweeps=250) == pytest.approx(int(share), abs=11)


# --- the headline comparison --------------------------------------------------------------------------------------

HEADLINE_CELLS = [(mixer, memory) for mixer in ("polar", "nope") for memory in ("off", "on")]
FIRST_STAGE = "249036800"
HEADLINE_TEXT = "bfa14d6030fbabed34f5e78a67be3056f3dcc42759c82318789e44ae521ea64d"


def headline_number(mixer: str, memory: str, probe: str, metric: str, length: int = 0) -> float:
    cells = {"attn_type": mixer, "memory": memory, "train.tokens": FIRST_STAGE}
    (number,) = numbers_of(HEADLINE, cells, probe, metric, length)
    return number


def headline_rows(header: str) -> list[list[str]]:
    """Return the four rows below the page's table with this header, each without the cell's name."""
    lines = HEADLINE_PAGE.split(header)[1].splitlines()[2:6]
    rows = [[field.strip() for field in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == ["polar", "polar + memory", "nope", "nope + memory"]
    return [row[1:] for row in rows]


def test_headline_bundle_is_the_first_stage_of_its_grid() -> None:
    assert shipped.bundle_path(HEADLINE).stat().st_size < 3e6
    bundle = data(HEADLINE)
    (fingerprint,) = re.findall(r"Fingerprint\s+`([0-9a-f]+)`", HEADLINE_PAGE)
    assert HEADLINE_TEXT.startswith(fingerprint)
    assert {cell.cell_id for cell in bundle.cells} == {
        cell.id for cell in load_grid(HEADLINE).expand(lambda data: HEADLINE_TEXT)
    }
    done = {(cell_level(cell, "train.tokens"), bundle.standing(cell)) for cell in bundle.cells}
    assert done == {(FIRST_STAGE, "done"), ("996147200", "new")}


def test_headline_page_prints_the_losses_of_its_bundle() -> None:
    columns = (
        ("val", "val_loss", 0),
        *((probe, "nats", length) for probe in ("clean", "junk") for length in (2048, 65536)),
    )
    for (mixer, memory), row in zip(HEADLINE_CELLS, headline_rows("| cell | val | clean 2K |"), strict=True):
        shown = [float(re.sub("[s,% ]", "", field)) for field in row]
        exact = [headline_number(mixer, memory, *column) for column in columns]
        assert shown[:5] == pytest.approx(exact, abs=5.1e-4)
        names = ("train_seconds", "tokens_per_s", "mfu_paper")
        seconds, rate, mfu = (headline_number(mixer, memory, "throughput", name) for name in names)
        assert shown[5:] == [round(seconds), round(rate), pytest.approx(100 * mfu, abs=0.051)]


def test_headline_page_prints_the_needles_of_its_bundle() -> None:
    lengths = [2048 << step for step in range(6)]
    for (mixer, memory), row in zip(HEADLINE_CELLS, headline_rows("| cell | 2K | 4K |"), strict=True):
        for length, field in zip(lengths, row, strict=True):
            share, low, high = map(float, re.findall(r"[\d.]+", field))
            exact = headline_number(mixer, memory, "needle", "digit_accuracy", length)
            assert share == pytest.approx(100 * exact, abs=0.051)
            # Wilson's interval of that share in 80 trials, by its formula
            z, n = 1.959964, 80
            middle, half = exact + z * z / (2 * n), z * (exact * (1 - exact) / n + z * z / (4 * n * n)) ** 0.5
            bounds = [100 * (middle + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
            assert [low, high] == pytest.approx(bounds, abs=0.51)


@pytest.mark.thorough
def test_headline_figures_match_the_bundle(tmp_path: Path, command_line: Command) -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "experiments" / "headline").glob("*.svg"))
    assert len(names) == 4
    checked(tmp_path / "figures", command_line, names, "headline")


def test_rivals_bundle_is_the_sweep_of_its_page() -> None:
    """Its cells are those of the grid, but for three of Mamba2, whose micro-batch has changed since."""
    bundle = data(RIVALS)
    assert RIVALS_TEXT.startswith(re.findall(r"fingerprint\s+`([0-9a-f]+)`", RIVALS_PAGE)[0])
    done = {c.cell_id for c in bundle.cells if bundle.standing(c) == "done"}
    assert len(done) == len(bundle.cells) - 3 == 45
    planned = {c.id: c.slug for c in load_grid(RIVALS).expand(lambda data: RIVALS_TEXT)}
    assert {planned[c.cell_id] for c in bundle.cells if c.cell_id in planned} == {
        slug for slug in planned.values() if "Mamba2" not in slug
    }
    assert done <= set(planned)


def test_rivals_page_prints_the_losses_of_its_bundle() -> None:
    """Means over three seeds, and the accuracy of the needle at the training length."""
    bundle = data(RIVALS)
    lines = RIVALS_PAGE.split("| mixer | validation loss")[1].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    assert len(rows) == 15
    for name, loss, low_and_high, needle in rows:
        cells = [c for c in bundle.cells if c.axes["attn_type"] == name.strip("`")]
        losses = [number_of(bundle, c.cell_id, "val", "val_loss", 0) for c in cells]
        shares = [number_of(bundle, c.cell_id, "needle", "digit_accuracy", 512) for c in cells]
        assert len(losses) == len(shares) == 3
        assert float(loss) == pytest.approx(sum(losses) / 3, abs=5.1e-4)
        assert low_and_high == f"{min(losses):.3f} to {max(losses):.3f}"
        assert float(needle) == pytest.approx(100 * sum(shares) / 3, abs=0.051)


@pytest.mark.thorough
def test_rivals_files_match_the_bundle(tmp_path: Path, command_line: Command) -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "experiments" / RIVALS).iterdir())
    assert names == ["contrasts.md", "loss.svg", "needle.svg"]
    checked(tmp_path / "files", command_line, names, RIVALS)
