"""``OptimizerShard``: the replicas of a stage divide its optimizer state by whole parameters.

Each replica builds the optimizer of its own parameters alone, steps these, and sends the new values to the others. All
replicas have the same gradients, so the result is that of an optimizer on every replica, for every optimizer that
steps a parameter from its own gradient and state. ``verify.optimizer_probe`` finds an optimizer that does not.

Source: ZeRO, arXiv:1910.02054, section 5.1 (stage 1), by whole parameters as in torch's ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autopipe.runtime.step.reduction import Bucket, filled
from autopipe.runtime.transport.base import Pending, Transport


def divide(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide named things among ``count`` ranks, so that the sums of their sizes are about equal.

    The largest goes first, always to the rank with the least, so every rank computes the same parts.
    """
    loads = [0] * count
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = loads.index(min(loads))
        loads[place] += sizes[name]
        parts[place].append(name)
    return parts


def shards(parameters: Mapping[str, nn.Parameter], count: int) -> list[list[str]]:
    """Return the names of the parameters that each of ``count`` replicas steps."""
    return divide({name: p.numel() * p.element_size() * p.requires_grad for name, p in parameters.items()}, count)


class OptimizerShard:
    """One replica's part of a stage.

    Args:
        parameters: those that the stage steps, by name; the same on all replicas.
        group: the ranks of the replicas.
        transport: to the other replicas.

    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Sequence[int], transport: Transport) -> None:
        names = set(shards(parameters, len(group))[group.index(transport.rank)])
        # the parameters of this replica, in the order of the stage
        self.own = {name: parameter for name, parameter in parameters.items() if name in names}
        self._group, self._transport = tuple(group), transport
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._buckets = filled(self._parameters, list(self._parameters))

    @torch.no_grad()
    def exchange(self) -> None:
        """Give every replica the new values of all parameters.

        A bucket is a sum over the replicas in which all but one add zeros. Whole numbers are summed, because the sum of
        -0.0 and 0.0 is 0.0.
        """
        sums: list[tuple[Bucket, torch.Tensor, Pending]] = []
        for bucket in self._buckets:
            first = self._parameters[bucket.names[0]]
            flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
            for name, place in bucket.places.items():
                if name in self.own:
                    parameter = self.own[name]
                    flat[place : place + parameter.numel()].view_as(parameter).copy_(parameter)
            sums.append((bucket, flat, self._transport.start_all_reduce(self._group, flat.view(torch.int32))))
        for bucket, flat, pending in sums:
            values = pending.wait().view(flat.dtype)
            for name, place in bucket.places.items():
                if name not in self.own:
                    parameter = self._parameters[name]
                    parameter.data.copy_(values[place : place + parameter.numel()].view_as(parameter))
