"""Profiles as pandas frames, for tables."""

from __future__ import annotations

import pandas as pd

from autopipe.ir.profile import Profile


def cost_frame(profile: Profile, microbatch_size: int | None = None) -> pd.DataFrame:
    """Return one row per node, in execution order: module, target, seconds, and bytes by kind.

    ``microbatch_size`` None: the largest measured one. Seconds and bytes are of one microbatch.
    """
    size = profile.measurements[-1].microbatch_size if microbatch_size is None else microbatch_size
    costs = profile.at(size).costs
    seen: set[str] = set()
    rows = []
    for node in profile.graph.nodes:
        cost = costs[node.name]
        fresh = [name for name in node.parameters if name not in seen]
        seen.update(fresh)
        rows.append(
            {
                "node": node.name,
                "module": node.module_path,
                "target": node.target,
                "forward_seconds": cost.forward_seconds,
                "backward_seconds": cost.backward_seconds,
                "output_bytes": cost.output_bytes,
                "saved_bytes": cost.saved_bytes,
                "workspace_bytes": cost.workspace_bytes,
                "parameter_bytes": sum(profile.graph.parameters[name].num_bytes({}) for name in fresh),
            }
        )
    return pd.DataFrame(rows).set_index("node")


def block_of(path: str) -> str:
    """Return the block of a module: its path up to the first number (``h.3`` of ``h.3.attn.qkv``)."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return parts[0]


def block_frame(profile: Profile, microbatch_size: int | None = None) -> pd.DataFrame:
    """Return one row per block of the model, in order of first execution, with its share of the time.

    Figures are sums over the nodes; ``workspace_bytes``, which a node frees again, is the maximum.
    """
    costs = cost_frame(profile, microbatch_size)
    blocks = costs["module"].map(block_of).rename("block")
    numbers = ["forward_seconds", "backward_seconds", "output_bytes", "saved_bytes", "parameter_bytes"]
    groups = costs.groupby(blocks, sort=False)
    frame = groups[numbers].sum()
    frame["workspace_bytes"] = groups["workspace_bytes"].max()
    seconds = frame["forward_seconds"] + frame["backward_seconds"]
    frame["share"] = seconds / max(seconds.sum(), 1e-30)
    return frame
