"""Fails when a test was skipped for another reason than a missing GPU, shared folder, right to mount or program of Debian."""

import re
import sys
from pathlib import Path

log, shared = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
bad = []
for count, where, reason in re.findall(r"^SKIPPED \[(\d+)\] (\S+) (.*)$", log, re.MULTILINE):
    excused = reason.startswith(
        (
            "needs an NVIDIA GPU",
            "needs root",
            "cannot mount",
            "needs pdflatex",
            "needs PostgreSQL",
            "needs Chromium",
            "needs Slurm",
            "needs a C compiler",
            "needs strace",
        )
    ) or (reason.startswith("needs ../shared") and not shared.exists())
    print(f"skipped {count}: {where} {reason}{'' if excused else '  <-- not excused'}")
    if not excused:
        bad.append(where)
if re.search(r"\b\d+ (xfailed|xpassed|deselected)\b", log):
    bad.append("a test was deselected or expected to fail")
if not re.search(r"\b\d+ passed\b", log):
    bad.append("no test passed")
sys.exit(f"not excused: {bad}" if bad else 0)
