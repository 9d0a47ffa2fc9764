"""Odd values for every config field, in a grid file and in --set: a single line and an exit code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.data.registry import CORPORA
from atma_sweep.sweep.grid import settings
from atma_sweep.sweep.probes import PROBES
from every_command import no_hang
from tiers import long_form

Command = Callable[..., tuple[int, str, str]]
Write = Callable[..., Any]
VALUES: dict[str, str] = {
    "huge": "1e300",
    "beyond a float": "1e400",
    "a large whole number": "10000000",
    "beyond 64 bits": "9223372036854775808",
    "negative": "-1",
    "zero": "0",
    "negative zero": "-0.0",
    "small": "1e-300",
    "NaN": ".nan",
    "infinity": ".inf",
    "negative infinity": "-.inf",
    "half of a surrogate pair": r'"\ud800"',
    "a control character": r'"\x00"',
    "empty": '""',
    "none": "null",
    "long": "x" * 20_000,
    "a boolean": "true",
    "a list": "[1, -1, x]",
    "empty list": "[]",
    "a mapping": "{a: 1}",
    "nested": "[[[[1]]]]",
    "4,000 digits": "9" * 4000,
    "5,000 digits": "9" * 5000,
    "4,000 hexadecimal digits": "0x" + "f" * 4000,
    "an escape to another folder": "../../../etc/passwd",
    "a tag": "!!python/object:os.system x",
}


def fields() -> Iterator[str]:
    """Return the dotted path of every setting that a grid may set."""

    def below(path: str) -> Iterator[str]:
        if path and settings.path_problem(path) is None:
            yield path
        for inner in settings.keys_below(path):
            yield from below(inner)

    yield from below("")


FIELDS = sorted(fields())
CASES = [(path, kind) for path in FIELDS for kind in VALUES]
"""All of them take half an hour."""
DAILY = random.Random(20261127).sample(CASES, 60)
THOROUGH = random.Random(7).sample(CASES, 1500)


def assert_ended_well(case: str, code: int, err: str, mentions: tuple[str, ...]) -> None:
    """Assert that a command ended well or with one line that names where the value stands."""
    assert code in (0, 2, 3), f"{case}: exit code {code}: {err}"
    assert "Traceback" not in err, f"{case}: {err}"
    if code == 2:
        lines = err.rstrip("\n").splitlines()
        assert len(lines) == 1, f"{case}: {err}"
        assert lines[0].startswith("atma-sweep: "), case
        assert len(lines[0]) < 10_000, case
        assert any(mention in lines[0] for mention in mentions), f"{case}: {lines[0][:300]}"


def count_refused(cases: list[tuple[str, str]], command: Command, write: Write) -> int:
    """Run each case through a file or through --set: none ends in a traceback. Return how many are refused, each in one line."""
    refused = 0
    for index, (path, kind) in enumerate(cases):
        case = f"{path}: {kind}"
        name = path.rsplit(".", 1)[-1]
        look = ("plan",) if index % 4 == 3 else ("launch",)
        dry = () if look == ("plan",) else ("--dry-run",)
        with no_hang((case,)):
            if index % 2:
                code, _, err = command(
                    *look, "quick", *dry, "--name", "x", "--set", f"{path}={VALUES[kind]}", "--only", "attn_type=nope"
                )
                assert_ended_well(case, code, err, ("--set", name, path.split(".")[0]))
            else:
                grid = write(f"name: g\nextends: tiny\nset:\n  {path}: {VALUES[kind]}\n")
                code, _, err = command(*look, str(grid), *dry)
                assert_ended_well(case, code, err, (f"{grid}:4", name, path.split(".")[0]))
        refused += code == 2
    return refused


def test_fuzz_fields_cover_every_section() -> None:
    sections = {path.split(".")[0] for path in FIELDS}
    assert sections == set(CellConfig.model_fields) - {"seed", "plugins"}
    assert {path.split(".")[2] for path in FIELDS if path.startswith("eval.settings.")} <= set(PROBES)
    assert {path.split(".")[2] for path in FIELDS if path.startswith("data.settings.")} <= set(CORPORA)
    assert len(FIELDS) > 150


@pytest.mark.thorough
@pytest.mark.slow
def test_odd_values_of_settings_are_refused(command_line: Command, write: Write) -> None:
    assert count_refused(DAILY, command_line, write) > len(DAILY) / 2


@pytest.mark.thorough
@pytest.mark.parametrize("part", [*range(0, 10, 3), *long_form(1, 2, 4, 5, 7, 8)])
def test_odd_values_of_all_settings_are_refused(command_line: Command, write: Write, part: int) -> None:
    assert count_refused(THOROUGH[part::10], command_line, write) > 0
