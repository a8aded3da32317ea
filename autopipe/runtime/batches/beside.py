"""The data of a training, read in a process beside rank 0, which also runs the Python of forward and loss.

::

    read_beside (process of its own)                               rank 0: Beside --> OneReads
      Source -> item -> GraphVariants: its recordings -> Guard
                    <-- {"do": "seek", ...}, {"do": "until", "step": 7}, {"do": "evaluate", ...}, "compare", "stop"
                    --> "began" "sought" "minibatch" "compared" "end"; "event", "at" of a Reporter; an error, its end

It reads at most ``AHEAD`` minibatches ahead, never past an evaluation, and runs the user's Python in the order of plain
training. A minibatch arrives after it was compared; but the first one, if the model does not vary, is compared after
its step, so that the first step does not wait for that. Its tensors are in memory that both processes map.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from autopipe.draws import exclusive
from autopipe.errors import InternalError, RunError
from autopipe.ir.graph import Graph
from autopipe.runtime.audit.batch import UnstorableBatchError
from autopipe.runtime.batches.graph_variants import GraphVariants
from autopipe.runtime.batches.shared import share, shared
from autopipe.runtime.batches.source import Place, Source, Taken
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.transport.base import ThreadHub, ThreadTransport
from autopipe.trace.tape.guard import Follows, Guard, not_compared
from autopipe.workload import Workload

AHEAD = 3
"""Minibatches that are read before rank 0 needs them."""
DOING = "reading the data and running the model's Python beside rank 0"
INSTEAD = "if the model's Python does the same for each batch, --data-reader one reads in rank 0, and compares nothing"
_WAIT_SECONDS = 1.0


class Telling(Protocol):
    """The process, from the side of rank 0: a ``workers.worker.Worker``."""

    ended: bool
    error: Exception | None

    def receive(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that it has sent."""

    def tell(self, **fields: Any) -> None:
        """Send a message."""

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a message."""


# --- rank 0 -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Beside:
    """What rank 0 knows of the process."""

    process: Telling
    job: Job
    reporter: Reporter
    waits: Callable[[], None] = lambda: None
    # why it does not read; "" if it does; None: not known yet
    why_not: str | None = None
    _until: int = 0

    @property
    def reads(self) -> bool:
        """Whether it reads the data. Says why not."""
        if self.why_not is None:
            self.why_not = self.message("began")["why"]
            if self.why_not:
                self.leave(self.why_not)
        return not self.why_not

    def leave(self, why: str) -> None:
        """Let rank 0 read from now on."""
        self.why_not = why
        self.process.tell(do="stop")
        self.reporter.event("note", text=not_compared(why))

    def message(self, *kinds: str) -> dict[str, Any]:
        """Return the next message of one of some kinds, with its kind. Raises: the error that ended the process."""
        while True:
            for kind, fields in self.process.receive():
                if kind == "at":
                    self.reporter.at(fields["text"], waiting=False)
                elif kind == "event":
                    self.reporter.event(fields.pop("name"), **fields)
                elif kind in kinds:
                    return {"kind": kind, **fields}
                else:
                    raise InternalError(f"the process beside rank 0 has sent {kind!r} in place of {kinds}")
            if self.process.ended:
                raise self.process.error or InternalError("the process beside rank 0 has ended before the training")
            self.waits()
            self.process.wait(_WAIT_SECONDS)

    def may_read(self, step: int) -> None:
        """Let it read ahead of the minibatch of a step."""
        every, steps = self.job.evaluate_every, self.job.steps
        until = step + 1 + AHEAD
        if every:  # evaluation data may depend on what data did before, and the other way round
            until = min(until, step + every - step % every)
        until = min(until, steps) if steps else until
        if until > self._until:
            self._until = until
            self.process.tell(do="until", first=step, step=until)


@dataclass(slots=True)
class BesideSource:
    """Minibatches that the process reads, in place of those of a ``Source``."""

    beside: Beside
    # reads if the process cannot
    own: Source
    workload: Workload
    training: bool = True
    # called while rank 0 waits for data
    reading: Callable[[], None] = lambda: None
    _num_read: int = 0
    # the latest minibatch was compared
    _is_compared: bool = True

    @property
    def _is_used(self) -> bool:
        self.own.reading = self.beside.waits = self.reading
        return self.beside.reads

    def seek(self, place: Place, *, compare: bool = True) -> None:
        """As ``Source.seek``."""
        if not self._is_used:
            return self.own.seek(place, compare=compare)
        self.own.place = place
        self.beside.process.tell(do="seek", place=dataclasses.asdict(place), compare=compare)
        self.beside.message("sought")
        return None

    def read(self, step: int, most: int) -> list[Taken]:
        """As ``Source.read``. Raises: also the error of the comparison, or that of the end of the process."""
        if not self._is_used:
            return self.own.read(step, most)
        taken: list[Taken] = []
        self.own.reporter.at("reading data", waiting=False)
        while len(taken) < most:
            self.compared()
            if self.training:
                self.beside.may_read(step + len(taken))
            else:
                self.beside.process.tell(do="evaluate", first=not self._num_read)
            answer = self.beside.message("minibatch", "end")
            if answer["kind"] == "end":
                break
            if answer["why"]:
                return self._refused(answer["why"], step, most)
            if answer["dimensions"] is not None:
                self.workload.adopt_dimensions(answer["dimensions"])
            item = shared(answer["tree"], answer["tensors"], answer["memory"])
            place = Place(**answer["place"])
            each = {name: tuple(answer[name]) for name in ("recordings", "numbers", "followed")}
            taken.append(Taken(item, bytes.fromhex(answer["digest"]), place, **each))
            self._num_read += 1
            self._is_compared = answer["compared"]
        return taken

    def compared(self) -> None:
        """Let the process compare a minibatch that was not compared. Raises: the error of the comparison."""
        if not self._is_compared:
            self._is_compared = True
            self.beside.process.tell(do="compare")
            self.beside.message("compared")

    def _refused(self, why: str, step: int, most: int) -> list[Taken]:
        """Read in rank 0 if the first minibatch cannot be sent. Raises: RunError if it is a later one."""
        if self._num_read or not self.training:
            raise RunError(f"minibatch {step + 1} cannot be sent to rank 0: {why}", remedy=INSTEAD)
        self.beside.leave(why)
        place, self.own.place = self.own.place, Place()
        self.own.seek(place, compare=False)  # the process has compared it
        return self.own.read(step, most)


# --- the process ------------------------------------------------------------------------------------------------------


class Link(Protocol):
    """The way to rank 0: a ``workers.task.Link``."""

    def send(self, kind: str, *, memory: int | None = None, **fields: Any) -> None:
        """Send a message."""

    def heard(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message of rank 0."""


