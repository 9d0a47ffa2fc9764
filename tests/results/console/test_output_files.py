"""The one writer: whole files, links, pipes, devices, and what cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from atma_sweep.results.console import output_files
from atma_sweep.results.errors import StoreError, WriteRefused
from patience import PATIENCE_S

PYTHON = [sys.executable, "-c"]
WRITE = (
    "from pathlib import Path; import sys; from atma_sweep.results.console import output_files; "
    f"output_files.{output_files.write_file.__name__}(Path(sys.argv[1]), {{!r}})"
)
ENDINGS = {".md": "md", ".csv": "csv"}


def test_what_a_folder_takes_while_files_go(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(bytes(1001))
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    link = (tmp_path / "link").lstat().st_size
    assert [output_files.size_on_disk(tmp_path / name) for name in ("kept", "link", "gone")] == [1001, link, 0]
    ended = threading.Event()

    def working() -> None:
        while not ended.is_set():
            (tmp_path / "a.part").mkdir()
            (tmp_path / "a.part" / "x").touch()
            shutil.rmtree(tmp_path / "a.part")

    worker = threading.Thread(target=working)
    worker.start()
    try:
        assert {output_files.size_on_disk(tmp_path) for _ in range(300)} == {1001 + link}
    finally:
        ended.set()
        worker.join()


def test_atomic_file_appears_only_when_complete(tmp_path: Path) -> None:
    to = tmp_path / "out.txt"
    to.write_text("old")
    with contextlib.suppress(ZeroDivisionError), output_files.atomic_file(to) as stream:
        stream.write(b"new")
        stream.flush()
        assert to.read_text() == "old"
        raise ZeroDivisionError
    assert to.read_text() == "old"
    output_files.write_file(to, "grün")
    assert to.read_bytes() == "grün".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_atomic_file_keeps_the_mode_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    output_files.write_file(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "own").touch(mode=0o600)
    output_files.write_file(tmp_path / "own", "x")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("old")
    (tmp_path / "near").symlink_to("far/file")
    (tmp_path / "again").symlink_to(tmp_path / "near")
    (tmp_path / "dangling").symlink_to("far/new")
    output_files.write_file(tmp_path / "again", "new")
    output_files.write_file(tmp_path / "dangling", "made")
    assert all((tmp_path / name).is_symlink() for name in ("near", "again", "dangling"))
    assert {path.name: path.read_text() for path in (tmp_path / "far").iterdir()} == {"file": "new", "new": "made"}


def test_atomic_file_writes_directly_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with output_files.atomic_file(tmp_path / "link") as stream, zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", "through the pipe")
    reader.join()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert zipfile.ZipFile(io.BytesIO(received[0])).read("a.txt") == b"through the pipe"


def test_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    before = os.stat("/dev/null")
    output_files.write_file(tmp_path / "null", "away")
    output_files.write_file(Path("/dev/null"), "away")
    assert os.path.samestat(before, os.stat("/dev/null"))
    assert stat.S_ISCHR(before.st_mode)
    with pytest.raises(WriteRefused, match="cannot write /dev/full: No space left on device; free disk space"):
        output_files.write_file(Path("/dev/full"), "x")


@pytest.mark.parametrize("to", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output(tmp_path: Path, to: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = "print('before'); " + WRITE.format("one\n") + "; print('after')"
    done = subprocess.run([*PYTHON, code, to], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"before\none\nafter\n"
    # behind what a file holds already, and in the order of the prints: it is the same open file
    (tmp_path / "log").write_text("earlier\n")
    with (tmp_path / "log").open("a") as log:
        subprocess.run([*PYTHON, code, to], cwd=tmp_path, stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "earlier\nbefore\none\nafter\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "log"]


def test_full_standard_output_gives_a_single_error(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON, WRITE.format("x"), "-"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "cannot write standard output: No space left on device; free disk space, or choose another path"
    )


@pytest.mark.parametrize(
    ("to", "message", "code"),
    [
        ("none/out.csv", "folder .*none does not exist; create it", 2),
        ("file/out.csv", "file is not a folder; choose another", 2),
        ("folder", "folder is a folder; name a file with --out", 2),
        ("loop", "Too many levels of symbolic links", 2),
        ("x" * 300, "File name too long", 2),
        ("x" * 5000, "File name too long", 2),
        ("/proc/out.csv", "cannot write /proc/out.csv: ", 2),
        ("/sys/out.csv", "cannot write /sys/out.csv: (Permission denied|Read-only file system); ", 3),
    ],
)
def test_unwritable_targets_give_a_single_line(tmp_path: Path, to: str, message: str, code: int) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=message) as error:
        output_files.write_file(tmp_path / to, "x")
    assert error.value.exit_code == code
    assert len(str(error.value)) < 500
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_what_the_machine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Root lacks no permission, so a patched system call raises the error that other users would get."""

    def refuse(path: object, *rest: object, **more: object) -> int:
        raise OSError(number, os.strerror(number), path)

    (tmp_path / "out.csv").write_text("old")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WriteRefused, match=f"cannot write {tmp_path}/out.csv: {os.strerror(number)}; ") as error:
        output_files.write_file(tmp_path / "out.csv", "x")
    monkeypatch.undo()
    assert error.value.exit_code == 3
    assert (tmp_path / "out.csv").read_text() == "old"


def test_atomic_file_keeps_a_write_protected_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))
    with pytest.raises(WriteRefused, match="Permission denied; check its permissions"):
        output_files.write_file(tmp_path / "mine", "x")
    assert (tmp_path / "mine").read_text() == "old"


