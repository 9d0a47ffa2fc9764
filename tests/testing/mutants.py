"""Faults of one line, each with the test that notices it: evidence that a restructuring has not blunted the tests.

Run from the repository root: `python -m tests.testing.mutants` (all), `--only 3,17` (by number), `--list`. Every fault of
mutants.json is put into a copy of the working tree, and its one test is run there, which must fail by itself; without any
fault, all of these tests must pass. Neither the line nor the test needs to lie in the file that is noted: if it does not,
all product files are searched for the one line that reads so, and all test files for the function. Exits with 1 when a
fault survives, or when a line or a test is not found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_suffix(".json")
PRODUCT = ("sweep", "model", "kernels", "results", "reports", "cli.py", "api.py")
DAILY = ("-m", "not thorough and not gpu")
TIMEOUT_S = 300
FAILED = 1
"""Exit code of pytest for tests that failed; 2 and 4 stand for tests that could not be collected, 5 for none."""


class TargetMissing(Exception):
    """A line or a test that the tree has not, or has more than once."""


@dataclass(frozen=True)
class Fault:
    """A changed line, and the test that notices."""

    number: int
    name: str
    file: str
    old: str
    new: str
    test: str
    """`file::function` or `file::function[case]`; the class around the function, if any, is looked up."""

    @property
    def function(self) -> str:
        """Return the name of the test function, without its case."""
        return self.test.rpartition("::")[2].partition("[")[0]


def read_faults() -> list[Fault]:
    """Return every fault, numbered from 1."""
    return [Fault(number, **entry) for number, entry in enumerate(json.loads(FAULTS.read_text()), 1)]


def mutated_line(tree: Path, fault: Fault) -> tuple[Path, int]:
    """Return the file and the index of the line to change. Raises TargetMissing unless it is clear which is meant."""
    path = tree / fault.file
    if path.is_file():
        indices_in_file = _line_indices(path, fault.old)
        if len(indices_in_file) == 1:
            return path, indices_in_file[0]
    indices_by_file = {path: _line_indices(path, fault.old) for path in product_files(tree)}
    every = [(path, index) for path, indices in indices_by_file.items() for index in indices]
    chosen = every if len(every) == 1 else [match for match in every if match[0].name == Path(fault.file).name]
    if len(chosen) != 1:
        raise TargetMissing(f"the line {fault.old!r} of {fault.file} is there {len(every)} times in the product")
    return chosen[0]


def _line_indices(path: Path, line: str) -> list[int]:
    return [index for index, text in enumerate(path.read_text().splitlines()) if text.strip() == line]


def product_files(tree: Path) -> list[Path]:
    """Return the Python files of the product."""
    paths = [tree / name for name in PRODUCT]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def node_id(tree: Path, fault: Fault) -> str:
    """Return the node id of the test, wherever it lies now. Raises TargetMissing unless it is clear which is meant."""
    file, _, case = fault.test.partition("::")
    every = [
        (path, f"{path.relative_to(tree)}::{scope}{case}")
        for path in sorted((tree / "tests").rglob("test_*.py"))
        for scope in _scopes(path, fault.function)
    ]
    # where several tests have one name, the file tells them apart
    same_file = [name for path, name in every if path == tree / file]
    alike = [name for path, name in every if path.name == Path(file).name]
    for names in (same_file, [name for _, name in every], alike):
        if len(names) == 1:
            return names[0]
    raise TargetMissing(f"the test {fault.function} of {file} is there {len(every)} times among the tests")


def _scopes(path: Path, function: str) -> list[str]:
    """Return for each test of that name what stands before it in a node id: nothing, or its class."""
    text = path.read_text()
    if f"def {function}(" not in text:
        return []
    tree = ast.parse(text)
    classes = [(f"{node.name}::", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    return [
        scope
        for scope, body in [("", tree.body), *classes]
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]


def copy_tree(folder: Path) -> Path:
    """Copy the tracked and the new files of the checkout to `folder`/atma_sweep, and return that path."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    tree = folder / "atma_sweep"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree


