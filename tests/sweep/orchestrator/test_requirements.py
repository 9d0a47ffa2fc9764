"""Launches that a machine cannot carry out are refused once, with everything that is missing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.sweep.checkpoints import storage
from atma_sweep.sweep.commands import launch as commands
from atma_sweep.sweep.config import DataConfig, Resources
from atma_sweep.sweep.data.prepare import prepare_in_memory
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host import hardware
from atma_sweep.sweep.host.allocation import Machine
from atma_sweep.sweep.orchestrator import launch, requirements
from atma_sweep.sweep.orchestrator.launch import LaunchOutcome, LaunchRequest
from atma_sweep.sweep.planning import admission

Write = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
KINDS = ("text", "GPU", "CPU cores", "memory", "disk", "packages")
NEEDS = {"GPU": "gpus: 1, gpu_type: H200", "CPU cores": "cpus: 5", "memory": "memory_gb: 33"}
"""What asks for more than the machine of these tests has: an L4, four cores, 32 GiB."""


def take(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Function that removes disk space or packages from this machine."""
    if kind == "disk":
        patch.setattr(storage, "free_bytes", lambda folder: 1000)
    elif kind == "packages":
        patch.setattr(requirements, "is_installed", lambda name: name not in ("ray", "torch"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Machine that has enough of everything."""
    monkeypatch.setattr(hardware, "gpu_names", lambda: ["NVIDIA L4"])
    monkeypatch.setattr(hardware, "usable_cores", lambda: 4)
    monkeypatch.setattr(hardware, "memory_gb", lambda: 32.0)
    monkeypatch.setattr(requirements, "cpu_build", lambda: [])
    return monkeypatch


def text_of(lacking: tuple[str, ...], *, more: str = "") -> str:
    corpus = "wikitext-103" if "text" in lacking else "flipflop"
    data = f"{{corpus: {corpus}, settings: {{flipflop.length: 128}}}}"
    resources = ", ".join(NEEDS[kind] for kind in lacking if kind in NEEDS)
    return (
        f"name: g\nextends: micro\naxes: {{attn_type: [nope, polar]}}\nresources: {{{resources}}}\n"
        f"set:\n  data: {data}\n  eval: {{probes: [val]}}\n{more}"
    )


def request_of(grid: Path, runs: Path, **options: Any) -> LaunchRequest:
    """Return a launch request for every cell of a grid, its text not prepared."""
    loaded = load_grid(grid)
    cells, _ = admission.expand_grid(loaded, runs / "corpora", dry=True)
    return LaunchRequest(grid=loaded, cells=cells, runs=runs, **options)


def lacks_of(request: LaunchRequest) -> list[requirements.Lack]:
    return requirements.lacks(request, launch.plan(request, None))


EVERY = [subset for count in range(len(KINDS) + 1) for subset in itertools.combinations(KINDS, count)]


@pytest.mark.thorough
def test_lacks_lists_every_combination(write: Write, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for lacking in EVERY:
        request = request_of(write(text_of(lacking)), tmp_path / "runs")
        with pytest.MonkeyPatch.context() as patch:
            for kind in lacking:
                take(kind, patch)
            lacks = lacks_of(request)
        assert tuple(lack.kind for lack in lacks) == lacking
        assert all(lack.blocks for lack in lacks)


def test_refused_launch_names_all_lacks(
    write: Write, machine: pytest.MonkeyPatch, tmp_path: Path, command: Command
) -> None:
    """2 cells of 150 steps of 1,024 tokens; 118M tokens of three bytes."""
    path = write(text_of(KINDS))
    take("disk", machine)
    take("packages", machine)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("launch", str(path))
    assert (code, out) == (3, "")
    lines = err.splitlines()
    assert lines[0] == "g cannot be launched on this machine: 2 cells, 307,200 tokens to train"
    assert lines[1].startswith("price: ")
    assert " GPU-hours, " in lines[1]
    root = tmp_path / "atma-runs"
    assert lines[2:7] == [
        "this machine lacks:",
        f"  text       corpus 'wikitext-103' is not prepared in {root}/corpora: the complete corpus, about 338 MiB to download",
        f"             -> atma-sweep data prepare --grid {path}, or launch with --prepare",
        "  GPU        2 cells need a GPU of type H200, and this machine has NVIDIA L4",
        "             -> launch on a machine that has one, or set resources.gpus to 0 to train on the CPU",
    ]
    assert lines[7] == "  CPU cores  2 cells need 5 CPU cores, and this machine has 4"
    assert lines[9] == "  memory     2 cells need 33 GiB of memory, and this machine has 32 GiB"
    assert lines[11].startswith("  disk       ")
    assert lines[11].endswith(f"; 1.0 KiB free in {root}")
    assert lines[13:15] == [
        "  packages   torch, ray not installed",
        "             -> pip install -c constraints.txt torch ray",
    ]
    # without room and packages, quick cannot be launched either
    assert [line.split("  ")[1] for line in lines[16:]] == [
        "atma-sweep report --sweep printed-v2 --table 6",
        f"atma-sweep plan {path} --gpus 8 --gpu H200",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_more_gpus_than_the_machine_has_are_lacking() -> None:
    """An H200 beside an L4 is no pair."""
    machine = Machine(8, 64.0)

    def texts(gpus: float, names: Sequence[str], gpu_type: str | None = None) -> list[tuple[str, str]]:
        sizes = Counter({Resources(gpus=gpus, gpu_type=gpu_type): 2})
        return [(lack.problem, lack.remedy) for lack in requirements.lacking_resources(sizes, machine, names)]

    three = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    assert texts(2, three) == texts(0.5, three) == texts(1, three[2:]) == []
    assert texts(3, three) == [(
        "2 cells need up to 3 GPUs of one model at once, and this machine has NVIDIA H200, NVIDIA H200, NVIDIA L4",
        "set resources.gpus to 2 or less; cells continue on another number of GPUs",
    )]  # fmt: skip
    assert texts(4, three, "A100")[0][0].startswith("2 cells need a GPU of type A100")
    assert len(texts(4, three, "A100")) == len(texts(4, [])) == 1


def test_launch_dry_run_and_plan_list_the_same_lacks(
    write: Write, machine: pytest.MonkeyPatch, command: Command
) -> None:
    path = str(write(text_of(("text", "GPU"))))
    code, out, err = command("launch", path, "--json")
    assert (code, err) == (3, "")
    refusal = json.loads(out)
    assert (refusal["sweep"], refusal["cells"], refusal["tokens"]) == ("g", 2, 307_200)
    assert [lack["kind"] for lack in refusal["lacks"]] == ["text", "GPU"]
    assert refusal["lacks"][0]["download_bytes"] == 3 * 118_000_000
    assert [row["command"] for row in refusal["possible"]] == [
        "atma-sweep launch quick",
        "atma-sweep report --sweep printed-v2 --table 6",
        f"atma-sweep plan {path} --gpus 8 --gpu H200",
    ]
    for line in (("launch", path, "--dry-run"), ("plan", path)):
        code, out, err = command(*line, "--json")
        assert (code, err) == (0, "")
        seen = json.loads(out)
        assert (seen["lacks"], seen["price"]["hours"]) == (refusal["lacks"], refusal["price"]["hours"])
        assert "this machine lacks:\n  text  corpus 'wikitext-103' is" in command(*line)[1]
    # who names other GPUs does not ask about this machine
    assert json.loads(command("plan", path, "--gpus", "8", "--json")[1])["lacks"] == []


def test_disk_without_room_for_all_weights_warns(write: Write, machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = request_of(write(text_of(())), tmp_path)
    disk = launch.plan(request, None).disk
    assert disk is not None
    machine.setattr(storage, "free_bytes", lambda folder: disk.running)
    (lack,) = lacks_of(request)
    assert (lack.kind, lack.blocks) == ("disk", False)


def test_cluster_asks_this_machine_for_text_and_packages(
    write: Write, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Attempts of a cluster run on other machines."""
    request = request_of(write(text_of(KINDS)), tmp_path, executor="cluster", address="127.0.0.1:1")
    take("disk", machine)
    take("packages", machine)
    assert [lack.kind for lack in lacks_of(request)] == ["text", "packages"]


def test_cpu_build_of_torch_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, count in (("2.13.0+cpu", 1), ("2.13.0+cu130", 0), ("2.13.0", 0)):
        monkeypatch.setattr(requirements.importlib.metadata, "version", lambda name, version=version: version)
        assert len(requirements.cpu_build()) == count


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stayed(monkeypatch: pytest.MonkeyPatch) -> list[LaunchRequest]:
    """Launches that would have started."""
    requests: list[LaunchRequest] = []

    def stay(request: LaunchRequest, *rest: Any) -> LaunchOutcome:
        requests.append(request)
        return LaunchOutcome(Counter(done=2), True)

    monkeypatch.setattr(commands, "launch_attached", stay)
    return requests


def test_prepare_gets_the_text_and_launches(
    write: Write,
    machine: pytest.MonkeyPatch,
    stayed: list[LaunchRequest],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str] = []
    small = prepare_in_memory(DataConfig(corpus="flipflop")).fingerprint

    def prepare(data: DataConfig, *rest: Any, **more: Any) -> str:
        fetched.append(data.corpus)
        return small

    monkeypatch.setattr(admission, "prepare", prepare)
    path = str(write(text_of(("text",))))
    assert command("launch", path)[0] == 3
    assert (fetched, stayed) == ([], [])
    assert command("launch", path, "--prepare")[0] == 0
    assert fetched == ["wikitext-103"]
    assert {cell.config.data.fingerprint for cell in stayed[0].cells} == {small}
    # nothing is fetched for a launch that something else keeps from beginning
    assert command("launch", str(write(text_of(("text", "memory")))), "--prepare")[0] == 3
    assert len(fetched) == 1
    assert command("launch", path, "--prepare", "--dry-run")[::2] == (
        2,
        "atma-sweep: --prepare writes text, and --dry-run writes nothing; leave one of them out\n",
    )


def test_prepare_without_a_network_says_so_in_the_block(
    write: Write,
    machine: pytest.MonkeyPatch,
    stayed: list[LaunchRequest],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(*rest: Any, **more: Any) -> str:
        raise MachineError("no network")

    monkeypatch.setattr(admission, "prepare", prepare)
    path = write(text_of(("text",)))
    code, out, err = command("launch", str(path), "--prepare")
    assert (code, out, stayed) == (3, "", [])
    lines = err.splitlines()
    assert lines[0].startswith("g cannot be launched on this machine: ")
    assert lines[3].endswith(" to download; preparing it failed: no network")
    assert lines[4] == f"        -> try again with network access: atma-sweep data prepare --grid {path}"


def test_inherited_lender_of_long_documents_is_named(
    write: Write, machine: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    base = write("extends: micro\nset:\n  data: {corpus: fineweb-edu, heldout: finepdfs}\n", "large.yaml")
    path = write("name: g\nextends: large\nset: {data.corpus: stdlib}\n")
    lines = command("launch", str(path))[2].splitlines()
    assert lines[3] == (
        f"  text  data.heldout: finepdfs (inherited from base large, {base}:3), the source of long documents for corpus 'stdlib', "
        f"is not prepared in {tmp_path}/atma-runs/corpora: about 286 MiB to download"
    )
    assert lines[4].endswith("--prepare, or set data.heldout: null in g.yaml to hold out documents of 'stdlib' itself")
    write("name: g\nextends: large\nset: {data.corpus: finepdfs}\n")
    assert command("launch", str(path))[::2] == (
        2,
        f"atma-sweep: {base}:3: set.data.heldout: finepdfs is also the training text; name other text, or remove data.heldout to "
        "hold out part of it; inherited from base large: set data.heldout in g.yaml to change it\n",
    )


def test_tokenizer_that_cannot_be_downloaded_is_a_lack(
    write: Write, machine: pytest.MonkeyPatch, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_tokenizer_trouble", lambda *which: "no tokenizer")
    path = write("name: g\nextends: micro\n")
    code, out, _ = command("plan", str(path), "--json")
    assert code == 0
    (lack,) = json.loads(out)["lacks"]
    assert (lack["kind"], lack["problem"]) == ("text", "corpus 'stdlib': no tokenizer")
