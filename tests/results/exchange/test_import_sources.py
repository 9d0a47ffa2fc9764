"""Import from paths that are no regular file: one line at once, and no database is created."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.exchange.bundles import open_bundle

Command = Callable[..., tuple[int, str, str]]
REMEDY = "name a bundle that atma-sweep export wrote"
SOURCES = {
    "pipe": f"pipe is a pipe, not a file; {REMEDY}",
    "link-to-pipe": f"link-to-pipe is a pipe, not a file; {REMEDY}",
    "/dev/zero": f"/dev/zero is a device, not a file; {REMEDY}",
    "/dev/null": f"/dev/null is a device, not a file; {REMEDY}",
    "/proc/self/mem": f"/proc/self/mem is empty; {REMEDY}",
    "/proc/self/fd": f"/proc/self/fd is a folder, not a file; {REMEDY}",
    ".": f". is a folder, not a file; {REMEDY}",
    "socket": f"socket is a socket, not a file; {REMEDY}",
    "empty": f"empty is empty; {REMEDY}",
    "none.zip": f"there is no file none.zip; {REMEDY}",
    "loop": f"cannot read loop: Too many levels of symbolic links; {REMEDY}",
    "empty/inside": f"cannot read empty/inside: Not a directory; {REMEDY}",
}


@pytest.mark.parametrize("source", SOURCES)
def test_import_refuses_what_is_no_file(tmp_path: Path, command_line: Command, source: str) -> None:
    os.mkfifo("pipe")
    Path("link-to-pipe").symlink_to("pipe")
    Path("loop").symlink_to("loop")
    Path("empty").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert command_line("import", source) == (2, "", f"atma-sweep: {SOURCES[source]}\n")
    assert not list(tmp_path.glob("*.db*"))


def test_a_file_that_cannot_be_sought_is_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process, whose end cannot be determined, is such a file."""
    monkeypatch.setattr("atma_sweep.results.exchange.bundles.check_regular", lambda path, remedy: None)
    with pytest.raises(Exception, match="cannot be read as a bundle") as caught, open_bundle(Path("/proc/self/mem")):
        pass
    assert type(caught.value).__name__ == "BundleError"
