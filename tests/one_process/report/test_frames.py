"""Profiles as frames: grouping loses nothing."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console
from support.pipelines import captured

from autopipe.cli import documents
from autopipe.report import tables
from autopipe.report.frames import block_frame, block_of, cost_frame
from autopipe.report.results import ProfileResult
from autopipe.units import in_bytes, in_seconds


def test_every_node_has_a_row_and_every_parameter_is_counted_once() -> None:
    profile = captured("gpt").profile
    frame = cost_frame(profile)
    assert list(frame.index) == [node.name for node in profile.graph.nodes]
    expected = sum(spec.num_bytes({}) for spec in profile.graph.parameters.values())
    assert frame["parameter_bytes"].sum() == expected


def test_blocks_sum_to_the_whole_in_the_order_of_execution() -> None:
    profile = captured("gpt").profile
    blocks = block_frame(profile)
    nodes = len(profile.graph.nodes)
    assert [block for block in blocks.index if block.startswith("blocks.")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert blocks["forward_seconds"].sum() == pytest.approx(nodes * 1e-3)
    assert blocks["share"].sum() == pytest.approx(1.0)


def test_the_short_profile_has_outputs_workspace_and_the_optimizer() -> None:
    profile = captured("gpt").profile
    costs = list(profile.measurements[-1].costs.values())
    blocks = block_frame(profile)
    assert blocks["output_bytes"].sum() == sum(cost.output_bytes for cost in costs)
    assert blocks["workspace_bytes"].max() == max(cost.workspace_bytes for cost in costs)

    profile = dataclasses.replace(profile, optimizer_seconds_per_byte=1e-9, optimizer_bytes_per_byte=2.0)
    trained = sum(spec.num_bytes({}) for spec in profile.graph.parameters.values() if spec.requires_grad)
    document = documents.profile(ProfileResult(profile, ""))
    assert document["measurements"][-1]["output_bytes"] == sum(cost.output_bytes for cost in costs)
    assert document["measurements"][-1]["workspace_bytes"] == max(cost.workspace_bytes for cost in costs)
    assert document["optimizer"]["step_seconds"] == pytest.approx(1e-9 * trained)
    assert document["optimizer"]["state_bytes"] == 2 * trained
    assert tables.optimizer_line(profile) == (
        f"optimizer: {in_seconds(1e-9 * trained)} a step for {in_bytes(trained)} of parameters, "
        f"and {in_bytes(2 * trained)} of state"
    )
    console = Console(width=100, file=io.StringIO())
    console.print(tables.profile_table(profile), tables.block_table(profile))
    shown = console.file.getvalue()
    assert shown.count("outputs") == shown.count("workspace") == 2


@pytest.mark.parametrize(
    ("path", "block"), [("h.3.attn.qkv", "h.3"), ("model.layers.0", "model.layers.0"), ("head", "head"), ("", "")]
)
def test_a_block_path_ends_at_its_first_number(path: str, block: str) -> None:
    assert block_of(path) == block
