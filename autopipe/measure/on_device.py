"""``described_on``: the dtypes and memory orders that the values of a graph have on the device that computes.

Models are captured on the CPU. Autocast keeps bfloat16 there in layer_norm, softmax and sums, which CUDA computes in
float32, and kernels choose other strides. What crosses a cut must be known before the ranks start, because NCCL sends
elements alone. So every node runs once more on fake tensors of the device, which needs neither a GPU nor memory.

A node that needs the data of a tensor cannot run so. Its result is then described as on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses import fake_tensor

from autopipe import sparse
from autopipe.devices import autocast_on
from autopipe.ir.graph import Graph, Node
from autopipe.measure.piece import StateCopies
from autopipe.measure.subject import Captured
from autopipe.measure.walk import call
from autopipe.strides import memory_order

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T", bound=Captured)


class _Batches(Protocol):
    """The part of a ``Workload`` that gives a batch."""

    def example_item(self, batch_size: int | None = None) -> Any:
        """Return one batch."""

    def leaves(self, item: Any) -> dict[str, Tensor]:
        """Return the tensors of a batch by name."""


def described_on(kind: str, capture: _T, workload: _Batches) -> _T:
    """Return the capture with the dtypes and memory orders of a device of this kind ("cpu", "cuda").

    Nothing changes for the CPU, where captures are made.
    """
    if kind != "cuda":
        return capture
    graph = capture.graph
    leaves = workload.leaves(workload.example_item(None if graph.samples is None else graph.samples.hint))
    return _with_nodes(capture, nodes_on(torch.device(kind, 0), capture, leaves))


def described_as(graph: Graph, capture: _T) -> _T:
    """Return the capture with the dtypes and memory orders of an equal graph, of which a plan may have been made.

    The kernels of two GPUs may choose other orders, and a host without a GPU does not know those of all kernels.
    """
    specs = {node.name: node.spec for node in graph.nodes}
    return _with_nodes(capture, tuple(dataclasses.replace(n, spec=specs[n.name]) for n in capture.graph.nodes))


def _with_nodes(capture: _T, nodes: tuple[Node, ...]) -> _T:
    by_name = {node.name: node for node in nodes}
    for node in capture.module.graph.nodes:
        if node.name in by_name:
            node.meta["node"] = by_name[node.name]
    changed: Any = capture  # a frozen dataclass
    result: _T = dataclasses.replace(changed, graph=dataclasses.replace(capture.graph, nodes=nodes))
    return result


def nodes_on(device: torch.device, capture: Captured, leaves: Mapping[str, Tensor]) -> tuple[Node, ...]:
    """Return the nodes of a capture, with dtypes and memory orders on a device. ``leaves``: the tensors of a batch."""
    graph, module = capture.graph, capture.module
    sizes = {s.name: int(leaves[s.input].shape[s.dimension]) for s in graph.symbols}
    nodes = []
    with _without_device(), torch.no_grad():
        values: dict[str, Any] = {name: _placed(leaf, device) for name, leaf in leaves.items()}
        state, by_name = _Frozen(module, device), {node.name: node for node in module.graph.nodes}
        for node in graph.nodes:
            try:
                with _regions(by_name[node.name], device):
                    values[node.name] = call(by_name[node.name], values, state)
            except Exception as error:  # of a fake tensor, or of the user's code in an opaque module
                _LOG.info("%s does not run on fake tensors: %s: %s", node.name, type(error).__name__, error)
                if node.spec is not None:
                    dtype = getattr(torch, node.spec.dtype)
                    values[node.name] = torch.empty(node.spec.concrete(sizes), dtype=dtype, device=device)
            nodes.append(_described(node, values.get(node.name)))
            _forget(graph, values, len(nodes) - 1)
    return tuple(nodes)


class _NoDevice(fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Fake tensors as on a host without a GPU, also where there is one."""

    @property
    def avoid_device_init(self) -> bool:
        """No constant of the user's code becomes a real tensor on the device."""
        return True


@contextlib.contextmanager
def _without_device() -> Iterator[None]:
    """Create fake tensors, without the CUDA context that some versions of torch create with the first one on a GPU.

    The context would keep memory of a GPU on which ranks compute.
    """
    create_context = fake_tensor.init_gpu_context
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]  # a cached function
    try:
        with _NoDevice(allow_non_fake_inputs=True):
            yield
    finally:
        fake_tensor.init_gpu_context = create_context


class _Frozen(StateCopies):
    """Copies without gradients: autocast records the casts of trained leaves even under ``no_grad``."""

    def _tensor(self, tensor: Tensor) -> Tensor:
        return super()._tensor(tensor).requires_grad_(False)


def _placed(leaf: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor with the strides of a leaf of the batch."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


def _described(node: Node, value: Any) -> Node:
    if node.spec is None or not isinstance(value, Tensor) or sparse.is_sparse(value):
        return node
    dtype = str(value.dtype).removeprefix("torch.")
    order = () if value.is_contiguous() else tuple(memory_order(value))
    captured = node.spec.as_captured.dtype
    spec = dataclasses.replace(
        node.spec, dtype=dtype, order=order, captured_dtype=captured if captured != dtype else ""
    )
    return dataclasses.replace(node, spec=spec)


def _forget(graph: Graph, values: dict[str, Any], position: int) -> None:
    for name in graph.nodes[position].inputs:
        if graph.last_use.get(name, -1) <= position:
            values.pop(name, None)


@contextlib.contextmanager
def _regions(node: fx.Node, device: torch.device) -> Iterator[None]:
    """Enter the autocast regions of a node. ``torch.autocast`` would disable itself where no GPU is available."""
    regions = autocast_on(device, node.meta)
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, *_ in regions]
    for kind, dtype, enabled, _ in regions:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
