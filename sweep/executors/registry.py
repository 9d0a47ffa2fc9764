"""Registry of executors by name; a new one needs one module and one entry here.

Ray is imported only when an executor that uses it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...renamed import old_names
from ...results.exchange.installed_parts import SpecRegistry, import_target, load_target, running_part
from ..errors import GridError, SweepError

if TYPE_CHECKING:
    from .executor import Executor, ExecutorContext


@dataclass(frozen=True)
class ExecutorSpec:
    """Facts about an executor that are available before it is opened."""

    target: str
    """"module:class"; the module is in `package`."""
    description: str
    """Machines that its attempts run on, for messages."""
    cluster_variant: str | None = None
    """Executor to use instead when `--address` is given; None if it accepts no address."""
    needs_address: bool = False
    """True if it needs an address, so that it may be unreachable."""
    packages: tuple[str, ...] = ()
    """Packages that it imports in addition to those of every attempt."""
    package: str = __package__
    """Absolute package that the module of `target` is relative to."""


def _check_spec(name: str, spec: Any) -> ExecutorSpec:
    """Return the specification of an installed executor.

    Raises:
        TypeError: It is no ExecutorSpec with a package of its own.
    """
    if not isinstance(spec, ExecutorSpec) or spec.package == __package__:
        raise TypeError(f"must be an ExecutorSpec with its package, got {spec!r:.80}")
    return spec


EXECUTORS: SpecRegistry[ExecutorSpec] = SpecRegistry(
    "executors",
    {
        "ray": ExecutorSpec(
            "ray_local:RayExecutor", "this machine, with Ray", cluster_variant="cluster", packages=("ray",)
        ),
        "local": ExecutorSpec("executor:LocalExecutor", "this machine, without Ray"),
        "cluster": ExecutorSpec(
            "ray_cluster:ClusterExecutor", "the Ray cluster at --address", "cluster", True, ("ray",)
        ),
    },
    _check_spec,
)
DEFAULT_EXECUTOR = "ray"


def resolve_executor_name(name: str, address: str | None = None) -> str:
    """Return the registered name of the executor that `--executor` and `--address` select together.

    Without an address it is `name`, "ray" or "local"; with one it is "cluster" for "ray" and "cluster".

    Args:
        name: Name from `--executor`.
        address: HOST:PORT from `--address`, not parsed here; None without one.

    Raises:
        GridError: There is no such executor.
        SweepError: An address is missing ("cluster"), or the executor accepts none ("local").
    """
    if name not in EXECUTORS:
        raise GridError("--executor", None, name, "no such executor", list(EXECUTORS), name)
    spec = EXECUTORS[name]
    if address is None:
        if spec.needs_address:
            raise SweepError(f"--executor {name}: attempts run on {spec.description}; pass --address")
        return name
    if spec.cluster_variant is None:
        raise SweepError(f"--executor {name} runs on this machine only; leave out --executor or --address")
    return spec.cluster_variant


def open_executor(name: str, context: ExecutorContext) -> Executor:
    """Open the executor "ray", "local", "cluster" or one of an installed package; the caller closes it.

    An executor for a cluster connects and starts its agents; the others start nothing before `admit`.

    Raises:
        KeyError: There is no executor of that name.
        ClusterAddressError: The address is not HOST:PORT.
        MachineError: Its machines cannot be reached.
        InstalledPartError: An installed package cannot provide it, or fails.
    """
    spec = EXECUTORS[name]
    is_own = spec.package == __package__
    executor_class: type[Executor] = (load_target if is_own else import_target)(spec.package, spec.target)
    with running_part("executors", name, "" if is_own else spec.package):
        return executor_class.open(context)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
