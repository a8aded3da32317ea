"""What can be done with a run that has a checkpoint: find it, evaluate it in its stages."""

from __future__ import annotations

import time
from pathlib import Path

from autopipe.errors import RunError
from autopipe.launch.registry import launch
from autopipe.launch.request import Launch
from autopipe.runtime import checkpoint as checkpoints
from autopipe.runtime.job import RunDirectory
from autopipe.workflow.evaluation import refuse_impossible
from autopipe.workflow.listener import Listener
from autopipe.workflow.results import EvaluateResult
from autopipe.workflow.resuming import refuse_other_parameters, skeleton
from autopipe.workflow.settings import EvaluateSettings, Events
from autopipe.workload import Workload


def find_run(given: Path | None, work_dir: Path) -> Path:
    """Return the run that is meant: the one given, or the newest of the work directory that has a checkpoint.

    Raises: RunError where there is none.
    """
    if given is not None:
        if not (given / "job.json").is_file():
            raise RunError(f"{given} is no run: it has no job.json", remedy="name a directory that autopipe train made")
        return given
    runs = work_dir / "runs"
    candidates = sorted(path for path in runs.iterdir() if (path / "job.json").is_file()) if runs.is_dir() else []
    with_checkpoint = [path for path in candidates if checkpoints.steps(RunDirectory(path).checkpoints)]
    if not with_checkpoint:
        raise RunError(f"there is no finished run in {runs}", remedy="autopipe train TARGET --gpus N")
    return with_checkpoint[-1]


def evaluate(settings: EvaluateSettings, events: Events | None = None) -> EvaluateResult:
    """Run the evaluation data through the stages of a run, from its newest checkpoint.

    Raises: RunError where the stages cannot evaluate, with the reason; ModelFileError where the data is missing.
    """
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    job, plan = run.job(), run.plan()
    step = checkpoints.steps(run.checkpoints)[-1:]
    if not step:
        raise RunError(f"there is no checkpoint in {run.checkpoints}", remedy="autopipe train")
    spec = plan.workload if settings.data is None else plan.workload.with_hook("evaluate_data", settings.data)
    workload = Workload.from_spec(spec)
    remedy = "autopipe export, and evaluate the model itself"
    refuse_impossible(workload, job.evaluation_note, settings.batch_size, remedy)
    checkpoints.Checkpoint(checkpoints.directory_of(run.checkpoints, step[0])).verify()
    refuse_other_parameters(run.graph(), skeleton(workload), run.path)
    listener = Listener(run, events or (lambda kind, fields: None), plan.num_ranks)
    start = time.time()
    launch(
        Launch(
            run,
            plan.num_ranks,
            listener,
            body="evaluate",
            batch_size=settings.batch_size or 0,
            evaluation_data=settings.data or "",
        )
    )
    found = listener.evaluation
    return EvaluateResult(
        loss=found["loss"],
        samples=found["samples"],
        batches=found["batches"],
        seconds=time.time() - start,
        run_dir=str(run.path),
        step=step[0],
    )
