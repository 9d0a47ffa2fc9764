"""Names of executors. A new one is one file and one line here. Nothing of Ray is imported until one is opened."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...renamed import old_names
from ..errors import GridError, SweepError

if TYPE_CHECKING:
    from .executor import Executor, ExecutorContext


@dataclass(frozen=True)
class ExecutorSpec:
    """What is known of an executor before it is opened."""

    target: str
    """"module:class", the module beside this one."""
    words: str
    """Where its attempts run, for people."""
    with_address: str | None = None
    """Which executor `--address` means when this one is named; None: it knows no address."""
    needs_address: bool = False
    """Whether it is found at an address only, so that it may be out of reach."""
    packages: tuple[str, ...] = ()
    """Packages that it imports besides those of every attempt."""


EXECUTORS: dict[str, ExecutorSpec] = {
    "ray": ExecutorSpec(
        "ray_local:RayExecutor", "a Ray of this machine's own", with_address="cluster", packages=("ray",)
    ),
    "local": ExecutorSpec("executor:LocalExecutor", "this machine without Ray"),
    "cluster": ExecutorSpec("ray_cluster:ClusterExecutor", "the Ray cluster at --address", "cluster", True, ("ray",)),
}
DEFAULT = "ray"


def resolve_executor_name(name: str, address: str | None = None) -> str:
    """The executor that `--executor` and `--address` mean together. Raises GridError and SweepError."""
    if name not in EXECUTORS:
        raise GridError("--executor", None, name, "no such executor", list(EXECUTORS), name)
    kind = EXECUTORS[name]
    if address is None:
        if kind.needs_address:
            raise SweepError(f"--executor {name}: attempts run on {kind.words}; give that")
        return name
    if kind.with_address is None:
        raise SweepError(f"--executor {name} runs on this machine alone; leave it or --address out")
    return kind.with_address


def open_executor(name: str, opening: ExecutorContext) -> Executor:
    """The executor of that name. Raises AddressWrong and MachineError when its machines cannot be reached."""
    module, attribute = EXECUTORS[name].target.split(":")
    kind: type[Executor] = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return kind.opened(opening)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
