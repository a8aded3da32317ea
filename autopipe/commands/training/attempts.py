"""The attempts of one run: a failed rank ends an attempt, and the next one resumes from a checkpoint.

::

    launch --WorkerError--> newest intact checkpoint -> (--elastic: a plan for the remaining ranks) -> launch ...

The same failure at the same step twice in a row ends the run, because its cause is in the model or the data.

The remedy for a rank that is out of memory is the smallest change that fits, found by planning with less memory. The
ratio of needed to predicted memory is assumed to be the same for every plan. So the planner may use the available
memory divided by this ratio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopipe.commands.artifact_steps import batch_size_of, prepare
from autopipe.commands.checking.causes import refusal_of_hooks
from autopipe.commands.checking.checking import write_run
from autopipe.commands.checking.first_steps import check_first
from autopipe.commands.inspecting import history
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import Events, PlanSettings, TrainSettings
from autopipe.commands.store import Store
from autopipe.commands.training.checkpoints import lacking_version, newest_intact
from autopipe.commands.training.listener import Listener
from autopipe.errors import AuditError, AutopipeError, PlanError, RunError, WorkerError, counted
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.launch.registry import LAUNCHERS, run_ranks
from autopipe.launch.remote.hosts import assign, total_slots
from autopipe.launch.remote.rendezvous import Rendezvous
from autopipe.launch.request import LaunchRequest, watchdog_of
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.clusters import precision_of
from autopipe.planning.cost.datasheets import utilization
from autopipe.planning.cost.peaks import search_within_memory
from autopipe.planning.teams import on_cluster
from autopipe.report.results import Restart
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.job import Job, RunDirectory
from autopipe.schedules import REGISTRY
from autopipe.units import as_size_option
from autopipe.workers.fork_server import end_fork_server
from autopipe.workers.signals import StopRequest
from autopipe.workload.target.targets import elsewhere

MakeJob = Callable[[TrainSettings, Prepared, int], Job]

_MARGIN = 0.95
# how long a failure waits for a comparison that may know its cause
_CAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Attempts:
    """A run in progress."""

    settings: TrainSettings
    prepared: Prepared
    run: RunDirectory
    listener: Listener
    events: Events
    make_job: MakeJob  # makes the job of the ranks from settings, plan and first step
    rendezvous: Rendezvous | None = None  # with the processes of the other ranks, under a cluster's launcher
    stop_requested: Callable[[], bool] | None = None
    restarts: list[Restart] = field(default_factory=list)
    stopped_by: str = ""  # what requested the stop of the run, such as SIGTERM; "" without a request
    _other_digest: str = ""  # of the data that the ranks read in place of that before the checkpoint

    @property
    def steps(self) -> int:
        """The steps wanted; 0 if the length of the data is not known."""
        if self.settings.steps:
            return self.settings.steps
        workload = self.prepared.workload
        size = batch_size_of(workload, self.prepared.plan)
        return (self.settings.epochs or 1) * workload.batches.epoch_length(size)

    def follow(self, start: int) -> None:
        """Launch attempts until the run is done or stopped. ``start``: the step to resume from, -1 for a new run.

        Raises: WorkerError for the first failing rank of the last attempt; RunError for a step that is not finite;
        AuditError for a step that differs from plain training, after moving the later checkpoints aside; the error of
        the comparison beside the ranks, after moving all of this run aside.
        """
        first = self.listener.first_steps
        try:
            if first is not None:
                first.begin(self.run, start)
            self._follow(start)
        except AutopipeError as error:
            if first is not None and error is first.error:
                self._clear(first.since)
            raise
        finally:
            if first is not None:
                first.end()

    def _follow(self, start: int) -> None:
        stop = StopRequest(self.stop_requested)
        if self.listener.observers is not None:
            self.listener.observers.ask = stop.ask
        stoppable = LAUNCHERS[self.settings.launch.name].stops_gracefully
        with stop.on_signals() if stoppable and self.stop_requested is None else contextlib.nullcontext():
            self._begin(start)
            if start < 0:
                self.listener.metrics.keep_before(None)
            while True:
                self._clear(start)
                self.listener.metrics.keep_before(max(start, 0))
                try:
                    self._launch(stop if stoppable else None)
                    self._finish_proofs(lambda: bool(stop.signal_name))
                    self.stopped_by = stop.signal_name
                    return
                except AuditError as error:
                    self._clear(error.step)
                    raise
                except WorkerError as error:
                    if self.listener.first_steps is not None and error is self.listener.first_steps.error:
                        raise  # of a rank in the comparison
                    advise(error, self.prepared)
                    if (nonfinite := self.listener.nonfinite()) is not None:
                        raise nonfinite from None
                    if not stop.signal_name and self._handle_other_data(start):
                        continue
                    if stop.signal_name or not self._may_restart(error):
                        if self.listener.first_steps is not None:  # it may know the cause
                            self.listener.first_steps.finish(lambda: bool(stop.signal_name), _CAUSE_SECONDS)
                        raise
                    start = self._restart(error)
                finally:
                    if self.listener.auditor is not None:
                        self.listener.auditor.end()
                    self.listener.metrics.close()
                    checkpoints.clear_unfinished(self.run.checkpoints)

    def _finish_proofs(self, stopped: Callable[[], bool]) -> None:
        """Wait for the comparison of the first steps and for audits, unless a stop is requested."""
        first, observers = self.listener.first_steps, self.listener.observers
        by_hook = self.listener.stopped and observers is not None and bool(observers.stopped_by)
        if first is not None and (by_hook or not self.listener.stopped):
            first.finish(lambda: stopped() and not by_hook)
        if self.listener.auditor is not None and not self.listener.stopped:
            self.listener.auditor.finish(stopped)

    def _begin(self, start: int) -> None:
        plan = self.prepared.plan
        fields: dict[str, Any] = {"ranks": plan.num_processes, "steps": self.steps, "start_step": max(start, 0)}
        stages = {"modules": [stage.name for stage in plan.stages], "stage_ranks": plan.stage_processes}
        profile = self.prepared.profile
        rate = plan.flops_per_sample / plan.num_ranks
        unit = utilization(rate, profile.device.name, precision_of(profile)) if rate else None
        fields |= {"batch_size": plan.batch_size, "run_dir": str(self.run.path), "unit_mfu": unit}
        self.events("start", {**fields, **stages})

    def _launch(self, stop: StopRequest | None) -> None:
        plan, settings = self.prepared.plan, self.settings.launch
        self.listener.begin(plan.num_processes)
        if self.listener.auditor is not None:
            self.listener.auditor.begin()
        watchdog = watchdog_of(plan.predicted.step_seconds, settings.watchdog_seconds)
        request = LaunchRequest(
            run=self.run,
            world_size=plan.num_processes,
            on_event=self.listener,
            settings=settings,
            watchdog_seconds=watchdog,
            model_files=_model_files(plan),
            stop=stop,
        )
        run_ranks(request, self.rendezvous)

    def _clear(self, start: int) -> None:
        later = checkpoints.set_aside(self.run.checkpoints, start)
        if later:
            steps = ", ".join(map(str, later))
            self.events("note", {"text": f"moved later checkpoints ({steps}) aside"})

    def _handle_other_data(self, start: int) -> bool:
        """Prepare the next attempt if the ranks read other data than before the checkpoint; return whether they did.

        They read it again: first with all earlier epochs, then in new processes. If those read something else again,
        the data does not repeat, and the run continues with what it gives.

        Raises: RunError if two processes read the same.
        """
        event = self.listener.other_data
        if event is None:
            return False
        count, epoch = counted(event["position"], "minibatch"), event["epoch"]
        if event["replay"] != "all" and epoch:
            earlier = counted(epoch, "earlier epoch")
            self.events("note", {"text": f"the data depends on earlier epochs: reading {earlier} again, in full"})
            self.settings = dataclasses.replace(self.settings, replay="all")
        elif not self._other_digest:
            self._other_digest = event["digest"]
            self.events(
                "note",
                {"text": "the data is not what the interrupted run read: reading it once more, in a new process"},
            )
            if self.listener.first_steps is not None and self.listener.first_steps.worker is not None:
                self.listener.first_steps.end()  # its process was forked from the server, too
            end_fork_server()
        elif self._other_digest == event["digest"]:
            replayed = ", even after a replay of all earlier epochs" if epoch else ""
            raise RunError(
                f"the data differs from that of the interrupted run: the first {count} of epoch {epoch} are not "
                f"those that it read{replayed}",
                where=str(checkpoints.directory_of(self.run.checkpoints, start)),
                remedy="restore the files, the seed and the batch size of the data; or continue with other data: "
                "--allow-other-data",
            ) from None
        else:
            why = "the data does not repeat (two processes read different minibatches)"
            self.events("note", {"text": f"warning: {why}: the run continues with other minibatches"})
            self.settings = dataclasses.replace(self.settings, same_data=False)
        self.run.write_job(self.make_job(self.settings, self.prepared, start))
        return True

    def _may_restart(self, error: WorkerError) -> bool:
        """Return whether to try again after a failure."""
        if len(self.restarts) >= self.settings.restarts:
            return False
        before = self.restarts[-1] if self.restarts else None
        return before is None or (before.what, before.where, before.reached) != _failure(error, self.listener)

    def _restart(self, error: WorkerError) -> int:
        """Prepare the next attempt; return the step it resumes from, -1 for the beginning."""
        what, where, reached = _failure(error, self.listener)
        start, self._other_digest = newest_intact(self.run), ""
        if self.settings.elastic and self.prepared.plan.num_ranks > 1:
            self._replan(self._remaining_ranks(error), start)
        else:  # use the plan and stage files of the run, because those of the work directory may have changed
            self.run.write_job(self.make_job(self.settings, self.prepared, start))
        ranks = self.prepared.plan.num_processes
        restart = Restart(len(self.restarts) + 1, error.rank, what, where, reached, max(start, 0), ranks)
        self.restarts.append(restart)
        history.append(self.run, history.Restarted(restart))
        self.events("restart", {**dataclasses.asdict(restart), "of": self.settings.restarts})
        self.listener.restarted(restart)
        return start

    def _remaining_ranks(self, error: WorkerError) -> int:
        """Exclude the host of the failed rank, or its device; return the number of ranks that remain possible."""
        launched, ranks = self.settings.launch, self.prepared.plan.num_processes
        left = tuple(host for host in launched.hosts if host.name != error.host)
        if not error.host or not left:
            self._exclude_device(error.rank)
            return ranks - 1
        self.settings = dataclasses.replace(self.settings, launch=dataclasses.replace(launched, hosts=left))
        room = total_slots(left)
        if room is None:  # hosts without slots: each keeps the ranks that it had
            shares = zip(launched.hosts, assign(launched.hosts, ranks), strict=True)
            room = sum(len(share) for host, share in shares if host in left)
        return max(min(ranks, room), 1)

    def _replan(self, ranks: int, start: int) -> None:
        """Plan for this number of ranks from the run's profile, check the plan, and write its stage files into the run.

        The plan is prepared in a temporary folder, because another command may use the work directory meanwhile, and
        the plan there must not change.
        """
        plan, profile = self.prepared.plan, self.settings.plan.profile
        ranks -= ranks % plan.team if ranks > plan.team else 0
        with tempfile.TemporaryDirectory(prefix="autopipe-plan-") as scratch:
            store = Store(Path(scratch))
            artifact.save(self.prepared.profile, store.profile)
            artifact.save(plan, store.plan)
            artifact.save(self.prepared.record, store.record)
            with contextlib.suppress(OSError):  # without measured links, the plan assumes default ones
                shutil.copyfile(Store(profile.work_dir).links, store.links)
            wanted = dataclasses.replace(
                self.settings.plan,
                profile=dataclasses.replace(profile, work_dir=store.path),
                gpus=ranks,
                schedule=plan.schedule,
                num_microbatches=plan.num_microbatches,
                microbatch_size=None,
            )
            prepared = self._planned(wanted, start)
            if self.settings.check_first:
                if self.listener.first_steps is not None:
                    self.listener.first_steps.end()  # its plan is no longer trained
                settings = dataclasses.replace(self.settings, plan=wanted)
                self.listener.first_steps = check_first(settings, prepared, self.events)
            elif refusal := refusal_of_hooks(prepared.workload, prepared.plan, prepared.graph):
                raise refusal
            write_run(self.run.path, self.make_job(self.settings, prepared, start), prepared)
        self.prepared = dataclasses.replace(prepared, stages=self.run.stages)

    def _planned(self, wanted: PlanSettings, start: int) -> Prepared:
        """Return a plan, with another schedule if that of the run needs more ranks, or weights that no file has."""
        try:
            prepared = prepare(wanted, self._progress)
        except PlanError:
            return prepare(dataclasses.replace(wanted, schedule="auto"), self._progress)
        if start < 0:
            return prepared
        source = Checkpoint(checkpoints.directory_of(self.run.checkpoints, start))
        what = lacking_version(source, prepared.plan, prepared.graph)
        if not what:
            return prepared
        self.events("note", {"text": f"continuing with schedule 1f1b: {what}"})
        return prepare(dataclasses.replace(wanted, schedule="1f1b"), self._progress)

    def _progress(self, what: str, fraction: float) -> None:
        self.events("progress", {"what": what, "fraction": fraction})

    def _exclude_device(self, rank: int) -> None:
        """Exclude the GPU that a rank reported, if its host has another one."""
        index, others = self.listener.devices.get(rank, (-1, 0))
        if others:
            excluded = (*self.settings.excluded_devices, index)
            self.settings = dataclasses.replace(self.settings, excluded_devices=excluded)


def _model_files(plan: Plan) -> tuple[Path, ...]:
    """Return the user's files that a plan names."""
    targets = [elsewhere(text) for text in (plan.workload.target, *plan.workload.hooks.values())]
    return tuple(sorted({Path(target.location) for target in targets if target is not None and target.is_file}))