def python_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python inside the copy, with the copy as the package `atma_sweep`."""
    environment = {**os.environ, "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("ATMA_TEST_DATA", None)  # no test of a fault may need more than the checkout
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def pytest_in(tree: Path, *arguments: str) -> tuple[int, str]:
    """Return pytest's exit code in the copy and what it wrote."""
    done = python_in(tree, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *DAILY, *arguments)
    return done.returncode, done.stdout + done.stderr


def unmutated_failures(tree: Path, tests: Sequence[str]) -> set[str]:
    """Return which of the tests do not pass without a fault, or not one case of which runs."""
    report = tree.parent / "report.xml"
    code, output = pytest_in(tree, f"--junitxml={report}", *dict.fromkeys(tests))
    if not report.is_file():
        sys.exit(f"pytest ended with {code} before any test ran:\n{output[-3000:]}")
    passed, failed = set[str](), set[str]()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        key = f"{case.get('classname')}.{case.get('name')}".partition("[")[0]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(key)
        elif case.find("skipped") is None:
            passed.add(key)
    keys = {test: test.partition("[")[0].replace(".py::", ".").replace("::", ".").replace("/", ".") for test in tests}
    return {test for test, key in keys.items() if key not in passed or key in failed}


def verdict(tree: Path, fault: Fault) -> str:
    """Put a fault into the copy, run its test, and take the fault out again; return what came of it."""
    path, index = mutated_line(tree, fault)
    before = path.read_text()
    lines = before.splitlines(keepends=True)
    lines[index] = lines[index].replace(fault.old, fault.new)
    path.write_text("".join(lines))
    try:
        ast.parse(path.read_text())
        code, output = pytest_in(tree, "-x", node_id(tree, fault))
    except subprocess.TimeoutExpired:
        return "killed"  # the test never ends with this fault
    except SyntaxError as error:
        return f"NO PYTHON: {error}"
    finally:
        path.write_text(before)
    if code == 0:
        return "SURVIVED"
    return "killed" if code == FAILED else f"NOT RUN (pytest ended with {code}): {output[-600:]}"


def main() -> int:
    """Run the faults and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.mutants", description="Faults that tests notice.")
    parser.add_argument("--only", help="numbers of faults, such as 3,17; all by default")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    options = parser.parse_args()
    faults = read_faults()
    if options.only:
        numbers = {int(word) for word in options.only.split(",")}
        faults = [fault for fault in faults if fault.number in numbers]
    if options.list:
        for fault in faults:
            print(f"{fault.number:3} {fault.name}\n    {fault.file}: {fault.old}\n    -> {fault.new}\n    {fault.test}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(Path(folder))
        origin = python_in(tree, "-c", "import atma_sweep.cli; print(atma_sweep.cli.__file__)").stdout.strip()
        if Path(origin).resolve() != (tree / "cli.py").resolve():
            sys.exit(f"the copy is in {tree}, but Python imports {origin or 'nothing'}")
        lost: dict[int, str] = {}
        tests: dict[int, str] = {}
        for fault in faults:
            try:
                mutated_line(tree, fault)
                tests[fault.number] = node_id(tree, fault)
            except TargetMissing as error:
                lost[fault.number] = str(error)
        failing = unmutated_failures(tree, list(tests.values())) if tests else set()
        wrong = 0
        for fault in faults:
            began = time.monotonic()
            if fault.number in lost:
                result = f"NOT FOUND: {lost[fault.number]}"
            elif tests[fault.number] in failing:
                result = "FAILS OR SKIPS WITHOUT THE FAULT"
            else:
                result = verdict(tree, fault)
            wrong += result != "killed"
            print(
                f"{fault.number:3} {result:8} {time.monotonic() - began:5.1f} s  {fault.name}  [{fault.test}]",
                flush=True,
            )
    print(f"{len(faults) - wrong} of {len(faults)} faults are noticed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
