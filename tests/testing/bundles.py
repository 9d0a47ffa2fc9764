"""Bundles taken apart, changed and put together again, with a manifest that fits what is in them."""

import hashlib
import json
import zipfile


def unpacked(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(file, members, /, **changes):
    """Writes the members with a manifest that fits them, but for what `changes` says of it."""
    manifest = json.loads(members["manifest.json"])
    listed = {name: data for name, data in members.items() if name != "manifest.json"}
    for name, data in listed.items():
        facts = manifest["members"].setdefault(name, {"role": "log" if name.endswith("log.txt") else "weights"})
        facts |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        if name.endswith(".jsonl"):
            manifest["counts"][name[:-6]] = data.count(b"\n")
    manifest["members"] = {name: facts for name, facts in manifest["members"].items() if name in listed}
    for path, value in changes.items():
        table, *rest = path.split("__")
        if rest:
            manifest[table][rest[0]] = value
        else:
            manifest[table] = value
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in listed.items():
            archive.writestr(name, data)
        archive.writestr("manifest.json", json.dumps(manifest))
    return file
