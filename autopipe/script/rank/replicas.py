"""What the replicas of a model exchange: outputs and their gradients, sums of gradients, and new values.

Every parameter of a stage belongs to one of its replicas. That one adds the gradients of all replicas, the last one's
first, keeps the sum, steps the parameter, and sends its new value to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autopipe.ir.messages import ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, Channel
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.runtime.transport.distributed import ProcessTransport
from autopipe.script.rank_order import RankOrder
from autopipe.strides import Layout


def channels(order: RankOrder) -> list[Channel]:
    """Return every channel of a run: between the stages of a replica, and between the replicas of a stage."""
    stages, replicas = range(order.num_stages), range(order.num_replicas)
    own = [(a, b) for a in stages for b in stages if a < b]
    listed = []
    for kinds, direction in (((ACTIVATION, TIE_VALUE), 1), ((GRADIENT, TIE_GRADIENT), -1)):
        pairs = [(a, b)[::direction] for a, b in own]
        listed += [
            Channel(kind, a, b, order.rank_of(replica, a), order.rank_of(replica, b))
            for kind in kinds
            for replica in replicas
            for a, b in pairs
        ]
    between = [(stage, r, q) for stage in stages for r in replicas for q in replicas if r != q]
    for kind in (GRADIENT, TIE_VALUE):
        listed += [_between(order, kind, *pair) for pair in between]
    last = order.num_stages - 1
    return listed + [_between(order, ACTIVATION, last, replica, order.last_replica) for replica in replicas[:-1]]


def _between(order: RankOrder, kind: str, stage: int, source: int, target: int) -> Channel:
    return Channel(kind, stage, stage, order.rank_of(source, stage), order.rank_of(target, stage))


class Replicas:
    """One rank's exchange with the other replicas of its stage."""

    def __init__(self, order: RankOrder, rank: int, transport: ProcessTransport) -> None:
        self.order, self.transport = order, transport
        self.stage, self.own = order.stage_of(rank), order.replica_of(rank)
        self.others = [replica for replica in range(order.num_replicas) if replica != self.own]
        self.owners: dict[str, int] = {}  # tensor of the stage -> its replica
        self.trained: set[str] = set()  # parameters that have needed a gradient

    def _to(self, kind: str, replica: int) -> Channel:
        return _between(self.order, kind, self.stage, self.own, replica)

    def _from(self, kind: str, replica: int) -> Channel:
        return _between(self.order, kind, self.stage, replica, self.own)

    def send_outputs(self, outputs: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Send the outputs of a call to the last replica."""
        channel = self._to(ACTIVATION, self.order.last_replica)
        self.transport.send_message(channel, [output.detach() for output in outputs], layouts)

    def receive_outputs(self, replica: int, layouts: Sequence[Layout]) -> list[Tensor]:
        """Wait for the outputs of a call that another replica has computed."""
        return [value.wait() for value in self.transport.receive_message(self._from(ACTIVATION, replica), layouts)]

    def send_gradients(self, replica: int, leaves: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Send the gradients of such outputs back."""
        gradients = [absent(leaf.detach()) if leaf.grad is None else leaf.grad for leaf in leaves]
        self.transport.send_message(self._to(GRADIENT, replica), gradients, layouts)

    def receive_gradients(self, layouts: Sequence[Layout]) -> list[Tensor | None]:
        """Wait for the gradients of the outputs of a call."""
        return self._arriving(self._from(GRADIENT, self.order.last_replica), layouts)

    def _arriving(self, channel: Channel, layouts: Sequence[Layout]) -> list[Tensor | None]:
        values = [value.wait() for value in self.transport.receive_message(channel, layouts)]
        return [None if is_absent(value) else value for value in values]

    def add_up(self, tensors: Mapping[str, Tensor], computed: Sequence[int]) -> None:
        """Leave in each parameter of this replica the sum of its gradients, the last replica's first, and none in others.

        ``computed``: the replicas that have gradients, ascending.
        """
        names = [name for name in self.owners if name in self.trained]
        own = {name: tensors[name].grad for name in names}
        for name in names:
            tensors[name].grad = None
        for replica in self.others if self.own in computed else ():
            sent = [name for name in names if self.owners[name] == replica]
            gradients = [absent(tensors[name].detach()) if own[name] is None else own[name] for name in sent]
            self._send(self._to(GRADIENT, replica), gradients, [tensors[name] for name in sent])
        mine = [name for name in names if self.owners[name] == self.own]
        layouts = _layouts([tensors[name] for name in mine])
        for replica in reversed(computed):
            if replica == self.own:
                gradients = [own[name] for name in mine]
            else:
                gradients = self._arriving(self._from(GRADIENT, replica), layouts) if mine else []
            for name, gradient in zip(mine, gradients, strict=True):
                total = tensors[name].grad
                tensors[name].grad = total if gradient is None else gradient if total is None else total + gradient

    def share(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Send the values of tensors from the replica that has the newest to all others."""
        names = list(names)
        mine = [tensors[name].detach() for name in names if self.owners[name] == self.own]
        for replica in self.others:
            self._send(self._to(TIE_VALUE, replica), [value.clone() for value in mine], mine)
        with torch.no_grad():
            for replica in self.others:
                theirs = [tensors[name] for name in names if self.owners[name] == replica]
                channel, layouts = self._from(TIE_VALUE, replica), _layouts(theirs)
                arriving = self.transport.receive_message(channel, layouts) if theirs else []
                for tensor, value in zip(theirs, arriving, strict=True):
                    tensor.copy_(value.wait())

    def _send(self, channel: Channel, values: Sequence[Tensor], like: Sequence[Tensor]) -> None:
        if values:
            self.transport.send_message(channel, values, _layouts(like))


def _layouts(tensors: Iterable[Tensor]) -> list[Layout]:
    return [Layout(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
