"""Count what the rules of tests/testing/language.toml leave out of names and documents, and hold the counts, which may only fall.

`python -m tests.testing.language` prints the counts; with names of files it lists their findings, with `--record` it writes lower
counts down.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RULES = Path(__file__).with_name("language.toml")

MIN_LINES = 6
"""Lines of a function, from `def` to its last one, from which on it needs a docstring."""
MAX_TEST_NAME = 60
"""Characters of the longest name that a test may have."""

MAX_SENTENCE_LENGTH = 40
"""Length, in words, of the longest sentence that a document may have."""

MAX_PROSE_LENGTH = 30_000
"""Words of prose that all pages for users together should have at most."""

MAX_MEAN_LENGTH = 25
"""Words that their sentences should have at most, in the mean."""

Finding = tuple[str, str, int, str]
"""Rule, file, line, text."""


@functools.cache
def rules() -> dict[str, list[str]]:
    """Return the lists of words of tests/testing/language.toml."""
    return tomllib.loads(RULES.read_text(encoding="utf-8"))["words"]


@functools.cache
def limits() -> dict[str, int]:
    """Return the recorded counts of tests/testing/language.toml, by rule."""
    return tomllib.loads(RULES.read_text(encoding="utf-8"))["counts"]


def parts_of(name: str) -> list[str]:
    """Return the words of an identifier, which underscores and capital letters separate, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every function, class, parameter, variable and attribute that a file binds."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def findings_of_code(file: str, text: str) -> Iterator[Finding]:
    """Yield the departures of one Python file from the rules.

    These are identifiers with a listed word, docstrings that open with one, functions of the product of MIN_LINES lines or more
    without a docstring, and names of tests over MAX_TEST_NAME characters.
    """
    rule_lists = rules()
    side = "tests" if file.startswith(("tests/", "examples/")) else "product"
    nodes = list(ast.walk(ast.parse(text)))
    for line, name in bound_names(nodes):
        if name.strip("_") not in rule_lists["terms"] and set(parts_of(name)) & set(rule_lists["identifiers"]):
            yield f"{side} identifiers", file, line, name
    opening = re.compile(rf"({'|'.join(rule_lists['openings'])})\b")
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node) or ""
            if opening.match(docstring):
                yield f"{side} docstrings", file, getattr(node, "lineno", 1), docstring.splitlines()[0]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if side == "product" and n_lines >= MIN_LINES and not ast.get_docstring(node):
                yield "undocumented functions", file, node.lineno, f"{node.name}, {n_lines} lines"
            if side == "tests" and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
                yield "long test names", file, node.lineno, node.name


def findings_of_document(file: str, text: str) -> Iterator[Finding]:
    """Yield long lines and sentences of a document, unless a command writes it.

    Lines may have 100 characters, but for tables and lines with an address. Sentences may have 40 words; code, tables,
    headings and pictures are no prose.
    """
    if file.startswith(tuple(rules()["generated"])):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > 100 and not line.startswith("|") and "http" not in line:
            yield "document lines", file, number, line[:80]
    for start, sentence in sentences(text):
        if len(sentence.split()) > MAX_SENTENCE_LENGTH:
            yield "document sentences", file, start, f"{len(sentence.split())} words: {sentence[:70]}"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line at which its paragraph starts, sentence) of a document's prose: no code, tables, headings, pictures, comments."""
    prose, is_code, start = list[str](), False, 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_code ^= line.lstrip().startswith("```")
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        if is_code or not line.strip() or item or line.lstrip().startswith(("|", "#", "![", "```", "<")):
            yield from ((start, sentence) for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(prose)) if sentence)
            prose, start = [line[item.end() :]] if item and not is_code else [], number
        else:
            prose.append(line.strip())


def prose_counts(files: dict[str, str]) -> dict[str, int]:
    """Return two counts of the pages for users, which do not fall below their goals: words, and words per 100 sentences.

    These are all pages of docs/ but experiments and pages that a command writes.
    """
    skipped = ("docs/experiments/", *rules()["generated"])
    pages = [
        text
        for name, text in files.items()
        if name.startswith("docs/") and name.endswith(".md") and not name.startswith(skipped)
    ]
    lengths = [len(sentence.split()) for text in pages for _, sentence in sentences(text)]
    mean = round(100 * sum(lengths) / len(lengths)) if lengths else 0
    return {
        "prose words": max(sum(lengths), MAX_PROSE_LENGTH),
        "prose words per 100 sentences": max(mean, 100 * MAX_MEAN_LENGTH),
    }


def repeated_classes(files: dict[str, str]) -> Iterator[Finding]:
    """Yield each public class name of the product that several files define."""
    defined: dict[str, list[tuple[str, int]]] = {}
    for file, text in files.items():
        if file.endswith(".py") and not file.startswith(("tests/", "examples/")):
            for match in re.finditer(r"^class ([^\W_]\w*)", text, re.MULTILINE):
                defined.setdefault(match[1], []).append((file, text.count("\n", 0, match.start()) + 1))
    for name, uses in sorted(defined.items()):
        if len(uses) > 1:
            yield "class names", *uses[0], f"{name}, also in {', '.join(file for file, _ in uses[1:])}"


def sources(names: list[str] | None = None) -> dict[str, str]:
    """Return the text of the Python files and documents of the repository, or of these."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    files = [name for name in names or listed if name.endswith((".py", ".md")) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files}


def findings(files: dict[str, str]) -> Iterator[Finding]:
    """Yield all findings in these files."""
    for name, text in files.items():
        yield from findings_of_code(name, text) if name.endswith(".py") else findings_of_document(name, text)
    yield from repeated_classes(files)


def counts() -> dict[str, int]:
    """Return today's counts of the repository, by rule."""
    files = sources()
    n_findings = Counter(rule for rule, *_ in findings(files)) + Counter(prose_counts(files))
    return {rule: n_findings[rule] for rule in limits()}


def record(lower: dict[str, int]) -> None:
    """Write counts down that fell; ValueError where one rose."""
    risen = {rule: count for rule, count in lower.items() if count > limits()[rule]}
    if risen:
        raise ValueError(f"these counts rose above the recorded ones: {risen}")
    text = RULES.read_text(encoding="utf-8")
    for rule, count in lower.items():
        text = re.sub(rf'^"{rule}" = \d+$', f'"{rule}" = {count}', text, flags=re.MULTILINE)
    RULES.write_text(text, encoding="utf-8")


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    if names:
        for rule, file, line, text in findings(sources(names)):
            print(f"{file}:{line}: {rule}: {text}")
        return
    today = counts()
    if "--record" in sys.argv:
        record(today)
    for rule, count in today.items():
        print(f"{rule:20} {count:6,} of at most {limits()[rule]:6,}")


if __name__ == "__main__":
    main()
