"""Measured beside published; and what differs between cells besides their axes."""

import math
import time
from dataclasses import replace

import pytest
from atma_sweep.cli import app
from atma_sweep.reports.stats.audit import audit_differences
from atma_sweep.reports.stats.sweep_differences import match_configurations
from atma_sweep.reports.sweep_data import ReportError, load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.paper import open_published
from atma_sweep.results.shipped import shipped_store
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Measurement, Owner, Provenance
from scipy import stats
from sweeps import compare
from typer.testing import CliRunner

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
        for index, (record, values_of_cell) in enumerate(zip(cells, values, strict=True)):
            owner = Owner(name="ada", host=hosts[index] if hosts else f"host-{index}", pid=1, started=0.0)
            attempt = store.start_attempt(record.id, owner=owner, fence=1)
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.provenance(provenances[index] if provenances else SAME)
            recorder.measurements(values_of_cell)
            store.finish_attempt(attempt.id, 1, "done")
        return store

    return record


def val(value: float) -> list[Measurement]:
    return [Measurement(probe="val", metric="val_loss", value=value)]


LIKE = replace(
    SAME, config={"train": {"micro_batch": 4, "schedule": "linear", "loss_reduction": "sum"}}, corpus_fingerprint=""
)
"""An attempt that shares with the published ones whatever they recorded, but for the GPU."""
BYTES = replace(
    SAME,
    tokenizer="bytes",
    corpus="stdlib",
    config={
        "train": {"tokens": 200_000, "micro_batch": 8, "schedule": "cosine", "loss_reduction": "mean"},
        "model": {"d_model": 64, "attn_type": "polar", "memory": "gated_delta", "window": False},
        "eval": {"documents": 2, "needle_trials": 4},
    },
)


def spread_of(group: list[list[float]]) -> tuple[float, int]:
    """Pooled standard deviation of these groups, by hand, and its degrees of freedom."""
    squares = sum((x - sum(values) / len(values)) ** 2 for values in group for x in values)
    df = sum(len(values) - 1 for values in group)
    return math.sqrt(squares / df), df


@pytest.fixture(scope="module")
def printed(published):
    """Return the published validation losses (length 0) and needle accuracies by levels and length."""
    data = load_sweep_data(published, "printed-v2")
    keys = [("val", "val_loss", 0), *(("needle", "digit_accuracy", length) for length in (2048, 65536))]
    return {
        (*cell.levels.values(), key[2]): data.value(cell.cell_id, *key).value for cell in data.cells for key in keys
    }


def near(printed, mixer: str, memory: str, length: int) -> list[list[float]]:
    """The groups of near-replicates of a mixer and memory: all regularizers but `strong`."""
    return [
        [
            printed[mixer, mode, distractor, memory, window, length]
            for mode in ("baseline", "weak", "discrete", "zipfian")
        ]
        for distractor in ("off", "on")
        for window in ("off", "on")
    ]


