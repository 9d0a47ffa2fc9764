"""Nothing hostile gets past the manifest of a bundle."""

import hashlib
import io
import json
import random
import shutil
import tracemalloc
import zipfile

import pytest
from atma_sweep.results.errors import BundleError, StoreTooNew
from atma_sweep.results.exchange import row_validation
from atma_sweep.results.exchange.bundles import Limits, open_bundle
from atma_sweep.results.exchange.import_plan import BundleContent
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import open_store
from bundles import packed, unpacked
from histories import all_rows, bundle, files, halves, run

pytestmark = pytest.mark.usefixtures("working_folder")


def edited(members, table, **values):
    """The members with the first row of a table changed."""
    first, *rest = members[f"{table}.jsonl"].splitlines(keepends=True)
    row = json.loads(first) | values
    return members | {f"{table}.jsonl": json.dumps(row).encode() + b"\n" + b"".join(rest)}


ROWS = {
    "a folder outside": ("attempt", {"run_dir": "../../../etc"}),
    "an absolute folder": ("attempt", {"run_dir": "/etc"}),
    "a folder of another cell": ("attempt", {"run_dir": "corpora/1"}),
    "dots in a folder": ("attempt", {"run_dir": "c02000000000/../../x"}),
    "an unknown cell": ("attempt", {"cell_id": "nothing"}),
    "an unknown parent": ("attempt", {"parent_id": 99}),
    "a number of zero": ("attempt", {"number": 0}),
    "an unknown state": ("attempt", {"state": "splendid"}),
    "running and finished": ("attempt", {"state": "running"}),
    "a time that is none": ("attempt", {"started_at": "yesterday"}),
    "a time without seconds": ("attempt", {"started_at": "2026-01-02T03:04Z"}),
    "a bool for a number": ("attempt", {"number": True}),
    "a number beyond 64 bits": ("measurement", {"n": 2**63}),
    "text for a number": ("measurement", {"value": "1.0"}),
    "a missing unit": ("measurement", {"unit": None}),
    "neither value nor reason": ("measurement", {"value": None, "reason": None}),
    "a lone surrogate": ("measurement", {"unit": "\ud800"}),
    "another column": ("measurement", {"id": 5}),
    "an unknown attempt": ("measurement", {"attempt_id": 77}),
    "the key of another row": ("curve_point", {"step": 1}),
    "a list for an object": ("cell", {"config": []}),
    "a long id": ("cell", {"id": "c" * 13}),
    "an id with a slash": ("cell", {"id": "../x"}),
    "another sweep": ("sweep", {"name": "other"}),
    "a revision below one": ("revision", {"number": -1}),
    "a link to nothing": ("revision_cell", {"revision": 9}),
    "an event of nobody": ("event", {"attempt_id": 55}),
    "the folder of the frozen code": ("attempt", {"run_dir": "source/0123456789ab", "cell_id": "source"}),
    "the folder of prepared text": ("attempt", {"run_dir": "corpora/requests"}),
    "a folder below an attempt's": ("attempt", {"run_dir": "c02000000000/1/x"}),
    "a year that no clock reaches": ("attempt", {"started_at": "9999-12-31T23:59:59.999Z"}),
    "a sweep of the year 9999": ("sweep", {"launched_at": "9999-12-31T23:59:59.999Z"}),
    "a day that is none": ("event", {"at": "2026-02-30T00:00:00.000Z"}),
    "requests that are no pairs": ("revision", {"options": {"requested": 7}}),
    "a request without a length": ("revision", {"options": {"requested": [["val"]]}}),
    "a request of an endless length": ("revision", {"options": {"requested": [["val", 1e300]]}}),
    "separators in a probe": ("measurement", {"probe": "val\x1fval_loss\x1ex"}),
    "an empty reason": ("measurement", {"value": None, "reason": ""}),
    "a number that is not finite": ("measurement", {"value": 10**400}),
    "a slug that leads elsewhere": ("cell", {"slug": "../../x"}),
    "an id that is no hash": ("cell", {"id": "sources"}),
    "axes that are no texts": ("revision_cell", {"axes": {"memory": {"a": 1}}}),
    "a plugin without a hash": ("cell", {"config": {"plugins": [{"path": "x.py", "sha256": "../x"}]}}),
    "code that leads elsewhere": ("event", {"kind": "code", "message": "../../x"}),
    "a NUL in JSON": ("provenance", {"extra": {"a": "\0"}}),
    "JSON that is too deep": ("provenance", {"extra": {"a": [[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]}}),
    "a failure of no class": ("attempt", {"failure": "splendid"}),
    "a step before the first": ("curve_point", {"step": -1}),
    "its own parent": ("attempt", {"parent_id": 1}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, cells):
    """Return (file of a database, members of a bundle for it)."""
    folder = tmp_path_factory.mktemp("prepared")
    first, second = halves(*(open_store(folder / name, create=True) for name in ("a.db", "b.db")), cells)
    run(second, cells(4)[0].id, 95, weights=b"w")
    members = unpacked(bundle(second, folder, weights=True))
    first.close()
    second.close()
    return first.path, members


@pytest.fixture
def victim(prepared, tmp_path):
    """Yield (database, members of a bundle for it, check that nothing has changed)."""
    path, members = prepared
    store = open_store(shutil.copy(path, tmp_path / "a.db"))
    before, disk = all_rows(store), {*files(tmp_path), "evil.zip"}

    def unchanged():
        assert all_rows(store) == before
        assert {name for name in files(tmp_path) if not name.endswith(("-wal", "-shm"))} <= disk

    yield store, members, unchanged
    store.close()


@pytest.mark.thorough
@pytest.mark.parametrize("what", ROWS)
def test_rows_that_cannot_be_are_refused(victim, tmp_path, what):
    store, members, unchanged = victim
    table, values = ROWS[what]
    with pytest.raises(BundleError, match="nothing was changed") as caught:
        import_bundle(store, packed(tmp_path / "evil.zip", edited(members, table, **values)))
    assert len(str(caught.value).splitlines()) == 1
    unchanged()


def test_a_refusal_names_member_row_and_field(victim, tmp_path):
    store, members, unchanged = victim
    first, second, *rest = members["attempt.jsonl"].splitlines(keepends=True)
    row = json.dumps(json.loads(second) | {"started_at": "9999-12-31T23:59:59.999Z\x1b[31m"}).encode() + b"\n"
    file = packed(tmp_path / "evil.zip", members | {"attempt.jsonl": first + row + b"".join(rest)})
    with pytest.raises(BundleError) as caught:
        import_bundle(store, file)
    assert str(caught.value) == (
        f"{file} cannot be imported: attempt.jsonl, row 2: started_at is '9999-12-31T23:59:59.999Z\\x1b[31m'; it "
        "must be a time from 1970 to 2199, such as 2026-01-02T03:04:05.678Z; nothing was changed. Export the "
        "sweep again"
    )
    unchanged()


def test_every_column_has_a_rule():
    """A column that is added needs a line in the schema of what may come in."""
    for name in row_validation.BUNDLE_TABLES:
        listed = {column.name for column in row_validation.bundle_columns(name)}
        assert listed <= row_validation.FIELD_RULES[name].keys(), name
        assert row_validation.FIELD_RULES[name].keys() - listed <= {"sweep", "revision"}


BOMBS = {
    "one long line": ("event.jsonl", b'{"a": "' + b" " * 300_000_000 + b'"}\n', "unpacks to 300 MB"),
    "many empty lines": ("curve_point.jsonl", b"\n" * 100_000_000, "unpacks to 100 MB"),
    "zeros for weights": ("files/1/weights.safetensors", b"\0" * 100_000_000, "unpacks to 100 MB"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", BOMBS)
def test_what_unpacks_to_far_more_than_it_is(victim, tmp_path, what):
    """Refused before it is unpacked; even when the limits are lifted a line has its length."""
    store, members, unchanged = victim
    name, data, message = BOMBS[what]
    file = packed(tmp_path / "evil.zip", members | {name: data})
    with pytest.raises(BundleError, match=f"{message}.*--large"):
        import_bundle(store, file)
    if name.endswith(".jsonl"):
        tracemalloc.start()
        with pytest.raises(BundleError, match=r"bytes|row 1"):
            import_bundle(store, file, large=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50_000_000
    unchanged()


def test_too_many_members_are_refused_before_reading_them(victim, tmp_path):
    _, members, unchanged = victim
    with open_bundle(packed(tmp_path / "evil.zip", members)):
        pass
    with pytest.raises(BundleError, match="--large"), open_bundle(tmp_path / "evil.zip", Limits(max_files=0)):
        pass
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for number in range(1000):
            archive.writestr(f"{number}" + "x" * 500, b"")
    with (
        pytest.raises(BundleError, match="lists too many members"),
        open_bundle(tmp_path / "evil.zip", Limits(max_files=1000)),
    ):
        pass
    unchanged()


def test_links_and_folders_are_no_members(victim, tmp_path):
    store, members, unchanged = victim
    for name, mode in (("files/9/log.txt", 0o120777), ("files/9/log.txt", 0o020666), ("files/9/", 0o040755)):
        with zipfile.ZipFile(packed(tmp_path / "evil.zip", members), "a") as archive:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, b"/etc/passwd")
        with pytest.raises(BundleError, match="not a plain file"):
            import_bundle(store, tmp_path / "evil.zip")
    unchanged()


LINES = {
    "no JSON": b"{\n",
    "an array": b"[1]\n",
    "NaN": b'{"attempt_id": NaN}\n',
    "a key twice": b'{"a": 1, "a": 2}\n',
    "no end": b"{}",
    "too deep": b"[" * 100_000 + b"\n",
    "a number of many digits": b'{"a": ' + b"9" * 10_000 + b"}\n",
    "no UTF-8": b'{"a": "\xff"}\n',
}


MANIFESTS = {
    "a wrong hash": {"members__cell.jsonl": {"sha256": "0" * 64, "bytes": 0}},
    "no members": {"members": {}},
    "a count too many": {"counts__event": 99},
    "a negative count": {"counts__event": -1},
    "no format": {"format": None},
    "something else": {"what": "a cake"},
    "no sweep": {"sweep": ""},
    "a sweep that colours the terminal": {"sweep": "\x1b[31m"},
}


def test_a_row_that_was_changed_without_its_hash(victim, tmp_path):
    """Another number of the same length, in a zip that is in order."""
    store, members, unchanged = victim
    manifest = json.loads(members["manifest.json"])
    changed = members | {"measurement.jsonl": members["measurement.jsonl"].replace(b":2.2,", b":1.2,")}
    assert changed != members
    facts = manifest["members"]["measurement.jsonl"]
    with pytest.raises(BundleError, match=r"the hash of .* differs"):
        import_bundle(store, packed(tmp_path / "evil.zip", changed, **{"members__measurement.jsonl": facts}))
    weights = next(name for name in members if name.endswith("safetensors"))
    facts = manifest["members"][weights]
    with pytest.raises(BundleError, match=r"the hash of .* differs"):
        import_bundle(store, packed(tmp_path / "evil.zip", members | {weights: b"x"}, **{f"members__{weights}": facts}))
    unchanged()


@pytest.mark.parametrize(
    "changes", [{"format": 2}, {"schema": "9999"}, {"format": 99, "schema": "from the future", "members": 1}]
)
def test_a_newer_bundle_names_the_remedy(victim, tmp_path, changes):
    store, members, unchanged = victim
    with pytest.raises(StoreTooNew, match="upgrade the program"):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **changes))
    unchanged()


NAMES = [
    "../evil", "/evil", "files/../../evil", "files/1/../evil", "files/1/.hidden", "files/1/a/b", "files/77/log.txt",
    "files/1/a\\..\\evil", "attempt.jsonl/x", "files/0/log.txt", "evil.py",
]  # fmt: skip
"""Of members, which lead elsewhere or belong to no attempt."""
LIES: dict[str, tuple[dict[str, bytes], dict[str, object]]] = {
    **{f"line: {what}": ({"measurement.jsonl": line}, {}) for what, line in LINES.items()},
    **{f"manifest: {what}": ({}, values) for what, values in MANIFESTS.items()},
    **{f"member {name}": ({name: b"evil"}, {}) for name in NAMES},
}
"""By what is wrong: bytes behind those of a member, and entries of the manifest."""


@pytest.mark.thorough
@pytest.mark.parametrize("what", LIES)
def test_lines_manifests_and_names_that_lie(victim, tmp_path, what):
    store, members, unchanged = victim
    more, manifest = LIES[what]
    members = members | {name: members.get(name, b"") + data for name, data in more.items()}
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **manifest))
    unchanged()


