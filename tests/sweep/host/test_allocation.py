"""Allocation of GPUs to several attempts: shares, waiting, and requests that no machine can meet."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.config import Resources
from atma_sweep.sweep.errors import GridError, MachineError
from atma_sweep.sweep.executors.executor import AttemptExit, HostExecutor, ProcessSpec, lock_gpus_for, visible_device
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.host import allocation as allocation_module
from atma_sweep.sweep.host import hardware
from atma_sweep.sweep.host.allocation import Allocation, ClusterAllocator, Machine, MachineAllocator, is_type
from atma_sweep.sweep.host.hardware import Gpu
from atma_sweep.sweep.host.locks import GpuLocks
from atma_sweep.sweep.planning import admission
from factories import hold_sweep, supervisor_of, trainings
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

FIRST, SECOND = Gpu("0", "GPU-aaaa", "NVIDIA H200"), Gpu("1", "GPU-bbbb", "NVIDIA L40S")
TWO = Machine(8, 32.0, (FIRST, SECOND))


def wants(gpus: float = 0, **more: Any) -> Resources:
    return Resources(gpus=gpus, **more)


def allocate(allocator: MachineAllocator, wanted: Resources) -> Allocation | None:
    allocation = allocator.find_allocation(wanted)
    if allocation is not None:
        allocator.allocate(allocation)
    return allocation


@pytest.mark.parametrize(("name", "label", "fits"), [
    ("NVIDIA H200", "H200", True), ("NVIDIA H200", "h200", True), ("NVIDIA GH200 480GB", "H200", False),
    ("NVIDIA L40S", "L4", False), ("NVIDIA L4", "L4", True), ("NVIDIA A100-SXM4-80GB", "A100", True),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", True), ("NVIDIA H100 80GB HBM3", "H100", True), ("anything", None, True),
])  # fmt: skip
def test_is_type_matches_entire_labels(name: str, label: str | None, fits: bool) -> None:
    assert is_type(name, label) is fits


@pytest.mark.parametrize(("share", "count"), [(0.25, 4), (0.5, 2), (0.1, 10), (0.3, 3), (1, 1), (0.01, 100)])
def test_parts_fill_a_gpu_exactly(share: float, count: int) -> None:
    allocator = MachineAllocator(Machine(1000, 8.0, (FIRST,)))
    placed = [allocate(allocator, wants(share)) for _ in range(count)]
    assert [allocation.gpus for allocation in placed if allocation] == [(FIRST,)] * count
    assert allocator.find_allocation(wants(share)) is None
    allocation = placed[0]
    assert allocation is not None
    allocator.release(allocation)
    assert allocator.find_allocation(wants(share)) == allocation


def test_parts_leave_other_gpus_whole() -> None:
    allocator = MachineAllocator(TWO)
    assert [
        allocation.gpus
        for allocation in (allocate(allocator, wants(0.5)), allocate(allocator, wants(0.25)))
        if allocation
    ] == [(FIRST,), (FIRST,)]
    full_seat = allocate(allocator, wants(1))
    assert full_seat is not None
    assert full_seat.gpus == (SECOND,)
    assert allocator.find_allocation(wants(1)) is None
    assert allocator.find_allocation(wants(0.5)) is None
    quarter = allocator.find_allocation(wants(0.25))
    assert quarter is not None
    assert quarter.gpus == (FIRST,)


def test_type_cores_and_memory_count() -> None:
    allocator = MachineAllocator(TWO)
    typed = allocate(allocator, wants(0.5, gpu_type="L40S", cpus=5, memory_gb=30.0))
    assert typed == Allocation(5, 30.0, (SECOND,), 5000)
    assert allocator.find_allocation(wants(0.5, gpu_type="A100")) is None
    assert allocator.find_allocation(wants(cpus=4)) is None
    assert allocator.find_allocation(wants(memory_gb=2.5)) is None
    assert allocator.find_allocation(wants(cpus=3, memory_gb=2.0)) == Allocation(3, 2.0, (), 0)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_gpu_is_allocated_twice(data: st.DataObject) -> None:
    """Random allocations and releases: no GPU above one, a full one never shared, and nothing lost."""
    third = Gpu("2", "GPU-cccc", FIRST.name)
    allocator, allocations = MachineAllocator(Machine(4, 8.0, (FIRST, SECOND, third))), []
    for _ in range(data.draw(st.integers(1, 40))):
        if allocations and data.draw(st.booleans()):
            allocator.release(allocations.pop(data.draw(st.integers(0, len(allocations) - 1)))[1])
            continue
        wanted = wants(data.draw(st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 1, 2])), cpus=data.draw(st.integers(1, 3)))
        allocation = allocate(allocator, wanted)
        if allocation is not None:
            allocations.append((wanted, allocation))
        for wanted, allocation in allocations:
            assert len(set(allocation.gpus)) == -(-wanted.gpus // 1)
            assert len({gpu.name for gpu in allocation.gpus}) <= 1
        for gpu in (FIRST, SECOND, third):
            shares = [min(wanted.gpus, 1) for wanted, allocation in allocations if gpu in allocation.gpus]
            assert sum(shares) <= 1 + 1e-9
            assert 1 not in shares or len(shares) == 1
        assert sum(allocation.cpus for _, allocation in allocations) <= 4
    for _, allocation in allocations:
        allocator.release(allocation)
    every = [allocate(allocator, wants(count, cpus=2, memory_gb=4.0)) for count in (2, 1)]
    assert [allocation and allocation.gpus for allocation in every] == [(FIRST, third), (SECOND,)], "all of it is free"


def test_several_gpus_are_of_the_same_model_and_unused() -> None:
    same = [Gpu(str(n), f"GPU-{n}", SECOND.name) for n in (2, 3)]
    allocator = MachineAllocator(Machine(8, 32.0, (FIRST, SECOND, *same)))
    assert allocator.find_allocation(wants(4)) is None, "four GPUs, but not of one model"
    assert allocator.find_allocation(wants(2, gpu_type="H200")) is None
    three = allocate(allocator, wants(3))
    assert three == Allocation(1, 0.0, (SECOND, *same), 10_000)
    assert visible_device(three) == "1,2,3"
    allocator.release(three)
    allocate(allocator, wants(0.25, gpu_type="L40S"))
    assert allocator.find_allocation(wants(3)) is None, "a share of the third GPU is in use"
    two = allocator.find_allocation(wants(2))
    assert two is not None
    assert two.gpus == tuple(same)


# --- what never fits ------------------------------------------------------------------------------------------------

NEVER: dict[str, tuple[dict[str, Any], str]] = {
    "cores": ({"cpus": 9}, "needs 9 CPU cores, and"),
    "memory": ({"memory_gb": 64}, "needs 1 CPU core, 64 GiB of memory, and"),
    "type": ({"gpus": 1, "gpu_type": "A100"}, "needs 1 CPU core, a GPU of type A100, and"),
    "part": ({"gpus": 0.5, "gpu_type": "L4"}, "needs 1 CPU core, 0.5 of a GPU of type L4, and"),
    "together": ({"gpus": 1, "gpu_type": "H200", "cpus": 12}, "needs 12 CPU cores, a GPU of type H200, and"),
}


@pytest.mark.parametrize("case", NEVER)
def test_unplaceable_cell_error_lists_the_resources(cells: Callable[..., list[Cell]], case: str) -> None:
    setting, expected = NEVER[case]
    parsed_cells = cells(f"resources: {json.dumps(setting)}\naxes: {{attn_type: [polar, nope]}}\n")
    text = refused(lambda: admission.check_placement(parsed_cells, TWO), MachineError)
    assert text.startswith(f"cell {parsed_cells[0].slug} (and 1 more cell) {expected}")
    assert "this machine has 8 CPU cores, 32 GiB of memory, 1 NVIDIA H200, 1 NVIDIA L40S" in text
    assert MachineError("x").exit_code == 3
    admission.check_placement(
        parsed_cells, Machine(64, 128.0, (Gpu("0", "GPU-c", "NVIDIA A100"), FIRST, Gpu("2", "GPU-d", "NVIDIA L4")))
    )


@pytest.mark.parametrize(("setting", "expected"), [
    ("{gpus: 65}", "must be less than or equal to 64"), ("{gpus: 0.001}", "must be 0, a share of one GPU from 0.01 to 1, or an integer"),
    ("{gpus: 1.5}", r"gpus \(1.5\) must be 0, a share of one GPU from 0.01 to 1, or an integer"), ("{gpus: 2, ranks: 2}", "set gpus to the number of GPUs alone"), ("{gpus: -1}", "greater than"),
    ("{gpu_type: H200}", "needs a GPU, but gpus is 0"), ("{memory_gb: 0}", "must be greater than 0"),
])  # fmt: skip
def test_resources_that_make_no_sense(cells: Callable[..., list[Cell]], setting: str, expected: str) -> None:
    with pytest.raises(GridError, match=expected):
        cells(f"resources: {setting}\n")


def test_more_gpus_than_micro_batches_are_refused(cells: Callable[..., list[Cell]]) -> None:
    """The tiny base has 2,048 tokens per step, 8 rows of 128 tokens per micro-batch: two to divide."""
    text = "set: {train.batch_tokens: 2048, train.seq_len: 128, train.micro_batch: 8}\nresources: {%s}\n"
    assert cells(text % "gpus: 2")[0].config.resources.n_ranks == 2
    for setting in ("gpus: 3", "ranks: 3"):
        name = setting.partition(":")[0]
        assert refused(lambda text=text % setting: cells(text), GridError).endswith(
            f"resources.{name} is 3, but a step of train.batch_tokens (2048) has only 2 micro-batches of train.seq_len * "
            f"train.micro_batch (128 * 8) tokens to divide; set resources.{name} to 2 or less"
        )


def test_resources_are_no_part_of_a_cell(cells: Callable[..., list[Cell]]) -> None:
    texts = (
        "",
        "resources: {gpus: 0.25, gpu_type: L4, memory_gb: 5, cpus: 3}\n",
        "resources: {gpus: 1}\n",
        "resources: {gpus: 2}\n",
        "resources: {ranks: 2}\n",
    )
    halved = "set: {train.micro_batch: 4}\n"  # two micro-batches per step
    assert len({cells(halved + text)[0].id for text in texts}) == 1


def test_memory_gb_of_this_machine() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    total = next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemTotal:")), None)
    assert 0.1 < hardware.memory_gb() <= (total or 1e6) + 0.01


@pytest.mark.parametrize(
    ("environment", "limit", "expected"),
    [
        ({}, "268435456", 0.25),
        ({"SLURM_MEM_PER_NODE": "128"}, "268435456", 0.125),
        ({"SLURM_MEM_PER_NODE": "0"}, "268435456", 0.25),
        ({"SLURM_MEM_PER_CPU": "64", "SLURM_CPUS_PER_TASK": "1"}, "max", 0.0625),
    ],
)
def test_memory_is_what_group_and_slurm_job_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], limit: str, expected: float
) -> None:
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text(limit)
    monkeypatch.setattr(hardware, "control_groups", lambda root: [root, root / "job"])
    assert hardware.memory_gb(tmp_path) == expected


# --- one sweep a GPU ------------------------------------------------------------------------------------------------


def test_shared_gpu_is_locked_against_foreign_sweeps(
    cells: Callable[..., list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "query_gpus", lambda: [FIRST, SECOND])
    monkeypatch.setattr(hardware, "memory_gb", lambda: 32.0)
    halves, full_cells = cells("resources: {gpus: 0.5, gpu_type: H200}\n"), cells("resources: {gpus: 1}\n")
    mine, theirs = GpuLocks(tmp_path / "locks"), GpuLocks(tmp_path / "locks")
    machine = lock_gpus_for(halves, mine)
    assert machine.gpus == (FIRST,), "a GPU of another type stays free"
    with pytest.raises(MachineError, match="every GPU is in use by another sweep"):
        lock_gpus_for(halves, theirs)
    assert lock_gpus_for(full_cells, theirs).gpus == (SECOND,)
    late = GpuLocks(tmp_path / "locks")
    mine.release()
    mixed = [*halves, *cells("resources: {gpus: 0.5, gpu_type: L40S}\n")]
    with pytest.raises(
        MachineError, match=r"GPU of type L40S, and .* 1 NVIDIA H200; in use by another sweep: NVIDIA L40S; change"
    ):
        lock_gpus_for(mixed, late)


def test_gpu_locks_hold_all_that_a_cell_needs_or_none(tmp_path: Path) -> None:
    """Three processes want all of four GPUs at the same time, many times: each time exactly one gets them."""
    gpus = [Gpu(str(n), f"GPU-{n}", "NVIDIA H200") for n in range(4)]
    first, second = GpuLocks(tmp_path), GpuLocks(tmp_path)
    assert first.acquire(gpus[:1]) == gpus[:1]
    with pytest.raises(
        MachineError, match=r"a cell needs 4 GPUs at once, and 1 of 4 are in use by another sweep \(pid"
    ):
        second.acquire(gpus, 4)
    assert second.acquire(gpus, 3) == gpus[1:]
    first.release()
    second.release()
    code = (
        "import sys\nfrom pathlib import Path\nfrom atma_sweep.sweep.errors import MachineError\n"
        "from atma_sweep.sweep.host.hardware import Gpu\nfrom atma_sweep.sweep.host.locks import GpuLocks\n"
        "locks = GpuLocks(Path(sys.argv[1]))\nprint(flush=True)\n"
        "for line in sys.stdin:\n"
        "    try:\n        print(len(locks.acquire([Gpu(n, f'GPU-{n}', 'X') for n in '0123'], 4)), flush=True)\n"
        "    except MachineError:\n        print(0, flush=True)\n"
        "    sys.stdin.readline()\n    locks.release()\n    print(flush=True)\n"
    )
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(3)
    ]

    def answers(order: str) -> list[str]:
        for rival in rivals:
            assert rival.stdin is not None
            rival.stdin.write(order)
        return [rival.stdout.readline().strip() for rival in rivals if rival.stdout is not None]

    try:
        answers("")
        for _ in range(50):
            assert sorted(answers("acquire\n")) == ["0", "0", "4"]
            answers("release\n")
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()


# --- the supervisor -------------------------------------------------------------------------------------------------


class Packed(HostExecutor):
    """Executor with real allocation and no processes: one attempt, drawn at random, ends at each call of wait."""

    name = "packed"

    def __init__(self, store: Store, machine: Machine) -> None:
        super().__init__()
        self.store, self.allocator, self.draw = store, MachineAllocator(machine), random.Random(2)
        self.running: dict[int, tuple[Job, Allocation]] = {}
        self.started: list[str] = []
        self.most = 0

    def fits(self, resources: Resources) -> bool:
        return self.allocator.find_allocation(resources) is not None

    def start(self, launch: ProcessSpec) -> None:
        job, allocation = Job.read(launch.runs / launch.folder), allocate(self.allocator, launch.resources)
        assert allocation is not None
        self.running[job.attempt] = job, allocation
        self.started.append(f"{launch.resources.gpus:g}")
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> list[AttemptExit]:
        if not self.running:
            return []
        attempt = self.draw.choice(sorted(self.running))
        job, allocation = self.running.pop(attempt)
        self.allocator.release(allocation)
        self.store.finish_attempt(attempt, job.fence, "done")
        return [(attempt, 0)]


def test_fractional_attempts_do_not_starve_a_full_gpu(cells: Callable[..., list[Cell]], tmp_path: Path) -> None:
    """Four quarters, then one cell that needs the full GPU, then eight more quarters."""
    text = "axes: {attn_type: [polar, nope]}\nseeds: 13\n"
    quarters, wholes = (cells(f"{text}resources: {{gpus: {share}, order: grid}}\n") for share in (0.25, 1))
    chosen = [*quarters[:4], wholes[4], *quarters[5:13]]
    store = open_store(tmp_path / "atma.db", create=True)
    fence = hold_sweep(store, chosen)
    executor = Packed(store, Machine(64, 8.0, (FIRST,)))
    supervisor_of(store, fence, executor, tmp_path / "runs").run(trainings(chosen))
    assert executor.started == ["0.25"] * 4 + ["1"] + ["0.25"] * 8
    assert executor.most == 4


@pytest.mark.parametrize(("part", "full", "back"), [
    ({}, {}, True), ({"gpu_type": "L4"}, {"gpu_type": "L4"}, True), ({"gpu_type": "L4"}, {"gpu_type": "H200"}, False),
    ({"gpu_type": "L4"}, {}, True), ({}, {"gpu_type": "H200"}, True),
])  # fmt: skip
def test_should_yield_gpu(part: dict[str, str], full: dict[str, str], back: bool) -> None:
    waiting = [wants(0.5), wants(0, cpus=7), wants(1, **full)]
    assert allocation_module.should_yield_gpu(wants(0.5, **part), waiting) is back
    assert not allocation_module.should_yield_gpu(wants(0.5, **part), waiting[:2])
    assert not allocation_module.should_yield_gpu(wants(0), waiting)
    assert allocation_module.should_yield_gpu(wants(1, **part), [wants(2, **full)]) is back
    assert not allocation_module.should_yield_gpu(wants(2), [wants(1), wants(2), wants(0.5)])


# --- several machines -----------------------------------------------------------------------------------------------


def allocate_on(cluster_allocator: ClusterAllocator, wanted: Resources) -> tuple[str, Allocation]:
    match = cluster_allocator.find_allocation(wanted)
    assert match is not None
    cluster_allocator.allocate(*match)
    return match


def test_attempts_go_where_most_cores_are_free() -> None:
    cluster_allocator = ClusterAllocator()
    cluster_allocator.add("a", Machine(2, 8.0))
    cluster_allocator.add("b", Machine(3, 8.0))
    placed = [allocate_on(cluster_allocator, wants(0, cpus=1)) for _ in range(5)]
    assert [(name, allocation.cpus) for name, allocation in placed] == [(name, 1) for name in "babab"]
    assert cluster_allocator.find_allocation(wants(0, cpus=1)) is None
    cluster_allocator.release(*placed[1])
    assert cluster_allocator.find_allocation(wants(0, cpus=2)) is None, "two cores on two machines are not a pair"
    cluster_allocator.release(*placed[3])
    assert cluster_allocator.find_allocation(wants(0, cpus=2)) is not None


def test_parts_fill_a_gpu_before_they_break_another_open() -> None:
    cluster_allocator = ClusterAllocator()
    cluster_allocator.add("a", Machine(8, 8.0, (FIRST,)))
    cluster_allocator.add("b", Machine(9, 8.0, (SECOND,)))
    halves = {allocate_on(cluster_allocator, wants(0.5))[1].gpus[0] for _ in range(2)}
    assert halves | {allocate_on(cluster_allocator, wants(1))[1].gpus[0]} == {FIRST, SECOND}
    assert len(halves) == 1
    assert cluster_allocator.find_allocation(wants(0.25)) is None


def test_dropped_machine_loses_its_allocations() -> None:
    cluster_allocator = ClusterAllocator()
    cluster_allocator.add("a", Machine(1, 8.0))
    allocation = allocate_on(cluster_allocator, wants(0, cpus=1))
    cluster_allocator.drop("a")
    cluster_allocator.release(*allocation)
    assert cluster_allocator.find_allocation(wants(0, cpus=1)) is None
    cluster_allocator.add("a", Machine(1, 8.0))
    assert cluster_allocator.find_allocation(wants(0, cpus=1)) is not None


def test_fp8_is_refused_on_a_gpu_without_it(cells: Callable[..., list[Cell]]) -> None:
    """Decided by torch's answer, which is queried before anything runs; a GPU type may exclude the other GPUs."""
    old, new = Gpu("0", "GPU-c", "NVIDIA A100", (8, 0)), Gpu("1", "GPU-d", "NVIDIA L4", (8, 9))
    wanted = "set: {train.precision: fp8, model.head_dim: 16}\nresources: {gpus: 1%s}\n"
    parsed_cells = cells(wanted % "")
    assert refused(
        lambda: admission.check_placement(parsed_cells, Machine(4, 8.0, (new,)), Machine(4, 8.0, (old,)))
    ) == (
        f"cell {parsed_cells[0].slug}: train.precision is fp8, which needs compute capability 8.9 (Ada, Hopper and later), and "
        "NVIDIA A100 has 8.0; set train.precision to bf16, or resources.gpu_type to a GPU that has it"
    )
    admission.check_placement(parsed_cells, Machine(4, 8.0, (new, FIRST)))
    admission.check_placement(cells(wanted % ", gpu_type: L4"), Machine(4, 8.0, (new, old)))
    for word in ("bf16", "fp16"):
        admission.check_placement(cells(wanted.replace("fp8", word) % ""), Machine(4, 8.0, (old,)))


