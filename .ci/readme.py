"""Prints the n-th shell block of a README, so that CI runs the very text that a reader pastes."""

import re
import sys
from pathlib import Path

blocks = re.findall(r"^```bash\n(.*?)^```$", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)
number = int(sys.argv[2])
if len(blocks) < number:
    sys.exit(f"{sys.argv[1]} has {len(blocks)} bash blocks, no number {number}")
print(blocks[number - 1], end="")
