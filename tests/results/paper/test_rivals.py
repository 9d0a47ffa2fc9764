"""Numbers of rival papers, compared with independent notes on them, and the blog's bars with their own averages."""

import csv
import math
import re

import pytest
from atma_sweep.reports.number_format import Column, column_of
from atma_sweep.reports.sweep_data import SweepData, load_sweep_data
from atma_sweep.reports.table_builder import measured_entry
from atma_sweep.results import paper
from atma_sweep.results.builtin_sweeps import open_store_with_builtins
from atma_sweep.results.store.records import CellState
from optional_data import optional_data

NAMES = {"NoPE": "nope", "APE": "nope-ape", "REL": "rel", "RoPE": "rope", "Label": "nope-label", "FoT": "fox",
         "Diff": "diff", "CoPE": "cope", "TRA": "tra"}  # fmt: skip


IN_TEXT = {
    "vocabulary": "vocabulary",
    "beside RoPE": "gain in loss over RoPE at 1B",
    "fused gradient, T=8192": "wall-clock time saved by the fused gradient at T = 8192",
    "backward, all optimizations": "backward speed-up by all optimizations",
    "beside FlashAttention-2": "training beside FlashAttention-2",
    "extrapolation of loss": "tokens to which the loss extrapolates",
    "needle in a haystack": "needle retrieved to",
    "|log2 g|": "typical |log2 g|",
}
"""By what the list of printed values calls a fact of the Wall page's text: the setting that holds it."""


@pytest.fixture(scope="module")
def tra() -> SweepData:
    return published_alone("printed-tra")


