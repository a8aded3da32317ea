"""The dtypes and memory orders of values on a GPU, computed without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_gpu import allow_cuda, differences, finest_plan
from support.samples import SAMPLES
from torch._subclasses import fake_tensor

from autopipe.ir.cuts import Cuts
from autopipe.ir.tensor import TensorSpec
from autopipe.measure.on_device import described_as, described_on
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        x = self.drop(x.to(memory_format=torch.channels_last) * 2)
        x = x.flatten(2).transpose(1, 2)
        return self.head(x).mean(1)

def build_model():
    return Net()

def data(batch_size=4):
    while True:
        yield torch.randn(batch_size, 3, 8, 8), torch.randint(0, 4, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sample", ["", "unet"])
def test_what_crosses_any_cut_on_a_gpu_is_as_planned(sample: str, precision: str, tmp_path: Path) -> None:
    path = SAMPLES / f"{sample}.py" if sample else tmp_path / "model.py"
    if not sample:
        path.write_text(MODEL)
    elif precision != "bf16":
        pytest.skip("the small model covers it")
    workload = load_workload(LoadOptions(str(path), precision=precision))
    captured = capture(workload, verify=False)
    allow_cuda()
    described = described_on("cuda", captured, workload)
    plan = finest_plan(described, workload.spec)
    assert len(plan.boundaries) >= len(plan.stages) - 1 >= 6
    assert differences(workload, described, plan, tmp_path / "stages") == ([], [])
    if precision != "fp32":  # the rules of the CPU are not those of the GPU
        assert differences(workload, captured, finest_plan(captured, workload.spec), tmp_path / "cpu")[0]


def test_values_of_a_gpu_have_its_dtypes_and_their_memory_order(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    workload = load_workload(LoadOptions(str(tmp_path / "model.py"), precision="bf16"))
    captured = capture(workload, verify=False)
    assert described_on("cpu", captured, workload) is captured
    allow_cuda()
    described = described_on("cuda", captured, workload)
    specs = [node.spec for node in described.graph.nodes]
    norm = next(i for i, node in enumerate(captured.graph.nodes) if node.module_type == "GroupNorm")
    assert [captured.graph.nodes[norm].spec.dtype, specs[norm].dtype] == ["bfloat16", "float32"]
    assert any(spec is not None and spec.order[:4] == (0, 2, 3, 1) for spec in specs)
    # it is the same model: the other device can resume its checkpoint, and its plan fits a capture without a GPU
    assert described.graph.digest == captured.graph.digest
    again = described_as(described.graph, captured)
    assert again.graph.nodes == described.graph.nodes != captured.graph.nodes
    nodes = [node.meta["node"] for node in again.module.graph.nodes if "node" in node.meta]
    assert nodes and all(node in described.graph.nodes for node in nodes)
    # the planner counts the bytes that the GPU sends
    assert sum(c.crossing_bytes(p, 4) for c in (Cuts(described.graph),) for p in c.legal) > sum(
        c.crossing_bytes(p, 4) for c in (Cuts(captured.graph),) for p in c.legal
    )


@pytest.mark.parametrize("order", [(0, 1), (0, 0, 0, 0), (1, 2, 0, 0), (1, 0, 0)])
def test_an_order_that_is_not_one_of_the_dimensions_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not a memory order of 2 dimensions"):
        TensorSpec(("s0", 4), "float32", order=order)


def test_the_gpu_itself_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MODEL.replace(
        "return self.head(x).mean(1)", "return self.head(x).mean(1) * torch.tensor(2.0, device=x.device)"
    )
    (tmp_path / "model.py").write_text(text)
    workload = load_workload(LoadOptions(str(tmp_path / "model.py")))
    captured = capture(workload, verify=False)
    allow_cuda()
    used: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(fake_tensor, "init_gpu_context", used.append)
        patch.setattr("torch.cuda.is_available", lambda: True)
        described = described_on("cuda", captured, workload)
        assert fake_tensor.init_gpu_context == used.append
    assert described != captured and used == []
