"""``python -m benchmarks.zoo.on_gpu``: what crosses between stages on a GPU is as planned, tried without a GPU.

Every model of the dozen, and the U-Net of the samples, is captured with autocast to bfloat16 and cut wherever a cut is
legal, into at most 64 stages. They run on fake CUDA tensors under CUDA's autocast rules. Everything that a stage sends
must have the dtype, shape and memory order of the plan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from autopipe.measure.on_device import described_on
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload
from benchmarks.zoo.__main__ import REPRESENTATIVE, ROOT

MOST_STAGES = 64


class Autocast:
    """A workload whose loss runs under autocast to bfloat16."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def loss(self, model: Any, item: Any) -> Any:
        """Return the loss and its weight."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self._workload.loss(model, item)


def main(names: list[str]) -> int:
    """Print one line for each model, and return how many do not hold."""
    from support.fake_gpu import allow_cuda, differences, finest_plan

    from benchmarks.zoo.one import workload_of

    failed = 0
    for name in names or [*REPRESENTATIVE, "sample_models/unet.py"]:
        is_file = name.endswith(".py")
        workload: Any = (
            load_workload(LoadOptions(str(ROOT / name), precision="bf16")) if is_file else Autocast(workload_of(name))
        )
        captured = capture(workload, verify=False)
        allow_cuda()
        described = described_on("cuda", captured, workload)
        changed = sum(a.spec != b.spec for a, b in zip(captured.graph.nodes, described.graph.nodes, strict=True))
        plan = finest_plan(described, workload.spec, MOST_STAGES)
        with tempfile.TemporaryDirectory() as folder:
            different, unknown = differences(workload, described, plan, Path(folder))
        failed += bool(different)
        print(
            f"{name}: {len(plan.stages)} stages, {len(plan.boundaries)} values cross, {changed} of "
            f"{len(captured.graph.nodes)} values differ from the CPU; {'; '.join(different[:3]) or 'as planned'}"
            + (f"; not tried: {len(unknown)} stages, {unknown[0]}" if unknown else ""),
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
