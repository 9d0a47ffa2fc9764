"""Places, files that are not ours, and file systems that SQLite cannot use."""

import os
import sqlite3
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from atma_sweep.results.errors import StoreError, StoreMissing, StoreOutdated, StoreTooNew
from atma_sweep.results.store import records, schema
from atma_sweep.results.store.database import network_filesystem, redacted_url, resolve_url
from atma_sweep.results.store.store import Store, open_store

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
31 22 0:30 / /home rw - nfs4 server:/home rw,vers=4.2
32 31 0:31 / /home/ada/local rw - xfs /dev/sdb rw
33 22 0:32 / /mnt/big\\040disk rw master:3 - lustre mds:/big rw
34 22 0:33 / /mnt/twice rw - ext4 /dev/sdc rw
35 22 0:34 / /mnt/twice rw - fuse.sshfs ada@far:/ rw
a line that is no mount
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/atma.db", None),
        ("/home/ada/atma.db", "nfs4"),
        ("/home/ada/local/atma.db", None),
        ("/homework/atma.db", None),
        ("/mnt/big disk/atma.db", "lustre"),
        ("/mnt/twice/atma.db", "fuse.sshfs"),
    ],
)
def test_the_deepest_and_last_mount_decides(path, kind):
    assert network_filesystem(Path(path), MOUNTS) == kind


# as the kernel writes them
REMOTE = {
    "nfs": "server:/export rw,vers=3,addr=10.0.0.1", "nfs4": "server:/export rw,vers=4.2,clientaddr=10.0.0.2",
    "lustre": "10.0.0.1@tcp:/scratch rw,flock,lazystatfs", "gpfs": "gpfs0 rw,relatime",
    "cifs": "//server/share rw,vers=3.1.1,cache=strict", "smb3": "//server/share rw",
    "fuse.sshfs": "ada@far:/home/ada rw,user_id=1000", "9p": "C:\\134 rw,aname=drvfs,trans=fd",
    "beegfs": "beegfs_nodev rw", "ceph": "10.0.0.1:6789:/ rw", "fuse.ceph-fuse": "ceph-fuse rw",
    "fuse.gcsfuse": "bucket rw",
}  # fmt: skip


def mounted(monkeypatch, folder, kind, source):
    """Makes the kernel's list of mounts say that the folder is one of that kind."""
    table = f"22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw\n31 22 0:30 / {folder} rw - {kind} {source}\n"
    real = Path.read_text

    def read(path, *arguments, **options):
        return table if path == Path("/proc/self/mountinfo") else real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path == Path("/proc/self/mountinfo") or exists(path))


@pytest.mark.parametrize("kind", REMOTE)
def test_every_network_file_system_is_refused_with_a_remedy(tmp_path, monkeypatch, kind):
    (tmp_path / "far").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "far" / "atma.db")
    mounted(monkeypatch, tmp_path / "far", kind, REMOTE[kind])
    for path in (tmp_path / "far" / "atma.db", f"sqlite:///{tmp_path}/far/atma.db", tmp_path / "link.db"):
        with pytest.raises(StoreError, match=rf"is on {kind}, .*use a local disk or PostgreSQL \(--db\)") as refused:
            open_store(path, create=True)
        assert refused.value.exit_code == 2
    assert list((tmp_path / "far").iterdir()) == []
    open_store(tmp_path / "near.db", create=True).close()


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs", "fuseblk", "virtiofs", "nfsd"]
)
def test_a_local_file_system_is_not_refused(tmp_path, monkeypatch, kind):
    mounted(monkeypatch, tmp_path, kind, "/dev/sda1 rw")
    open_store(tmp_path / "atma.db", create=True).close()
    assert (tmp_path / "atma.db").stat().st_size > 0


def test_a_missing_database_names_the_remedy(tmp_path):
    with pytest.raises(StoreMissing, match="launch a grid first, or name the database with --db"):
        open_store(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreMissing, match="is empty"):
        open_store(tmp_path / "empty.db")
    assert open_store(tmp_path / "empty.db", create=True).sweeps() == []


@pytest.mark.parametrize("create", [False, True])
def test_a_file_that_is_no_database(tmp_path, create):
    (tmp_path / "notes.db").write_text("just some notes, long enough to be looked at " * 50)
    with pytest.raises(StoreError, match="not a database"):
        open_store(tmp_path / "notes.db", create=create)
    connection = sqlite3.connect(tmp_path / "theirs.db")
    connection.execute("CREATE TABLE trials (id INTEGER)")
    connection.commit()
    with pytest.raises(StoreError, match="not a database of atma-sweep"):
        open_store(tmp_path / "theirs.db", create=create)
    with pytest.raises(StoreError, match="is a folder"):
        open_store(tmp_path, create=create)
    with pytest.raises(StoreError, match=r"there is no database|does not exist; create it"):
        open_store(tmp_path / "no" / "where.db", create=create)


@pytest.mark.parametrize(("revision", "error"), [("9999", StoreTooNew), ("0000", StoreOutdated)])
@pytest.mark.parametrize("create", [False, True])
def test_another_revision_is_refused(tmp_path, monkeypatch, revision, error, create):
    open_store(tmp_path / "test.db", create=True).close()
    connection = sqlite3.connect(tmp_path / "test.db")
    connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.commit()
    monkeypatch.setattr("atma_sweep.results.store.database.REVISIONS", ("0000", schema.HEAD))
    with pytest.raises(error, match=r"db upgrade|upgrade the program"):
        open_store(tmp_path / "test.db", create=create)


def test_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(resolve_url("some.db")) == f"sqlite:///{tmp_path}/some.db"
    assert resolve_url("postgresql://ada:secret@db/x").drivername == "postgresql+psycopg"
    assert "secret" not in redacted_url(resolve_url("postgresql://ada:secret@db/x"))
    for wrong in ("sqlite://", "sqlite:///:memory:", "mysql://x/y", "://"):
        with pytest.raises(StoreError):
            resolve_url(wrong)


def test_pragmas(tmp_path):
    store = open_store(tmp_path / "test.db", create=True)
    with store.transaction() as session:
        pragmas = [
            session.connection().exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert pragmas == ["wal", 1, 1, 30_000]
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.db"]  # no lock file, no journal left behind


def test_records_are_the_columns():
    for record, row in (
        (records.Attempt, schema.AttemptRow),
        (records.Measurement, schema.MeasurementRow),
        (records.Example, schema.ExampleRow),
        (records.CurvePoint, schema.CurvePointRow),
        (records.Provenance, schema.ProvenanceRow),
        (records.Event, schema.EventRow),
    ):
        unsaid = {"id", "attempt_id", "created_at"}
        assert {field.name for field in fields(record)} - unsaid == set(row.__table__.columns.keys()) - unsaid


def test_status_needs_nothing_heavy(tmp_path):
    open_store(tmp_path / "test.db", create=True).close()
    code = (
        "import sys; from atma_sweep.results.store.store import open_store; import atma_sweep.results.store.recorder\n"
        f"open_store({str(tmp_path / 'test.db')!r}).sweeps()\n"
        "import atma_sweep.reports.tables\n"
        "print([name for name in ('pandas', 'alembic', 'torch', 'ray', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert completed.stdout == "[]\n"


def test_store_resolves_its_url_without_open_store(tmp_path):
    assert str(Store(tmp_path / "x.db")) == str(tmp_path / "x.db")
