"""Looks at a Ray cluster that was named with --address: whether it answers, and whether its nodes are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...results.console.text import counted
from .context import Check, Context, absent, answer, bad, ok

CLUSTER_SECONDS = 200.0
CLOCK_SECONDS = 2.0


def look_at_cluster(context: Context) -> list[Check]:
    if context.address is None:
        return [absent("none named; --address looks at one")]
    context.runs.mkdir(parents=True, exist_ok=True)
    said = answer("cluster", context.address, str(context.runs), seconds=CLUSTER_SECONDS)
    if "error" in said:
        return [bad(said["error"])]
    nodes = said["nodes"]
    silent = sorted(set(said["alive"]) - {node["host"] for node in nodes})
    told = ", ".join(
        f"{node['host']} ({counted(node['cpus'], 'core')}, {counted(node['gpus'], 'GPU')})" for node in nodes
    )
    if silent:
        first = bad(f"{told}; no answer from {', '.join(silent)}", "look at Ray's logs there, or ray stop it")
    else:
        first = ok(f"{context.address}: {told}")
    return [first, *_alike(nodes, said["differing"]), _seen(context, nodes), _clocks(nodes)]


def _alike(nodes: Sequence[dict[str, Any]], differing: dict[str, dict[str, list[str]]]) -> list[Check]:
    remedy = "install the same constraints.txt on every node; numbers may differ between them"
    told = []
    for name, have in differing.items():
        versions = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in have.items())
        told.append(Check("cluster versions", "warn", f"{name}: {versions}", remedy))
    if told or not nodes:
        return told
    first = nodes[0]
    found = f"the same on every node: Python {first['python']}, torch {first['versions'].get('torch', 'none')}"
    return [Check("cluster versions", "ok", found)]


def _seen(context: Context, nodes: Sequence[dict[str, Any]]) -> Check:
    blind = [node["host"] for node in nodes if not node["sees_runs"]]
    if blind:
        remedy = "pass --runs with a folder that every node sees"
        return Check("cluster runs folder", "bad", f"{', '.join(blind)} cannot see {context.runs}", remedy)
    return Check("cluster runs folder", "ok", f"every node sees {context.runs}")


def _clocks(nodes: Sequence[dict[str, Any]]) -> Check:
    apart = {node["host"]: node["clock_ahead"] for node in nodes}
    off = [f"{node['host']} by {apart[node['host']]:+.1f} s" for node in nodes if _is_off(node)]
    if off:
        return Check(
            "cluster clocks", "warn", f"apart from this machine's: {', '.join(off)}", "run an NTP client there"
        )
    return Check("cluster clocks", "ok", f"at most {max(map(abs, apart.values()), default=0):.1f} s apart")


def _is_off(node: dict[str, Any]) -> bool:
    return abs(node["clock_ahead"]) > CLOCK_SECONDS + float(node["clock_slack"])
