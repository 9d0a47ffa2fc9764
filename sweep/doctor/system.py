"""Checks of Python, the operating system, the compiler and Ray."""

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

from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.errors import install_hint
from ..executors import token_file
from ..host import hardware
from .context import Check, Context, absent, bad, ok, version_of, warn
from .disk import nearest_folder

GIB = 2**30
OPEN_FILES = 4096
"""Limit on open files below which the check warns."""
SHARED_MEMORY = GIB
"""Free bytes in /dev/shm below which the check warns."""
MIN_FREE_MEMORY = 2 * GIB
"""Available bytes of memory below which the check warns."""


def check_python(context: Context) -> Check:
    """Check that the version of Python is supported: bad below 3.11, a warning above 3.14."""
    version, version_text = sys.version_info[:2], platform.python_version()
    if version < (3, 11):
        return bad(version_text, "use Python 3.11 to 3.14")
    if version > (3, 14):
        return warn(f"{version_text}, newer than the tested versions", "use Python 3.11 to 3.14")
    return ok(version_text)


def check_platform(context: Context) -> Check:
    """Check that the operating system (bad otherwise) and the processor (a warning otherwise) are supported.

    Ok on macOS, on Linux with x86-64, and on WSL 2; WSL 1 is bad.
    """
    system, cpu = platform.system(), platform.machine()
    finding = f"{system} {cpu}, kernel {platform.release()}, {counted(hardware.usable_cores(), 'core')}"
    if system == "Darwin":
        return ok(f"macOS {platform.mac_ver()[0]} {cpu}, {counted(hardware.usable_cores(), 'core')}; on the CPU only")
    if system != "Linux":
        return bad(finding, "use Linux, macOS, or Windows through WSL")
    release = platform.release().lower()
    if "microsoft" in release:
        if "wsl2" in release or "standard" in release:
            return ok(f"{finding}; Windows through WSL")
        return bad(f"{finding}; WSL 1", "convert it to WSL 2: wsl --set-version NAME 2")
    if cpu not in ("x86_64", "AMD64"):
        return warn(f"{finding}; Triton and fla are available on x86-64 only")
    return ok(finding)


def check_open_files(context: Context) -> Check:
    """Check that the soft limit on open files is high enough for Ray; a warning below 4,096."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = " of ".join("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return warn(f"at most {limits}", "Ray needs more: ulimit -n 65536")
    return ok(f"at most {limits}")


def check_shared_memory(context: Context) -> Check:
    """Check that /dev/shm has space for Ray's object store; a warning below 1 GiB, absent without /dev/shm."""
    try:
        statistics = os.statvfs("/dev/shm")
    except OSError:
        return absent("no /dev/shm")
    total, free = statistics.f_frsize * statistics.f_blocks, statistics.f_frsize * statistics.f_bavail
    finding = f"{format_bytes(free)} of {format_bytes(total)} free in /dev/shm"
    if free < SHARED_MEMORY:
        return warn(finding, "Ray keeps its object store there; in Docker: --shm-size=2g")
    return ok(finding)


def check_memory(context: Context) -> Check:
    """Check that 2 GiB of memory are available and that at most half of the swap is used; a warning otherwise.

    A limit of the control group is reported, but not judged.
    """
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    finding = f"{format_bytes(ram.available)} of {format_bytes(ram.total)} available, swap {format_bytes(swap.used)} of {format_bytes(swap.total)} used"
    limit = _memory_limit()
    if limit is not None and limit < ram.total:
        finding += f"; limit of this control group {format_bytes(limit)}"
    if ram.available < MIN_FREE_MEMORY:
        return warn(finding, "an attempt needs a gigabyte or more; end other programs first")
    if swap.total and swap.used > swap.total / 2:
        return warn(finding, "more than half of the swap is in use; end other programs first")
    return ok(finding)


def _memory_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None without one or if it cannot be read."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())
    return None


def check_compiler(context: Context) -> Check:
    """Check that a C compiler and Python's headers exist where Triton needs them, that is, on a machine with GPUs.

    The compiler is $CC if set, else gcc, clang or cc. Bad if compiler or headers are needed and missing. Without a GPU,
    ok with a compiler and absent without one.
    """
    requested = os.environ.get("CC")
    compiler = (
        shutil.which(requested) if requested else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    )
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    is_needed = bool(context.listed_gpus() or context.usable_gpus())
    purpose = "Triton compiles its launcher with it" if is_needed else "needed by Triton on a GPU only"
    if compiler is None:
        problem = f"CC={requested} does not exist" if requested else "no gcc, clang or cc on the PATH"
        if is_needed:
            return bad(f"{problem}; {purpose}", "install one (apt-get install gcc), or name it with CC")
        return absent(f"{problem}; {purpose}")
    if is_needed and not has_headers:
        return bad(f"{compiler}, but no Python.h; {purpose}", "install the headers (apt-get install python3-dev)")
    return ok(f"{compiler}{'' if has_headers else ', no Python.h'}; {purpose}")


