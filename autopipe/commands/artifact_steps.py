"""The steps before a run: profile, plan, generate, simulate; ``prepare`` runs those that are missing or stale.

A command that names a step runs that step. The results of earlier steps are reused if nothing that they were made from
has changed; see ``store``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from autopipe.capture_inputs import versions
from autopipe.commands import evaluation
from autopipe.commands.locks import only_one
from autopipe.commands.measuring import ensure_profile, measure_anew
from autopipe.commands.models import Model, counted_if_too_large, keeps_decisions, load_model
from autopipe.commands.planning import questions
from autopipe.commands.planning.choose import batch_of, choose_plan, ensure_plan, with_averages
from autopipe.commands.planning.request import Sizes, request_of
from autopipe.commands.planning.teams import with_team
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import (
    AUTO_TEAM,
    WORK_DIRECTORY,
    ModelSettings,
    PlanSettings,
    ProfileSettings,
    Progress,
)
from autopipe.commands.store import Input, PlanRecord, StagesRecord, Store, Work, stale
from autopipe.commands.trusted_code import arguments_of, changed_since, record_stages, untrusted_stages
from autopipe.errors import ArtifactError, ModelFileError, ProfileError, TraceError, counted
from autopipe.generate import generate as generate_stages
from autopipe.generate import load_constants, load_divisor, load_stage
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import COUNTED, Profile, WorkloadSpec
from autopipe.measure.device import find_device
from autopipe.measure.on_device import described_as
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.clusters import ASSUMED_HOSTS
from autopipe.planning.requests import PlanRequest
from autopipe.planning.simulated_scores import few_cuts_of_estimate
from autopipe.planning.teams import on_cluster
from autopipe.report.results import GenerateResult, PlanResult, ProfileResult
from autopipe.trace import Capture
from autopipe.units import in_bandwidth, in_gib
from autopipe.workload import Workload
from autopipe.workload.cutting.dimensions import Minibatch
from autopipe.workload.model.placeholders import has_placeholders


def profile(
    settings: ProfileSettings, progress: Progress | None = None, batch_size: int | None = None
) -> ProfileResult:
    """Capture and measure the model, and write profile.json. ``batch_size``: of a minibatch; None: the data's own."""
    with only_one(settings.work_dir, "measures a model"):
        work = Work.begin(settings.work_dir, progress)
        if settings.model.team == AUTO_TEAM:  # a plan chooses it
            settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, team=1))
        sizes, minibatch = Sizes(batch_size=batch_size), Minibatch(batch_size=batch_size)
        measured, _ = counted_if_too_large(
            lambda how: measure_anew(how, work, sizes, minibatch=minibatch), settings, work
        )
        profile = measured.profile
        work.notes.append(f"profiled {counted(len(profile.graph.nodes), 'op')}, captured by {measured.method}")
        warnings = (*measured.warnings, *filter(None, [profile.coupling.text()]))
        return ProfileResult(profile, str(work.store.profile), tuple(work.notes), warnings)


