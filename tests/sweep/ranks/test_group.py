"""Groups of three real processes over gloo: decisions, sums, and work that is divided."""

from __future__ import annotations

import pickle

import pytest
import ranked_calls
from atma_sweep.sweep.ranks.group import SINGLE, RankFailed
from ranked import run_ranks


@pytest.fixture(scope="module")
def calls() -> list[dict]:
    return run_ranks(3, ranked_calls.every_call)


@pytest.mark.thorough
def test_ranks_take_over_the_values_of_rank_0(calls: list[dict]) -> None:
    assert [call["agree"] for call in calls] == [{"rank": 0}] * 3
    assert [call["number"] for call in calls] == [2**40] * 3


def test_ranks_sum_reduce_and_broadcast_tensors(calls: list[dict]) -> None:
    assert [call["sum"] for call in calls] == [[6.0, 60.0]] * 3
    assert [call["max"] for call in calls] == [[3.0, 30.0]] * 3
    assert calls[2]["reduce"] == [6.0, 60.0]
    assert [call["broadcast"] for call in calls] == [[2.0, 20.0]] * 3
    assert [call["gathered"] for call in calls] == [[0, 1, 2]] * 3


def test_map_divides_items_and_returns_them_in_order(calls: list[dict]) -> None:
    assert [call["map"] for call in calls] == [[index**2 for index in range(8)]] * 3
    assert [call["mine"] for call in calls] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [call["few"] for call in calls] == [["a"]] * 3
    assert [call["first"] for call in calls] == [(0, "only rank 0")] * 3


def test_map_raises_the_error_of_the_first_item_on_all(calls: list[dict]) -> None:
    # items 4 (rank 1) and 5 (rank 2) fail; which of them another rank's early end lets run does not matter for 4
    assert {call["error"] for call in calls} <= {"ValueError: item 4", "ValueError: item 5"}
    assert len({call["error"] for call in calls}) == 1
    assert {call["odd"] for call in calls} == {"RankFailed: Unpicklable on rank 1: cannot travel"}, calls
    assert [call["afterwards"] for call in calls] == [[0, 1, 2]] * 3


def test_single_group_is_the_identity() -> None:
    assert SINGLE.agree("value") == "value"
    assert SINGLE.map(str, range(3)) == ["0", "1", "2"]
    assert SINGLE.first(lambda: 7) == 7
    assert SINGLE.gather_objects(5) == [5]
    assert (SINGLE.rank, SINGLE.size, SINGLE.is_first) == (0, 1, True)
    assert SINGLE.reduce_async(None, 0) is None  # type: ignore[arg-type]


def test_rank_failed_survives_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(RankFailed("text")))) == "text"
