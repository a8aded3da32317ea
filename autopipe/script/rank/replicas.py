"""What the replicas of a model exchange: outputs and their gradients, sums of gradients, and new values.

Every parameter of a stage belongs to one of its replicas. That one adds the gradients of all, keeps the sum, steps the
parameter, and sends its new value to the others. A *unit* is what one replica computes of one call of the model by the
script: the whole call, or parts of its batch next to each other. Its gradients are added first; then the units of a
backward, the latest first. So a backward of one call that is not cut gives the gradients of one process, bit for bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autopipe.ir.messages import ACTIVATION, GRADIENT, TIE_GRADIENT, TIE_VALUE, Channel
from autopipe.runtime.transport.absent import absent, is_absent
from autopipe.runtime.transport.base import Pending
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


_MOST_SUMS = 2
"""Backwards by replicas whose gradients may wait to be added, in memory."""


class Replicas:
    """One rank's exchange with the other replicas of its stage."""

    def __init__(self, order: RankOrder, rank: int, transport: ProcessTransport) -> None:
        self.order, self.transport = order, transport
        self.stage, self.own = order.stage_of(rank), order.replica_of(rank)
        self.others = [replica for replica in range(order.num_replicas) if replica != self.own]
        self.owners: dict[str, int] = {}  # tensor of the stage -> its replica
        self.trained: set[str] = set()  # parameters that have needed a gradient
        self._sums: deque[list[Callable[[], dict[str, Tensor]]]] = deque()  # of backwards, to be added

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

    def send_gradients(self, replica: int, outputs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Send the gradients of such outputs back."""
        gradients = [absent(output.detach()) if gradient is None else gradient for output, gradient in outputs]
        self._send(self._to(GRADIENT, replica), gradients, [output for output, _ in outputs])

    def receive_gradients(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Wait for the gradients of outputs of a call."""
        if not outputs:
            return []
        posted = self.transport.receive_message(self._from(GRADIENT, self.order.last_replica), _layouts(outputs))
        return [None if is_absent(gradient := value.wait()) else gradient for value in posted]

    def give(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the gradients that one unit has computed to the owners of the parameters; return those of this replica.

        None is left in the parameters.
        """
        names = [name for name in self.owners if name in self.trained]
        own = {name: gradient for name in names if (gradient := tensors[name].grad) is not None}
        for name in own:
            tensors[name].grad = None
        for replica in self.others:
            sent = [name for name in names if self.owners[name] == replica]
            gradients = [own[name] if name in own else absent(tensors[name].detach()) for name in sent]
            self._send(self._to(GRADIENT, replica), gradients, [tensors[name] for name in sent])
        return {name: gradient for name, gradient in own.items() if self.owners[name] == self.own}

    def add_later(self, tensors: Mapping[str, Tensor], own: Sequence[dict[str, Tensor]], units: Sequence[int]) -> None:
        """Add gradients to those of this replica's parameters when ``settle`` is called, or some backwards later.

        ``units``: the replicas that compute the units of one backward, in the order in which they are added. ``own``:
        what this replica has computed of them.
        """
        mine = [name for name in self.owners if name in self.trained and self.owners[name] == self.own]
        layouts, given = _layouts([tensors[name] for name in mine]), iter(own)
        sums: list[Callable[[], dict[str, Tensor]]] = []
        for replica in units if mine else ():
            if replica == self.own:
                sums.append(functools.partial(next, given))
            else:
                posted = self.transport.receive_message(self._from(GRADIENT, replica), layouts)
                sums.append(functools.partial(_arrived, mine, posted))
        self._sums.append(sums)
        while len(self._sums) > _MOST_SUMS * self.order.num_replicas:
            self._add(tensors, self._sums.popleft())

    def settle(self, tensors: Mapping[str, Tensor]) -> None:
        """Wait for the gradients of the backwards so far."""
        while self._sums:
            self._add(tensors, self._sums.popleft())

    def _add(self, tensors: Mapping[str, Tensor], sums: list[Callable[[], dict[str, Tensor]]]) -> None:
        """Add the sum of the units of one backward, as autograd does."""
        total: dict[str, Tensor] = {}
        for gradients in sums:
            for name, gradient in gradients().items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, gradient in total.items():
            before = tensors[name].grad
            tensors[name].grad = gradient if before is None else before.add_(gradient)

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
                    # batch norm writes a buffer without noting it, and a backward may read the newest values
                    own = tensor if isinstance(tensor, nn.Parameter) else tensor.data
                    own.copy_(value.wait())

    def _send(self, channel: Channel, values: Sequence[Tensor], like: Sequence[Tensor]) -> None:
        if values:
            self.transport.send_message(channel, values, _layouts(like))


def _arrived(names: Sequence[str], posted: Sequence[Pending]) -> dict[str, Tensor]:
    values = zip(names, (value.wait() for value in posted), strict=True)
    return {name: value for name, value in values if not is_absent(value)}


def _layouts(tensors: Iterable[Tensor]) -> list[Layout]:
    return [Layout(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
