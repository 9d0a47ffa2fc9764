"""Measured beside published; and what differs between cells besides their axes."""

import math
import time
from dataclasses import replace

import pytest
from atma_sweep.reports.data import ReportError
from atma_sweep.reports.stats.audit import homogeneity
from atma_sweep.reports.tables import make_table
from atma_sweep.reports.tables.compare import compare
from atma_sweep.results.store.recorder import Recorder
from atma_sweep.results.store.records import Measurement, Owner, Provenance
from scipy import stats

SAME = Provenance(
    config={"train": {"micro_batch": 4, "schedule": "cosine"}, "model": {"memory": "none"}},
    seed=0,
    git_commit="a" * 40,
    git_dirty=False,
    packages={"torch": "2.13.0", "numpy": "2.4.6"},
    python="3.11.7",
    gpu_name="NVIDIA H200",
    device="cuda",
    driver="580.1",
    dtype="bfloat16",
    kernels={"gated_conv": "triton"},
    tokenizer="gpt2",
    corpus="fineweb-edu",
    corpus_fingerprint="f" * 64,
)


@pytest.fixture
def measure(empty):
    """Records a finished attempt with its provenance, the attempts one after the other."""
    store = empty

    def record(name, cells, values, provenances=None, hosts=None):
        store.record_revision(name, grid_text="x", grid_file="x", cells=cells)
        for index, (one, found) in enumerate(zip(cells, values, strict=True)):
            owner = Owner(name="ada", host=hosts[index] if hosts else f"host-{index}", pid=1, started=0.0)
            attempt = store.start_attempt(one.id, owner=owner, fence=1)
            recorder = Recorder(store, attempt.id, 1)
            recorder.provenance(provenances[index] if provenances else SAME)
            recorder.measurements(found)
            store.finish_attempt(attempt.id, 1, "done")
        return store

    return record


def val(value: float) -> list[Measurement]:
    return [Measurement(probe="val", metric="val_loss", value=value)]


class TestCompare:
    def test_within_and_beyond_by_hand(self, measure, make):
        cell, _ = make
        cells = [cell(0), cell(1, attn_type="nope"), cell(2, attn_type="wall")]
        store = measure("mine", cells, [val(3.180), val(3.5), val(1.0)])
        found = {one.levels[0]: one for one in compare(store, "mine")}
        assert set(found) == {"polar", "nope"}
        polar = found["polar"]
        assert (polar.measured.value, polar.published.value) == (3.180, 3.169)
        assert polar.difference == pytest.approx(0.011)
        # the printed losses of polar with memory over the five regularizers
        near = [3.169, 3.179, 3.172, 3.184, 3.171]
        sd = math.sqrt(sum((x - sum(near) / 5) ** 2 for x in near) / 4)
        assert polar.spread.sd == pytest.approx(sd)
        assert polar.limit == pytest.approx(stats.t.ppf(0.975, 4) * sd * math.sqrt(2))
        assert (polar.verdict, found["nope"].verdict) == ("within", "beyond")

    def test_the_four_contradictions_are_flagged_and_the_log_is_compared(self, published):
        found = [one for one in compare(published, "printed-v1", "printed-v2") if one.flags]
        assert [(one.levels, one.column.heading, f"{one.published.value:.3f}") for one in found] == [
            (("polar", "baseline", "off", "on", "off"), f"Clean@{length}", value)
            for length, value in (("4K", "2.577"), ("8K", "2.440"), ("16K", "2.281"), ("32K", "2.139"))
        ]
        assert found[0].flags == ("Table 2 prints 2.45, the log gives 2.58 at 4K",)
        assert {one.verdict for one in compare(published, "printed-v1", "printed-v2")} == {"within"}

    def test_the_table(self, measure, make):
        cell, _ = make
        needle = Measurement(probe="needle", metric="digit_accuracy", length=65536, value=0.9625, n=80)
        store = measure("mine", [cell(0)], [[*val(3.180), needle]])
        table = make_table("compare", store, "mine")
        assert [row[5:] for row in table.rows] == [
            ("Val", "within", "-", "3.180", "3.169", "+0.011", table.rows[0][-1]),
            ("Ndl@64K", "within", "-", "96.3", "92.5", "+3.8", table.rows[1][-1]),
        ]
        notes = " ".join(table.notes)
        assert "Unlike printed-v2: GPU NVIDIA H200 instead of NVIDIA L4" in notes
        assert "train.schedule cosine instead of linear" in notes
        assert "micro_batch" not in notes
        assert "Val: 1 within the known spread, 0 beyond." in notes
        assert [source["attempts"] for source in table.trace["sources"]] == [[1]]

    def test_the_numbers_of_one_table(self, published):
        second = make_table("compare", published, "printed-v1", reference="printed-v2", table="2")
        assert len(second.rows) == 6 * 6
        assert sum(row[7] != "-" for row in second.rows) == 4
        sixth = make_table("compare", published, "printed-v1", reference="printed-v2", table="6")
        assert len(sixth.rows) == 100 * 8
        with pytest.raises(ReportError, match="no printed numbers of table 9"):
            make_table("compare", published, "printed-v1", reference="printed-v2", table="9")

    def test_nothing_in_common(self, measure, make):
        cell, _ = make
        store = measure("mine", [cell(0, attn_type="wall")], [val(1.0)])
        with pytest.raises(ReportError, match="no number of a common configuration"):
            compare(store, "mine")

    def test_seeds_are_averaged_and_tighten_the_limit(self, measure, make):
        cell, _ = make
        store = measure("mine", [cell(0, seed=0), cell(1, seed=1)], [val(3.17), val(3.19)])
        (one,) = compare(store, "mine")
        assert one.measured.value == pytest.approx(3.18)
        assert one.limit == pytest.approx(stats.t.ppf(0.975, 4) * one.spread.sd * math.sqrt(1 + 1 / 2))


