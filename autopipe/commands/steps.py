"""The steps before a run: profile, plan, generate, simulate, and ``prepare``, which does what is missing or stale.

What is stale is found by capturing the model afresh: its digest is compared with the artifact's. A command that names
a step does that step again; a step before it is taken from the work directory where it still holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autopipe.commands import evaluation
from autopipe.commands.locks import only_one
from autopipe.commands.models import ensure_profile, keeps_decisions, load_model, measure_model
from autopipe.commands.named import remember_stages, wrote_stages
from autopipe.commands.planning.choose import batch_of, choose_plan, ensure_plan, with_averages
from autopipe.commands.planning.request import request_of
from autopipe.commands.settings import (
    MAX_SHAPES,
    WORK_DIRECTORY,
    ModelSettings,
    OrderSettings,
    PlanSettings,
    ProfileSettings,
    Progress,
)
from autopipe.commands.store import PlanRecord, Store, Work
from autopipe.errors import ArtifactError, counted
from autopipe.generate import generate as generate_stages
from autopipe.generate import load_constants, load_divisor, load_stage
from autopipe.ir import artifact
from autopipe.ir.agreement import refuse_disagreement
from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan, bytes_by_rank
from autopipe.ir.profile import Profile
from autopipe.planning.baselines import compared
from autopipe.planning.baselines import explained as explain
from autopipe.planning.clusters import priced
from autopipe.planning.cost.peaks import memory_shortfall, with_peaks
from autopipe.planning.cost.predict import predict, schedule_of, timeline_of
from autopipe.planning.reschedule import as_typed, with_schedule
from autopipe.report.perfetto import chrome_trace
from autopipe.report.results import GenerateResult, PlanResult, ProfileResult, SimulateResult
from autopipe.schedules import render
from autopipe.workload import Workload
from autopipe.workload.cutting.hook import Minibatch


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that a run starts from. ``notes``: what was done or reused; ``warnings``: of the model.

    ``max_shapes``, ``allow_data_dependent``: for batches of another shape, which are captured while ranks run.
    """

    workload: Workload
    graph: Graph
    profile: Profile
    record: PlanRecord
    plan: Plan
    stages: Path
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    evaluation_note: str = ""
    max_shapes: int = MAX_SHAPES
    allow_data_dependent: bool = False

    @property
    def cluster(self) -> Cluster:
        """What the ranks run on."""
        return self.record.cluster


def profile(settings: ProfileSettings, progress: Progress | None = None) -> ProfileResult:
    """Capture and measure the model, and write profile.json."""
    with only_one(settings.work_dir, "measures a model"):
        work = Work.begin(settings.work_dir, progress)
        model = load_model(settings, work, verify=settings.verify, minibatch=Minibatch())
        found = measure_model(model, settings, work)
        work.notes.append(f"profiled {counted(len(found.graph.nodes), 'op')}, captured by {model.capture.method}")
        return ProfileResult(found, str(work.store.profile), tuple(work.notes), model.capture.notes)


def plan(settings: PlanSettings, progress: Progress | None = None, *, explained: bool = False) -> PlanResult:
    """Plan anew and write plan.json.

    Where neither a model nor a measurement is named, from the stored profile alone, wherever it was taken: the model
    file is not looked at. Else from a profile that is measured where the stored one no longer holds.
    """
    with only_one(settings.work_dir, "plans"):
        work = Work.begin(settings.work_dir, progress)
        request = request_of(settings)
        stored = None if settings.profile.needs_model_file else work.found(Profile, work.store.profile)
        warnings: tuple[str, ...] = ()
        if stored is not None and (batch_size := request.batch_size or stored.batch_size):
            found = stored
            work.notes.append(f"planned from the stored profile of {found.graph.name}; its file was not read")
        else:
            previous = None
            with contextlib.suppress(ArtifactError):  # a damaged plan is written again here
                previous = work.found(Plan, work.store.plan)
            minibatch = minibatch_of(settings, previous)
            model, found = ensure_profile(settings.profile, work, microbatch_sizes(settings), minibatch=minibatch)
            if not found.graph.symbols and request.num_microbatches is None is request.microbatch_size:
                request = dataclasses.replace(request, num_microbatches=1 if minibatch is None else minibatch.parts)
            batch_size, warnings = batch_of(model.workload, request), model.capture.notes
            artifact.save(found, work.store.profile)  # with the seed and the learning rate that were planned for
        chosen = choose_plan(found, request, work, batch_size)
        made, record = chosen.plan, chosen.record
        found = priced(found, record.cluster)
        against = reasons = None
        try:
            counted_with = with_averages(found, request)
            against = compared(made, counted_with, record.cluster, chosen.space, every=chosen.every)
            reasons = explain(made, counted_with, record.cluster, chosen.space) if explained else None
        except KeyboardInterrupt:
            work.notes.append("interrupted: the plan is written, and was not compared with others")
        return PlanResult(
            made,
            found,
            record.cluster,
            str(work.store.plan),
            chosen.seconds,
            (*work.notes, *assumptions(record)),
            warnings,
            against,
            reasons,
        )


