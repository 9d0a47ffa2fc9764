"""The paper's numbers: what we ship, what the database holds, and what the tables print, digit for digit."""

import csv
import io
import json
import os
from collections import Counter

import pytest
from atma_sweep.reports.render import render
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.reports.tables.paper_rows import printed_discrepancies
from atma_sweep.results import paper
from atma_sweep.results.errors import StoreError, SweepReadOnly, SweepUnknown
from atma_sweep.results.names import PUBLISHED
from atma_sweep.results.paper.published_sweeps import published_sweep
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import Store, open_store

COMPLETE = {"v1": "table6_complete", "v2": "table8_complete"}
NUMBERS = ("val_loss", "clean_2k", "clean_64k", "junk_2k", "junk_64k", "needle_2k", "needle_64k", "mfu")
WORD = {True: "on", False: "off"}


def rows_of(store: Store, number: str, sweep: str) -> list[list[str]]:
    """Return the rows of a table as its CSV prints them, without headings."""
    text = render(make_table(number, store, sweep), "csv", trace=False)
    return list(csv.reader(io.StringIO(text)))[1:]


@pytest.mark.parametrize("version", paper.VERSIONS)
class TestCompleteResults:
    def test_printed_equals_the_shipped_csv(self, published, version):
        expected = [list(row.values()) for row in paper.rows(f"complete-{version}")]
        assert rows_of(published, "6", f"printed-{version}") == expected
        assert len(expected) == {"v1": 100, "v2": 120}[version]

    def test_printed_equals_the_paper(self, published, tables, version):
        expected = [
            [row["type"], row["reg"], *(WORD[row[name]] for name in ("distractor", "memory", "window"))]
            + [row["printed"][name] for name in NUMBERS]
            for row in tables[version][COMPLETE[version]]["rows"]
        ]
        assert rows_of(published, "6", f"printed-{version}") == expected

    def test_the_logs_round_to_the_same_digits(self, published, version):
        """So that nothing but rounding stands between the two sources of a cell."""
        data = load_sweep_data(published, f"printed-{version}")
        assert printed_discrepancies(data, "6") == []
        compared = sum(key[1] == "6" and key[2] in ("clean", "junk", "needle") for key in data.printed)
        assert compared == 6 * len(data.cells)


