"""The commit of this checkout, and whether it is as committed."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git_state(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the checkout that the code runs from; (None, None) outside one."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root:
            return None, None
        return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()