class TestCompare:
    @pytest.mark.parametrize(("mixer", "further"), [("none", []), ("rope", ["none"])])
    def test_an_open_mixer_of_the_reference_has_a_second_match(self, measure, make, mixer, further):
        """The ATLAS blog leaves open whether attention stands beside the memory; a cell with it is preferred."""
        cell, _ = make
        names = [mixer, *further, "polysketch"]
        cells = [
            cell(at, attn_type=name, memory="off" if name == "polysketch" else "atlas") for at, name in enumerate(names)
        ]
        seconds = Measurement(probe="throughput", metric="train_seconds", value=3600.0)
        values = [[*val(5.0 + at), seconds] for at, _ in enumerate(cells)]
        store = measure("mine", cells, values, [LIKE] * len(cells))
        compared = {
            c.column.metric: (c.measured.value, c.published.value) for c in compare(store, "mine", "printed-atlas")
        }
        assert compared == {"val_loss": (5.0, 5.5), "train_seconds": (3600.0, 9000.0)}
        notes = make_table("compare", store, "mine", reference="printed-atlas").notes
        assert any("its source leaves the mixer open" in note for note in notes) == (mixer == "none")

    def test_within_and_beyond_by_hand(self, measure, make, printed):
        cell, _ = make
        cells = [cell(0), cell(1, attn_type="nope"), cell(2, attn_type="wall")]
        store = measure("mine", cells, [val(3.180), val(3.5), val(1.0)], [LIKE] * 3)
        comparison_by_mixer = {comparison.levels[0]: comparison for comparison in compare(store, "mine")}
        assert set(comparison_by_mixer) == {"polar", "nope"}
        polar = comparison_by_mixer["polar"]
        assert (polar.measured.value, polar.published.value) == (3.180, 3.169)
        assert polar.difference == pytest.approx(0.011)
        sd, df = spread_of(near(printed, "polar", "on", 0))
        assert (polar.spread.sd, polar.spread.df) == (pytest.approx(sd), df)
        assert polar.limit == pytest.approx(stats.t.ppf(0.975, df) * sd * math.sqrt(2))
        assert (polar.verdict, comparison_by_mixer["nope"].verdict) == ("within", "beyond")

    def test_paper_versions_compare_with_plausible_limits(self, published, printed):
        comparisons = compare(published, "printed-v1", "printed-v2")
        logged = [comparison for comparison in comparisons if comparison.column.probe in ("clean", "junk", "needle")]
        assert len(logged) == 100 * 18
        assert {comparison.difference for comparison in logged} == {0.0}
        assert {comparison.verdict for comparison in comparisons if comparison.column.probe != "throughput"} == {
            "within"
        }
        # speed costs no two regularizers the same, and there are no seeds
        assert {
            (comparison.verdict, comparison.limit)
            for comparison in comparisons
            if comparison.column.probe == "throughput"
        } == {("-", None)}
        limits = {
            (comparison.levels[0], comparison.levels[3]): comparison.limit
            for comparison in comparisons
            if comparison.column.heading == "Ndl@64K"
        }
        sd, df = spread_of(near(printed, "polar", "on", 65536))
        assert limits["polar", "on"] == pytest.approx(stats.t.ppf(0.975, df) * sd * math.sqrt(2))
        assert 0.4 < limits["polar", "on"] < 0.7, "one in a hundred needs more than half of the scale, not all of it"
        # no rope cell has a digit right: by Jeffreys half a hit in the 16 trials of each of 17 or 20 cells
        rate = 0.5 / (20 * 16 + 1)
        floor = stats.t.ppf(0.975, df) * math.sqrt(rate * (1 - rate) / 16) * math.sqrt(2)
        assert limits["rope", "on"] == pytest.approx(floor)
        assert min(comparison.limit for comparison in logged if comparison.column.probe == "needle") > 1 / 80

    def test_never_less_than_a_printed_digit(self, measure, make, empty):
        """Seeds that agree to the last digit do not make a difference of one digit a finding."""
        cell, _ = make
        cells = [cell(10 * i + seed, attn_type=kind, seed=seed) for i, kind in enumerate(("polar", "nope")) for seed in (0, 1)]  # fmt: skip
        first = measure("first", cells, [val(3.0)] * 4, [LIKE] * 4)
        second = measure("second", [cell(50), cell(51, attn_type="nope")], [val(3.001), val(3.0011)], [LIKE] * 2)
        assert first is second
        comparisons = compare(second, "second", "first")
        assert [(comparison.limit, comparison.verdict) for comparison in comparisons] == [
            (pytest.approx(0.001), "within"),
            (pytest.approx(0.001), "beyond"),
        ]

    def test_contradictions_are_flagged(self, published):
        flagged = [comparison for comparison in compare(published, "printed-v1", "printed-v2") if comparison.flags]
        assert [
            (comparison.levels, comparison.column.heading, f"{comparison.published.value:.3f}")
            for comparison in flagged
        ] == [
            (("polar", "baseline", "off", "on", "off"), f"Clean@{length}", value)
            for length, value in (("4K", "2.577"), ("8K", "2.440"), ("16K", "2.281"), ("32K", "2.139"))
        ]
        assert flagged[0].flags == ("Table 2 prints 2.45, the log gives 2.58 at 4K",)

    def test_the_table(self, measure, make):
        cell, _ = make
        needle = Measurement(probe="needle", metric="digit_accuracy", length=65536, value=0.9625, n=80)
        speed = Measurement(probe="throughput", metric="mfu_paper", value=0.5)
        store = measure("mine", [cell(0)], [[*val(3.180), needle, speed]], [LIKE])
        table = make_table("compare", store, "mine")
        assert [row[5:] for row in table.rows] == [
            ("Val", "within", "-", "3.180", "3.169", "+0.011", table.rows[0][-1]),
            ("Ndl@64K", "within", "-", "96.3", "92.5", "+3.8", table.rows[1][-1]),
            ("MFU", "-", "-", "50.0", "35.6", "+14.4", "-"),
        ]
        assert table.above[0] == "Not judged: MFU (GPU NVIDIA H200 instead of NVIDIA L4)."
        assert "Differences from printed-v2: GPU NVIDIA H200 instead of NVIDIA L4." in table.notes
        assert "Val: 1 within the known spread, 0 beyond (0.1 expected by chance)." in table.notes
        assert "MFU: not judged." in table.notes
        # what one side alone says is no difference, and is not passed over
        (lacking,) = [note for note in table.notes if note.startswith("Not recorded for mine: ")]
        assert lacking.startswith(
            "Not recorded for mine: parameters, train.tokens, train.batch_tokens, train.seq_len, "
        )
        assert [source["attempts"] for source in table.trace["sources"]] == [[1]]

    def test_chance_alone(self, published, monkeypatch):
        """With limits at 95%, twenty judged numbers are expected to give one beyond."""
        table = make_table("compare", published, "printed-v1", reference="printed-v2", table="2")
        notes = [note for note in table.notes if "expected by chance" in note]
        assert notes[0] == "Clean@2K: 3 within the known spread, 0 beyond (0.2 expected by chance)."

    @pytest.mark.thorough
    def test_compare_restricted_to_a_table(self, published):
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

    def test_compare_several_seeds_with_single_published_run(self, measure, make, printed):
        cell, _ = make
        store = measure("mine", [cell(0, seed=0), cell(1, seed=1)], [val(3.17), val(3.19)], [LIKE] * 2)
        (comparison,) = compare(store, "mine")
        assert comparison.measured.value == pytest.approx(3.18)
        sd, df = spread_of(near(printed, "polar", "on", 0))
        assert comparison.limit == pytest.approx(stats.t.ppf(0.975, df) * sd * math.sqrt(1 + 1 / 2))