def generate(work_dir: Path = WORK_DIRECTORY, progress: Progress | None = None) -> GenerateResult:
    """Write the stage files of the stored plan.

    Raises: ArtifactError where there is no plan, or the model is no longer the one that was planned.
    """
    with only_one(work_dir, "writes stage files"):
        work = Work.begin(work_dir, progress)
        made, _ = work.store.stored_plan()
        settings = ProfileSettings(ModelSettings(), work_dir, allow_data_dependent=keeps_decisions(work))
        model = load_model(settings, work, verify=False, minibatch=Minibatch(made.num_microbatches, made.batch_size))
        if model.capture.graph.digest != made.graph_digest:
            raise ArtifactError(
                f"the plan is of model {made.graph_digest}, and the model is now {model.capture.graph.digest}",
                where=str(work.store.plan),
                remedy=f"autopipe plan {made.workload.target} --gpus {made.num_ranks}",
            )
        files = generate_stages(model.capture, made, work.store.stages)
        evaluation.record(model, made, settings, work)
        remember_stages(work.store.stages)
        return GenerateResult(made, tuple(str(path) for path in files), tuple(work.notes))


def simulate(
    work_dir: Path = WORK_DIRECTORY,
    schedule: str | None = None,
    progress: Progress | None = None,
    order: OrderSettings | None = None,
    trace: Path | None = None,
) -> SimulateResult:
    """Simulate the stored plan, under another schedule where one is named, and write timeline.json.

    The stages' peaks are counted along the schedule that is simulated. ``trace``: a file for Perfetto.
    """
    with only_one(work_dir, "simulates"):
        store = Work.begin(work_dir, progress).store
        made, record = store.stored_plan()
        found = priced(store.stored_profile(), record.cluster)
        refuse_disagreement(made, found.graph)
        said = PlanSettings(ProfileSettings(ModelSettings()), schedule=schedule, order=order or OrderSettings())
        made, notes = with_schedule(made, request_of(said))
        order_of_work = schedule_of(made)
        timeline = timeline_of(made, found, record.cluster)
        # whoever has a timeline so large made has the time to count its bytes
        made = with_peaks(made, with_averages(found, record.request), most=math.inf)
        made = dataclasses.replace(made, predicted=predict(made, found, record.cluster))
        used = bytes_by_rank(made.stages)
        timeline = dataclasses.replace(timeline, peak_bytes=tuple(used[rank] for rank in range(made.num_ranks)))
        artifact.save(timeline, store.timeline)
        if trace is not None:
            artifact.write_text(trace, chrome_trace(timeline))
        return SimulateResult(
            made,
            record.cluster,
            timeline,
            render(order_of_work),
            str(store.timeline),
            notes,
            trace="" if trace is None else str(trace),
            overlaps=any(order_of_work.staleness),
            reordered="" if made.digest == record.plan_digest else as_typed(made, said.order.file),
            misfit=memory_shortfall(made, record.cluster),
        )


