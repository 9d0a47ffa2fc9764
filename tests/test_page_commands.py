"""Commands of the documents that are marked with `<!-- run -->` work on the quick sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_commands import Command, failures, marked_commands, pages, prepare, run_page

PAGE = """\
# Page

<!-- run -->
```console
$ echo one > file    # a comment
one
$ cat \\
    file
```

```console
$ false
```
"""


def test_marked_commands_join_continued_lines() -> None:
    assert marked_commands(PAGE) == [Command(5, "echo one > file    # a comment"), Command(7, "cat  file")]


@pytest.mark.parametrize(
    "after", ["", "\n```console\n$ true\n```\n", "```bash\n$ true\n```\n", "```console\ntrue\n```\n"]
)
def test_mark_without_a_console_block_is_an_error(after: str) -> None:
    with pytest.raises(ValueError, match="line 1: <!-- run --> must be followed by"):
        marked_commands(f"<!-- run -->\n{after}")


def test_marks_of_all_pages_are_valid() -> None:
    assert sum(len(marked_commands(page.read_text(encoding="utf-8"))) for page in pages()) >= 10


def test_run_page_names_page_line_and_command(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "work"
    folder.mkdir()
    page.write_text(PAGE)
    assert run_page(page, folder) is None
    assert (folder / "file").read_text() == "one\n"
    page.write_text(PAGE.replace("cat \\", "cat missing \\"))
    failure = run_page(page, folder)
    assert failure is not None
    assert failure.startswith("page.md:7: exit code 1 of: cat missing  file\n")
    assert "    cat: missing: No such file" in failure


@pytest.mark.thorough
@pytest.mark.slow
def test_marked_commands_succeed(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert failures(tmp_path, pages()) == []
