"""Run generated stages on fake CUDA tensors, under CUDA's autocast rules: what crosses must be as the plan says."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from autopipe.generate import generate, load_constants, load_stage
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.cuts import Cuts
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import PlanOptions, make_plan
from autopipe.runtime.checkpoint.initial import adopt_all
from autopipe.stage import Stage
from autopipe.strides import memory_order, unpacked
from autopipe.trace import Capture

CUDA = torch.device("cuda", 0)


_CUDA_TYPE, _META_TYPE = 1, 14  # c10::DeviceType


def allow_cuda() -> None:
    """Let a build without CUDA index fake CUDA tensors, and record gradients of them.

    torch looks up a device guard for that. Builds with CUDA and without a GPU get one that does nothing
    (``_ensureCUDADeviceGuardSet``); here, that of the meta device takes its place.
    """
    if torch.cuda._is_compiled():
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA_TYPE] = guards[_META_TYPE]


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Create fake tensors, and let ``torch.autocast("cuda")`` work without a GPU. Without gradients."""
    allow_cuda()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        yield


def finest_plan(capture: Capture, spec: Any, most: int = 0) -> Plan:
    """Return a plan with a stage between all legal cuts, or with ``most`` stages."""
    costs = {node.name: NodeCost(1e-3, 2e-3, 1000, 1000) for node in capture.graph.nodes}
    profile = Profile(spec, capture.graph, Device("cpu", "test", 0), (Measurement(1, costs),))
    count = len(Cuts(capture.graph).legal) + 1
    ranks = min(count, most or count)
    cluster = Cluster((Level("host", ranks, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    return make_plan(profile, cluster, PlanOptions(num_ranks=ranks, batch_size=8, num_microbatches=4))


def differences(workload: Any, capture: Capture, plan: Plan, folder: Path) -> tuple[list[str], list[str]]:
    """Return how what the stages send differs from the plan, in dtype, shape or memory order.

    Also return the stages that cannot run, because they read data that fake tensors do not have.
    """
    generate(capture, plan, folder)
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    classes = [load_stage(folder, stage.index, **digests) for stage in plan.stages]
    stages = adopt_all(classes, workload.build_model, load_constants(folder))
    symbols = capture.graph.symbols
    leaves = workload.leaves(workload.example_item(symbols[0].hint if symbols else None))
    sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in symbols}
    different, unknown = [], []
    with gpu():
        batch = {name: _like(leaf) for name, leaf in leaves.items()}
        sent: dict[str, torch.Tensor] = {}
        for stage in stages:
            _place(stage)
            specs = {name: next(b.spec for b in plan.boundaries if b.value == name) for name in stage.SENDS}
            try:
                values = stage(*(batch[name] for name in stage.INPUTS), *(sent[name] for name in stage.RECEIVES))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                unknown.append(f"stage {stage.INDEX} reads data ({error})")
                sent.update({name: _planned(spec, sizes) for name, spec in specs.items()})
                continue
            for (name, spec), value in zip(specs.items(), values, strict=False):
                order = () if value.is_contiguous() else tuple(memory_order(value))
                actual = tuple(value.shape), str(value.dtype), order
                planned = spec.concrete(sizes), f"torch.{spec.dtype}", spec.order
                if actual != planned:
                    different.append(f"stage {stage.INDEX} sends {name} as {actual}, the plan says {planned}")
                sent[name] = _planned(spec, sizes)
    return different, unknown


def _planned(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return what arrives in the next stage."""
    elements = torch.empty(math.prod(spec.concrete(sizes)), dtype=getattr(torch, spec.dtype), device=CUDA)
    return unpacked(elements, spec.concrete(sizes), spec.order)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def _place(stage: Stage) -> None:
    """Replace the tensors of a stage by fake ones on the GPU."""
    stage._autopipe_device = CUDA
    copies: dict[int, Any] = {}
    for module in list(stage.modules()):
        for entries in (module._parameters, module._buffers, _plain_tensors(module)):
            for name, tensor in list(entries.items()):
                if tensor is None:
                    continue
                if id(tensor) not in copies:
                    # without a gradient: autocast records the casts of trained leaves even under no_grad
                    fake, trained = _like(tensor), isinstance(tensor, nn.Parameter)
                    copies[id(tensor)] = nn.Parameter(fake, requires_grad=False) if trained else fake
                if name in module._buffers:
                    module._buffers[name] = copies[id(tensor)]
                else:
                    setattr(module, name, copies[id(tensor)])


def _plain_tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
