"""Names of sweeps, and the names of files made from any text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from atma_sweep.results import open_store, paper
from atma_sweep.results.errors import BundleError, StoreError
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.names import is_valid_name, quoted_short, safe_file_name, sweep_name_problem
from hypothesis import example, given
from hypothesis import strategies as st

GOOD = ["a", "0", "paper-v2", "h200-check", "A.b_c-d", "x" * 100, "my-printed-v2"]
BAD = [
    "", ".", "..", "a/b", "../../../x", "/etc/x", "a b", "-x", ".x", "_x", "größe", "x" * 101, "a\n", "a\0b",
    "\udc80", 7,
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_names_that_can_be(name: str) -> None:
    assert is_valid_name(name)
    assert sweep_name_problem(name) is None
    assert safe_file_name(name) == name


@pytest.mark.parametrize("name", BAD)
def test_names_that_cannot_be(name: object) -> None:
    assert not is_valid_name(name)
    assert "letters, digits" in str(sweep_name_problem(name))


@pytest.mark.parametrize("name", [*paper.SWEEPS, paper.OPEN_WEIGHT, "printed-v9", "Printed-v1", "printed-"])
def test_the_published_names_are_nobodys_own(name: str) -> None:
    assert is_valid_name(name)
    assert "reserved for the paper's numbers" in str(sweep_name_problem(name))
    assert safe_file_name(name) == name


@given(st.text(max_size=300))
@example("../../../x")
@example("/etc/passwd")
@example("..")
@example("a\0b")
@example("x" * 5000)
@example("")
@example("-rf")
def test_any_text_gives_a_file_name_that_stays_where_it_is(text: str) -> None:
    file_name = safe_file_name(text)
    assert os.path.normpath(os.path.join("/folder", file_name)) == f"/folder/{file_name}"
    assert file_name not in ("", ".", "..")
    assert file_name.isascii()
    assert file_name.isprintable()
    assert not file_name.startswith((".", "-"))
    assert len(file_name) <= 120


@given(st.lists(st.text(alphabet="a/. -_\\:*", max_size=4), unique=True, max_size=50))
def test_different_names_are_different_files(names: list[str]) -> None:
    assert len({safe_file_name(name) for name in names}) == len(names)


def test_what_is_long_is_cut_in_messages() -> None:
    assert quoted_short("micro") == "'micro'"
    assert quoted_short("x" * 5000) == f"'{'x' * 60}'... (5000 letters)"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published first version as a bundle, so named."""
    folder = tmp_path_factory.mktemp("published")
    store = open_store(folder / "atma.db", create=True)
    paper.load_published(store)
    export_sweep(store, "printed-v1", folder / "theirs.zip")
    store.close()
    return folder / "theirs.zip"


@pytest.mark.parametrize("name", ["../../../x", "a b", "x" * 5000, "printed-v2", ""])
def test_import_refuses_an_invalid_name(bundle: Path, tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / "here.db", create=True)
    with pytest.raises(StoreError, match="--name") as error:
        import_bundle(store, bundle, rename=name)
    assert error.value.exit_code == 2
    assert len(str(error.value)) < 300
    assert store.sweeps() == []
    store.close()


def test_a_bundle_cannot_bring_a_published_name(bundle: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "here.db", create=True)
    with pytest.raises(BundleError, match=r"reserved for the paper.*--name"):
        import_bundle(store, bundle)
    assert import_bundle(store, bundle, rename="theirs").sweep == "theirs"
    store.close()
