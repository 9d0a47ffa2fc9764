"""Tables by the numbers of the paper's second version."""

from collections.abc import Callable

import pytest
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.tables import TABLES, make_table, table_name
from atma_sweep.results.store.store import Store

SECOND = {
    "v2:1": "1",
    "v2:2": "2",
    "v2:3": "3",
    "v2:4": "budgets",
    "v2:5": "open-weight",
    "v2:6": "4",
    "v2:7": "5",
    "v2:8": "6",
}
"""Its order: attention alone, memory, window and distractor, budgets, open-weight models, throughput, regularizers, complete results."""


def test_second_version_numbers_name_their_tables() -> None:
    assert {word: table_name(word) for word in SECOND} == SECOND
    assert table_name("V2:8") == "6"
    assert [table_name(word) for word in ("6", "Effects", "v2:9", "7")] == ["6", "effects", "v2:9", "7"]


@pytest.mark.parametrize(("number", "name"), [("7", "5"), ("8", "6")])
def test_a_number_of_the_second_version_alone_is_offered(published: Store, number: str, name: str) -> None:
    choices = ", ".join([*TABLES, *SECOND])
    with pytest.raises(ReportError) as caught:
        make_table(number, published, "printed-v2")
    assert str(caught.value) == (
        f"unknown table {number}; table {number} of the paper's second version is v2:{number}, here {name}; choose one of: {choices}"
    )


def test_second_version_numbers_at_the_command_line(command_line: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command_line("report", "--sweep", "printed-v2", "--table", "v2:7", "--format", "csv")
    assert (code, out) == command_line("report", "--sweep", "printed-v2", "--table", "5", "--format", "csv")[:2]
    assert code == 0
    code, _, err = command_line("report", "--sweep", "printed-v2", "--table", "8")
    assert code == 2
    assert "is v2:8, here 6" in err
