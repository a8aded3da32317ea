"""``RankSession``: one rank of a run. It builds its stages, runs its rows of the schedule, saves and evaluates.

A rank may be a thread, a local process, or a process of another launcher: only the transport differs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.draws import exclusive
from autopipe.errors import RunError
from autopipe.ir.artifact import encode
from autopipe.runtime.assembly import RankAssembly
from autopipe.runtime.audit.writer import AuditWriter
from autopipe.runtime.batches.beside import Beside, BesideSource, Telling
from autopipe.runtime.batches.exchange import DigestExchange, OtherRanksDiffer
from autopipe.runtime.batches.from_loop import read_from_loop
from autopipe.runtime.batches.graph_variants import GraphVariants
from autopipe.runtime.batches.on_device import Placement
from autopipe.runtime.batches.readers import EachReads, OneReads, Reader
from autopipe.runtime.batches.source import Place, Source
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint import state
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.checkpoint.members import own_part
from autopipe.runtime.checkpoint.proof import RestoreProof, refuse_other_weights
from autopipe.runtime.checkpoint.saver import Saver
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Reporter
from autopipe.runtime.executor import Executor
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.minibatch_groups import Window, Windows
from autopipe.runtime.rows import RankRows
from autopipe.runtime.spilling.build import steps_late
from autopipe.runtime.step.gradients import GradientHook
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.runtime.training_state.stage import set_rate
from autopipe.runtime.transport.base import Transport, TransportClosed
from autopipe.runtime.transport.teams import TeamTransport
from autopipe.schedules import REGISTRY
from autopipe.schedules.spilling.spill import LATE
from autopipe.workload import Workload


def _due(step: int, every: int) -> bool:
    """Return whether something done every ``every`` steps is due after ``step``. 0: never."""
    return bool(every) and step % every == 0


@dataclass(slots=True)
class RankSession:
    """A rank whose stages are built. ``RankSession.start`` makes one."""

    job: Job
    context: RunContext
    workload: Workload
    run: RunDirectory
    executor: Executor
    transport: Transport
    reporter: Reporter
    device: torch.device
    # epoch -> minibatches, in place of the data of the workload
    items: Callable[[int], Iterator[Any]] | None = None
    # of rank 0: the process that reads the data, see ``runtime.batches.beside``; None: ranks read
    beside: Beside | None = None
    _rows: RankRows = field(init=False)
    _saver: Saver = field(init=False)
    _recordings: GraphVariants = field(init=False)
    _audits: AuditWriter = field(init=False)
    _placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        plan, leads = self.context.plan, self.transport.leads
        self._rows = RankRows(self.context, self.transport.rank)
        processes = [stage.replicas * plan.team for stage in plan.stages]
        self._saver = Saver(self.run.checkpoints, processes, keep=self.job.keep_checkpoints, leads=leads)
        if self.job.save or self.job.checkpoint_every or self.job.has_audits:
            self._saver.watch(self.executor.stepper)
        run, workload, runners = self.run, self.workload, self.executor.runners
        self._audits = AuditWriter(run.path, self.job.audits, self._saver, self.reporter)
        self._placement = Placement(self.device)
        self._recordings = GraphVariants(run, self.job, self.context, workload, self.transport, self.reporter, runners)

    @staticmethod
    def start(
        run: RunDirectory,
        job: Job,
        context: RunContext,
        transport: Transport,
        reporter: Reporter,
        *,
        on_gradients: GradientHook | None = None,
        reads: Telling | None = None,
    ) -> RankSession:
        """Build the stages of this rank.

        The user's model is built once, and only the parts of these stages are kept. If training starts from weights in
        a file, only those parts ever take memory. ``reads``: the process that reads the data for this rank.
        """
        precision = context.plan.workload.precision
        if REGISTRY[context.plan.schedule].spills and steps_late(precision, job.clip_grad_norm, job.on_nonfinite):
            context = context.with_options(**{LATE.name: 1})
        with exclusive():
            workload = Workload.from_spec(context.plan.workload)
        assembly = RankAssembly(
            run=run,
            job=job,
            context=context,
            workload=workload,
            transport=transport,
            reporter=reporter,
            on_gradients=on_gradients,
        )
        executor, device = assembly.executor(), torch.device(job.device)
        beside = None if reads is None else Beside(reads, job, reporter)
        return RankSession(job, context, workload, run, executor, transport, reporter, device, beside=beside)

    # -- training --------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the job, and save checkpoints as the job says.

        Raises: RunError if the data ends before the steps do.
        """
        step, place = self._proven(self._resume)
        saved = step if self.job.start_step >= 0 else -1
        reader = self._reader(self.items or self._epoch, self.job.data_reader, epochs=self.job.epochs)
        windows = Windows(self.job, self.context.plan, reader, self.reporter, self._audits.due)
        self.executor.stepper.before_step = reader.settle
        try:
            if self.job.evaluate_first:
                self.evaluate(None, step)
            for window in windows.walk(step, place):
                self._run_window(window)
                reader.compared()
                step, place = window.first + len(window.minibatches), window.place
                self._report_saved()
                if _due(step, self.job.checkpoint_every):
                    self.save(step, place)
                    saved = step
                if _due(step, self.job.evaluate_every):
                    self.evaluate(None, step)
            reader.finish()
            if self.job.save and saved != step:
                self.save(step, place, last=True)
            self.reporter.at("saving", waiting=True)
            self._saver.wait()
            self._audits.wait()
            self._report_saved()
        except BaseException as error:
            if not isinstance(error, TransportClosed) or isinstance(error, OtherRanksDiffer):
                self._saver.wait_up_to()
            self._saver.cancel()
            self._audits.cancel()
            raise
        if windows.stopped and self.transport.leads:
            self.reporter.event("stopped", step=step)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        return self.workload.items(self.job.batch_size or None, epoch=epoch)

    def _reader(
        self, open_epoch: Callable[[int], Iterator[Any]], who: str, *, epochs: int, training: bool = True
    ) -> Reader:
        """Return the reader of minibatches. ``open_epoch``: epoch -> minibatches; ``who``: of DATA_READERS."""
        name, steps = self.workload.name, self.job.steps if training else 0
        leads, transport = self.transport.leads, self.transport
        processes = transport.processes if isinstance(transport, TeamTransport) else transport
        source = Source(
            open_epoch, name, self.reporter, epochs=epochs, steps=steps, replay=self.job.replay, speaks=leads
        )
        if who != "each":
            reads = BesideSource(self.beside, source, self.workload, training) if self.beside is not None else source
            reader = OneReads(reads, self._recordings, processes, self.reporter, self._placement, training)
            if training and self.job.loop:
                source.once = True
                read_from_loop(self.workload, self.job.loop, self.reporter).waits = reader.waits
            return reader
        exchange = DigestExchange(processes, evaluating=not training)
        return EachReads(source, self._recordings, exchange, self._placement, training)

    def _run_window(self, window: Window) -> None:
        first = window.first
        minibatches = {first + index: minibatch.parts for index, minibatch in enumerate(window.minibatches)}
        for index, minibatch in enumerate(window.minibatches):
            self.executor.stepper.samples[first + index] = minibatch.samples
        row, offset = self._rows.of_window(first, len(window.minibatches))
        save = functools.partial(self.save, first, window.before)
        self._audits.begin(first, self._recordings.latest, self._recordings.divisors_as_cut, save)
        spiller = self.executor.spiller
        with contextlib.nullcontext() if spiller is None else spiller.counted(len(minibatches)):
            self.executor.run(row, minibatches, offset=offset)
        self._audits.end(functools.partial(self.save, first + 1, window.place), skipped=self.executor.stepper.skipped)

    def divisors(self, item: Any, parts: Sequence[Any]) -> Divisors | None:
        """Return the divisors of the loss in a minibatch and its parts; None if it divides by the samples."""
        return self._recordings.divisors(item, parts)

    # -- state -----------------------------------------------------------------------------------------------------

    def _proven(self, resume: Callable[[], tuple[int, Place]]) -> tuple[int, Place]:
        """Resume, if the job does, and prove that this rank holds what is in the checkpoint; then set a new rate."""
        if self.job.start_step < 0:
            return resume()
        proof = RestoreProof(self.executor.stepper)
        step, place = resume()
        proof.refuse_differences(Checkpoint(checkpoints.directory_of(self.run.checkpoints, self.job.start_step)))
        for optimizer in self.executor.stepper.optimizers.values():
            if self.job.learning_rate is not None and optimizer is not None:
                set_rate(optimizer, self.job.learning_rate)
        return step, place

    def _resume(self) -> tuple[int, Place]:
        if self.job.start_step < 0:
            return 0, Place()
        source = Checkpoint(checkpoints.directory_of(self.run.checkpoints, self.job.start_step))
        if source.manifest.graph_digest != self.context.graph.model_digest:
            raise RunError(
                f"the graph of the checkpoint has digest {source.manifest.graph_digest}, "
                f"the graph of this model {self.context.graph.model_digest}",
                where=str(source.directory),
                remedy="start a new run (another --run-dir), or restore the model file of the checkpoint",
            )
        self.restore(source)
        scaler, manifest = self.executor.stepper.scaler, source.manifest
        if scaler is not None and manifest.scale:
            scaler.scale, scaler.good_steps = manifest.scale, manifest.good_steps
        if manifest.position and not manifest.data and self.transport.leads:
            text = "the checkpoint has no digest of its data: that the data continues where it stopped is not verified"
            self.reporter.event("note", text=text)
        return manifest.step, Place(manifest.epoch, manifest.position, manifest.data)

    def _scale(self) -> tuple[float, int]:
        scaler = self.executor.stepper.scaler
        return (0.0, 0) if scaler is None else (scaler.scale, scaler.good_steps)

    def restore_latest(self, *, averaged: bool = False) -> int:
        """Load the weights of the newest checkpoint for evaluation, and return its step.

        ``averaged``: load its averaged weights. Raises: RunError if there is no checkpoint, or another value arrives.
        """
        source = Checkpoint.latest(self.run.checkpoints)
        if source is None:
            raise RunError(f"there is no checkpoint in {self.run.checkpoints}", remedy="autopipe train")
        for runner in self.executor.runners.values():
            state.restore_weights(source, runner, averaged=averaged)
            runner.versions.start_at(source.manifest.step)
            refuse_other_weights(source, runner, averaged=averaged)
        return source.manifest.step

    def restore(self, source: Checkpoint) -> None:
        """Restore every stage of this rank from a checkpoint."""
        stepper = self.executor.stepper
        for index, runner in self.executor.runners.items():
            state.restore(
                source,
                runner,
                stepper.stepped(index),
                stepper.optimizers[index],
                stepper.schedulers[index],
            )
            if stepper.averages is not None:
                stepper.averages.restore(index, source, functools.partial(own_part, runner.stage))

    @property
    def _places(self) -> dict[int, int]:
        """The stages of this rank, each with the place of this process among those that run it."""
        plan, rank = self.context.plan, self.transport.rank
        member = self.transport.member if isinstance(self.transport, TeamTransport) else 0
        return {index: plan.stages[index].ranks.index(rank) * plan.team + member for index in self.executor.runners}

    def save(self, step: int, place: Place, saver: Saver | None = None, *, last: bool = False) -> None:
        """Copy the state of this rank and start to write it. Rank 0 makes it the latest when all ranks have written.

        ``saver`` defaults to the saver of the run's checkpoints. ``last``: training has ended.

        Raises: the failure of the previous checkpoint.
        """
        self.reporter.at("saving", waiting=False)
        self.executor.settle()
        plan = self.context.plan
        manifest = Manifest(
            step,
            place.epoch,
            place.position,
            plan.workload.seed,
            self.context.graph.model_digest,
            plan.digest,
            (),
            *self._scale(),
            data=place.digest,
            options=state.options_of(plan, self.job),
        )
        saver = saver or self._saver
        saver.save(manifest, self.executor.stepper, self._places, pinned=self.device.type == "cuda", last=last)

    def _report_saved(self) -> None:
        """Report the checkpoints that were finished. Raises: the failure of one that could not be written."""
        self._saver.raise_if_failed()
        for reason in self._saver.refusals():
            self.reporter.event("note", text=f"{reason}: training waits longer for each checkpoint")
        for step, path in self._saver.finished():
            self.reporter.event("checkpoint", step=step, path=str(path))
        self._audits.report(self.executor.stepper.losses)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        batch_size: int | None,
        step: int,
        reader: str = "",
        items: Callable[[int], Iterator[Any]] | None = None,
    ) -> None:
        """Run the evaluation data through the stages, forward only, and report the mean loss after ``step`` steps.

        ``batch_size`` defaults to that of training, if the evaluation data takes one. ``reader`` is one of
        DATA_READERS; "" is the reader of training, because the two sources of data may share state. ``items``: epoch ->
        minibatches, in place of the evaluation data.

        Evaluation mode, without gradients and steps: statistics, random state and schedule state do not change.
        """
        self.reporter.event("evaluating", step=step)
        row = self._rows.forward_only()
        total = weights = 0.0
        samples = 0
        with self._eval_mode():
            batches = self._reader(
                items
                or (lambda epoch: self.workload.evaluation_items(batch_size, default=self.job.batch_size or None)),
                reader or self.job.data_reader,
                epochs=1,
                training=False,
            )
            count = 0
            while minibatches := batches.read(0, 1):
                self.executor.run(row, {0: minibatches[0].parts}, training=False)
                batches.settle()
                loss = self.executor.stepper.loss.collect(0)
                if loss is not None:
                    weight = minibatches[0].weight
                    total, weights = total + (loss * weight if weight else 0.0), weights + weight
                    samples += minibatches[0].samples
                count += 1
        if count == 0:
            raise RunError(f"the evaluation data of {self.workload.name} is empty")
        if self.transport.leads:
            self.reporter.event("evaluation", step=step, loss=total / weights, batches=count, samples=samples)

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        stages = [runner.stage for runner in self.executor.runners.values()]
        for runner in self.executor.runners.values():
            runner.versions.use(runner.versions.newest)
            runner.stage.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for stage in stages:
                stage.train()

    def report_timeline(self) -> None:
        """Report the recorded spans as (instruction, start, end) in monotonic seconds, and the memory of each stage.

        If the stages take turns on the device, report the bytes copied too.
        """
        copied = None if self.executor.spiller is None else self.executor.spiller.bytes_per_step()
        if copied is not None:
            self.reporter.event("copied", to_device=copied[0], to_host=copied[1])
        if self.executor.recorder is not None:
            spans = [(encode(s.instruction), s.start_seconds, s.end_seconds) for s in self.executor.recorder.finish()]
            self.reporter.event("spans", spans=spans)
        if self.executor.footprint is not None:
            self.executor.footprint.report_to(self.reporter, self.context.plan)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that this rank owns, its buffers, and the averages as ``ema.NAME``, by name."""
        self.executor.settle()
        tensors: dict[str, torch.Tensor] = {}
        for index, runner in self.executor.runners.items():
            if self.context.plan.stages[index].ranks[0] == self.transport.rank:
                tensors.update({n: p.data for n, p in self.executor.stepper.owned(index).items()})
                tensors.update(state.buffers(runner))
                if (averages := self.executor.stepper.averages) is not None:
                    tensors.update({f"ema.{name}": tensor for name, tensor in averages.of(index).items()})
        return tensors