@pytest.mark.parametrize(("capability", "expected"), [
    ((7, 5), ["fp16"]), ((8, 0), ["fp16", "bf16"]), ((8, 9), ["fp16", "bf16", "fp8"]),
    ((9, 0), ["fp16", "bf16", "fp8"]), ((10, 0), ["fp16", "bf16", "fp8"]),
])  # fmt: skip
def test_supported_precisions_of_a_gpu(capability: tuple[int, int], expected: list[str]) -> None:
    assert hardware.supported_precisions(capability) == expected


def test_cell_too_large_for_every_node_is_refused(cells: Callable[..., list[Cell]]) -> None:
    parsed_cells = cells("resources: {cpus: 3, gpus: 0}\n")
    with pytest.raises(MachineError, match=r"needs 3 CPU cores, and the nodes have 2 CPU cores, .*; 1 CPU core, "):
        admission.check_placement(parsed_cells, Machine(2, 8.0), Machine(1, 8.0))
    admission.check_placement(parsed_cells, Machine(2, 8.0), Machine(3, 8.0))


def test_gpu_query_without_an_answer_is_an_expected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_GPU_QUERY", "import time; time.sleep(60)")
    monkeypatch.setattr(hardware, "GPU_QUERY_S", 0.1)
    with pytest.raises(MachineError, match=r"no usable CUDA GPU: torch did not list the GPUs within 0\.1 s"):
        hardware.query_gpus()