class TestHomogeneity:
    def audit(self, measure, make, *provenances, hosts=None, levels=("off", "on")):
        cell, _ = make
        cells = [cell(index, memory=levels[index % len(levels)], seed=index // 2) for index in range(len(provenances))]
        store = measure("s", cells, [val(1.0)] * len(cells), list(provenances), hosts)
        return homogeneity(store)

    def test_nothing_to_say(self, measure, make):
        assert self.audit(measure, make, SAME, SAME, SAME) == []

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"gpu_name": "NVIDIA L4"}, "GPU differs: NVIDIA H200 (2 cells), NVIDIA L4 (1 cell)"),
            ({"driver": "550"}, "driver differs"),
            ({"git_commit": "b" * 40}, "code differs: aaaaaaaaaaaa (2 cells), bbbbbbbbbbbb (1 cell)"),
            ({"git_dirty": True}, "code differs: aaaaaaaaaaaa (2 cells), aaaaaaaaaaaa with changes (1 cell)"),
            ({"dtype": "float32"}, "precision differs"),
            ({"python": "3.12.1"}, "Python differs"),
            (
                {"packages": {"torch": "2.12.0", "numpy": "2.4.6"}},
                "package torch differs: 2.13.0 (2 cells), 2.12.0 (1 cell)",
            ),
            ({"kernels": {"gated_conv": "torch"}}, "kernel of gated_conv differs"),
            ({"corpus_fingerprint": "0" * 64}, "corpus differs"),
            ({"git_commit": None, "git_dirty": None}, "not recorded: code (1 of 3 cells)"),
        ],
    )
    def test_what_differs_is_named(self, measure, make, change, said):
        (line,) = self.audit(measure, make, SAME, SAME, replace(SAME, **change))
        assert line.startswith(said)

    def test_an_axis_explains_its_setting_but_never_the_micro_batch(self, measure, make):
        config = {"train": {"micro_batch": 2, "schedule": "cosine"}, "model": {"memory": "gated_delta"}}
        other = replace(SAME, config=config)
        lines = self.audit(measure, make, SAME, other, SAME, other)
        assert lines == ["train.micro_batch differs: 2 (2 cells), 4 (2 cells)"]

    def test_a_recipe_that_follows_no_axis_is_named(self, measure, make):
        other = replace(SAME, config={"train": {"micro_batch": 4, "schedule": "linear"}, "model": {"memory": "none"}})
        assert self.audit(measure, make, SAME, SAME, SAME, other) == [
            "train.schedule differs: cosine (3 cells), linear (1 cell)"
        ]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"probes": ["needle"]}, []),
            ({"lengths": [128]}, []),
            ({"needle_trials": 8}, ["eval.needle_trials differs: 16 (3 cells), 8 (1 cell)"]),
        ],
    )
    def test_what_was_asked_for_is_no_difference_but_how_it_was_measured_is(self, measure, make, change, said):
        asked = {"probes": ["val"], "lengths": [64], "needle_trials": 16}
        same, other = (replace(SAME, config={"eval": one}) for one in (asked, asked | change))
        assert self.audit(measure, make, same, same, same, other) == said

    def test_restarts_and_neighbours(self, measure, make, store, run):
        cell, _ = make
        cells = [cell(50), cell(51, memory="off")]
        store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
        run(store, cells[0].id, "interrupted", [])
        first = [
            store.start_attempt(one.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1) for one in cells
        ]
        for attempt in first:
            recorder = Recorder(store, attempt.id, 1)
            recorder.provenance(SAME)
            recorder.measurements(val(1.0))
        for attempt in first:
            store.finish_attempt(attempt.id, 1, "done")
        assert homogeneity(store, "s") == [
            "restarts: 1 of 2 cells took more than one training attempt",
            "co-tenancy: up to 2 attempts at once on h; their speeds may have suffered",
        ]
        table = make_table("6", store, "s")
        assert table.above[0].startswith("Before comparing: restarts: 1 of 2")

    def test_shared_gpus(self, store, make):
        cell, _ = make
        cells = [cell(70 + i, seed=i) for i in range(3)]
        store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
        for one, others in zip(cells, (0, 3, 1), strict=True):
            attempt = store.start_attempt(one.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
            recorder = Recorder(store, attempt.id, 1)
            recorder.provenance(replace(SAME, gpu_uuid="GPU-a", co_tenants=others))
            recorder.measurements(val(1.0))
            store.finish_attempt(attempt.id, 1, "done")
            time.sleep(0.003)
        assert homogeneity(store, "s") == [
            "shared GPUs: 2 cells had up to 3 other attempts on the same GPU; "
            "their tokens/s and MFU are not those of the GPU alone"
        ]

    def test_deviations(self, store, make):
        cell, _ = make
        one = cell(60)
        store.record_revision("s", grid_text="x", grid_file="x", cells=[one])
        attempt = store.start_attempt(
            one.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1, deviation={"train.micro_batch": 2}
        )
        recorder = Recorder(store, attempt.id, 1)
        recorder.provenance(SAME)
        recorder.measurements(val(1.0))
        store.finish_attempt(attempt.id, 1, "done")
        assert homogeneity(store, "s") == ["train.micro_batch=2, other than asked for, in 1 cell"]

    def test_the_paper(self, published):
        assert homogeneity(published, "printed-v2") == [
            "not recorded by the paper: code, software, seeds, restarts, co-tenancy"
        ]
