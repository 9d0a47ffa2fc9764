"""The page of a sweep, read back: its numbers are the store's, and no text of the sweep can leave its place."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from atma_sweep.cli import app
from atma_sweep.reports.dashboard import curves as curves_module
from atma_sweep.reports.dashboard import page as module
from atma_sweep.reports.dashboard.caveats import sweep_caveats
from atma_sweep.reports.dashboard.curves import LossSeries
from atma_sweep.reports.dashboard.page import dashboard, decode_block
from atma_sweep.reports.stats.effects.effects import effects
from atma_sweep.reports.sweep_data import ReportError, SweepData, cell_level, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.errors import SweepUnknown
from atma_sweep.results.paper.published_sweeps import STEP_TOKENS, rows
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CurvePoint, Provenance
from atma_sweep.results.store.schema import AttemptRow
from atma_sweep.results.store.store import Store, open_store
from pages import Page
from statsmodels.stats.proportion import proportion_confint
from synthetic import OWNER, synthetic_sweep
from typer.testing import CliRunner

HOSTILE = "</script><script>window.broken=1</script><!--<img src=x onerror=window.broken=1>&lt;b&gt; $title ${policy}"


def read_series(data: bytes, count: int) -> tuple[LossSeries, bytes]:
    """Invert LossSeries.to_bytes, with Python's own struct instead of NumPy."""

    def column(size: int, kind: str) -> list[float]:
        nonlocal data
        planes = [data[index * count : (index + 1) * count] for index in range(size)]
        data = data[size * count :]
        return [struct.unpack(f"<{kind}", bytes(plane[i] for plane in planes))[0] for i in range(count)]

    tokens = np.cumsum(column(8, "d"))
    return LossSeries(tokens, np.array(column(4, "f")), np.array(column(4, "f"))), data


@pytest.fixture
def curved(store: Store) -> Store:
    """Return the small sweep with a curve and provenance in its first cell, and a failure."""
    first = store.cell_states("quick")[0]
    assert first.attempt_id is not None
    with store.transaction() as session:
        row = session.get(AttemptRow, first.attempt_id)
        assert row is not None
        row.state = "running"
    recorder = DatabaseRecorder(store, first.attempt_id, 1)
    recorder.provenance(Provenance(config={}, seed=0, git_commit="abc123", git_dirty=True, gpu_name="NVIDIA H200"))
    losses = [11.25, math.nan, 4.1, 3.3]
    recorder.curve(
        [
            CurvePoint(step=i, tokens=(i + 1) * 1000, wall_s=1.5 * i, train_loss=loss, val_loss=3.5 if i == 3 else None)
            for i, loss in enumerate(losses)
        ]
    )
    store.finish_attempt(first.attempt_id, 1, "done")
    return store


@pytest.mark.thorough
def test_needle_definition_names_constant_digit_baseline(printed_page: Path) -> None:
    page = Page(printed_page.read_text())
    core = page.core()
    definitions = {
        key["definition"] for key in core["keys"] if (key["probe"], key["metric"]) == ("needle", "digit_accuracy")
    }
    assert all(definition.endswith("Score of a trivial answer: 17.5%.") for definition in definitions)
    assert definitions
    assert [chart["hint"] for chart in core["charts"] if chart["probe"] == "needle"] == [
        "Needle accuracy, % of digits: constant-digit baseline 17.5 %, chance level 10 %."
    ]
    how = {measure["heading"]: measure["how"] for measure in page.block("answer")["best"]["measures"]}
    assert [heading for heading, text in how.items() if "constant-digit baseline 17.5 %" in text] == ["Ndl@64K"]


