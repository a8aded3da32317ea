"""The order of sums of a plan, for the oracle. Shares no code with autopipe.

Microbatch ``j`` of minibatch ``t`` runs on replica ``(t m + j) mod r`` of every stage. A replica sums its microbatches
in order, replicas are summed from the first to the last, and the stages of a tied parameter from the last to the first.
Each replica has its own buffers that the stage writes; after the step they are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SplitUses(TorchFunctionMode):
    """Lets the k-th call that takes a tied parameter read the tensor of the stage of that call."""

    def __init__(self, tied: Mapping[int, Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.tied, self.count = tied, dict.fromkeys(tied, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.embedding, torch.nn.functional.linear):
            args = tuple(self.of_this_use(value) for value in args)
        return func(*args, **(kwargs or {}))

    def of_this_use(self, value: Any) -> Any:
        uses = self.tied.get(id(value))
        if uses is None:
            return value
        self.count[id(value)] += 1
        return uses[self.count[id(value)] - 1]


@dataclass
class Order:
    """``stages``: the parameters and buffers of each stage; ``replicas``: their numbers. ``num_microbatches``: m.

    ``uses``: parameter -> the stage of each call that takes it, for ties that are summed per stage.
    """

    stages: Sequence[Sequence[str]]
    replicas: Sequence[int]
    num_microbatches: int
    uses: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def start(self, model: torch.nn.Module) -> None:
        self.model, self.sums, self.own = model, {}, {}
        self.owner = {name: stage for stage, names in reversed([*enumerate(self.stages)]) for name in names}
        self.buffers = {
            name: [buffer.clone() for _ in range(self.replicas[self.owner[name]])]
            for name, buffer in model.named_buffers()
            if name in self.owner
        }

    def replica(self, stage: int, t: int, j: int) -> int:
        return (t * self.num_microbatches + j) % self.replicas[stage]

    def begin(self, t: int, j: int) -> SplitUses:
        """Give the model the buffers of this microbatch's replicas; return the context of its forward."""
        for name, buffer in self.model.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name][self.replica(self.owner[name], t, j)])
        parameters = dict(self.model.named_parameters())
        self.own = {
            name: {stage: parameters[name].detach().clone().requires_grad_() for stage in stages}
            for name, stages in self.uses.items()
        }
        return SplitUses({id(parameters[n]): [self.own[n][s] for s in stages] for n, stages in self.uses.items()})

    def end(self, t: int, j: int) -> None:
        """Add a microbatch's gradients to the sums of its replicas, and keep its buffers."""
        for name, parameter in self.model.named_parameters():
            of_stages = self.own.get(name) or {self.owner[name]: parameter}
            for stage, leaf in of_stages.items():
                if leaf.grad is not None:
                    each = self.sums.setdefault((name, stage), [None] * self.replicas[stage])
                    k = self.replica(stage, t, j)
                    each[k] = leaf.grad if each[k] is None else each[k] + leaf.grad
                    leaf.grad = None
        for name, buffer in self.model.named_buffers():
            if name in self.buffers:
                self.buffers[name][self.replica(self.owner[name], t, j)] = buffer.clone()

    def finish(self) -> None:
        """Give every parameter the sum of its sums, and every replica the mean of the buffers."""
        for name, parameter in self.model.named_parameters():
            total = None
            for stage in sorted({*self.uses.get(name, [self.owner[name]])}, reverse=True):
                each = [torch.zeros_like(parameter) if g is None else g for g in self.sums.get((name, stage), ())]
                if each:
                    part = each[0]
                    for other in each[1:]:
                        part = part + other
                    total = part if total is None else total + part
            parameter.grad = total
        self.sums = {}
        for name, buffer in self.model.named_buffers():
            each = self.buffers.get(name, [])
            if each and buffer.is_floating_point():
                mean = each[0]
                for other in each[1:]:
                    mean = mean + other
                self.buffers[name] = [(mean / len(each)).clone() for _ in each]
            if each:
                buffer.copy_(self.buffers[name][0])