def test_resolve_format_uses_the_option_or_the_suffix(tmp_path: Path) -> None:
    def resolved(to: str | None, format_name: str | None = None) -> str:
        return output_files.resolve_format(Path(to) if to else None, format_name, ENDINGS, "terminal")

    assert resolved(None) == resolved("-") == resolved("/dev/null") == "terminal"
    assert resolved("-", "md") == resolved("x.txt", "md") == resolved("x.MD") == resolved(None, "md") == "md"
    for to, format_name, why in [
        ("x.docx", None, "'x.docx' has no file extension of a known format; use one of .md, .csv, or add --format"),
        ("table", None, "'table' has no file extension of a known format"),
        ("x.csv", "md", "'x.csv' has the extension of csv, but --format is md"),
    ]:
        with pytest.raises(StoreError, match=why):
            resolved(to, format_name)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("gone")
    output_files.make_folder(tmp_path / "new")
    output_files.make_folder(tmp_path / "new")
    output_files.make_folder(tmp_path / "a" / "b", parents=True)
    assert (tmp_path / "a" / "b").is_dir()
    for to, why in [
        (tmp_path / "c" / "d", "folder .*c does not exist; create it"),
        (tmp_path / "file", "file is not a folder"),
        (tmp_path / "nowhere", "nowhere is a broken symbolic link"),
        (Path("-"), "--out needs a folder here"),
        (tmp_path / ("x" * 5000), "File name too long"),
    ]:
        with pytest.raises(StoreError, match=why):
            output_files.make_folder(to)
    with (
        pytest.raises(StoreError, match=r"folder .*c does not exist; create it"),
        output_files.atomic_folder(tmp_path / "c" / "d"),
    ):
        pass
    with pytest.raises(StoreError, match="exists already"), output_files.atomic_folder(tmp_path / "new"):
        pass
    with output_files.atomic_folder(tmp_path / ("n" * 250)) as aside:
        (aside / "one").touch()
    assert os.listdir(tmp_path / ("n" * 250)) == ["one"]
    with pytest.raises(StoreError, match="cannot make /proc/x"):
        output_files.make_folder(Path("/proc/x"))


def test_check_writable_before_long_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("gone")
    for to in ("new", "a/b/c", "."):
        output_files.check_folder_writable(tmp_path / to)
    output_files.check_file_writable(tmp_path / "new")
    output_files.check_file_writable(tmp_path / "file")
    output_files.check_file_writable(Path("/dev/null"))
    for to, why, code in [
        ("file", "file is not a folder; choose another with --runs", 2),
        ("file/x", "Not a directory", 2),
        ("nowhere/x", "nowhere is a broken symbolic link; choose another with --runs", 2),
        ("x" * 300, "File name too long", 2),
        ("/sys/x/y", "cannot write /sys: (Permission denied|Read-only file system)", 3),
    ]:
        with pytest.raises(StoreError, match=why) as error:
            output_files.check_folder_writable(tmp_path / to, "--runs")
        assert error.value.exit_code == code
    with pytest.raises(WriteRefused, match=r"cannot write /sys: "):
        output_files.check_file_writable(Path("/sys/x"))
    with pytest.raises(StoreError, match=r"folder .*/no does not exist; create it"):
        output_files.check_file_writable(tmp_path / "no" / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


READ_ONLY = """
import contextlib, io, json, sys
from pathlib import Path
from atma_sweep import cli
from atma_sweep.results import open_store, paper

Path("mine.txt").write_text("to be, or not to be, that is the question. " * 400)
store = open_store("atma.db", create=True)
paper.load_published(store)
store.close()
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["atma-sweep", *words]
    err, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            cli.main()
    except SystemExit as end:
        code = end.code
    found.append([code, err.getvalue()])
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_writing_commands_report_refusals_in_a_single_line(tmp_path: Path) -> None:
    """On a file system that is really mounted read-only."""
    (tmp_path / "read-only").mkdir()
    mount = 'mount -t tmpfs -o ro none read-only && exec "$@"'
    within = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = ["unshare", "--mount", *within, "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], cwd=tmp_path).returncode:
        pytest.skip("needs the right to mount, in a container --privileged")
    commands = [
        ["report", "--sweep", "printed-v1", "--table", "6", "--out", "read-only/t.csv"],
        ["report", "--sweep", "printed-v1", "--figure", "needle", "--out", "read-only/f.svg"],
        ["report", "--sweep", "printed-v1", "--dashboard", "read-only/d.html"],
        ["report", "--sweep", "printed-v1", "--all", "--out", "read-only/all"],
        ["report", "--sweep", "printed-v1", "--all", "--out", "read-only"],
        ["export", "--sweep", "printed-v1", "--out", "read-only/e.zip"],
        ["export", "--sweep", "printed-v1", "--out", "read-only/e.csv"],
        ["db", "backup", "--to", "read-only"],
        ["schema", "--out", "read-only/s.json"],
        ["data", "prepare", "mine.txt", "--runs", "read-only/runs"],
        ["launch", "quick", "--executor", "local", "--runs", "read-only"],
        ["launch", "quick", "--executor", "local", "--runs", "read-only/a/b"],
    ]
    done = subprocess.run(
        [*inside, *PYTHON, READ_ONLY, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    for command, (code, err) in zip(commands, json.loads(done.stdout), strict=True):
        assert (command, code, len(err.splitlines())) == (command, 3, 1)
        assert err.startswith("atma-sweep: "), command
        assert "read-only" in err, command
        assert "Read-only file system" in err, command