def plan(settings: PlanSettings, progress: Progress | None = None, *, explained: bool = False) -> PlanResult:
    """Make a plan and write plan.json. ``explained``: also return the reasons for each cut.

    A plan for devices that this machine does not have is written elsewhere: see ``questions``.

    If no option names a model or a measurement, the stored profile is used and the model file is not read. The profile
    may then come from another machine. Otherwise the profile is measured again if the stored one is out of date.
    """
    with only_one(settings.work_dir, "plans"):
        request, previous = request_of(settings), None
        with contextlib.suppress(ArtifactError):  # a damaged plan is replaced here
            previous = Work.begin(settings.work_dir, progress).load(Plan, Store(settings.work_dir).plan)
        question = questions.asked(request, settings)
        if question:
            settings = questions.apart(settings, request)
        work = Work.begin(settings.work_dir, progress)
        stored = None if settings.profile.needs_model_file else work.load(Profile, work.store.profile)
        warnings: tuple[str, ...] = ()
        if stored is not None and (batch_size := request.batch_size or stored.batch_size):
            profile = stored
            work.notes.append(f"planned from the stored profile of {profile.graph.name}; its file was not read")
            warnings = tuple(_changes(profile.workload, work.store.profile))
        else:
            minibatch = minibatch_of(settings, previous)
            sizes = sizes_of(settings)
            model, profile = _profile_for(settings, request, work, sizes, minibatch)
            if not profile.graph.symbols and request.num_microbatches is None is request.microbatch_size:
                request = dataclasses.replace(request, num_microbatches=1 if minibatch is None else minibatch.parts)
            batch_size, warnings = batch_of(model.workload, request, work), model.notes
            artifact.save(profile, work.store.profile)  # with the seed and the learning rate of the plan
        choice = choose_plan(profile, request, work, batch_size)
        plan, record = choice.plan, choice.record
        profile = on_cluster(profile, record.cluster)
        if few_cuts_of_estimate(profile, record.cluster):
            work.notes.append(
                "a large model, and estimated times: a part of its cuts was considered, and plans that differ from the "
                "best one in a single cut were not simulated"
            )
        against = reasons = None
        try:
            counted_with = with_averages(profile, request)
            against = compare_plan(plan, counted_with, record.cluster, choice.space, every=choice.every)
            reasons = explain_plan(plan, counted_with, record.cluster, choice.space) if explained else None
        except KeyboardInterrupt:
            work.notes.append("interrupted: the plan was written, but not compared with other plans")
        return PlanResult(
            plan,
            profile,
            record.cluster,
            str(work.store.plan),
            choice.seconds,
            (*work.notes, *assumptions(record, plan)),
            (*warnings, *filter(None, [profile.coupling.text(plan.num_microbatches)])),
            against,
            reasons,
            question,
        )


def _changes(spec: WorkloadSpec, profile: Path) -> Iterator[str]:
    """Yield a warning for each file of a profiled workload that has changed since then, if it is on this machine."""
    for location in changed_since(spec, profile):
        name = Path(location).name
        yield f"{name} has changed since it was profiled; `autopipe plan {arguments_of(spec)}` measures it again"


def _profile_for(
    settings: PlanSettings, request: PlanRequest, work: Work, sizes: Sizes, minibatch: Minibatch | None
) -> tuple[Model, Profile]:
    """Return the model and its profile. For devices with a datasheet, a CPU's times are not needed: it is counted.

    A model that cannot be counted is measured.
    """

    def profiled(settings: PlanSettings, sizes: Sizes = sizes) -> tuple[Model, Profile]:
        settings = with_team(settings, work, sizes, minibatch)
        return ensure_profile(settings.profile, work, sizes, minibatch=minibatch, may_count=request.of_datasheet)

    given = settings.profile
    if not request.of_datasheet or given.device is not None or find_device("auto").type != "cpu":
        return profiled(settings)
    counting = dataclasses.replace(given, estimate=True)
    try:
        few = dataclasses.replace(sizes, few=True)
        model, profile = profiled(dataclasses.replace(settings, profile=counting), few)
    except (TraceError, ModelFileError, ProfileError):
        return profiled(settings)
    if profile.device.kind == COUNTED:
        work.notes.append("nothing was timed, and the recorded model was not compared with the original")
    return model, profile


def generate(work_dir: Path = WORK_DIRECTORY, progress: Progress | None = None) -> GenerateResult:
    """Write the stage files of the stored plan.

    Raises: ArtifactError if no plan is stored, or the model has changed since it was planned.
    """
    with only_one(work_dir, "writes stage files"):
        work = Work.begin(work_dir, progress)
        plan, _ = work.store.stored_plan()
        settings = ProfileSettings(ModelSettings(), work_dir, allow_data_dependent=keeps_decisions(work))
        model = load_model(settings, work, verify=False, minibatch=Minibatch(plan.num_microbatches, plan.batch_size))
        if model.graph.digest != plan.graph_digest:
            raise ArtifactError(
                f"the plan was made for model {plan.graph_digest}, and the model is now {model.graph.digest}",
                where=str(work.store.plan),
                remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
            )
        captured, stored = model.capture, work.load(Profile, work.store.profile)
        if stored is not None and stored.graph.digest == plan.graph_digest:
            captured = described_as(stored.graph, captured)
            work.notes.extend(filter(None, [stored.coupling.text(plan.num_microbatches)]))
        files, _ = _write_stages(model, captured, plan, settings, work)
        return GenerateResult(plan, tuple(str(path) for path in files), tuple(work.notes))


