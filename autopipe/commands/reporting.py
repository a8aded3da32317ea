"""``report``: a plan or a run as one HTML page. No torch, and no model file is read."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from autopipe import __version__
from autopipe.commands.inspecting.overview import locate
from autopipe.commands.planning.choose import with_averages
from autopipe.commands.settings import Progress, ReportSettings
from autopipe.commands.store import PlanRecord, Store, Work, profile_digest
from autopipe.errors import ArtifactError, RunError, counted
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.profile import Profile
from autopipe.ir.timeline import Timeline
from autopipe.planning import Comparison, Explanation
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.cost.predict import RunCosts, schedule_of
from autopipe.planning.search_space import Space
from autopipe.planning.teams import on_cluster
from autopipe.report.page import Subject, page_of, render
from autopipe.report.page.curves import history_of
from autopipe.report.page.timelines import Window, clocks_agree, typical_window
from autopipe.report.results import ReportResult
from autopipe.report.slower import Speed
from autopipe.runtime.job import Job, RunDirectory, read_rows
from autopipe.schedules import REGISTRY
from autopipe.units import in_bandwidth, in_bytes

PLAN = "plan"
_OVERLAPPING = 4  # minibatches to show of a schedule whose steps overlap
_SPILLED = 2  # of a spilled one, whose first finds nothing on the device
_FOLDERS = re.compile(r"(?<![^\s:=])(?:~[^\s:=/]*|\.{1,2})?/(?:[^\s:=]*/)?")
_RENEW_SPEED = "delete it, and the page does not compare the speeds"


def report(settings: ReportSettings, progress: Progress | None = None) -> ReportResult:
    """Write a page about a run, or about the stored plan.

    Raises: RunError if there is neither, or the run is not known; ArtifactError for a damaged file.
    """
    work = Work.begin(settings.work_dir, progress)
    run = _run(settings, work.store)
    subject = _of_plan(work) if run is None else _of_run(run, work)
    work.progress("drawing", 0.9)
    text = render(page_of(subject))
    if settings.output.is_dir():
        raise RunError(f"{settings.output} is a folder", remedy="name a file (-o report.html)")
    try:
        artifact.write_text(settings.output, text)
    except ArtifactError as error:
        raise RunError(f"{settings.output}: {error.what}", remedy="choose another -o") from None
    steps = max(subject.history.losses, default=0) if subject.history is not None else 0
    run_dir = "" if run is None else str(run.path)
    return ReportResult(str(settings.output), len(text.encode()), run_dir, steps, dict(subject.missing))


def _run(settings: ReportSettings, store: Store) -> RunDirectory | None:
    """Return the run to show, or None for the plan. Raises: RunError if it is not a run."""
    if settings.run == PLAN or (settings.run is None and not store.runs()):
        return None
    given = None if settings.run is None else Path(settings.run)
    return RunDirectory(store.runs()[-1] if given is None else locate(given, store.path)[1])


def _of_plan(work: Work) -> Subject:
    """Return the stored plan, without measurements."""
    store = work.store.newest
    plan, record = store.stored_plan()
    profile = on_cluster(store.stored_profile(), record.cluster)
    refuse_disagreement(plan, profile.graph)
    costs = RunCosts.of(plan, profile, record.cluster, {})
    subject = Subject(
        title=_short(profile.graph.name),
        plan=plan,
        graph=profile.graph,
        cluster=record.cluster,
        profile=profile,
        facts=(*_facts_of_plan(plan, costs), ("report written by", f"autopipe {__version__}")),
        missing=dict.fromkeys(("measured", "memory", "curves"), "this page is of a plan, which has not been trained"),
    )
    return _explained(_predicted(subject, costs), work, record)


def _of_run(run: RunDirectory, work: Work) -> Subject:
    """Return a run: its plan, what its files measured, and the prediction."""
    job, plan, graph = run.job(), run.plan(), run.graph()
    refuse_disagreement(plan, graph)
    history = history_of(read_rows(run.metrics))
    missing: dict[str, str] = {}
    if not history.attempts:
        missing["curves"] = "the run has not finished a step"
    if not history.peaks:
        missing["memory"] = "train with --measure-memory to measure it; ranks report it when they end"
    costs = _costs(run, plan)
    subject = Subject(
        title=_short(graph.name),
        plan=plan,
        graph=graph,
        cluster=None if costs is None else costs.cluster,
        facts=(),
        measured=_measured(run, plan, missing),
        history=history,
        missing=missing,
        slower=artifact.load(Speed, run.speed, renew=_RENEW_SPEED).line if run.speed.exists() else "",
    )
    own = Store(run.path.parent.parent) if run.path.resolve().parent.name == "runs" else work.store
    work = dataclasses.replace(work, store=own if own.plan.is_file() else work.store)
    profile, record, why = _origin(work.store, plan)
    if costs is None and profile is not None and record is not None:
        costs = RunCosts.of(plan, profile, record.cluster, {})
        subject = dataclasses.replace(subject, cluster=record.cluster)
    subject = dataclasses.replace(subject, facts=_facts_of_run(run, job, plan, costs))
    if costs is None:
        missing["predicted"] = f"the run has no costs.json, and {why}"
    else:
        subject = _predicted(subject, costs)
    if profile is None or record is None:
        missing["explanation"] = why
        return subject
    return _explained(dataclasses.replace(subject, profile=profile), work, record)


def _costs(run: RunDirectory, plan: Plan) -> RunCosts | None:
    """Return the costs that the run was predicted from; None if it has none, as runs of earlier versions.

    Raises: ArtifactError if they are damaged, or those of another plan.
    """
    if not run.costs.exists():
        return None
    renew = "delete it, and the page has no prediction; or train again"
    costs = artifact.load(RunCosts, run.costs, renew=renew)
    if costs.plan_digest != plan.digest or len(costs.stages) != len(plan.stages):
        raise ArtifactError("costs.json and plan.json do not belong together", where=str(run.costs), remedy=renew)
    return costs


def _origin(store: Store, plan: Plan) -> tuple[Profile | None, PlanRecord | None, str]:
    """Return the profile and the record of a run's plan, or why the work directory does not have them."""
    if not (store.profile.is_file() and store.record.is_file()):
        return None, None, f"{store.path} has no profile and plan"
    profile = artifact.load(Profile, store.profile, renew=store.renew(store.profile))
    record = artifact.load(PlanRecord, store.record, renew=store.renew(store.record))
    same = record.plan_digest == plan.digest and profile.graph.digest == plan.graph_digest
    if not same or record.profile_digest != profile_digest(profile):
        return None, None, f"the profile and the plan in {store.path} are now those of another run"
    return on_cluster(profile, record.cluster), record, ""


