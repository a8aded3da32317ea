"""Run the executor and the transport of a rank over a stand-in for torch.distributed, and record what they ask of it.

Only the computation is replaced: stages return empty tensors on a fake GPU. The order of receives, sends, waits and
sums, and the communicators, are those of training. If ranks are teams, each member is recorded (``team_stage``).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopipe.ir.messages import MessagePlan, channels
from autopipe.ir.schedule import Schedule, ScheduleSpec, StageEdges
from autopipe.ir.tensor import TensorSpec
from autopipe.runtime.batches.recording import Microbatch
from autopipe.runtime.executor import Executor
from autopipe.runtime.first_kernels import FirstKernels
from autopipe.runtime.transport import distributed, nccl
from autopipe.runtime.transport.communicators import Communicators
from autopipe.runtime.transport.teams import TeamTransport, agreeing_groups, channels_of, groups_of
from autopipe.schedules import lower, make, turns
from support.fake_gpu import allow_cuda
from support.nccl.machine import COLLECTIVES, COMPUTE, Operation, Program
from support.nccl.team_stage import MemberRunner, MemberStepper

CUDA = torch.device("cuda", 0)


class Work:
    """The handle of an operation, as torch returns it."""

    def __init__(self, recorder: Recorder, operation: Operation, tensor: torch.Tensor | None = None) -> None:
        self.recorder, self.operation, self.tensor = recorder, operation, tensor

    def wait(self) -> torch.Tensor | None:
        """Order the compute stream after the operation; over gloo, the processor waits."""
        if self.operation.stream is None:
            self.recorder.add(self.operation)
        else:
            self.recorder.add(Operation("kernel", COMPUTE, (self.operation,), label="wait"))
        return self.tensor

    def is_completed(self) -> bool:
        """Return True: the check of connections at the start is not modelled."""
        return True


class Recorder:
    """Stands in for ``torch.distributed`` and ``torch.cuda`` in one rank."""

    ProcessGroupNCCL = types.SimpleNamespace(Options=lambda **options: options)

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.program = Program()
        self.calls = 0  # of new_group
        self.label = ""  # what the executor runs now
        self.lazy = False  # CUDA loads a kernel at its first launch
        self.launches: Counter[Hashable] = Counter()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.last = 0  # the first operation of the last window
        self._last: Operation | None = None  # the newest operation on the compute stream

    def add(self, operation: Operation) -> Operation:
        """Record an operation."""
        operation.label = self.label
        self.program.operations.append(operation)
        if operation.stream == COMPUTE:
            self._last = operation
        return operation

    def begin(self) -> None:
        """Discard what was recorded so far: the check of connections."""
        self.program.operations.clear()
        self._last = None

    def kernel(self, *what: Hashable) -> None:
        """Record a kernel of a stage. ``what``: all that decides which one; the second step has another one, too."""
        new = self.launches[what] < (2 if what[0] == "step" else 1)
        self.launches[what] += 1
        self.add(Operation("kernel", COMPUTE, loads=self.lazy and new))

    # -- torch.distributed -----------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return the rank."""
        return self.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.world_size

    def new_group(self, ranks: Sequence[int], backend: str = "gloo", **options: Any) -> Any:
        """Return a group, which is the number of the call: the same on every rank."""
        self.calls += 1
        if options.get("device_id") is not None and options["device_id"].index is None:
            raise ValueError("init_process_group device_id parameter must be an accelerator with an index")
        if backend == "nccl" and self.rank in ranks:
            self.program.communicators.append(self.calls)
        return types.SimpleNamespace(number=self.calls, ranks=tuple(ranks), backend=backend)

    def isend(self, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Work:
        """Record a send."""
        if group is None:
            return Work(self, self.add(Operation("gloo-send", tensor=(self.rank, peer, tag, tuple(tensor.shape)))))
        return Work(self, self._transfer("send", group, tensor))

    def irecv(self, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Work:
        """Record a receive. Over gloo, it happens where it is waited for."""
        if group is None:
            return Work(self, Operation("gloo-receive", tensor=(peer, self.rank, tag, tuple(tensor.shape))))
        return Work(self, self._transfer("receive", group, tensor))

    @staticmethod
    def P2POp(op: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        """Return an operation of a batch."""
        return types.SimpleNamespace(op=op, tensor=tensor, peer=peer, group=group)

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Work]:
        """Record operations in one direction of one group: torch makes them one kernel with one work."""
        first = operations[0]
        assert all((o.op, o.peer, o.group) == (first.op, first.peer, first.group) for o in operations)
        kind = "send" if first.op == self.isend else "receive"
        return [Work(self, self._transfer(kind, first.group, *(o.tensor for o in operations)))]

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Work:
        """Record a sum. Over gloo, it happens where it is waited for."""
        if group is None or group.backend == "gloo":
            members = tuple(range(self.world_size)) if group is None else group.ranks
            work = self.sum_on_host(members, tensor)
            if not async_op:
                work.wait()
            return work
        return Work(self, self._transfer("sum", group, tensor))

    def sum_on_host(self, members: tuple[int, ...], tensor: torch.Tensor) -> Work:
        """Return a sum over gloo, which is recorded where it is waited for."""
        assert not tensor.is_cuda and self.rank in members
        return Work(self, Operation("gloo-sum", tensor=tuple(tensor.shape), members=members), tensor)

    def reduce_scatter_tensor(self, total: torch.Tensor, parts: torch.Tensor, group: Any, async_op: bool) -> Work:
        """Record a sum of which every member gets a part."""
        assert async_op and parts.shape == (len(group.ranks), *total.shape) and parts.dtype == total.dtype
        return Work(self, self._transfer("reduce-scatter", group, total, parts))

    def all_gather_into_tensor(self, every: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool) -> Work:
        """Record a gather."""
        assert async_op and every.shape == (len(group.ranks), *part.shape) and every.dtype == part.dtype
        return Work(self, self._transfer("all-gather", group, every, part))

    def _transfer(self, kind: str, group: Any, *tensors: torch.Tensor) -> Operation:
        assert group.backend == "nccl" and self.rank in group.ranks
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        after = () if self._last is None else (self._last,)  # torch orders the stream after the current one
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return self.add(Operation(kind, group.number, after, shapes, group.ranks))

    # -- torch.cuda ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Record that the processor waits for the compute stream."""
        self.add(Operation("synchronize"))


@contextlib.contextmanager
def in_place(recorder: Recorder) -> Iterator[None]:
    """Use the recorder in place of torch.distributed, and fake tensors in place of real ones."""
    allow_cuda()
    with pytest.MonkeyPatch.context() as patch, recorder.mode:
        for module in (distributed, nccl):
            patch.setattr(module, "dist", recorder)
        patch.setattr(distributed, "OrderedSums", functools.partial(_HostSums, recorder))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: recorder)
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
        patch.setattr(distributed, "Departures", _Departures)
        yield


class _Departures:
    """Keeps nothing: a send over gloo is complete when it is recorded."""

    def add(self, work: Work, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


class _HostSums:
    """Stands in for ``OrderedSums``: a sum happens where it is waited for."""

    def __init__(self, recorder: Recorder, ranks: Sequence[int], *_: Any) -> None:
        self.recorder, self.ranks = recorder, tuple(ranks)

    def start(self, tensor: torch.Tensor) -> Work:
        """Return a sum."""
        return self.recorder.sum_on_host(self.ranks, tensor)


class Run:
    """A layout whose processes are recorded.

    ``values``: in each message; ``order``: of each value, as in the plan; ``team``: the members of each rank;
    ``size``: of microbatch (minibatch, microbatch), by default another one for each.
    """

    def __init__(
        self,
        schedule: str,
        spec: ScheduleSpec,
        edges: StageEdges,
        *,
        values: int = 1,
        order: tuple[int, ...] = (),
        team: int = 1,
        size: Callable[[int, int], int] | None = None,
    ) -> None:
        self.order, self.team = order, team
        self.spec, self.edges, self.name = spec, edges, schedule
        self.size = size or (lambda t, j: t * spec.num_microbatches + j + 1)
        self.schedule = lower(make(schedule, spec), edges)
        self.messages = MessagePlan(
            {edge: tuple(f"f{edge}.{i}" for i in range(values)) for edge in sorted(edges.forward)},
            {edge: tuple(f"b{edge}.{i}" for i in range(values)) for edge in sorted(edges.backward)},
            (),
        )
        self.channels = channels(self.messages, spec)
        self.groups = sorted({ranks for ranks in spec.stage_ranks if len(ranks) > 1})
        self.on_host = self.groups  # groups with sums over gloo
        if team > 1:
            self.channels = channels_of(self.channels, spec.num_ranks, team)
            self.groups = groups_of(self.groups, spec.num_ranks, team)
            self.on_host = sorted({*self.groups, *agreeing_groups(spec.num_ranks, team)})
        parts = self.messages.forward, self.messages.backward
        names = [value for part in parts for message in part.values() for value in message]
        # every value has its own shape, by which the model compares both ends
        self.numbers = {value: index + 1 for index, value in enumerate(names)}

    @functools.cached_property
    def communicators(self) -> Communicators:
        """The communicators of the run."""
        return Communicators.of(self.channels, self.groups)

    @property
    def num_processes(self) -> int:
        """The number of processes: the members of all ranks."""
        return self.spec.num_ranks * self.team

    def transport(self) -> Any:
        """Return the end of the process whose recorder is in place."""
        processes = distributed.ProcessTransport(
            self.channels, self.on_host, device=CUDA, communicators=self.communicators
        )
        return processes if self.team == 1 else TeamTransport(processes, self.team)

    def record(self, process: int, *, windows: int = 0) -> Recorder:
        """Run one process of the run, and return what it recorded.

        ``windows``: how many windows of minibatches run, with kernels that are loaded at their first launch; 0: one
        window, and all kernels are loaded.
        """
        recorder = Recorder(process, self.num_processes)
        recorder.lazy = windows > 0
        with in_place(recorder):
            transport = self.transport()
            recorder.begin()
            runners, stepper = self._stages(transport, recorder)
            executor = Executor(
                plan=None,  # type: ignore[arg-type]  # the executor does not read it
                request=self.spec,
                runners=runners,
                stepper=stepper,
                transport=transport,
                reporter=_Reporter(recorder),  # type: ignore[arg-type]
            )
            executor.kernels = FirstKernels(self.spec) if windows else None
            for number in range(max(windows, 1)):
                recorder.last = len(recorder.program.operations)
                first = self.spec.first_minibatch + number * self.spec.num_minibatches
                executor.run(turns(self._schedule_of(first), transport.rank), self._minibatches(first))
        return recorder

    @functools.cache  # noqa: B019  # as long as the run
    def _schedule_of(self, first: int) -> Schedule:
        """Return the schedule of the window of minibatches from ``first`` on."""
        if first == self.spec.first_minibatch:
            return self.schedule
        return lower(make(self.name, replace(self.spec, first_minibatch=first)), self.edges)

    def _stages(self, transport: Any, recorder: Recorder) -> tuple[dict[int, Any], Any]:
        """Return the stages of a rank, and what steps them."""
        own = [stage for stage, ranks in enumerate(self.spec.stage_ranks) if transport.rank in ranks]
        if self.team == 1:
            return {stage: _Runner(self, stage, recorder) for stage in own}, _Stepper(self, transport, recorder)
        members = {stage: MemberRunner(self, stage, recorder, transport) for stage in own}
        return members, MemberStepper(self, members, recorder, transport)

    def _minibatches(self, first: int) -> dict[int, list[Microbatch]]:
        m = self.spec.num_microbatches
        recording: Any = types.SimpleNamespace(
            name="",
            message_plan=self.messages,
            specs={v: TensorSpec((n, "i"), "float32", order=self.order) for v, n in self.numbers.items()},
        )
        return {
            t: [Microbatch({}, 1.0, {"i": self.size(t, j)}, recording) for j in range(m)]
            for t in range(first, first + self.spec.num_minibatches)
        }

    def values(self, edges: Mapping[Any, Sequence[str]], stage: int, key: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Return the values that a stage sends over these edges for a microbatch."""
        number = self.size(*key)
        names = [value for edge, values in edges.items() if edge[0] == stage for value in values]
        return {name: torch.empty((self.numbers[name], number), device=CUDA) for name in names}

    @staticmethod
    def collectives_of(recorder: Recorder) -> list[Operation]:
        """Return the collectives that a process issued over NCCL."""
        return [operation for operation in recorder.program.operations if operation.kind in COLLECTIVES]

    def messages_of(self, recorder: Recorder) -> list[Operation]:
        """Return the sends that a rank issued over NCCL."""
        return [operation for operation in recorder.program.operations if operation.kind == "send"]


class _Runner:
    def __init__(self, run: Run, stage: int, recorder: Recorder) -> None:
        self.run, self.index, self.recorder = run, stage, recorder
        code = types.SimpleNamespace(INPUTS=())
        self.variants = {"": types.SimpleNamespace(code=code)}
        self.versions = types.SimpleNamespace(use=lambda version: None)

    def forward(self, key: tuple[int, int], *_: object) -> dict[str, torch.Tensor]:
        self.recorder.kernel("F", self.index, self.run.size(*key))
        return self.run.values(self.run.messages.forward, self.index, key)

    def backward(self, key: tuple[int, int], arrived: object) -> dict[str, torch.Tensor]:
        self.recorder.kernel("B", self.index, self.run.size(*key))
        return self.run.values(self.run.messages.backward, self.index, key)

    backward_inputs = backward

    def backward_weights(self, key: tuple[int, int]) -> None:
        self.recorder.kernel("W", self.index, self.run.size(*key))


class _Stepper:
    """Sums the gradients of replicated stages: started in the last backward, waited for at R."""

    def __init__(self, run: Run, transport: distributed.ProcessTransport, recorder: Recorder) -> None:
        self.run, self.transport, self.recorder = run, transport, recorder
        self.pending: dict[int, Any] = {}

    @contextlib.contextmanager
    def overlapping(self, stage: int) -> Iterator[None]:
        yield
        self._start(stage)

    def _start(self, stage: int) -> None:
        ranks = self.run.spec.stage_ranks[stage]
        if len(ranks) > 1:
            self.pending[stage] = self.transport.start_all_reduce(ranks, torch.empty((stage + 1, 0, 7), device=CUDA))

    def reduce(self, stage: int, minibatch: int) -> None:
        if stage not in self.pending:
            self._start(stage)
        pending = self.pending.pop(stage, None)
        if pending is not None:
            pending.wait()

    def step(self, stage: int, minibatch: int) -> None:
        self.recorder.kernel("step", stage)


class _Reporter:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def at(self, activity: str, *, waiting: bool) -> None:
        self.recorder.label = activity


def recorded(run: Run, processes: Sequence[int] | None = None, *, windows: int = 0) -> list[Recorder]:
    """Record processes of a run, all by default."""
    numbers = range(run.num_processes) if processes is None else processes
    return [run.record(process, windows=windows) for process in numbers]
