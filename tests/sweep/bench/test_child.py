"""What a benchmark says that a command took."""

import sys

import pytest
from atma_sweep.sweep.bench.child import used
from atma_sweep.sweep.errors import MachineError

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells another process's peak")
def test_the_memory_is_the_commands_own_not_that_of_who_started_it(tmp_path):
    ballast = b"x" * (400 * MIB)
    held = "x = b'x' * (150 << 20); import time; time.sleep(0.3); print(len(x))"
    took = used([sys.executable, "-c", held], tmp_path)
    assert 150 * MIB < took.memory < 300 * MIB < len(ballast)
    assert took.printed == f"{150 * MIB}\n"
    assert took.wall > 0.3
    assert took.processor > 0


def test_a_command_that_fails_says_why(tmp_path):
    with pytest.raises(MachineError, match="no such luck"):
        used([sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path)