def _write_stages(
    model: Model, captured: Capture, plan: Plan, settings: ProfileSettings, work: Work
) -> tuple[list[Path], str]:
    """Write the stage files of a plan and what they are made from. Return the files, and the note on evaluation."""
    files = generate_stages(captured, plan, work.store.stages)
    note = evaluation.record(model, plan, settings, work)
    record_stages(work.store.stages)
    record = StagesRecord(plan.graph_digest, plan.digest, model.graph.divisor, versions())
    artifact.save(record, work.store.stages_record)
    return files, note


def prepare(
    settings: PlanSettings, progress: Progress | None = None, accept: Callable[[Graph], None] | None = None
) -> Prepared:
    """Run every step that is missing or stale, and note each. The caller holds the lock of the work directory.

    ``accept``: called with the captured graph before anything is measured or written; raises to refuse it.

    Raises: RunError if the number of ranks is not known; the errors of ``accept`` and of the steps.
    """
    request_of(settings)  # refuses what cannot be read or is unknown, before anything is measured
    work = Work.begin(settings.work_dir, progress, elsewhere=settings.elsewhere)
    minibatch = minibatch_of(settings, work.load(Plan, work.store.plan))
    sizes = sizes_of(settings)
    settings = with_team(settings, work, sizes, minibatch)
    model, profile = ensure_profile(settings.profile, work, sizes, accept, minibatch)
    if not profile.graph.symbols and settings.num_microbatches is None is settings.microbatch_size:
        if minibatch is None:
            work.notes.append("each batch is one microbatch; --num-microbatches M splits it into more")
        settings = dataclasses.replace(settings, num_microbatches=1 if minibatch is None else minibatch.parts)
    plan, record = ensure_plan(model.workload, profile, settings, work)
    # a seed or learning rate that only this command names changes the training and not the plan
    plan = dataclasses.replace(plan, workload=model.workload.spec)
    reason = stale(stages_inputs(plan, model.graph.divisor, work))
    if reason:
        note = _write_stages(model, model.capture, plan, settings.profile, work)[1]
        work.notes.append(f"wrote {counted(len(plan.stages), 'stage file')} to {work.store.stages}: {reason}")
    else:
        work.notes.append("stage files reused")
        note = evaluation.note_of(model, work)
    return Prepared(
        workload=model.workload,
        graph=model.graph,
        profile=profile,
        record=record,
        plan=plan,
        stages=work.store.stages,
        notes=(*work.notes, model.workload.choice.note, *assumptions(record, plan)),
        warnings=(*model.notes, *filter(None, [profile.coupling.text(plan.num_microbatches)])),
        evaluation_note=note,
        max_shapes=settings.max_shapes,
        allow_data_dependent=settings.profile.allow_data_dependent,
        placeholders=model.built if has_placeholders(model.built) else None,
        unchanged=model.unchanged,
    )


def batch_size_of(workload: Workload, plan: Plan) -> int | None:
    """Return the batch size to request from the data; None if the data chooses its own."""
    return plan.batch_size if workload.takes_batch_size else None


