"""Connections between GPUs: findings for injected measurements, and the measurement itself between real processes."""

from __future__ import annotations

from typing import Any

import pytest
from atma_sweep.sweep.doctor import LookFailed, links
from examined import LINKED, cuda, gpu, level_and_text

TWO_GPUS = cuda(gpu("aaaa"), gpu("bbbb"))


@pytest.mark.parametrize(("facts", "state", "finding", "remedy"), [
    ({}, "ok", "all-reduce at 380 GB/s over 2 GPUs, NCCL 2.27.5; peer access between all pairs (1 pair)", ""),
    ({"bytes_per_s": 9e9}, "warn", "all-reduce at 9 GB/s over 2 GPUs, NCCL 2.27.5, which is slow", "nvidia-smi nvlink -s"),
    ({"without_peer_access": [[0, 1]]}, "warn", "no peer access between GPUs 0 and 1", "nvidia-smi topo -m"),
    ({"is_right": False}, "bad", "with a wrong sum", "dcgmi diag"),
    ({"error": "DistBackendError: Error while creating shared memory segment /dev/shm/nccl-1"}, "bad",
     "NCCL cannot sum over 2 GPUs: DistBackendError", "--shm-size=8g, or --ipc=host); until then use resources.gpus: 1"),
    ({"error": "unhandled cuda error"}, "bad", "unhandled cuda error", "NCCL_DEBUG=WARN"),
])  # fmt: skip
def test_links_are_judged(look: Any, facts: dict[str, Any], state: str, finding: str, remedy: str) -> None:
    check = look(torch=TWO_GPUS, links=LINKED | facts)["GPU links"]
    assert check.state == state
    assert finding in check.found
    assert remedy in check.remedy


def test_links_that_hang_are_named(look: Any) -> None:
    check = look(torch=TWO_GPUS, links=LookFailed("no answer from torch within 180 s"))["GPU links"]
    assert level_and_text(check) == ("bad", "a sum over 2 GPUs did not end: no answer from torch within 180 s")


def test_links_are_absent_on_a_single_gpu(look: Any) -> None:
    assert look(torch=cuda(gpu("aaaa")))["GPU links"].state == "absent"
    assert look()["GPU links"].state == "absent"


@pytest.mark.thorough
def test_sum_between_processes_is_measured() -> None:
    """Two processes by gloo: 1 + 2 in every place."""
    facts = links.link_facts("cpu", 2, 2**16)
    assert facts["error"] is None
    assert facts["is_right"]
    assert facts["bytes_per_s"] > 0


@pytest.mark.thorough
def test_measurement_names_the_error_of_a_rank() -> None:
    facts = links.link_facts("cpu", 2, -4)
    assert "RuntimeError" in facts["error"]