def _failure(error: WorkerError, listener: Listener) -> tuple[str, str, int]:
    """Return the message, the place and the number of steps done. Two failures are the same if these are equal."""
    return error.what, error.where, listener.reached


def limit_of(figures: Mapping[str, int]) -> int:
    """Return the largest predicted memory for which the real need fits."""
    needed = max(figures["used"] + figures["requested"], figures["predicted"], 1)
    return int(_MARGIN * figures["available"] * min(figures["predicted"] / needed, 1.0))


def advise(error: WorkerError, prepared: Prepared) -> None:
    """Set the remedy of an out-of-memory error to the smallest change that fits. Other errors are not changed."""
    if error.out_of_memory:
        error.remedy = _remedy(limit_of(error.out_of_memory), prepared)


def _remedy(limit: int, prepared: Prepared) -> str:
    plan = prepared.plan
    devices = tuple(replace(device, memory_bytes=limit) for device in prepared.cluster.devices)
    counts = {stage.replicas for stage in plan.stages}
    equal = REGISTRY[plan.schedule].equal_replicas
    options = PlanOptions(
        num_ranks=plan.num_ranks,
        batch_size=plan.batch_size,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        stages_per_rank=plan.schedule_options.get("stages_per_rank", 1),
        may_replicate=counts != {1} and not equal,
        replicas=max(counts) if equal else 1,
        schedule_options=tuple(plan.schedule_options.items()),
        sharded=plan.shard_optimizer,
        exact_ties=prepared.record.request.exact_ties or "auto",
    )
    memory = f"--gpu-memory {as_size_option(limit)}"
    try:
        room = replace(prepared.cluster, devices=devices)
        profile = on_cluster(prepared.profile, room)
        smaller = search_within_memory(profile, room, lambda least: make_plan(profile, least, options))
    except AutopipeError as error:
        return f"{error.remedy}; plan for it with {memory}"
    return f"{memory}: then {_difference(plan, smaller)}"


def _difference(before: Plan, after: Plan) -> str:
    """Return a description of the change that makes the second plan fit."""
    again = [stage.index for stage in after.stages if stage.recompute != "never"]
    if again and again != [stage.index for stage in before.stages if stage.recompute != "never"]:
        return f"{counted(len(again), 'stage')} of {len(after.stages)} recompute their forward to save memory"
    return "other cuts fit, with the same numbers of ranks and microbatches"