class TestSmallTables:
    @pytest.mark.thorough
    @pytest.mark.parametrize("version", paper.VERSIONS)
    def test_over_lengths(self, published, tables, version):
        sweep, printed_tables = f"printed-{version}", tables[version]
        first = [
            [str(row[0] // 1024) + "K", *printed(printed_tables["table1"]["columns"], row)]
            for row in printed_tables["table1"]["rows"]
        ]
        assert rows_of(published, "1", sweep) == first
        second = [
            [str(row[0] // 1024) + "K", *printed(printed_tables["table2"]["columns"], row)]
            for row in printed_tables["table2"]["rows"]
        ]
        assert rows_of(published, "2", sweep) == second
        third = [
            [str(row[0] // 1024) + "K", *printed(printed_tables["table3"]["columns"], row)]
            for row in printed_tables["table3"]["rows"]
        ]
        assert rows_of(published, "3", sweep) == third

    @pytest.mark.parametrize("version", paper.VERSIONS)
    def test_throughput(self, published, tables, version):
        printed_rows = tables[version]["table4_mfu" if version == "v1" else "table6_mfu"]["rows"]
        expected = [
            [f"{s:.2f}", f"{mfu:.1f}", "-" if drop is None else f"{drop:.1f}"] for _, s, mfu, drop in printed_rows
        ]
        assert [row[1:] for row in rows_of(published, "4", f"printed-{version}")] == expected

    @pytest.mark.parametrize("version", paper.VERSIONS)
    def test_regularizers(self, published, tables, version):
        printed_rows = tables[version]["table5_regularizers" if version == "v1" else "table7_regularizers"]["rows"]
        assert [row[:2] for row in rows_of(published, "5", f"printed-{version}")] == printed_rows

    def test_open_weight(self, published, tables):
        printed_table = tables["v2"]["table5_open_weight"]
        decimals = [1 if name.startswith("needle") else 2 for name in printed_table["columns"][2:]]
        expected = [
            [*row[:2], *(f"{x:.{d}f}" for x, d in zip(row[2:], decimals, strict=True))] for row in printed_table["rows"]
        ]
        assert rows_of(published, "open-weight", "printed-v2") == expected

    @pytest.mark.thorough
    def test_our_rows_of_the_open_weight_table_follow_from_the_logs(self, published):
        """Sum of L x value over sum of L, nats over ln 2, worked out for the six mixers and memories."""
        from atma_sweep.reports.tables import open_weight

        data = load_sweep_data(published, "printed-v2")
        table = make_table("open-weight", published, "printed-v2")
        columns = [
            open_weight._bits_column(probe, length, "")
            for probe in ("clean", "junk", "needle")
            for length in (0, 2048, 65536)
        ]
        texts = [[entry.text for entry in line.entries] for line in open_weight._own_rows(data, columns)]
        parameter_counts = [line.labels[1] for line in open_weight._own_rows(data, columns)]
        expected = [list(row) for row in table.rows[10:]]
        assert [name for name, *_ in expected][:1] == ["ATMA Polar + Titans Memory"]
        assert texts == [row[2:] for row in expected]
        assert parameter_counts == [row[1] for row in expected]

    def test_budgets(self, published, tables):
        printed_rows = tables["v2"]["table4_training_budgets"]["rows"]
        assert rows_of(published, "budgets", "printed-v2") == printed_rows
        for row in printed_rows[1:10]:  # 6 x parameters x tokens, from the printed parameters and tokens
            scale = {"M": 1e6, "T": 1e12}
            flops = 6 * float(row[1][:-1]) * scale[row[1][-1]] * float(row[2][:-1]) * scale[row[2][-1]]
            assert flops / 1e21 == pytest.approx(float(row[4].split()[0]), abs=0.06)


def printed(columns: list[str], row: list[float]) -> list[str]:
    """Return the numbers of a row as the paper prints them: losses with two decimals, accuracies with none."""
    return [f"{x:.2f}" if name.endswith("nats") else str(x) for name, x in zip(columns[1:], row[1:], strict=True)]


class TestShippedFiles:
    def test_logs_to_the_last_digit(self, tables):
        lengths = tables["reference_lengths"]
        compared = 0
        for row in paper.rows("lengths"):
            switches = "__".join(
                f"{short}-{int(row[axis] == 'on')}"
                for short, axis in (("distr", "distractor"), ("mem", "memory"), ("win", "window"))
            )
            reference = tables["reference_all_lengths"][f"{row['attn_type']}__reg-{row['reg_mode']}__{switches}"]
            index = lengths.index(int(row["length"]))
            for column, name in (("clean", "clean_ppl"), ("junk", "junk_ppl"), ("needle", "needle_acc")):
                assert row[column] == repr(reference[name][index])
                compared += 1
        assert compared == 120 * 6 * 3

    @pytest.mark.thorough
    def test_contradictions_match_expected_list(self, published, tables):
        expected = {
            (row["table"][:2], row["row"], row["printed"])
            for row in tables["verification"]["small_tables"]["disagreements_beyond_rounding"]
            if "Table 2" in row["table"]
        }
        discrepancies = {
            (version, discrepancy.length, discrepancy.printed)
            for version in paper.VERSIONS
            for discrepancy in printed_discrepancies(load_sweep_data(published, f"printed-{version}"), "2")
        }
        assert discrepancies == expected
        assert len(discrepancies) == 8
        steps = printed_discrepancies(load_sweep_data(published, "printed-v2"), "4")
        assert [(discrepancy.printed, discrepancy.logged) for discrepancy in steps] == [
            (28.33, 28.3377),
            (32.49, 32.4957),
        ]
        assert (
            printed_discrepancies(load_sweep_data(published, "printed-v2"), "1")
            == printed_discrepancies(load_sweep_data(published, "printed-v2"), "3")
            == []
        )


class TestLoading:
    def test_it_is_idempotent_and_read_only(self, published):
        before = published.events()
        assert paper.load_published(published) == []
        assert len(published.events()) == len(before)
        state = {summary.name: summary for summary in published.sweeps()}
        assert {name: (s.cells, s.read_only, s.owner) for name, s in state.items()} == {
            "printed-v1": (100, True, None),
            "printed-v2": (120, True, None),
            "printed-v2-open-weight": (17, True, None),
            "printed-tra": (18, True, None),
            "printed-wall": (4, True, None),
            "printed-atlas": (2, True, None),
        }
        with pytest.raises(SweepReadOnly):
            published.record_revision("printed-v2", grid_text="", grid_file="", cells=[])

    def test_every_published_cell_is_a_finished_training(self, published):
        cells = published.cell_states("printed-v2")
        assert Counter(cell.state for cell in cells) == {"done": 120}
        (attempt,) = published.attempts(cells[0].cell_id)
        assert (attempt.kind, attempt.state, attempt.owner) == ("train", "done", "published")
        provenance = published.provenance(attempt.id)
        assert provenance.gpu_name == "NVIDIA L4"
        assert provenance.extra["published"]["source"] == "arXiv:2606.25156"
        assert load_sweep_data(published, "printed-v2").done == 120

    def test_needle_values_are_integer_digit_counts(self, published):
        values = [v for v in published.values("printed-v2") if (v.probe, v.metric) == ("needle", "digit_accuracy")]
        assert len(values) == 720
        assert {value.n for value in values} == {80}
        assert all((value.value * 80).is_integer() for value in values)

    @pytest.mark.thorough
    def test_own_sweeps_stay_the_default_and_keep_their_cells(self, tmp_path, make):
        cell, _ = make
        store = open_store(tmp_path / "mine.db", create=True)
        store.record_revision("mine", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
        assert sorted(paper.load_published(store)) == sorted(PUBLISHED)
        assert store.default_sweep() == "mine"
        assert [state.cell_id for state in store.cell_states("mine")] == [f"{1:012x}"]
        assert paper.with_published(store, "printed-v2") is store

    def test_a_sweep_of_that_name_is_not_touched(self, tmp_path, make):
        cell, _ = make
        store = open_store(tmp_path / "taken.db", create=True)
        store.record_revision("printed-v1", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
        with pytest.raises(StoreError, match=r"of yours is named 'printed-v1'"):
            paper.load_published(store)
        assert len(store.cell_states("printed-v1")) == 1

    def test_a_sweep_of_that_name_is_never_shown_as_published(self, tmp_path, make):
        cell, _ = make
        store = open_store(tmp_path / "taken.db", create=True)
        store.record_revision("mine", grid_text="x", grid_file="x.yaml", cells=[cell(2)])
        store.record_revision("printed-v2", grid_text="x", grid_file="x.yaml", cells=[cell(1)])
        for name in ("mine", "printed-v2"):
            with pytest.raises(StoreError, match=r"of yours is named 'printed-v2'.*--name"):
                make_table("compare", store, name, reference="printed-v2")
        assert make_table("6", store, "printed-v2").trace["sweep"] == "printed-v2"
        assert paper.with_published(store, "printed-v1") is not store

    @pytest.mark.thorough
    def test_loading_resumes_after_interrupted_old_loader(self, tmp_path):
        """The old loader worked step by step, so the sweep is open and its first cell has an unfinished attempt."""
        store = open_store(tmp_path / "half.db", create=True)
        cells = published_sweep("printed-v1").cells
        store.record_revision("printed-v1", grid_text="# older", grid_file="results/paper", cells=cells)
        owner = Owner(name="published", host="paper", pid=0, started=0.0)
        store.start_attempt(cells[0].id, owner=owner, fence=1)
        assert paper.with_published(store, "printed-v1") is not store
        assert paper.load_published(store, ["printed-v1", "printed-v2"]) == ["printed-v1", "printed-v2"]
        assert [attempt.state for attempt in store.attempts(cells[0].id)] == ["interrupted", "done"]
        assert load_sweep_data(store, "printed-v1").done == 100
        table = make_table("6", store, "printed-v1")
        assert [list(row) for row in table.rows] == [list(row.values()) for row in paper.rows("complete-v1")]

    def test_without_a_database(self, tmp_path, make):
        store = paper.open_published()
        assert store.path is not None
        folder = store.path.parent
        assert os.listdir(folder)
        assert json.loads(render(make_table("1", store, "printed-v1"), "json"))[0]["sweep"] == "printed-v1"
        store.close()
        del store
        assert not folder.exists()

    def test_unknown_published_sweep_is_refused(self, store):
        with pytest.raises(SweepUnknown):
            paper.with_published(store, "printed-v3")