def prepare(
    settings: PlanSettings, progress: Progress | None = None, accept: Callable[[Graph], None] | None = None
) -> Prepared:
    """Do every step that is missing or stale, and say so. The caller holds the lock of the work directory.

    ``accept``: raises where the captured model is not to be trained, before anything is measured or written.

    Raises: RunError where the number of ranks is not known; what ``accept`` raises; what the steps raise.
    """
    work = Work.begin(settings.work_dir, progress)
    minibatch = minibatch_of(settings, work.found(Plan, work.store.plan))
    sizes = microbatch_sizes(settings)
    model, found = ensure_profile(settings.profile, work, sizes, accept, minibatch)
    if not found.graph.symbols and settings.num_microbatches is None is settings.microbatch_size:
        if minibatch is None:
            work.notes.append("each batch is one microbatch: --num-microbatches cuts it into several")
        settings = dataclasses.replace(settings, num_microbatches=1 if minibatch is None else minibatch.parts)
    made, record = ensure_plan(model.workload, found, settings, work)
    # a seed or a learning rate of this command alone changes what is trained, not how it is cut
    made = dataclasses.replace(made, workload=model.workload.spec)
    if _stages_hold(work.store, made, model.capture.graph.divisor):
        work.notes.append("stage files reused")
        note = evaluation.note_of(model, work)
    else:
        generate_stages(model.capture, made, work.store.stages)
        note = evaluation.record(model, made, settings.profile, work)
        remember_stages(work.store.stages)
        work.notes.append(f"wrote {counted(len(made.stages), 'stage file')} to {work.store.stages}")
    return Prepared(
        workload=model.workload,
        graph=model.capture.graph,
        profile=found,
        record=record,
        plan=made,
        stages=work.store.stages,
        notes=(*work.notes, *assumptions(record)),
        warnings=model.capture.notes,
        evaluation_note=note,
        max_shapes=settings.max_shapes,
        allow_data_dependent=settings.profile.allow_data_dependent,
    )


def batch_size_of(workload: Workload, plan: Plan) -> int | None:
    """Return the batch size to ask the data for: None where the data decides for itself."""
    return plan.batch_size if workload.takes_batch_size else None


def minibatch_of(settings: PlanSettings, stored: Plan | None) -> Minibatch | None:
    """Return how the minibatches are asked for and cut, as the settings or the stored plan say; None where neither."""
    size = settings.batch_size or (None if stored is None else stored.batch_size)
    if settings.num_microbatches is not None:
        return Minibatch(settings.num_microbatches, size)
    if settings.microbatch_size is not None and size is not None:
        return Minibatch(-(-size // settings.microbatch_size), size)
    return None if stored is None else Minibatch(stored.num_microbatches, size)


def microbatch_sizes(settings: PlanSettings) -> tuple[int, ...]:
    """Return the microbatch sizes that the settings speak of, so that they are measured and not extrapolated."""
    if settings.microbatch_size is not None:
        return (settings.microbatch_size,)
    if settings.batch_size is not None and settings.num_microbatches:
        whole, left = divmod(settings.batch_size, settings.num_microbatches)
        return (whole, whole + 1) if whole and left else (max(whole, 1),)
    return ()


def _stages_hold(store: Store, made: Plan, divisor: str) -> bool:
    """Whether every stage file is there, of this model and plan, and as this account wrote it: to load one runs it.

    ``divisor``: that of the model's loss.
    """
    if not wrote_stages(store.stages):
        return False
    try:
        for stage in made.stages:
            load_stage(store.stages, stage.index, graph_digest=made.graph_digest, plan_digest=made.digest)
        load_constants(store.stages)
        load_divisor(store.stages, divisor, graph_digest=made.graph_digest, plan_digest=made.digest)
    except ArtifactError:
        return False
    return True


def assumptions(record: PlanRecord) -> tuple[str, ...]:
    """Return what a plan takes for granted and nobody measured, for people."""
    level, device = record.cluster.levels[0], record.cluster.devices[0]
    if device.datasheet:
        return (f"{device.name}: {record.cluster.source}", *_assumed_links(record))
    if record.cluster.source != "assumed":
        return ()
    return (
        f"assumed: {level.bandwidth / 1e9:.3g} GB/s between ranks, {device.memory_bytes / 2**30:.1f} GiB a rank "
        "(--cluster, --gpu-memory and --link say otherwise; autopipe doctor --links measures)",
    )


def _assumed_links(record: PlanRecord) -> tuple[str, ...]:
    level = record.cluster.levels[0]
    if level.name != "assumed":
        return ()
    return (f"assumed: {level.bandwidth / 1e9:.3g} GB/s between devices (--link or --cluster say otherwise)",)