def compile_cache_folders() -> list[Path]:
    """Return the folders where attempts cache compiled kernels; they need not exist.

    These are TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR of the environment; unless both are set, followed by the
    user's cache folder.
    """
    named = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if name in os.environ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atma-sweep" / "compiled"
    return named if len(named) == 2 else [*named, cache]


def check_compile_caches(context: Context) -> list[Check]:
    """Return a check per cache folder of compiled kernels."""
    return [_check_cache(folder) for folder in compile_cache_folders()]


def _check_cache(folder: Path) -> Check:
    """Check that a cache folder exists or can be created; report its size and number of files.

    A warning if it cannot be created, absent if it does not exist yet. Unreadable files count with size 0.
    """
    if not folder.is_dir():
        above = nearest_folder(folder)
        if not os.access(above, os.W_OK):
            return warn(f"{above} is not writable, so every attempt compiles its kernels again", "set XDG_CACHE_HOME")
        return absent(f"none yet in {folder}; the first attempt on a GPU creates it")
    n_files, total_bytes = 0, 0
    for top, _, names in os.walk(folder):
        n_files += len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += os.lstat(os.path.join(top, name)).st_size
    return ok(f"{format_bytes(total_bytes)} in {counted(n_files, 'file')} in {folder}")


# --- Ray ------------------------------------------------------------------------------------------------------------


def check_ray(context: Context) -> Check:
    """Check that Ray is installed (a warning otherwise) with its executables (bad otherwise).

    Ray is neither imported nor started.
    """
    spec, version = importlib.util.find_spec("ray"), version_of("ray")
    if spec is None or spec.origin is None:
        return warn("not installed", f"{install_hint('ray')}, or launch with --executor local")
    core = Path(spec.origin).parent / "core" / "src" / "ray"
    missing = [
        name
        for name in ("gcs/gcs_server", "raylet/raylet")
        if not os.access(core / name, os.X_OK) or not (core / name).is_file()
    ]
    if missing:
        problem = f"{version}, but its programs are missing or cannot be run: {', '.join(missing)}"
        return bad(problem, "install it again (pip install --force-reinstall ray), or launch with --executor local")
    return ok(f"{version}, complete; not started by this check")


def check_ray_cluster_file(context: Context) -> Check:
    """Check that Ray's record of a running cluster is not stale, which is a warning.

    Ok without the file, and if a connection to the recorded address succeeds, since launches ignore that cluster.
    """
    temporary = (
        os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None) or "/tmp"
    )
    file = Path(temporary) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text().strip()
    except FileNotFoundError:
        return ok(f"no {file}")
    if _answers(address):
        return ok(f"{file} names {address}, which answers; launch starts its own Ray unless --address is given")
    return warn(
        f"{file} names {address or 'no address'}, but no cluster answers there", f"left by a dead cluster: rm {file}"
    )


def _answers(address: str) -> bool:
    """Return True if a connection to HOST:PORT succeeds within a second; False for a malformed address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def check_ray_address(context: Context) -> Check:
    """Check that RAY_ADDRESS is not set; a warning otherwise, since launches ignore it."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return ok("not set")
    return warn(
        f"set to {address}; launch ignores it and starts its own Ray", "unset it, or pass the cluster as --address"
    )


def check_ray_token(context: Context) -> Check:
    """Check that Ray's token exists where RAY_AUTH_MODE requires one, and that other users cannot read it.

    A warning otherwise, also if RAY_ADDRESS is set without RAY_AUTH_MODE=token. Absent if there is none and none is
    required. Ok if RAY_AUTH_TOKEN holds it.
    """
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
        return absent(f"no {path}; needed for a cluster only; the first start of Ray here creates it")
    finding = f"{path}, mode {bits:04o}, RAY_AUTH_MODE {mode or 'not set'}"
    if bits & 0o077:
        return warn(f"{finding}: other users of this machine can read it", f"chmod 600 {path}")
    if mode != "token" and os.environ.get("RAY_ADDRESS"):
        return warn(
            f"{finding}: Ray sends this token only with RAY_AUTH_MODE=token, so a cluster that requires a token will refuse ray commands",
            "export RAY_AUTH_MODE=token",
        )
    return ok(finding)
