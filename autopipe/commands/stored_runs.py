"""Use a run that has a checkpoint: find it, load its model, evaluate it in stages."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from autopipe.commands.evaluation import record, refuse_impossible
from autopipe.commands.inspecting.overview import locate, without_runs
from autopipe.commands.models import Model
from autopipe.commands.settings import EvaluateSettings, Events, ModelSettings, ProfileSettings, ignore_event
from autopipe.commands.store import Store, Work
from autopipe.commands.training.checkpoints import refuse_other_parameters, refuse_without_averages, skeleton
from autopipe.commands.training.listener import Listener
from autopipe.commands.trusted_code import refuse_untrusted, untrusted_stages
from autopipe.errors import RunError
from autopipe.generate import generate
from autopipe.ir.teams.axis_sets import choose
from autopipe.launch.registry import run_ranks
from autopipe.launch.request import LaunchRequest
from autopipe.measure.on_device import described_as
from autopipe.report.results import EvaluateResult
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.job import RunDirectory
from autopipe.trace import capture
from autopipe.trace.axes import find_axes
from autopipe.trace.teams import member_of
from autopipe.workload import Workload
from autopipe.workload.target.targets import in_full


def find_run(given: Path | None, work_dir: Path) -> Path:
    """Return the given run, by its name or directory, or the newest of the work directory that has a checkpoint.

    Raises: RunError without such a run.
    """
    if given is not None:
        return locate(given, work_dir)[1]
    store = Store(work_dir)
    with_checkpoint = [path for path in store.runs() if checkpoints.steps(RunDirectory(path).checkpoints)]
    if not with_checkpoint:
        raise RunError(without_runs(work_dir, "run with a checkpoint"), remedy="autopipe train TARGET --gpus N")
    return with_checkpoint[-1]


def model_of(
    run: RunDirectory, named: ModelSettings, command: str, *, hooks: Collection[str] | None = None
) -> Workload:
    """Load the model of a run: the one that the options name again, else the one of the run's plan.

    ``hooks``: the hooks to load; None for all.

    Raises: RunError if another account can write what the run names; ModelFileError as ``Workload``.
    """
    spec = run.plan().workload
    if hooks is not None:
        spec = dataclasses.replace(spec, hooks={name: text for name, text in spec.hooks.items() if name in hooks})
    if named.is_given:
        spec = dataclasses.replace(spec, target=named.target, arguments=dict(named.arguments), hooks=dict(named.hooks))
    else:
        spec = dataclasses.replace(spec, hooks=spec.hooks | named.hooks)
        by_flag = command != "plain"  # which takes a run or a model in the same place
        words = f"autopipe {command} {shlex.quote(str(run.path))}" if by_flag else f"autopipe {command}"
        flag = "--target" if by_flag else ""
        refuse_untrusted(spec, run.path / "plan.json", words, flag=flag, named=set(named.hooks))
    return Workload.from_spec(spec)


def evaluate(settings: EvaluateSettings, events: Events | None = None) -> EvaluateResult:
    """Run the evaluation data through the stages of a run, from its newest checkpoint.

    Raises: RunError if the stages cannot evaluate, or the run's code is not the user's; ModelFileError if the data is
    missing.
    """
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    job, plan = run.job(), run.plan()
    step = checkpoints.steps(run.checkpoints)[-1:]
    if not step:
        raise RunError(f"there is no checkpoint in {run.checkpoints}", remedy="autopipe train")
    named = settings.model
    if settings.data is not None:
        named = dataclasses.replace(named, hooks={**named.hooks, "evaluate_data": settings.data})
    workload = model_of(run, named, "eval")
    remedy = "autopipe export, and evaluate the model itself"
    refuse_impossible(workload, job.evaluation_note, settings.batch_size, remedy)
    source = Checkpoint(checkpoints.directory_of(run.checkpoints, step[0]))
    source.verify()
    if settings.averaged:
        refuse_without_averages(source)
    refuse_other_parameters(run.graph(), skeleton(workload), run.path)
    with tempfile.TemporaryDirectory(prefix="autopipe-eval-") as scratch:
        as_trained = run
        if settings.model != ModelSettings():
            as_trained = _with_own_stages(run, workload, Path(scratch))
        elif reason := untrusted_stages(run.stages):
            raise RunError(
                f"the stage files of this run are not run: {reason}",
                where=str(run.stages),
                remedy="give the model, and they are written again: "
                f"autopipe eval {shlex.quote(str(run.path))} --target {shlex.quote(plan.workload.target)}",
            )
        listener = Listener(as_trained, events or ignore_event, plan.num_processes)
        start = time.time()
        run_ranks(
            LaunchRequest(
                run=as_trained,
                world_size=plan.num_processes,
                on_event=listener,
                body="evaluate",
                batch_size=settings.batch_size or 0,
                evaluation_data=settings.data or "",
                averaged=settings.averaged,
            )
        )
    totals = listener.evaluation
    return EvaluateResult(
        loss=totals["loss"],
        samples=totals["samples"],
        batches=totals["batches"],
        seconds=time.time() - start,
        run_dir=str(run.path),
        step=step[0],
    )


def _with_own_stages(run: RunDirectory, workload: Workload, scratch: Path) -> RunDirectory:
    """Return a copy of a run, with stage files generated from the model that the user has named.

    Raises: RunError if it is not the model of the run.
    """
    job, plan, graph = run.job(), run.plan(), run.graph()
    lengths = len(graph.symbols) > 1
    built = workload.build_model()
    captured = capture(
        workload, model=built, allow_data_dependent=job.allow_data_dependent, verify=False, lengths=lengths
    )
    if plan.team > 1:
        axes = choose(captured.graph, find_axes(captured).axes, plan.team)
        captured = member_of(captured, axes, plan.team, sequence=plan.workload.sequence)
    # an evaluation takes no optimizer steps: the after_step hook need not be named again
    now, before = (dataclasses.replace(one, after_step={}) for one in (captured.graph, graph))
    if now.digest != before.digest:
        raise RunError(
            f"{workload.name} is not the model of this run: its digest is {captured.graph.digest}, and that of the "
            f"run's model is {graph.digest}",
            where=str(run.path),
            remedy="give --target the model file as it was when the run started, and the same --arg",
        )
    captured = dataclasses.replace(captured, graph=dataclasses.replace(now, after_step=graph.after_step))
    captured = described_as(graph, captured)
    plan = dataclasses.replace(plan, workload=in_full(workload.spec))
    settings = ProfileSettings(
        ModelSettings(), device=job.device, allow_data_dependent=job.allow_data_dependent, verify=False
    )
    work = Work.begin(scratch, None)
    generate(captured, plan, work.store.stages)
    record(Model.of(workload, captured, built), plan, settings, work)
    copy = RunDirectory(scratch)
    copy.write(job, plan, graph)
    copy.checkpoints.symlink_to(run.checkpoints.resolve())
    return copy
