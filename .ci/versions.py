"""Lists the versions of the documentation that lie in a folder, for the switch in its side bar.

versions.py FOLDER: writes FOLDER/versions.json, the names of its subfolders with a site, the newest first, and
FOLDER/index.html, which leads to the newest released one.
"""

import json
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version


def version_key(name: str) -> tuple[bool, Version]:
    """Return a key that sorts released versions by number, below folders of other names, such as main."""
    try:
        return False, Version(name)
    except InvalidVersion:
        return True, Version("0")


folder = Path(sys.argv[1])
names = sorted((path.parent.name for path in folder.glob("*/objects.inv")), key=version_key, reverse=True)
if not names:
    sys.exit(f"{folder} holds no built documentation: no subfolder has the file objects.inv")
released = [name for name in names if not version_key(name)[0]] or names
(folder / "versions.json").write_text(json.dumps(names) + "\n")
(folder / "index.html").write_text(
    f'<!doctype html><meta charset="utf-8"><title>atma-sweep</title>'
    f'<meta http-equiv="refresh" content="0; url={released[0]}/"><a href="{released[0]}/">atma-sweep {released[0]}</a>\n'
)
