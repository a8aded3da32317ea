"""Profiles and metrics as pandas frames: for tables, and for whoever wants to look further in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from autopipe.errors import RunError
from autopipe.ir.profile import Profile


def cost_frame(profile: Profile, microbatch_size: int | None = None) -> pd.DataFrame:
    """Return one row a node, in the order they run: module, target, seconds, bytes made, kept, at work, of parameters.

    ``microbatch_size`` None: the largest that was measured. Seconds and bytes are of one microbatch.
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
    """Return the block that a module belongs to: up to the first number of its path (``h.3`` of ``h.3.attn.qkv``)."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return parts[0]


def block_frame(profile: Profile, microbatch_size: int | None = None) -> pd.DataFrame:
    """Return one row a block of the model, in the order they first run, with its share of the time.

    Sums of its nodes; of ``workspace_bytes``, which a node gives back, the most.
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


def metrics_frame(run: Path) -> pd.DataFrame:
    """Return a run's metrics.jsonl, one row an optimizer step (a step repeated after a restart: the last one).

    Raises: RunError where the directory has none.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{run} has no metrics.jsonl", remedy="name a directory that autopipe train made")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    frame = pd.DataFrame([line for line in lines if "loss" in line])
    return frame.drop_duplicates("step", keep="last").set_index("step") if len(frame) else frame