def test_numbers_are_those_of_table_6_and_of_the_store(curved: Store) -> None:
    core = Page(dashboard(curved, "quick")).core()
    table = make_table("6", curved, "quick")
    shown = core["tables"]["mean"]["rows"]
    assert [(*row["words"], *(number[0] for number in row["numbers"])) for row in shown] == list(map(tuple, table.rows))
    best = {(r, c + 5) for r, row in enumerate(shown) for c, number in enumerate(row["numbers"]) if number[4]}
    assert best == set(table.best)
    count = 0
    for cell in core["cells"]:
        measured = {(v.probe, v.metric, v.length): v for v in curved.measurements(cell["id"])}
        for key, value, n, low, high, attempt, reason in cell["values"]:
            key_facts = core["keys"][key]
            true = measured.pop((key_facts["probe"], key_facts["metric"], key_facts["length"]))
            if key_facts["metric"] == "digit_accuracy":
                # as it was stored, it counted 80 digits: those of 16 trials
                assert (low, high) == pytest.approx(proportion_confint(16 * value, 16, method="wilson"))
                low, high = true.low, true.high
            assert (value, n, low, high, attempt, reason) == (true.value, true.n, true.low, true.high, true.attempt_id, true.reason)  # fmt: skip
            count += 1
        assert cell["state"] == "running" or not measured
    assert count == 14
    assert [cell["state"] for cell in core["cells"]] == ["done", "done", "running", "diverged", "new"]


def test_a_number_leads_to_its_attempt(curved: Store) -> None:
    core = Page(dashboard(curved, "quick")).core()
    attempt = core["tables"]["mean"]["rows"][0]["numbers"][0][5][0]
    attempt_facts = dict(core["attempts"][str(attempt)])
    names = ("Commit", "GPU or device", "Host")
    assert [attempt_facts[name] for name in names] == ["abc123 with changes", "NVIDIA H200", "here"]
    stored = curved.attempt(attempt)
    assert attempt_facts["Attempt"].startswith(f"{attempt} (number {stored.number} of its cell, train, ")
    assert attempt_facts["Started"] == f"{stored.started_at:%Y-%m-%d %H:%M:%S} UTC"


def test_packed_curve_round_trips_and_breaks_at_nan(curved: Store) -> None:
    page = Page(dashboard(curved, "quick"))
    first = page.core()["cells"][0]
    assert first["curve"]["points"] == 4
    train, rest = read_series(decode_block(page.blocks[f"curve-{first['id']}"]), first["curve"]["kept"][0])
    val, rest = read_series(rest, first["curve"]["kept"][1])
    assert rest == b""
    assert train.tokens.tolist() == [1000, 2000, 3000, 4000]
    assert train.wall_s.tolist() == [0.0, 1.5, 3.0, 4.5]
    np.testing.assert_allclose(train.loss, [11.25, math.nan, 4.1, 3.3], rtol=8e-6)
    assert (val.tokens.tolist(), val.loss.tolist()) == ([4000], [3.5])
    assert [name for name in page.blocks if name.startswith("curve-")] == [f"curve-{first['id']}"]


def test_strided_curves_keep_their_last_point() -> None:
    numbers = np.arange(1900.0)
    for most in (5, 64, 100, 1899):
        tokens = LossSeries(numbers, numbers, numbers).strided(most).tokens
        assert tokens[-1] == 1899
        assert len(tokens) <= most
        assert len(set(np.diff(tokens))) <= 1
    assert len(LossSeries(numbers, numbers, numbers).strided(1900).tokens) == 1900


