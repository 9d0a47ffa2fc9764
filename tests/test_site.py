"""The built documentation requests nothing from another host, and the list of its versions is in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_script(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / ".ci" / name, folder], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ('<script src="https://cdn.example.org/a.js"></script>', "another host: https://cdn.example.org/a.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "another host: //fonts.example.org/a.css"),
        ('<img srcset="here.png 1x, http://example.org/b.png 2x">', "another host: http://example.org/b.png"),
        ("<style>@import 'https://example.org/a.css';</style>", "another host: https://example.org/a.css"),
        ('<p style="background: url(https://example.org/a.png)"></p>', "another host: https://example.org/a.png"),
        ('<img src="missing.png">', "a file that is not there: missing.png"),
        ('<a href="https://example.org">a link</a><link rel="canonical" href="https://example.org">', ""),
        ('<img src="here.png?v=1"><img src="data:image/png;base64,AA"><script>1</script>', ""),
    ],
)
def test_site_check_names_foreign_requests(tmp_path: Path, text: str, finding: str) -> None:
    (tmp_path / "here.png").touch()
    (tmp_path / "page.html").write_text(text)
    ended = run_script("check_site.py", tmp_path)
    if finding:
        assert (ended.returncode, ended.stdout) == (1, f"page.html: requests {finding}\n")
    else:
        assert (ended.returncode, ended.stdout) == (0, "1 pages request nothing from another host\n")


def test_site_check_reads_style_sheets_and_refuses_nothing(tmp_path: Path) -> None:
    assert run_script("check_site.py", tmp_path).returncode == 1
    (tmp_path / "a.css").write_text("@font-face { src: url('https://example.org/a.woff2') }")
    (tmp_path / "page.html").touch()
    assert "a.css: requests another host: https://example.org/a.woff2" in run_script("check_site.py", tmp_path).stdout


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    assert run_script("versions.py", tmp_path).returncode == 1
    for name in ("0.9.0", "0.10.0", "main", "0.10.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "objects.inv").touch()
    (tmp_path / "notes").mkdir()
    assert run_script("versions.py", tmp_path).returncode == 0
    names = json.loads((tmp_path / "versions.json").read_text())
    assert [name for name in names if name != "main"] == ["0.10.0", "0.10.0rc1", "0.9.0"]
    assert "main" in names
    assert 'url=0.10.0/"' in (tmp_path / "index.html").read_text()
