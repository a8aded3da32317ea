"""``GraphVariants``: the recordings of a run. A batch of a new shape or form gets its own stage code during the run.

All ranks read the same batches in the same order, so they meet a new shape together, between two minibatches. Rank 0
captures the model at that shape, verifies the capture, cuts it like the plan, and writes it to the folder of stage
files. The other ranks wait and then load their parts. The parameters stay where they are.

``generate`` writes the first recording for evaluation if the model takes another path in evaluation mode.

A model that varies does something else for batches of one shape, too. Only the process beside rank 0 runs its Python,
which it records as it runs (``known_for`` and ``write``), and names the recording of each microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from autopipe.errors import ArtifactError, AutopipeError, PlanError, RunError
from autopipe.generate import load_constants, load_divisor, load_stage
from autopipe.ir import artifact
from autopipe.ir.batch import BatchForm
from autopipe.ir.graph import Graph
from autopipe.ir.microbatch_loss import Shares
from autopipe.ir.plan import Plan
from autopipe.runtime.batches.on_device import Placement
from autopipe.runtime.batches.recording import Microbatch, Recording, refuse_other_kinds
from autopipe.runtime.batches.source import Taken
from autopipe.runtime.batches.unseen_forms import OTHER_LAYERS, OneBatch, free_sizes, many_shapes, other_batch
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Reporter
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.stage_runner import StageRunner, StageVariant
from autopipe.runtime.step.loss_weights import Divisors, divisors_of, divisors_of_parts, shares_of
from autopipe.runtime.transport.base import Transport
from autopipe.stage import Stage
from autopipe.trace import Capture
from autopipe.trace.numbers import tensors_of
from autopipe.trace.state.refusal import KEEP
from autopipe.workload import Workload
from autopipe.workload.batches.forms import form_of
from autopipe.workload.cutting.dimensions import BatchDimensions

EVALUATION = "evaluation"
_KEPT_PARTS = 1024


@dataclass(frozen=True, slots=True)
class _Part:
    """What parts of a minibatch have in common whose tensors differ only in their values."""

    # the leaves, each with its position among those of the part
    names: tuple[tuple[str, int], ...]
    recording: Recording
    # of the symbols of the graph
    sizes: Mapping[str, int]
    samples: int
    # how batches were cut when the samples were counted
    cutting: BatchDimensions


@dataclass(slots=True)
class GraphVariants:
    """The recordings of one rank."""

    run: RunDirectory
    job: Job
    context: RunContext
    workload: Workload
    transport: Transport
    reporter: Reporter
    runners: dict[int, StageRunner]
    # the recordings that batches may follow, that of the plan first
    training: list[Recording] = field(default_factory=list)
    evaluation: list[Recording] = field(default_factory=list)
    # of the last minibatch, in the mean loss of an evaluation
    weight: float = 0.0
    # called when a batch fits no recording, before this rank refuses it or waits for the others to record it
    before_recording: Callable[[], None] | None = None
    # called with (name, training) before a recording if only this rank reads; the other ranks call ``follow``
    announce: Callable[[str, bool], None] | None = None
    # the last minibatch of training
    latest: Any = None
    # the parts read so far, by training or not, structure and shapes
    _parts: dict[Any, _Part] = field(default_factory=dict)
    _count: int = 0
    # by recording: the first part that followed it; only of rank 0, which captures
    _examples: dict[str, Any] = field(default_factory=dict)
    # places of lengths for which the model needs several graphs: the sizes of such batches stay fixed
    _rigid: set[frozenset[tuple[str, int]]] = field(default_factory=set)
    _disagreement: float = 0.0

    def __post_init__(self) -> None:
        plan, graph = self.context.plan, self.context.graph
        own = Recording.of(plan, graph, divisor=_divisor(self.run.stages, plan, graph))
        self.training = [own]
        self.evaluation = self.training
        if (self.run.stages / EVALUATION / "plan.json").is_file():
            self.evaluation = [self._load(EVALUATION)]

    def microbatches(self, minibatch: Taken, placement: Placement, *, training: bool = True) -> list[Microbatch]:
        """Cut a minibatch. The factor of each part is its share of the loss (``runtime.step.loss_weights``).

        Raises: RunError if a part has other tensors than the captured batch, or if the model's Python decides what the
        stages run, and has not run.
        """
        item = minibatch.item
        if training:
            self.latest = item
        parts = self.workload.split(item, self.context.plan.num_microbatches)
        if self.context.graph.varies and not minibatch.followed:
            _refuse_without_python()
        followed = minibatch.followed or [None] * len(parts)
        read = [self._read(part, training=training, name=name) for part, name in zip(parts, followed, strict=True)]
        if self.context.graph.numbers:
            read = [
                ({**leaves, **tensors_of(part.recording.graph.numbers, values)}, part)
                for (leaves, part), values in zip(read, minibatch.numbers, strict=True)
            ]
        shares = self._shares(item, read)
        self.weight = shares.total
        return [
            Microbatch(placement.of(leaves, part.recording.graph.numbers), factor, part.sizes, part.recording)
            for (leaves, part), factor in zip(read, shares.factors, strict=True)
        ]

    def known_for(self, part: Any, *, training: bool = True) -> dict[str, tuple[Graph, Mapping[str, int]]]:
        """Return the graphs that a part of a minibatch may follow, by recording, with the sizes of its batch.

        Makes the first one if no recording fits and the model does not vary.
        """
        if not self.context.graph.varies:
            read = self._read(part, training=training)[1]
            return {read.recording.name: (read.recording.graph, read.sizes)}
        leaves, form = self.workload.leaves(part), form_of(part)
        refuse_other_kinds(self.context.graph, leaves)
        fitting = [recording for recording in self.training if recording.fits(leaves, form)]
        return {recording.name: (recording.graph, recording.sizes(leaves)) for recording in fitting}

    def write(self, part: Any, step: int, captured: Capture) -> str:
        """Write the stage code of what the Python of a model that varies has done for a part; return its name.

        Raises: RunError if these stages cannot run it.
        """
        from autopipe.runtime.batches.new_recording import write_recorded

        self._count += 1
        name = f"variant_{self._count}"
        self.reporter.at(f"writing {name}", waiting=False)
        folder, kind = self.run.stages / name, torch.device(self.job.device).type
        try:
            write_recorded(captured, self.workload, part, self.context, folder, kind)
            self.training.append(self._load(name))
        except AutopipeError as error:
            what = f"what the model does for minibatch {step + 1} cannot run in these stages: {error.what}"
            remedy = f"plan fewer stages (--gpus), or {KEEP}" if isinstance(error, PlanError) else error.remedy or KEEP
            raise RunError(what, where=error.where, remedy=remedy) from error
        text = f"generated stage code for what the model does for minibatch {step + 1}: stages/{name}"
        self.reporter.event("note", text=text)
        if self._count == self.job.max_shapes:
            text = f"warning: the model did something else {self._count} times: each further time takes as long"
            self.reporter.event("note", text=text)
        return name

    def _read(self, part: Any, *, training: bool, name: str | None = None) -> tuple[dict[str, torch.Tensor], _Part]:
        """Return the leaves of a part, and what follows from their shapes: looked up if a part like it was read.

        ``name``: of the recording that it follows; None: the first one that fits.
        """
        flat, structure = pytree.tree_flatten(part)
        like = None
        if all(type(leaf) is torch.Tensor and leaf.layout == torch.strided for leaf in flat):
            described = [(leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad) for leaf in flat]
            like = training, name, structure, tuple(described)
        with contextlib.suppress(TypeError):  # a container of the user whose context is not hashable
            known = self._parts.get(like)
            if known is not None and known.cutting is self.workload.cutting:
                return {name: flat[position] for name, position in known.names}, known
        leaves = self.workload.leaves(part)
        if name is None:
            recording = self._of(part, leaves, training=training)
        else:
            recording = next(known for known in self.training if known.name == name)
        if self.transport.leads:
            self._examples.setdefault(recording.name, part)
        places = {id(leaf): position for position, leaf in enumerate(flat)}
        names = tuple((name, places[id(leaf)]) for name, leaf in leaves.items())
        cutting, samples = self.workload.cutting, self.workload.num_samples(part)
        new = _Part(names, recording, recording.sizes(leaves), samples, cutting)
        if like is not None and len(places) == len(flat):  # the recording that a part fits first stays the first
            with contextlib.suppress(TypeError):
                if len(self._parts) >= _KEPT_PARTS:
                    self._parts.clear()
                self._parts[like] = new
        return leaves, new

    def divisors(self, item: Any, parts: Sequence[Any]) -> Divisors | None:
        """Return the divisors of the loss in a minibatch and its parts; None if it divides by the samples."""
        return self._divisors(item, [self._read(part, training=True) for part in parts])

    def divisors_as_cut(self, item: Any) -> Divisors | None:
        """Return the divisors of the loss in a minibatch and the parts into which the run cuts it."""
        return self.divisors(item, self.workload.split(item, self.context.plan.num_microbatches))

    def _divisors(self, item: Any, parts: Sequence[tuple[Mapping[str, torch.Tensor], _Part]]) -> Divisors | None:
        each, recording = [leaves for leaves, _ in parts], parts[0][1].recording
        differ = self.context.graph.varies and any(part.recording is not recording for _, part in parts)
        if self.workload.cuts_by_dimension(item) and not differ:
            whole = self.workload.leaves(item) if recording.divisor is not None else {}
            return divisors_of(recording.divisor, whole, each)
        return divisors_of_parts([part.recording.divisor for _, part in parts], each)

    def _shares(self, item: Any, parts: Sequence[tuple[Mapping[str, torch.Tensor], _Part]]) -> Shares:
        """Return the shares of parts. Reports the first minibatch whose loss terms require different shares."""
        recording = parts[0][1].recording
        shares = shares_of(self._divisors(item, parts), [part.samples for _, part in parts])
        if shares.disagreement and not self._disagreement:
            self._disagreement = shares.disagreement
            if self.transport.leads:
                self.reporter.event("note", text=_disagreement(recording.graph.divisor, shares.disagreement))
        return shares

    def known(self, *, training: bool) -> list[Recording]:
        """Return the recordings that batches of training, or of evaluation, may follow."""
        return self.training if training else self.evaluation

    def follow(self, name: str, *, training: bool) -> None:
        """Wait for a recording that rank 0 makes of a batch that this rank does not read, and load it."""
        self._count += 1
        self.reporter.at(f"waiting for {name}", waiting=True)
        self.transport.barrier()
        self.transport.barrier()
        self.known(training=training).append(self._load(name))

    def _of(self, part: Any, leaves: Mapping[str, torch.Tensor], *, training: bool) -> Recording:
        form, known = form_of(part), self.known(training=training)
        for recording in known:
            if recording.fits(leaves, form):
                return recording
        if self.before_recording is not None:
            self.before_recording()
        refuse_other_kinds(known[0].graph, leaves)
        if self._count == self.job.max_shapes and self.transport.leads:
            self.reporter.event("note", text=many_shapes(known[0].graph.batch, part, form, self._count))
        self._count += 1
        known.append(self._record(part, form, training=training))
        return known[-1]

    def _record(self, part: Any, form: BatchForm, *, training: bool) -> Recording:
        """Record a new shape or form, together with the other ranks."""
        name = f"shape_{self._count}" if training or self.evaluation is self.training else f"{EVALUATION}_{self._count}"
        if self.announce is not None:
            self.announce(name, training)
        self.reporter.at(f"capturing {name}", waiting=False)
        self.transport.barrier()  # ranks may be threads, and none may run the model while it is captured
        other = other_batch(self.training[0].graph.batch, part, form)
        if self.transport.leads:
            from autopipe.runtime.batches.new_recording import differing, write_new_recording

            names = {recording.name for recording in self.known(training=training)}
            examples = [example for known, example in self._examples.items() if known in names]
            others, places = differing(self.workload, part, form, examples)
            others = [] if places in self._rigid else others
            try:
                captured = write_new_recording(
                    OneBatch(self.workload, part),  # type: ignore[arg-type]  # it has the interface of a workload
                    form,
                    self.context,
                    self.run.stages / name,
                    device_kind=torch.device(self.job.device).type,
                    allow_data_dependent=self.job.allow_data_dependent,
                    training=training or self.evaluation is self.training,
                    others=others,
                )
            except AutopipeError as error:
                raise RunError(
                    f"{other} cannot run in these stages: {error.what}",
                    where=error.where,
                    remedy=error.remedy or "pad the batches to one shape, with the entries of the first one",
                ) from error
            free = free_sizes(captured.graph) if others else ""
            if not free:
                self._rigid.add(places)
            self.reporter.event(
                "note", text=f"generated stage code for {other} ({captured.method}): stages/{name}{free}"
            )
        self.reporter.at(f"waiting for {name}", waiting=True)
        self.transport.barrier()
        try:
            return self._load(name)
        except ArtifactError as error:
            raise RunError(
                f"{other} cannot run in these stages: {error.what}",
                remedy=OTHER_LAYERS,
            ) from error

    def _load(self, name: str) -> Recording:
        """Load a recording and give its code to the stages of this rank."""
        folder = self.run.stages / name
        plan = artifact.load(Plan, folder / "plan.json", renew="autopipe train")
        graph = artifact.load(Graph, folder / "graph.json", renew="autopipe train")
        recording = Recording.of(plan, graph, name, _divisor(folder, plan, graph))
        constants = load_constants(folder)
        untrained = self.context.graph.trained - graph.trained
        for index, runner in self.runners.items():
            code = load_stage(folder, index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
            runner.stage.take_over(code, constants)
            runner.variants[name] = StageVariant(
                code, recording.carries_gradient, graph.recomputed_with, graph.cast_once, untrained
            )
        return recording


def _refuse_without_python() -> NoReturn:
    raise RunError(
        "the model's Python changes what it does from step to step, and runs only in a process beside rank 0",
        remedy="train with `autopipe train` and --data-reader beside, without evaluation",
    )


def _divisor(folder: Path, plan: Plan, graph: Graph) -> Stage | None:
    return load_divisor(folder, graph.divisor, graph_digest=plan.graph_digest, plan_digest=plan.digest)


def _disagreement(divisor: str, amount: float) -> str:
    return (
        f"warning: the terms of the loss divide by different numbers ({divisor}): the shares of a microbatch that they "
        f"ask for differ by up to {amount:.2g}. Each microbatch counts by its samples, so training "
        "is not training with complete minibatches; return (loss, weight) from the loss, or use --num-microbatches 1"
    )
