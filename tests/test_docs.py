"""The documents: every link leads somewhere, and every part of the network has its place in docs/reference/mechanisms.md."""

import re
from pathlib import Path

import layers
import pytest
from atma_sweep.model import registry
from atma_sweep.sweep.probes import PROBES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(page: Path) -> set[str]:
    """Anchors of a page as Markdown viewers make them: lower case, spaces to hyphens, punctuation gone."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and anchor not in headings(there)):
            broken.append(target)
    assert broken == []


def test_the_link_check_sees_a_missing_heading(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One thing, two\n\n```\n# no heading\n```\n")
    assert headings(tmp_path / "a.md") == {"one-thing-two"}


def test_every_part_has_its_row_and_its_section() -> None:
    page = ROOT / "docs/reference/mechanisms.md"
    text = page.read_text()
    table = text.split("## Parts by name")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:\w+: )?(\w+)`", table))
    parts = {*registry.MIXERS, *registry.MEMORIES, *registry.REGULARIZERS, *PROBES}
    assert parts <= named, f"docs/reference/mechanisms.md lacks a row for {sorted(parts - named)}"


def test_page_describes_each_mixer() -> None:
    table = (ROOT / "docs/how-to/compare-mixers.md").read_text().split("## Mixers\n")[1].split("\n## ")[0]
    described = re.findall(r"^\| `(\w+)` \| \w", table, re.MULTILINE)
    assert sorted(described) == sorted(["attn_type", *registry.MIXERS])


CITED = re.compile(r'docs/([\w/-]+)\.md(?:, "([^"\n]+)"(?: and "([^"\n]+)")?)?')


def test_what_the_code_cites_is_there() -> None:
    wrong, n_citations = [], 0
    for file in sorted(ROOT.glob("**/*.py")):
        if any(part.startswith(".") or part == "build" for part in file.relative_to(ROOT).parts):
            continue
        text = file.read_text()
        wrong += [f"{file.name}: {old}" for old in re.findall(r"\b(?:MECHANISMS|KERNELS) [A-Z]\d?\b", text)]
        for page, *titles in CITED.findall(text):
            where = ROOT / "docs" / f"{page}.md"
            lines = where.read_text().splitlines() if where.exists() else []
            n_citations += 1
            missing = [title for title in titles if title and f"## {title}" not in lines]
            wrong += [f"{file.name}: {page} {title}" for title in missing] + ([] if lines else [f"{file.name}: {page}"])
    assert wrong == []
    assert n_citations > 40


GLOSSARY_TERMS = ("cell", "attempt", "sweep", "revision", "bundle", "probe", "recipe", "orphan")


def test_glossary_explains_its_terms() -> None:
    page = (ROOT / "docs/explanation/cells-and-identity.md").read_text()
    explained = re.findall(r"^\| (\w+) \| ", page.split("## Glossary\n")[1].split("\n## ")[0], re.MULTILINE)
    assert set(GLOSSARY_TERMS) <= set(explained[1:])


def test_readme_and_contributing_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text().split()) for name in ("README.md", "CONTRIBUTING.md")}
    assert lengths["README.md"] <= 600
    assert lengths["CONTRIBUTING.md"] <= 550


def test_every_page_is_reachable_from_the_readme() -> None:
    """A link to a folder reaches its pages, as its list of files does."""
    queue, reached = [ROOT / "README.md"], set()
    while queue:
        page = queue.pop()
        if page.is_dir():
            queue += page.glob("*.md")
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = [(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(page.read_text())]
        queue += [link for link in links if link.exists()]
    # the index pages list what lies in their folders
    assert {page for page in set(PAGES) - reached if page.name != "index.md"} == set()


def test_architecture_draws_the_layers_in_force() -> None:
    assert layers.PAGE.read_text() == layers.page(), "draw it anew: python -m tests.testing.layers"


@pytest.mark.parametrize("index", sorted(ROOT.glob("docs/*/index.md")), ids=lambda index: index.parent.name)
def test_each_index_links_the_pages_of_its_folder(index: Path) -> None:
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert set(index.parent.glob("*.md")) - {index} == linked


PATH = re.compile(r"`((?:sweep|model|kernels|results|reports|grids|tests|docs|\.ci)/[\w./-]+|cli\.py)`")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(PATH.findall(page.read_text()))
    assert sorted(name for name in named if not re.search("NNNN|NAME|PROBE", name) and not (ROOT / name).exists()) == []


def test_pages_name_files() -> None:
    assert len(PATH.findall((ROOT / "docs/explanation/architecture.md").read_text())) > 5


def test_every_shipped_grid_is_listed() -> None:
    named = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / "docs/reference/shipped-grids.md").read_text()))
    assert {path.stem for path in (ROOT / "grids").glob("*.yaml")} - named == set()
