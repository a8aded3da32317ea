"""A stage of one member of a team, whose exchanges are those of generated stages.

::

    forward                                             backward, from the end
    entered_rows   gathers the positions of all         reduce-scatter
    linear         cut                                  (its weight: in the second half, if a backward has two)
    summed_rows    reduce-scatter                       gathers
    linear         whole: each member its positions     (its weight: summed over the members before the step)
    gathered       gathers                              none
    entered        none                                 sum
    linear         cut
    summed         sum                                  none
    own_rows       none                                 gathers

Autograd decides the order of the exchanges of a backward. Sums over replicas, and the exchange of a divided optimizer,
are those of training, too. Each exchange has a width of its own, so that another order has other shapes.

Autograd needs a real GPU for tensors on a GPU. So the stage computes with real tensors on the CPU, and what it
exchanges is replaced by a tensor of a fake GPU with the same shape and strides (``OnGpu``).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.runtime.split_backward import PendingWeights, backward_inputs
from autopipe.runtime.step.reduction import GradientSum
from autopipe.runtime.step.sharding import OptimizerShard
from autopipe.runtime.transport.base import Pending
from autopipe.runtime.transport.teams import TeamTransport
from autopipe.sequence import entered_rows, gathered, own_rows, summed_rows
from autopipe.team import add_together, entered, summed

if TYPE_CHECKING:
    from support.nccl.recorder import Recorder, Run

_WHOLE = "whole"  # the parameter that is not cut, and reads positions
_INNER = 8


class OnGpu:
    """The exchanges of a member, of tensors of a fake GPU in place of those of the CPU."""

    def __init__(self, transport: TeamTransport, recorder: Recorder) -> None:
        self.transport, self.recorder = transport, recorder
        self.rank, self.member, self.size = transport.rank, transport.member, transport.size

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")

    def add(self, tensor: torch.Tensor) -> None:
        """Sum over the members."""
        with self.recorder.mode:
            self.transport.add(self._moved(tensor))

    def add_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum this member's part over the members."""
        with self.recorder.mode:
            total = self.transport.add_parts(self._moved(parts))
        return _on_cpu(total)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather from the members."""
        with self.recorder.mode:
            every = self.transport.gather(self._moved(part))
        return _on_cpu(every)

    def start_all_reduce(self, group: Sequence[int], tensor: torch.Tensor) -> Pending:
        """Start a sum over replicas."""
        with self.recorder.mode:
            return _Started(self.transport.start_all_reduce(group, self._moved(tensor)), tensor)


class _Started:
    def __init__(self, pending: Pending, tensor: torch.Tensor) -> None:
        self.pending, self.tensor = pending, tensor

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.tensor


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_cuda
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class MemberRunner:
    """Stands in for ``StageRunner``."""

    _autopipe_draws = (0, 0, 0)

    def __init__(self, run: Run, stage: int, recorder: Recorder, team: TeamTransport) -> None:
        self.run, self.index, self.recorder = run, stage, recorder
        self._autopipe_team = OnGpu(team, recorder)
        first = 16 * (stage + 1)  # widths of a stage: first to first + 3
        shapes = {
            "rows-in": (_INNER, first),
            "rows-out": (first + 1, _INNER),
            _WHOLE: (first + 2, first + 1),
            "in": (_INNER, first + 2),
            "out": (first + 3, _INNER),
        }
        self.width = first
        with _disable_current_modes():
            self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        self.versions = types.SimpleNamespace(use=lambda version: None, in_use=self.parameters)
        self.variants = {"": types.SimpleNamespace(code=types.SimpleNamespace(INPUTS=()))}
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._pending: dict[tuple[int, int], PendingWeights] = {}

    def forward(self, key: tuple[int, int], inputs: Any, received: Mapping[str, torch.Tensor], *_: Any) -> Any:
        """Run a forward. A microbatch has a number of positions of its own."""
        number = key[0] * self.run.spec.num_microbatches + key[1] + 1
        with _disable_current_modes():
            value = torch.zeros((number, self.width), requires_grad=bool(received))
            self._in_flight[key] = self.exchange(value), [value] if received else []
        return self.run.values(self.run.messages.forward, self.index, key)

    def exchange(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value of the last call, for a member's positions [positions, width]."""
        weights: Any = self.parameters
        value = self._product(entered_rows(self, value, 0), weights["rows-in"])
        value = summed_rows(self, self._product(value, weights["rows-out"]), 0)
        value = gathered(self, self._product(value, weights[_WHOLE]), 0)
        value = self._product(entered(self, value), weights["in"])
        return own_rows(self, summed(self, self._product(value, weights["out"])), 0)

    def _product(self, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.recorder.kernel("F", self.index, id(weight), tuple(value.shape))
        return functional.linear(value, weight)

    def backward(self, key: tuple[int, int], arrived: Mapping[str, torch.Tensor]) -> Any:
        """Run a backward."""
        output, _ = self._in_flight.pop(key)
        self.recorder.kernel("B", self.index, self.run.size(*key))
        with _disable_current_modes():
            torch.autograd.backward([output], [torch.zeros_like(output)])
        return self.run.values(self.run.messages.backward, self.index, key)

    def backward_inputs(self, key: tuple[int, int], arrived: Mapping[str, torch.Tensor]) -> Any:
        """Run the half of a backward that earlier stages wait for."""
        output, received = self._in_flight.pop(key)
        self.recorder.kernel("I", self.index, self.run.size(*key))
        with _disable_current_modes():
            self._pending[key] = backward_inputs([output], [torch.zeros_like(output)], received, self.parameters)
        return self.run.values(self.run.messages.backward, self.index, key)

    def backward_weights(self, key: tuple[int, int]) -> None:
        """Run the other half."""
        self.recorder.kernel("W", self.index, self.run.size(*key))
        with _disable_current_modes():
            self._pending.pop(key).finish(self.parameters)


class MemberStepper:
    """Stands in for ``Stepper``: its exchanges in its order, with a loss scale and a divided optimizer."""

    def __init__(
        self, run: Run, members: Mapping[int, MemberRunner], recorder: Recorder, transport: TeamTransport
    ) -> None:
        self.run, self.members, self.recorder, self.transport = run, members, recorder, transport
        self._on_gpu: Any = OnGpu(transport, recorder)
        self._stepped: list[int] = []
        self._sums: dict[int, GradientSum] = {}
        self._shards: dict[int, OptimizerShard] = {}
        for stage, member in members.items():
            group, parameters = run.spec.stage_ranks[stage], member.parameters
            if len(group) > 1:
                # a bucket for each parameter
                self._sums[stage] = GradientSum(parameters, list(parameters), group, self._on_gpu, bucket_bytes=1)
                self._shards[stage] = OptimizerShard(parameters, group, self._on_gpu)

    @contextlib.contextmanager
    def overlapping(self, stage: int) -> Iterator[None]:
        """Start sums over the replicas in the backward, as ``ReplicaSync`` does."""
        sums = self._sums.get(stage)
        with contextlib.nullcontext() if sums is None or sums.busy else sums.watching(self.members[stage].parameters):
            yield

    def reduce(self, stage: int, minibatch: int) -> None:
        """Start the other sums over the replicas."""
        if stage in self._sums:
            with _disable_current_modes():
                self._sums[stage].start(self.members[stage].parameters)

    def step(self, stage: int, minibatch: int) -> None:
        """Step. The first stage of a rank completes the gradients of all of them, and agrees on them."""
        with _disable_current_modes():
            if not self._stepped:
                self._prepare()
            self.recorder.kernel("step", stage)
            if stage in self._shards:
                self._shards[stage].exchange()
        self._stepped.append(stage)
        if len(self._stepped) == len(self.members):
            self._stepped = []

    def _prepare(self) -> None:
        for stage, member in self.members.items():
            if stage in self._sums:
                self._sums[stage].finish()
            gradient = member.parameters[_WHOLE].grad
            add_together(self._on_gpu, [] if gradient is None else [gradient])
        self.recorder.synchronize()  # the norms are read
        vote = torch.zeros(1, dtype=torch.float64)
        if self.transport.world_size > 1:
            self.transport.agree(vote)
        self.transport.add(vote)
