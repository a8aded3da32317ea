"""Execute the recorded operations of all ranks, as CUDA and NCCL would, and find deadlocks.

Each rank has a processor that issues operations in program order, CUDA streams, and hardware queues to which the
streams are mapped. A stream runs its operations one after the other. A queue starts its operations in order: one that
must wait (for its stream or an event) blocks those behind it, of other streams too. Transfers of a communicator run on
one stream in order; a send and its receive end together, when both run. So do collectives, when all members run. The
processor stops while ``depth`` operations are unfinished, where the program waits for the device, before a kernel that
is loaded while anything is unfinished, and at a sum over gloo until all members have reached it.

Sources: CUDA C++ Programming Guide, sections "Streams" and "Lazy Loading"; NCCL user guide, "Group calls" and
"Point-to-point"; torch's ProcessGroupNCCL (a stream of the pool for each communicator, ``wait`` orders streams). Time
has no meaning here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

COMPUTE = "compute"  # the stream of kernels
COLLECTIVES = ("sum", "reduce-scatter", "all-gather")


@dataclass(slots=True, eq=False)
class Operation:
    """One operation on a stream, or an action of the processor."""

    # "kernel", "send", "receive", a collective;
    # of the processor: "synchronize", "gloo-send", "gloo-receive", "gloo-sum"
    kind: str
    stream: Hashable = None  # "compute", or the communicator; None: the processor
    after: tuple[Operation, ...] = ()  # events that it waits for
    tensor: Hashable = None  # what is transferred: its shape identifies it
    members: tuple[int, ...] = ()  # of the communicator
    loads: bool = False  # a kernel that is loaded first, which waits until everything before it is complete
    done: bool = False
    label: str = ""  # for messages: the instruction


@dataclass(slots=True)
class Program:
    """What one rank does."""

    operations: list[Operation] = field(default_factory=list)  # in the order in which they are issued
    communicators: list[Hashable] = field(default_factory=list)  # of this rank, in the order of their creation


class Deadlock(AssertionError):
    """Some ranks cannot continue."""


class OrderMismatch(AssertionError):
    """The two ends of a communicator disagree on what is transferred next."""


@dataclass(slots=True)
class _Rank:
    program: Program
    streams: int
    hardware: int
    slots: dict[Hashable, int] = field(default_factory=dict)  # communicator -> stream of the pool
    issued: int = 0
    unfinished: int = 0
    last: dict[int, Operation] = field(default_factory=dict)  # stream -> its newest operation
    before: dict[Operation, Operation] = field(default_factory=dict)  # -> the one before it on its stream
    queues: dict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self.slots = {each: index % self.streams for index, each in enumerate(self.program.communicators)}

    @property
    def operations(self) -> list[Operation]:
        return self.program.operations

    def stream(self, operation: Operation) -> int:
        """Return the stream of an operation; -1: that of kernels."""
        return -1 if operation.stream == COMPUTE else self.slots[operation.stream]

    def queue(self, stream: int) -> deque[Operation]:
        """Return the hardware queue of a stream."""
        return self.queues[-1 if stream == -1 else stream % self.hardware]

    @property
    def synchronized(self) -> bool:
        """Whether the stream of kernels has done everything."""
        return -1 not in self.last or self.last[-1].done


def execute(programs: Sequence[Program], *, queues: int, streams: int, depth: int = 1024) -> None:
    """Execute the programs of all ranks.

    ``queues``: hardware queues of a device; ``streams``: streams in torch's pool. Communicators get the streams in
    turn, and the streams the queues in turn. Kernels have a stream of another priority, with a queue of its own.

    Raises: Deadlock naming the first operation that blocks each rank; OrderMismatch.
    """
    for program in programs:
        for operation in program.operations:
            operation.done = False
    ranks = [_Rank(program, streams, queues) for program in programs]
    machine = _Machine(ranks, depth)
    while machine.advance():
        pass
    stuck = [rank for rank, state in enumerate(ranks) if state.issued < len(state.operations) or state.unfinished]
    if stuck:
        raise Deadlock("; ".join(f"rank {rank}: {machine.blocked(rank)}" for rank in stuck[:8]))


class _Machine:
    def __init__(self, ranks: list[_Rank], depth: int) -> None:
        self.ranks, self.depth = ranks, depth
        self.running: dict[Hashable, dict[int, Operation]] = defaultdict(dict)  # communicator -> rank -> operation
        self.mail: dict[Hashable, int] = defaultdict(int)  # tensor over gloo -> copies that have arrived

    def advance(self) -> bool:
        """Let every rank do what it can, and return whether anything happened."""
        moved = [self._advance(rank) for rank in range(len(self.ranks))]
        return any(moved)

    def _advance(self, rank: int) -> bool:
        moved, state = False, self.ranks[rank]
        while self._issue(rank, state):
            moved = True
        for queue in state.queues.values():
            while queue and self._start(rank, state, queue[0]):
                queue.popleft()
                moved = True
        return moved

    def _issue(self, rank: int, state: _Rank) -> bool:
        if state.issued == len(state.operations):
            return False
        operation = state.operations[state.issued]
        if operation.stream is None:
            if not self._act(rank, operation, state):
                return False
            operation.done = True
        else:
            if state.unfinished >= self.depth:
                return False
            if operation.loads and state.unfinished:
                return False
            stream = state.stream(operation)
            if stream in state.last:
                state.before[operation] = state.last[stream]
            state.last[stream] = operation
            state.queue(stream).append(operation)
            state.unfinished += 1
        state.issued += 1
        return True

    def _act(self, rank: int, operation: Operation, state: _Rank) -> bool:
        if operation.kind == "synchronize":
            return state.synchronized
        if operation.kind == "gloo-sum":
            return self._meet(rank, operation)
        if operation.kind == "gloo-send":
            self.mail[operation.tensor] += 1
            return True
        if not self.mail[operation.tensor]:
            return False
        self.mail[operation.tensor] -= 1
        return True

    def _meet(self, rank: int, operation: Operation) -> bool:
        if not operation.done:
            arrived = self.running["gloo", operation.members]
            arrived[rank] = operation
            if len(arrived) == len(operation.members):
                _check_ends(list(arrived.values()))
                for each in arrived.values():
                    each.done = True
                arrived.clear()
        return operation.done

    def _start(self, rank: int, state: _Rank, operation: Operation) -> bool:
        before = state.before.get(operation)
        if (before is not None and not before.done) or not all(event.done for event in operation.after):
            return False
        if operation.kind == "kernel":
            self._finish(rank, operation)
            return True
        running = self.running[operation.stream]
        running[rank] = operation
        if len(running) == len(operation.members):
            _check_ends(list(running.values()))
            for member, other in list(running.items()):
                self._finish(member, other)
            running.clear()
        return True

    def _finish(self, rank: int, operation: Operation) -> None:
        operation.done = True
        self.ranks[rank].unfinished -= 1

    def blocked(self, rank: int) -> str:
        """Return the oldest operation of a rank that is not done."""
        operation = next(o for o in self.ranks[rank].operations if not o.done)
        return f"{operation.kind} of {operation.tensor} on {operation.stream} ({operation.label})"


def _check_ends(operations: list[Operation]) -> None:
    kinds = sorted(operation.kind for operation in operations)
    tensors = {operation.tensor for operation in operations}
    is_collective = len(set(kinds)) == 1 and kinds[0] in (*COLLECTIVES, "gloo-sum")
    if len(tensors) > 1 or (kinds != ["receive", "send"] and not is_collective):
        raise OrderMismatch(", ".join(f"{o.kind} of {o.tensor} ({o.label})" for o in operations))
