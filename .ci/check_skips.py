"""Fails when a test was skipped for no excused reason, or ran in no tier.

check_skips.py COLLECTED LOG ...: the output of --collect-only, and of every tier. Excused reasons are a missing GPU,
right to mount, Debian program or history, and optional data where ATMA_TEST_DATA is not set. Every reason says how to
remove it.
"""

import os
import re
import sys
from pathlib import Path

collected = Path(sys.argv[1]).read_text()
logs = [Path(name).read_text() for name in sys.argv[2:]]
bad = []
for count, where, reason in re.findall(r"^SKIPPED \[(\d+)\] (\S+) (.*)$", "\n".join(logs), re.MULTILINE):
    excused = reason.startswith(
        (
            "needs an NVIDIA GPU",
            "needs root",
            "needs the right to mount",
            "needs pdflatex",
            "needs pdffonts",
            "needs PostgreSQL",
            "needs Chromium",
            "needs Slurm",
            "needs a C compiler",
            "needs strace",
            "needs history back to commit",  # a shallow clone
            "needs no GPU",
        )
    ) or (reason.startswith("set ATMA_TEST_DATA") and "ATMA_TEST_DATA" not in os.environ)
    print(f"skipped {count}: {where} {reason}{'' if excused else '  <-- not excused'}")
    if not excused:
        bad.append(where)
ran = 0
for log in logs:
    last = re.findall(r"^=* ?(\d+ \w+,.* in [\d.]+s.*|\d+ \w+ in [\d.]+s.*)$", log, re.MULTILINE)[-1:]
    counts = (
        {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last[0].partition(" in ")[0])} if last else {}
    )
    if {"xfailed", "xpassed"} & set(counts):
        bad.append("a test was expected to fail")
    if not counts.get("passed"):
        bad.append("no test passed")
    # what failed beside others has passed alone since: .ci/run goes no further otherwise
    ran += sum(counts.get(word, 0) for word in ("passed", "skipped", "failed", "error", "errors"))
known = int(re.findall(r"^(\d+) tests collected", collected, re.MULTILINE)[-1])
if ran != known:
    bad.append(f"{known} tests are known, {ran} ran")
sys.exit(f"not excused: {bad}" if bad else 0)