def minibatch_of(settings: PlanSettings, stored: Plan | None) -> Minibatch | None:
    """Return the batch size and number of microbatches of the settings or the stored plan; None without either."""
    size = settings.batch_size or (None if stored is None else stored.batch_size)
    if settings.num_microbatches is not None:
        return Minibatch(settings.num_microbatches, size)
    if settings.microbatch_size is not None and size is not None:
        return Minibatch(-(-size // settings.microbatch_size), size)
    return None if stored is None else Minibatch(stored.num_microbatches, size)


def sizes_of(settings: PlanSettings) -> Sizes:
    """Return the microbatch sizes that the settings imply. They are measured, not interpolated."""
    exact: tuple[int, ...] = ()
    if settings.microbatch_size is not None:
        exact = (settings.microbatch_size,)
    elif settings.batch_size is not None and settings.num_microbatches:
        whole, left = divmod(settings.batch_size, settings.num_microbatches)
        exact = (whole, whole + 1) if whole and left else (max(whole, 1),)
    return Sizes(exact, settings.batch_size, quick=True)


def stages_inputs(plan: Plan, divisor: str, work: Work) -> Iterator[Input]:
    """Yield the inputs of the stored stage files, compared with a plan and the divisor of the loss, as text.

    The files count, too: they must exist, be as autopipe wrote them, and run.
    """
    stored = work.load(StagesRecord, work.store.stages_record)
    if stored is None:
        yield Input(None, plan, "none were stored")
        return
    yield Input(stored.graph_digest, plan.graph_digest, "the model changed ({written} -> {now})")
    yield Input(stored.plan_digest, plan.digest, "the plan changed ({written} -> {now})")
    yield Input(stored.divisor, divisor, "the divisor of the loss changed ({written} -> {now})")
    yield Input(stored.versions, versions(), "the version of autopipe, torch or Python changed")
    yield Input("", untrusted_stages(work.store.stages), "{now}")  # a file that another account can write is not run
    yield Input("", _broken_stages(plan, divisor, work.store.stages), "{now}")


def _broken_stages(plan: Plan, divisor: str, folder: Path) -> str:
    """Return why the stage files of a plan cannot be loaded, which runs them, or ""."""
    digests = {"graph_digest": plan.graph_digest, "plan_digest": plan.digest}
    try:
        for stage in plan.stages:
            load_stage(folder, stage.index, **digests)
        load_constants(folder)
        load_divisor(folder, divisor, **digests)
    except ArtifactError as error:
        return error.what
    return ""


def assumptions(record: PlanRecord, plan: Plan) -> tuple[str, ...]:
    """Return notes on the figures of a plan that were assumed and not measured, and on cores that its ranks share."""
    cores = record.cluster.cores
    if not 0 < cores < plan.num_ranks:
        return _assumed(record)
    turns = (
        f"{plan.num_ranks} ranks share the cores of this machine, which suffice for {cores:.3g} at a time: they take "
        "turns, and are not faster than that number"
    )
    return (turns, *_assumed(record))


def _assumed(record: PlanRecord) -> tuple[str, ...]:
    level, device = record.cluster.levels[0], record.cluster.devices[0]
    if device.datasheet:
        return (f"{device.name}: {record.cluster.source}", *_assumed_links(record))
    if record.cluster.source != "assumed":
        return _assumed_hosts(record)
    return (
        f"assumed: {in_bandwidth(level.bandwidth)} between ranks, {in_gib(device.memory_bytes)} per rank "
        "(--cluster, --gpu-memory and --link give other figures; autopipe doctor --links measures the links)",
        *_assumed_hosts(record),
    )


def _assumed_links(record: PlanRecord) -> tuple[str, ...]:
    level = record.cluster.levels[0]
    if level.name != "assumed":
        return ()
    return (
        f"assumed: {in_bandwidth(level.bandwidth)} between devices (--link or --cluster give another figure)",
        *_assumed_hosts(record),
    )


def _assumed_hosts(record: PlanRecord) -> tuple[str, ...]:
    inner, outer = record.cluster.levels[0], record.cluster.levels[-1]
    if outer.name != ASSUMED_HOSTS:
        return ()
    return (
        f"assumed: {counted(outer.count, 'host')} of {counted(inner.count, 'GPU')}, "
        f"{in_bandwidth(outer.bandwidth)} between them (--cluster gives other figures)",
    )