def published_alone(sweep: str) -> SweepData:
    """Return a sweep as loaded without a database; only the requested sweep is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATMA_DB", raising=False)
        patch.setattr("atma_sweep.results.store.database.DEFAULT", "/missing/none.db")
        return load_sweep_data(open_store_with_builtins(None, sweep), sweep)


def cell(data: SweepData, slug: str) -> CellState:
    return next(candidate for candidate in data.cells if candidate.slug == slug)


def exact(which: str) -> Column:
    return column_of("flipflop", f"exact_{which}")


def share(column: Column) -> Column:
    """Return the column as printed: in percent with two digits."""
    return Column(column.heading, column.probe, column.metric, 2, True)


def test_flip_flop_is_what_was_written_down(tra: SweepData) -> None:
    """`FoT 93.4 ± 4.21` is sparse, `(dense 12.58 ± 15.87)` dense; the page has no more, the next test the rest."""
    (line,) = [
        item for item in (optional_data("RIVALS.md")).read_text().splitlines() if "add the spreads (4 seeds)" in item
    ]
    targets = re.findall(r"(\w+) ([\d.]+) ± ([\d.]+)(?: \(dense ([\d.]+)(?: ± ([\d.]+))?\))?", line)
    assert {name for name, *_ in targets} == set(NAMES) - {"TRA"}
    for name, mean, sd, dense, dense_sd in targets:
        item = cell(tra, f"{NAMES[name]}-flipflop")
        sparse = measured_entry(tra, [item], share(exact("sparse")))
        assert (sparse.value, sparse.sd, sparse.seeds) == (
            pytest.approx(float(mean) / 100, abs=1e-12),
            pytest.approx(float(sd) / 100, abs=1e-12),
            4,
        )
        assert sparse.text == f"{float(mean):.2f} ± {float(sd):.2f}"
        dense_entry = measured_entry(tra, [item], share(exact("dense")))
        if dense:
            assert dense_entry.value == pytest.approx(float(dense) / 100, abs=1e-12)
        if dense_sd:
            assert dense_entry.sd == pytest.approx(float(dense_sd) / 100, abs=1e-12)
    assert "TRA 100/100/100" in line
    all_of_it = [measured_entry(tra, [cell(tra, "tra-flipflop")], share(exact(name))).value for name in paper.SETS]
    assert all_of_it == [1.0, 1.0, 1.0]


def test_perplexities_are_what_was_written_down(tra: SweepData) -> None:
    targets = re.search(r"Full-run targets: ([\d. ]+) \(order ([\w ]+) TRA\)", (optional_data("RIVALS.md")).read_text())
    assert targets is not None
    names = [{"Rel": "REL"}.get(name, name) for name in (*targets[2].split(), "TRA")]
    for name, printed in zip(names, targets[1].split(), strict=True):
        row_cell = cell(tra, f"{NAMES[name]}-wikitext-103")
        entry = measured_entry(tra, [row_cell], column_of("extrapolation", "perplexity", decimals=2, length=128))
        assert entry.text.startswith(f"{printed} ± ")
    assert tra.lengths("extrapolation", "perplexity") == [128]


def listed_values(source: str) -> list[dict[str, str]]:
    """The rows of the list of printed values that are of one source."""
    file = optional_data("paper/rivals-missing.csv")
    with file.open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if row["paper"].startswith(source)]


def test_threshold_means_and_spreads_are_the_printed_ones(tra: SweepData) -> None:
    """Every mean and deviation that was taken down later, as both commands and tables read them."""
    sets = {"IID": "iid", "OOD sparse": "sparse", "OOD dense": "dense"}
    rows = listed_values("Threshold Relative Attention")
    for row in rows:
        if row["where"] == "Table 1":
            state, column = cell(tra, f"{NAMES[row['name']]}-flipflop"), share(exact(sets[row["setting"]]))
            scale = 100.0
        else:
            state, scale = cell(tra, f"{NAMES[row['name']]}-wikitext-103"), 1.0
            column = column_of("extrapolation", "perplexity", decimals=2, length=128)
        printed = measured_entry(tra, [state], column)
        assert (printed.value, printed.sd, printed.seeds) == (
            pytest.approx(float(row["value"]) / scale, abs=1e-12), pytest.approx(float(row["sd"]) / scale, abs=1e-12), 4,
        ), row  # fmt: skip
    assert len(rows) == 25


def test_no_cell_of_a_printed_table_is_empty(tra: SweepData) -> None:
    assert all(value.value is not None and value.reason is None for value in tra.values.values())
    # 9 mixers by 3 sets and 9 perplexities, each a mean and a standard deviation
    assert len(tra.values) == 2 * (27 + 9)


def test_wall_page_facts_are_the_printed_ones() -> None:
    settings, recipes = paper.rows("wall-settings"), paper.rows("wall-recipes")
    scores = {row["name"]: row["hellaswag"] for row in paper.rows("wall-hellaswag")}
    in_text = {row["setting"]: row["printed"] for row in settings if row["where"] == "text"}
    for row in listed_values("Wall Attention"):
        if row["where"].startswith("Figure 5"):
            assert scores.pop(row["name"]) == row["value"]
        elif row["where"] == "App. B":
            (shipped,) = [fact for fact in recipes if (fact["model"], fact["setting"]) == (row["name"], row["setting"])]
            assert (shipped["printed"], shipped["where"]) == (row["value"], "App. B")
        elif row["where"] == "App. E":
            chunk = row["name"].removeprefix("chunk of ")
            (shipped,) = [fact for fact in settings if fact["setting"].startswith(f"largest exponent at C = {chunk} ")]
            (factor,) = [fact for fact in settings if fact["setting"] == f"rescale factor at C = {chunk}"]
            assert (shipped["printed"], f"rescale factor {factor['printed']}") == (row["value"], row["note"])
        else:
            assert in_text[IN_TEXT[row["setting"]]].startswith(row["value"]), row
    assert not scores
    assert len(recipes) == 14


def test_atlas_settings_are_the_printed_ones() -> None:
    shipped = [row["printed"] for row in paper.rows("atlas-settings")]
    values = listed_values("ATLAS blog")
    for printed, row in zip(shipped, values, strict=True):
        assert printed == row["value"] or printed.startswith(f"{row['value']} {row['unit']}"), row


def test_every_printed_row_of_a_rival_names_its_source() -> None:
    for name in ("tra-flipflop", "tra-wikitext", "wall-settings", "wall-recipes", "wall-hellaswag", "atlas-settings"):
        assert all(row["where"] for row in paper.rows(name)), name


def test_threshold_cells_are_done_and_have_their_recipe(tra: SweepData) -> None:
    assert tra.done == len(tra.cells) == 18
    assert tra.extra_axes() == ["model.positions", "data.corpus"]
    tokens = {state.axes["data.corpus"]: state.tokens_total for state in tra.cells}
    assert tokens == {"flipflop": 25_000 * 64 * 512, "wikitext-103": 100_000 * 64 * 128}
    steps = {state.axes["data.corpus"]: state.steps_total for state in tra.cells}
    assert steps == {"flipflop": 25_000, "wikitext-103": 100_000}


def test_the_bars_of_the_blog_and_their_averages() -> None:
    """Every average is the mean of its four, as far as one digit tells; of FoX, 50.475, the blog prints 50.4."""
    data = published_alone("printed-wall")
    bars = {
        "rope": (68.0, 46.5, 31.1, 62.4, 52.0), "fox": (66.9, 45.0, 28.8, 61.2, 50.4),
        "wall-rotary-full": (67.1, 46.6, 33.1, 63.1, 52.5), "wall": (68.9, 47.1, 39.8, 63.0, 54.7),
    }  # fmt: skip
    assert {state.slug for state in data.cells} == set(bars)
    for slug, printed in bars.items():
        state = cell(data, slug)
        values = [
            100 * (measured_entry(data, [state], column_of("downstream", name)).value or math.nan)
            for name in ("hellaswag", "arc_c", "mmlu", "winogrande", "average")
        ]
        assert values == pytest.approx(printed)
        assert abs(sum(values[:4]) / 4 - values[4]) < 0.1
    fox = [value.value for value in data.values.values() if value.cell_id == cell(data, "fox").cell_id]
    assert sum(value for value in fox if value is not None) - 0.504 == pytest.approx(4 * 0.50475)


def test_blog_end_points_match_the_notes() -> None:
    (line,) = [item for item in (optional_data("RIVALS.md")).read_text().splitlines() if "blog's end points" in item]
    targets = re.search(r"end points ([\d.]+) \(ATLAS, ([\d.]+) h\) and ([\d.]+) \(transformer, half the time\)", line)
    assert targets is not None
    atlas, hours, transformer = map(float, targets.groups())
    data = published_alone("printed-atlas")
    values = {
        item.levels["memory"]: (
            measured_entry(data, [item], column_of("val", "val_loss")).value,
            measured_entry(data, [item], column_of("throughput", "train_seconds")).value,
        )
        for item in data.cells
    }
    assert values == {"atlas": (atlas, 3600 * hours), "off": (transformer, 1800 * hours)}
    assert data.done == len(data.cells) == 2