@pytest.mark.parametrize("gaps", [[], [7, 700, 701]])
def test_thinned_curves_keep_the_extremes_of_every_stretch(gaps: list[int]) -> None:
    """By hand: of each stretch the points that Python's min and max choose, and its first gap."""
    draw = np.random.default_rng(3)
    loss = draw.normal(3, 1, 1900).astype("<f4")
    loss[[1000, 1234]] = 50, -50
    loss[gaps] = np.nan
    tokens = np.arange(1900.0)
    for most in (5, 100, 250):
        thinned = LossSeries(tokens, loss, loss).thinned(most)
        chosen = set(thinned.tokens.astype(int))
        assert len(chosen) == len(thinned.tokens) <= most
        assert (thinned.loss == loss[thinned.tokens.astype(int)])[np.isfinite(thinned.loss)].all()
        size = -(-1900 // ((most - 2) // (3 if gaps else 2)))
        expected = {0, 1899}
        for start in range(0, 1900, size):
            stretch = [i for i in range(start, min(start + size, 1900)) if np.isfinite(loss[i])]
            missing = [i for i in gaps if start <= i < start + size]
            expected |= {min(stretch, key=lambda i: loss[i]), max(stretch, key=lambda i: loss[i]), *missing[:1]}
        assert chosen == expected
    assert len(LossSeries(tokens, loss, loss).thinned(1900).tokens) == 1900


def test_curve_bytes_have_five_digits() -> None:
    values = np.array([3.14159265, 1e-7, 65504.123, np.nan, np.inf, 0.0], dtype="<f4")
    data = LossSeries(np.arange(6.0), values, values).to_bytes()
    loss = np.frombuffer(data[-24:], np.uint8).reshape(4, 6).T.copy().view("<f4")[:, 0]
    np.testing.assert_allclose(loss, values, rtol=8e-6)
    assert {byte & 0x7F for byte in data[-24:-18]} == {0}, "seven bits of every lowest byte are zero"


@pytest.mark.parametrize(("points", "validations"), [(5, 0), (50, 1), (100, 2)])
def test_training_losses_stand_in_for_few_validations(empty: Store, points: int, validations: int) -> None:
    """A curve is in the overview from the first steps on, and stays until validations make a line of their own."""
    cells = synthetic_sweep(empty, 2, points)
    block = Page(dashboard(empty)).block("losses")
    shown = {
        name: [(cell, block["grids"][grid], len(losses)) for cell, grid, losses in block[name]]
        for name in ("lines", "training")
    }
    validated = [50 * 524_288 * number for number in range(1, validations + 1)]
    trained = [524_288 * step for step in range(1, points + 1)]
    assert shown["lines"] == ([(cell, validated, validations) for cell in range(len(cells))] if validations else [])
    assert shown["training"] == ([(cell, trained, points) for cell in range(len(cells))] if validations < 2 else [])


@pytest.mark.thorough
def test_effects_are_those_of_the_pairs(published: Store, printed_page: Path) -> None:
    page = Page(printed_page.read_text())
    shown = page.block("effects")
    data = load_sweep_data(published, "printed-v2")
    truth = effects(data)
    assert len(shown["rows"]) == len(truth) > 200
    for row, effect in zip(shown["rows"], truth, strict=True):
        scale = 100 if effect.measure.percent else 1
        assert dict(zip(shown["numbers"], row["numbers"], strict=True))["Pairs"] == str(effect.pairs)
        assert row["spot"] == [
            None if math.isnan(v) else round(scale * v, 9) for v in (effect.mean, effect.low, effect.high)
        ]
        assert row["sure"] == (effect.p_corrected < 0.05)
        # in the words of the figures, without identifiers of axes and levels
        assert not {"attn_type", "reg_mode", "polar", "nope", "rope", "baseline", "zipfian", "="} & set(re.findall(r"\w+|=", " ".join([*row["words"], row["family"]])))  # fmt: skip
        measure = shown["measures"][row["measure"]]
        assert (measure["probe"], measure["metric"], measure["length"]) == (effect.measure.probe, effect.measure.metric, effect.measure.length)  # fmt: skip
        assert [data.cells[cell].cell_id for cell in shown["pairs"][row["pairs"]]] == [
            cell for cell, _ in effect.origins
        ]
    labels = {tuple(row["words"]) for row in shown["rows"]}
    assert ("Mixer", "RoPE against PoLAR", "all ~") in labels
    assert ("Window", "on against off", "PoLAR, with memory") in labels
    assert {row["family"] for row in shown["rows"]} >= {"Val: mixer", "Val: regularizer"}


@pytest.mark.thorough
def test_several_seeds_are_means_and_rows_of_their_own(empty: Store) -> None:
    synthetic_sweep(empty, 6, 1, seeds=3)
    core = Page(dashboard(empty)).core()
    mean, each = core["tables"]["mean"]["rows"], core["tables"]["each"]["rows"]
    assert (len(mean), len(each)) == (2, 6)
    assert mean[0]["cells"] == [0, 1, 2]
    numbers = [row["numbers"][0][1] for row in each[:3]]
    assert mean[0]["numbers"][0][1] == pytest.approx(np.mean(numbers), rel=1e-12)
    assert mean[0]["numbers"][0][2] == pytest.approx(np.std(numbers, ddof=1), rel=1e-12)
    assert "±" in mean[0]["numbers"][0][0]


def test_policy_allows_only_hashes_of_page(curved: Store) -> None:
    text = dashboard(curved, "quick")
    page = Page(text)

    def hashed(part: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"

    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [hashed(page.scripts[0])]
    assert rules["style-src"].split() == [hashed(page.styles[0])]
    assert len(page.scripts) == len(page.styles) == 1
    assert "unsafe" not in page.policy
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)


def test_chart_library_is_the_published_file() -> None:
    # SHA-256 of dist/uPlot.iife.min.js and dist/uPlot.min.css of uPlot 1.6.31 as npm serves it
    hashes = {
        "uplot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
        "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    for name, sha256 in hashes.items():
        assert hashlib.sha256(module.library_source(name).encode()).hexdigest() == sha256


def test_hostile_text_stays_data(empty: Store, make: tuple[Callable[..., Any], Any], run: Callable[..., None]) -> None:
    build, numbers = make
    calm = build(1, axes={"note": "calm"})
    wild = build(2, attn_type=HOSTILE, axes={"note": HOSTILE})
    empty.record_revision(HOSTILE, grid_text=HOSTILE, grid_file="x", cells=[calm, wild])
    run(empty, calm.id, "done", numbers(1.5))
    attempt = empty.start_attempt(wild.id, owner=OWNER, fence=1)
    empty.finish_attempt(attempt.id, 1, "failed", cause=HOSTILE)
    text = dashboard(empty)
    page = Page(text)
    core = page.core()
    assert core["cells"][1]["cause"] == HOSTILE
    assert core["tables"]["mean"]["rows"][1]["words"][0] == HOSTILE
    assert core["grid"] == HOSTILE
    calm_tags = [tag for tag in page.tags if tag in ("img", "b", "iframe", "object")]
    assert calm_tags == []
    assert page.tags.count("script") == len(page.blocks) + 1
    assert "window.broken" not in re.sub(r"<title>.*?</title>|<h1.*?</h1>", "", text)
    assert "&lt;/script&gt;" in text


@pytest.mark.thorough
@pytest.mark.slow
def test_page_of_120_cells_is_small_and_reproducible(empty: Store, tmp_path: Path) -> None:
    synthetic_sweep(empty, 120, 1900)
    path = tmp_path / "page.html"
    size = module.write_dashboard(empty, path)
    first = path.read_bytes()
    assert size == len(first) < 5e6
    core = Page(first.decode()).core()
    assert all(cell["curve"]["kept"] == [1900, 38] for cell in core["cells"])
    empty.close()
    again = open_store(tmp_path / "empty.db")
    assert dashboard(again).encode() == first


def test_large_curves_are_thinned_and_counted(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "CURVE_POINTS", 1000)
    synthetic_sweep(empty, 8, 300)
    page = Page(dashboard(empty))
    curve = page.core()["cells"][0]["curve"]
    assert (curve["points"], curve["all"]) == (300, [300, 6])
    shown, validations = curve["kept"]
    assert (100 < shown <= 125, validations) == (True, 6)
    name = f"curve-{page.core()['cells'][0]['id']}"
    train, _ = read_series(decode_block(page.blocks[name]), shown)
    assert train.tokens[-1] == 300 * 524_288


def test_a_sweep_without_a_number_has_a_page(empty: Store, make: tuple[Callable[..., Any], Any]) -> None:
    empty.record_revision("none", grid_text="x", grid_file="x", cells=[make[0](1)])
    core = Page(dashboard(empty)).core()
    assert [number[0] for number in core["tables"]["mean"]["rows"][0]["numbers"]] == ["new"] * 8


@pytest.mark.thorough
def test_the_command_writes_the_file_and_says_where(curved: Store, tmp_path: Path) -> None:
    path = tmp_path / "quick.html"
    database = str(tmp_path / "test.db")
    done = CliRunner().invoke(app, ["report", "--dashboard", str(path), "--db", database, "--json"])
    assert done.exit_code == 0, done.output
    assert 1e5 < path.stat().st_size == json.loads(done.stdout)["bytes"] < 5e5
    with pytest.raises(SweepUnknown):
        dashboard(curved, "nothing of that name")


@pytest.mark.thorough
def test_comparison_block_agrees_with_compare_table(published: Store) -> None:
    page = Page(dashboard(published, "printed-v1", compare="printed-v2"))
    shown, summary = page.block("beside"), page.block("answer")["beside"]
    table = make_table("compare", published, "printed-v1", reference="printed-v2")
    headings = [measure["heading"] for measure in shown["measures"]]
    lines = [
        (
            *row["words"],
            headings[row["measure"]],
            {"not judged": "-"}.get(row["verdict"], row["verdict"]),
            *row["texts"],
        )
        for row in shown["rows"]
    ]
    assert lines == [(*row[:7], *row[8:]) for row in table.rows]
    assert len(lines) == 2000
    # both are read from the same logs, which say no speed of near-replicates
    counts = {measure["heading"]: (measure["beyond"], measure["unknown"]) for measure in shown["measures"]}
    assert set(counts.values()) == {(0, 0), (0, 100)}
    assert summary["lines"][0] == "Val: 0 of 100 numbers exceed the limit (5.0 expected by chance)."
    assert summary["lines"][-1] == "MFU: 100 numbers matched, none judged."
    core = page.core()
    for row in shown["rows"][:50]:
        (cell,) = (core["cells"][index] for index in row["cells"])
        assert [cell["axes"][axis] for axis in AXES] == row["words"]
    both = shown["effects"]["rows"][0]
    assert (both["here"]["level"], both["here"]["pairs"], both["there"]["pairs"]) == ("NoPE", 40, 40)


def test_comparison_says_why_numbers_are_not_judged(empty: Store, make: tuple[Callable[..., Any], Any]) -> None:
    build, numbers = make
    for number, (sweep, tokenizer) in enumerate([("bytes", "byte"), ("pieces", "gpt2")]):
        cell = build(number + 1)
        empty.record_revision(sweep, grid_text="x", grid_file="x", cells=[cell])
        attempt = empty.start_attempt(cell.id, owner=OWNER, fence=1)
        recorder = DatabaseRecorder(empty, attempt.id, 1)
        recorder.provenance(Provenance(config={}, seed=0, tokenizer=tokenizer))
        recorder.measurements(numbers(1.5 + number))
        empty.finish_attempt(attempt.id, 1, "done")
    empty.record_revision("others", grid_text="x", grid_file="x", cells=[build(9, attn_type="rope")])
    page = Page(dashboard(empty, "bytes", compare="pieces"))
    lines = page.block("answer")["beside"]["lines"]
    assert lines[0] == "Not judged, since the sweeps differ in kind: tokenizer byte instead of gpt2."
    assert {row["verdict"] for row in page.block("beside")["rows"]} == {"not judged"}
    nothing = Page(dashboard(empty, "bytes", compare="others")).block("answer")["beside"]
    assert nothing["why"] == "Sweeps bytes and others have no number of a common configuration."
    assert "beside" not in Page(dashboard(empty, "bytes")).blocks
    with pytest.raises(ReportError, match="choose another one"):
        dashboard(empty, "bytes", compare="bytes")
    with pytest.raises(SweepUnknown):
        dashboard(empty, "bytes", compare="nothing of that name")


@pytest.mark.thorough
def test_all_validation_losses_are_those_that_were_logged(printed_page: Path) -> None:
    page = Page(printed_page.read_text())
    shown, cells = page.block("losses"), page.core()["cells"]
    logged: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows("curves"):
        point = (int(row["step"]) * STEP_TOKENS, float(f"{np.float32(row['val_loss']):.5g}"))
        logged.setdefault(tuple(row[axis] for axis in AXES), []).append(point)
    losses_by_slug = {
        tuple(cells[index]["axes"][axis] for axis in AXES): list(zip(shown["grids"][grid], losses, strict=True))
        for index, grid, losses in shown["lines"]
    }
    assert len(losses_by_slug) == 120
    assert len(shown["grids"]) == 1  # all were read at the same tokens
    assert losses_by_slug == logged


@pytest.mark.thorough
def test_caveats_of_published_sweep(printed_page: Path) -> None:
    page = Page(printed_page.read_text())
    caveats = [*page.core()["care"], *page.block("answer")["care"]]
    values = [round(80 * float(row["needle"]) / 100) for row in rows("lengths") if row["length"] == "65536"]
    below = sum(digits <= 14 for digits in values)
    assert f"Ndl@64K: {below} of 120 cells score at or below the constant-digit baseline (17.5 %): differences between them do not reflect retrieval." in caveats  # fmt: skip
    assert sum("weak, discrete, Zipfian have a weight of about 1e-6" in line for line in caveats) == 1
    assert sum("(n = 1)" in line for line in caveats) == 1
    assert "P(best): Ndl@64K 37%" in " ".join(caveats)


@pytest.mark.thorough
def test_caveats_name_diverged_runs_and_uneven_seeds(
    empty: Store, make: tuple[Callable[..., Any], Any], run: Callable[..., None]
) -> None:
    build, numbers = make
    cells = []
    for index in range(12):
        cells.append(build(index, memory=("off", "on")[index % 2], reg_mode=("weak", "strong", "baseline")[index // 4], window=("off", "on")[index // 2 % 2]))  # fmt: skip
    cells.append(build(20, seed=1, memory="off", reg_mode="weak"))
    empty.record_revision("some", grid_text="x", grid_file="x", cells=cells)
    for index, cell in enumerate(cells):
        if index == 3:
            run(empty, cell.id, "diverged", [])
        else:
            run(empty, cell.id, "done", numbers(2 + index / 10))
    page = Page(dashboard(empty))
    caveats = " ".join([*page.core()["care"], *page.block("answer")["care"]])
    assert "11 of 12 configurations have one run, the others up to 2 seeds" in caveats
    assert "1 of 13 cells lack numbers (1 diverged)" in caveats
    assert "With the worst value instead: " in caveats
    assert "1e-6" not in caveats
    # every cell answered alike
    best = {measure["heading"]: measure for measure in page.block("answer")["best"]["measures"]}
    assert best["Ndl@64K"]["how"] == "All 11 configurations have the same number, 96.3: none is the best."
    assert best["Ndl@64K"]["rows"] == []


@pytest.mark.thorough
def test_page_of_printed_numbers_has_no_run_facts(printed_page: Path) -> None:
    page = Page(printed_page.read_text())
    core = page.core()
    assert (core["launched"], core["printed"]) == (None, "arXiv:2606.25156v2")
    for attempt, facts in core["attempts"].items():
        assert [name for name, _ in facts] == ["Attempt", "Commit", "GPU or device"]
        assert facts[0][1] == f"{attempt} (the authors’ run; nothing ran here)"


@pytest.mark.thorough
def test_caveat_names_cells_with_summed_loss() -> None:
    def caveats_of(data: SweepData) -> list[str]:
        return [
            line.split(" is summed over tokens")[0]
            for line in sweep_caveats(data, [])
            if "is summed over tokens" in line
        ]

    replication = load_sweep_data(shipped_store("replication"), "replication")
    assert caveats_of(replication) == ["The loss of recipe published"]
    half = replace(replication, cells=[cell for cell in replication.cells if cell_level(cell, "recipe") == "published"])
    assert caveats_of(half) == ["The loss"]
    # no level has all of them and no others
    four = [
        cell
        for cell in replication.cells
        if cell_level(cell, "recipe") == "intended" and cell_level(cell, "reg_mode") == "weak"
    ][:4]
    summed = next(replication.configs[cell.cell_id] for cell in half.cells if cell_level(cell, "reg_mode") == "weak")
    mixed = replace(replication, cells=four, configs={**replication.configs, four[0].cell_id: summed})
    assert caveats_of(mixed) == ["The loss of 1 of 4 cells"]
