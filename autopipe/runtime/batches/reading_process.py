"""The process beside rank 0: it reads the data of a run, and runs the Python of forward and loss (``beside``)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from autopipe.draws import exclusive
from autopipe.ir.graph import Graph
from autopipe.runtime.audit.batch import UnstorableBatchError
from autopipe.runtime.batches.graph_variants import GraphVariants
from autopipe.runtime.batches.shared import share
from autopipe.runtime.batches.source import Place, Source, Taken
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.transport.base import ThreadHub, ThreadTransport
from autopipe.trace.tape.guard import Follows, Guard, WithoutWeights
from autopipe.workload import Workload


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

    if "split" in workload.hooks:  # it may draw from the generators of the data
        return "split runs in the ranks"
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
    _weights: WithoutWeights = field(init=False)
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
        assert self.guard.tape is not None, "nothing has run yet"
        self._weights = WithoutWeights(self.guard.tape.model)
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
        taken = self._taken(self._source, step)
        if taken is None:
            return False
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

    def _taken(self, source: Source, step: int) -> list[Taken] | None:
        """Return the next minibatch; None, and say so, if the data reads weights: rank 0 has some of them."""
        self._weights.are_read = False
        try:
            with self._weights:
                return source.read(step, 1)
        except Exception:
            if not self._weights.are_read:
                raise
        self.link.send("minibatch", why="the data reads the weights of the model")
        return None

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
            taken = self._taken(self._evaluation, 0)
            for minibatch in taken or ():
                for part in self.workload.split(minibatch.item, self.context.plan.num_microbatches):
                    self._variants.known_for(part, training=False)
                self._send(minibatch)
        if taken is not None:
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