def _minibatches(plan: Plan) -> int:
    if REGISTRY[plan.schedule].spills:
        return _SPILLED
    return _OVERLAPPING if any(schedule_of(plan).staleness) else 1


def _predicted(subject: Subject, costs: RunCosts) -> Subject:
    count = _minibatches(subject.plan)
    note = "one minibatch, which begins with an empty pipeline"
    if count > 1:
        note = f"the first {count} minibatches, which begin with an empty pipeline"
    timeline = costs.timeline(subject.plan, subject.graph, count)
    return dataclasses.replace(subject, predicted=timeline, predicted_note=note)


def _measured(run: RunDirectory, plan: Plan, missing: dict[str, str]) -> Window | None:
    if not run.timeline.exists():
        missing["measured"] = "train with --timeline to record when each rank ran each instruction"
        return None
    renew = "train with --timeline again, or delete the file, and the page has no measured schedule"
    timeline = artifact.load(Timeline, run.timeline, renew=renew)
    stages, ranks = len(plan.stages), {span.rank for span in timeline.spans}
    if timeline.num_ranks != plan.num_processes or any(
        not 0 <= span.instruction.stage < stages for span in timeline.spans
    ):
        missing["measured"] = "timeline.json is of an earlier attempt with another plan"
        return None
    if ranks and not ranks <= set(range(timeline.num_ranks)):
        raise ArtifactError(
            f"timeline.json is damaged: it has {counted(timeline.num_ranks, 'rank')}, and spans of rank {max(ranks)}",
            where=str(run.timeline),
            remedy=renew,
        )
    window = typical_window(timeline, _minibatches(plan))
    if window is None:
        missing["measured"] = "timeline.json contains no minibatch that all ranks have finished"
    elif not clocks_agree(window.timeline):
        missing["measured"] = "the clocks of its ranks differ, so that they cannot be drawn on one time scale"
        return None
    return window