class TestRefusal:
    """Numbers of another text, network or recipe stand side by side, and nobody is told that they agree or not."""

    def test_a_small_model_of_bytes_is_not_judged(self, measure, make):
        cell, _ = make
        needle = Measurement(probe="needle", metric="digit_accuracy", length=65536, value=0.9, n=20)
        size = Measurement(probe="throughput", metric="parameters", value=530_000)
        store = measure("mine", [cell(0)], [[*val(1.5), needle, size]], [BYTES])
        table = make_table("compare", store, "mine")
        assert [(row[5], row[6], row[8], row[9], row[10], row[11]) for row in table.rows] == [
            ("Val", "-", "1.500", "3.169", "-1.669", "-"),
            ("Ndl@64K", "-", "90.0", "92.5", "-2.5", "-"),
        ]
        (line,) = [line for line in table.above if line.startswith("Not judged")]
        assert line.startswith(
            "Not judged, since the sweeps differ in kind: tokenizer bytes instead of gpt2; corpus stdlib instead of "
            "fineweb-edu; parameters 530K instead of 378M; train.tokens 200000 instead of 996147200; "
        )
        for text in ("train.loss_reduction mean instead of sum", "train.schedule cosine instead of linear"):
            assert text in line
        assert "\n" not in line
        notes = " ".join(table.notes)
        assert "eval.documents 2 instead of 16" in notes
        assert "model.memory" not in notes, "the level of an axis is matched"
        assert "Not recorded for printed-v2: model.d_model." in table.notes
        assert {comparison.limit for comparison in compare(store, "mine")} == {None}

    def test_settings_of_the_network_are_differences(self, measure, make):
        cell, _ = make
        wide, narrow = (
            {"train": {"schedule": "linear"}, "model": {"d_model": d, "attn_type": "polar"}} for d in (128, 64)
        )
        measure("wide", [cell(0), cell(1, seed=1)], [val(3.0), val(3.1)], [replace(LIKE, config=wide)] * 2)
        store = measure("narrow", [cell(2)], [val(3.0)], [replace(LIKE, config=narrow)])
        table = make_table("compare", store, "narrow", reference="wide")
        assert table.above[0] == "Not judged, since the sweeps differ in kind: model.d_model 64 instead of 128."

    @pytest.mark.thorough
    def test_recipe_difference_affects_its_probe_only(self, measure, make):
        cell, _ = make
        needle = Measurement(probe="needle", metric="digit_accuracy", length=65536, value=0.9, n=40)
        config = LIKE.config | {"eval": {"needle_trials": 8, "chunk_tokens": 7, "validate_every": 5}}
        store = measure("mine", [cell(0)], [[*val(3.180), needle]], [replace(LIKE, config=config)])
        table = make_table("compare", store, "mine")
        assert [row[6] for row in table.rows] == ["within", "-"]
        assert table.above[0] == "Not judged: Ndl (eval.needle_trials 8 instead of 16)."

    def test_the_command_shows_it_and_ends_well(self, measure, make, tmp_path):
        cell, _ = make
        measure("mine", [cell(0)], [val(1.5)], [BYTES]).close()
        db = str(tmp_path / "empty.db")
        result = CliRunner().invoke(app, ["report", "--compare", "printed-v2", "--sweep", "mine", "--db", db])
        assert result.exit_code == 0
        assert "Not judged, since the sweeps differ in kind: tokenizer bytes instead of gpt2" in result.stdout
        assert "1.500" in result.stdout