def test_members_that_the_manifest_does_not_list_or_lists_twice(victim, tmp_path):
    store, members, unchanged = victim
    file = packed(tmp_path / "evil.zip", members)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("files/1/more.txt", b"x")
    with pytest.raises(BundleError, match="members differ from those"):
        import_bundle(store, file)
    file = packed(tmp_path / "evil.zip", members)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("attempt.jsonl", b"")
    with pytest.raises(BundleError, match="twice"):
        import_bundle(store, file)
    unchanged()


def test_sizes_are_bounded_by_the_manifest(victim, tmp_path):
    store, members, unchanged = victim
    lies = {"sha256": hashlib.sha256(members["cell.jsonl"]).hexdigest(), "bytes": 7}
    with pytest.raises(BundleError, match="size"):
        import_bundle(store, packed(tmp_path / "evil.zip", members, **{"members__cell.jsonl": lies}))
    # a bomb: the directory of the zip says little, the data unpack to much
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"\0" * 50_000_000)
    file = packed(tmp_path / "evil.zip", members | {"files/1/zeros": b"\0" * 1_000_000})
    data = file.read_bytes().replace((1_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    file.write_bytes(data)
    with pytest.raises(BundleError):
        import_bundle(store, file)
    unchanged()


def test_damaged_files(victim, tmp_path):
    """A bit flipped anywhere: refused, or (in what a zip does not care about) the same rows."""
    store, members, unchanged = victim
    good = packed(tmp_path / "good.zip", members).read_bytes()
    draw, refused = random.Random(1), 0
    for _ in range(150):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "evil.zip").write_bytes(data)
        try:
            with open_bundle(tmp_path / "evil.zip") as opened:
                BundleContent(opened, None)
        except (BundleError, StoreTooNew):
            refused += 1
    assert refused > 75
    for cut in (0, 1, 100, len(good) // 2, len(good) - 1):
        (tmp_path / "evil.zip").write_bytes(good[:cut])
        with pytest.raises(BundleError):
            import_bundle(store, tmp_path / "evil.zip")
    (tmp_path / "good.zip").unlink()
    with pytest.raises(BundleError):
        import_bundle(store, tmp_path)
    unchanged()


def test_import_compares_ids_with_configs_on_request(victim, tmp_path):
    store, members, unchanged = victim
    file = packed(tmp_path / "evil.zip", members)
    with pytest.raises(BundleError, match="whose id is other"):
        import_bundle(store, file, identify=lambda config, claimed: "other")
    with pytest.raises(BundleError, match="cannot be read"):
        import_bundle(store, file, identify=lambda config, claimed: config["nothing"])
    read_only = packed(tmp_path / "evil.zip", edited(members, "sweep", read_only=True))
    with pytest.raises(BundleError, match="whose id is other"):
        import_bundle(store, read_only, rename="published", identify=lambda config, claimed: "other")
    unchanged()


def test_a_bundle_of_the_first_release(victim, tmp_path):
    """It lacks the columns that came later; they get their defaults."""
    store, members, _ = victim
    later = {"failure", "deviation"}
    old = []
    for line in members["attempt.jsonl"].splitlines():
        old.append(json.dumps({name: value for name, value in json.loads(line).items() if name not in later}))
    members = members | {"attempt.jsonl": "".join(f"{line}\n" for line in old).encode()}
    with pytest.raises(BundleError):
        import_bundle(store, packed(tmp_path / "evil.zip", members))
    import_bundle(store, packed(tmp_path / "evil.zip", members, schema="0001"))
    assert [summary.counts for summary in store.sweeps()] == [{"done": 4}]
