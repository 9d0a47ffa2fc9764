"""The gallery page: every figure and table has its section, its picture and a command that can be typed."""

import re
import shlex
from pathlib import Path

import pytest
from atma_sweep.reports.figures import FIGURES
from atma_sweep.reports.tables import TABLES
from atma_sweep.results.names import PUBLISHED, SHIPPED

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, IMAGES = DOCS / "gallery.md", DOCS / "images" / "gallery"
MAX_BYTES = 1_500_000


def commands() -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^atma-sweep .*$", PAGE.read_text(), re.MULTILINE)]


def value(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


def test_gallery_has_every_figure_and_table_once() -> None:
    assert [name for command in commands() if (name := value(command, "--figure"))] == list(FIGURES)
    assert [name for command in commands() if (name := value(command, "--table"))] == list(TABLES)


def test_gallery_pictures_are_small_and_all_shown() -> None:
    shown = re.findall(r"\]\(images/gallery/([\w-]+)\.png\)", PAGE.read_text())
    assert shown == list(FIGURES)
    assert sorted(shown) == sorted(path.stem for path in IMAGES.iterdir())
    assert 100_000 < sum(path.stat().st_size for path in IMAGES.iterdir()) < MAX_BYTES


def test_gallery_says_which_data_are_invented() -> None:
    """A command without a shipped sweep belongs to a section that says why."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        (command,) = re.findall(r"^atma-sweep report .*$", section, re.MULTILINE)
        sweep = value(shlex.split(command), "--sweep")
        assert (sweep is None) == ("no sweep that comes along" in section.lower()), command
        assert sweep is None or sweep in (*PUBLISHED, *SHIPPED)


@pytest.mark.thorough
@pytest.mark.slow
def test_gallery_captions_are_those_of_the_figures() -> None:
    from gallery import Source, caption_of

    source, text = Source(), PAGE.read_text()
    stale = [name for name in FIGURES if f"> {caption_of(source, name)}\n" not in text]
    assert stale == [], "run python tests/testing/gallery.py"
