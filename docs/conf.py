"""Configuration of the documentation site: `sphinx-build -W --keep-going -b html docs build/site`.

The pages are Markdown that reads the same on GitHub, hence MyST. Sphinx writes the reference of the Python API from
docstrings and turns a broken reference into an error; Furo brings search and a dark mode without requesting anything
from another host. All three are maintained.

Environment: DOCS_VERSION is the version shown (by default that of the package); DOCS_REPOSITORY is the address of the
repository, such as https://github.com/OWNER/NAME, and DOCS_REF the branch or tag of links to files outside docs/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import atma_sweep
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "atma-sweep"
author = "The atma-sweep authors"
copyright = author
release = version = (os.environ.get("DOCS_VERSION") or atma_sweep.__version__).removeprefix("v").partition("+")[0]
REPOSITORY = os.environ.get("DOCS_REPOSITORY", "")
REF = os.environ.get("DOCS_REF", "main")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_*"]

myst_heading_anchors = 6  # page.md#heading, as on GitHub

copybutton_prompt_text = "$ "  # the prompt and what a command prints stay out of the clipboard

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
default_role = "code"  # docstrings write code in single backticks
smartquotes = False  # --options stay as they are typed
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"atma-sweep {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
templates_path = ["_templates"]
html_show_sphinx = html_show_copyright = html_copy_source = False
html_sidebars = {
    "**": [
        "sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html", "sidebar/navigation.html",
        "sidebar/scroll-end.html", "sidebar/versions.html",
    ]
}  # fmt: skip
html_theme_options = (
    {"source_repository": REPOSITORY, "source_branch": REF, "source_directory": "docs/"} if REPOSITORY else {}
)

LINK = re.compile(r"(?<=\]\()([^)\s:#]+)((?:#[^)\s]*)?)(?=\))")


def adapt_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrite links of a page to files outside docs/ so that they lead to the repository's page of the file.

    Without DOCS_REPOSITORY the file itself travels with the site. A page without a heading gets its first line, in bold, as title.

    Args:
        app: The build; not used.
        docname: Page, relative to docs/ and without its suffix.
        source: List of one text, which is replaced.
    """
    folder = (DOCS / docname).parent

    def rewrite(match: re.Match[str]) -> str:
        """Return the new target of a link, or the old one if it stays inside docs/."""
        file = (folder / match[1]).resolve()
        if file.is_relative_to(DOCS) and (file / "index.md").exists():
            return f"{match[1].rstrip('/')}/index.md"
        if file.is_relative_to(DOCS) or not file.is_relative_to(ROOT):
            return match[0]
        if not REPOSITORY:
            return f"path:{match[1]}"
        kind = "tree" if file.is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/{REF}/{file.relative_to(ROOT).as_posix()}{match[2]}"

    source[0] = LINK.sub(rewrite, source[0])
    if not re.search(r"^# ", source[0], re.MULTILINE):
        # a table as `atma-sweep report` prints it: its title becomes that of the page
        source[0] = re.sub(r"\A\*\*(.+)\*\*$", r"# \1", source[0], flags=re.MULTILINE)


def mark_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Mark indented paragraphs of a docstring as code, which they are in this project outside sections such as Args.

    Args:
        app, what, name, obj, options: The object with the docstring; not used.
        lines: Lines of the docstring, which are changed.
    """
    for index in reversed(range(1, len(lines))):
        is_code = lines[index].startswith("    ") and lines[index].strip() and not lines[index - 1].strip()
        previous = next((line for line in reversed(lines[:index]) if line.strip()), "")
        if is_code and previous and not previous.startswith(" ") and not previous.endswith("::"):
            lines[index:index] = ["::", ""]

    if what in ("attribute", "data", "property"):
        attribute_docstrings[name] = list(lines)


attribute_docstrings: dict[str, list[str]] = {}
"""Docstrings of attributes by their dotted name, as they were before napoleon."""


def restore_attribute(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Undo napoleon's change of an attribute's docstring: it takes the text before a colon for a type.

    Args:
        app, what, name, obj, options: The object with the docstring; only its name is used.
        lines: Lines of the docstring, which are replaced.
    """
    lines[:] = attribute_docstrings.pop(name, lines)


def setup(app: Sphinx) -> None:
    """Register the changes of pages and docstrings; napoleon's own has the priority 500."""
    app.connect("source-read", adapt_page)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
    app.connect("autodoc-process-docstring", restore_attribute, priority=600)
