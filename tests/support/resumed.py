"""Pipelines that stop and resume, and the comparison of their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from autopipe.workload import LoadOptions, load_workload
from support.models.resume import FILE
from support.pipelines import Captured, Pipeline


def with_hooks(network: Captured, text: str, folder: Path) -> Captured:
    """Return the same network with other hooks, on which the capture does not depend."""
    path = folder / "net.py"
    path.write_text(FILE + text)
    workload = load_workload(LoadOptions(str(path)))
    return Captured(workload, network.capture, replace(network.profile, workload=workload.spec))


def train(pipeline: Pipeline, items: list[object], steps: int) -> dict[str, torch.Tensor]:
    """Train to a step and return the weights."""
    return pipeline.weights(pipeline.train(items, steps))


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
