"""One member of a team without the others, to be measured: its own tensors, and exchanges that do nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.team import STAGE, Unplaced, cut
from autopipe.trace.result import Capture


class _Silent:
    """A member whose exchanges return what it has: values differ from those of a team, shapes do not."""

    member = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def add(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""


def alone(capture: Capture) -> Capture:
    """Return the capture of a member with its own part of every tensor. The user's modules and tensors do not change.

    Whole tensors are those of the capture, and cut ones are copies. The first capture is returned without a team.
    """
    if capture.team == 1:
        return capture
    stage = Unplaced(_Silent(capture.team))
    memo: dict[int, Any] = {}
    targets = [node for node in capture.module.graph.nodes if node.op in ("call_module", "get_attr")]
    for name, tensor in _tensors(capture.module):
        shard = capture.shards.get(capture.graph.aliases.get(name, name))
        memo.setdefault(id(tensor), tensor if shard is None else _part(tensor, shard.place, shard.size, capture.team))
    owned = {str(node.target): copy.deepcopy(_attribute(capture.module, str(node.target)), memo) for node in targets}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in capture.module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda value: copies[value])
        replace = fx.node.map_aggregate
        copies[node].args = replace(node.args, lambda value: _placed(value, copies, stage))
        copies[node].kwargs = dict(replace(node.kwargs, lambda value: _placed(value, copies, stage)))
    return dataclasses.replace(capture, module=fx.GraphModule(owned, graph, type(capture.module).__name__))


def _placed(value: Any, copies: dict[fx.Node, fx.Node], stage: Unplaced) -> Any:
    if isinstance(value, fx.Node):
        return copies[value]
    return stage if value is STAGE else value


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return list(named)


def _part(tensor: Tensor, place: Any, size: int, team: int) -> Tensor:
    with torch.no_grad():
        part = cut(tensor.detach(), place, size, 0, team)
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value
