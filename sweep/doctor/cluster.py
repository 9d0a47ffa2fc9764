"""Checks of the Ray cluster named with --address: reachability, versions, runs folder and clocks of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...results.console.text import counted
from .context import Check, Context, absent, answer, bad, ok

CLUSTER_SECONDS = 200.0
"""Seconds that the cluster gets to answer."""
CLOCK_SECONDS = 2.0
"""Clock difference in seconds that is tolerated."""


def check_cluster(context: Context) -> list[Check]:
    """Check that every live node answers, has the same versions, sees the runs folder, and has the right time.

    Creates the runs folder. The result is a single check if no address is given (absent) or the cluster cannot be
    reached (bad). Else the first one is bad if a node is silent, and one per package that differs, one on the runs
    folder, and one on clocks follow. Silent nodes are judged in none of these.

    Raises:
        LookFailed: The query gave no answer within 200 s (CLUSTER_SECONDS).
    """
    if context.address is None:
        return [absent("no cluster given; pass --address to check one")]
    context.runs.mkdir(parents=True, exist_ok=True)
    facts = answer("cluster", context.address, str(context.runs), seconds=CLUSTER_SECONDS)
    if "error" in facts:
        return [bad(facts["error"])]
    nodes = facts["nodes"]
    silent = sorted(set(facts["alive"]) - {node["host"] for node in nodes})
    node_list = ", ".join(
        f"{node['host']} ({counted(node['cpus'], 'core')}, {counted(node['gpus'], 'GPU')})" for node in nodes
    )
    if silent:
        first = bad(f"{node_list}; no answer from {', '.join(silent)}", "check Ray's logs there, or run ray stop there")
    else:
        first = ok(f"{context.address}: {node_list}")
    return [
        first,
        *_check_versions(nodes, facts["differing"]),
        _check_runs_visible(context, nodes),
        _check_clocks(nodes),
    ]


def _check_versions(nodes: Sequence[dict[str, Any]], differing: dict[str, dict[str, list[str]]]) -> list[Check]:
    """Return a warning per package whose version differs between nodes, or one passing check; empty without nodes.

    Args:
        nodes: Facts about the nodes, as dicts of NodeFacts.
        differing: Package -> version -> hosts, of packages that differ.
    """
    remedy = "install the packages of one constraints.txt on every node; numbers may differ between nodes"
    checks = []
    for name, hosts_by_version in differing.items():
        versions = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in hosts_by_version.items())
        checks.append(Check("cluster versions", "warn", f"{name}: {versions}", remedy))
    if checks or not nodes:
        return checks
    first = nodes[0]
    finding = f"the same on every node: Python {first['python']}, torch {first['versions'].get('torch', 'none')}"
    return [Check("cluster versions", "ok", finding)]


def _check_runs_visible(context: Context, nodes: Sequence[dict[str, Any]]) -> Check:
    """Check that every node sees the runs folder; bad, with the hosts that do not, otherwise."""
    blind_hosts = [node["host"] for node in nodes if not node["sees_runs"]]
    if blind_hosts:
        remedy = "pass --runs with a folder that every node sees"
        return Check("cluster runs folder", "bad", f"{', '.join(blind_hosts)} cannot see {context.runs}", remedy)
    return Check("cluster runs folder", "ok", f"every node sees {context.runs}")


def _check_clocks(nodes: Sequence[dict[str, Any]]) -> Check:
    """Check that every node's clock agrees with this machine's; a warning otherwise.

    A difference counts if it exceeds 2 s (CLOCK_SECONDS) plus the uncertainty of its measurement.
    """
    offsets = {node["host"]: node["clock_ahead"] for node in nodes}
    deviating = [f"{node['host']} by {offsets[node['host']]:+.1f} s" for node in nodes if _is_off(node)]
    if deviating:
        return Check(
            "cluster clocks",
            "warn",
            f"clocks that differ from this machine's: {', '.join(deviating)}",
            "run an NTP client there",
        )
    return Check("cluster clocks", "ok", f"at most {max(map(abs, offsets.values()), default=0):.1f} s apart")


def _is_off(node: dict[str, Any]) -> bool:
    return abs(node["clock_ahead"]) > CLOCK_SECONDS + float(node["clock_slack"])
