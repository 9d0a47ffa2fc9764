"""Looks at Python, the system, the compiler and Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import stat
import sys
import sysconfig
from pathlib import Path

import psutil

from ...results.console.text import counted
from ..executors import token_file
from ..host import hardware
from ..units import size
from .context import Check, Context, absent, bad, ok, version_of, warn
from .disk import nearest_folder

GIB = 2**30
OPEN_FILES = 4096
SHARED_MEMORY = GIB
SPARE_MEMORY = 2 * GIB


def look_at_python(context: Context) -> Check:
    version, found = sys.version_info[:2], platform.python_version()
    if version < (3, 11):
        return bad(found, "use Python 3.11 to 3.14")
    if version > (3, 14):
        return warn(f"{found}, newer than what was tested", "use Python 3.11 to 3.14")
    return ok(found)


def look_at_platform(context: Context) -> Check:
    system, cpu = platform.system(), platform.machine()
    found = f"{system} {cpu}, kernel {platform.release()}, {counted(hardware.cores(), 'core')}"
    if system == "Darwin":
        return ok(f"macOS {platform.mac_ver()[0]} {cpu}, {counted(hardware.cores(), 'core')}; on the CPU only")
    if system != "Linux":
        return bad(found, "use Linux, macOS, or Windows through WSL")
    release = platform.release().lower()
    if "microsoft" in release:
        if "wsl2" in release or "standard" in release:
            return ok(f"{found}; Windows through WSL")
        return bad(f"{found}; WSL 1", "turn it into WSL 2: wsl --set-version NAME 2")
    if cpu not in ("x86_64", "AMD64"):
        return warn(f"{found}; complete only on x86-64: here are no Triton and no fla")
    return ok(found)


def look_at_open_files(context: Context) -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = " of ".join("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return warn(f"at most {limits}", "Ray wants more: ulimit -n 65536")
    return ok(f"at most {limits}")


def look_at_shared_memory(context: Context) -> Check:
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return absent("no /dev/shm")
    whole, free = there.f_frsize * there.f_blocks, there.f_frsize * there.f_bavail
    found = f"{size(free)} of {size(whole)} free in /dev/shm"
    if free < SHARED_MEMORY:
        return warn(found, "Ray's object store lies there; in Docker: --shm-size=2g")
    return ok(found)


def look_at_memory(context: Context) -> Check:
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = f"{size(ram.available)} of {size(ram.total)} available, swap {size(swap.used)} of {size(swap.total)} used"
    limit = _memory_limit()
    if limit is not None and limit < ram.total:
        found += f"; this control group may use {size(limit)}"
    if ram.available < SPARE_MEMORY:
        return warn(found, "an attempt takes a gigabyte or more; end something else first")
    if swap.total and swap.used > swap.total / 2:
        return warn(found, "more than half of the swap is in use; end something else first")
    return ok(found)


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None


def look_at_compiler(context: Context) -> Check:
    asked = os.environ.get("CC")
    found = shutil.which(asked) if asked else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    needed = bool(context.gpus() or context.usable())
    why = "Triton builds its launcher with it" if needed else "only Triton on a GPU needs one"
    if found is None:
        gone = f"CC={asked} is not there" if asked else "no gcc, clang or cc on the PATH"
        if needed:
            return bad(f"{gone}; {why}", "install one (apt-get install gcc), or name it with CC")
        return absent(f"{gone}; {why}")
    if needed and not headers:
        return bad(f"{found}, but no Python.h; {why}", "install the headers (apt-get install python3-dev)")
    return ok(f"{found}{'' if headers else ', no Python.h'}; {why}")


def compiled_folders() -> list[Path]:
    """Where attempts keep compiled kernels: as the environment says, else in the user's cache folder."""
    named = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if name in os.environ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atma-sweep" / "compiled"
    return named if len(named) == 2 else [*named, cache]


def look_at_compiled(context: Context) -> list[Check]:
    return [_cache(folder) for folder in compiled_folders()]


def _cache(folder: Path) -> Check:
    if not folder.is_dir():
        above = nearest_folder(folder)
        if not os.access(above, os.W_OK):
            return warn(f"{above} cannot be written, so every attempt compiles anew", "set XDG_CACHE_HOME")
        return absent(f"none yet in {folder}; a GPU's first attempt makes it")
    files, held = 0, 0
    for top, _, names in os.walk(folder):
        files += len(names)
        for name in names:
            with contextlib.suppress(OSError):
                held += os.lstat(os.path.join(top, name)).st_size
    return ok(f"{size(held)} in {counted(files, 'file')} in {folder}")


# --- Ray ------------------------------------------------------------------------------------------------------------


def look_at_ray(context: Context) -> Check:
    spec, version = importlib.util.find_spec("ray"), version_of("ray")
    if spec is None or spec.origin is None:
        return warn("not installed", "pip install ray, or launch with --executor local")
    core = Path(spec.origin).parent / "core" / "src" / "ray"
    lacking = [
        name
        for name in ("gcs/gcs_server", "raylet/raylet")
        if not os.access(core / name, os.X_OK) or not (core / name).is_file()
    ]
    if lacking:
        what = f"{version}, but its programs are missing or cannot be run: {', '.join(lacking)}"
        return bad(what, "install it again (pip install --force-reinstall ray), or launch with --executor local")
    return ok(f"{version}, complete; not started for this")


def look_at_ray_cluster(context: Context) -> Check:
    temporary = (
        os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None) or "/tmp"
    )
    file = Path(temporary) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
    except FileNotFoundError:
        return ok(f"no {file}")
    if _answers(address):
        return ok(f"{file} names {address}, which answers; launch starts its own Ray unless told --address")
    return warn(f"{file} names {address or 'nothing'}, where nothing answers", f"a dead cluster left it: rm {file}")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def look_at_ray_address(context: Context) -> Check:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return ok("not set")
    return warn(f"{address}; launch starts its own Ray all the same", "unset it; name a cluster with --address")


def look_at_ray_token(context: Context) -> Check:
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if os.environ.get("RAY_AUTH_TOKEN"):
        return ok(f"in RAY_AUTH_TOKEN, RAY_AUTH_MODE {mode or 'not set'}")
    path = token_file()
    try:
        bits = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        if mode == "token":
            remedy = f"ray get-auth-token --generate && chmod 600 {path}, and the same file on every node"
            return warn(f"RAY_AUTH_MODE is token, but there is no {path}", remedy)
        return absent(f"no {path}; only a cluster needs one, the first Ray here makes it")
    found = f"{path}, mode {bits:04o}, RAY_AUTH_MODE {mode or 'not set'}"
    if bits & 0o077:
        return warn(f"{found}: others on this machine can read it", f"chmod 600 {path}")
    if mode != "token" and os.environ.get("RAY_ADDRESS"):
        return warn(f"{found}: a cluster that asks for it will refuse us", "export RAY_AUTH_MODE=token")
    return ok(found)