class _Events:
    """A reporter whose events rank 0 reports."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def at(self, instruction: str, *, waiting: bool) -> None:
        if instruction != "reading data":  # rank 0 says so when it waits
            self._link.send("at", text=instruction)

    def event(self, kind: str, **fields: Any) -> None:
        self._link.send("event", name=kind, **fields)

    def note(self, text: str) -> None:
        self.event("note", text=text)

    def may_begin(self, step: int, end: int) -> bool:
        return True


def read_beside(task: Any, link: Link) -> None:
    """Read the data of a run for rank 0 until it says stop. ``task``: the path of the run."""
    run = RunDirectory(Path(task["run"]))
    plan, graph = run.plan(), run.graph()
    with exclusive():
        workload = Workload.from_spec(plan.workload)
    why = why_not(graph, workload)
    reading = None if why else _Reading(run, workload, RunContext.of(plan, graph), link)
    if reading is not None and not graph.varies:
        why = reading.guard.why_not
    link.send("began", why=why)
    if reading is not None and not why:
        reading.serve()


def why_not(graph: Graph, workload: Workload) -> str:
    """Return why the data of a model is read in rank 0, where its stages run; "" if a process of its own can read."""
    from autopipe.trace.tape import why_unknown  # it imports the capture

    for hook in ("split",) if graph.varies else ("after_step", "split"):  # data may depend on what they do
        if hook in workload.hooks:
            return f"{hook} runs in the ranks"
    if not graph.batch.is_plain:
        return "the batch has containers or values of other types than torch's and Python's"
    return why_unknown(graph)


@dataclass(slots=True)
class _Reading:
    """The state of the process."""

    run: RunDirectory
    workload: Workload
    context: RunContext
    link: Link
    _job: Job = field(init=False)
    _source: Source = field(init=False)
    _evaluation: Source = field(init=False)
    _variants: GraphVariants = field(init=False)
    guard: Guard = field(init=False)
    # of the recordings that rank 0 knows
    _names: set[str] = field(default_factory=set)
    _dimensions: Any = None
    _is_first: bool = True
    _sent: tuple[int, Sequence[Any]] | None = None  # step and parts of a minibatch that is not compared

    def __post_init__(self) -> None:
        job = self._job = self.run.job()
        reporter = _Events(self.link)
        alone = ThreadTransport(ThreadHub(1), 0)
        self._variants = GraphVariants(self.run, job, self.context, self.workload, alone, reporter, {})
        self.guard = Guard.of(self.workload, reporter.note, self.context.graph)
        self._source = Source(
            lambda epoch: self.workload.items(job.batch_size or None, epoch=epoch),
            self.workload.name,
            reporter,
            epochs=job.epochs,
            steps=job.steps,
            replay=job.replay,
            speaks=True,
            passed=lambda item: self.guard.replay(item, self.context.plan.num_microbatches),
        )
        self._names = set(self._recordings())

    def _recordings(self) -> list[str]:
        return [recording.name for recording in (*self._variants.training, *self._variants.evaluation)]

    def serve(self) -> None:
        """Do what rank 0 says, and read ahead as far as it allows."""
        step, until, ended = -1, -1, False
        while True:
            reads = step < until and not ended and self._sent is None
            message = self.link.heard(0.0 if reads else None)
            if message is None:
                ended = not self._read(step)
                step += 1
            elif message["do"] == "stop":
                return
            elif message["do"] == "compare":
                self._compare_sent()
            elif message["do"] == "until":
                step, until = message["first"] if step < 0 else step, message["step"]
            elif message["do"] == "seek":
                self._source.seek(Place(**message["place"]), compare=message["compare"])
                self.link.send("sought")
            else:
                self._evaluate(first=message["first"])

    def _read(self, step: int) -> bool:
        """Read, compare and send a minibatch; return whether there was one."""
        taken = self._source.read(step, 1)
        for minibatch in taken:
            parts = self.workload.split(minibatch.item, self.context.plan.num_microbatches)
            if self._is_first and not self.context.graph.varies:
                for part in parts:
                    self._variants.known_for(part)
                self._send(minibatch, is_compared=False)
                self._sent = step, parts
            else:
                follows = self._compare(step, parts)
                followed = tuple(each.recording for each in follows) if self.context.graph.varies else ()
                self._send(replace(minibatch, numbers=tuple(each.numbers for each in follows), followed=followed))
                self.guard.after_minibatch()
            self._is_first = False
        return self._sent_or_end(taken)

    def _compare(self, step: int, parts: Sequence[Any]) -> list[Follows]:
        """Run the user's Python for a minibatch. Raises: RunError if it is not what the stages run."""
        follows = []
        for index, part in enumerate(parts):
            write = functools.partial(self._variants.write, part, step)
            follows.append(self.guard.follow(part, step, index, self._variants.known_for(part), write))
        return follows

    def _compare_sent(self) -> None:
        """Compare the minibatch that was sent before."""
        if self._sent is not None:
            self._compare(*self._sent)
            self._sent = None
            self.link.send("compared")
            self.guard.after_minibatch()

    def _evaluate(self, *, first: bool) -> None:
        """Read and send the next minibatch of the evaluation data. ``first``: from its beginning."""
        if first:
            size = self._job.batch_size or None
            self._evaluation = Source(
                lambda epoch: self.workload.evaluation_items(None, default=size),
                self.workload.name,
                self._source.reporter,
                epochs=1,
            )
        with torch.no_grad():
            taken = self._evaluation.read(0, 1)
            for minibatch in taken:
                for part in self.workload.split(minibatch.item, self.context.plan.num_microbatches):
                    self._variants.known_for(part, training=False)
                self._send(minibatch)
        self._sent_or_end(taken)

    def _sent_or_end(self, taken: list[Taken]) -> bool:
        if not taken:
            self.link.send("end")
        return bool(taken)

    def _send(self, minibatch: Taken, *, is_compared: bool = True) -> None:
        try:
            tree, tensors, memory = share(minibatch.item)
        except UnstorableBatchError as error:
            self.link.send("minibatch", why=str(error))
            return
        names = [name for name in self._recordings() if name not in self._names]
        self._names.update(names)
        known = dict(self.workload.cutting.known)
        dimensions, self._dimensions = None if known == self._dimensions else known, known
        try:
            self.link.send(
                "minibatch",
                memory=memory,
                why="",
                compared=is_compared,
                tree=tree,
                tensors=tensors,
                digest=minibatch.digest.hex(),
                place=dataclasses.asdict(minibatch.place),
                recordings=names,
                numbers=minibatch.numbers,
                followed=minibatch.followed,
                dimensions=dimensions,
            )
        finally:
            os.close(memory)
