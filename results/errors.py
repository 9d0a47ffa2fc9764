"""Errors that a user can resolve, most of them about the database. Each message ends with the remedy."""

from __future__ import annotations

import re
import sys
from importlib import metadata

DISTRIBUTIONS = {"fla": "flash-linear-attention", "ruamel": "ruamel.yaml", "mlflow": "mlflow-skinny"}
"""Distributions whose name differs from that of their module by more than underscores."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of the CPU builds of torch. On Linux, PyPI has the CUDA build, which is several GB larger."""


def install_hint(module: str) -> str:
    """Return the pip command that installs the package of a module, as an extra of atma-sweep where it belongs to one.

    A package of several extras is installed by the extra that pyproject.toml lists first.

    Args:
        module: Dotted name of a module; its top package counts. For torch on Linux, the command of the CPU build follows.
    """
    package = module.partition(".")[0]
    name = DISTRIBUTIONS.get(package, package).lower().replace("_", "-")
    try:
        requirements = metadata.requires("atma-sweep") or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        if re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-") != name:  # type: ignore[index]
            continue
        extra = re.search(r"extra == [\"']([^\"']+)", requirement)
        if extra is None:
            return "pip install --upgrade atma-sweep"
        command = f"pip install 'atma-sweep[{extra[1]}]'"
        if name == "torch" and sys.platform == "linux":
            return f"{command} (without a GPU, first: pip install torch --index-url {CPU_INDEX})"
        return command
    return f"pip install {name}"


class UserError(Exception):
    """Error that a user can resolve: the command line prints the message on one line and exits with `exit_code`."""

    exit_code = 2
    passing = False
    """True if a later try of the same operation may succeed."""


class PackageMissing(UserError):
    """A Python package that the command needs is not installed."""

    exit_code = 3

    def __init__(self, module: str) -> None:
        """Make the message from the dotted name of the module that could not be imported; it names the top package."""
        package = module.partition(".")[0]
        super().__init__(
            f"the Python package {package!r}, which this command needs, is not installed; {install_hint(package)}"
        )


class StoreError(UserError):
    """Base class of expected errors about the database."""


class WriteRefused(StoreError):
    """The machine does not allow a file to be written: permissions, a read-only file system, or no free space."""

    exit_code = 3


class RowDamaged(StoreError):
    """A row holds a value that its column cannot have, after a manual change or a disk failure."""


class StoreDamaged(StoreError):
    """The file of the database is damaged, so that SQLite cannot read a part of it."""

    exit_code = 3


class StoreMissing(StoreError):
    """There is no database at the given path or URL."""


class StoreOutdated(StoreError):
    """The database was written by an older release and must be upgraded."""


class StoreTooNew(StoreError):
    """The database was written by a newer release than this one."""


class StoreBusy(StoreError):
    """The database stayed locked for longer than the allowed waiting time."""

    exit_code = 3


class StoreUnreachable(StoreError):
    """The database's server does not answer."""

    exit_code = 3


class StoreReplaced(StoreError):
    """The file of the database was removed or replaced while it was in use."""

    exit_code = 3


class SweepUnknown(StoreError):
    """No sweep has that name, or there is no sweep."""


class SweepReadOnly(StoreError):
    """The sweep holds imported results and takes no launches."""


class SweepBusy(StoreError):
    """A live supervisor owns the sweep, or a running launch would be affected."""

    exit_code = 3


class CellUnknown(StoreError):
    """No cell has that id, id prefix or slug."""


class CellAmbiguous(StoreError):
    """Several cells match an id prefix or slug."""


class CellAlreadyRunning(StoreError):
    """The cell already has a running attempt."""


class AttemptUnknown(StoreError):
    """No attempt has that id."""


class LeaseLost(StoreError):
    """The writer no longer owns the sweep or attempt: it was finished, declared dead or taken over.

    Nothing was written.
    """


class BundleError(StoreError):
    """The file is not a bundle, is damaged, or contradicts its manifest. Nothing was changed."""
