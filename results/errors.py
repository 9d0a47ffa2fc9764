"""What a user can mend, and what of that can go wrong with the database. Each message ends with the remedy."""

from __future__ import annotations


class UserError(Exception):
    """What a user can mend: the command line prints the message, one line, and ends with `exit_code`."""

    exit_code = 2
    passing = False
    """Whether it may be gone when the same is tried again."""


class PackageMissing(UserError):
    """A Python package that the command needs is not installed."""

    exit_code = 3

    def __init__(self, module: str) -> None:
        package = module.partition(".")[0]
        super().__init__(
            f"the Python package {package!r} is not installed here; install atma-sweep with its dependencies: "
            "pip install -c constraints.txt -e ."
        )


class StoreError(UserError):
    """Any expected trouble with the database."""


class WriteRefused(StoreError):
    """The machine does not let a file be written: permissions, a read-only place, no room."""

    exit_code = 3


class RowDamaged(StoreError):
    """A row holds a value that its column cannot have: it was changed by hand, or the disk fails."""


class StoreDamaged(StoreError):
    """The file of the database is damaged, so that SQLite cannot read a part of it."""

    exit_code = 3


class StoreMissing(StoreError):
    """There is no database at the named place."""


class StoreOutdated(StoreError):
    """The database was written by an older release and has to be upgraded."""


class StoreTooNew(StoreError):
    """The database was written by a newer release than this one."""


class StoreBusy(StoreError):
    """The database stayed locked for longer than we were told to wait."""

    exit_code = 3


class StoreUnreachable(StoreError):
    """The database's server does not answer."""

    exit_code = 3


class StoreReplaced(StoreError):
    """The file of the database was removed, or another was put in its place, while it was in use."""

    exit_code = 3


class SweepUnknown(StoreError):
    """No sweep has that name (or there is none at all)."""


class SweepReadOnly(StoreError):
    """The sweep holds imported results and takes no launches."""


class SweepBusy(StoreError):
    """Another live supervisor owns the sweep."""

    exit_code = 3


class CellUnknown(StoreError):
    """No cell has that id, id prefix or slug."""


class CellAmbiguous(StoreError):
    """More than one cell answers to that id prefix or slug."""


class CellAlreadyRunning(StoreError):
    """The cell already has a live attempt."""


class AttemptUnknown(StoreError):
    """No attempt has that id."""


class LeaseLost(StoreError):
    """The writer no longer owns what it writes to: it was finished, reaped or taken over. Nothing was written."""


class BundleError(StoreError):
    """A file that is no bundle, is damaged, or does not hold what it says. Nothing was changed."""