def _explained(subject: Subject, work: Work, record: PlanRecord) -> Subject:
    """Add the reasons for the plan, and the plans that it was compared with."""
    plan, cluster = subject.plan, record.cluster
    assert subject.profile is not None
    profile = with_averages(subject.profile, record.request)
    space = Space.of(
        record.request,
        record.request.gpus or plan.num_ranks,
        plan.batch_size,
        links_known=cluster.source != "assumed",
    )
    work.progress("comparing with other plans", 0.2)
    comparison: Comparison = compare_plan(plan, profile, cluster, space)
    work.progress("explaining the plan", 0.6)
    explanation: Explanation = explain_plan(plan, profile, cluster, space)
    return dataclasses.replace(subject, comparison=comparison, explanation=explanation)


def _short(text: str) -> str:
    """Return a text without the folders of paths in it, which may contain the name of a user or a host."""
    return _FOLDERS.sub("", text)


def _facts_of_plan(plan: Plan, costs: RunCosts | None, optimizer: str = "") -> tuple[tuple[str, str], ...]:
    spec = plan.workload
    facts = [("model", _short(spec.target))]
    facts += [(f"argument {name}", _short(str(value))) for name, value in sorted(spec.arguments.items())]
    facts += [(name, _short(text)) for name, text in sorted(spec.hooks.items())]
    facts += [
        ("batch", f"{plan.batch_size} samples, {counted(plan.num_microbatches, 'microbatch')}"),
        ("schedule", " ".join((plan.schedule, *(f"{key}={value}" for key, value in plan.schedule_options.items())))),
        ("precision", spec.precision),
        ("seed", str(spec.seed)),
        ("optimizer", optimizer or spec.optimizer or "that of the model file, else AdamW"),
        ("learning rate", "that of the optimizer" if spec.lr is None else f"{spec.lr:g}"),
        ("digest of the model", plan.graph_digest),
        ("digest of the plan", plan.digest),
    ]
    if costs is not None:
        cluster = costs.cluster
        names = dict.fromkeys(device.name for device in cluster.devices)
        memory = [device.memory_bytes for device in cluster.devices]
        limit = f", {in_bytes(min(memory))} each" if all(memory) else ""
        facts.append(("devices", f"{counted(plan.num_processes, 'rank')}: {', '.join(names)}{limit}"))
        links = ", ".join(f"{_short(level.name)} {in_bandwidth(level.bandwidth)}" for level in cluster.levels)
        facts.append(("links", f"{links} ({_short(cluster.source)})"))
    return tuple(facts)


def _facts_of_run(run: RunDirectory, job: Job, plan: Plan, costs: RunCosts | None) -> tuple[tuple[str, str], ...]:
    versions = costs.versions if costs is not None else {}
    length = f"{job.steps} steps" if job.steps else counted(job.epochs, "epoch")
    options = {
        "clip_grad_norm": f"{job.clip_grad_norm:g}" if job.clip_grad_norm else "",
        "evaluate_every": str(job.evaluate_every or ""),
        "audit_every": str(job.audit_every or ""),
        "ema": f"{job.ema:g}" if job.ema else "",
        "compile": "yes" if job.compile else "",
        "on_nonfinite": job.on_nonfinite if job.on_nonfinite != "stop" else "",
    }
    return (
        ("run", run.path.resolve().name),
        ("length", length),
        *_facts_of_plan(plan, costs, job.chosen_optimizer),
        ("device", f"{job.device}, {counted(job.threads, 'thread')} each" if job.device == "cpu" else job.device),
        *((name.replace("_", " "), value) for name, value in options.items() if value),
        *_trained_with(versions.items()),
        ("report written by", f"autopipe {__version__}, Python {platform.python_version()}"),
    )


def _trained_with(versions: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    text = ", ".join(f"{name} {version}" for name, version in versions)
    return (("trained with", text or "not recorded"),)
