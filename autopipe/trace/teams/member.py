"""The capture of a member of a team, as a run asks for it; and of one without the others, to be measured."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.errors import TraceError
from autopipe.ir.teams.axes import Axis
from autopipe.team import STAGE, Team, Unplaced, cut
from autopipe.trace.axes.find import attribute
from autopipe.trace.result import Capture
from autopipe.trace.teams.member_graph import of_team
from autopipe.trace.teams.positions import FEWEST, find_positions
from autopipe.trace.teams.sequence import by_position


def member_of(capture: Capture, axes: Sequence[Axis], size: int, *, sequence: bool) -> Capture:
    """Return the capture of each member of a team of ``size`` that shards ``axes``.

    ``sequence``: between the calls of the axes, a member has its own positions of the values.

    Raises: TraceError if no value can be divided by position; the errors of ``of_team``.
    """
    member = of_team(capture, axes, size)
    if not sequence or not axes:
        return member
    positions = find_positions(capture, axes, size)
    if positions.is_empty:
        raise TraceError(
            f"--sequence-parallel: no length of the batch that {size} divides into {FEWEST} positions or more is "
            f"followed by the calls of {capture.graph.name} from one sum over the team to the next",
            remedy=f"pad the batches to a multiple of {size}, or train without --sequence-parallel",
        )
    return by_position(member, positions)


class _Silent:
    """A member whose exchanges return what it has: values differ from those of a team, shapes do not."""

    member = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def add(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def add_parts(self, parts: Tensor) -> Tensor:
        """Return the first entry."""
        return parts[0].clone()

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensor as each entry."""
        return part.expand(self.size, *part.shape).clone()


def alone(capture: Capture) -> Capture:
    """Return the capture of the first member, whose exchanges do nothing. Without a team, it is the capture itself."""
    return capture if capture.team == 1 else as_member(capture, _Silent(capture.team))


def as_member(capture: Capture, team: Team, *, copies: bool = False) -> Capture:
    """Return the capture of a member with its own part of every tensor. The user's modules and tensors do not change.

    Whole tensors are those of the capture, or ``copies``; cut ones are copies. ``team``: the member's.
    """
    stage = Unplaced(team)
    memo: dict[int, Any] = {}
    targets = [node for node in capture.module.graph.nodes if node.op in ("call_module", "get_attr")]
    for name, tensor in _tensors(capture.module):
        shard = capture.shards.get(capture.graph.aliases.get(name, name))
        if shard is not None:
            memo.setdefault(id(tensor), _part(tensor, shard.place, shard.size, team))
        elif not copies:
            memo.setdefault(id(tensor), tensor)
    owned = {str(node.target): copy.deepcopy(attribute(capture.module, str(node.target)), memo) for node in targets}
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in capture.module.graph.nodes:
        nodes[node] = graph.node_copy(node, lambda value: nodes[value])
        replace = fx.node.map_aggregate
        nodes[node].args = replace(node.args, lambda value: _placed(value, nodes, stage))
        nodes[node].kwargs = dict(replace(node.kwargs, lambda value: _placed(value, nodes, stage)))
    return dataclasses.replace(capture, module=fx.GraphModule(owned, graph, type(capture.module).__name__))


def _placed(value: Any, nodes: dict[fx.Node, fx.Node], stage: Unplaced) -> Any:
    if isinstance(value, fx.Node):
        return nodes[value]
    return stage if value is STAGE else value


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return list(named)


def _part(tensor: Tensor, place: Any, size: int, team: Team) -> Tensor:
    with torch.no_grad():
        part = cut(tensor.detach(), place, size, team.member, team.size)
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