class TestHomogeneity:
    def audit(self, measure, make, *provenances, hosts=None, levels=("off", "on")):
        cell, _ = make
        cells = [cell(index, memory=levels[index % len(levels)], seed=index // 2) for index in range(len(provenances))]
        store = measure("s", cells, [val(1.0)] * len(cells), list(provenances), hosts)
        return audit_differences(store)

    def test_nothing_to_say(self, measure, make):
        assert self.audit(measure, make, SAME, SAME, SAME) == []

    @pytest.mark.parametrize(
        ("change", "expected_text"),
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
    def test_what_differs_is_named(self, measure, make, change, expected_text):
        (line,) = self.audit(measure, make, SAME, SAME, replace(SAME, **change))
        assert line.startswith(expected_text)

    def test_an_axis_explains_its_setting_but_never_the_micro_batch(self, measure, make):
        config = {"train": {"micro_batch": 2, "schedule": "cosine"}, "model": {"memory": "gated_delta"}}
        changed_cell = replace(SAME, config=config)
        lines = self.audit(measure, make, SAME, changed_cell, SAME, changed_cell)
        assert lines == ["train.micro_batch differs: 2 (2 cells), 4 (2 cells)"]

    @pytest.mark.thorough
    def test_a_recipe_that_follows_no_axis_is_named(self, measure, make):
        changed_cell = replace(
            SAME, config={"train": {"micro_batch": 4, "schedule": "linear"}, "model": {"memory": "none"}}
        )
        assert self.audit(measure, make, SAME, SAME, SAME, changed_cell) == [
            "train.schedule differs: cosine (3 cells), linear (1 cell)"
        ]

    @pytest.mark.parametrize(
        ("change", "expected_text"),
        [
            ({"probes": ["needle"]}, []),
            ({"lengths": [128]}, []),
            ({"needle_trials": 8}, ["eval.needle_trials differs: 16 (3 cells), 8 (1 cell)"]),
        ],
    )
    def test_audit_compares_how_numbers_were_measured(self, measure, make, change, expected_text):
        eval_config = {"probes": ["val"], "lengths": [64], "needle_trials": 16}
        same, changed_cell = (
            replace(SAME, config={"eval": eval_settings}) for eval_settings in (eval_config, eval_config | change)
        )
        assert self.audit(measure, make, same, same, same, changed_cell) == expected_text

    def test_restarts_and_neighbours(self, measure, make, store, run):
        cell, _ = make
        cells = [cell(50), cell(51, memory="off")]
        store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
        run(store, cells[0].id, "interrupted", [])
        first = [
            store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
            for record in cells
        ]
        for attempt in first:
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.provenance(SAME)
            recorder.measurements(val(1.0))
        for attempt in first:
            store.finish_attempt(attempt.id, 1, "done")
        assert audit_differences(store, "s") == [
            "restarts: 1 of 2 cells took more than one training attempt",
            "co-tenancy: up to 2 attempts at once on h; their speeds may be reduced",
        ]
        table = make_table("6", store, "s")
        assert table.above[0].startswith("Before comparing: restarts: 1 of 2")

    def test_shared_gpus(self, store, make):
        cell, _ = make
        cells = [cell(70 + i, seed=i) for i in range(3)]
        store.record_revision("s", grid_text="x", grid_file="x", cells=cells)
        for record, extra_runs in zip(cells, (0, 3, 1), strict=True):
            attempt = store.start_attempt(record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1)
            recorder = DatabaseRecorder(store, attempt.id, 1)
            recorder.provenance(replace(SAME, gpu_uuid="GPU-a", co_tenants=extra_runs))
            recorder.measurements(val(1.0))
            store.finish_attempt(attempt.id, 1, "done")
            time.sleep(0.003)
        assert audit_differences(store, "s") == [
            "shared GPUs: 2 cells shared a GPU with up to 3 other attempts; "
            "their tokens/s and MFU are not those of an unshared GPU"
        ]

    def test_deviations(self, store, make):
        cell, _ = make
        record = cell(60)
        store.record_revision("s", grid_text="x", grid_file="x", cells=[record])
        attempt = store.start_attempt(
            record.id, owner=Owner(name="a", host="h", pid=1, started=0.0), fence=1, deviation={"train.micro_batch": 2}
        )
        recorder = DatabaseRecorder(store, attempt.id, 1)
        recorder.provenance(SAME)
        recorder.measurements(val(1.0))
        store.finish_attempt(attempt.id, 1, "done")
        assert audit_differences(store, "s") == ["train.micro_batch=2 instead of the requested value in 1 cell"]

    def test_the_paper(self, published):
        assert audit_differences(published, "printed-v2") == [
            "not recorded by the paper: code, software, seeds, restarts, co-tenancy"
        ]


@pytest.mark.thorough
def test_untrained_cells_give_way_to_trained_ones() -> None:
    """The shipped sweep has four cells of the printed 996M tokens that are not trained, and four shorter trainings."""
    own = load_sweep_data(shipped_store("headline-370m"), "headline-370m")
    matches = match_configurations(own, load_sweep_data(open_published(), "printed-v2"))
    assert [{cell.axes["train.tokens"] for cell in match.own_cells} for match in matches] == [{"249036800"}] * 4
    assert [cell.axes["train.tokens"] for cell in own.cells if cell.state == "new"] == ["996147200"] * 4
