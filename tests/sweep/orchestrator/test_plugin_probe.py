"""Probe of a plugin, from the grid to the headings of reports, and its numbers after the file has changed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from atma_sweep.reports.dashboard.page import dashboard, decode_block
from atma_sweep.reports.figures.comparisons.forest import default_columns, effect_fields
from atma_sweep.reports.stats.audit import audit_differences
from atma_sweep.reports.stats.effects.effects import effects
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.reports.tables import make_table
from atma_sweep.results.store.store import open_store
from bench import Bench

pytestmark = pytest.mark.slow
PLUGIN = '''
import torch
from atma_sweep.model.config import Int, knob
from atma_sweep.sweep.probes import Metric, Probe, ProbeConfig, register_probe


class GlowConfig(ProbeConfig):
    """Settings of the lamps."""

    lamps: Int = knob(2, "Lamps.", ge=1)


@register_probe("glow")
class Glow(Probe):
    """As many lux a token as there are lamps, and one more with polar attention."""

    Config = GlowConfig
    metrics = (Metric("light", "lux", "higher", "Light of all lamps together.", "Glow", 1), Metric("heat", "K"))
    by_length = True

    def tokens(self, length):
        return length

    def chance(self, metric):
        return 0.5 if metric.name == "light" else None

    def run(self, subject, lengths):
        for length in lengths:
            hidden = subject.features(torch.zeros(1, length, dtype=torch.long))
            assert hidden.shape[1] == length and not hidden.requires_grad
            light = self.settings.lamps * length + (self.config.model.attn_type == "polar")
            yield (
                [self.value("light", float(light), length, n=1), self.missing("n/a: no thermometer", length, "heat")],
                [self.example("light", float(light), length, item=0)],
            )
'''
NOPE, POLAR = (f"{name}-baseline-d0-m0-w0-s0" for name in ("nope", "polar"))
GLOW = "SELECT slug, length, value, unit, source FROM results WHERE metric = 'light' ORDER BY slug, length"


def digest(bench: Bench) -> str:
    return hashlib.sha256((bench.folder / "lamps.py").read_bytes()).hexdigest()


@pytest.mark.thorough
def test_plugin_probe_stores_values_source_and_description(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "lamps.py").write_text(PLUGIN)
    bench.grid(tokens=128 * 3, more="plugins: [lamps.py]\n")
    bench.edit("eval: {", "eval: {probes: [val, glow], settings.glow.lamps: 3, ")
    bench.launch()
    first = digest(bench)
    assert bench.sql(GLOW) == [
        (NOPE, 32, 96.0, "lux", first), (NOPE, 64, 192.0, "lux", first),
        (POLAR, 32, 97.0, "lux", first), (POLAR, 64, 193.0, "lux", first),
    ]  # fmt: skip
    assert bench.sql("SELECT DISTINCT source FROM results WHERE probe <> 'glow'") == [(None,)]
    assert bench.sql("SELECT DISTINCT source FROM results WHERE probe = 'glow'") == [(first,)], "its peak memory too"
    descriptions = dict(bench.sql("SELECT DISTINCT metric, description FROM measurement WHERE probe = 'glow'"))
    assert json.loads(str(descriptions["light"]))["chance"] == 0.5
    assert descriptions["heat"] is None
    _reports_know_it(tmp_path, first)

    # another file measures nothing again: what is there stays, and says what it is from
    (tmp_path / "lamps.py").write_text(PLUGIN + "# brighter\n")
    bench.launch()
    assert bench.sql("SELECT count(*) FROM attempt") == [(2,)]
    assert {row[-1] for row in bench.sql(GLOW)} == {first}
    bench.run("db", "forget", POLAR, "--probe", "glow", "--yes")
    bench.launch()
    second = digest(bench)
    assert [(row[0], row[-1]) for row in bench.sql(GLOW)] == [(NOPE, first)] * 2 + [(POLAR, second)] * 2
    assert f"lux, n=1, plugin {second[:12]}" in bench.ask("show", POLAR)
    store = open_store(tmp_path / "atma.db")
    lines = [line for line in audit_differences(store, "micro") if "plugin" in line]
    versions = sorted([f"{first[:12]} (1 cell)", f"{second[:12]} (1 cell)"])
    assert lines == [f"plugin of the probe glow differs: {', '.join(versions)}"]
    assert lines[0] in make_table("6", store, "micro").above[0]
    store.close()


def _reports_know_it(folder: Path, source: str) -> None:
    store = open_store(folder / "atma.db")
    table = make_table("6", store, "micro")
    index = table.columns.index("Glow@32")
    assert table.columns[index : index + 3] == ("Glow@32", "Glow@64", "MFU")
    assert [row[index] for row in table.rows] == ["96.0", "97.0"]
    assert {(r, c) for r, c in table.best if c == index} == {(1, index)}, "more is better"
    assert {row["values"][index - table.text_columns]["source"] for row in table.raw} == {source}
    description = "Light of all lamps together. More is better. Score of a trivial answer: 0.5 lux."
    assert f"Glow, lux: {description}" in table.notes
    assert "plugin" not in " ".join(table.above), "one version of it: nothing to know"
    packed = re.findall(r'<script[^>]*id="core"[^>]*>(.*?)</script>', dashboard(store, "micro"), re.DOTALL)[0]
    page = json.loads(decode_block(packed))
    shown = [(column["heading"], column["better"]) for column in page["columns"] if column["probe"] == "glow"]
    assert shown == [("Glow@32", 1), ("Glow@64", 1)]
    drawn = [(chart["probe"], chart["title"], chart["unit"]) for chart in page["charts"]]
    assert drawn[2:] == [
        ("needle", "Needle: digits recalled", "%"), ("glow", "Glow: Light of all lamps together", "lux"),
    ]  # fmt: skip
    assert {key["definition"] for key in page["keys"] if key["metric"] == "light"} == {description}
    assert "Other units: Glow@32 lux, Glow@64 lux." in make_table("effects", store, "micro").notes
    data = load_sweep_data(store, "micro")
    fields = [effect_fields(effect) for effect in effects(data, default_columns(data))]
    assert {row["unit"] for row in fields if row["measure"] == "Glow@64"} == {"lux"}
    assert data.metric("glow", "light").definition == description
    assert data.metric("glow", "heat").definition == (
        "Recorded by the probe glow, which describes it by name and unit only."
    )
    store.close()
