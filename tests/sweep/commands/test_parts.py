"""`atma-sweep parts`, and the launch of layers of flash-linear-attention without a GPU."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import registries
from atma_sweep.model.block_parts.fla_catalogue import fla_layer, fla_names
from atma_sweep.model.registry import MEMORIES, MIXERS
from atma_sweep.results.console.quantities import format_bytes
from atma_sweep.sweep.host import hardware
from atma_sweep.sweep.reference import part_facts
from atma_sweep.sweep.reference.part_facts import part_row
from atma_sweep.sweep.reference.part_list import OWN_PARTS, fla_entries

Command = Callable[..., tuple[int, str, str]]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "block-mixer" / "my_block.py"


def test_parts_lists_every_mixer_memory_and_fla_layer(command_line: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_names", list)
    code, out, _ = command_line("parts", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert list(entries) == [*MIXERS, *MEMORIES, *(f"fla:{name}" for name in fla_names())]
    assert {entries[name]["kind"] for name in MIXERS} == {"mixer"}
    assert all(entry["trains"] == (not name.startswith("fla:")) for name, entry in entries.items())
    # keys and values of two KV heads of 128, in 16 bits; three inputs of the convolutions on q, k and v
    assert (entries["nope"]["token_bytes"], entries["nope"]["state_bytes"]) == (2 * 2 * 128 * 2, 3 * 1536 * 2)
    assert entries["gated_delta"]["state_bytes"] == 8 * 128 * 128 * 4
    code, out, _ = command_line("parts")
    assert all(name in out for name in entries)
    assert ("a GPU that can be used is missing" in out) == bool(fla_names())


def test_page_of_part_sizes_has_the_bytes_of_the_command(command_line: Command) -> None:
    page = (EXAMPLE.parents[2] / "docs" / "reference" / "part-sizes.md").read_text(encoding="utf-8")
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:3] == "| `"]
    printed = {row[0]: (row[-4:-2] if row[0].startswith("fla:") else row[3:5]) for row in cells}
    entries = {entry["name"]: entry for entry in json.loads(command_line("parts", "--json")[1])}
    # the page leaves out layers that are halves of a network
    assert [name for name in entries if name not in printed and "YOCO" not in name] == []
    for name, entry in ((name, entries[name]) for name in printed if name in entries):
        sizes = [entry["state_bytes"], entry["token_bytes"]]
        texts = ["n/a" if size is None else format_bytes(size) if size else "0" for size in sizes]
        assert printed[name] == texts, name


@pytest.mark.skipif(not fla_names(), reason="needs flash-linear-attention")
def test_fla_layers_on_a_gpu_train_and_decode_where_they_can() -> None:
    entries = {entry.name.removeprefix("fla:"): entry for entry in fla_entries(None)}
    assert (entries["GatedDeltaNet"].trains, entries["GatedDeltaNet"].decodes) == (True, True)
    assert (entries["StickBreakingAttention"].trains, entries["StickBreakingAttention"].decodes) == (True, False)
    assert (entries["YOCOCrossAttention"].trains, entries["YOCOCrossAttention"].state_bytes) == (False, None)
    assert {name for name, entry in entries.items() if entry.decodes} <= {n for n in entries if fla_layer(n).decodes}


def test_parts_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from atma_sweep import cli; sys.argv = ['atma-sweep', 'parts']\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'fla', 'pandas', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize(("text", "changed", "problem"), [
    ("# Decoding", "# Decoding", None),
    (".tril()", "", "mixer retention: its output at a token depends on later tokens"),
    ("* self.keep(x)[:, None, None] +", "+", "mixer retention: decoding token by token gives other outputs than forward"),
    ("linear(x, self.qkv.weight.to(x.dtype))", "linear(x, self.qkv.weight)", "fails on a text of 128 tokens: RuntimeError"),
    ('{"s": s}', "s", "Retention.step returned no state; return the output and a dict like that of empty_state: {'s': (1, "),
    ('{"s": s}', '{"s": s[:, :1]}', "Retention.step returned state {'s': (1, 1, 8, 8)}; return the output and a dict"),
    ("torch.zeros(len(x), heads", "torch.zeros(1, heads", "return a row per sequence, on x's device"),
])  # fmt: skip
def test_parts_refuses_a_plugin_that_breaks_the_contract(
    command_line: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, changed: str, problem: str | None
) -> None:
    """The shipped block part, as it is and with one mistake each, in a small network."""
    small = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
    monkeypatch.setattr(part_facts, "SHAPE", part_facts.SHAPE | small)
    source = EXAMPLE.read_text()
    assert text in source
    (tmp_path / "my_block.py").write_text(source.replace(text, changed))
    with registries.scope():
        code, out, err = command_line("parts", "--plugin", str(tmp_path / "my_block.py"), "--json")
    if problem is None:
        (entry,) = [entry for entry in json.loads(out) if entry["name"] == "retention"]
        assert (code, entry["decodes"], entry["state_bytes"]) == (0, True, 4 * 2 * 8 * 8)
    else:
        assert code == 2
        assert problem in err


@pytest.mark.thorough
def test_stored_facts_of_own_parts_are_measured_ones() -> None:
    """For each kind of state; python -m atma_sweep.sweep.reference.part_facts prints the file anew."""
    with OWN_PARTS.open(encoding="utf-8", newline="") as file:
        stored = {row["name"]: row for row in csv.DictReader(file)}
    assert list(stored) == [*MIXERS, *MEMORIES]
    for name in ("wall", "path", "kda"):
        assert stored[name] == part_row("memory" if name in MEMORIES else "mixer", name)


@pytest.mark.thorough
@pytest.mark.skipif(not fla_names(), reason="needs flash-linear-attention")
def test_launch_of_fla_layers_on_the_cpu_is_refused(command_line: Command, tmp_path: Path) -> None:
    grid = tmp_path / "flas.yaml"
    grid.write_text("name: flas\nextends: tiny\naxes: {attn_type: ['fla:GatedDeltaNet', nope]}\n")
    database = tmp_path / "atma.db"
    code, _, err = command_line("launch", str(grid), "--db", str(database), "--runs", str(tmp_path / "runs"))
    assert code == 3
    assert "1 cell needs a GPU for fla:GatedDeltaNet, and resources.gpus is 0" in err
    assert not database.exists()
    grid.write_text("name: flas\nextends: tiny\naxes: {attn_type: ['fla:GatedDeltaNot', nope]}\n")
    code, _, err = command_line("launch", str(grid), "--db", str(database))
    assert code == 2
    assert "did you mean 'fla:GatedDeltaNet'" in err
