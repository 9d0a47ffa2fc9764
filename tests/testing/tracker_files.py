"""Files of experiment trackers that have no reader of their own."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(file: Path, kind: Any) -> Iterator[Any]:
    """Yield the records of an offline run of W&B, each a message of that kind.

    The file is a log as LevelDB writes them, in blocks of 32 KiB.
    """
    data, offset, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while offset < len(data):
        if 32768 - offset % 32768 < 7:  # no header fits into the rest of a block
            offset += 32768 - offset % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield kind.FromString(record)
            record = b""
